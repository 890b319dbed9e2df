"""Metrics of the server for Prometheus: https://prometheus.io/docs/instrumenting/exposition_formats/."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmforge.base.errors import ForgeError
from llmforge.serving.http.access import ServerState
from llmforge.serving.http.limits import Client
from llmforge.serving.http.recording import OUTCOMES
from llmforge.serving.interface import Serving
from llmforge.serving.protocol.metrics import ANSWERS, COUNTERS, GAUGES, ITL, TTFT, refusal

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
REQUEST = "llmforge_request_seconds", "From the request to its end"
# Bounds in seconds, about two a factor of five: from a small model's step to a long prompt on a slow machine.
_ITL_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
_LATENCY_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


class CallMetrics(Collector):
    """Figures of the calls of one server, in a registry of its own; `collect` adds those of its engine."""

    def __init__(self, latency_buckets: Sequence[float]) -> None:
        self._registry = CollectorRegistry()
        self._answers = Counter(*ANSWERS, ["finish_reason"], registry=self._registry)
        self._latency = Histogram(*REQUEST, registry=self._registry, buckets=latency_buckets)

    def failed(self) -> None:
        """Count a sequence, or a call, that ended with an error."""
        self._answers.labels("error").inc()

    def refused(self, error: ForgeError) -> None:
        """Count a call that was not taken on."""
        self._answers.labels(refusal(error)).inc()

    def exposition(self) -> bytes:
        """Write all figures in Prometheus' text format."""
        return generate_latest(self._registry)


class ServerMetrics(CallMetrics):
    """Figures of one server; those of the engine are read from it at every scrape."""

    def __init__(self, engine: Serving, state: ServerState) -> None:
        super().__init__(_LATENCY_BUCKETS)
        self._ttft = Histogram(*TTFT, registry=self._registry, buckets=_TTFT_BUCKETS)
        self._itl = Histogram(*ITL, registry=self._registry, buckets=_ITL_BUCKETS)
        self._engine = engine
        self._state = state
        self._registry.register(self)

    def token(self, seconds: float, first: bool) -> None:
        """Count a token that came `seconds` after the one before it, or after the request if it is the first."""
        (self._ttft if first else self._itl).observe(seconds)

    def ended(self, finish_reason: str, seconds: float) -> None:
        """Count a sequence that ended."""
        self._answers.labels(finish_reason).inc()
        self._latency.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield gauges of what goes on in the engine, and counters of what was done."""
        stats = self._engine.stats()
        slots = ("Requests that can run at once", "slots")
        for name, (text, field) in {**GAUGES, "llmforge_slots": slots}.items():
            yield GaugeMetricFamily(name, text, value=getattr(stats, field))
        for name, (text, field) in COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(stats, field))
        steps = CounterMetricFamily("llmforge_decode_steps", "Decode steps, by number of rows", labels=["rows"])
        for rows, count in sorted(stats.steps.items()):
            steps.add_metric([str(rows)], count)
        yield steps
        if self._state.clients:
            yield from metrics_of_keys(self._state.clients)
        if self._state.recorder is not None:
            recorded = CounterMetricFamily("llmforge_recorded_answers", "Answers to be recorded", labels=["outcome"])
            for outcome in OUTCOMES:
                recorded.add_metric([outcome], self._state.recorder.counts[outcome])
            yield recorded


def metrics_of_keys(clients: Sequence[Client]) -> Iterator[Metric]:
    """Yield what each API key has asked for, and what it was refused."""
    requests = CounterMetricFamily("llmforge_key_requests", "Calls taken on, by API key", labels=["key"])
    tokens = CounterMetricFamily("llmforge_key_tokens", "Tokens, by API key", labels=["key", "kind"])
    limited = CounterMetricFamily("llmforge_key_limited", "Calls over a limit of a key", labels=["key", "limit"])
    active = GaugeMetricFamily("llmforge_key_active", "Calls being answered, by API key", labels=["key"])
    limits = GaugeMetricFamily("llmforge_key_limit", "Limits of an API key", labels=["key", "limit"])
    rest = GaugeMetricFamily("llmforge_key_remaining", "What is left of a limit now", labels=["key", "limit"])
    for client in clients:
        requests.add_metric([client.name], client.counts["requests"])
        for kind in ("prompt", "output"):
            tokens.add_metric([client.name, kind], client.counts[f"{kind} tokens"])
        for limit, count in client.refused.items():
            limited.add_metric([client.name, limit], count)
        active.add_metric([client.name], client.active)
        for limit, left in client.rest():
            limits.add_metric([client.name, limit], client.limits[limit])
            rest.add_metric([client.name, limit], left)
    yield from (requests, tokens, limited, active, limits, rest)
