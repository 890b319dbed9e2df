"""Speculative decoding: tokens are guessed, and one run of the decoder judges several guesses.

Nothing is lost by it. The decoder gives the distribution after every guess, a token is chosen from each with the
answer's own stream of numbers, as without guesses, and a guess only decides whether the next distribution may be used.
Who guesses: `PromptLookup` repeats what followed the last words where they stood before (Saxena 2023, "Prompt Lookup
Decoding"); `DraftModel` asks a smaller model of the same vocabulary (Leviathan et al. 2023, arXiv 2211.17192).
`Payoff` measures whether it is faster, and decides.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol

import numpy as np

from llmforge.runtime.backends.interface import Backend, C

# Guesses of one step. More pay only where nearly all are right, and each costs about a row of a prefill. With the token
# before them they are 8, the most for which our own attention adds as it does for one (FEW_QUERIES, native/impl.inc).
MOST_DRAFTED = 7


class Proposer(Protocol):
    """Guesses how texts go on. A text is named by a key, and only grows from call to call."""

    def propose(self, key: Hashable, tokens: Sequence[int], most: int) -> list[int]:
        """Guess up to `most` tokens (1 or more) that follow `tokens`; none where there is no guess."""

    def forget(self, key: Hashable) -> None:
        """Free what is kept for a text, if anything is."""


@dataclass
class _Seen:
    """Where each pair and triple of a text's tokens ended last, before the end of the text."""

    indexed: int = 0  # tokens that `places` speaks of
    places: dict[tuple[int, ...], int] = field(default_factory=dict)


class PromptLookup:
    """Guesses what followed the last three tokens, or else the last two, where the text had them before."""

    LONGEST, SHORTEST = 3, 2  # one token alone stands everywhere: its guesses are rarely right

    def __init__(self) -> None:
        self._texts: dict[Hashable, _Seen] = {}

    def propose(self, key: Hashable, tokens: Sequence[int], most: int) -> list[int]:
        """Guess from the latest earlier place; takes time in proportion to the tokens that are new to it."""
        seen = self._texts.setdefault(key, _Seen())
        for end in range(max(seen.indexed, 1), len(tokens)):  # what ends at the text's own end is looked for, not kept
            for n in range(self.SHORTEST, min(self.LONGEST, end) + 1):
                seen.places[tuple(tokens[end - n : end])] = end
        seen.indexed = len(tokens)
        for n in range(self.LONGEST, self.SHORTEST - 1, -1):
            place = seen.places.get(tuple(tokens[-n:]))
            if place is not None:
                return list(tokens[place : place + most])
        return []

    def forget(self, key: Hashable) -> None:
        """Drop the places of a text."""
        self._texts.pop(key, None)


@dataclass
class _Followed:
    """A text in the cache of a draft model: its first `read` tokens, and behind them guesses that may be wrong."""

    row: int
    read: int = 0
    guessed: list[int] = field(default_factory=list)


class DraftModel(Generic[C]):
    """Guesses the most probable tokens of a smaller decoder, which keeps its own cache of each text.

    Args:
        backend: the smaller decoder; its `reuse_obstacle` must be None, since guesses are taken back.
        vocabulary: logits of the larger one. The two may be padded to different sizes; no token beyond either is used.
        rows: texts that it can follow at once; it has no guesses for others.
        capacity: tokens of the longest text.
        chunk: tokens of a text that it reads at once.
    """

    def __init__(self, backend: Backend[C], vocabulary: int, rows: int, capacity: int, chunk: int) -> None:
        if backend.reuse_obstacle is not None:
            raise ValueError(f"guesses of this model cannot be taken back: {backend.reuse_obstacle}")
        self._backend = backend
        self._vocabulary = min(vocabulary, backend.vocabulary)
        self._cache = backend.allocate(rows, capacity)
        self._chunk = chunk
        self._free = list(range(rows))
        self._texts: dict[Hashable, _Followed] = {}

    def propose(self, key: Hashable, tokens: Sequence[int], most: int) -> list[int]:
        """Read what is new of the text, and decode greedily."""
        most = min(most, self._cache.capacity - len(tokens) + 1)
        if most < 1 or not (key in self._texts or self._free) or max(tokens) >= self._vocabulary:
            return []
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = _Followed(self._free.pop())
        right = zip(text.guessed, tokens[text.read :], strict=False)
        held = text.read + next((i for i, (guess, token) in enumerate(right) if guess != token), len(text.guessed))
        held = min(held, len(tokens) - 1)  # the last token runs again where it was guessed: its logits are wanted
        for start in range(held, len(tokens), self._chunk):
            best = self._run(text.row, tokens[start : start + self._chunk], start)
        guesses = [best]
        for past in range(len(tokens), len(tokens) + most - 1):
            guesses.append(self._run(text.row, guesses[-1:], past))
        text.read, text.guessed = len(tokens), guesses[:-1]
        return guesses

    def forget(self, key: Hashable) -> None:
        """Free the row of a text."""
        text = self._texts.pop(key, None)
        if text is not None:
            self._free.append(text.row)

    def _run(self, row: int, tokens: Sequence[int], past: int) -> int:
        """Run `tokens` behind the `past` ones that `row` holds; return the most probable next token."""
        ids, view = np.array([tokens], np.int64), self._cache.rows(row, row + 1)
        return int(self._backend.step(ids, np.array([past], np.int32), view)[0, 0, : self._vocabulary].argmax())


