"""The runs on which a traced graph is held to transformers: their tokens, and which of them get logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmforge.trace.export.limits import LONGEST, TAIL
from llmforge.verification import probe

RAGGED = 5  # tokens by which a context exceeds the shorter row of a ragged batch, at least
FEW = 4  # rows of a step that get logits, where the vocabulary is large
SEED = 20_241_103  # any fixed number
LONG = "a prompt longer than the windows"


def make_runs(vocabulary: int, windows: Sequence[int], context: int | None) -> list[probe.Run]:
    """Make the runs: one row in all kinds of step, a ragged batch, and a prompt beyond the windows."""
    rng = np.random.default_rng(SEED)

    def draw(tokens: int) -> NDArray[np.int64]:
        return rng.integers(0, vocabulary, tokens, np.int64)

    most = LONGEST if context is None else context
    counts = _within(most, (12, 1, 1, 1, 5))
    runs = [probe.schedule("one row", [draw(sum(counts))], [(count,) for count in counts])]
    if most > RAGGED:
        short, long = min(9, most - RAGGED), min(12, most - 2)
        rows = [draw(short + 2), draw(long + 2)]
        runs.append(probe.schedule("a ragged batch", rows, [(short, long), (1, 1), (1, 1)]))
    within = [window for window in windows if window <= LONGEST - TAIL]
    if within and most > 2:
        length = min(within[-1] + TAIL, most - 2)
        runs.append(probe.schedule(LONG, [draw(length + 2)], [(length,), (1,), (1,)]))
    return runs


def rows_of(run: probe.Run) -> list[NDArray[np.int64]]:
    """Put the tokens of each row of `run` together again."""
    return [np.concatenate([step.ids[b, : step.lengths[b]] for step in run.steps]) for b in range(run.batch)]


def selected(step: probe.ProbeCall, few: bool) -> NDArray[np.int64]:
    """Choose the rows of a step that get logits: all, the tail of a long one, or a `few`."""
    most = FEW if few else 2 * TAIL
    return step.rows if len(step.rows) <= most else step.rows[-(FEW if few else TAIL) :]


def count_kept(run: probe.Run, few: bool) -> int:
    """Count the tokens at the end of a row whose logits are compared."""
    return len(selected(run.steps[0], few)) + sum(int(step.ids.shape[1]) for step in run.steps[1:])


def _within(most: int, counts: Sequence[int]) -> list[int]:
    """Take tokens from the longest of the steps `counts`, until `most` remain; those without tokens are dropped."""
    kept = [*counts]
    while sum(kept) > most:
        kept[kept.index(max(kept))] -= 1
    return [count for count in kept if count]
