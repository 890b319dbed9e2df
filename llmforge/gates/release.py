"""The verdict on a release: gates over the evidence of an artifact, alone and against an earlier one.

Nothing is measured here. Figures that two artifacts have of the same documents are compared document by document.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict, Field

from llmforge.artifact import Artifact
from llmforge.artifact import EvidenceRecord as Head
from llmforge.base.errors import UsageError
from llmforge.gates import decision as gates
from llmforge.gates import records
from llmforge.gates import verdict as verdicts
from llmforge.gates.decision import ALPHA, RELATIVE, Earlier, Figure, GateResult, Verdict
from llmforge.gates.records import Report
from llmforge.metrics import catalog, document_figures, tasks
from llmforge.metrics.artifact_metrics import BehaviourMetric, RetrievalMetric, RuntimeMetric, SizeMetric, TaskMetric
from llmforge.metrics.behaviour import results as behaviour
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency_metrics import SlowestMetric
from llmforge.metrics.metric import Measured
from llmforge.metrics.quality import DocumentSums, OfSums, Quantile
from llmforge.metrics.quality_metrics import QualityMetric
from llmforge.metrics.record import ReportRecord
from llmforge.metrics.retrieval import results as retrieval
from llmforge.recipe import GateSpec, misdirected

NOT_IN_TURNS = "durations of two runs are not comparable: both must run in turns on one device"
OF_TWO_RUNS = "figures of two runs are not comparable: limit the figure itself"
OTHER_CHECKPOINT = "it was built from another checkpoint, and so held against another"
NO_PAIRS = "no document was measured of both in the same windows, beside the same baseline"
Pairs = tuple[list[DocumentSums], list[DocumentSums]]  # ours and theirs, of the same documents


class ArtifactReference(ReportRecord):
    """An artifact, and the record of its evidence that was read."""

    name: str
    version: str
    content: str
    evidence: str  # SHA-256 of the record
    created: str  # when it was measured
    documents: int  # that its quality was measured on

    @property
    def reference(self) -> str:
        """NAME/VERSION."""
        return f"{self.name}/{self.version}"


class Look(ReportRecord):
    """One look at growing evidence, and what it may spend of the error."""

    documents: int
    alpha: float
    verdict: Verdict


class Judgement(ReportRecord):
    """What `llmforge gate` found."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    artifact: ArtifactReference
    against: ArtifactReference | None
    verdict: Verdict
    pending: bool  # the engine is not built yet
    post_hoc: bool  # a limit is another than was sealed before measuring
    alpha: float
    paired_documents: int | None  # measured of both; None: there is no earlier artifact
    gates: tuple[GateResult, ...]
    looks: tuple[Look, ...] = ()
    notes: tuple[str, ...] = ()
    exceeded: tuple[str, ...] = ()  # budgets of its passes, a line each: it fails whatever the gates say
    retreated: str | None = None  # how many layers its build gave more bits, for a pass exceeded its budget


class Reported:
    """What was measured of an artifact, which may not be published yet."""

    def __init__(self, report: Report) -> None:
        self.report = report

    @property
    def measured(self) -> Measured:
        """All that a gate can decide on."""
        return self.report.measured


