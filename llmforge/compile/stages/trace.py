"""The stage of the trace: the canonical graph of the model, which passes will fit, and whose proof has begun."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import onnx_ir as ir

from llmforge import calibration
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.compile import dry_run, encoder_calibration, lock, unused_modules
from llmforge.compile.frontend import Frontend
from llmforge.compile.heads import Head
from llmforge.compile.stages.engine import placed
from llmforge.compile.state import CompileState
from llmforge.ir import dialect, hidden_states, interface
from llmforge.planning import source
from llmforge.quantization.grid import Grid
from llmforge.quantization.statistics import Demand
from llmforge.rewrite import pruning
from llmforge.runtime.config import physical_cores
from llmforge.trace.export import kept_graph
from llmforge.verification.trace_verifier import verify_trace


def trace_model(state: CompileState) -> None:
    """Trace the model, run the recipe dry on its graph, and begin to hold the graph to transformers.

    The weights of the checkpoint have been read at the end.
    """
    checkpoint, progress = state.checkpoint, state.clock
    _check_encoder(state)
    model = state.reuse.trace(checkpoint, progress)
    as_traced = model
    if isinstance(state.draft, Head):
        as_traced = model.clone()
        as_traced.meta.update(model.meta)
        hidden_states.expose(model, state.draft.layers)
    state.digests.graph(lock.TRACE, model)
    progress.stage("Check passes")
    state.demands = [pruning.bound(demand, model) for step in state.steps for demand in step.demands()]
    dry_run.run(
        model,
        state.steps,
        target=state.target,
        spec=placed(state.recipe, state.target)[0],
        checkpoint=checkpoint,
        calibrated=planned(checkpoint, model, state.demands),
        adapters=state.adapters,
    )
    state.notes += _notes(state, model)
    progress.stage("Read checkpoint")
    state.overlap.weights.finish(progress)
    traced = model.clone()
    traced.meta.update(model.meta)
    state.model, state.traced = model, traced
    threads = state.recipe.engine.threads or physical_cores()
    proven = as_traced if as_traced is not model else traced
    prove = partial(_prove, checkpoint, proven, threads, state.reuse.frontend)
    state.trace_proof = state.reuse.trace_proof(checkpoint, proven, threads, progress, state.overlap.proofs, prove)


def planned(checkpoint: Checkpoint, model: ir.Model, demands: Sequence[Demand]) -> dict[str, Grid]:
    """Name the weights that calibration will quantize, with their grids.

    Raises:
        UnsupportedError: calibration cannot serve `demands`.
    """
    if not demands:
        return {}
    if checkpoint.encoding is not None:
        return encoder_calibration.plan(model, demands)
    return calibration.plan(checkpoint, demands, dialect.caches(model))


def _check_encoder(state: CompileState) -> None:
    """Return if the recipe asks nothing of an encoder that language models alone have, nor the other way.

    Raises:
        UnsupportedError: engines and measurements of tokens are not for what embeds or scores.
    """
    recipe, encoding = state.recipe, state.checkpoint.encoding
    spec = recipe.validation
    encodes = spec.latency is not None and spec.latency.encodes
    if encoding is None and encodes:
        raise UnsupportedError(
            f"{state.checkpoint.name} predicts tokens, and validation.latency.lengths are of texts to encode",
            hint="write `prompt_tokens` and `output_tokens` in their place",
        )
    if encoding is None and spec.retrieval is not None:
        raise UnsupportedError(
            f"{state.checkpoint.name} predicts tokens, and validation.retrieval is of what embeds or scores texts",
            hint="write `validation.quality` in its place",
        )
    if encoding is None:
        return
    asked = [name for name in ("quality", "tasks", "behaviour") if getattr(spec, name) is not None]
    what = [f"validation.{name}" for name in asked]
    if spec.latency is not None and not encodes:
        what.append("validation.latency of prompts and output tokens (write lengths and batches)")
    what += [f"retreat of {step.name}" for step in state.steps if step.may_retreat is not None]
    what += [f"serving.{name}" for name in recipe.serving.of_language_models()]
    if recipe.engine.backend != "onnxruntime" or recipe.engine.tensor_parallel > 1 or state.target.kind != "cpu":
        what.append(f"engine {recipe.engine.backend} on {state.target.name}")
    if what:
        raise UnsupportedError(
            f"{state.checkpoint.name} is {encoding.title}, of which llmforge does not support: {', '.join(what)}",
            hint="an encoder is built for ONNX Runtime on one CPU; `validation.retrieval` and `latency` measure it",
        )


def _prove(checkpoint: Checkpoint, traced: ir.Model, threads: int, frontend: Frontend | None) -> str:
    """Hold the graph `traced` to transformers, in the process that has it, and return a note of what was found."""
    if frontend is None:
        return verify_trace(checkpoint, traced, threads=threads).note()
    return frontend.prove(checkpoint.opened_from, kept_graph.dump(traced), threads)


def _notes(state: CompileState, model: ir.Model) -> list[str]:
    """Say what is not compiled of the checkpoint, and what becomes of one that comes quantized."""
    checkpoint = state.checkpoint
    unused = unused_modules.note(checkpoint, model)
    quantized = source.note(checkpoint.settings, checkpoint.path, state.steps)
    return [
        *_check_context(state.recipe.engine.max_context, checkpoint, model),
        *([] if unused is None else [unused]),
        *([] if quantized is None else [quantized]),
        *checkpoint.notes,
    ]


def _check_context(wanted: int, checkpoint: Checkpoint, model: ir.Model) -> list[str]:
    """Refuse a longer context than a model is made for whose own attention was traced, and note that it was.

    Nobody knows what its own code does there. Note, too, that a graph is right for texts of the context alone.
    """
    limit = interface.recorded_limit(model)
    notes = [] if limit is None else [f"texts of up to {limit.tokens} tokens are compiled: {limit.reason}"]
    reason = model.metadata_props.get(interface.FALLBACK)
    if reason is None:
        return notes
    made_for = checkpoint.geometry.context
    if made_for is not None and wanted > made_for:
        raise UnsupportedError(
            f"engine.max_context is {wanted}; the model is made for {made_for} tokens, and its own attention was "
            f"traced, because: {reason}",
            hint=f"set engine.max_context to at most {made_for}",
        )
    return [*notes, f"attention was traced from the model's own code and is left unchanged by passes: {reason}"]
