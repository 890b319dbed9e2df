"""Promises of a build about lengths and positions, and the steps that show whether a graph keeps it.

Promises come from the checkpoint's configuration and the recipe, never from a graph that is on trial.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.checkpoint import Checkpoint
from llmforge.runtime.prefill_shapes import PREFILL_CHUNK
from llmforge.verification.probe import ProbeCall

_SEED = 20_240_301  # any fixed number: steps must be the same in every build
_NUMBERS = 20_240_229  # likewise, of the numbers that steps are fed
_FEW, _SOME = 2, 16  # tokens of a short step, and of one that crosses borders
ROWS = 16  # of a batch: kernels treat no more than a row, or a handful of them, in a way of its own
_LOGITS_ROWS = 7  # of the longest step, besides its last: each costs the vocabulary
_VOCABULARY_CHUNK = 1024  # token ids that are looked up in one step


@dataclass(frozen=True)
class Promises:
    """The largest requests that an engine serves, and the lengths where its model begins to compute differently."""

    context: int  # tokens of prompt and answer together
    batch: int  # sequences at a time, of which `ROWS` are run
    vocabulary: int
    borders: tuple[int, ...] = ()  # attention windows, chunks and borders of rotary embedding, in tokens
    chunk: int = PREFILL_CHUNK  # tokens of a prompt that run at once, at most

    @classmethod
    def of(cls, checkpoint: Checkpoint, max_context: int, max_batch: int) -> Promises:
        """Read the borders off the configuration of `checkpoint`; the rest is what its recipe asks for.

        A batch counts as no smaller than `ROWS`: then a recipe that asks for another one finds its proofs made.
        """
        borders = {tokens for _, tokens in checkpoint.configuration.lengths if tokens < max_context}
        return cls(max_context, max(max_batch, ROWS), checkpoint.geometry.vocabulary, tuple(sorted(borders)))


@dataclass(frozen=True, eq=False)
class SyntheticStep:
    """One step by itself: what its caches hold before it is made up, so that any position costs no more than the step.

    `scaled`: tokens have magnitudes from a thousandth to a thousand times the usual; `alike`: all have the same
    numbers, and rows the same caches.
    """

    name: str
    step: ProbeCall
    scaled: bool = False
    rows: NDArray[np.int64] | None = None  # of the step that get logits; None: all
    alike: bool = False
    seed: int = _NUMBERS  # of the numbers that it is fed

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self.step.ids)

    @property
    def capacity(self) -> int:
        """Slots that the cache needs: the longest row, padding included."""
        return int(self.step.past.max()) + int(self.step.ids.shape[1])

    @property
    def where(self) -> str:
        """Describe it for a message."""
        past = self.step.past.tolist()
        after = past if len(past) < 4 else f"{min(past)} … {max(past)}"
        rows = f"{len(past)} rows of " if len(past) > 1 else ""
        return f"{self.name} ({rows}{self.step.ids.shape[1]} tokens after {after})"


def first(promises: Promises) -> SyntheticStep:
    """Make the smallest step that all arithmetic shows in: two tokens behind a few."""
    return place("two tokens", promises, np.random.default_rng(_SEED), [2], [min(5, promises.context - 2)])


def few(promises: Promises, tokens: int, *, ends: bool) -> list[SyntheticStep]:
    """Make the smallest steps, of `tokens`, of which two do: behind a few, and with `ends` at the end of the context.

    A step has no more tokens than a chunk of a prompt.
    """
    made = [first(promises)]
    count = min(tokens, promises.chunk, promises.context)
    if count > _FEW:
        past = min(5, promises.context - count)
        made = [place(f"{count} tokens", promises, np.random.default_rng(_SEED), [count], [past])]
    if ends:
        made.append(place("two tokens", promises, np.random.default_rng(_SEED), [2], [promises.context - 2]))
    return made


def near(promises: Promises, tokens: int) -> Iterator[SyntheticStep]:
    """Make the steps that every subgraph runs: a few tokens, `tokens` at once, and as many rows as an engine takes."""
    rng = np.random.default_rng(_SEED)
    some = min(12, promises.context)
    yield place("prefill", promises, rng, [some], [0])
    yield place("ragged batch", promises, rng, [some - some // 4, some], [0, 0])
    yield replace(place("tokens of all magnitudes", promises, rng, [some], [0]), scaled=True)
    if (rows := min(promises.batch, ROWS)) > 1:
        yield place("largest batch", promises, rng, [1 + row % 2 for row in range(rows)], [0] * rows)
    longest = min(tokens, promises.chunk, promises.context)
    if longest > some:
        logits = np.array([-1, *np.linspace(0, longest - 2, _LOGITS_ROWS)]).astype(np.int64)
        yield replace(place("longest step", promises, rng, [longest], [0]), rows=logits)


def far(promises: Promises, reach: int, batch: int) -> Iterator[SyntheticStep]:
    """Make the steps at every border ± 1 and at the end of the context: `reach` tokens at most, and `batch` rows."""
    rng = np.random.default_rng(_SEED + 1)
    last = reach - 1
    places = {0, min(5, last), last}
    places |= {border + by for border in promises.borders for by in (-2, -1, 0, 1) if 0 < border + by <= last}
    places |= {length for length in _powers(last) if length >= _SOME}  # length classes, and borders that nobody names
    for past in sorted(places):
        yield place("one token", promises, rng, [1], [past])
    some = min(_SOME, reach)
    yield replace(place("end of the context", promises, rng, [some], [reach - some]), scaled=True)
    for border in promises.borders:
        if some < border < reach - some:
            yield place(f"across {border} tokens", promises, rng, [some], [border - some // 2])
    rows = min(promises.batch, batch, ROWS)
    if rows > 1:
        known = sorted({0, *places} - {last})
        chosen = [known[round(row * (len(known) - 1) / (rows - 1))] for row in range(rows)]
        yield place("largest batch", promises, rng, [1] * rows, chosen)  # kernels take no more of several rows


def inside(promises: Promises, reach: int) -> Iterator[SyntheticStep]:
    """Make steps inside of a longer text, where rotary angles depend on how long it gets."""
    rng = np.random.default_rng(_SEED + 2)
    for past in {0, reach // 2}:
        made = place("inside of a longer text", promises, rng, [2], [min(past, reach - 2)])
        yield replace(made, step=replace(made.step, text_lengths=np.array([promises.context])))


def every_position(promises: Promises, reach: int) -> Iterator[SyntheticStep]:
    """Make steps that stand at every position once."""
    rng = np.random.default_rng(_SEED + 3)
    for past in range(0, reach, promises.chunk):
        yield place("every position", promises, rng, [min(promises.chunk, reach - past)], [past])


def every_token(promises: Promises, size: int = _VOCABULARY_CHUNK) -> Iterator[SyntheticStep]:
    """Make steps that hold every token id once."""
    size = min(size, promises.context)
    for at in range(0, promises.vocabulary, size):
        ids = np.arange(at, min(at + size, promises.vocabulary), dtype=np.int64)[None]
        lengths = np.array([ids.shape[1]], np.int64)
        yield SyntheticStep("every token id", ProbeCall(ids, lengths, np.zeros(1, np.int32)))


def _powers(last: int) -> list[int]:
    return [1 << n for n in range(last.bit_length()) if 1 << n <= last]


def place(
    name: str, promises: Promises, rng: np.random.Generator, lengths: list[int], past: list[int]
) -> SyntheticStep:
    """Make a step of rows of `lengths` tokens, each behind `past` of them; padding has id 0."""
    ids: NDArray[Any] = rng.integers(0, promises.vocabulary, (len(lengths), max(lengths)), np.int64)
    counted = np.array(lengths, np.int64)
    ids[np.arange(ids.shape[1])[None] >= counted[:, None]] = 0
    return SyntheticStep(name, ProbeCall(ids, counted, np.array(past, np.int32)))
