"""Places that nobody can foresee: drawn by a generator that what is on trial seeds, so that a build repeats.

A fault that covers a share p of an axis, whatever part that is, is met by none of n draws with probability (1 − p)^n;
`DRAWS` of 90 make that 1 % at p = 5 %. An axis is cut into as many strata, and one place is drawn in each: as the
geometric mean of what strata leave right is never above the mean, a fault is missed no more often, and one that fills a
stratum, as any range of 2/90 of the axis does, is never missed. An axis with no more places than draws runs whole.

Axes: positions of one token; lengths of a step, each behind a context of a length of its own (jointly uniform);
numbers of rows, each row behind another context; rows of unequal lengths, so that each is padded otherwise; how many
logits a step asks for. Besides, rows and tokens that are all equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from llmforge.verification import promises
from llmforge.verification.promises import ROWS, Promises, SyntheticStep

SHARE, MISSED = 0.05, 0.01  # of an axis: a fault of this share goes unseen in so many builds, at most
_RAGGED = 16  # tokens of the longest of unequal rows
_ALIKE = 8  # equal tokens, and equal rows


def draws_for(share: float, missed: float) -> int:
    """Count the draws that meet a fault of a `share` of an axis but in `missed` of all cases."""
    return math.ceil(math.log(missed) / math.log1p(-share))


DRAWS = draws_for(SHARE, MISSED)


@dataclass(frozen=True)
class Extent:
    """How far a subgraph is run: lengths of contexts and of steps, in tokens."""

    reach: int | None  # of the context; None: places mean nothing to it
    tokens: int  # of a step
    slots: int  # of all rows of its caches together
    rows_of_tokens: int  # of one token each, of the draws of more than `ROWS` rows together

    def draws_of_rows(self, batch: int) -> int:
        """Count the draws of more than `ROWS` rows, of a largest `batch`."""
        return min(DRAWS, batch - ROWS, self.rows_of_tokens // batch) if batch > ROWS else 0


@dataclass(frozen=True)
class Drawn:
    """What was run at drawn places, and how far, where less was run than is promised: a draw takes time and memory."""

    steps: int = 0
    reach: int | None = None  # tokens of context; None: up to the end
    tokens: int | None = None  # of a step; None: up to a chunk of a prompt
    rows: int | None = None  # draws of more than `ROWS` rows; None: as many as make the chance of a miss what it is

    @classmethod
    def of(cls, promised: Promises, extent: Extent, steps: int) -> Drawn:
        """Tell how far the `steps` that an extent allows are from what is promised."""
        reach, longest = extent.reach, min(promised.chunk, promised.context)
        rows, wanted = extent.draws_of_rows(promised.batch), min(DRAWS, max(0, promised.batch - ROWS))
        return cls(
            steps,
            reach if reach is not None and reach < promised.context else None,
            extent.tokens if extent.tokens < longest else None,
            rows if rows < wanted else None,
        )

    def __add__(self, other: Drawn) -> Drawn:
        """Join the draws of two subgraphs: what was run of both is what the shorter ones ran."""
        pairs = ((self.reach, other.reach), (self.tokens, other.tokens), (self.rows, other.rows))
        return Drawn(self.steps + other.steps, *(min(_known(pair), default=None) for pair in pairs))

    @property
    def cut(self) -> str:
        """Say where less was run, in brackets; "": nowhere."""
        found = [
            None if self.reach is None else f"positions below {self.reach:,}",
            None if self.tokens is None else f"steps of up to {self.tokens} tokens",
            None if self.rows is None else f"{self.rows} draws of more than {ROWS} rows",
        ]
        told = ", ".join(filter(None, found))
        return f" (to keep time and memory: {told})" if told else ""


def _known(pair: tuple[int | None, int | None]) -> list[int]:
    """List the numbers of a pair that are there."""
    return [number for number in pair if number is not None]


def stratified(random: np.random.Generator, low: int, high: int, count: int = DRAWS) -> NDArray[np.int64]:
    """Draw a number from each of `count` equal strata of `low` to `high`; all of them, if there are no more."""
    size = high - low + 1
    if size <= count:
        return np.arange(low, high + 1)
    drawn = (np.arange(count) + random.random(count)) * (size / count)
    return low + np.minimum(drawn.astype(np.int64), size - 1)


@dataclass(frozen=True)
class Share:
    """The draws of one of several subgraphs that have them in common: every `of`-th, from the `number`-th on."""

    seed: int
    number: int = 0
    of: int = 1


def draw(promised: Promises, extent: Extent, share: Share) -> Iterator[SyntheticStep]:
    """Make the steps at drawn places, each with numbers of its own at the boundary."""
    random = np.random.default_rng(share.seed)
    for step in islice(_steps(promised, extent, random), share.number, None, share.of):
        yield replace(step, seed=int(random.integers(1 << 31)))


def _steps(promised: Promises, extent: Extent, random: np.random.Generator) -> Iterator[SyntheticStep]:
    reach = extent.reach
    for past in () if reach is None else stratified(random, 0, reach - 1):
        yield _place("one token, drawn", promised, random, [1], [int(past)])
    longest = extent.tokens if reach is None else min(extent.tokens, reach)
    for tokens in stratified(random, 2, longest) if longest > 1 else ():
        past = 0 if reach is None else int(random.integers(0, reach - tokens, endpoint=True))
        asked = np.sort(random.choice(tokens, min(int(tokens), int(random.integers(1, _ALIKE))), replace=False))
        yield replace(_place("a step, drawn", promised, random, [int(tokens)], [past]), rows=asked)
    for rows in _numbers_of_rows(promised.batch, extent, random):
        deepest = 1 if reach is None else max(1, min(reach, extent.slots // rows))
        yield _place("rows, drawn", promised, random, [1] * rows, random.integers(0, deepest, rows).tolist())
        longest = min(_RAGGED, deepest if reach is not None else promised.context)
        if rows > 1 and rows <= ROWS:
            lengths = random.integers(1, longest, rows, endpoint=True).tolist()
            yield _place("rows of unequal lengths, drawn", promised, random, lengths, [0] * rows)
    tokens = min(_ALIKE, longest)
    yield replace(_place("equal tokens", promised, random, [tokens], [0]), alike=True)
    if (rows := min(_ALIKE, promised.batch)) > 1:
        past = 0 if reach is None else int(random.integers(0, max(1, min(reach, extent.slots // rows))))
        yield replace(_place("equal rows", promised, random, [1] * rows, [past] * rows), alike=True)


def _numbers_of_rows(batch: int, extent: Extent, random: np.random.Generator) -> Iterator[int]:
    """List every number of rows up to `ROWS`, and drawn ones up to the largest batch."""
    yield from range(2, min(batch, ROWS) + 1)
    if batch > ROWS:
        drawn = stratified(random, ROWS + 1, batch, count) if (count := extent.draws_of_rows(batch)) else ()
        yield from (int(rows) for rows in drawn if rows <= extent.slots)


def _place(
    name: str, promised: Promises, random: np.random.Generator, lengths: Sequence[int], past: Sequence[int]
) -> SyntheticStep:
    return promises.place(name, promised, random, list(lengths), list(past))
