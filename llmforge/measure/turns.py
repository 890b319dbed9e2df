"""Durations of an artifact less those of an earlier one, both run in turns on this device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llmforge.measure.latency import TimedLoad, TimedModel, timed_generation
from llmforge.metrics import catalog
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import Spread, TimedSide
from llmforge.metrics.latency_metrics import SlowestMetric
from llmforge.metrics.tokens import Floats

REPETITIONS = 30  # where nothing else is asked: a median of fewer differences has wide bounds

Pairs = list[tuple[Floats, Floats]]  # of each repetition, the milliseconds of each token: ours, theirs


def repetitions(metrics: Sequence[SlowestMetric]) -> int:
    """Say how often to time each load, so that a limit on the change of each of `metrics` can be decided."""
    return max(REPETITIONS, *(metric.repetitions for metric in metrics))


def differences(
    ours: TimedModel,
    theirs: TimedModel,
    loads: Sequence[TimedLoad],
    *,
    vocabulary: int,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Estimate]:
    """Time both in turns on the same random prompts, and bound ours - theirs, in ms, for every duration.

    Of medians it is the median of the differences of each repetition. A repetition has no tail of its own: of tails it
    is the difference of both sides' percentiles, each with its own bounds. Who is first changes with every repetition.
    A figure is that of the load where ours is slowest, as in reports. One generation of each side and load runs before
    the clock counts.
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
    encodes = loads[0].output_tokens == 0
    wanted = [metric for metric in catalog.of_kind(SlowestMetric) if metric.of.is_of(encodes=encodes)]
    return {metric.name: _difference(metric, timed) for metric in wanted}


def _difference(metric: SlowestMetric, timed: Sequence[Pairs]) -> Estimate:
    slowest = max(timed, key=lambda pairs: _percentile(metric, [ours for ours, _ in pairs]).value)
    if metric.at == "p50":
        pairs = [[_percentile(metric, [side]).value for side in pair] for pair in slowest]
        return Estimate.median([ours - theirs for ours, theirs in pairs], of="repetitions")
    ours, theirs = (_percentile(metric, [pair[side] for pair in slowest]) for side in (0, 1))
    return ours.less(theirs)


def _percentile(metric: SlowestMetric, generations: Sequence[Floats]) -> Estimate:
    """Read the metric of some generations of one side."""
    spread = metric.of.figure(TimedSide(generations))
    assert isinstance(spread, Spread)
    found: Estimate = getattr(spread, metric.at)
    return found
