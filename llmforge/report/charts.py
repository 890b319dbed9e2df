"""Geometry of the report's charts. Lengths are percentages of the drawing's width, so that it fits any window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from llmforge.evaluation.gates import GateResult
from llmforge.metrics import catalog
from llmforge.metrics.catalog import QualityMetric, TimingMetric
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import Latency, Spread
from llmforge.metrics.quality import Histogram as LogHistogram
from llmforge.metrics.quality import Quality
from llmforge.report import view
from llmforge.report.attribution import AttributedStep, Attribution
from llmforge.report.model import BuildRecord, PassRecord, StageRecord

_MARGIN = 0.2  # of a gate's span, left free on both sides


@dataclass(frozen=True)
class GatePlot:
    """A figure and its interval against a limit, on one axis; all in percent of the width."""

    limit: float
    forbidden: tuple[float, float]  # start and width of the side on which the gate fails
    value: float
    low: float
    high: float
    label_at: str  # "start", "middle", "end": where the limit's label fits


@dataclass(frozen=True)
class Column:
    """One column of a histogram: left edge and width in percent, height as a share of the tallest."""

    left: float
    width: float
    height: float
    title: str


@dataclass(frozen=True)
class Mark:
    """A labelled place on an axis, in percent."""

    at: float
    label: str


@dataclass(frozen=True)
class Histogram:
    """Tokens by the decade of a value."""

    title: str
    description: str
    columns: tuple[Column, ...]
    ticks: tuple[Mark, ...]
    marks: tuple[Mark, ...]


def gate(result: GateResult) -> GatePlot | None:
    """Lay out one gate; None where nothing was measured."""
    measured = result.measured
    if measured is None or not math.isfinite(measured.value):
        return None
    low = measured.value if measured.low is None else measured.low
    high = measured.value if measured.high is None else measured.high
    first, last = min(low, result.limit), max(high, result.limit)
    span = (last - first) or abs(last) or 1.0
    start, width = first - _MARGIN * span, span * (1 + 2 * _MARGIN)

    def at(value: float) -> float:
        return 100 * (value - start) / width

    limit = at(result.limit)
    return GatePlot(
        limit=limit,
        forbidden=(limit, 100 - limit) if result.bound == "max" else (0.0, limit),
        value=at(measured.value),
        low=at(low),
        high=at(high),
        label_at="start" if limit < 25 else "end" if limit > 75 else "middle",
    )


def histograms(quality: Quality) -> list[Histogram]:
    """Lay out every distribution of the catalog."""
    found = [metric for metric in catalog.of_kind(QualityMetric) if metric.name in quality.figures]
    return [_histogram(metric, metric.form, quality) for metric in found if isinstance(metric.form, LogHistogram)]


def _histogram(metric: QualityMetric, form: LogHistogram, quality: Quality) -> Histogram:
    """Lay out how a value is distributed over tokens, with the figures that are marked on it."""
    counts: tuple[int, ...] = quality.figures[metric.name]
    bins_per_decade, (first, last) = form.bins_per_decade, form.decades
    filled = [i for i, tokens in enumerate(counts) if tokens]
    low = first + min(filled) // bins_per_decade  # whole decades that hold anything
    high = first + max(filled) // bins_per_decade + 1
    bins = (high - low) * bins_per_decade
    offset = (low - first) * bins_per_decade
    tallest = max(counts)
    width = 100 / bins

    def at(value: float) -> float:
        return 100 * (math.log10(max(value, 10.0**low)) - low) / (high - low)

    columns = tuple(
        Column(
            left=i * width,
            width=width,
            height=tokens / tallest,
            title=f"{tokens:,} tokens near {10 ** (low + (i + 0.5) / bins_per_decade):.1e} {metric.unit.name}",
        )
        for i, tokens in enumerate(counts[offset : offset + bins])
    )
    marks = {label: view.value(quality.figures[name]) for label, name in form.marks.items()}
    written = (f"{label} {metric.unit.write(value)}" for label, value in marks.items())
    return Histogram(
        title=metric.title,
        description=f"{metric.meaning}: {', '.join(written)}",
        columns=columns,
        ticks=tuple(
            Mark(100 * (decade - low) / (high - low), f"1e{decade}" if decade < -2 else f"{10.0**decade:g}")
            for decade in range(low, min(high, last) + 1)
        ),
        marks=tuple(Mark(min(at(value), 100), label) for label, value in marks.items()),
    )


def latency(measured: Latency) -> dict[str, list[tuple[int, str, Spread, float, float]]]:
    """Lay out every duration of the catalog that has a spread, by its title.

    A row is one side at one length of prompt: the length, the side, what was measured, and p50 and p95 in percent of
    the largest.
    """
    charts = {}
    for metric in catalog.of_kind(TimingMetric):
        if metric.spread:
            found: list[tuple[int, str, Spread]] = [
                (point.prompt_tokens, side, timing.figures[metric.name])
                for point in measured.points
                for side, timing in point.sides.items()
            ]
            longest = max(max(spread.p50.value, spread.p95) for _, _, spread in found)
            charts[f"{metric.title}: {metric.meaning}"] = [
                (tokens, side, spread, 100 * spread.p50.value / longest, 100 * spread.p95 / longest)
                for tokens, side, spread in found
            ]
    return charts


def passes(records: Sequence[PassRecord]) -> list[tuple[PassRecord, float, float]]:
    """Lay out what each pass cost in KLD and what the weights came to after it: the lengths of both bars in percent."""
    kld = _shares([record.verification.kld_mean for record in records])
    weights = _shares([record.weight_bytes_after for record in records])
    return list(zip(records, kld, weights, strict=True))


@dataclass(frozen=True)
class Fall:
    """One bar of a waterfall: where it begins and how long it is, in percent; of a layer if it is `inner`."""

    name: str
    start: float
    width: float
    gains: bool  # the divergence becomes smaller
    inner: bool
    cost: Estimate


def waterfall(attribution: Attribution) -> list[tuple[AttributedStep, list[Fall]]]:
    """Lay out what each lossy pass added to the divergence, end to end, and what of it is in which layer.

    Bars of layers begin where that of their pass does. Layers that cost nothing have no length.
    """
    ends = [step.kld_mean.value for step in attribution.steps]
    scale = 100 / (max(max(ends), *_layer_ends(attribution)) or 1.0)
    laid_out = []
    for before, step in pairwise(attribution.steps):
        begin, added = before.kld_mean.value, step.added.value
        start = min(begin, begin + added)
        falls = [Fall(step.name, start * scale, abs(added) * scale, added < 0, False, step.added)]
        for layer in step.layers:
            width = max(layer.gain.value, 0.0) * scale
            falls.append(Fall(layer.name, begin * scale, width, False, True, layer.gain))
        laid_out.append((step, falls))
    return laid_out


def _layer_ends(attribution: Attribution) -> list[float]:
    """Tell where the bars of layers would end."""
    pairs = pairwise(attribution.steps)
    return [0.0, *(before.kld_mean.value + layer.gain.value for before, step in pairs for layer in step.layers)]


def stages(build: BuildRecord) -> list[tuple[StageRecord, float, float]]:
    """Lay out the stages of a build one behind the other: where each bar begins and how long it is, in percent."""
    ends = accumulate(stage.seconds for stage in build.stages)
    scale = 100 / (build.seconds or 1.0)
    return [
        (stage, (end - stage.seconds) * scale, stage.seconds * scale)
        for stage, end in zip(build.stages, ends, strict=True)
    ]


def _shares(values: Sequence[float | None]) -> list[float]:
    """Scale the lengths of bars to percent of the longest; what was not measured is 0."""
    known = [value or 0.0 for value in values]
    longest = max(known, default=0.0) or 1.0
    return [100 * value / longest for value in known]
