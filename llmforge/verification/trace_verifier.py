"""Prove a traced graph against transformers: the same logits on the checkpoint's own weights, before any pass runs.

The canonical graph runs expanded, without ONNX Runtime's own optimizations; transformers runs eager, row by row and
without a cache. A model too large to run whole is held to it by its first layers, which show each kind of layer once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base import process
from llmforge.base.errors import NotADecoder, RunFailed, UnsupportedError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph, interface, operators, summary
from llmforge.ir.operators import canonical, standard
from llmforge.trace.export import pattern, replicate_layers
from llmforge.trace.export.limits import LONGEST, TAIL, WHOLE_BYTES
from llmforge.trace.export.pattern import Irregular, Pattern
from llmforge.verification import encoder_trace, probe, streamed_execution
from llmforge.verification.encoder_trace import EncoderProof
from llmforge.verification.trace_comparison import (
    HINT,
    LARGER,
    NUDGES,
    TO_THE_END,
    RoundingNoise,
    StepComparison,
    compare,
    count_kept,
    deviation,
    longest_run,
    make_runs,
    selected,
)

if TYPE_CHECKING:  # these import torch
    from llmforge.trace.export.reference import Given, Observation, ReferenceModel
    from llmforge.verification.magnified import Magnified, ReferenceRuns

# Largest |difference| of a logit, in standard deviations of all logits. 23 two-layer architectures differed by at most
# 7e-6 at a deviation of 0.6, and trained models have outliers; a wrong constant costs far more than this.
TOLERANCE = 1e-4
# What differs by more is held against how far transformers' own numbers move when all that it begins with, and a vector
# of each module, are off by 2⁻²¹, as errors of rounding are: scores in the thousands make much of little.
NUDGE = 2.0**-21
DRAWN = 2  # of which the largest counts
MOST_DRAWN = 8  # before a graph is refused: of eight draws, one may move a token ten times as far as another
SPARE, GARBAGE = 3, 7  # slots of a cache that no token reaches, and what all hold before one does
LARGER_TOLERANCE = 1e-3  # of the run on larger numbers, in which scores and so the rounding of softmax are larger
LARGE_VOCABULARY = 32_768  # beyond it, the logits of a few rows of a step are compared, as hidden states tell
UNBOUNDED = 8192  # positions that are looked at where a configuration does not say how many there are


@dataclass(frozen=True)
class TraceProof:
    """What the check of a traced graph found."""

    layers: int  # that ran, of `depth`
    depth: int
    parameters: int  # that were held against the checkpoint's
    max_abs_difference: float  # of any logit, on the checkpoint's own weights
    allowed: float
    probes: tuple[str, ...]
    unexceeded_windows: tuple[int, ...]  # attention windows longer than every prompt that ran
    undecided: int  # tokens of the run on larger numbers that transformers computes otherwise with every rounding
    seconds: float

    def note(self) -> str:
        """Say it in one line, for a report."""
        of = (
            "all layers" if self.layers == self.depth else f"{self.layers} of {self.depth} layers, the others like them"
        )
        beyond = "".join(f"; no prompt exceeded the attention window of {window}" for window in self.unexceeded_windows)
        if self.undecided:
            beyond += (
                f"; {self.undecided} tokens of larger numbers are undecided: errors of rounding alone move "
                "transformers' own results"
            )
        return (
            f"trace: logits match transformers within {self.max_abs_difference:.2g} (allowed: {self.allowed:.2g}), "
            f"verified with {of} on {', '.join(self.probes)}{beyond}"
        )


def precompute_reference(checkpoint: Checkpoint, whole_bytes: int = WHOLE_BYTES) -> ReferenceRuns:
    """Compute what the graph of `checkpoint` will be held to, as far as that can be told before there is one.

    Raises:
        UnsupportedError: transformers cannot run the model.
    """
    if checkpoint.encoding is not None:
        raise UnsupportedError("an encoder is run when its graph is there")
    from llmforge.verification import magnified
    from llmforge.verification.magnified import ReferenceRuns

    computed = ReferenceRuns(checkpoint, part=4 * checkpoint.parameters > whole_bytes)
    geometry, reference = checkpoint.geometry, computed.reference
    few = geometry.vocabulary > LARGE_VOCABULARY
    head = not few or not reference.stack
    first, *others = make_runs(geometry.vocabulary, sorted(_named_lengths(checkpoint)), geometry.context)
    computed.observed(first, count_kept(first, few), head=True, watched=True)
    for run in others:
        computed.observed(run, count_kept(run, few), head=head)
    larger = magnified.run(geometry.vocabulary, geometry.context)
    weights = [f"{norm.name}.weight" for norm in reference.norms() if norm.in_memory]
    computed.observed(larger, count_kept(larger, few), head=head, magnified_weights=weights)
    long = longest_run(geometry.vocabulary, geometry.context)
    computed.observed(long, count_kept(long, few), head=head, shallow=not computed.part)
    return computed


def verify_trace(
    checkpoint: Checkpoint,
    model: ir.Model,
    *,
    threads: int = 1,
    whole_bytes: int = WHOLE_BYTES,
    computed: ReferenceRuns | None = None,
) -> TraceProof | EncoderProof:
    """Hold `model`, the canonical graph of `checkpoint`, against transformers on the real weights.

    Prefill, decode and continuation, a ragged batch, and a prompt longer than every window up to `LONGEST`. A model of
    more than `whole_bytes` of weights runs with its first layers alone, where its graph says how they repeat. What
    `precompute_reference` has `computed` is not computed again, and its model is released.

    Raises:
        VerificationError: logits differ; names the step and the first layer whose hidden states do.
        UnsupportedError: transformers or ONNX Runtime cannot run the model, or it is of its own attention and what
            would be a defect of the frontend for other models is known to happen there.
    """
    try:
        if checkpoint.encoding is not None:
            return encoder_trace.verify(checkpoint, model, threads=threads)
        return _verify(checkpoint, model, threads, whole_bytes, computed)
    except (UnsupportedError, VerificationError) as error:
        if (reason := model.metadata_props.get(interface.FALLBACK)) is None:
            raise
        from llmforge.trace import NEEDED
        from llmforge.trace.export import fallback

        named = f"architecture {checkpoint.architecture!r} cannot be compiled"
        try:
            if checkpoint.encoding is None:
                fallback.refuse_encoders(checkpoint)
        except NotADecoder as plainer:
            raise NotADecoder(f"{named}: {plainer.message}") from error
        raise UnsupportedError(
            f"{named}: {reason}; tracing the attention from its own code failed too: {error.message}", hint=NEEDED
        ) from error


def _verify(
    checkpoint: Checkpoint, model: ir.Model, threads: int, whole_bytes: int, computed: ReferenceRuns | None
) -> TraceProof:
    process.import_whole("transformers")  # another thread may be at it
    from llmforge.verification import bindings
    from llmforge.verification.magnified import ReferenceRuns

    began = time.perf_counter()
    part = _is_shown_in_part(model, whole_bytes)
    if computed is not None and computed.part != part:
        del computed.reference
        computed = None
    computed = computed or ReferenceRuns(checkpoint, part=part)
    reference = computed.reference
    parameters = bindings.require_bound(checkpoint, model, reference, _idle_parameters(model, reference))
    shown = _some_layers(checkpoint, model, reference) if part else model
    bindings.require_right(shown, reference)
    trial = _TraceTrial.of(checkpoint, model, shown, reference, part=part)
    expected, unknown = trial.expected(computed)
    long = trial.to_the_end(reference)
    expected_long = [long._observed(computed, run) for run in long.runs]
    del reference, computed.reference  # its weights make room for those of the graph
    computed.given.clear()
    verdict = trial.compare(trial.outputs(threads), expected)
    undecided = verdict.undecided + long.compare(long.outputs(threads), expected_long).undecided
    longest = max(run.capacity for run in (*trial.runs, *long.runs))
    return TraceProof(
        layers=len(trial.kept),
        depth=checkpoint.geometry.layers,
        parameters=parameters,
        max_abs_difference=verdict.difference,
        allowed=verdict.allowed,
        probes=tuple(run.name for run in (*trial.runs, *long.runs)),
        unexceeded_windows=tuple(sorted(window for window in unknown if window >= longest)),
        undecided=undecided,
        seconds=time.perf_counter() - began,
    )


def _is_shown_in_part(model: ir.Model, whole_bytes: int) -> bool:
    """Say whether some layers of `model` stand for all of them."""
    size = graph.weight_bytes(model)
    if size <= whole_bytes:
        return False
    if pattern.recorded(model) is not None:
        return True
    if interface.FALLBACK in model.metadata_props:
        raise UnsupportedError(
            f"it is only compiled where it can be proved by running it, up to {whole_bytes:,} bytes of weights in "
            f"fp32; it has {size:,}, and its layers do not repeat"
        )
    return False


def _idle_parameters(model: ir.Model, reference: ReferenceModel) -> set[str]:
    """Name parameters of transformers' model that a text of this graph does not read."""
    from llmforge.trace.hooks import indexers, lightning

    idle = lightning.following(reference.model)
    return idle if interface.recorded_limit(model) is None else idle | indexers.parameters(reference.model)


