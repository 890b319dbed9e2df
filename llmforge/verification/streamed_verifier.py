"""Prove a pass on a model that is too large to run whole: on the subgraphs that it changed, and its loss streamed.

A pass that is exact, or exact but for rounding, is proven on each subgraph where its graph differs from the one before
(`changed_subgraphs`): both get the same random numbers at its boundary and must make the same of them, in prefill,
decode, continuation and a ragged batch. Subgraphs of one kind are proven once with the real weights of the first, and
once with random weights, of which no norm is 1 and no bias 0; every other subgraph is proven with its own weights.
Where that fails, what stands in front of a subgraph may never make such numbers (weights of a router are not negative):
the subgraph, and each of its kind, is made larger, and proven with what it then computes itself.

A lossy pass is measured whole: both graphs run on text block by block (`streamed_execution`), so that its budget is
held against the divergence of the logits, as for a small model, but on fewer tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph, interface
from llmforge.ir.derived import Derived
from llmforge.ir.subgraph import Index
from llmforge.lowering import emulation
from llmforge.metrics.tokens import mean_kld
from llmforge.verification import changed_subgraphs, comparison, probe, streamed_execution
from llmforge.verification.changed_subgraphs import ChangedSubgraph
from llmforge.verification.subgraph_session import SubgraphSession

_SEED = 20_240_301  # any fixed number
# How often a subgraph that differs is made larger: a router's weights are made of its matrix in seven steps.
WIDENED = 8
TEXT_ROWS, TEXT_TOKENS, TEXT_DECODED = 4, 48, 4  # windows side by side, tokens of each, how many of them one by one


@dataclass(frozen=True)
class Difference:
    """The place where a pass did not do what it declares."""

    what: str
    where: str


@dataclass(frozen=True)
class Proof:
    """What a proof of subgraphs ran, and the largest difference, in standard deviations of the tensor that differs."""

    places: int  # subgraphs that the pass changed
    run: int  # of these, those that ran with their own weights
    largest: float

    @property
    def names(self) -> tuple[str, ...]:
        """Say it in words."""
        alike = self.places - self.run
        ran = f"{self.run} of {self.places} changed subgraphs"
        return (ran, f"the other {alike} changed the same way") if alike else (ran,)


def prove(before: ir.Model, after: ir.Model, *, tolerance: float, threads: int) -> Proof | Difference:
    """Hold every subgraph where `after` differs from `before` to `tolerance`, in standard deviations; 0: to the bit.

    Raises:
        UnsupportedError: ONNX Runtime refuses a subgraph.
    """
    found = changed_subgraphs.differences(Index.of(before), Index.of(after))
    runs = probe.random_runs(vocabulary(before))
    largest, ran = 0.0, 0
    pending: list[tuple[list[ChangedSubgraph], int, Difference | None]] = [
        (alike, 0, None) for alike in _by_kind(found)
    ]
    while pending:
        alike, level, first = pending.pop(0)
        outcome = _compare(alike[0], probe.Weights(), runs, tolerance, threads)
        if len(alike) > 1 and isinstance(outcome, float):
            drawn = _compare(alike[0], RandomWeights(), runs, tolerance, threads)
            outcome = max(outcome, drawn) if isinstance(drawn, float) else drawn
        if isinstance(outcome, float):
            largest, ran = max(largest, outcome), ran + 1
        elif level == WIDENED or not alike[0].inputs:
            return first or outcome
        else:  # unless they differ, random numbers are outside the domain of what they compute
            pending += [(wider, level + 1, first or outcome) for wider in _by_kind([x.widened() for x in alike])]
    return Proof(len(found), ran, largest)


def _by_kind(found: Sequence[ChangedSubgraph]) -> list[list[ChangedSubgraph]]:
    """Group subgraphs of which one proof holds for all; one like no other is a group of its own."""
    kinds: dict[str, list[ChangedSubgraph]] = {}
    for number, changed in enumerate(found):
        kinds.setdefault(changed.kind or f"alone {number}", []).append(changed)
    return list(kinds.values())


def _compare(
    changed: ChangedSubgraph, weights: probe.Weights, runs: Sequence[probe.Run], tolerance: float, threads: int
) -> float | Difference:
    """Run a subgraph before and after; return the largest difference, or the first that is too large."""
    before, after = (SubgraphSession(model, weights, threads) for model in changed.extract())
    compared = list(_outputs(changed, before, after, runs))
    made: dict[str, list[NDArray[Any]]] = {}
    for name, where, b, _ in compared:
        made.setdefault(name, []).append(b.ravel())
        if changed.inputs and not np.isfinite(b).all():
            return Difference(f"{name} is not finite,", where)
    spreads = {name: float(np.concatenate(arrays).std()) for name, arrays in made.items()}
    largest = 0.0
    for name, where, b, a in compared:
        unit = spreads[name]
        if comparison.diverges(b, a, tolerance, unit):
            difference = comparison.largest(b, a)
            return Difference(f"{name} differ by {difference:.3g}, allowed is {tolerance * unit:.3g},", where)
        largest = max(largest, float(comparison.deviation(b, a, unit)))
    return largest


def _outputs(
    changed: ChangedSubgraph, before: SubgraphSession, after: SubgraphSession, runs: Sequence[probe.Run]
) -> Iterator[tuple[str, str, NDArray[Any], NDArray[Any]]]:
    """Run both sides of a subgraph: the name of each of its outputs, the step, and the two arrays."""
    rng = np.random.default_rng(_SEED)
    for run in runs:
        caches = before.allocate(run.batch, run.capacity), after.allocate(run.batch, run.capacity)
        for number, step in enumerate(run.steps):
            given = {name: _random(value, run, step, rng) for name, value in changed.inputs.items()}
            results = before.run(step, given, caches[0]), after.run(step, given, caches[1])
            filled = step.past + step.lengths
            for name in changed.outputs:
                past = interface.past_of(name)
                if past in caches[0]:
                    pair = [comparison.joined(probe.real(past, cache[past], filled)) for cache in caches]
                else:
                    found = [comparison.valid(result[name], step) for result in results]
                    if found[0] is None or found[1] is None:
                        continue
                    pair = [found[0], found[1]]
                yield name, run.where(number), pair[0], pair[1]


def _random(value: ir.Value, run: probe.Run, step: probe.ProbeStep, rng: np.random.Generator) -> NDArray[Any]:
    """Draw normal numbers for a value at the boundary of a subgraph."""
    sizes = {"batch": run.batch, "sequence": step.ids.shape[1], "rows": step.ids.shape[1], "capacity": run.capacity}
    dtype = np.dtype(np.float32) if value.dtype in emulation.HALVES else graph.dtype(value).numpy()
    shape = [dim if isinstance(dim, int) else sizes[str(dim)] for dim in graph.dims(value) or ()]
    return rng.standard_normal(shape, np.float32).astype(dtype)


@dataclass
class RandomWeights(probe.Weights):
    """Weights that are drawn, not read: what holds for them holds for all weights of their shapes.

    Tensors in memory keep their numbers: tables and constants. Derived tensors are derived, from drawn operands.
    """

    _rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(_SEED))

    def values(self, tensor: ir.TensorProtocol) -> NDArray[Any]:
        """Draw a tensor that is not in memory."""
        if isinstance(tensor, Derived):
            return np.ascontiguousarray(tensor.function([self.array(each) for each in tensor.operands]))
        if not isinstance(tensor, ir.LazyTensor | ir.ExternalTensor):
            return tensor.numpy()
        shape, dtype = tensor.shape.numpy(), tensor.dtype.numpy()
        if not tensor.dtype.is_floating_point():
            return self._rng.integers(0, 256, shape).astype(dtype)
        drawn = self._rng.standard_normal(shape, np.float32)
        if len(shape) < 2:
            return (1 + drawn / 10).astype(dtype)
        drawn *= np.float32(shape[-2] ** -0.5)
        return drawn.astype(dtype, copy=False)


@dataclass(frozen=True)
class Cost:
    """What a lossy pass costs: the mean KL(before || after) in nats a token, over `tokens` of text."""

    kld_mean: float
    tokens: int
    largest: float  # difference of a logit, in standard deviations of all
    not_finite: str | None  # the first step whose logits are NaN or infinite


@dataclass
class Loss:
    """The budgets of lossy passes, measured on whole graphs that run block by block on a few windows of text."""

    texts: Sequence[NDArray[np.int64]]
    threads: int
    _before: list[NDArray[np.float32]] | None = None  # by step, [tokens, V]: of the graph that was measured last

    @property
    def run(self) -> probe.Run:
        """The text: windows side by side, of unequal lengths, most of each in a prefill, then decode."""
        rows = [window[: TEXT_TOKENS - index] for index, window in enumerate(self.texts[:TEXT_ROWS])]
        decoded = min(TEXT_DECODED, min(len(row) for row in rows) - 1)
        return probe.schedule("text", rows, [[len(row) - decoded for row in rows], *[[1] * len(rows)] * decoded])

    def prepare(self, before: ir.Model) -> list[NDArray[np.float32]]:
        """Run the graph before a pass.

        It does not run again where the last call of `measure` had it as its `after`: passes in between that keep what
        they declare moved it by rounding at most.
        """
        if self._before is None and self.texts:
            self._before = self._logits(before, self.run)
        return self._before or []

    def measure(self, before: ir.Model, after: ir.Model) -> Cost:
        """Measure the divergence of `after` from `before`; see `prepare`."""
        run, self._before = self.run, self.prepare(before)
        made, spread = self._logits(after, run), _spread(self._before)
        total, tokens, largest = 0.0, 0, 0.0
        for number, (b, a) in enumerate(zip(self._before, made, strict=True)):
            if not np.isfinite(a).all():
                return Cost(np.nan, tokens, np.inf, run.where(number))
            total, tokens = total + mean_kld(b, a) * len(b), tokens + len(b)
            largest = max(largest, comparison.deviation(b, a, spread))
        self._before = made
        return Cost(total / tokens, tokens, largest, None)

    def _logits(self, model: ir.Model, run: probe.Run) -> list[NDArray[np.float32]]:
        """Run `run` and keep the logits of real tokens."""
        [logits] = streamed_execution.drive(model, [run], threads=self.threads)
        return [made[step.valid] for made, step in zip(logits, run.steps, strict=True)]


def _spread(logits: Sequence[NDArray[np.float32]]) -> float:
    """Return the standard deviation of all logits, [tokens, V] each, without a copy of them."""
    rows = [row for of_step in logits for row in of_step]
    means, variances = [float(row.mean()) for row in rows], [float(row.var()) for row in rows]
    return float(np.sqrt(np.mean(variances) + np.var(means)))


def vocabulary(model: ir.Model) -> int:
    """Read the number of logits of a row off the graph."""
    return graph.width(graph.output_named(model, interface.LOGITS))
