"""Speculative decoding: tokens are drafted, and one run of the decoder verifies several of them.

Nothing is lost by it. The decoder gives the distribution after every drafted token, a token is sampled from each with
the sequence's own random numbers, as without a draft, and the draft only decides whether the next distribution may be
used. Who drafts: `PromptLookup` repeats what followed the last words where they stood before (Saxena 2023, "Prompt
Lookup Decoding"); `DraftModel` asks a smaller model of the same vocabulary (Leviathan et al. 2023, arXiv 2211.17192);
`heads.DraftHead` a layer that reads what the decoder computed.
`Payoff` measures whether it is faster, and decides.
"""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

import numpy as np

from llmforge.runtime.config import MOST_DRAFT_TOKENS
from llmforge.runtime.interface import C, Decoder, StepInputs
from llmforge.serving.heads import DraftHead


class Proposer(Protocol):
    """Drafts how texts go on. A text is named by a key, and only grows from call to call."""

    def propose(self, key: Hashable, tokens: Sequence[int], most: int) -> list[int]:
        """Draft up to `most` tokens (1 or more) that follow `tokens`; none where nothing is known."""

    def forget(self, key: Hashable) -> None:
        """Free what is kept for a text, if anything is."""


@dataclass
class _NgramIndex:
    """Where each pair and triple of a text's tokens ended last, before the end of the text."""

    indexed_tokens: int = 0
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)


class PromptLookup:
    """Drafts what followed the last three tokens, or else the last two, where the text had them before."""

    LONGEST, SHORTEST = 3, 2  # one token alone stands everywhere: what followed it is rarely right

    def __init__(self) -> None:
        self._texts: dict[Hashable, _NgramIndex] = {}

    def propose(self, key: Hashable, tokens: Sequence[int], most: int) -> list[int]:
        """Draft from the latest earlier match; takes time in proportion to the tokens that are new to it."""
        index = self._texts.setdefault(key, _NgramIndex())
        for end in range(max(index.indexed_tokens, 1), len(tokens)):  # the end of the text itself is no match
            for n in range(self.SHORTEST, min(self.LONGEST, end) + 1):
                index.ends[tuple(tokens[end - n : end])] = end
        index.indexed_tokens = len(tokens)
        for n in range(self.LONGEST, self.SHORTEST - 1, -1):
            match = index.ends.get(tuple(tokens[-n:]))
            if match is not None:
                return list(tokens[match : match + most])
        return []

    def forget(self, key: Hashable) -> None:
        """Drop the index of a text."""
        self._texts.pop(key, None)


@dataclass
class _DraftText:
    """A text in the cache of a draft model: its first tokens, and after them drafted ones that may be wrong."""

    row: int
    computed_tokens: int = 0
    drafted: list[int] = field(default_factory=list)


class DraftModel(Generic[C]):
    """Drafts the most probable tokens of a smaller decoder, which keeps its own cache of each text.

    Args:
        backend: the smaller decoder; `Signature.no_reuse_reason` must be None, since drafted tokens are taken back.
        vocabulary: logits of the larger one. The two may be padded to different sizes; no token beyond either is used.
        rows: texts that it can follow at once; it has no drafts for others.
        capacity: tokens of the longest text.
        chunk: tokens of a text that it reads at once.
    """

    def __init__(self, backend: Decoder[C], vocabulary: int, rows: int, capacity: int, chunk: int) -> None:
        if (reason := backend.signature.no_reuse_reason) is not None:
            raise ValueError(f"this model cannot discard draft tokens: {reason}")
        self._backend = backend
        self._vocabulary = min(vocabulary, backend.vocabulary)
        self._cache = backend.allocate(rows, capacity)
        self._chunk = chunk
        self._free = list(range(rows))
        self._texts: dict[Hashable, _DraftText] = {}

    def propose(self, key: Hashable, tokens: Sequence[int], most: int) -> list[int]:
        """Read what is new of the text, and decode greedily."""
        most = min(most, self._cache.capacity - len(tokens) + 1)
        if most < 1 or not (key in self._texts or self._free) or max(tokens) >= self._vocabulary:
            return []
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = _DraftText(self._free.pop())
        pairs = enumerate(zip(text.drafted, tokens[text.computed_tokens :], strict=False))
        valid = text.computed_tokens + next((i for i, (guess, token) in pairs if guess != token), len(text.drafted))
        valid = min(valid, len(tokens) - 1)  # the last token runs again where it was drafted: its logits are wanted
        for start in range(valid, len(tokens), self._chunk):
            best = self._run(text.row, tokens[start : start + self._chunk], start)
        draft = [best]
        for past in range(len(tokens), len(tokens) + most - 1):
            draft.append(self._run(text.row, draft[-1:], past))
        text.computed_tokens, text.drafted = len(tokens), draft[:-1]
        return draft

    def forget(self, key: Hashable) -> None:
        """Free the row of a text."""
        text = self._texts.pop(key, None)
        if text is not None:
            self._free.append(text.row)

    def _run(self, row: int, tokens: Sequence[int], past: int) -> int:
        """Run `tokens` after the `past` ones that `row` holds; return the most probable next token."""
        ids, view = np.array([tokens], np.int64), self._cache.rows(row, row + 1)
        return int(
            self._backend.step(StepInputs(ids, np.array([past], np.int32)), view)[0, 0, : self._vocabulary].argmax()
        )


