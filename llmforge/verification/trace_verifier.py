"""Prove a traced graph against transformers: the same logits on the checkpoint's own weights, before any pass runs.

The canonical graph runs expanded, without ONNX Runtime's own optimizations; transformers runs eager, row by row and
without a cache. A model too large to run whole is held to it by its first layers, which show each kind of layer once.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base import process
from llmforge.base.errors import NotADecoder, RunFailed, UnsupportedError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph, interface, longest_text, operators, summary
from llmforge.ir.operators import canonical, standard
from llmforge.trace.export import pattern, replicate_layers
from llmforge.trace.export.limits import LONGEST, TAIL, WHOLE_BYTES
from llmforge.trace.export.pattern import Irregular, Pattern
from llmforge.verification import probe, streamed_execution

if TYPE_CHECKING:
    from llmforge.trace.export.reference import Observation
    from llmforge.verification.expected import Expected

# Largest |difference| of a logit, in standard deviations of all logits. 23 two-layer architectures differed by at most
# 7e-6 at a deviation of 0.6, and trained models have outliers; a wrong constant costs far more than this.
TOLERANCE = 1e-4
# What differs by more is held against how far transformers' own numbers move when all that it begins with, and a vector
# of each module, are off by 2⁻²¹, as errors of rounding are: scores in the thousands make much of little.
NUDGE, NUDGES = 2.0**-21, 8.0
DRAWN = 2  # of which the larger counts
CHAOTIC = 0.1  # of the deviation of a token: where rounding moves more than that, no comparison can tell
RAGGED = 5  # tokens by which a context exceeds the shorter row of a ragged batch, at least
SPARE, GARBAGE = 3, 7  # slots of a cache that no token reaches, and what all hold before one does
LARGER_TOLERANCE = 1e-3  # of the run on larger numbers, in which scores and so the rounding of softmax are larger
LARGE_VOCABULARY, FEW = 32_768, 4  # beyond it, the logits of a few rows of a step are compared, as hidden states tell
UNBOUNDED = 8192  # positions that are looked at where a configuration does not say how many there are
NOTHING = np.zeros((0, 1), np.float32)
SEED = 20_241_103  # any fixed number
LONG = "a prompt longer than the windows"
HINT = "this is a bug in llmforge's support of this architecture; nothing was built"


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


def foresee(checkpoint: Checkpoint, whole_bytes: int = WHOLE_BYTES) -> Expected:
    """Compute what the graph of `checkpoint` will be held against, as far as that can be told before there is one.

    Raises:
        UnsupportedError: transformers cannot run the model.
    """
    from llmforge.verification import magnified
    from llmforge.verification.expected import Expected

    expected = Expected(checkpoint, part=4 * checkpoint.parameters > whole_bytes)
    geometry, few = checkpoint.geometry, checkpoint.geometry.vocabulary > LARGE_VOCABULARY
    head = not few or not expected.reference.stack
    first, *others = _runs(geometry.vocabulary, sorted(_named(checkpoint)), geometry.context)
    expected.watched(_rows(first), _kept(first, few))
    for run in others:
        expected.plain(_rows(run), _kept(run, few), head=head)
    larger = magnified.run(geometry.vocabulary, geometry.context)
    weights = [f"{norm.name}.weight" for norm in expected.reference.norms() if norm.in_memory]
    expected.larger(_rows(larger), _kept(larger, few), weights, head=head)
    return expected


def verify_trace(
    checkpoint: Checkpoint,
    model: ir.Model,
    *,
    threads: int = 1,
    whole_bytes: int = WHOLE_BYTES,
    foreseen: Expected | None = None,
) -> TraceProof:
    """Hold `model`, the canonical graph of `checkpoint`, against transformers on the real weights.

    Prefill, decode and continuation, a ragged batch, and a prompt longer than every window up to `LONGEST`. A model of
    more than `whole_bytes` of weights runs with its first layers alone, where its graph says how they repeat. What was
    `foreseen` of transformers' own results is not computed again, and lets go of its model.

    Raises:
        VerificationError: logits differ; names the step and the first layer whose hidden states do.
        UnsupportedError: transformers or ONNX Runtime cannot run the model, or it is of its own attention and what
            would be a defect of the frontend elsewhere is known to happen there.
    """
    try:
        return _verify(checkpoint, model, threads, whole_bytes, foreseen)
    except (UnsupportedError, VerificationError) as error:
        if (reason := model.metadata_props.get(interface.FALLBACK)) is None:
            raise
        from llmforge.trace import NEEDED
        from llmforge.trace.export import fallback

        named = f"architecture {checkpoint.architecture!r} cannot be compiled"
        try:
            fallback.refuse_encoders(checkpoint)
        except NotADecoder as plainer:
            raise NotADecoder(f"{named}: {plainer.message}") from error
        raise UnsupportedError(
            f"{named}: {reason}; tracing the attention from its own code failed too: {error.message}", hint=NEEDED
        ) from error


def _verify(
    checkpoint: Checkpoint, model: ir.Model, threads: int, whole_bytes: int, foreseen: Expected | None
) -> TraceProof:
    process.import_whole("transformers")  # another thread may be at it
    from llmforge.trace.export.reference import ReferenceModel  # here, because it imports torch
    from llmforge.trace.hooks import indexers, lightning
    from llmforge.verification import bindings, magnified, norms, positions
    from llmforge.verification.expected import Expected

    began = time.perf_counter()
    repetition = pattern.recorded(model)
    depth = checkpoint.geometry.layers
    part = repetition is not None and graph.weight_bytes(model) > whole_bytes
    own = interface.FALLBACK in model.metadata_props
    if own and not part and graph.weight_bytes(model) > whole_bytes:
        raise UnsupportedError(
            f"it is only compiled where it can be proved by running it, up to {whole_bytes:,} bytes of weights in "
            f"fp32; it has {graph.weight_bytes(model):,}, and its layers do not repeat"
        )
    context, limit = checkpoint.geometry.context, longest_text.recorded(model)
    if limit is not None:
        context = limit.tokens if context is None else min(context, limit.tokens)
    named = _named(checkpoint)
    of_attention = {layer.window for kind in canonical.ATTENTIONS for layer in kind.all(model)}
    of_attention = (of_attention | {layer.chunk for layer in canonical.Attention.all(model)}) - {0}
    windows = sorted(of_attention | summary.rotary_switches(model))
    if foreseen is not None and foreseen.part != part:
        del foreseen.reference
        foreseen = None
    ahead = foreseen or Expected(checkpoint, part=part)
    reference = ahead.reference
    idle = lightning.following(reference.model) | (set() if limit is None else indexers.parameters(reference.model))
    parameters = bindings.require_bound(checkpoint, model, reference, idle)
    shown = model
    if part:
        assert repetition is not None
        try:
            replicate_layers.require_alike(
                model, replace(repetition, stack=reference.stack, depth=depth), reference.twins
            )
            shown = replicate_layers.some_layers(model, repetition, reference.kept)
        except Irregular as error:
            raise VerificationError(f"the traced graph does not match the model: {error.message}", hint=HINT) from error
    norms.require_right(shown, reference)
    vocabulary = checkpoint.geometry.vocabulary
    runs = _runs(vocabulary, sorted({LONGEST - TAIL} if own else {*windows, *named}), context)
    few = vocabulary > LARGE_VOCABULARY
    expected, given = [ahead.watched(_rows(runs[0]), _kept(runs[0], few))], ahead.given
    layers = _layers_of(model, reference.stack, depth)
    unknown = positions.require_windows(layers, given, context or UNBOUNDED, named)
    positions.require_angles(model, layers, given, context or UNBOUNDED, named)
    states = _hidden_states(shown, reference.stack, depth, reference.kept) if reference.stack else []
    head = not few or not states  # else hidden states tell, and the first run tells what the head makes of them
    for run in runs[1:]:
        expected.append(ahead.plain(_rows(run), _kept(run, few), head=head))
    large, larger = magnified.Magnified.of(shown, reference), magnified.run(vocabulary, context)
    expected.append(ahead.larger(_rows(larger), _kept(larger, few), large.weights, head=head))
    runs.append(larger)
    kept_layers = reference.kept
    where = [f"{reference.stack}.{index}" for index in kept_layers]

    def moved(run: probe.Run, seed: int) -> list[Observation]:
        """Compute what is expected of `run` once more, of numbers that errors of rounding moved."""
        again = ReferenceModel(checkpoint, part=part)
        with again.nudged(NUDGE, seed):
            if run is larger:
                with again.magnified(large.weights, magnified.ADDED, magnified.SCALES):
                    return again.run_batch(np.stack(_rows(run)), _kept(run, few), head=head)
            return [again.run(ids, min(len(ids), _kept(run, few)), head=head or run is runs[0]) for ids in _rows(run)]

    del reference, ahead.reference  # its weights make room for those of the graph
    _give_out(large.model, states)

    def slots(run: probe.Run) -> int:
        return run.capacity + SPARE if context is None else min(run.capacity + SPARE, context)

    try:
        made = streamed_execution.outputs(
            large.model,
            runs,
            [interface.LOGITS, *states],
            streamed_execution.Feeding(lambda step: _selected(step, few), slots, GARBAGE, large.given),
            threads=threads,
        )
    except RunFailed as error:
        raise VerificationError(f"the traced graph does not run: {str(error).splitlines()[0]}") from error
    compared = {
        run.name: _compare(run, steps, wanted, states, few, head=head or run is runs[0])
        for run, steps, wanted in zip(runs, made, expected, strict=True)
    }
    plain = [each for run in runs if run is not larger for each in compared[run.name]]
    allowed = TOLERANCE * float(np.concatenate([each.expected.ravel() for each in plain]).std())
    undecided, moves = 0, 0.0
    for run, steps in zip(runs, made, strict=True):
        here = compared[run.name]
        tolerance = LARGER_TOLERANCE if run is larger else TOLERANCE
        bounds = [tolerance * _deviation(each.expected) if run is larger else allowed for each in here]
        if any(each.diverges(bound, tolerance) for each, bound in zip(here, bounds, strict=True)):
            others = [
                _compare(run, steps, moved(run, seed), states, few, head=head or run is runs[0])
                for seed in range(DRAWN)
            ]
            noises = [_Noise.between(each, [other[at] for other in others]) for at, each in enumerate(here)]
        else:
            noises = [_Noise()] * len(here)
        for each, bound, noise in zip(here, bounds, noises, strict=True):
            undecided += each.require(bound, tolerance, where, noise, may_be_chaotic=run is larger)
            moves = max(moves, 0.0 if run is larger else NUDGES * noise.logits)
    longest = max(run.capacity for run in runs)
    return TraceProof(
        layers=len(kept_layers),
        depth=depth,
        parameters=parameters,
        max_abs_difference=max(each.difference for each in plain),
        allowed=max(allowed, moves),
        probes=tuple(run.name for run in runs),
        unexceeded_windows=tuple(sorted(window for window in unknown if window >= longest)),
        undecided=undecided,
        seconds=time.perf_counter() - began,
    )


def _named(checkpoint: Checkpoint) -> set[int]:
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


def _runs(vocabulary: int, windows: Sequence[int], context: int | None) -> list[probe.Run]:
    """Make the runs: one row in all kinds of step, a ragged batch, and a prompt beyond the windows."""
    rng = np.random.default_rng(SEED)

    def draw(tokens: int) -> NDArray[np.int64]:
        return rng.integers(0, vocabulary, tokens, np.int64)

    most = LONGEST if context is None else context
    counts = _within(most, (12, 1, 1, 1, 5))
    runs = [probe.schedule("one row", [draw(sum(counts))], [(count,) for count in counts])]
    if most > RAGGED:
        short, long = min(9, most - RAGGED), min(12, most - 2)
        rows = [draw(short + 2), draw(long + 2)]
        runs.append(probe.schedule("a ragged batch", rows, [(short, long), (1, 1), (1, 1)]))
    within = [window for window in windows if window <= LONGEST - TAIL]
    if within and most > 2:
        length = min(within[-1] + TAIL, most - 2)
        runs.append(probe.schedule(LONG, [draw(length + 2)], [(length,), (1,), (1,)]))
    return runs


def _within(most: int, counts: Sequence[int]) -> list[int]:
    """Take tokens from the longest of the steps `counts`, until `most` remain; those without tokens are left out."""
    kept = [*counts]
    while sum(kept) > most:
        kept[kept.index(max(kept))] -= 1
    return [count for count in kept if count]


def _rows(run: probe.Run) -> list[NDArray[np.int64]]:
    """Put the tokens of each row of `run` together again."""
    return [np.concatenate([step.ids[b, : step.lengths[b]] for step in run.steps]) for b in range(run.batch)]


def _selected(step: probe.ProbeCall, few: bool) -> NDArray[np.int64]:
    """Choose the rows of a step that get logits: all, the tail of a long one, or a `few`."""
    most = FEW if few else 2 * TAIL
    return step.rows if len(step.rows) <= most else step.rows[-(FEW if few else TAIL) :]


@dataclass(frozen=True, eq=False)
class _Comparison:
    """What one step gave one row, and what transformers gave it.

    Logits are fp32 [tokens, V]; hidden states, by layer, fp32 [tokens, hidden], of all tokens of the step; of several
    streams, [tokens, streams, hidden].
    """

    run: probe.Run
    step: int
    row: int
    got: NDArray[np.float32]
    expected: NDArray[np.float32]
    hidden: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]]

    @property
    def difference(self) -> float:
        return float(np.abs(self.got - self.expected).max(initial=0.0))

    def diverges(self, allowed: float, tolerance: float) -> bool:
        """Say whether logits differ by more than `allowed`, or hidden states by more than `tolerance`."""
        return not self.difference <= allowed or any(
            not (np.abs(got - expected).max(-1) <= tolerance * expected.std(-1)).all() for got, expected in self.hidden
        )

    def require(
        self, allowed: float, tolerance: float, layers: Sequence[str], noise: _Noise, *, may_be_chaotic: bool
    ) -> int:
        """Return how many tokens are undecided, if all others are equal.

        Logits may differ by `allowed`, hidden states of `layers` by `tolerance` of the deviation of their token; both
        by as much as `noise` moves them. Where that is too much to tell, a token is undecided.

        Raises:
            VerificationError: they are not; names the step and the first layer that differs. Or tokens are undecided,
                and it is not so that the run `may_be_chaotic`.
        """
        at = f"the traced graph does not match the model in {self.run.where(self.step)}, row {self.row}"
        chaotic = np.zeros(len(self.hidden[0][1]) if self.hidden else 1, np.bool_)
        for number, (layer, (got, expected)) in enumerate(zip(layers, self.hidden, strict=False)):
            difference, spread = _streams(np.abs(got - expected).max(-1)), _streams(expected.std(-1))
            moves = NUDGES * _streams(noise.hidden[number]) if noise.hidden else np.zeros_like(spread)
            chaotic |= (moves > CHAOTIC * spread).any(-1)
            wrong = ~(difference <= np.maximum(tolerance * spread, moves))  # `not <=`: NaN differs
            if chaotic.any() and not may_be_chaotic:
                raise _undecided(f"hidden states of {layer}", self.run.where(self.step))
            if len(diverging := np.argwhere(wrong & ~chaotic[:, None])):
                token, stream = (int(place) for place in diverging[0])
                deviation = spread[token, stream]
                raise VerificationError(
                    f"{at}; first diverging layer: {layer}, whose hidden states of token {token} differ by "
                    f"{difference[token, stream]:.3g}, their standard deviation is {deviation:.3g} "
                    f"(allowed: {max(tolerance, moves[token, stream] / max(deviation, 1e-30)):.3g} of it)",
                    hint=HINT,
                )
        moves_logits = NUDGES * noise.logits
        if not self.hidden and moves_logits > CHAOTIC * _deviation(self.expected):
            if not may_be_chaotic:
                raise _undecided("logits", self.run.where(self.step))
            chaotic[:] = True
        if not self.difference <= max(allowed, moves_logits) and not chaotic.any():
            agree = f"the hidden states of all {len(self.hidden)} layers agree: it is what follows them"
            raise VerificationError(
                f"{at}: logits differ from transformers' by {self.difference:.3g} "
                f"(allowed: {max(allowed, moves_logits):.3g}); "
                f"{agree if self.hidden else 'no layer can be named'}",
                hint=HINT,
            )
        return int(chaotic.sum())


@dataclass(frozen=True, eq=False)
class _Noise:
    """How far errors of rounding move what transformers computes: a logit, and hidden states by layer and token."""

    logits: float = 0.0
    hidden: tuple[NDArray[np.float32], ...] = ()

    @classmethod
    def between(cls, each: _Comparison, others: Sequence[_Comparison]) -> _Noise:
        """Take what is expected `each` time, and what of numbers that were moved, of which the largest counts."""
        logits = max(float(np.abs(other.expected - each.expected).max(initial=0.0)) for other in others)
        hidden = tuple(
            np.max([np.abs(other.hidden[at][1] - expected).max(-1) for other in others], axis=0)
            for at, (_, expected) in enumerate(each.hidden)
        )
        return cls(logits, hidden)


def _streams(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Give what is told of each token, [tokens] or [tokens, streams], its streams: [tokens, streams]."""
    return numbers.reshape(len(numbers), math.prod(numbers.shape[1:]))


