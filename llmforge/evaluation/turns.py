"""Durations of an artifact less those of an earlier one, both run in turns on this device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llmforge.evaluation.latency import Load, Subject, timed_generation
from llmforge.metrics import catalog
from llmforge.metrics.catalog import SlowestMetric
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import Side, Spread
from llmforge.metrics.tokens import Floats

REPETITIONS = 30  # where nothing else is asked: a median of fewer differences has wide bounds

Pairs = list[tuple[Floats, Floats]]  # of each repetition, the milliseconds of each token: ours, theirs


def comparable() -> tuple[SlowestMetric, ...]:
    """List the metrics whose differences turns can tell: medians, since a repetition has no tail of its own."""
    return tuple(metric for metric in catalog.of_kind(SlowestMetric) if metric.at == "p50")


def differences(
    ours: Subject,
    theirs: Subject,
    loads: Sequence[Load],
    *,
    vocabulary: int,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Estimate]:
    """Time both in turns on the same random prompts, and take the median of ours - theirs, in ms.

    Who is first changes with every repetition. A figure is that of the load where ours is slowest, as in reports. One
    generation of each side and load runs before the clock counts.
    """
    rng = np.random.default_rng(seed)
    timed: list[Pairs] = [[] for _ in loads]
    total = sum(load.repetitions + 1 for load in loads)
    done = 0
    for repetition in range(-1, max(load.repetitions for load in loads)):  # -1 warms up
        for load, pairs in zip(loads, timed, strict=True):
            if repetition >= load.repetitions:
                continue
            progress(done, total)
            ids = rng.integers(0, vocabulary, (load.batch, load.prompt_tokens), np.int64)
            if repetition % 2:
                second = timed_generation(theirs, ids, load.output_tokens)
                first = timed_generation(ours, ids, load.output_tokens)
            else:
                first = timed_generation(ours, ids, load.output_tokens)
                second = timed_generation(theirs, ids, load.output_tokens)
            if repetition >= 0:
                pairs.append((first, second))
            done += 1
    progress(total, total)
    return {metric.name: _difference(metric, timed) for metric in comparable()}


def _difference(metric: SlowestMetric, timed: Sequence[Pairs]) -> Estimate:
    durations = [np.array([[_median_ms(metric, side) for side in pair] for pair in pairs]) for pairs in timed]
    slowest = max(durations, key=lambda pairs: float(np.median(pairs[:, 0])))
    return Estimate.median((slowest[:, 0] - slowest[:, 1]).tolist(), of="repetitions")


def _median_ms(metric: SlowestMetric, durations: Floats) -> float:
    """Read the metric of one generation: its duration, or the median of those between its tokens."""
    spread = metric.of.figure(Side([durations]))
    assert isinstance(spread, Spread)
    return spread.p50.value
