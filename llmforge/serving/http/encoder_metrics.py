"""Metrics of a server of an embedder or a reranker for Prometheus; names are the chat server's where it has them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from llmforge.serving.encoder_engine import EncoderEngine
from llmforge.serving.http.access import ServerState
from llmforge.serving.http.metrics import CallMetrics, metrics_of_keys
from llmforge.serving.protocol.metrics import COUNTERS, GAUGES, SEQUENCES

# Bounds in seconds, about two a factor of five: from one query to thousands of passages.
_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


class EncoderMetrics(CallMetrics):
    """Figures of one server; those of the engine are read from it at every scrape."""

    def __init__(self, engine: EncoderEngine, state: ServerState) -> None:
        super().__init__(_BUCKETS)
        self._engine = engine
        self._state = state
        self._registry.register(self)

    def ended(self, seconds: float) -> None:
        """Count a call that was answered."""
        self._answers.labels("stop").inc()
        self._latency.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield gauges of what goes on in the engine, and counters of what was done."""
        stats = self._engine.stats()
        for name in ("llmforge_requests_running", "llmforge_requests_waiting"):
            text, field = GAUGES[name]
            yield GaugeMetricFamily(name, text, value=getattr(stats, field))
        name = "llmforge_prompt_tokens_total"
        yield CounterMetricFamily(name, COUNTERS[name][0], value=stats.prompt_tokens)
        yield CounterMetricFamily(*SEQUENCES, value=stats.sequences)
        batches = CounterMetricFamily("llmforge_batches", "Runs of the model, by number of sequences", labels=["rows"])
        for rows, count in sorted(stats.batches.items()):
            batches.add_metric([str(rows)], count)
        yield batches
        if self._state.clients:
            yield from metrics_of_keys(self._state.clients)
