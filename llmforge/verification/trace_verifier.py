"""Prove a traced graph against transformers: the same logits on the checkpoint's own weights, before any pass runs.

The canonical graph runs expanded, without ONNX Runtime's own optimizations; transformers runs eager, row by row and
without a cache. A model too large to run whole is held to it by its first layers, which show each kind of layer once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base.errors import NotADecoder, RunFailed, UnsupportedError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph, interface, summary
from llmforge.ir.operators import canonical
from llmforge.runtime.backends.session import Session
from llmforge.trace.export import pattern, replicate_layers
from llmforge.trace.export.limits import LONGEST, TAIL, WHOLE_BYTES
from llmforge.trace.export.pattern import Irregular, Pattern
from llmforge.verification import probe, streamed_execution

if TYPE_CHECKING:
    from llmforge.trace.export.reference import Reference

# Largest |difference| of a logit, in standard deviations of all logits. 23 two-layer architectures differed by at most
# 7e-6 at a deviation of 0.6, and trained models have outliers; a wrong constant costs far more than this.
TOLERANCE = 1e-4
SPARE, GARBAGE = 3, 7  # slots of a cache that no token reaches, and what all hold before one does
SEED = 20_241_103  # any fixed number


@dataclass(frozen=True)
class TraceProof:
    """What the check of a traced graph found."""

    layers: int  # that ran, of `depth`
    depth: int
    max_abs_difference: float  # of any logit
    allowed: float
    probes: tuple[str, ...]
    unexceeded_windows: tuple[int, ...]  # attention windows longer than every prompt that ran
    seconds: float

    def note(self) -> str:
        """Say it in one line, for a report."""
        of = "all layers" if self.layers == self.depth else f"the first {self.layers} of {self.depth} layers"
        beyond = "".join(f"; no prompt exceeded the attention window of {window}" for window in self.unexceeded_windows)
        return (
            f"trace: logits match transformers within {self.max_abs_difference:.2g} (allowed: {self.allowed:.2g}), "
            f"verified with {of} on {', '.join(self.probes)}{beyond}"
        )


def verify_trace(
    checkpoint: Checkpoint, model: ir.Model, *, threads: int = 1, whole_bytes: int = WHOLE_BYTES
) -> TraceProof:
    """Hold `model`, the canonical graph of `checkpoint`, against transformers on the real weights.

    Prefill, decode and continuation, a ragged batch, and a prompt longer than every window up to `LONGEST`. A model of
    more than `whole_bytes` of weights runs with its first layers alone, where its graph says how they repeat.

    Raises:
        VerificationError: logits differ; names the step and the first layer whose hidden states do.
        UnsupportedError: transformers or ONNX Runtime cannot run the model, or it is of its own attention and what
            would be a defect of the frontend elsewhere is known to happen there.
    """
    try:
        return _verify(checkpoint, model, threads, whole_bytes)
    except (UnsupportedError, VerificationError) as error:
        if (reason := model.metadata_props.get(interface.FALLBACK)) is None:
            raise
        from llmforge.trace.export import fallback

        named = f"architecture {checkpoint.architecture!r} cannot be compiled"
        try:
            fallback.refuse_encoders(checkpoint)
        except NotADecoder as plainer:
            raise NotADecoder(f"{named}: {plainer.message}") from error
        raise UnsupportedError(
            f"{named}: {reason}; tracing the attention from its own code failed too: {error.message}"
        ) from error


def _verify(checkpoint: Checkpoint, model: ir.Model, threads: int, whole_bytes: int) -> TraceProof:
    from llmforge.trace.export.reference import Reference  # here, because it imports torch

    began = time.perf_counter()
    repetition = pattern.recorded(model)
    depth = checkpoint.geometry.layers
    layers = depth
    if repetition is not None and graph.weight_bytes(model) > whole_bytes:
        layers = min(depth, max(2, repetition.kinds))  # two, so that one hands over to another
        model = replicate_layers.first_layers(model, repetition, layers)
    own = interface.FALLBACK in model.metadata_props
    if own and layers == depth and graph.weight_bytes(model) > whole_bytes:
        raise UnsupportedError(
            f"it is only compiled where it can be proved by running it, up to {whole_bytes:,} bytes of weights in "
            f"fp32; it has {graph.weight_bytes(model):,}, and its layers do not repeat"
        )
    of_attention = {layer.window for layer in canonical.Attention.all(model)} - {0}
    windows = sorted(of_attention | summary.rotary_switches(model))
    beyond = [LONGEST - TAIL] if own else windows  # its windows are not in the graph's nodes
    context = checkpoint.geometry.context
    runs = _runs(checkpoint.geometry.vocabulary, beyond, context)

    def slots(run: probe.Run) -> int:
        return run.capacity + SPARE if context is None else min(run.capacity + SPARE, context)

    part = None if layers == depth else layers
    reference = Reference(checkpoint, part)
    expected = [[reference.run(ids, min(len(ids), _kept(run))).logits for ids in _rows(run)] for run in runs]
    stack = reference.stack
    del reference  # its weights make room for those of the graph
    try:
        made = streamed_execution.drive(model, runs, threads=threads, rows=_selected, capacity=slots, fill=GARBAGE)
    except RunFailed as error:
        raise VerificationError(f"the traced graph does not run: {str(error).splitlines()[0]}") from error
    compared = [
        comparison
        for run, logits, wanted in zip(runs, made, expected, strict=True)
        for comparison in _compare(run, logits, wanted)
    ]
    logits = np.concatenate([comparison.expected.ravel() for comparison in compared])
    allowed = TOLERANCE * float(logits.std())
    for comparison in compared:
        if not comparison.difference <= allowed:  # `not <=`: NaN differs
            names, where = _hidden_states(model, stack, layers), "no layer can be named"
            if names:
                exposed = probe.open_session(model, probe.Weights(), threads, names)
                where = _first_layer(exposed, names, comparison, Reference(checkpoint, part))
            raise VerificationError(
                f"the traced graph does not match the model: logits differ from transformers' by "
                f"{comparison.difference:.3g} (allowed: {allowed:.3g}) in {comparison.run.where(comparison.step)}, "
                f"row {comparison.row}; {where}",
                hint="this is a bug in llmforge's support of this architecture; nothing was built",
            )
    longest = max(run.capacity for run in runs)
    return TraceProof(
        layers=layers,
        depth=depth,
        max_abs_difference=max(comparison.difference for comparison in compared),
        allowed=allowed,
        probes=tuple(run.name for run in runs),
        unexceeded_windows=tuple(window for window in windows if window >= longest),
        seconds=time.perf_counter() - began,
    )


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
    one, ragged = probe.random_runs(vocabulary, rng)
    runs = [one, replace(ragged, name="a ragged batch")]
    within = [window for window in windows if window <= LONGEST - TAIL]
    if within:
        length = min(within[-1] + TAIL, (context or LONGEST) - 2)
        prompt = rng.integers(0, vocabulary, length + 2, np.int64)
        runs.append(probe.schedule("a prompt longer than the windows", [prompt], [(length,), (1,), (1,)]))
    return [run for run in runs if context is None or run.capacity <= context]


def _rows(run: probe.Run) -> list[NDArray[np.int64]]:
    """Put the tokens of each row of `run` together again."""
    return [np.concatenate([step.ids[b, : step.lengths[b]] for step in run.steps]) for b in range(run.batch)]


def _selected(step: probe.ProbeStep) -> NDArray[np.int64]:
    """Choose the rows of a step that are compared: all, or the tail of a long one."""
    return step.rows if len(step.rows) <= 2 * TAIL else step.rows[-TAIL:]


@dataclass(frozen=True, eq=False)
class _Comparison:
    """Logits that one step gave one row and those of transformers, fp32 [tokens, V]."""

    run: probe.Run
    step: int
    row: int
    got: NDArray[np.float32]
    expected: NDArray[np.float32]

    @property
    def difference(self) -> float:
        return float(np.abs(self.got - self.expected).max())


def _kept(run: probe.Run) -> int:
    """Count the tokens at the end of a row whose logits are compared."""
    return len(_selected(run.steps[0])) + sum(int(step.ids.shape[1]) for step in run.steps[1:])


def _compare(
    run: probe.Run, made: Sequence[NDArray[np.float32]], wanted: Sequence[NDArray[np.float32]]
) -> list[_Comparison]:
    """Pair the logits of each step, [B, rows, V], with those `wanted` of each row's last tokens, [tokens, V]."""
    compared = []
    for index, (step, logits) in enumerate(zip(run.steps, made, strict=True)):
        rows = _selected(step)
        for b, ids in enumerate(_rows(run)):
            real = rows < step.lengths[b]
            places = step.past[b] + rows[real] - (len(ids) - len(wanted[b]))
            compared.append(_Comparison(run, index, b, logits[b, real], wanted[b][places]))
    return compared


