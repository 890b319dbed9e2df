"""The last stage: the report is written, and all of it is published under its version."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import UTC, datetime

from llmforge import artifact
from llmforge.artifact import Manifest
from llmforge.compile import provenance
from llmforge.compile.state import BuildResult, CompileState
from llmforge.gates import comparison, records
from llmforge.gates.records import Report
from llmforge.measure import machine
from llmforge.report import render


def publish(state: CompileState) -> BuildResult:
    """Seal what lies in the staging folder, write its report, and publish both.

    This is the one place where a build comes to have succeeded: it has when its folder has got the name of its version,
    and what this returns is there. Nothing else makes a `BuildResult` of a build.

    Raises:
        VerificationError: a file was changed, added or removed since it was written.
    """
    staging, engine = state.staging, state.engine
    manifest = artifact.seal(
        staging,
        recipe=state.facts.recipe,
        checkpoint=state.facts.checkpoint.digest,
        target=state.target.catalog_name,
        requires=engine.config.requires if engine is not None else {},
        hash_of=state.hashing.sha256,
    )
    report = _report(state, manifest)
    state.clock.stage("Publish")
    before = comparison.previous(staging.parent.parent, report)
    if isinstance(before, str):
        report, before = report.model_copy(update={"notes": (*report.notes, before)}), None
    (staging / artifact.REPORT).mkdir()
    render.write(report, staging / artifact.REPORT, before)
    encoder = None if engine is None else engine.config.encoder
    provenance.write(staging, report, state.lock.with_engine(manifest.files), manifest, encoder)
    state.hashing.begin_evidence()
    published = artifact.publish(
        staging, manifest, json.loads(report.to_json()), state.hashing.require_unchanged, state.hashing.sha256
    )
    return BuildResult(published.path, records.read(published), before)


def _report(state: CompileState, manifest: Manifest) -> Report:
    found, facts = state.evidence, state.facts
    return Report(
        **{each.name: getattr(facts, each.name) for each in fields(facts)},
        content=manifest.content_digest,
        created=datetime.now(UTC).replace(microsecond=0).isoformat(),
        verdict=records.overall(state.gates, facts.passes),
        gates=state.gates,
        quality=found.quality,
        quality_baseline=found.baseline,
        latency=found.latency,
        runtimes=found.runtimes,
        tasks=found.tasks,
        adapters=found.adapters,
        behaviour=found.behaviour,
        retrieval=found.retrieval,
        engine=state.engine_record,
        build=state.clock.record(state.reused),
        machine=machine.describe(),
        versions=artifact.tool_versions(),
    )
