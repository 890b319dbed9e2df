"""Durations of an artifact less those of an earlier one, both run in turns on this device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from llmforge.evaluation.latency import Subject
from llmforge.metrics import catalog
from llmforge.metrics.catalog import SlowestMetric
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.tokens import Floats

REPETITIONS = 30  # where nothing else is asked: a median of fewer differences has wide bounds


def differences(
    ours: Subject,
    theirs: Subject,
    *,
    prompt_tokens: Sequence[int],
    output_tokens: int,
    repetitions: int,
    vocabulary: int,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Estimate]:
    """Time both in turns on the same random prompts, and take the median of ours - theirs, in ms.

    Who is first changes with every repetition. A figure is that of the prompt length where ours is slowest, as in
    reports. One generation of each side and length runs before the clock counts.
    """
    rng = np.random.default_rng(seed)
    timed: dict[int, list[tuple[Floats, Floats]]] = {length: [] for length in prompt_tokens}
    total = (repetitions + 1) * len(timed)
    for repetition in range(-1, repetitions):  # -1 warms up
        for number, length in enumerate(prompt_tokens):
            progress((repetition + 1) * len(timed) + number, total)
            ids = rng.integers(0, vocabulary, length, np.int64)
            if repetition % 2:
                second, first = _timed(theirs, ids, output_tokens), _timed(ours, ids, output_tokens)
            else:
                first, second = _timed(ours, ids, output_tokens), _timed(theirs, ids, output_tokens)
            if repetition >= 0:
                timed[length].append((first, second))
    progress(total, total)
    return {metric.name: _difference(metric, timed) for metric in catalog.of_kind(SlowestMetric)}


def _difference(metric: SlowestMetric, timed: dict[int, list[tuple[Floats, Floats]]]) -> Estimate:
    durations = {
        length: np.array([[metric.of.figure([side]).p50.value for side in pair] for pair in pairs])  # type: ignore[union-attr]
        for length, pairs in timed.items()
    }
    slowest = max(durations.values(), key=lambda pairs: float(np.median(pairs[:, 0])))
    return Estimate.median((slowest[:, 0] - slowest[:, 1]).tolist(), of="repetitions")


def _timed(subject: Subject, ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]], tokens: int) -> Floats:
    """Generate once and return the milliseconds that each token took [tokens]; the first is the TTFT."""
    stamps = [time.perf_counter()]
    stamps.extend(time.perf_counter() for _ in subject.generate(ids, tokens))
    return np.diff(stamps) * 1e3