# Makes what holds the last few values of something that is measured.
_window = functools.partial(deque[float], maxlen=9)


class Payoff:
    """Decides whether drafts are made and verified, by what both ways were measured to take.

    A step in which `n` sequences decode takes `T(n)` seconds and gives `n` tokens. Taking one of them out to verify a
    draft of `k` tokens takes `T(n - 1) + V(k)`, and gives `n - 1 + e` tokens, `e` those that a sequence got from a
    verification so far. Drafts are verified where that is more tokens a second. What is not known yet is measured:
    `T(n)` first, then a `V`; for another `k` the nearest one known stands in.
    Sequences and machines change, so one time in `PROBE` the other way is taken.
    """

    PROBE = 32

    def __init__(self) -> None:
        # Medians tell these times: a step that the machine interrupted says nothing about the next one.
        self._decode_s: defaultdict[int, deque[float]] = defaultdict(_window)  # by sequences in the step
        self._verify_s: defaultdict[int, deque[float]] = defaultdict(_window)  # by drafted tokens
        self._gained: dict[Hashable, deque[float]] = {}  # tokens of a verification, by sequence
        self._gained_by_all = _window()
        self._since_verified = 0  # times that a draft was not asked for since one was verified
        self._since_decoded = 0  # verifications since a step decoded all its sequences together

    def pays(self, key: Hashable, drafted: int, rows: int) -> bool:
        """Say whether to verify `drafted` tokens of the sequence `key` apart from the `rows - 1` others that decode."""
        if self._estimate(key, drafted, rows):
            return self._since_decoded < self.PROBE
        self._since_verified += 1
        return self._since_verified >= self.PROBE and bool(self._decode_s[rows])

    def _estimate(self, key: Hashable, drafted: int, rows: int) -> bool:
        if not self._decode_s[rows]:
            return False
        if not self._verify_s:
            return True
        all_rows_s = statistics.median(self._decode_s[rows])
        verify = statistics.median(self._verify_s[min(self._verify_s, key=lambda known: abs(known - drafted))])
        others = 0.0 if rows == 1 else statistics.median(self._decode_s[rows - 1] or self._decode_s[rows])
        own = self._gained.get(key, self._gained_by_all)
        gained = min(statistics.fmean(own), 1 + drafted) if own else 1.0
        return (rows - 1 + gained) / (others + verify) > rows / all_rows_s

    def decoded(self, rows: int, seconds: float) -> None:
        """Take note of a step that decoded `rows` sequences."""
        self._decode_s[rows].append(seconds)
        self._since_decoded = 0

    def verified(self, key: Hashable, drafted: int, tokens: int, seconds: float) -> None:
        """Take note that verifying `drafted` tokens of the sequence `key` gave it `tokens` tokens (1 or more)."""
        self._verify_s[drafted].append(seconds)
        self._since_verified = 0
        self._since_decoded += 1
        self._gained_by_all.append(tokens)
        self._gained.setdefault(key, _window()).append(tokens)

    def forget(self, key: Hashable) -> None:
        """Drop what is known of a sequence that has ended."""
        self._gained.pop(key, None)


@dataclass
class Speculation:
    """Who drafts, how many tokens, and whether it is worth it."""

    proposer: Proposer
    payoff: Payoff = field(default_factory=Payoff)
    max_tokens: int = MOST_DRAFT_TOKENS

    def propose(self, key: Hashable, tokens: Sequence[int], most: int, rows: int) -> list[int]:
        """Draft up to `most` tokens for one of `rows` sequences that decode; none where they would not pay."""
        most = min(most, self.max_tokens)
        if most < 1 or not self.payoff.pays(key, most, rows):
            return []
        return self.proposer.propose(key, tokens, most)

    def observe(
        self, key: Hashable, tokens: Sequence[int], past: int, backend: Decoder[Any], row: int, count: int | None = None
    ) -> None:
        """Tell a head that drafts what the last step of `backend` computed of places `past` … of a text.

        They were the first `count` tokens of a `row` of the step; None: all.
        """
        if isinstance(self.proposer, DraftHead):
            if backend.hidden_states is None:
                raise ValueError("a head drafts, and the decoder gives no hidden states")
            self.proposer.observe(key, tokens, past, backend.hidden_states[row, :count])

    def forget(self, key: Hashable) -> None:
        """Free what is kept for a sequence that has ended."""
        self.proposer.forget(key)
        self.payoff.forget(key)
