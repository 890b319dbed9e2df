"""The end of a build: the report, and the version under which all of it is published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmforge import artifact
from llmforge.artifact import Hashing
from llmforge.backends.engines import BuiltEngine
from llmforge.base.progress import Progress
from llmforge.compile import provenance
from llmforge.compile.evidence import Clock, Evidence
from llmforge.compile.lock import Lock
from llmforge.gates import comparison, decision, records
from llmforge.gates.comparison import Previous
from llmforge.gates.records import Report, ReusedRecord
from llmforge.measure import machine
from llmforge.recipe import GateSpec
from llmforge.report import render
from llmforge.targets import Target

_NOTHING = ReusedRecord()


@dataclass(frozen=True)
class BuildResult:
    """A published artifact and the evidence of its build."""

    path: Path
    report: Report
    previous: Previous | None = None  # what it was held against: the version before


def publish(
    staging: Path,
    facts: Mapping[str, Any],
    engine: BuiltEngine | None,
    evidence: Evidence,
    *,
    target: Target,
    lock: Lock,
    hashing: Hashing,
    clock: Clock,
    progress: Progress,
    reused: ReusedRecord = _NOTHING,
) -> BuildResult:
    """Judge the gates, write the report beside the engine, and publish what `staging` holds.

    This is the one place where a build comes to have succeeded: it has when its folder has got the name of its version,
    and what this returns is there. Nothing else makes a `BuildResult`.

    `facts` are the fields of the report that hold wherever the engine is built; `recipe` is the resolved one. The
    version is that of the content in `staging`. `engine` None: it is built later. `lock` tells what it was made of,
    `reused` what earlier builds had computed. `hashing` has the SHA-256 of each file as it was written.

    Raises:
        VerificationError: a file was changed, added or removed since.
    """
    recipe = facts["recipe"]
    manifest = artifact.seal(
        staging,
        recipe=recipe,
        checkpoint=facts["checkpoint"].digest,
        target=target.known_as,
        requires=engine.config.requires if engine is not None else {},
        hash_of=hashing.sha256,
    )
    engine_record = evidence.engine_record(recipe["engine"]["backend"], staging / "engine", engine)
    judged = evidence.judge(
        {name: GateSpec.model_validate(spec) for name, spec in recipe["gates"].items()},
        engine_record,
        facts["checkpoint"],
    )
    measured: dict[str, Any] = {
        "content": manifest.content_digest,
        "created": datetime.now(UTC).replace(microsecond=0).isoformat(),
        "verdict": decision.overall(judged),
        "gates": judged,
        "quality": evidence.quality,
        "quality_baseline": evidence.baseline,
        "latency": evidence.latency,
        "runtimes": evidence.runtimes,
        "tasks": evidence.tasks,
        "adapters": evidence.adapters,
        "engine": engine_record,
        "build": clock.record(reused),
        "machine": machine.describe(),
        "versions": artifact.tool_versions(),
    }
    report = Report(**{**facts, **measured})
    progress.stage("Publish")
    before = comparison.previous(staging.parent.parent, report)
    if isinstance(before, str):
        report, before = report.model_copy(update={"notes": (*report.notes, before)}), None
    (staging / artifact.REPORT).mkdir()
    render.write(report, staging / artifact.REPORT, before)
    provenance.write(staging, report, lock.with_engine(manifest.files), manifest)
    published = artifact.publish(staging, manifest, json.loads(report.to_json()), hashing.require_unchanged)
    return BuildResult(published.path, records.read(published), before)
