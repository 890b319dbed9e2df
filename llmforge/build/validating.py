"""Measure a published artifact again, here: one more record of evidence, or documents until its gates are decided."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge import artifact, engines, targets
from llmforge.artifact import Artifact
from llmforge.base.errors import DataError, EnginePending, UnsupportedError, UsageError
from llmforge.base.progress import Progress, Silent
from llmforge.base.sealed import is_content
from llmforge.build import evidence, finishing, texts
from llmforge.build.evidence import Clock
from llmforge.build.publishing import BuildResult
from llmforge.checkpoint import Checkpoint, documents, text
from llmforge.checkpoint.text import Window
from llmforge.engines import Engine
from llmforge.evaluation import gates, machine, quality
from llmforge.evaluation.baseline import Baseline
from llmforge.evaluation.footprint import BytesRead
from llmforge.evaluation.gates import Verdict
from llmforge.metrics.quality import DocumentSums
from llmforge.recipe import GateSpec, Recipe
from llmforge.report import comparing, release, render
from llmforge.report import model as records
from llmforge.report.release import Judgement, Look, Pairs, Subject
from llmforge.runtime import load as load_runner
from llmforge.runtime.backends.config import FILE, RuntimeConfig, physical_cores


def validate(path: Path, recipe: Recipe, progress: Progress | None = None) -> BuildResult:
    """Measure the artifact at `path` on this machine, and add what was found to its evidence.

    `recipe` is the one that it was built by: it says beside which checkpoint, on which text. No file changes.

    Raises:
        InputError: files of the artifact were changed.
        UsageError: `recipe` is another one, or its checkpoint is.
        EnginePending: there is no engine to measure.
        UnsupportedError: this machine does not run the engine, or the recipe asks for nothing to be measured.
    """
    progress = clock = Clock(progress or Silent())
    progress.stage("Check artifact and recipe")
    opened = _runnable(path)
    opened.verify()
    finishing.check_recipe(recipe, opened)
    before = Subject.of(opened).report
    if recipe.validation.quality is None and recipe.validation.latency is None:
        raise UnsupportedError(f"{path}: its recipe asks for no validation", hint="add `validation` and build again")
    target = targets.load(before.target.name) if before.target.name in targets.names() else targets.local()
    if (reason := engines.why_not_run(target)) is not None:
        raise UnsupportedError(f"{path}: cannot be measured here: {reason}")
    spec = recipe.validation
    if before.latency is None and spec.latency is not None:
        raise UnsupportedError(
            f"{path}: what a decode step reads was not counted, so that latency has nothing to be held against",
            hint="build it again, or finish it with its recipe",
        )
    read = BytesRead(0, 0)
    if before.latency is not None:
        footprint = before.latency.footprint
        read = BytesRead(
            footprint.weight_bytes_per_token, footprint.kv_bytes_per_token, footprint.multiply_adds_per_token
        )
    checkpoint = Checkpoint.open(recipe.checkpoint)
    found = evidence.measure(
        opened.path,
        Engine(opened.path / "engine", RuntimeConfig.read(opened.path / "engine" / FILE), 0, before.engine.size_bytes),
        read,
        spec=spec,
        target=target,
        checkpoint=checkpoint,
        windows=texts.evaluation_windows(recipe, checkpoint),
        threads=recipe.engine.threads or physical_cores(),
        ranks=recipe.engine.tensor_parallel,
        progress=progress,
    )
    engine = before.engine.model_copy(update={"unmeasured": found.unmeasured})
    judged = found.judge(Subject.of(opened).sealed_limits, engine)
    changed: dict[str, Any] = {
        "created": datetime.now(UTC).replace(microsecond=0).isoformat(),
        "verdict": gates.overall(judged),
        "gates": judged,
        "quality": found.quality,
        "quality_baseline": found.baseline,
        "latency": found.latency,
        "engine": engine,
        "build": clock.record(records.ReusedRecord()),
        "machine": machine.describe(),
        "versions": artifact.tool_versions(),
        "notes": tuple(dict.fromkeys((*before.notes, f"measured again on {machine.describe().cpu}", *found.notes))),
        "files": {},
        "previous": None,
    }
    report = before.model_copy(update=changed)
    progress.stage("Publish")
    parent = opened.path.parent  # one that was moved out of `<name>` gets its record beside it
    out = parent.parent if parent.name == opened.manifest.name else parent
    with artifact.staging(out, opened.manifest.name) as staging:
        for name in opened.manifest.files:
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            assert is_content(name)
            shutil.copyfile(opened.path / name, staging / name)
        (staging / artifact.REPORT).mkdir()
        previous = comparing.previous(out, report, made=opened.evidence[0].created)
        if isinstance(previous, str):
            report, previous = report.model_copy(update={"notes": (*report.notes, previous)}), None
        render.write(report, staging / artifact.REPORT, previous)
        published = artifact.publish(staging, opened.manifest, json.loads(report.to_json()))
    return BuildResult(published.path, records.read(published), previous)


def decide(
    release_: Subject,
    specs: Mapping[str, GateSpec],
    against: Subject | None,
    recipe: Recipe,
    more: Sequence[Path] = (),
    *,
    most: int | None = None,
    progress: Progress | None = None,
    notes: Sequence[str] = (),
) -> Judgement:
    """Measure further documents until `specs` are decided, or `most` documents (or the text) are used up.

    The recorded documents are the first look. Each look may spend the share of `ALPHA` that its new documents have of
    all that there may be: over all looks a gate passes wrongly with probability `ALPHA` at most, whatever the looks
    have in common (union bound; the spending function of Lan and DeMets 1983 that is linear).

    Raises:
        DataError: there are no further documents.
        ForgeError: what `validate` raises.
    """
    progress = progress or Silent()
    progress.stage("Check artifacts and recipe")
    finishing.check_recipe(recipe, release_.opened)
    sides = [release_] if against is None else [release_, against]
    if recipe.validation.quality is None:
        raise UsageError(f"{recipe.path}: has no `validation: {{quality: …}}`: it does not say on which text to decide")
    if len({side.report.checkpoint.digest for side in sides}) > 1:
        raise UsageError("the artifacts were built from different checkpoints; their documents cannot be paired")
    runners = []
    for side in sides:
        _runnable(side.opened.path).verify()
        runners.append(load_runner(side.opened.path, threads=recipe.engine.threads or physical_cores()))
    ours, theirs = _recorded(release_, against)
    checkpoint = Checkpoint.open(recipe.checkpoint)
    known = {each.document for side in sides for each in _documents(side)}
    pool = [group for group in _further(recipe, checkpoint, more) if group[0].document not in known]
    total = min(len(ours) + len(pool), most or len(ours) + len(pool))
    if total <= len(ours):
        raise DataError(
            f"{len(ours)} documents were measured already, and there are no further ones up to {total}",
            hint="give more text with --text FILE.jsonl, or a larger --max-documents",
        )
    baseline = Baseline(checkpoint, threads=recipe.engine.threads or physical_cores())
    looks: list[Look] = []
    for size, alpha in gates.schedule(len(ours), total):
        progress.stage(f"Measure up to {size} documents")
        while len(ours) < size:
            progress.advance(len(ours), size)
            found = _measured(pool.pop(0), baseline, [runner.logits for runner in runners])
            ours.append(found[0])
            theirs += found[1:]
        pairs: Pairs = (ours, theirs)
        judged = release.judge(release_, specs, against, documents=pairs, alpha=alpha, notes=notes)
        looks.append(Look(documents=len(ours), alpha=alpha, verdict=judged.verdict))
        if judged.verdict is not Verdict.INCONCLUSIVE:
            break
    return judged.model_copy(update={"looks": tuple(looks)})


def _recorded(ours: Subject, against: Subject | None) -> Pairs:
    """Take the documents of the first look; of two artifacts those that were measured of both."""
    if against is None:
        return list(_documents(ours)), []
    return release.pairs(ours, against)


def _documents(side: Subject) -> Sequence[DocumentSums]:
    return () if side.report.quality is None else side.report.quality.per_document


def _further(recipe: Recipe, checkpoint: Checkpoint, more: Sequence[Path]) -> list[list[Window]]:
    """Cut every document of the recipe's text, and of `more`, into windows; a list for each document."""
    spec = recipe.validation.quality
    assert spec is not None
    calibration = documents.read_documents(recipe.calibration.data) if recipe.calibration else []
    groups: dict[str, list[Window]] = {}
    for path in (spec.data, *more):
        read = documents.read_documents(path)
        documents.refuse_overlap(calibration, read)
        for window in text.windows(checkpoint.tokenizer, read, spec.context, checkpoint.bos_token_id):
            if len(window.ids) > 1:
                groups.setdefault(window.document, []).append(window)
    return list(groups.values())


def _measured(
    windows: Sequence[Window], baseline: Baseline, sides: Sequence[Callable[[list[int]], NDArray[np.float32]]]
) -> list[DocumentSums]:
    """Compare each side with the baseline, which runs once, on the windows of one document."""
    expected = [baseline.logits(window.ids) for window in windows]
    found = []
    for logits in sides:
        kept = iter(expected)
        compared = quality.compare(windows, lambda _, kept=kept: next(kept), lambda ids, f=logits: f(ids.tolist()))  # type: ignore[misc]
        found.append(compared.per_document[0])
    return found


def _runnable(path: Path) -> Artifact:
    opened = Artifact.open(path)
    if Subject.of(opened).report.engine.pending:
        raise EnginePending(
            f"{path}: the engine is not built yet", hint=f"on the target: llmforge build --finish {path}"
        )
    return opened