def _hidden_states(model: ir.Model, stack: str, layers: int) -> list[str]:
    """Name what each layer hands over; [] where it is not a single tensor."""
    try:
        return replicate_layers.hidden_states(model, Pattern(stack, layers, layers, 0), layers) if stack else []
    except Irregular:
        return []


def _first_layer(exposed: Session, names: Sequence[str], failed: _Comparison, reference: Reference) -> str:
    """Name the first layer whose hidden states, `names` in the graph, differ in the step that failed."""
    step, row = failed.run.steps[failed.step], failed.row
    got = probe.observe(exposed, failed.run, failed.step, names)
    hidden = reference.run(_rows(failed.run)[row], 1).hidden  # [S, hidden] of each layer
    places = slice(int(step.past[row]), int(step.past[row] + step.lengths[row]))
    for layer, (name, state) in enumerate(zip(names, hidden, strict=True)):
        expected = state[places]
        difference = float(np.abs(got[name][row, : step.lengths[row]] - expected).max())
        spread = float(expected.std())
        if not difference <= TOLERANCE * spread:
            return (
                f"first diverging layer: {reference.stack}.{layer}, whose hidden states differ by "
                f"{difference / spread:.3g} of their standard deviation"
            )
    return f"the hidden states of all {len(names)} layers agree: it is what follows them"
