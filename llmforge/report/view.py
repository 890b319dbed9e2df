"""What a person looks for first in a report, the same in every form: how the gates ended, size, quality, speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llmforge.evaluation.gates import Verdict
from llmforge.lowering.pass_base import Rewritten, Skipped
from llmforge.metrics import catalog, units
from llmforge.metrics.catalog import Metric, PointMetric, QualityMetric, TimingMetric
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import Latency, Spread
from llmforge.metrics.quality import ByPosition, OfSums, Quality
from llmforge.report.model import BuildRecord, Report


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
    unknown = "the engine was not run" if report.engine.unmeasured else "not enough data"
    what = "failed" if report.verdict is Verdict.FAIL else f"inconclusive: {unknown}"
    return f"{verdicts.count(report.verdict)} of {len(verdicts)} gates {what}"


def key_figures(report: Report) -> list[KeyFigure]:
    """Pick the figures at the top; what was not measured is not there."""
    notes = [f"{units.percent(report.engine.size_bytes / report.checkpoint.size_bytes)} of the checkpoint"]
    if report.passes:  # stored bits for each parameter of the checkpoint, scales and copies included
        bits = 8 * report.passes[-1].weight_bytes_after / report.checkpoint.parameters
        notes.append(f"{bits:.2f} bits per weight")
    title = "To build" if report.engine.pending else catalog.SIZE.title
    size = KeyFigure(title, catalog.SIZE.unit.write(report.engine.size_bytes), tuple(notes))
    return [size, *(figure for _, figure in sorted(_key_metrics(report), key=lambda placed: placed[0]))]


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
class Table:
    """A table of figures, as written; a row begins with what its figures are of."""

    head: tuple[str, ...]  # titles of the figures
    rows: list[tuple[str, ...]]


def quality_rows(quality: Quality) -> list[tuple[str, str, str]]:
    """Write every figure of quality that is a number: title, value and interval."""
    rows = []
    for metric in catalog.of_kind(QualityMetric):
        figure, write = quality.figures.get(metric.name), metric.unit.write
        if isinstance(figure, Estimate | float):
            bounds = units.interval(figure, write) if isinstance(figure, Estimate) else ""
            rows.append((metric.title, write(value(figure)), bounds))
    return rows


def summary_rows(quality: Quality) -> list[tuple[str, str]]:
    """Write what the summary says of quality beyond the key figures: a title, and its figures in one line."""
    rows: dict[str, list[str]] = {}
    for metric in catalog.of_kind(QualityMetric):
        if metric.row is not None and metric.name in quality.figures:
            title, label = metric.row
            rows.setdefault(title, []).append(f"{label} {_brief(metric, quality.figures[metric.name])}".strip())
    return [(title, "; ".join(parts)) for title, parts in rows.items()]


def _brief(metric: QualityMetric, figure: Any) -> str:
    """Write a figure, or how a curve begins, where it is highest, and how it ends."""
    write = metric.unit.write
    if not isinstance(metric.form, ByPosition):
        return write(value(figure))
    places = sorted({0, max(range(len(figure)), key=lambda i: figure[i].figure.value), len(figure) - 1})
    return ", ".join(f"{write(figure[i].figure.value)} at {figure[i].first}–{figure[i].last} tokens" for i in places)


def curve_rows(quality: Quality) -> list[tuple[str, str]]:
    """Write every curve: its title, and the figure of each stretch."""
    rows = []
    for metric in catalog.of_kind(QualityMetric):
        if isinstance(metric.form, ByPosition) and metric.name in quality.figures:
            parts = (f"{s.first}–{s.last} {metric.unit.write(s.figure.value)}" for s in quality.figures[metric.name])
            rows.append((f"{metric.title} ({metric.meaning})", ", ".join(parts)))
    return rows


def kept(quality: Quality) -> str:
    """Say of how many tokens quantiles and curves are made, where that is not all."""
    if quality.kept_tokens in (0, quality.tokens):
        return ""
    return (
        f"Quantiles, distributions and curves by position: from {units.count(quality.kept_tokens)} of the "
        f"{units.count(quality.tokens)} tokens, spread over all documents."
    )


def scored(quality: Quality) -> str:
    """Say which tokens count, where not all do."""
    if quality.scored == "all":
        return ""
    return "Only the second half of each window is scored, as llama.cpp does, and only full windows."


def moved_most(quality: Quality, count: int = 5) -> Table:
    """Write what moved the most of documents, in that order: their tokens, how far they moved, and other figures."""
    metrics = [metric for metric in catalog.of_kind(QualityMetric) if metric.decides and metric.name in quality.figures]
    of_text = [metric for metric in metrics if metric.source == "text"]
    shown = [(metric, metric.form) for metric in of_text if isinstance(metric.form, OfSums)]
    shown.sort(key=lambda pair: pair[0] is not catalog.MOVED)
    most = sorted(quality.per_document, key=lambda sums: -shown[0][1].of(sums))[:count]
    rows = [
        (sums.document, units.count(sums.tokens), *(metric.unit.write(form.of(sums)) for metric, form in shown))
        for sums in most
    ]
    return Table(tuple(metric.title for metric, _ in shown), rows)


def latency_table(latency: Latency, *, spreads: bool) -> Table:
    """Write every figure of each side at each prompt length; those of `spreads`, which have a chart, if wanted."""
    timed = [metric for metric in catalog.of_kind(TimingMetric) if spreads or not metric.spread]
    points = catalog.of_kind(PointMetric)
    head = [title for m in timed for title in ((f"{m.title} p50", "p95") if m.spread else (m.title,))]
    rows = []
    for point in latency.points:
        for side, timing in point.sides.items():
            cells = [cell for metric in timed for cell in _cells(metric, timing.figures[metric.name])]
            for metric in points:
                cells += _cells(metric, point.figures[metric.name]) if side == "artifact" else [""]
            rows.append((str(point.prompt_tokens), side, *cells))
    return Table((*head, *(metric.title for metric in points)), rows)


def _cells(metric: Metric, figure: Spread | Estimate | float | None) -> list[str]:
    """Write a figure; of a spread median and p95."""
    if figure is None:
        return ["–"]
    figures = (figure.p50.value, figure.p95) if isinstance(figure, Spread) else (value(figure),)
    return [metric.unit.write(each) for each in figures]


def stage_memory(build: BuildRecord) -> bool:
    """Say if the peak memory of stages was measured."""
    return any(stage.peak_rss_bytes is not None for stage in build.stages)


def reused(build: BuildRecord) -> str:
    """Say what a build took from the cache; "" where it computed everything."""
    found = build.reused
    titles = {"trace": "trace", "trace-proof": "proof of the trace", "baseline": "logits of the baseline"}
    parts = [titles[stage] for stage in found.stages]
    if found.layers:
        word = "layer" if len(found.layers) == 1 else "layers"
        parts.append(f"calibration of {word} {units.ranges(found.layers)}")
    if found.passes:
        parts.append(f"{'pass' if len(found.passes) == 1 else 'passes'} {', '.join(found.passes)}")
    return "; ".join(parts)


def grouped(places: Sequence[Rewritten] | Sequence[Skipped]) -> dict[str, list[str]]:
    """List the nodes of what a pass did, or why it did not, at several of them; in the order of the first of each."""
    groups: dict[str, list[str]] = {}
    for place in places:
        groups.setdefault(place.what if isinstance(place, Rewritten) else place.reason, []).append(place.node)
    return groups