def _some_layers(checkpoint: Checkpoint, model: ir.Model, reference: ReferenceModel) -> ir.Model:
    """Return the graph with those layers alone that `reference` has, if the others are like them."""
    repetition = pattern.recorded(model)
    assert repetition is not None
    try:
        return _cut(checkpoint, model, reference, repetition)
    except Irregular as error:
        raise VerificationError(f"the traced graph does not match the model: {error.message}", hint=HINT) from error


def _cut(checkpoint: Checkpoint, model: ir.Model, reference: ReferenceModel, repetition: Pattern) -> ir.Model:
    """Return the graph with those layers alone that `reference` runs (Irregular: the others are not like them)."""
    whole = replace(repetition, stack=reference.stack, depth=checkpoint.geometry.layers)
    replicate_layers.require_alike(model, whole, reference.twins)
    return replicate_layers.some_layers(model, repetition, reference.kept)


@dataclass(frozen=True)
class _TraceVerdict:
    """What the comparison of all runs found."""

    difference: float  # the largest of a logit, on the checkpoint's own weights
    allowed: float
    undecided: int  # tokens of the run on larger numbers


@dataclass(frozen=True, eq=False)
class _TraceTrial:
    """The runs of a graph and of transformers' model, and what of them is compared."""

    checkpoint: Checkpoint
    model: ir.Model  # the whole graph
    part: bool
    context: int | None  # tokens; None: not bounded
    large: Magnified  # the graph that runs, whose norms and embeddings may be made larger
    stack: str
    kept: Sequence[int]  # layers that run
    states: Sequence[str]  # hidden states after each of them; () where they are no single tensors
    runs: Sequence[probe.Run]
    shallow: bool = False  # whether of a model that is there as a whole, some layers run

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, model: ir.Model, shown: ir.Model, reference: ReferenceModel, *, part: bool
    ) -> _TraceTrial:
        """Choose the runs; `shown` is the graph with the layers that `reference` has."""
        from llmforge.verification import magnified

        vocabulary, context = checkpoint.geometry.vocabulary, checkpoint.geometry.context
        if (limit := interface.recorded_limit(model)) is not None:
            context = limit.tokens if context is None else min(context, limit.tokens)
        if interface.FALLBACK in model.metadata_props:
            windows = [LONGEST - TAIL]
        else:
            windows = sorted({*_windows(model), *_named_lengths(checkpoint)})
        runs = [*make_runs(vocabulary, windows, context), magnified.run(vocabulary, context)]
        states = _hidden_states(shown, reference.stack, checkpoint.geometry.layers, reference.kept)
        large = magnified.Magnified.of(shown, reference)
        return cls(checkpoint, model, part, context, large, reference.stack, reference.kept, states, runs)

    def to_the_end(self, reference: ReferenceModel) -> _TraceTrial:
        """Make the trial of a text as long as the context, of some layers where they stand for all."""
        run = longest_run(self.checkpoint.geometry.vocabulary, self.context)
        if self.part:
            return replace(self, runs=[run])
        from llmforge.verification import magnified

        repetition = pattern.recorded(self.model)
        if repetition is None or not self.stack:
            return replace(self, runs=[run])
        with reference.shallow():
            kept = [*reference.kept]
            try:
                shown = _cut(self.checkpoint, self.model, reference, repetition)
            except Irregular:
                return replace(self, runs=[run])
        states = _hidden_states(shown, self.stack, self.checkpoint.geometry.layers, kept)
        large = magnified.Magnified.of(shown, reference)
        return replace(self, large=large, kept=kept, states=states, runs=[run], shallow=True)

    @property
    def few(self) -> bool:
        """Whether the logits of a few rows of a step are compared."""
        return self.checkpoint.geometry.vocabulary > LARGE_VOCABULARY

    def has_head(self, run: probe.Run) -> bool:
        """Whether logits are compared; else hidden states tell, and the first run what the head makes of them."""
        return not self.few or not self.states or (run is self.runs[0] and run.name != TO_THE_END)

    def expected(self, computed: ReferenceRuns) -> tuple[list[list[Observation]], set[int]]:
        """Run transformers' model; return what it gives, and the windows of which nothing could be told.

        Raises:
            VerificationError: masks or angles of positions are not those that its layers are given.
        """
        first, *others = self.runs
        made = [computed.observed(first, count_kept(first, self.few), head=True, watched=True)]
        unknown = self._require_positions(computed.given)
        return [*made, *(self._observed(computed, run) for run in others)], unknown

    def _observed(self, computed: ReferenceRuns, run: probe.Run) -> list[Observation]:
        """Run the rows of `run`, those of the last run on larger numbers."""
        weights = self.large.weights if run.name == LARGER else None
        return computed.observed(
            run, count_kept(run, self.few), head=self.has_head(run), shallow=self.shallow, magnified_weights=weights
        )

    def _require_positions(self, given: Sequence[Given]) -> set[int]:
        """Compare masks and rotary angles of every layer with those that `given` has."""
        from llmforge.verification import positions

        layers = _layers_of(self.model, self.stack, self.checkpoint.geometry.layers)
        named = _named_lengths(self.checkpoint)
        unknown = positions.require_windows(layers, given, self.context or UNBOUNDED, named)
        positions.require_angles(self.model, layers, given, self.context or UNBOUNDED, named)
        return set(unknown)

    def outputs(self, threads: int) -> list[list[dict[str, NDArray[Any]]]]:
        """Run the graph (VerificationError: it does not run)."""
        model = self.large.model
        values = {value.name: value for node in model.graph for value in node.outputs}
        model.graph.outputs.extend(values[name] for name in self.states)

        def capacity(run: probe.Run) -> int:
            return run.capacity + SPARE if self.context is None else min(run.capacity + SPARE, self.context)

        try:
            return streamed_execution.outputs(
                model,
                self.runs,
                [interface.LOGITS, *self.states],
                streamed_execution.Feeding(lambda step: selected(step, self.few), capacity, GARBAGE, self.large.given),
                threads=threads,
            )
        except RunFailed as error:
            raise VerificationError(f"the traced graph does not run: {str(error).splitlines()[0]}") from error

    def compare(
        self, made: Sequence[Sequence[Mapping[str, NDArray[Any]]]], expected: Sequence[Sequence[Observation]]
    ) -> _TraceVerdict:
        """Compare what the graph `made` in each step of each run with what is `expected`.

        Raises:
            VerificationError: they differ by more than rounding may.
        """
        compared = [
            self._compared(run, steps, wanted) for run, steps, wanted in zip(self.runs, made, expected, strict=True)
        ]
        plain = [each for run, steps in zip(self.runs, compared, strict=True) for each in steps if run.name != LARGER]
        allowed = TOLERANCE * deviation(np.concatenate([each.expected.ravel() for each in plain]))
        where = [f"{self.stack}.{index}" for index in self.kept]
        undecided, moves = 0, 0.0
        for run, steps, here in zip(self.runs, made, compared, strict=True):
            larger = run.name == LARGER
            may_be_chaotic = larger or run.name == TO_THE_END
            tolerance = LARGER_TOLERANCE if larger else TOLERANCE
            bounds = [tolerance * deviation(each.expected) if larger else allowed for each in here]
            require = partial(_require, here, bounds, tolerance, where, may_be_chaotic)
            noises = [RoundingNoise()] * len(here)
            if any(each.diverges(bound, tolerance) for each, bound in zip(here, bounds, strict=True)):
                noises = self._noises(run, steps, here, require)
            undecided += require(noises)
            moves = max(moves, *(0.0 if larger else NUDGES * noise.logits for noise in noises))
        return _TraceVerdict(max(each.difference for each in plain), max(allowed, moves), undecided)

    def _compared(
        self, run: probe.Run, steps: Sequence[Mapping[str, NDArray[Any]]], wanted: Sequence[Observation]
    ) -> list[StepComparison]:
        return compare(run, steps, wanted, self.states, self.few, head=self.has_head(run))

    def _noises(
        self,
        run: probe.Run,
        steps: Sequence[Mapping[str, NDArray[Any]]],
        here: Sequence[StepComparison],
        require: Callable[[Sequence[RoundingNoise]], int],
    ) -> list[RoundingNoise]:
        """Compute what is expected of `run` anew, of numbers that errors of rounding moved, until `require` holds."""
        from llmforge.verification.magnified import ReferenceRuns

        others: list[list[StepComparison]] = []
        noises: list[RoundingNoise] = []
        for seed in range(MOST_DRAWN):
            again = ReferenceRuns(self.checkpoint, part=self.part)
            with again.reference.nudged(NUDGE, seed):
                moved = self._observed(again, run)
            others.append(self._compared(run, steps, moved))
            noises = [RoundingNoise.between(each, [other[at] for other in others]) for at, each in enumerate(here)]
            if len(others) >= DRAWN:
                with suppress(VerificationError):
                    require(noises)
                    break
        return noises