class _Recent:
    """The last few values of something that is measured."""

    def __init__(self, *values: float) -> None:
        self._values: deque[float] = deque(values, maxlen=9)

    def add(self, value: float) -> None:
        self._values.append(value)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self._values) if self._values else None

    @property
    def median(self) -> float | None:
        """What a time is told by: a step that the machine interrupted says nothing about the next one."""
        return statistics.median(self._values) if self._values else None


class Payoff:
    """Decides whether guesses are judged or left, by what both ways were measured to take.

    A step in which `n` answers decode takes `T(n)` seconds and gives `n` tokens. Taking one of them out to judge `k`
    guesses takes `T(n - 1) + V(k)`, and gives `n - 1 + e` tokens, `e` those that an answer got from a judgement so far.
    Guesses are judged where that is more tokens a second. What is not known yet is measured: `T(n)` first, then a `V`;
    for another `k` the nearest one known stands in.
    Answers and machines change, so one time in `PROBE` the other way is taken. `always`: everything is judged.
    """

    PROBE = 32

    def __init__(self, *, always: bool = False) -> None:
        self._always = always
        self._decode_s: defaultdict[int, _Recent] = defaultdict(_Recent)  # by answers in the step
        self._judge_s: defaultdict[int, _Recent] = defaultdict(_Recent)  # by guesses
        self._gained: dict[Hashable, _Recent] = {}  # tokens of a judgement, by answer
        self._gained_by_all = _Recent()
        self._since_judged = 0  # times that guesses were left since any were judged
        self._since_decoded = 0  # judgements since a step decoded all its answers together

    def pays(self, key: Hashable, guesses: int, rows: int) -> bool:
        """Say whether to judge `guesses` of the answer `key` apart from the `rows - 1` others that decode."""
        if self._always:
            return True
        if self._estimate(key, guesses, rows):
            return self._since_decoded < self.PROBE
        self._since_judged += 1
        return self._since_judged >= self.PROBE and self._decode_s[rows].median is not None

    def _estimate(self, key: Hashable, guesses: int, rows: int) -> bool:
        together = self._decode_s[rows].median
        if together is None:
            return False
        if not self._judge_s:
            return True
        nearest = min(self._judge_s, key=lambda known: abs(known - guesses))
        judged = self._judge_s[nearest].median
        assert judged is not None
        others = 0.0 if rows == 1 else self._decode_s[rows - 1].median or together
        own = self._gained.get(key, self._gained_by_all).mean
        gained = 1.0 if own is None else min(own, 1 + guesses)
        return (rows - 1 + gained) / (others + judged) > rows / together

    def decoded(self, rows: int, seconds: float) -> None:
        """Take note of a step that decoded `rows` answers."""
        self._decode_s[rows].add(seconds)
        self._since_decoded = 0

    def judged(self, key: Hashable, guesses: int, tokens: int, seconds: float) -> None:
        """Take note that judging `guesses` of the answer `key` gave it `tokens` tokens (1 or more)."""
        self._judge_s[guesses].add(seconds)
        self._since_judged = 0
        self._since_decoded += 1
        self._gained_by_all.add(tokens)
        self._gained.setdefault(key, _Recent()).add(tokens)

    def forget(self, key: Hashable) -> None:
        """Drop what is known of an answer that has ended."""
        self._gained.pop(key, None)


@dataclass
class Speculation:
    """Who guesses, how much, and whether it is worth it."""

    proposer: Proposer
    payoff: Payoff = field(default_factory=Payoff)
    most: int = MOST_DRAFTED

    def propose(self, key: Hashable, tokens: Sequence[int], most: int, rows: int) -> list[int]:
        """Guess up to `most` tokens for one of `rows` answers that decode; none where they would not pay."""
        most = min(most, self.most)
        if most < 1 or not self.payoff.pays(key, most, rows):
            return []
        return self.proposer.propose(key, tokens, most)

    def forget(self, key: Hashable) -> None:
        """Free what is kept for an answer that has ended."""
        self.proposer.forget(key)
        self.payoff.forget(key)
