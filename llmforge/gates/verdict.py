"""The verdicts of an artifact, recomputed from what was measured: what a record says of itself is no proof."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from llmforge.artifact import Artifact
from llmforge.base.errors import ForgedVerdict, InputError, UsageError
from llmforge.base.wording import cut
from llmforge.gates import decision, records
from llmforge.gates.decision import GateResult
from llmforge.gates.records import CheckpointRecord, Report
from llmforge.metrics import agreement, attribution, catalog, document_figures
from llmforge.metrics import workload as workloads
from llmforge.metrics.attribution import Attribution, StepBandwidth
from llmforge.metrics.latency import Latency, LatencyPoint
from llmforge.metrics.metric import Measured
from llmforge.metrics.quality import Quality
from llmforge.metrics.record import ReportRecord
from llmforge.metrics.token_records import KEPT_TOKENS
from llmforge.recipe import Gates, GateSpec

CLOSE = 1e-6  # relative; sums of 64-bit floats differ by less between processors
_SPECS = TypeAdapter(Gates)


def judge(specs: Mapping[str, GateSpec], measured: Measured, unmeasured: str | None) -> tuple[GateResult, ...]:
    """Decide the gates of a recipe; what could not be measured, for the reason `unmeasured`, is left undecided."""
    return decision.judge(
        specs,
        catalog.estimates(measured),
        unmeasured=unmeasured,
        original=decision.checkpoint(measured),
        spreads=document_figures.spreads(measured.quality, specs),
    )


def recompute(artifact: Artifact, source: str | None = None) -> tuple[GateResult, ...]:
    """Make every figure, and every verdict, again, in all records of `artifact`.

    Quality is made of the sums over each document, of the values of each token and of how long answers are the same,
    latency of the time of each token, agreement of other runtimes of each place of an answer, scores of tasks of their
    items, behaviour and retrieval of the values of each document, query and text, what a pass cost of its sums over
    documents, what a step reads of its groups of tensors, size of the manifest.
    `Artifact.verify` looks at the files. Return the gates by the record whose verdict is the artifact's. Messages call
    it `source`, else by its path.

    Raises:
        ForgedVerdict: a record says something else than its raw values, or than the manifest.
        InputError: a record is no report of this version.
    """
    found: dict[str, tuple[GateResult, ...]] = {}
    checkpoint = records.read(artifact, artifact.evidence[0]).checkpoint
    for head in artifact.evidence:
        report = records.read(artifact, head)
        wrong = [*_misnamed(artifact, report, checkpoint)]
        try:
            with np.errstate(all="ignore"):
                wrong += _figures(report)
        except (ValueError, ArithmeticError, LookupError, UsageError) as error:  # raw values that no measurement gives
            wrong.append(f"raw values: {str(error)[:80]}")
        results: tuple[GateResult, ...] = ()
        if not wrong:
            results = judge(sealed_limits(artifact), report.measured, report.engine.unmeasured)
            if sorted(map(_decision, results)) != sorted(map(_decision, report.gates)):  # a manifest sorts its keys
                wrong.append("gates")
            if (made := records.overall(results, report.passes)) is not report.verdict:
                wrong.append(f"verdict: it says {report.verdict.value}, its figures give {made.value}")
        if wrong:
            raise ForgedVerdict(
                f"{source or artifact.path}: {head.path}: does not follow from what was measured: "
                f"{'; '.join(wrong[:5])}",
                hint="do not use the artifact unless you know who changed it; build it again",
            )
        found[report.verdict.value] = results
    return found[artifact.verdict]


def sealed_limits(artifact: Artifact) -> dict[str, GateSpec]:
    """Read the limits of the recipe that an artifact was built by: they are content, and older than any measurement.

    Raises:
        InputError: they are none.
    """
    try:
        return _SPECS.validate_python(artifact.manifest.recipe.get("gates", {}))
    except ValidationError as error:
        first = error.errors()[0]
        where = cut(".".join(str(part) for part in first["loc"]))
        raise InputError(
            f"{artifact.path}: the gates of its recipe are damaged: {where}: {cut(first['msg'])}"
        ) from error


def _decision(gate: GateResult) -> tuple[str, str, float, str]:
    return gate.metric, gate.bound, gate.limit, gate.verdict.value


def _misnamed(artifact: Artifact, report: Report, checkpoint: CheckpointRecord) -> Iterator[str]:
    """Name what a report says of the content that the manifest does not, or of the checkpoint than the first report."""
    manifest = artifact.manifest
    engine = {
        path.removeprefix("engine/"): file.size_bytes
        for path, file in manifest.files.items()
        if path.startswith("engine/")
    }
    pairs: dict[str, tuple[object, object]] = {
        "name": (report.name, manifest.name),
        "checkpoint": (report.checkpoint, checkpoint.model_copy(update={"digest": manifest.checkpoint})),
        "recipe": (report.recipe, manifest.recipe),
        "engine": ({file.name: file.size_bytes for file in report.engine.files}, engine),
    }
    yield from (what for what, (said, is_so) in pairs.items() if said != is_so)
    for written, done in zip(manifest.recipe.get("passes", ()), report.passes, strict=False):
        budget, held_to = (written.get(done.name) or {}).get("budget"), done.verification.budget
        if held_to is not None and budget is not None and budget.get("kld_mean") != held_to:
            yield f"budget of pass {done.name}"


def _figures(report: Report) -> Iterator[str]:
    """Name the figures of a report that its raw values do not give."""
    if (quality := report.quality) is not None:
        if not quality.per_document:
            yield "quality: no documents"
            return
        yield from _sums(quality)
        yield from _of_quality(quality)
    for each in report.adapters:
        yield from (f"adapter {cut(each.adapter)}: {what}" for what in _of_quality(each.quality))
    if len({each.adapter for each in report.adapters}) < len(report.adapters):
        yield "adapters: one stands there twice"
    if (found := report.latency) is not None:
        yield from _timings(found)
    for run in report.runtimes:
        if not _close(run.figures, agreement.made_of(run)):
            yield f"runtime {run.runtime}"
    for task in report.tasks:
        for name, again in task.again().items():
            if not _close(task.scores[name].figures, again):
                yield f"{name} of task {task.name[:40]}"
    if (chats := report.behaviour) is not None:
        again_ = chats.again()
        yield from (f"behaviour: {name[:64]}" for name, was in chats.outcomes.items() if not _close(was, again_[name]))
    if (found_ := report.retrieval) is not None:
        made_ = found_.again()
        yield from (name[:64] for name, was in found_.metrics.items() if not _close(was, made_.get(name)))
    if (attributed := report.attribution) is not None:
        yield from (what for what, said, made in attribution.recomputed(attributed) if not _close(said, made))
        yield from attribution.miscounted(attributed)
        yield from _attributed(attributed, report)


def _of_quality(quality: Quality) -> Iterator[str]:
    """Name the figures of quality that its raw values do not give."""
    known = (metric for metric in catalog.of_quality(quality.figures) if metric.name in quality.figures)
    forms = {metric.name: metric.form for metric in known}
    made = quality.make(forms)
    yield from (name for name in forms if name not in made or not _close(quality.figures[name], made[name]))
    counted = quality.documents, quality.tokens
    if counted != (len(quality.per_document), sum(each.tokens for each in quality.per_document)):
        yield "quality: documents or tokens"


def _attributed(attributed: Attribution, report: Report) -> Iterator[str]:
    """Name what an attribution says that the passes, their weights and the timings of the report do not."""
    lossy = [each for each in report.passes if each.may_lose]
    if [step.name for step in attributed.steps[1:]] != [each.name for each in lossy]:
        yield "attribution: steps that are no lossy passes"
        return
    held = [report.passes[0].weight_bytes_before, *(each.weight_bytes_after for each in lossy)]
    for step, size_bytes in zip(attributed.steps, held, strict=True):
        if sum(group.size_bytes for group in step.weights) != size_bytes:
            yield f"attribution: weights of step {step.name[:40]}"
    if not _known_bandwidth(attributed.memory, report.latency):
        yield "attribution: bandwidth"


def _known_bandwidth(memory: StepBandwidth | None, latency: Latency | None) -> bool:
    """Say if what times are predicted from stands among the timings, as far as these can have it."""
    if memory is None:
        return True
    if memory.source == attribution.MEASURED:
        measured = None if latency is None else latency.bandwidth
        return measured is not None and (memory.bytes_per_second, memory.share) == (
            measured.working_set_bytes_per_second,
            1,
        )
    sheet = None if latency is None else latency.data_sheet
    return sheet is None or memory.bytes_per_second == sheet.bytes_per_second


def _timings(found: Latency) -> Iterator[str]:
    """Name the figures of latency that the time of each token does not give."""
    for number, point in enumerate(found.points):
        baseline = None if point.baseline is None else point.baseline.side(point.batch)
        again = catalog.point(point.prompt_tokens, point.artifact.side(point.batch), baseline, found)
        yield from (f"{what} of latency point {number}" for what in _differing(point, again))
    for workload in found.workloads:
        if not _close(workload.figures, workloads.made_of(workload.runs, found.slo)):
            yield f"workload {workload.name}"


def _sums(quality: Quality) -> Iterator[str]:
    """Name the documents whose sums are not those of their tokens, where all of these were kept."""
    sums = {each.document: each for each in quality.per_document}
    kept_once = len({document.document for document in quality.per_token}) == len(quality.per_token)
    if not kept_once or (quality.kept_tokens < quality.tokens <= KEPT_TOKENS):
        yield "quality: tokens of some documents"
    for chat in quality.per_chat:
        whole = sums.get(chat.document)
        if whole is None or not 0 < chat.tokens <= whole.tokens:
            yield f"quality: answers of {cut(chat.document)}"
    for ending in quality.per_ending:
        whole = sums.get(ending.document)
        if whole is None or not 0 < ending.tokens <= whole.tokens + 1:  # after the last token, too
            yield f"quality: ends of {cut(ending.document)}"
    for document in quality.per_token:
        of_document = sums.get(document.document)
        if of_document is None or document.tokens > of_document.tokens:
            yield f"quality: tokens of {document.document[:40]}"
        elif document.tokens == of_document.tokens:
            for name in sorted(document.figures.keys() & of_document.figures.keys()):
                kept = document.values(name)
                # Each was rounded to fp32, which is within 2⁻²⁴ of it.
                if abs(kept.sum() - of_document.figures[name]) > 2**-23 * np.abs(kept).sum() + 1e-9:
                    yield f"quality: {name} of {document.document[:40]}"


def _differing(said: LatencyPoint, made: LatencyPoint) -> Iterator[str]:
    sides: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = [(said.figures, made.figures)]
    sides += [(side.figures, made.sides[name].figures) for name, side in said.sides.items()]
    for ours, theirs in sides:
        yield from (name for name, figure in theirs.items() if name in ours and not _close(ours[name], figure))


def _close(said: Any, made: Any) -> bool:
    """Say if two figures, or records of figures, are the same but for rounding."""
    if isinstance(said, ReportRecord) and isinstance(made, ReportRecord):
        return said.model_fields_set >= made.model_fields_set and all(
            _close(getattr(said, name), getattr(made, name)) for name in type(made).model_fields
        )
    if isinstance(said, tuple) and isinstance(made, tuple):
        return len(said) == len(made) and all(map(_close, said, made))
    if isinstance(said, int | float) and isinstance(made, int | float):
        return (math.isnan(said) and math.isnan(made)) or math.isclose(said, made, rel_tol=CLOSE, abs_tol=1e-12)
    return type(said) is type(made) and bool(said == made)
