"""How much faster drafts make an engine: the same requests with and without, in turns, one at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from llmforge.measure.load.drive import InProcess
from llmforge.measure.load.workload import LoadRequest
from llmforge.metrics.intervals import SMALLEST_SAMPLE, Estimate, student_t
from llmforge.serving.engine import Engine


def speedup(engine: Engine, load: Sequence[LoadRequest]) -> Estimate | None:
    """Compare the time of a token after the first of `engine` with that of one that drafts nothing.

    The geometric mean of the ratios of pairs, with the interval of Student's t; a pair is one request, asked of both in
    alternating order. None: no request has a second token. There are no bounds below `SMALLEST_SAMPLE` pairs.
    """
    options = replace(engine.options, speculation="off", prefix_cache_bytes=0, prefixes=())
    logs: list[float] = []
    with Engine(engine.runner, options) as plain:
        subjects = InProcess(engine, "with drafts"), InProcess(plain, "without")
        for number, request in enumerate(load):
            taken: dict[str, float] = {}
            for subject in subjects if number % 2 else subjects[::-1]:
                outcome = subject.answer(request, time.perf_counter())
                if outcome.tpot_ms is not None and outcome.error is None:
                    taken[subject.description] = outcome.tpot_ms
            if len(taken) == len(subjects):
                logs.append(math.log(taken["without"] / taken["with drafts"]))
    return ratio(logs)


def ratio(logs: Sequence[float]) -> Estimate | None:
    """Estimate the geometric mean of ratios from their logarithms; None: there are none."""
    count = len(logs)
    if not count:
        return None
    mean = math.fsum(logs) / count
    if count < SMALLEST_SAMPLE:
        return Estimate(value=math.exp(mean), low=None, high=None, samples=count, of="requests")
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in logs) / (count - 1))
    half = student_t(count - 1) * deviation / math.sqrt(count)
    low, high = math.exp(mean - half), math.exp(mean + half)
    return Estimate(value=math.exp(mean), low=low, high=high, samples=count, of="requests")