class MeasuredArtifact(Reported):
    """An artifact and what was measured of it, as its newest record with a measurement says."""

    def __init__(self, opened: Artifact, report: Report, head: Head) -> None:
        super().__init__(report)
        self.opened = opened
        self.head = head

    @classmethod
    def of(cls, opened: Artifact) -> MeasuredArtifact:
        """Read the newest record that measured something, or the newest where none did.

        Raises:
            InputError: a record is damaged.
        """
        for head in reversed(opened.evidence):
            report = records.read(opened, head)
            parts = (report.quality, report.latency, report.tasks, report.adapters, report.behaviour, report.retrieval)
            if any(parts):
                return cls(opened, report, head)
        head = opened.evidence[-1]
        return cls(opened, records.read(opened, head), head)

    @classmethod
    def checked(cls, opened: Artifact) -> MeasuredArtifact:
        """Read what decides a release, once every verdict in it was computed again from its evidence.

        Raises:
            InputError: a record is damaged, or says another verdict than its evidence.
        """
        verdicts.recompute(opened)
        return cls.of(opened)

    @property
    def side(self) -> ArtifactReference:
        """Name it."""
        quality = self.report.quality
        return ArtifactReference(
            name=self.report.name,
            version=self.report.version,
            content=self.report.content,
            evidence=self.head.digest,
            created=self.report.created,
            documents=0 if quality is None else len(quality.per_document),
        )

    @property
    def sealed_limits(self) -> dict[str, GateSpec]:
        """The limits of the recipe that it was built by: they are content, and older than any measurement."""
        return verdicts.sealed_limits(self.opened)


def check(specs: Mapping[str, GateSpec], source: str, *, hint: str) -> None:
    """Refuse limits of metrics that no gate decides on, those that would limit an improvement, and none at all.

    Raises:
        UsageError: one of them is such; where there are none, with this `hint`.
    """
    for metric, gate in specs.items():
        if catalog.find(metric) is None:
            known = ", ".join(catalog.limitable())
            raise UsageError(
                f"{source}: no gate decides on {metric!r}; known: {known}, task.NAME.SCORE, adapter.NAME.METRIC"
            )
        if (wrong := misdirected(metric, gate)) is not None:
            raise UsageError(f"{source}: {metric}: {wrong[0]}", hint=wrong[1])
    if not specs:
        raise UsageError(f"{source} has no gates: nothing to decide", hint=hint)


def is_relative(specs: Mapping[str, GateSpec]) -> bool:
    """Say if a limit needs an earlier artifact; those of tasks and behaviour have the checkpoint."""
    return any(
        bound in gate.limits
        for metric, gate in specs.items()
        for bound in RELATIVE
        if not catalog.named(metric).beside_checkpoint
    )


@dataclass(frozen=True)
class ReleaseQuestion:
    """What is to be decided of a release: `specs` on what was measured of it, and on how far that is from `against`.

    `in_turns` are differences of durations, measured in one run, or why there are none.
    """

    release: MeasuredArtifact
    specs: Mapping[str, GateSpec]
    against: MeasuredArtifact | None = None
    in_turns: Mapping[str, Figure | str] = field(default_factory=dict)
    notes: Sequence[str] = ()


def judge(asked: ReleaseQuestion, *, documents: Pairs | None = None, alpha: float = ALPHA) -> Judgement:
    """Decide a question.

    `documents` of both sides replace the recorded ones; then figures of documents are decided at any `alpha`.
    """
    release, specs, against = asked.release, asked.specs, asked.against
    studentized = None
    if documents is not None:
        known = set() if release.measured.quality is None else release.measured.quality.figures.keys()
        forms = {name: form for name, form in growing(specs).items() if name in known}
        studentized = {name: document_figures.figure(form, documents[0]) for name, form in forms.items()}
    earlier, paired = None, None
    if against is not None:
        left, right = documents or pairs(release, against)
        earlier, paired = compare(release, against, left, right, [*specs], asked.in_turns), len(left)
    measured = catalog.estimates(release.measured)
    results = gates.judge(
        specs,
        measured,
        unmeasured=release.report.engine.unmeasured,
        original=gates.checkpoint(release.measured),
        earlier=earlier,
        studentized=studentized,
        spreads=document_figures.spreads(release.measured.quality, specs),
        alpha=alpha,
    )
    sealed = release.sealed_limits
    results = tuple(
        result.model_copy(update={"post_hoc": _sealed(sealed, result) != result.limit}) for result in results
    )
    return Judgement(
        artifact=release.side,
        against=None if against is None else against.side,
        verdict=records.overall(results, release.report.passes),
        pending=release.report.engine.pending,
        post_hoc=any(result.post_hoc for result in results),
        alpha=alpha,
        paired_documents=paired,
        gates=results,
        notes=tuple(asked.notes),
        exceeded=release.report.excesses,
        retreated=records.retreated(release.report.passes),
    )


