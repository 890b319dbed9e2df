"""Recipe in, published artifact out. `build` is the picture of the whole; each stage lives elsewhere.

This module alone owns verification after each pass, timing, and the record of what happened.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge import artifact, calibration, engines, passes, targets
from llmforge.base.errors import UnsupportedError
from llmforge.base.progress import Progress, Silent
from llmforge.build import dry_run, evidence
from llmforge.build.evidence import Clock, Evidence
from llmforge.checkpoint import Checkpoint, documents, text
from llmforge.checkpoint.documents import Document
from llmforge.checkpoint.text import Window
from llmforge.engines import BuildRequest, Engine, interop, pending
from llmforge.engines.onnxruntime import write_tokenizer
from llmforge.evaluation import gates, machine
from llmforge.ir import dialect, graph, interface
from llmforge.lowering import options, pass_base
from llmforge.lowering.pass_base import Context, Numerics, Pass
from llmforge.quantization.statistics import Demand, Statistics
from llmforge.recipe import Recipe
from llmforge.report import model as records
from llmforge.report import render, view
from llmforge.report.model import Report
from llmforge.runtime.backends.config import physical_cores
from llmforge.targets import Target
from llmforge.trace import trace
from llmforge.triton import repository
from llmforge.verification.trace_verifier import verify_trace
from llmforge.verification.verifier import Verifier

BUDGET_WINDOWS = 24  # windows of text, spread over all documents, that the budget of a lossy pass is measured on


@dataclass(frozen=True)
class BuildResult:
    """A published artifact and the evidence of its build."""

    path: Path
    report: Report


def build(recipe: Recipe, out: Path, progress: Progress | None = None) -> BuildResult:
    """Build what `recipe` describes and publish it as `out/<name>/<version>`.

    A failed gate does not stop publication: the artifact says so itself, and so does `report.verdict`.

    Raises:
        ForgeError: anything that keeps the artifact from being built; nothing that looks finished is left behind.
    """
    job = _Job(recipe, out, progress or Silent())
    job.progress.stage("Check recipe, target and data")
    steps = recipe.instantiate(passes.ALL)
    job.check_host()
    job.check_data()
    with artifact.staging(out, recipe.name) as staging, calibration.kept(staging.parent) as layers:
        job.progress.stage("Trace")
        model = trace(job.checkpoint)
        demands = [demand for step in steps for demand in step.demands()]
        job.rehearse(model, steps, demands)
        job.progress.stage("Read checkpoint")
        job.checkpoint.verify(job.progress)
        job.verify_trace(model)
        statistics = job.calibrate(model, demands, layers)
        done = job.transform(model, steps, statistics)
        engine = job.build_engine(model, staging)
        found = job.measure(staging, engine, model)
        resolved = recipe.resolved(steps)
        version = artifact.version_of(artifact.content_digest(staging, resolved))
        record = found.engine_record(recipe.engine.backend, staging / "engine", engine)
        report = job.report(version, resolved, done, statistics, record, found)
        job.progress.stage("Publish")
        (staging / artifact.REPORT).mkdir()
        render.write(report, staging / artifact.REPORT)
        published = artifact.publish(
            staging,
            recipe=resolved,
            checkpoint=job.checkpoint.digest,
            target=job.target.known_as,
            verdict=report.verdict.value,
            requires=engine.config.requires if engine is not None else {},
        )
    return BuildResult(out / recipe.name / published.manifest.version, report)  # as `out` was given, not resolved


def evaluation_windows(recipe: Recipe, checkpoint: Checkpoint) -> list[Window]:
    """Cut the text that quality is measured on into windows; [] where the recipe asks for none."""
    spec = recipe.validation.quality
    if spec is None:
        return []
    found = documents.read_documents(spec.data)
    return text.windows(checkpoint.tokenizer, found, spec.context, checkpoint.bos_token_id)


@dataclass
class _Job:
    """The inputs of one build, opened once, and the stages that use them."""

    recipe: Recipe
    out: Path
    progress: Progress
    notes: list[str] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)

    @cached_property
    def target(self) -> Target:
        return targets.find(self.recipe.target)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint.open(self.recipe.checkpoint)

    @cached_property
    def threads(self) -> int:
        return self.recipe.engine.threads or physical_cores()

    @cached_property
    def calibration_documents(self) -> list[Document]:
        return documents.read_documents(self.recipe.calibration.data) if self.recipe.calibration else []

    @cached_property
    def evaluation_documents(self) -> list[Document]:
        spec = self.recipe.validation.quality
        return documents.read_documents(spec.data) if spec else []

    @cached_property
    def calibration_windows(self) -> list[Window]:
        spec = self.recipe.calibration
        assert spec is not None  # Recipe.instantiate has seen to it
        pool = text.windows(
            self.checkpoint.tokenizer, self.calibration_documents, spec.length, self.checkpoint.bos_token_id
        )
        return text.sample(pool, spec.samples, spec.seed)

    @cached_property
    def evaluation_windows(self) -> list[Window]:
        return evaluation_windows(self.recipe, self.checkpoint)

    def check_host(self) -> None:
        """Refuse what no engine is built for, and what this machine does not build unless that is deferred."""
        builder = engines.for_target(self.recipe.engine.backend, self.target)
        if not self.recipe.engine.deferred:
            builder.require_host(self.target, self.recipe.engine)
        elif self.target.kind == "cpu":
            raise UnsupportedError(
                f"an engine for target {self.target.name}, a CPU, is built here and now: nothing is deferred",
                hint="leave `deferred` out of the recipe, and --defer",
            )

    def check_data(self) -> None:
        """Read both texts, and refuse evaluation on what calibration has seen."""
        documents.refuse_overlap(self.calibration_documents, self.evaluation_documents)

    def verify_trace(self, model: ir.Model) -> None:
        """Hold the traced graph against transformers, and note what was found; that its attention is not canonical."""
        self.progress.stage("Verify the trace")
        if (reason := model.metadata_props.get(interface.FALLBACK)) is not None:
            self._check_context(reason)
            self.notes.append(f"the model's own attention was traced, and passes do not know it, because: {reason}")
        self.notes.append(verify_trace(self.checkpoint, model, threads=self.threads).note())

    def _check_context(self, reason: str) -> None:
        """Refuse a longer context than the model is made for, beyond which nobody knows what its own code does."""
        wanted, made_for = self.recipe.engine.max_context, self.checkpoint.geometry.context
        if made_for is not None and wanted > made_for:
            raise UnsupportedError(
                f"engine.max_context is {wanted}; the model is made for {made_for} tokens, and its own attention was "
                f"traced, because: {reason}",
                hint=f"set engine.max_context to at most {made_for}",
            )

    def rehearse(self, model: ir.Model, steps: Sequence[Pass], demands: Sequence[Demand]) -> None:
        """Refuse what cannot become an engine, before any weight is read."""
        self.progress.stage("Plan")
        linears = calibration.plan(self.checkpoint, demands, dialect.caches(model)) if demands else frozenset()
        dry_run.rehearse(
            model,
            steps,
            target=self.target,
            spec=self.recipe.engine,
            checkpoint=self.checkpoint,
            calibrated=linears,
        )

    def calibrate(self, model: ir.Model, demands: Sequence[Demand], folder: Path) -> Statistics | None:
        """Collect what the passes demand, or nothing where none does; layers that are in `folder` are done already."""
        if not demands:
            return None
        self.progress.stage("Calibrate")
        return calibration.calibrate(
            self.checkpoint,
            self.calibration_windows,
            demands,
            caches=dialect.caches(model),
            folder=folder,
            progress=self.progress,
        )

    def transform(
        self, model: ir.Model, steps: Sequence[Pass], statistics: Statistics | None
    ) -> tuple[records.PassRecord, ...]:
        """Run the passes over `model`, and hold each to what it declares."""
        self.progress.stage("Run the probes of the passes")
        lossy = any(step.numerics is Numerics.LOSSY for step in steps)
        verifier = Verifier(
            model,
            folder=self.out / self.recipe.name / ".failed",
            texts=self._budget_texts() if lossy else [],
            threads=self.threads,
        )
        if verifier.in_parts:
            self.notes.append(
                f"passes: {graph.weight_bytes(model) / 1e9:.1f} GB of fp32 weights were never run whole: exact and "
                "rounding passes are proven on the places that they changed, places that are changed alike once; the "
                "budgets of lossy passes are measured on the whole model, piece by piece, on few tokens"
            )
        context = Context(self.target, statistics)
        return tuple(self._apply(step, model, context, verifier) for step in steps)

    def _apply(self, step: Pass, model: ir.Model, context: Context, verifier: Verifier) -> records.PassRecord:
        self.progress.stage(f"Pass {step.name}")
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
            verification=records.VerificationRecord(
                numerics=proof.numerics,
                max_abs_difference=proof.max_abs_difference,
                allowed=proof.allowed,
                kld_mean=proof.kld_mean,
                budget=proof.budget,
                probes=proof.probes,
            ),
        )

    def _budget_texts(self) -> list[NDArray[np.int64]]:
        """Choose windows for budgets: of the evaluation text, else of the calibration text."""
        pool = self.evaluation_windows or self.calibration_windows
        pool = [window for window in pool if len(window.ids) > 1]
        picked = np.linspace(0, len(pool) - 1, min(BUDGET_WINDOWS, len(pool))).round().astype(int)
        return [pool[i].ids for i in picked]

    def build_engine(self, model: ir.Model, staging: Path) -> Engine | None:
        """Lower `model` and write the engine, the tokenizer and the model repository; None where that is deferred."""
        self.progress.stage("Build engine")
        builder = engines.for_target(self.recipe.engine.backend, self.target)
        lowered, changes = builder.lower(model, self.target, self.recipe.engine)
        self.notes += [f"lowering: {_named(places.nodes)}: {places.what}" for places in view.grouped(changes.rewritten)]
        self.notes += [f"lowering: {_named(places.nodes)}: {places.what}" for places in view.grouped(changes.skipped)]
        write_tokenizer(self.checkpoint, staging / "tokenizer")
        request = BuildRequest(
            lowered,
            staging / "engine",
            self.recipe.engine,
            self.target,
            self.checkpoint.eos_token_ids,
            self.checkpoint.bos_token_id,
            self.progress,
        )
        if self.recipe.engine.deferred:
            pending.write(request)
            return None
        engine = builder.build(request)
        self.notes += [
            *engine.notes,
            *(f"interface: {note}" for note in interop.write(lowered, engine, self.checkpoint)),
        ]
        made_of = {"checkpoint": f"{self.checkpoint.path.name} {self.checkpoint.digest}"}
        served = repository.Model(self.recipe.name, self.target.kind, self.recipe.serving, engine.config, made_of)
        repository.write(served, staging / repository.FOLDER / self.recipe.name)
        return engine

    def measure(self, staging: Path, engine: Engine | None, model: ir.Model) -> Evidence:
        """Measure the engine as it ships, where this machine runs it."""
        spec = self.recipe.validation
        if spec.quality is None and spec.latency is None:
            self.notes.append("nothing was measured: the recipe asks for no validation")
        return evidence.measure(
            staging,
            engine,
            model,
            spec=spec,
            target=self.target,
            checkpoint=self.checkpoint,
            windows=self.evaluation_windows,
            threads=self.threads,
            progress=self.progress,
        )

    def report(
        self,
        version: str,
        resolved: dict[str, object],
        done: tuple[records.PassRecord, ...],
        statistics: Statistics | None,
        engine: records.EngineRecord,
        found: Evidence,
    ) -> Report:
        """Write down everything, and judge the gates."""
        results = found.judge(self.recipe.gates, engine)
        return Report(
            name=self.recipe.name,
            version=version,
            created=datetime.now(UTC).replace(microsecond=0).isoformat(),
            verdict=gates.overall(results),
            gates=results,
            quality=found.quality,
            quality_baseline=found.baseline,
            latency=found.latency,
            checkpoint=self._checkpoint_record(),
            target=records.TargetRecord(name=self.target.name, title=self.target.title, kind=self.target.kind),
            engine=engine,
            passes=done,
            calibration=self._calibration_record(statistics),
            notes=tuple(self.notes),
            build=self.clock.record(),
            machine=machine.describe(),
            versions=artifact.tool_versions(),
            recipe=resolved,
        )

    def _checkpoint_record(self) -> records.CheckpointRecord:
        config = self.checkpoint.config
        return records.CheckpointRecord(
            name=self.checkpoint.path.name,
            digest=self.checkpoint.digest,
            architecture=(config.architectures or [type(config).__name__])[0],
            dtypes=tuple(sorted({entry.dtype.name for entry in self.checkpoint.tensors.values()})),
            parameters=self.checkpoint.parameters,
            size_bytes=self.checkpoint.size_bytes,
        )

    def _calibration_record(self, statistics: Statistics | None) -> records.CalibrationRecord | None:
        spec = self.recipe.calibration
        if spec is None or statistics is None:
            return None
        return records.CalibrationRecord(
            data=spec.data.name,
            digest=documents.digest(spec.data),
            documents=len(self.calibration_documents),
            samples=statistics.samples,
            tokens=statistics.tokens,
        )


def _named(nodes: Sequence[str]) -> str:
    """Name the first of several nodes and count the others."""
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} and {len(nodes) - 1} more"
