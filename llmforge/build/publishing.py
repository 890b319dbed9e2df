"""The end of a build: the model repository, the report and the version under which all of it is published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmforge import artifact
from llmforge.artifact import Artifact
from llmforge.base.progress import Progress
from llmforge.build.evidence import Clock, Evidence
from llmforge.engines import Engine
from llmforge.evaluation import gates, machine
from llmforge.recipe import GateSpec, ServingSpec
from llmforge.report import render
from llmforge.report.model import Report
from llmforge.targets import Target
from llmforge.triton import repository


@dataclass(frozen=True)
class BuildResult:
    """A published artifact and the evidence of its build."""

    path: Path
    report: Report


def write_repository(
    staging: Path, name: str, engine: Engine, *, target: Target, serving: ServingSpec, checkpoint: str
) -> None:
    """Write the model repository that serves the engine from where it lies; `checkpoint` is its name and digest."""
    made_of = {"checkpoint": checkpoint}
    repository.write(
        repository.Model(name, target.kind, serving, engine.config, made_of), staging / repository.FOLDER / name
    )


def results(
    staging: Path,
    engine: Engine | None,
    evidence: Evidence,
    *,
    backend: str,
    gate_specs: Mapping[str, GateSpec],
    recipe: Mapping[str, Any],
    clock: Clock,
) -> dict[str, Any]:
    """Judge the gates and write down how the engine in `staging` came out, here and today, as fields of a `Report`.

    `recipe` is the resolved one; the version is that of the content in `staging`.
    """
    version = artifact.version_of(artifact.content_digest(staging, recipe))
    record = evidence.engine_record(backend, staging / "engine", engine)
    judged = evidence.judge(gate_specs, record)
    return {
        "version": version,
        "created": datetime.now(UTC).replace(microsecond=0).isoformat(),
        "verdict": gates.overall(judged),
        "gates": judged,
        "quality": evidence.quality,
        "quality_baseline": evidence.baseline,
        "latency": evidence.latency,
        "engine": record,
        "build": clock.record(),
        "machine": machine.describe(),
        "versions": artifact.tool_versions(),
    }


def publish(
    staging: Path,
    report: Report,
    engine: Engine | None,
    *,
    recipe: Mapping[str, Any],
    checkpoint: str,
    target: str,
    progress: Progress,
) -> Artifact:
    """Write the report beside the engine, and publish what `staging` holds; `engine` None: it is built later."""
    progress.stage("Publish")
    (staging / artifact.REPORT).mkdir()
    render.write(report, staging / artifact.REPORT)
    return artifact.publish(
        staging,
        recipe=recipe,
        checkpoint=checkpoint,
        target=target,
        verdict=report.verdict.value,
        requires=engine.config.requires if engine is not None else {},
    )