def pairs(release: Reported, against: Reported) -> Pairs:
    """Find the documents that were measured of both."""
    ours, theirs = release.report.quality, against.report.quality
    if ours is None or theirs is None:
        return [], []
    return document_figures.paired(ours.per_document, theirs.per_document)


def compare(
    release: Reported,
    against: MeasuredArtifact,
    left: Sequence[DocumentSums],
    right: Sequence[DocumentSums],
    metrics: Sequence[str],
    in_turns: Mapping[str, Figure | str],
) -> Earlier:
    """Take differences of `metrics`, ours less theirs; `left` and `right` are of the same documents."""
    here, there = catalog.estimates(release.measured), catalog.estimates(against.measured)
    qualities = release.report.quality, against.report.quality
    found: dict[str, Figure | str] = {}
    quantiles: dict[str, Quantile] = {}
    for name in metrics:
        metric = catalog.named(name)
        if name not in here:
            continue  # missing: it fails, or `unmeasured` says why not
        if name not in there:
            found[name] = f"{name} was not measured of it"
        elif isinstance(metric, TaskMetric):
            found[name] = tasks.between(release.report.tasks, against.report.tasks, name)
        elif isinstance(metric, BehaviourMetric):
            found[name] = behaviour.between(release.report.behaviour, against.report.behaviour, name)
        elif isinstance(metric, RetrievalMetric):
            found[name] = retrieval.between(release.report.retrieval, against.report.retrieval, name)
        elif isinstance(metric, SizeMetric):
            found[name] = Estimate.exact(here[name].value - there[name].value)
        elif isinstance(metric, RuntimeMetric):
            found[name] = here[name].less(there[name])
        elif not isinstance(metric, QualityMetric):
            found[name] = in_turns.get(name, NOT_IN_TURNS if isinstance(metric, SlowestMetric) else OF_TWO_RUNS)
        elif release.report.checkpoint.digest != against.report.checkpoint.digest:
            found[name] = OTHER_CHECKPOINT
        elif isinstance(metric.form, OfSums):
            source = metric.form.source
            both = (left, right) if source == "text" else document_figures.of_source(source, *qualities, left)
            found[name] = _paired(metric.form, here[name], there[name], *both)
        elif isinstance(metric.form, Quantile):
            quantiles[name] = metric.form
        elif not left:
            found[name] = NO_PAIRS
        else:
            found[name] = here[name].less(there[name])
    if quantiles:
        moved = document_figures.quantile_differences(quantiles, *qualities, {each.document for each in left})
        found |= {name: moved.get(name, NO_PAIRS) for name in quantiles}
    values = {name: figure.value for name, figure in there.items()}
    return Earlier(against.side.reference, found, values)


def _paired(
    form: OfSums, ours: Estimate, theirs: Estimate, left: Sequence[DocumentSums], right: Sequence[DocumentSums]
) -> Figure | str:
    """Bound the difference of a figure of documents that were measured of both."""
    if not left:
        return NO_PAIRS
    if not math.isfinite(ours.value) or not math.isfinite(theirs.value):
        return Estimate(value=math.nan, low=None, high=None, samples=len(left))
    return document_figures.difference(form, left, right)


def growing(specs: Mapping[str, GateSpec]) -> dict[str, OfSums]:
    """Give those of the metrics of `specs` that further documents of text tell more of."""
    pairs: list[tuple[str, Any]] = [(name, getattr(catalog.named(name), "form", None)) for name in specs]
    return {name: form for name, form in pairs if isinstance(form, OfSums) and form.source == "text"}


def _sealed(sealed: Mapping[str, GateSpec], result: GateResult) -> float | None:
    gate = sealed.get(result.metric)
    return None if gate is None else gate.limits.get(result.bound)
