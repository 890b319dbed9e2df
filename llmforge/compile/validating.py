"""Measure a published artifact again, here: one more record of evidence, or documents until its gates are decided."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmforge import artifact, passes, targets
from llmforge.artifact import Artifact
from llmforge.artifact.sealed import is_content
from llmforge.backends import engines
from llmforge.backends.engines import BuiltEngine
from llmforge.base.errors import DataError, EnginePending, UnsupportedError, UsageError
from llmforge.base.progress import Progress, Silent
from llmforge.cache import Cache
from llmforge.checkpoint import Checkpoint, documents
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile import chat_template, evidence, finishing, reference
from llmforge.compile.answered import answering
from llmforge.compile.evidence import Clock, Measurement
from llmforge.compile.reuse import opened as opened_cache
from llmforge.compile.state import BuildResult
from llmforge.compile.tasks import BuildCacheAnswers
from llmforge.compile.texts import BuildTexts
from llmforge.gates import comparison, confirmed, decision, records, release, verdict
from llmforge.gates.decision import GateResult, Verdict
from llmforge.gates.records import Report
from llmforge.gates.release import Judgement, Look, MeasuredArtifact, Pairs, ReleaseQuestion
from llmforge.measure import machine, quality
from llmforge.measure.baseline import open_baseline
from llmforge.measure.footprint import BytesRead
from llmforge.measure.latency import engine_description
from llmforge.measure.quality import Logits, QualityRun
from llmforge.measure.runtimes import Interpreter
from llmforge.measure.scoring import TaskRequest
from llmforge.measure.tasks import TaskEngine, TaskServer
from llmforge.measure.tasks import run as run_tasks
from llmforge.metrics import catalog, tasks
from llmforge.metrics.agreement import RuntimeName
from llmforge.metrics.quality import DocumentSums
from llmforge.metrics.tasks import TaskResult
from llmforge.recipe import Recipe
from llmforge.report import render
from llmforge.runtime.config import FILE, RuntimeConfig, physical_cores
from llmforge.serving import Runner
from llmforge.serving import load as load_runner
from llmforge.targets import Target


@dataclass(frozen=True)
class Evaluated:
    """What tasks gave, and the evidence that it became."""

    tasks: tuple[TaskResult, ...]
    skipped: tuple[str, ...]
    result: BuildResult | None  # None: it became none


def validate(
    path: Path,
    recipe: Recipe,
    progress: Progress | None = None,
    *,
    pythons: Mapping[RuntimeName, Path] | None = None,
) -> BuildResult:
    """Measure the artifact at `path` on this machine, and add what was found to its evidence.

    `recipe` is the one that it was built by: it says beside which checkpoint, on which text. No file changes. The
    artifact runs in the other runtimes that the recipe or `pythons` names, each by its Python there, else by this one.

    Raises:
        InputError: files of the artifact were changed.
        UsageError: `recipe` is another one, or its checkpoint is.
        EnginePending: there is no engine to measure.
        UnsupportedError: this machine does not run the engine, or the recipe asks for nothing to be measured, or
            another runtime would not load it.
        EnvironmentLacks: another runtime cannot be imported.
    """
    progress = clock = Clock(progress or Silent())
    progress.stage("Check artifact and recipe")
    opened = _runnable(path)
    opened.verify()
    finishing.check_recipe(recipe, opened)
    subject = MeasuredArtifact.of(opened)
    before = subject.report
    if recipe.validation.is_empty:
        raise UnsupportedError(f"{path}: its recipe asks for no validation", hint="add `validation` and build again")
    target = targets.load(before.target.name) if before.target.name in targets.names() else targets.local()
    if (reason := engines.why_not_run(target)) is not None:
        raise UnsupportedError(f"{path}: cannot be measured here: {reason}")
    others = _others(recipe, target, pythons or {})
    read = _read_by_a_step(path, recipe, before)
    found = evidence.measure(_measurement(opened, recipe, target, read, others, progress), progress)
    engine = before.engine.model_copy(update={"unmeasured": found.unmeasured})
    kept_tasks = tasks.merge(before.tasks, found.tasks)  # of `llmforge eval`
    judged = replace(found, tasks=kept_tasks).judge(subject.sealed_limits, engine, before.checkpoint)
    here = machine.describe()
    changed = {
        **_judged(judged, before.passes),
        "quality": found.quality,
        "quality_baseline": found.baseline,
        "latency": found.latency,
        "runtimes": found.runtimes,
        "tasks": kept_tasks,
        "adapters": found.adapters,
        "behaviour": found.behaviour,
        "retrieval": found.retrieval,
        "engine": engine,
        "build": clock.record(records.ReusedRecord()),
        "machine": here,
        "versions": artifact.tool_versions(),
        "notes": tuple(dict.fromkeys((*before.notes, f"measured again on {here.cpu}", *found.notes))),
    }
    progress.stage("Publish")
    return _add(opened, before.model_copy(update=changed))


def _read_by_a_step(path: Path, recipe: Recipe, before: Report) -> BytesRead:
    """Take what a decode step reads from the report of the build."""
    if before.latency is None and recipe.validation.latency is not None:
        raise UnsupportedError(
            f"{path}: what a decode step reads was not counted, so that latency has nothing to be held against",
            hint="build it again, or finish it with its recipe",
        )
    if before.latency is None:
        return BytesRead(0, 0)
    found = before.latency.footprint
    return BytesRead(
        found.weight_bytes_per_token, found.kv_bytes_per_token, found.multiply_adds_per_token, found.head_multiply_adds
    )


def _measurement(
    opened: Artifact,
    recipe: Recipe,
    target: Target,
    read: BytesRead,
    others: tuple[Interpreter, ...],
    progress: Progress,
) -> Measurement:
    """Ask for what the recipe of a published artifact asks for."""
    checkpoint = Checkpoint.open(*recipe.origin())
    chat_template.choose(recipe, checkpoint)
    folder = opened.path / "engine"
    size_bytes = MeasuredArtifact.of(opened).report.engine.size_bytes
    return Measurement(
        opened.path,
        BuiltEngine(folder, RuntimeConfig.read(folder / FILE), 0, size_bytes),
        read,
        spec=recipe.validation,
        target=target,
        checkpoint=checkpoint,
        windows=BuildTexts(recipe, checkpoint, (), answering(), progress).evaluation,
        threads=recipe.engine.threads or physical_cores(),
        ranks=engines.devices(target, recipe.engine),
        interpreters=others,
        adapters=recipe.apart,
    )


def _judged(gates: tuple[GateResult, ...], passes: Sequence[records.PassRecord]) -> dict[str, Any]:
    """Give what changes in a report whose gates were decided again; it is published as one more record."""
    return {
        "created": datetime.now(UTC).replace(microsecond=0).isoformat(),
        "verdict": records.overall(gates, passes),
        "gates": gates,
        "files": {},
        "previous": None,
    }


def _add(opened: Artifact, report: Report) -> BuildResult:
    """Add a report to the evidence of an artifact, which stays as it is."""
    parent = opened.path.parent  # one that was moved out of `<name>` gets its record beside it
    out = parent.parent if parent.name == opened.manifest.name else parent
    with artifact.staging(out, opened.manifest.name) as staging:
        for name in opened.manifest.files:
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            assert is_content(name)
            shutil.copyfile(opened.path / name, staging / name)
        (staging / artifact.REPORT).mkdir()
        previous = comparison.previous(out, report, made=opened.evidence[0].created)
        if isinstance(previous, str):
            report, previous = report.model_copy(update={"notes": (*report.notes, previous)}), None
        render.write(report, staging / artifact.REPORT, previous)
        published = artifact.publish(staging, opened.manifest, json.loads(report.to_json()))
    return BuildResult(published.path, records.read(published), previous)


def _others(recipe: Recipe, target: Target, pythons: Mapping[RuntimeName, Path]) -> tuple[Interpreter, ...]:
    """Find the other runtimes that the recipe or `pythons` names, and refuse those that would not load the engine."""
    wanted = tuple(dict.fromkeys((*recipe.validation.runtimes, *pythons)))
    for name in wanted:
        if (why := recipe.why_not_loaded(name, passes.ALL)) is not None:
            raise UnsupportedError(f"{recipe.path}: {why[0]}", hint=why[1])
    if wanted and recipe.validation.quality is None:
        raise UsageError(f"{recipe.path}: has no `validation: {{quality: …}}`: there is no text to answer")
    return evidence.interpreters(recipe, target, pythons, wanted)


def evaluate(
    path: Path,
    wanted: TaskRequest,
    checkpoint: Checkpoint,
    progress: Progress | None = None,
    *,
    server: TaskServer | None = None,
    cache: Callable[[], Cache] | None = None,
) -> Evaluated:
    """Run the tasks `wanted` on the artifact at `path` and its checkpoint, and add what was found to its evidence.

    Quality, latency and other tasks stay as they were measured. What a `server` answers is no evidence of the artifact:
    it is shown, and added to nothing.

    Raises:
        InputError: files of the artifact were changed; a task, or its data, cannot be used.
        UsageError: the checkpoint is another one, or there is no such task.
        EnginePending: there is no engine to run.
        EnvironmentLacks, UnsupportedError: see `tasks.run`; or this machine does not run the engine.
    """
    progress = progress or Silent()
    progress.stage("Check artifact and checkpoint")
    opened = _runnable(path)
    opened.verify()
    if checkpoint.digest != opened.manifest.checkpoint:
        raise UsageError(
            f"{checkpoint.path}: its digest is {checkpoint.digest}, but the artifact was built from "
            f"{opened.manifest.checkpoint}"
        )
    threads = physical_cores()
    progress.stage("Load engine")
    runner = load_runner(opened.path, threads=threads)
    described = f"{engine_description(runner, threads)}, {machine.describe().cpu}"
    engine = TaskEngine(runner, described, threads, opened.manifest.content_digest)
    with tempfile.TemporaryDirectory() as scratch, opened_cache(cache, Path(scratch), progress) as reuse:
        answers = BuildCacheAnswers(reuse)
        found, skipped = run_tasks(wanted, engine, checkpoint, progress, cache=answers, server=server)
    if server is not None:
        return Evaluated(found, skipped, None)
    subject = MeasuredArtifact.of(opened)
    before = subject.report
    every = tasks.merge(before.tasks, found)
    measured = before.model_copy(update={"tasks": every}).measured
    judged = verdict.judge(subject.sealed_limits, measured, before.engine.unmeasured)
    notes = tuple(dict.fromkeys((*before.notes, *skipped)))
    progress.stage("Publish")
    report = before.model_copy(update={**_judged(judged, before.passes), "tasks": every, "notes": notes})
    return Evaluated(found, skipped, _add(opened, report))


def decide(
    asked: ReleaseQuestion,
    recipe: Recipe,
    more: Sequence[Path] = (),
    *,
    most: int | None = None,
    progress: Progress | None = None,
) -> Judgement:
    """Measure further documents until a question is decided, or `most` documents (or the text) are used up.

    It also ends where no further document would decide what is left.

    The recorded documents are the first look. Each look may spend the share of `ALPHA` that its new documents have of
    all that there may be: over all looks a gate passes wrongly with probability `ALPHA` at most, whatever the looks
    have in common (union bound; the spending function of Lan and DeMets 1983 that is linear).

    Raises:
        DataError: there are no further documents.
        ForgeError: what `validate` raises.
    """
    progress = progress or Silent()
    progress.stage("Check artifacts and recipe")
    sides = _pairable(asked, recipe)
    threads = recipe.engine.threads or physical_cores()
    runners = []
    for side in sides:
        _runnable(side.opened.path).verify()
        runners.append(load_runner(side.opened.path, threads=threads))
    ours, theirs = _recorded(asked.release, asked.against)
    checkpoint = Checkpoint.open(*recipe.origin())
    chat_template.choose(recipe, checkpoint)
    known = {each.document for side in sides for each in _documents(side)}
    pool = [group for group in _further(recipe, checkpoint, more, progress) if group[0].document not in known]
    total = min(len(ours) + len(pool), most or len(ours) + len(pool))
    if total <= len(ours):
        raise DataError(
            f"{len(ours)} documents were measured already, and there are no further ones up to {total}",
            hint="give more text with --text FILE.jsonl, or a larger --max-documents",
        )
    assert recipe.validation.quality is not None
    baseline = open_baseline(reference.of(recipe.validation.quality, checkpoint), threads=threads)
    others = [name for name in asked.specs if catalog.plugin_of(name) is not None]
    looks: list[Look] = []
    for size, alpha in decision.schedule(len(ours), total):
        progress.stage(f"Measure up to {size} documents")
        further = [pool.pop(0) for _ in range(size - len(ours))]
        expected = baseline.of([window.ids for group in further for window in group], progress.advance)
        for group in further:
            progress.advance(len(ours), size)
            found = _measured(group, expected, runners, others)
            ours.append(found[0])
            theirs += found[1:]
        judged = release.judge(asked, documents=(ours, theirs), alpha=alpha)
        looks.append(Look(documents=len(ours), alpha=alpha, verdict=judged.verdict))
        left = {each.metric for each in judged.gates if each.verdict is Verdict.INCONCLUSIVE}
        if judged.verdict is not Verdict.INCONCLUSIVE or not left & release.growing(asked.specs).keys():
            break
    return judged.model_copy(update={"looks": tuple(looks)})


def _pairable(asked: ReleaseQuestion, recipe: Recipe) -> list[MeasuredArtifact]:
    """List the artifacts whose documents are paired; refuse a recipe that is not theirs, or says no text."""
    finishing.check_recipe(recipe, asked.release.opened)
    sides = [asked.release] if asked.against is None else [asked.release, asked.against]
    if recipe.validation.quality is None:
        raise UsageError(f"{recipe.path}: has no `validation: {{quality: …}}`: it does not say on which text to decide")
    if len({side.report.checkpoint.digest for side in sides}) > 1:
        raise UsageError("the artifacts were built from different checkpoints; their documents cannot be paired")
    return sides


def _recorded(ours: MeasuredArtifact, against: MeasuredArtifact | None) -> Pairs:
    """Take the documents of the first look; of two artifacts those that were measured of both."""
    if against is None:
        return list(_documents(ours)), []
    return release.pairs(ours, against)


def _documents(side: MeasuredArtifact) -> Sequence[DocumentSums]:
    return () if side.report.quality is None else side.report.quality.per_document


def _further(
    recipe: Recipe, checkpoint: Checkpoint, more: Sequence[Path], progress: Progress
) -> list[list[TokenWindow]]:
    """Cut every document of the recipe's text, and of `more`, into windows; a list for each document."""
    spec = recipe.validation.quality
    assert spec is not None
    texts = BuildTexts(recipe, checkpoint, (), answering(), progress)
    read = [document for file in documents.read_all([*spec.data, *more]) for document in file]
    documents.refuse_overlap([document for file in texts.calibration_documents for document in file], read)
    groups: dict[str, list[TokenWindow]] = {}
    for window in texts.further(read, spec.context):
        if len(window.ids) > 1:
            groups.setdefault(window.document, []).append(window)
    return list(groups.values())


def _measured(
    windows: Sequence[TokenWindow],
    baseline: Logits,
    sides: Sequence[Runner],
    metrics: Sequence[str],
) -> list[DocumentSums]:
    """Compare each side with the baseline, which runs once, on the windows of one document.

    `metrics` are those of plug-ins that are asked for.
    """
    expected = [baseline(window.ids) for window in windows]
    found = []
    for runner in sides:
        kept = iter(expected)
        compared = quality.compare(
            windows,
            lambda _, kept=kept: next(kept),  # type: ignore[misc]
            lambda ids, f=runner.logits: f(ids.tolist()),  # type: ignore[misc]
            QualityRun(metrics=metrics, ends=runner.config.eos_token_ids),
        )
        found.append(compared.per_document[0])
    return found


def _runnable(path: Path) -> Artifact:
    opened = confirmed.open_artifact(path)
    if MeasuredArtifact.of(opened).report.engine.pending:
        raise EnginePending(
            f"{path}: the engine is not built yet", hint=f"on the target: llmforge build --finish {path}"
        )
    return opened
