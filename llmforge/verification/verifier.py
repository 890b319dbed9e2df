"""Prove after every pass what it declares: the same logits, the same but for rounding, or within a budget."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base.errors import UnsupportedError, UsageError, VerificationError
from llmforge.ir import dialect, graph, interface
from llmforge.rewrite import pruning
from llmforge.rewrite.pass_base import Budget, Changes, Numerics, Pass
from llmforge.trace.export.limits import WHOLE_BYTES
from llmforge.verification import comparison, lossy_places, probe, reports, subgraph_proof
from llmforge.verification.promises import Promises
from llmforge.verification.reports import GraphSnapshot
from llmforge.verification.subgraph_proof import Difference
from llmforge.verification.text_loss import StreamedLoss, TextLoss

# Largest |difference| that ROUNDING allows, in standard deviations of what is compared: all logits of the probes, or
# one cache. Only dtypes that were measured stand here.
# FLOAT: 23 two-layer architectures, their attention lowered in up to three ways, moved logits by at most 7e-6 at a
# deviation of 0.6, which is 1.2e-5. Errors of independent layers add up like a random walk: 80 layers make √40 of it.
TOLERANCE: Mapping[ir.DataType, float] = {ir.DataType.FLOAT: 1e-4}

BESIDE_BYTES = 1 << 33  # of fp32 weights; a layer of a model with more takes 0.3 GB

_Array = NDArray[Any]


@dataclass(frozen=True)
class PassVerification:
    """What the check of one pass found, against the graph before the pass.

    A difference is in standard deviations of what differs: all logits of the probes, a cache, or what a changed
    subgraph makes, where `probes` tell of subgraphs. A `kld_mean` above the `budget` is no error here: what becomes of
    it, the build decides when all proofs have ended.
    """

    numerics: Numerics
    largest_difference: float
    allowed: float | None  # largest `largest_difference` that the numerics allow; None where the budget decides
    kld_mean: float | None  # nats a token, on text; None where it was not measured
    budget: float | None  # largest kld_mean that the recipe allows
    probes: tuple[str, ...]  # names of the runs; () where the graph is unchanged
    seconds: float


class Verifier:
    """Follows a graph from pass to pass, and holds each pass to what it declares.

    Args:
        before: the graph before the first pass.
        promises: lengths and places that a graph must be right at.
        folder: where the graphs before and after a failed pass are saved, without weights.
        texts: windows of token ids, int64 [length], that budgets of lossy passes are measured on.
        threads: of ONNX Runtime.
        whole_bytes: of weights; a graph with more is never run whole, but streamed (`StreamedLoss`).

    Raises:
        UnsupportedError: no tolerance is known for the dtype of the logits.
    """

    def __init__(
        self,
        before: ir.Model | GraphSnapshot,
        *,
        promises: Promises,
        folder: Path,
        texts: Sequence[NDArray[np.int64]] = (),
        threads: int = 1,
        whole_bytes: int = WHOLE_BYTES,
    ) -> None:
        self._promises, self._folder, self._threads, self._texts = promises, folder, threads, texts
        self._weights = probe.InitializerArrays()
        self._before = before if isinstance(before, GraphSnapshot) else GraphSnapshot.of(before)
        model = self._before.model
        self._tolerance = _tolerance(model)
        self._loss = StreamedLoss(texts, threads) if graph.weight_bytes(model) > whole_bytes else None
        self._text = TextLoss(probe.text_runs(texts, promises.vocabulary))

    @property
    def streams(self) -> bool:
        """Whether the model is too large to run whole."""
        return self._loss is not None

    def prepare(self, model: ir.Model) -> None:
        """Compute what the proof of a lossy pass needs of the graph before it, or after, beside proofs of others.

        It does nothing where a layer takes so much memory that two graphs should not run side by side.
        """
        if self._loss is not None and graph.weight_bytes(model) <= BESIDE_BYTES:
            self._loss.prepare(model)

    def check(self, step: Pass, model: ir.Model, changes: Changes) -> PassVerification:
        """Hold `model`, which `step` changed as `changes` says, against the graph before; it is the next one's before.

        Raises:
            VerificationError, UsageError: as `prove`.
        """
        return self.prove(step, GraphSnapshot.of(model), changes, self._before.overwritten())

    def prove(self, step: Pass, after: GraphSnapshot, changes: Changes, overwritten: str | None) -> PassVerification:
        """Hold the graph `after` the pass `step` against the graph before; it is the next one's before.

        `overwritten` is what of the graph before was changed in place, when the pass had run.

        Raises:
            VerificationError: `step` did not do what it declares. Both graphs were saved.
            UsageError: `step` is lossy, but there is no text to measure its budget on.
        """
        started, model = time.perf_counter(), after.model
        try:
            reports.check(step.name, self._before, model, changes, overwritten)
            result = self._prove(step, after) if changes else self._unchanged(step)
        except VerificationError as error:
            error.hint = f"both graphs were saved, without weights: {self._save(step.name, model)}"
            raise
        return changed(result, seconds=time.perf_counter() - started)

    def _unchanged(self, step: Pass) -> PassVerification:
        allowed = None if step.numerics is Numerics.LOSSY else 0.0
        return PassVerification(step.numerics, 0.0, allowed, None, None, (), 0.0)

    def _prove(self, step: Pass, after: GraphSnapshot) -> PassVerification:
        model = after.model
        try:
            dialect.check(model)
        except VerificationError as error:
            raise VerificationError(f"pass {step.name} wrote a graph outside the dialect: {error.message}") from error
        if (other := _other_interface(self._before.model, model, step)) is not None:
            raise not_as_declared(step, other)
        try:
            if step.numerics is not Numerics.LOSSY:
                result = self._prove_subgraphs(step, after)
            else:
                result = self._prove_loss(step, after)
        except UnsupportedError as error:
            raise VerificationError(f"pass {step.name} wrote a graph that does not run: {error}") from error
        self._before = after
        self._weights.keep(model)
        return result

    def _seed(self, after: GraphSnapshot) -> int:
        """Make a seed of both graphs, so that a pass cannot know what is drawn."""
        digest = hashlib.sha256(f"{self._before.fingerprint} {after.fingerprint}".encode())
        return int.from_bytes(digest.digest()[:8])

    def _excerpt(self, seed: int) -> NDArray[np.int64] | None:
        """Draw a place in the texts, from which some tokens are read."""
        if not len(self._texts):
            return None
        random = np.random.default_rng(seed)
        window = self._texts[int(random.integers(len(self._texts)))]
        return window[int(random.integers(max(1, len(window) - subgraph_proof.TOKENS + 1))) :]

    def _prove_subgraphs(self, step: Pass, after: GraphSnapshot) -> PassVerification:
        """Prove a pass on the subgraphs that it changed."""
        seed = self._seed(after)
        tolerance = 0.0 if step.numerics is Numerics.EXACT else self._tolerance
        found = subgraph_proof.prove(
            self._before.model,
            after.model,
            self._promises,
            tolerance=tolerance,
            threads=self._threads,
            seed=seed,
            text=self._excerpt(seed),
        )
        if isinstance(found, Difference):
            raise not_as_declared(step, found)
        return PassVerification(step.numerics, found.largest, tolerance, None, None, found.names, 0.0)

    def _prove_loss(self, step: Pass, after: GraphSnapshot) -> PassVerification:
        """Hold a lossy pass to its budget, and to losing everywhere what it loses on the text."""
        require_text(step, self._texts)
        measure = self._measure_whole if self._loss is None else self._measure_streamed
        places = lossy_places.hold(
            self._before.model,
            after.model,
            self._promises,
            tolerance=self._tolerance,
            threads=self._threads,
            seed=self._seed(after),
        )
        result = measure(step, after.model)  # last: whole graphs may run beside
        if isinstance(places, Difference):
            raise not_as_declared(step, places)
        if not places.steps:
            return result
        return changed(result, probes=(*result.probes, f"{places.steps} steps at drawn places{places.cut}"))

    def _measure_streamed(self, step: Pass, model: ir.Model) -> PassVerification:
        assert self._loss is not None
        budget = budget_of(step).kld_mean
        cost = self._loss.measure(self._before.model, model)
        if cost.not_finite is not None:
            raise VerificationError(
                f"pass {step.name}: logits are NaN or infinite in {cost.not_finite}{_end_of_range(model)}"
            )
        name = f"{cost.tokens} tokens of text, piece by piece"
        return PassVerification(step.numerics, cost.largest, None, cost.kld_mean, budget, (name,), 0.0)

    def _measure_whole(self, step: Pass, model: ir.Model) -> PassVerification:
        budget = budget_of(step).kld_mean
        after = probe.open_session(model, self._weights, self._threads)
        cost = self._text.measure(
            lambda: probe.open_session(self._before.model, self._weights, self._threads), after, budget
        )
        if cost.not_finite is not None:
            run, number = cost.not_finite
            where = f"{run.where(number)}; {self._origin(model, run, number)}{_end_of_range(model)}"
            raise not_as_declared(step, Difference("logits are NaN or infinite", where))
        return PassVerification(step.numerics, cost.largest, None, cost.kld_mean, budget, cost.names, 0.0)

    def _origin(self, model: ir.Model, run: probe.Run, number: int) -> str:
        """Name the first tensor of both graphs that is infinitely far off in step `number` of `run`."""
        before, after = probe.executable(self._before.model), probe.executable(model)
        there = {value.name for node in after.graph for value in node.outputs}
        made = (value.name for node in before.graph for value in node.outputs)
        names = [name for name in made if name and name in there]
        b, a = (
            probe.observe(probe.open_session(m, self._weights, self._threads, names), run, number, names)
            for m in (self._before.model, model)
        )
        caches = {str(value.name) for value in before.graph.outputs} - {interface.LOGITS}
        step = run.steps[number]

        def valid(arrays: Mapping[str, _Array], name: str) -> _Array | None:
            return comparison.valid(arrays[name], step, name if name in caches else None)

        return _first_divergence({name: (valid(b, name), valid(a, name)) for name in names})

    def _save(self, name: str, model: ir.Model) -> str:
        """Write the graphs before and after the pass `name`; return the two paths."""
        self._folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for moment, graph_then in (("before", self._before.model), ("after", model)):
            clone = graph_then.clone()
            probe.strip(clone)
            path = self._folder / f"{name}.{moment}.onnx"
            path.write_bytes(ir.serde.serialize_model(clone).SerializeToString())
            paths.append(str(path))
        return ", ".join(paths)


def _first_divergence(pairs: Mapping[str, tuple[_Array | None, _Array | None]]) -> str:
    """Describe the first of `pairs` (before, after), in the order of the graph, that is infinitely far off."""
    for name, (b, a) in pairs.items():
        if b is None or a is None or b.shape != a.shape or b.dtype != a.dtype or b.tobytes() == a.tobytes():
            continue
        deviation = comparison.deviation(b, a)
        if np.isinf(deviation):
            return f"first diverging tensor: {name}, by {deviation:.3g} of its standard deviation"
    return "no tensor that both graphs name differs in that step"


def _end_of_range(model: ir.Model) -> str:
    """Say why numbers of an fp16 graph may be infinite."""
    held = any(value.dtype == ir.DataType.FLOAT16 for value in model.graph.initializers.values())
    return ". fp16 ends at 65504, which a number exceeded; bf16 has the range of fp32" if held else ""


def not_as_declared(step: Pass, found: Difference) -> VerificationError:
    """Make the error of a pass that does something else than it declares."""
    return VerificationError(f"pass {step.name} declares {step.numerics.value}: {found.what} in {found.where}")


def require_text(step: Pass, texts: Sequence[object]) -> None:
    """Return if there is text that the budget of `step` can be measured on.

    Raises:
        UsageError: there is none.
    """
    if not len(texts):
        raise UsageError(
            f"pass {step.name} is lossy, but there is no text to measure its budget on",
            hint="add calibration or evaluation data to the recipe",
        )


def _other_interface(before: ir.Model, after: ir.Model, step: Pass) -> Difference | None:
    """Say which caches or outputs `after` has that `before` lacks, or the other way round.

    Those of layers that `step` may take out, and says that it did, may be lacking.
    """

    def names(model: ir.Model) -> set[str]:
        outputs = {str(value.name) for value in model.graph.outputs}
        return outputs | {str(v.name) for v in model.graph.inputs if interface.present_of(str(v.name)) != v.name}

    gone = pruning.dropped_caches(after) if step.drops_caches else set[str]()
    other = sorted((names(before) - gone) ^ names(after))
    return Difference(f"the graph has other caches ({', '.join(other)})", "its interface") if other else None


def budget_of(step: Pass) -> Budget:
    """Return the budget of a lossy pass."""
    budget = getattr(step, "budget", None)
    assert isinstance(budget, Budget), f"pass {step.name} is lossy and has no field `budget`"
    return budget


def _tolerance(model: ir.Model) -> float:
    """Look up the tolerance of the dtype that `model` computes its logits, or embeddings, in."""
    logits = model.graph.outputs[0] if interface.encodes(model) else graph.output_named(model, interface.LOGITS)
    tolerance = None if logits.dtype is None else TOLERANCE.get(logits.dtype)
    if tolerance is None:
        raise UnsupportedError(
            f"logits are {logits.dtype}; rounding tolerances are known for {', '.join(d.name for d in TOLERANCE)}"
        )
    return tolerance