def _undecided(what: str, where: str) -> VerificationError:
    return VerificationError(
        f"the traced graph cannot be held against the model: {what} move by more than {CHAOTIC:g} of their deviation "
        f"in transformers itself, in {where}, where its numbers are off by errors of rounding",
        hint="the checkpoint's weights are extreme or damaged: no two computations of it agree in fp32",
    )


def _deviation(logits: NDArray[np.float32]) -> float:
    return float(logits.std()) if logits.size else 0.0


def _kept(run: probe.Run, few: bool) -> int:
    """Count the tokens at the end of a row whose logits are compared."""
    return len(_selected(run.steps[0], few)) + sum(int(step.ids.shape[1]) for step in run.steps[1:])


def _compare(
    run: probe.Run,
    made: Sequence[Mapping[str, NDArray[Any]]],
    wanted: Sequence[Observation],
    names: Sequence[str],
    few: bool,
    *,
    head: bool,
) -> list[_Comparison]:
    """Pair what each step gave, padding included, with what is `wanted` of each row: logits only with `head`.

    Logits are [B, rows, V] and those of each row's last tokens, [tokens, V].
    """
    compared = []
    for index, (step, outputs) in enumerate(zip(run.steps, made, strict=True)):
        rows = _selected(step, few)
        for b, ids in enumerate(_rows(run)):
            real = rows < step.lengths[b]
            places = step.past[b] + rows[real] - (len(ids) - len(wanted[b].logits))
            count, past = int(step.lengths[b]), int(step.past[b])
            hidden = [
                (outputs[name][b, :count], state[past : past + count])
                for name, state in zip(names, wanted[b].hidden if names else (), strict=True)
            ]
            logits = outputs[interface.LOGITS][b, real], wanted[b].logits[places]
            got, expected = logits if head else (NOTHING, NOTHING)
            compared.append(_Comparison(run, index, b, got, expected, hidden))
    return compared


