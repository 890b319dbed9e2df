"""Metrics of the model for Triton's metrics endpoint, which has Triton's own counters, too.

Each update is a message to the server's process, so that they are gathered here and reported by a thread of their own,
`PERIOD_S` apart; no response waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from llmforge.base.errors import ForgeError
from llmforge.serving.interface import EngineStats
from llmforge.serving.protocol.metrics import ANSWERS, ARTIFACT, COUNTERS, GAUGES, INVALID, ITL, REFUSED, TTFT, refusal

PERIOD_S = 0.5
# Seconds. A first token takes as long as its prompt is, a later one as long as a step.
TTFT_BUCKETS = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]
ITL_BUCKETS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5]

HISTOGRAMS = {TTFT[0]: (TTFT[1], TTFT_BUCKETS), ITL[0]: (ITL[1], ITL_BUCKETS)}


class _Total:
    """A counter of Triton that follows a total of ours: Triton's only take increments."""

    def __init__(self, counter: Any) -> None:
        self._counter = counter
        self._reported = 0

    def reach(self, total: int) -> None:
        if total > self._reported:
            self._counter.increment(total - self._reported)
            self._reported = total


class Metrics:
    """Reports to Triton; `labels` tell the model's instances apart, and `artifact` says what they serve."""

    def __init__(
        self, stats: Callable[[], EngineStats], labels: Mapping[str, str], artifact: Mapping[str, str]
    ) -> None:
        self._stats = stats
        self._labels = dict(labels)
        self._times_s: dict[str, list[float]] = {name: [] for name in HISTOGRAMS}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        # Triton drops a family that nobody holds.
        self._families: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}
        for name, (description, buckets) in HISTOGRAMS.items():
            self._add(name, description, pb_utils.MetricFamily.HISTOGRAM, buckets=buckets)
        for kind, metrics in ((pb_utils.MetricFamily.COUNTER, COUNTERS), (pb_utils.MetricFamily.GAUGE, GAUGES)):
            for name, (description, _) in metrics.items():
                self._add(name, description, kind)
        self._totals = {name: _Total(self._metrics[name]) for name in COUNTERS}
        self._answers = pb_utils.MetricFamily(
            name=f"{ANSWERS[0]}_total", description=ANSWERS[1], kind=pb_utils.MetricFamily.COUNTER
        )
        name, description = ARTIFACT
        self._families[name] = pb_utils.MetricFamily(
            name=name, description=description, kind=pb_utils.MetricFamily.GAUGE
        )
        self._artifact = self._families[name].Metric(labels={**self._labels, **artifact})
        self._artifact.set(1)
        self._finished: dict[str, _Total] = {}
        self._refused = {REFUSED: 0, INVALID: 0}
        self.report()
        self._thread = threading.Thread(target=self._run, name="llmforge-metrics")
        self._thread.start()

    def token(self, seconds: float, first: bool) -> None:
        """Note a token that came `seconds` after the one before it, or after the request if it is the first."""
        with self._lock:
            self._times_s[(TTFT if first else ITL)[0]].append(seconds)

    def refused(self, error: ForgeError) -> None:
        """Note that a request was not taken on: for want of room, or because it makes no sense."""
        with self._lock:
            self._refused[refusal(error)] += 1

    def report(self) -> None:
        """Send Triton what was gathered, and the engine's statistics."""
        with self._lock:
            observed, self._times_s = self._times_s, {name: [] for name in HISTOGRAMS}
            refused = dict(self._refused)
        for name, times_s in observed.items():
            for seconds in times_s:
                self._metrics[name].observe(seconds)
        stats = self._stats()
        for reason, count in {**stats.finished, **refused}.items():
            if reason not in self._finished:
                labels = {**self._labels, "finish_reason": reason}
                self._finished[reason] = _Total(self._answers.Metric(labels=labels))
            self._finished[reason].reach(count)
        for name, (_, attribute) in COUNTERS.items():
            self._totals[name].reach(getattr(stats, attribute))
        for name, (_, attribute) in GAUGES.items():
            self._metrics[name].set(getattr(stats, attribute))

    def close(self) -> None:
        """Report once more, and stop."""
        self._closing.set()
        self._thread.join()
        self.report()

    def _add(self, name: str, description: str, kind: Any, **options: Any) -> None:
        self._families[name] = family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        self._metrics[name] = family.Metric(labels=self._labels, **options)

    def _run(self) -> None:
        while not self._closing.wait(PERIOD_S):
            self.report()