def _require(
    steps: Sequence[StepComparison],
    bounds: Sequence[float],
    tolerance: float,
    layers: Sequence[str],
    may_be_chaotic: bool,
    noises: Sequence[RoundingNoise],
) -> int:
    """Require that `steps` of a run hold, as `StepComparison.require` does; return how many tokens are undecided."""
    return sum(
        step.require(bound, tolerance, layers, noise, may_be_chaotic=may_be_chaotic)
        for step, bound, noise in zip(steps, bounds, noises, strict=True)
    )


def _windows(model: ir.Model) -> set[int]:
    """List the attention windows, chunks and rotary borders of a graph, in tokens."""
    of_attention = {layer.window for kind in canonical.ATTENTIONS for layer in kind.all(model)}
    chunks = {layer.chunk for layer in canonical.Attention.all(model)}
    return {*((of_attention | chunks) - {0}), *summary.rotary_switches(model)}


def _named_lengths(checkpoint: Checkpoint) -> set[int]:
    """List the lengths within its context that the configuration names."""
    context = checkpoint.geometry.context
    return {tokens for _, tokens in checkpoint.configuration.lengths if context is None or tokens < context}


def prove_candidate(checkpoint: Checkpoint, model: ir.Model) -> None:
    """Hold `model` against transformers if its metadata says that it may not be used before (`interface.FALLBACK`).

    Raises:
        UnsupportedError: logits differ, or the model cannot be run.
    """
    if interface.FALLBACK in model.metadata_props:
        verify_trace(checkpoint, model)


def _hidden_states(model: ir.Model, stack: str, depth: int, kept: Sequence[int]) -> list[str]:
    """Name what each of the layers `kept` hands over; [] where it is not a single tensor."""
    if not stack:
        return []
    try:
        return replicate_layers.hidden_states(model, Pattern(stack, depth, depth, 0), kept)
    except Irregular:
        return []


def _layers_of(model: ir.Model, stack: str, depth: int) -> dict[int, list[ir.Node]]:
    """Divide what attention and rotary embedding a graph has among its layers."""
    layers: dict[int, list[ir.Node]] = {index: [] for index in range(depth if stack else 0)}
    named = re.compile(rf"{re.escape(stack)}\.(\d+)[./]")
    for node in model.graph if stack else ():
        if operators.is_a(node, *canonical.ATTENTIONS, standard.RotaryEmbedding):
            match = named.match(node.name or "")
            if match is None or int(match[1]) not in layers:
                raise VerificationError(f"node {node.name} of the traced graph is of no layer", hint=HINT)
            layers[int(match[1])].append(node)
    return layers