def _hidden_states(model: ir.Model, stack: str, depth: int, kept: Sequence[int]) -> list[str]:
    """Name what each of the layers `kept` hands over; [] where it is not a single tensor."""
    try:
        return replicate_layers.hidden_states(model, Pattern(stack, depth, depth, 0), kept)
    except Irregular:
        return []


def _give_out(model: ir.Model, names: Sequence[str]) -> None:
    """Make intermediate values outputs of `model`."""
    values = {value.name: value for node in model.graph for value in node.outputs}
    model.graph.outputs.extend(values[name] for name in names)


def _layers_of(model: ir.Model, stack: str, depth: int) -> dict[int, list[ir.Node]]:
    """Divide what attention and rotary embedding a graph has among its layers.

    Raises:
        VerificationError: a node is of no layer.
    """
    layers: dict[int, list[ir.Node]] = {index: [] for index in range(depth if stack else 0)}
    named = re.compile(rf"{re.escape(stack)}\.(\d+)[./]")
    for node in model.graph if stack else ():
        if operators.is_a(node, *canonical.ATTENTIONS, standard.RotaryEmbedding):
            match = named.match(node.name or "")
            if match is None or int(match[1]) not in layers:
                raise VerificationError(f"node {node.name} of the traced graph is of no layer", hint=HINT)
            layers[int(match[1])].append(node)
    return layers
