"""Measure what a lossy pass costs on a model that is too large to run whole.

Both graphs run on text block by block (`streamed_execution`), so that a budget is held against the divergence of the
logits, as for a small model, but on fewer tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.metrics.tokens import mean_kld
from llmforge.verification import comparison, probe, streamed_execution

TEXT_ROWS, TEXT_TOKENS, TEXT_DECODED = 4, 48, 4  # windows side by side, tokens of each, how many of them one by one


@dataclass(frozen=True)
class DivergenceCost:
    """What a lossy pass costs: the mean KL(before || after) in nats a token, over `tokens` of text."""

    kld_mean: float
    tokens: int
    largest: float  # difference of a logit, in standard deviations of all
    not_finite: str | None  # the first step whose logits are NaN or infinite


Logits = list[NDArray[np.float32]]  # by step, [tokens, V]


@dataclass(eq=False)
class _Graph:
    """A graph that runs, or has run."""

    model: ir.Model
    turn: threading.Lock = field(default_factory=threading.Lock)
    logits: Logits | None = None


@dataclass
class StreamedLoss:
    """The budgets of lossy passes, measured on whole graphs that run block by block on a few windows of text.

    A graph that is to be measured may run before, in a thread of its own.
    """

    texts: Sequence[NDArray[np.int64]]
    threads: int
    _before: Logits | None = None  # of the graph that was measured last
    _graphs: dict[int, _Graph] = field(default_factory=dict)  # by the model's id

    @property
    def run(self) -> probe.Run:
        """The text: windows side by side, of unequal lengths, most of each in a prefill, then decode."""
        rows = [window[: TEXT_TOKENS - index] for index, window in enumerate(self.texts[:TEXT_ROWS])]
        decoded = min(TEXT_DECODED, min(len(row) for row in rows) - 1)
        return probe.schedule("text", rows, [[len(row) - decoded for row in rows], *[[1] * len(rows)] * decoded])

    def prepare(self, model: ir.Model) -> None:
        """Run a graph that will be measured, unless that was begun."""
        if self.texts:
            self._made(model)

    def measure(self, before: ir.Model, after: ir.Model) -> DivergenceCost:
        """Measure the divergence of `after` from `before`.

        That does not run where the last call had it as its `after`: passes in between that keep what they declare moved
        it by rounding at most.
        """
        run = self.run
        if self._before is None:
            self._before = self._made(before)
        made, spread = self._made(after), _spread(self._before)
        self._graphs.clear()
        total, tokens, largest = 0.0, 0, 0.0
        for number, (b, a) in enumerate(zip(self._before, made, strict=True)):
            if not np.isfinite(a).all():
                return DivergenceCost(np.nan, tokens, np.inf, run.where(number))
            total, tokens = total + mean_kld(b, a) * len(b), tokens + len(b)
            largest = max(largest, comparison.deviation(b, a, spread))
        self._before = made
        return DivergenceCost(total / tokens, tokens, largest, None)

    def _made(self, model: ir.Model) -> Logits:
        graph = self._graphs.setdefault(id(model), _Graph(model))
        with graph.turn:
            if graph.logits is None:
                graph.logits = self._logits(model, self.run)
            return graph.logits

    def _logits(self, model: ir.Model, run: probe.Run) -> Logits:
        """Run `run` and keep the logits of real tokens."""
        [logits] = streamed_execution.drive(model, [run], threads=self.threads)
        return [made[step.valid] for made, step in zip(logits, run.steps, strict=True)]


def _spread(logits: Sequence[NDArray[np.float32]]) -> float:
    """Return the standard deviation of all logits, [tokens, V] each, without a copy of them."""
    rows = [row for of_step in logits for row in of_step]
    means, variances = [float(row.mean()) for row in rows], [float(row.var()) for row in rows]
    return float(np.sqrt(np.mean(variances) + np.var(means)))
