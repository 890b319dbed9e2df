"""Recipe in, published artifact out. `build` is the picture of the whole; each stage lives elsewhere.

This module alone owns verification after each pass, timing, and the record of what happened.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from llmforge import artifact, calibration, engines, passes, targets
from llmforge.base import spans
from llmforge.base.errors import UnsupportedError
from llmforge.base.progress import Progress, Silent
from llmforge.build import dry_run, evidence, lock, preflight, publishing, texts
from llmforge.build.evidence import Clock
from llmforge.build.lock import Stages
from llmforge.build.publishing import BuildResult
from llmforge.build.read_ahead import ReadAhead
from llmforge.checkpoint import Checkpoint, documents
from llmforge.engines import BuildRequest, Engine, interop, pending
from llmforge.engines.onnxruntime import write_tokenizer
from llmforge.evaluation import footprint
from llmforge.evaluation.footprint import BytesRead
from llmforge.ir import dialect, graph, interface
from llmforge.ir.scratch import Scratch
from llmforge.lowering import options, pass_base
from llmforge.lowering.pass_base import Context, Numerics, Pass
from llmforge.quantization.statistics import Demand, Statistics
from llmforge.recipe import Recipe, ValidationSpec
from llmforge.report import model as records
from llmforge.report import view
from llmforge.runtime.backends.config import physical_cores
from llmforge.targets import Target
from llmforge.trace import trace
from llmforge.triton import repository
from llmforge.verification.trace_verifier import verify_trace
from llmforge.verification.verifier import Verifier


def build(recipe: Recipe, out: Path, progress: Progress | None = None, *, measure: bool = True) -> BuildResult:
    """Build what `recipe` describes and publish it as `out/<name>/<version>`; without `measure` nothing is measured.

    A failed gate does not stop publication: the artifact says so itself, and so does `report.verdict`.

    Raises:
        ForgeError: anything that keeps the artifact from being built; nothing that looks finished is left behind.
    """
    progress = clock = Clock(progress or Silent())
    progress.stage("Check recipe, target and data")
    steps, target = recipe.instantiate(passes.ALL), targets.find(recipe.target)
    check_host(recipe, target)
    preflight.check(recipe)
    with (
        artifact.staging(out, recipe.name) as staging,
        calibration.kept(staging.parent) as layers,
        ReadAhead() as ahead,
    ):
        progress.stage("Trace")
        checkpoint = Checkpoint.open(recipe.checkpoint)
        ahead.begin(checkpoint)
        threads = recipe.engine.threads or physical_cores()
        model = trace(checkpoint)
        stages = Stages()
        stages.graph(lock.TRACE, model)
        progress.stage("Check passes")
        demands = [demand for step in steps for demand in step.demands()]
        calibrated = calibration.plan(checkpoint, demands, dialect.caches(model)) if demands else frozenset()
        dry_run.run(model, steps, target=target, spec=recipe.engine, checkpoint=checkpoint, calibrated=calibrated)
        progress.stage("Read checkpoint")
        ahead.finish(progress)
        progress.stage("Verify trace")
        notes = prove_trace(recipe, checkpoint, model, threads)
        statistics, seen = calibrate(recipe, checkpoint, model, demands, layers, progress)
        stages.statistics(statistics)
        windows = texts.evaluation_windows(recipe, checkpoint)
        progress.stage("Prepare verification of passes")
        lossy = any(step.numerics is Numerics.LOSSY for step in steps)
        chosen = [window.ids for window in texts.budget_windows(windows, recipe, checkpoint)] if lossy else []
        verifier = Verifier(model, folder=out / recipe.name / ".failed", texts=chosen, threads=threads)
        notes += coverage(verifier, model)
        done = []
        context = Context(target, statistics, Scratch(staging.parent))
        for step in steps:
            record, noted = transform(step, model, context, verifier, progress)
            done.append(record)
            stages.graph(step.name, model)
            notes += noted
        read = footprint.count(model)
        engine, said = build_engine(recipe, checkpoint, target, model, read, staging, progress)
        found = evidence.measure(
            staging,
            engine,
            read,
            spec=recipe.validation if measure else ValidationSpec(),
            target=target,
            checkpoint=checkpoint,
            windows=windows,
            threads=threads,
            progress=progress,
        )
        if recipe.validation.quality is None and recipe.validation.latency is None:
            said = (*said, "nothing was measured: the recipe asks for no validation")
        resolved = recipe.resolved(steps)
        facts = {
            "name": recipe.name,
            "checkpoint": checkpoint_record(checkpoint),
            "target": records.TargetRecord(name=target.name, title=target.title, kind=target.kind),
            "passes": tuple(done),
            "calibration": seen,
            "notes": (*notes, *said),
            "recipe": resolved,
        }
        locked = lock.gather(recipe, resolved, checkpoint, target.known_as, stages)
        report = publishing.publish(
            staging, facts, engine, found, target=target, lock=locked, clock=clock, progress=progress
        )
    return BuildResult(out / recipe.name / report.version, report)


def check_host(recipe: Recipe, target: Target) -> None:
    """Refuse what no engine is built for, and what this machine does not build unless that is deferred."""
    builder = engines.for_target(recipe.engine.backend, target)
    if not recipe.engine.deferred:
        builder.require_host(target, recipe.engine)
    elif target.kind == "cpu":
        raise UnsupportedError(
            f"target {target.name} is a CPU; its engine cannot be deferred",
            hint="remove `deferred` from the recipe, and --defer",
        )


def prove_trace(recipe: Recipe, checkpoint: Checkpoint, model: ir.Model, threads: int) -> list[str]:
    """Hold the traced graph against transformers; notes of what was found, and of attention that is not canonical.

    A longer context than the model is made for is refused with the latter: nobody knows what its own code does there.
    """
    notes = []
    if (reason := model.metadata_props.get(interface.FALLBACK)) is not None:
        wanted, made_for = recipe.engine.max_context, checkpoint.geometry.context
        if made_for is not None and wanted > made_for:
            raise UnsupportedError(
                f"engine.max_context is {wanted}; the model is made for {made_for} tokens, and its own attention was "
                f"traced, because: {reason}",
                hint=f"set engine.max_context to at most {made_for}",
            )
        notes.append(f"attention was traced from the model's own code and is left unchanged by passes: {reason}")
    return [*notes, verify_trace(checkpoint, model, threads=threads).note()]


def calibrate(
    recipe: Recipe,
    checkpoint: Checkpoint,
    model: ir.Model,
    demands: Sequence[Demand],
    folder: Path,
    progress: Progress,
) -> tuple[Statistics | None, records.CalibrationRecord | None]:
    """Collect what the passes demand, and say in the report what was read; nothing where none demands anything.

    Layers that are in `folder` are done already.
    """
    spec = recipe.calibration
    if not demands or spec is None:  # `Recipe.instantiate` refuses demands without calibration
        return None, None
    progress.stage("Calibrate")
    read = documents.read_documents(spec.data)
    statistics = calibration.calibrate(
        checkpoint,
        texts.calibration_windows(spec, read, checkpoint),
        demands,
        threads=spec.threads,
        caches=dialect.caches(model),
        folder=folder,
        progress=progress,
    )
    return statistics, records.CalibrationRecord(
        data=spec.data.name,
        digest=documents.digest(spec.data),
        documents=len(read),
        samples=statistics.samples,
        tokens=statistics.tokens,
    )


def coverage(verifier: Verifier, model: ir.Model) -> list[str]:
    """Note what the proofs of a model that is too large to run whole rest on."""
    if not verifier.streams:
        return []
    return [
        f"passes: the model is too large to run whole ({graph.weight_bytes(model) / 1e9:.1f} GB of fp32 weights): "
        "exact and rounding passes are verified on the subgraphs they changed, identical changes once; budgets of "
        "lossy passes are measured on the whole model layer by layer, on few tokens"
    ]


def transform(
    step: Pass, model: ir.Model, context: Context, verifier: Verifier, progress: Progress
) -> tuple[records.PassRecord, list[str]]:
    """Run one pass over `model`, and hold it to what it declares; return its record, and what must not be missed."""
    progress.stage(f"Pass {step.name}")
    nodes, weight_bytes, began = graph.nodes(model), graph.weight_bytes(model), time.perf_counter()
    with spans.span("rewrite"):
        changes = pass_base.run(step, model, context)
    seconds = time.perf_counter() - began
    with spans.span("verify"):
        proof = verifier.check(step, model, changes)
    record = records.PassRecord(
        name=step.name,
        options=options.values(step),
        numerics=step.numerics,
        rewritten=tuple(changes.rewritten),
        skipped=tuple(changes.skipped),
        nodes_before=nodes,
        nodes_after=graph.nodes(model),
        weight_bytes_before=weight_bytes,
        weight_bytes_after=graph.weight_bytes(model),
        seconds=seconds,
        verification=records.VerificationRecord.model_validate(proof, from_attributes=True),
    )
    return record, changes.notes


def build_engine(
    recipe: Recipe,
    checkpoint: Checkpoint,
    target: Target,
    model: ir.Model,
    read: BytesRead,
    staging: Path,
    progress: Progress,
) -> tuple[Engine | None, tuple[str, ...]]:
    """Lower `model` and write the engine, the tokenizer and the model repository, and what there is to say of them.

    The engine is None where it is deferred: what a decode step of it reads is written down for the build that ends it.
    """
    progress.stage("Build engine")
    builder = engines.for_target(recipe.engine.backend, target)
    lowered, changes = builder.lower(model, target, recipe.engine)
    grouped = *view.grouped(changes.rewritten).items(), *view.grouped(changes.skipped).items()
    notes = [f"lowering: {_named(nodes)}: {what}" for what, nodes in grouped]
    write_tokenizer(checkpoint, staging / "tokenizer")
    ends = checkpoint.eos_token_ids, checkpoint.bos_token_id
    request = BuildRequest(lowered, staging / "engine", recipe.engine, target, *ends, progress)
    if recipe.engine.deferred:
        pending.write(request, weight_bytes_per_token=read.weights, kv_bytes_per_token=read.kv)
        return None, tuple(notes)
    engine = builder.build(request)
    notes += [*engine.notes, *(f"interface: {note}" for note in interop.write(lowered, engine, checkpoint))]
    made_of = {"checkpoint": f"{checkpoint.path.name} {checkpoint.digest}"}
    served = repository.Model(recipe.name, target.kind, recipe.serving, engine.config, made_of)
    repository.write(served, staging / repository.FOLDER / recipe.name)
    return engine, tuple(notes)


def checkpoint_record(checkpoint: Checkpoint) -> records.CheckpointRecord:
    """Say in the report what the checkpoint is."""
    return records.CheckpointRecord(
        name=checkpoint.path.name,
        digest=checkpoint.digest,
        architecture=checkpoint.architecture,
        dtypes=tuple(sorted({entry.dtype.name for entry in checkpoint.tensors.values()})),
        parameters=checkpoint.parameters,
        size_bytes=checkpoint.size_bytes,
    )


def _named(nodes: Sequence[str]) -> str:
    """Name the first of several nodes and count the others."""
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} and {len(nodes) - 1} more"
