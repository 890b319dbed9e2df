"""What a person looks for first in a report, the same in every form: how the gates ended, size, quality, speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmforge.evaluation.gates import Verdict
from llmforge.lowering.pass_base import Rewritten, Skipped
from llmforge.metrics import catalog, units
from llmforge.metrics.catalog import PointMetric, QualityMetric, TimingMetric
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import Latency, Point, Spread, Timing
from llmforge.metrics.quality import DocumentSums, OfSums, Quality
from llmforge.report.model import Report


@dataclass(frozen=True)
class KeyFigure:
    """One of the figures at the top."""

    title: str
    value: str
    notes: tuple[str, ...]


def headline(report: Report) -> str:
    """Say how the gates ended, in a few words."""
    verdicts = [result.verdict for result in report.gates]
    if report.verdict is Verdict.NONE:
        return "Built; the recipe has no gates"
    if report.verdict is Verdict.PASS:
        return "The gate passed" if len(verdicts) == 1 else f"All {len(verdicts)} gates passed"
    unknown = "the engine was not run" if report.engine.unmeasured else "its data cannot tell"
    what = "failed" if report.verdict is Verdict.FAIL else f"undecided: {unknown}"
    return f"{verdicts.count(report.verdict)} of {len(verdicts)} gates {what}"


def key_figures(report: Report) -> list[KeyFigure]:
    """Pick the figures at the top; what was not measured is not there."""
    share = units.percent(report.engine.size_bytes / report.checkpoint.size_bytes)
    bits = weight_bits(report)
    notes = (f"{share} of the checkpoint", *(() if bits is None else (f"{bits:.2f} bits a weight",)))
    title = "To build" if report.engine.pending else catalog.SIZE.title
    size = KeyFigure(title, catalog.SIZE.unit.write(report.engine.size_bytes), notes)
    return [size, *(figure for _, figure in sorted(_key_metrics(report), key=lambda placed: placed[0]))]


def unmeasured(report: Report) -> str:
    """Say why there are no figures."""
    return report.engine.unmeasured or "the recipe asks for none"


def weight_bits(report: Report) -> float | None:
    """Count the stored bits for each parameter of the checkpoint, scales and copies included; None without passes."""
    if not report.passes:
        return None
    return 8 * report.passes[-1].weight_bytes_after / report.checkpoint.parameters


def value(figure: Estimate | float) -> float:
    """Take a figure without its bounds."""
    return figure.value if isinstance(figure, Estimate) else figure


def _key_metrics(report: Report) -> Iterator[tuple[int, KeyFigure]]:
    """Find the key figures that are metrics, each with its place."""
    if (quality := report.quality) is not None:
        for metric in catalog.of_kind(QualityMetric):
            if metric.key is not None and metric.name in quality.figures:
                estimate, write = quality.figures[metric.name], metric.unit.write
                note = metric.unit.name if metric.note is None else metric.note(quality)
                notes = (note, units.interval(estimate, write))
                yield metric.key, KeyFigure(metric.title, write(estimate.value), notes)
    if report.latency is not None:
        points = sorted(report.latency.points, key=lambda point: point.prompt_tokens)
        for timed in catalog.of_kind(TimingMetric):
            point = points[0 if timed.key_at == "shortest" else -1]
            if timed.key is not None and timed.name in point.artifact.figures:
                spread: Spread = point.artifact.figures[timed.name]
                yield timed.key, KeyFigure(timed.title, timed.unit.write(spread.p50.value), timed.notes(point))


@dataclass(frozen=True)
class QualityRow:
    """One figure of the quality table."""

    title: str
    value: str
    interval: str


def quality_rows(quality: Quality) -> list[QualityRow]:
    """Write every figure of quality that is a number."""
    rows = []
    for metric in catalog.of_kind(QualityMetric):
        figure = quality.figures.get(metric.name)
        if isinstance(figure, Estimate | float):
            write = metric.unit.write
            bounds = units.interval(figure, write) if isinstance(figure, Estimate) else ""
            rows.append(QualityRow(metric.title, write(value(figure)), bounds))
    return rows


@dataclass(frozen=True)
class DocumentRow:
    """One document, with its figure of each of `document_metrics`."""

    document: str
    tokens: int
    moved: str  # what documents are ordered by
    cells: tuple[str, ...]


def document_metrics() -> dict[QualityMetric, OfSums]:
    """List the metrics that are shown of single documents: those that have an interval over documents."""
    metrics = catalog.of_kind(QualityMetric)
    return {metric: metric.form for metric in metrics if isinstance(metric.form, OfSums) and metric.decides}


def moved_most(quality: Quality, count: int = 5) -> list[DocumentRow]:
    """Find the documents that moved the most, in that order."""
    shown, moved = document_metrics(), catalog.MOVED

    def row(sums: DocumentSums) -> DocumentRow:
        cells = (metric.unit.write(form.of(sums)) for metric, form in shown.items())
        return DocumentRow(sums.document, sums.tokens, moved.unit.write(shown[moved].of(sums)), tuple(cells))

    ordered = sorted(quality.per_document, key=lambda sums: -shown[moved].of(sums))
    return [row(sums) for sums in ordered[:count]]


@dataclass(frozen=True)
class LatencyRow:
    """One side at one prompt length."""

    prompt_tokens: int
    side: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class LatencyTable:
    """Figures of both sides at each prompt length."""

    head: tuple[str, ...]
    rows: tuple[LatencyRow, ...]


def latency_table(latency: Latency, *, spreads: bool) -> LatencyTable:
    """Write every figure of latency; those of `spreads`, which have a chart, where that is wanted."""
    sample = latency.points[0].artifact.figures
    timed = [
        metric
        for metric in catalog.of_kind(TimingMetric)
        if metric.name in sample and (spreads or not isinstance(sample[metric.name], Spread))
    ]
    of_points = catalog.of_kind(PointMetric)
    head: list[str] = []
    for metric in timed:
        head += [f"{metric.title} p50", "p95"] if isinstance(sample[metric.name], Spread) else [metric.title]
    rows = []
    for point in latency.points:
        for side, timing in point.sides.items():
            cells = [cell for metric in timed for cell in _timing_cells(metric, timing)]
            cells += [_point_cell(metric, point) if side == "artifact" else "" for metric in of_points]
            rows.append(LatencyRow(point.prompt_tokens, side, tuple(cells)))
    return LatencyTable((*head, *(metric.title for metric in of_points)), tuple(rows))


def _timing_cells(metric: TimingMetric, timing: Timing) -> list[str]:
    figure: Spread | float = timing.figures[metric.name]
    figures = (figure.p50.value, figure.p95) if isinstance(figure, Spread) else (figure,)
    return [metric.unit.write(each) for each in figures]


def _point_cell(metric: PointMetric, point: Point) -> str:
    figure: Estimate | float | None = point.figures.get(metric.name)
    return "–" if figure is None else metric.unit.write(value(figure))


@dataclass(frozen=True)
class Places:
    """Nodes of which a pass says the same."""

    what: str
    nodes: tuple[str, ...]


def grouped(places: Sequence[Rewritten] | Sequence[Skipped]) -> list[Places]:
    """Put together what a pass did, or why it did not, at several nodes; in the order of the first of each."""
    groups: dict[str, list[str]] = {}
    for place in places:
        groups.setdefault(place.what if isinstance(place, Rewritten) else place.reason, []).append(place.node)
    return [Places(what, tuple(nodes)) for what, nodes in groups.items()]
