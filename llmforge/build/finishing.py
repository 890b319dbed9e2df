"""Finish an artifact whose engine is pending: build the engine on the host that can, and publish both as a new version.

What needs the checkpoint, quality and latency beside it, is measured where the recipe is given again: an artifact names
checkpoint and texts, and does not hold them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import onnx_ir as ir

from llmforge import artifact, engines, passes, targets
from llmforge.artifact import Artifact, Manifest
from llmforge.base.errors import UsageError
from llmforge.base.progress import Progress, Silent
from llmforge.build import evidence
from llmforge.build.evidence import Clock, Evidence
from llmforge.build.pipeline import BuildResult, evaluation_windows
from llmforge.checkpoint import Checkpoint
from llmforge.engines import Engine, pending
from llmforge.evaluation import gates, machine
from llmforge.recipe import GateSpec, Recipe, ServingSpec
from llmforge.report import model as records
from llmforge.report import render
from llmforge.report.model import Report
from llmforge.runtime.backends.config import MODEL_FILE, physical_cores
from llmforge.triton import repository

_NO_RECIPE = "no recipe was given, which names the checkpoint and the texts to measure it beside"


def finish(path: Path, recipe: Recipe | None = None, progress: Progress | None = None) -> BuildResult:
    """Build the engine that is pending in the artifact at `path`, and publish it as a version beside that one.

    `recipe` is the one that the artifact was built by; its checkpoint and texts are read for what is measured.

    Raises:
        InputError: no engine is pending there, or files of the artifact were changed.
        UsageError: `recipe` is another one, or its checkpoint is another.
        EnvironmentLacks: this machine has not what builds the engine.
        ForgeError: anything else that keeps it from being built; nothing that looks finished is left behind.
    """
    clock, progress = Clock(), progress or Silent()
    progress.stage("Check artifact and host")
    opened = Artifact.open(path)
    job = _Job(opened, recipe, progress)
    builder = engines.for_target(job.waiting.backend, job.target)
    builder.require_host(job.target, job.waiting.spec)
    job.check_recipe()
    opened.verify()
    out, name = _out(opened), opened.manifest.name
    with artifact.staging(out, name) as staging:
        progress.stage("Build engine")
        shutil.copytree(opened.path / "tokenizer", staging / "tokenizer", copy_function=shutil.copyfile)
        engine = builder.build(job.waiting.request(opened.path / "engine", staging / "engine", job.target, progress))
        job.write_triton(engine, staging)
        found = job.measure(staging, engine)
        manifest = opened.manifest
        version = artifact.version_of(artifact.content_digest(staging, manifest.recipe))
        report = job.report(version, staging, engine, found, clock)
        progress.stage("Publish")
        (staging / artifact.REPORT).mkdir()
        render.write(report, staging / artifact.REPORT)
        published = artifact.publish(
            staging,
            recipe=manifest.recipe,
            checkpoint=manifest.checkpoint,
            target=manifest.target,
            verdict=report.verdict.value,
            requires=engine.config.requires,
        )
    return BuildResult(published.path, report)


def _out(opened: Artifact) -> Path:
    """Find the folder that holds `<name>/<version>`; an artifact that was moved gets its new version beside it."""
    parent = opened.path.parent
    return parent.parent if parent.name == opened.manifest.name else parent


@dataclass(frozen=True)
class _Job:
    """A pending artifact, and what there is to finish it with."""

    opened: Artifact
    recipe: Recipe | None
    progress: Progress

    @property
    def manifest(self) -> Manifest:
        return self.opened.manifest

    @cached_property
    def waiting(self) -> pending.Pending:
        return pending.read(self.opened.path / "engine")

    @cached_property
    def target(self) -> targets.Target:
        return targets.load(self.waiting.target)

    def check_recipe(self) -> None:
        """Refuse a recipe, or a checkpoint, that the artifact was not built by."""
        if self.recipe is None:
            return
        resolved = self.recipe.resolved(self.recipe.instantiate(passes.ALL))
        written = self.manifest.recipe
        if different := sorted(key for key in {*resolved, *written} if resolved.get(key) != written.get(key)):
            raise UsageError(
                f"{self.recipe.path}: not the recipe of {self.opened.path}: {', '.join(different)} differ",
                hint="give the same recipe with the same --set, or none: then nothing is measured",
            )
        digest = Checkpoint.open(self.recipe.checkpoint).digest
        if digest != self.manifest.checkpoint:
            raise UsageError(
                f"{self.recipe.checkpoint}: its content is {digest}, and the artifact was built from "
                f"{self.manifest.checkpoint}"
            )

    def write_triton(self, engine: Engine, staging: Path) -> None:
        """Write the model repository that serves the engine from where it lies."""
        made_of = {"checkpoint": f"{self.manifest.recipe['checkpoint']} {self.manifest.checkpoint}"}
        serving = ServingSpec.model_validate(self.manifest.recipe["serving"], strict=False)
        model = repository.Model(self.manifest.name, self.target.kind, serving, engine.config, made_of)
        repository.write(model, staging / repository.FOLDER / self.manifest.name)

    def measure(self, staging: Path, engine: Engine) -> Evidence:
        """Measure the engine as it ships, where this machine runs it and the recipe says beside what."""
        if self.recipe is None:
            return Evidence(None, None, None, engines.why_not_run(self.target) or _NO_RECIPE)
        checkpoint = Checkpoint.open(self.recipe.checkpoint)
        return evidence.measure(
            staging,
            engine,
            ir.load(self.opened.path / "engine" / MODEL_FILE),
            spec=self.recipe.validation,
            target=self.target,
            checkpoint=checkpoint,
            windows=evaluation_windows(self.recipe, checkpoint),
            threads=physical_cores(),
            progress=self.progress,
        )

    def report(self, version: str, staging: Path, engine: Engine, found: Evidence, clock: Clock) -> Report:
        """Continue the report of the pending artifact: passes and calibration are its, the rest is of today."""
        before = records.read(self.opened.path / artifact.REPORT / "report.json")
        record = found.engine_record(self.waiting.backend, staging / "engine", engine)
        specs = {metric: GateSpec.model_validate(bounds) for metric, bounds in self.manifest.recipe["gates"].items()}
        results = found.judge(specs, record)
        built_from = f"the engine was built from version {self.manifest.version}, which {before.machine.cpu} wrote"
        return before.model_copy(
            update={
                "version": version,
                "created": datetime.now(UTC).replace(microsecond=0).isoformat(),
                "verdict": gates.overall(results),
                "gates": results,
                "quality": found.quality,
                "quality_baseline": found.baseline,
                "latency": found.latency,
                "engine": record,
                "notes": (*before.notes, built_from, *engine.notes),
                "build": clock.record(),
                "machine": machine.describe(),
                "versions": artifact.tool_versions(),
            }
        )
