"""Recipe in, published artifact out. `build` is the picture of the whole; each stage lives elsewhere.

This module alone owns verification after each pass, timing, and the record of what happened.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from llmforge import artifact, calibration, engines, passes, targets
from llmforge.base.errors import UnsupportedError
from llmforge.base.progress import Progress, Silent
from llmforge.build import dry_run, evidence, publishing, texts
from llmforge.build.evidence import Clock
from llmforge.build.publishing import BuildResult
from llmforge.checkpoint import Checkpoint, documents
from llmforge.checkpoint.text import Window
from llmforge.engines import BuildRequest, Engine, interop, pending
from llmforge.engines.onnxruntime import write_tokenizer
from llmforge.ir import dialect, graph, interface
from llmforge.lowering import options, pass_base
from llmforge.lowering.pass_base import Context, Numerics, Pass
from llmforge.quantization.statistics import Demand, Statistics
from llmforge.recipe import CalibrationSpec, Recipe
from llmforge.report import model as records
from llmforge.report import view
from llmforge.report.model import Report
from llmforge.runtime.backends.config import physical_cores
from llmforge.targets import Target
from llmforge.trace import trace
from llmforge.verification.trace_verifier import verify_trace
from llmforge.verification.verifier import Verifier


@dataclass(frozen=True)
class Inputs:
    """What one build is made of, opened."""

    recipe: Recipe
    target: Target
    checkpoint: Checkpoint
    threads: int


def build(recipe: Recipe, out: Path, progress: Progress | None = None) -> BuildResult:
    """Build what `recipe` describes and publish it as `out/<name>/<version>`.

    A failed gate does not stop publication: the artifact says so itself, and so does `report.verdict`.

    Raises:
        ForgeError: anything that keeps the artifact from being built; nothing that looks finished is left behind.
    """
    clock, progress = Clock(), progress or Silent()
    progress.stage("Check recipe, target and data")
    steps, target = recipe.instantiate(passes.ALL), targets.find(recipe.target)
    check_host(recipe, target)
    texts.check(recipe)
    with artifact.staging(out, recipe.name) as staging, calibration.kept(staging.parent) as layers:
        progress.stage("Trace")
        checkpoint = Checkpoint.open(recipe.checkpoint)
        inputs = Inputs(recipe, target, checkpoint, recipe.engine.threads or physical_cores())
        model = trace(checkpoint)
        progress.stage("Plan")
        demands = [demand for step in steps for demand in step.demands()]
        plan(inputs, model, steps, demands)
        progress.stage("Read checkpoint")
        checkpoint.verify(progress)
        progress.stage("Verify the trace")
        notes = prove_trace(inputs, model)
        statistics = calibrate(inputs, model, demands, layers, progress)
        windows = texts.evaluation_windows(recipe, checkpoint)
        verifier = start_verifier(inputs, model, steps, windows, out / recipe.name / ".failed", progress)
        notes += coverage(verifier, model)
        done = tuple(transform(step, model, Context(target, statistics), verifier, progress) for step in steps)
        engine, said = build_engine(inputs, model, staging, progress)
        found = evidence.measure(
            staging,
            engine,
            model,
            spec=recipe.validation,
            target=target,
            checkpoint=checkpoint,
            windows=windows,
            threads=inputs.threads,
            progress=progress,
        )
        resolved = recipe.resolved(steps)
        report = Report(
            name=recipe.name,
            checkpoint=checkpoint_record(checkpoint),
            target=records.TargetRecord(name=target.name, title=target.title, kind=target.kind),
            passes=done,
            calibration=calibration_record(recipe.calibration, statistics),
            notes=(*notes, *said, *unmeasured(recipe)),
            recipe=resolved,
            **publishing.results(
                staging,
                engine,
                found,
                backend=recipe.engine.backend,
                gate_specs=recipe.gates,
                recipe=resolved,
                clock=clock,
            ),
        )
        published = publishing.publish(
            staging,
            report,
            engine,
            recipe=resolved,
            checkpoint=checkpoint.digest,
            target=target.known_as,
            progress=progress,
        )
    return BuildResult(out / recipe.name / published.manifest.version, report)  # as `out` was given, not resolved


def check_host(recipe: Recipe, target: Target) -> None:
    """Refuse what no engine is built for, and what this machine does not build unless that is deferred."""
    builder = engines.for_target(recipe.engine.backend, target)
    if not recipe.engine.deferred:
        builder.require_host(target, recipe.engine)
    elif target.kind == "cpu":
        raise UnsupportedError(
            f"an engine for target {target.name}, a CPU, is built here and now: nothing is deferred",
            hint="leave `deferred` out of the recipe, and --defer",
        )


def plan(inputs: Inputs, model: ir.Model, steps: Sequence[Pass], demands: Sequence[Demand]) -> None:
    """Refuse what cannot become an engine, before any weight is read."""
    caches = dialect.caches(model)
    dry_run.run(
        model,
        steps,
        target=inputs.target,
        spec=inputs.recipe.engine,
        checkpoint=inputs.checkpoint,
        calibrated=calibration.plan(inputs.checkpoint, demands, caches) if demands else frozenset(),
    )


def prove_trace(inputs: Inputs, model: ir.Model) -> list[str]:
    """Hold the traced graph against transformers; notes of what was found, and of attention that is not canonical."""
    notes = []
    if (reason := model.metadata_props.get(interface.FALLBACK)) is not None:
        _check_context(inputs, reason)
        notes.append(f"the model's own attention was traced, and passes do not know it, because: {reason}")
    return [*notes, verify_trace(inputs.checkpoint, model, threads=inputs.threads).note()]


def _check_context(inputs: Inputs, reason: str) -> None:
    """Refuse a longer context than the model is made for, beyond which nobody knows what its own code does."""
    wanted, made_for = inputs.recipe.engine.max_context, inputs.checkpoint.geometry.context
    if made_for is not None and wanted > made_for:
        raise UnsupportedError(
            f"engine.max_context is {wanted}; the model is made for {made_for} tokens, and its own attention was "
            f"traced, because: {reason}",
            hint=f"set engine.max_context to at most {made_for}",
        )


def calibrate(
    inputs: Inputs, model: ir.Model, demands: Sequence[Demand], folder: Path, progress: Progress
) -> Statistics | None:
    """Collect what the passes demand, or nothing where none does; layers that are in `folder` are done already."""
    spec = inputs.recipe.calibration
    if not demands or spec is None:  # `Recipe.instantiate` refuses demands without calibration
        return None
    progress.stage("Calibrate")
    return calibration.calibrate(
        inputs.checkpoint,
        texts.calibration_windows(spec, inputs.checkpoint),
        demands,
        caches=dialect.caches(model),
        folder=folder,
        progress=progress,
    )


def start_verifier(
    inputs: Inputs, model: ir.Model, steps: Sequence[Pass], windows: Sequence[Window], failed: Path, progress: Progress
) -> Verifier:
    """Run the probes of the passes on `model`; a graph that a pass gets wrong will be saved in the folder `failed`."""
    progress.stage("Run the probes of the passes")
    lossy = any(step.numerics is Numerics.LOSSY for step in steps)
    chosen = texts.budget_windows(windows, inputs.recipe, inputs.checkpoint) if lossy else []
    return Verifier(model, folder=failed, texts=[window.ids for window in chosen], threads=inputs.threads)


def coverage(verifier: Verifier, model: ir.Model) -> list[str]:
    """Note what the proofs of a model that is too large to run whole rest on."""
    if not verifier.streams:
        return []
    return [
        f"passes: {graph.weight_bytes(model) / 1e9:.1f} GB of fp32 weights were never run whole: exact and "
        "rounding passes are proven on the places that they changed, places that are changed alike once; the "
        "budgets of lossy passes are measured on the whole model, piece by piece, on few tokens"
    ]


def transform(
    step: Pass, model: ir.Model, context: Context, verifier: Verifier, progress: Progress
) -> records.PassRecord:
    """Run one pass over `model`, and hold it to what it declares."""
    progress.stage(f"Pass {step.name}")
    nodes, weight_bytes, began = graph.nodes(model), graph.weight_bytes(model), time.perf_counter()
    changes = pass_base.run(step, model, context)
    seconds = time.perf_counter() - began
    proof = verifier.check(step, model, changes)
    return records.PassRecord(
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


def build_engine(
    inputs: Inputs, model: ir.Model, staging: Path, progress: Progress
) -> tuple[Engine | None, tuple[str, ...]]:
    """Lower `model` and write the engine, the tokenizer and the model repository, and what there is to say of them.

    The engine is None where it is deferred.
    """
    progress.stage("Build engine")
    recipe, target, checkpoint = inputs.recipe, inputs.target, inputs.checkpoint
    builder = engines.for_target(recipe.engine.backend, target)
    lowered, changes = builder.lower(model, target, recipe.engine)
    grouped = *view.grouped(changes.rewritten).items(), *view.grouped(changes.skipped).items()
    notes = [f"lowering: {_named(nodes)}: {what}" for what, nodes in grouped]
    write_tokenizer(checkpoint, staging / "tokenizer")
    ends = checkpoint.eos_token_ids, checkpoint.bos_token_id
    request = BuildRequest(lowered, staging / "engine", recipe.engine, target, *ends, progress)
    if recipe.engine.deferred:
        pending.write(request)
        return None, tuple(notes)
    engine = builder.build(request)
    notes += [*engine.notes, *(f"interface: {note}" for note in interop.write(lowered, engine, checkpoint))]
    made_of = f"{checkpoint.path.name} {checkpoint.digest}"
    publishing.write_repository(staging, recipe.name, engine, target=target, serving=recipe.serving, checkpoint=made_of)
    return engine, tuple(notes)


def unmeasured(recipe: Recipe) -> tuple[str, ...]:
    """Note that nothing was to be measured."""
    spec = recipe.validation
    asked = spec.quality is not None or spec.latency is not None
    return () if asked else ("nothing was measured: the recipe asks for no validation",)


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


def calibration_record(spec: CalibrationSpec | None, statistics: Statistics | None) -> records.CalibrationRecord | None:
    """Say in the report what calibration read; None where there was none."""
    if spec is None or statistics is None:
        return None
    return records.CalibrationRecord(
        data=spec.data.name,
        digest=documents.digest(spec.data),
        documents=len(documents.read_documents(spec.data)),
        samples=statistics.samples,
        tokens=statistics.tokens,
    )


def _named(nodes: Sequence[str]) -> str:
    """Name the first of several nodes and count the others."""
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} and {len(nodes) - 1} more"
