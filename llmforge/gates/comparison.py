"""Two artifacts held against each other, and all versions of a name one after another: what moved, and which way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from llmforge.artifact import Artifact, versions
from llmforge.base import wording
from llmforge.base.errors import InputError
from llmforge.gates import confirmed, release
from llmforge.gates.decision import ALPHA, Figure
from llmforge.gates.records import Report
from llmforge.gates.release import ArtifactReference, MeasuredArtifact, Reported
from llmforge.metrics import catalog
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.record import ReportRecord
from llmforge.metrics.studentized import Studentized


class Change(ReportRecord):
    """A metric of two artifacts."""

    metric: str
    a: Estimate | None  # None: not measured
    b: Estimate | None
    difference: Estimate | None  # b - a, paired where the metric is of documents; None: it cannot be told
    why_not: str | None = None  # it cannot
    worse: bool = False  # it is a regression: the whole interval is on the worse side of 0

    @property
    def measured(self) -> bool:
        """Whether it was measured of any of both."""
        return self.a is not None or self.b is not None

    @property
    def better(self) -> bool:
        """Whether it is an improvement: the whole interval is on the better side of 0."""
        found = self.difference
        if found is None or found.low is None or found.high is None:
            return False
        better = _better(self.metric, self.a, self.b)
        return (better == "lower" and found.high < 0) or (better == "higher" and found.low > 0)


class ArtifactComparison(ReportRecord):
    """What differs between two artifacts."""

    a: ArtifactReference
    b: ArtifactReference
    verdicts: tuple[str, str]
    checkpoints: tuple[str, str]  # name and digest
    recipe: dict[str, tuple[Any, Any]]  # by key, what A and B have
    size_bytes: tuple[int, int]  # of all files of the engine
    paired_documents: int
    metrics: tuple[Change, ...]
    notes: tuple[str, ...] = ()  # what to know before figures are compared
    retreats: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # layers that each build gave more bits, and why


class HistoryEntry(ReportRecord):
    """A version in the history of a name."""

    side: ArtifactReference
    verdict: str
    metrics: tuple[Change, ...]  # `a` is the version before; `b` this one


@dataclass(frozen=True)
class Previous:
    """The version before one that is not published yet, and how far each metric moved since."""

    report: Report
    changes: tuple[Change, ...]  # `a` is the version before

    @property
    def reference(self) -> str:
        """NAME/VERSION."""
        return f"{self.report.name}/{self.report.version}"

    def change(self, metric: str) -> Change | None:
        """Find the change of a metric; None: it was measured of neither."""
        return next((each for each in self.changes if each.metric == metric), None)


def previous(out: Path, report: Report, *, made: datetime | None = None) -> Previous | str | None:
    """Hold `report` against the newest other version of its name in `out`; with `made`, the newest built before that.

    Return why it cannot be read where that is so; None: there is no other version.
    """
    if report.name not in versions.names(out):
        return None
    others = [
        each
        for each in versions.listed(out, report.name)
        if each.path.name != report.version
        and (made is None or each.artifact is None or each.artifact.evidence[0].created <= made)
    ]
    if not others:
        return None
    newest = others[0]  # damaged ones are last
    if newest.artifact is None:
        return f"the version before, {newest.reference}, cannot be read: {newest.damage}"
    try:
        confirmed.confirm(newest.artifact)
        before = MeasuredArtifact.of(newest.artifact)
    except InputError as error:
        return f"the version before, {newest.reference}, cannot be used: {error.message}"
    moved = changes(before, Reported(report), tuple(catalog.deciding()))
    return Previous(before.report, tuple(each for each in moved if each.a is not None or each.b is not None))


def compare(a: Artifact, b: Artifact) -> ArtifactComparison:
    """Compare what is recorded of two artifacts; differences are of B less A."""
    before, after = MeasuredArtifact.of(a), MeasuredArtifact.of(b)
    left, _ = release.pairs(after, before)
    return ArtifactComparison(
        a=before.side,
        b=after.side,
        verdicts=(a.verdict, b.verdict),
        checkpoints=(_checkpoint(before), _checkpoint(after)),
        recipe=dict(_differing(a.manifest.recipe, b.manifest.recipe)),
        size_bytes=(before.report.engine.size_bytes, after.report.engine.size_bytes),
        paired_documents=len(left),
        metrics=changes(before, after, catalog.names(before.measured, after.measured)),
        notes=tuple(_notes(before, after)),
        retreats=(_retreats(before.report), _retreats(after.report)),
    )


def changes(before: MeasuredArtifact | None, after: Reported, metrics: Sequence[str]) -> tuple[Change, ...]:
    """Take the difference of each of `metrics` from `before` to `after`."""
    there = {} if before is None else catalog.estimates(before.measured)
    here = catalog.estimates(after.measured)
    differences: Mapping[str, Figure | str] = {}
    if before is not None:
        differences = release.compare(after, before, *release.pairs(after, before), metrics, {}).differences
    return tuple(_change(name, there.get(name), here.get(name), differences.get(name)) for name in metrics)


def _notes(a: MeasuredArtifact, b: MeasuredArtifact) -> Iterator[str]:
    """Say what of two artifacts, or of how they were measured, is in the way of a comparison."""
    for letter, side in (("A", a), ("B", b)):
        report = side.report
        if report.engine.pending:
            yield f"the engine of {letter} is not built yet: its size is that of the files that it is built from"
        quality = "quality" if report.retrieval is None else "retrieval"  # what embeds or scores has no other
        if not report.engine.pending and (
            lacking := [name for name in (quality, "latency") if getattr(report, name) is None]
        ):
            yield f"{' and '.join(lacking)} of {letter} {'were' if len(lacking) > 1 else 'was'} not measured"
    if len({_tokenizer(side) for side in (a, b)}) > 1:
        yield "the tokenizers differ: a token of one is not a token of the other, and no figure per token is comparable"
    here, there = a.report.machine.cpu, b.report.machine.cpu
    if a.report.latency is not None and b.report.latency is not None and here != there:
        yield f"latency was measured on different machines: {wording.plain(here, 100)}; {wording.plain(there, 100)}"


def _retreats(report: Report) -> tuple[str, ...]:
    return tuple(line for done in report.passes for line in done.retreat_lines)


def _tokenizer(side: MeasuredArtifact) -> tuple[tuple[str, str], ...]:
    """Give what the tokenizer of an artifact is made of."""
    files = side.opened.manifest.files
    return tuple(sorted((path, file.sha256) for path, file in files.items() if path.startswith("tokenizer/")))


def history(versions: Sequence[Artifact], metrics: Sequence[str]) -> list[HistoryEntry]:
    """Follow `metrics` over versions, the oldest first; each is held against the one before."""
    subjects = [MeasuredArtifact.of(version) for version in versions]
    return [
        HistoryEntry(side=after.side, verdict=after.opened.verdict, metrics=changes(before, after, metrics))
        for before, after in zip([None, *subjects], subjects, strict=False)
    ]


def _checkpoint(subject: MeasuredArtifact) -> str:
    checkpoint = subject.report.checkpoint
    return f"{wording.plain(checkpoint.name, 100)} {checkpoint.digest[:12]}"


def _change(name: str, a: Estimate | None, b: Estimate | None, difference: Figure | str | None) -> Change:
    if difference is None or isinstance(difference, str):
        alone = "measured of one alone" if (a is None) != (b is None) else difference
        return Change(metric=name, a=a, b=b, difference=None, why_not=alone)
    if isinstance(difference, Studentized):
        difference = difference.estimate(ALPHA)
    better, low, high = _better(name, a, b), difference.low, difference.high
    worse = (better == "lower" and low is not None and low > 0) or (
        better == "higher" and high is not None and high < 0
    )
    return Change(metric=name, a=a, b=b, difference=difference, worse=worse)


def _better(name: str, a: Estimate | None, b: Estimate | None) -> Literal["lower", "higher", "neither"]:
    """Say which way is better from A to B: towards a metric's ideal where both lie on one side of it, or at it."""
    metric = catalog.named(name)
    if metric.ideal is None:
        return metric.better
    sides = [math.nan if each is None else each.value - metric.ideal for each in (a, b)]
    if all(side >= 0 for side in sides):
        return "lower"
    return "higher" if all(side <= 0 for side in sides) else "neither"


def _differing(a: Any, b: Any, place: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Walk down two recipes to what differs."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            yield from _differing(a.get(key), b.get(key), f"{place}.{key}" if place else str(key))
    elif (named := _by_name(a)) is not None and (other := _by_name(b)) is not None and _in_order(named, other):
        yield from _differing(named, other, place)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for number, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from _differing(left, right, f"{place}.{number}")
    elif a != b:
        yield place, (a, b)


def _by_name(entries: Any) -> dict[str, Any] | None:
    """Name the entries of a list of passes, each a mapping of its name to its options; None: it is none."""
    if not isinstance(entries, list) or not all(isinstance(each, Mapping) and len(each) == 1 for each in entries):
        return None
    found: dict[str, Any] = {}
    for each in entries:
        ((name, options),) = each.items()
        number = sum(key.split(" ")[0] == name for key in found)
        found[name if not number else f"{name} ({number + 1})"] = options
    return found


def _in_order(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether what both have stands in the same order."""
    return [name for name in a if name in b] == [name for name in b if name in a]
