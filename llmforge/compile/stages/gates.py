"""The stage of the gates: what was built is written down, and what was measured is judged."""

from __future__ import annotations

from llmforge.checkpoint import Checkpoint
from llmforge.compile import inputs, lock
from llmforge.compile.state import CompileState, ReportFacts
from llmforge.gates import records
from llmforge.recipe import GateSpec


def record_facts(state: CompileState) -> None:
    """Write down, for report and lock, all that the stages before have found."""
    recipe, target = state.recipe, state.target
    resolved = recipe.resolved(state.steps)
    passes = tuple(run.proven() for run in state.runs)
    of_engine = () if state.engine_proof is None else (state.engine_proof.result(),)
    state.facts = ReportFacts(
        name=recipe.name,
        checkpoint=_checkpoint_record(state.checkpoint),
        target=records.TargetRecord(name=target.name, title=target.title, kind=target.kind),
        passes=passes,
        calibration=state.calibration.record,
        attribution=state.attribution,
        proven=(state.trace_proof.result(), *(proof.result() for proof in state.adapter_proofs), *of_engine),
        notes=(*state.notes, *state.reuse.cache.notes),
        recipe=resolved,
        plugins=state.plugins,
    )
    inputs.remember(recipe, resolved, state.checkpoint)
    state.lock = lock.gather(recipe, resolved, state.checkpoint, target.catalog_name, state.digests, state.plugins)
    state.reused = state.reuse.record(passes)
    state.clock.beside.append(state.overlap.frontend.peak_bytes)


def judge_gates(state: CompileState) -> None:
    """Say what the engine is, and decide the gates of the recipe."""
    recipe = state.facts.recipe
    folder = state.staging / "engine"
    state.engine_record = state.evidence.engine_record(recipe["engine"]["backend"], folder, state.engine)
    specs = {name: GateSpec.model_validate(spec) for name, spec in recipe["gates"].items()}
    state.gates = state.evidence.judge(specs, state.engine_record, state.facts.checkpoint)


def _checkpoint_record(checkpoint: Checkpoint) -> records.CheckpointRecord:
    """Say in the report what the checkpoint is."""
    return records.CheckpointRecord(
        name=checkpoint.name,
        digest=checkpoint.digest,
        architecture=checkpoint.architecture,
        dtypes=tuple(sorted({entry.dtype.name for entry in checkpoint.tensors.values()})),
        parameters=checkpoint.parameters,
        size_bytes=checkpoint.size_bytes,
    )
