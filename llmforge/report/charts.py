"""Geometry of the report's charts. Lengths are percentages of the drawing's width, so that it fits any window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from llmforge.evaluation.gates import GateResult
from llmforge.metrics import catalog, units
from llmforge.metrics.catalog import QualityMetric, TimingMetric
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import Latency, Spread
from llmforge.metrics.quality import ByPosition, Quality, Segment
from llmforge.metrics.quality import Histogram as LogHistogram
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


@dataclass(frozen=True)
class Stretch:
    """One stretch of a curve: left edge and width in percent; figure and bounds as shares of the height."""

    left: float
    width: float
    value: float
    low: float | None
    high: float | None
    title: str

    @property
    def middle(self) -> float:
        """Where its figure is drawn, in percent."""
        return self.left + self.width / 2


@dataclass(frozen=True)
class Curve:
    """A figure by tokens of context; stretches are of equal width, so that the axis is about logarithmic."""

    title: str
    description: str
    bottom: str  # of the vertical axis, as written
    top: str
    stretches: tuple[Stretch, ...]
    ticks: tuple[Mark, ...]


def by_position(quality: Quality) -> list[Curve]:
    """Lay out every figure of the catalog that goes by position."""
    found = [metric for metric in catalog.of_kind(QualityMetric) if metric.name in quality.figures]
    return [_curve(m, quality.figures[m.name]) for m in found if isinstance(m.form, ByPosition)]


def _curve(metric: QualityMetric, segments: Sequence[Segment]) -> Curve:
    figures = [segment.figure for segment in segments]
    drawn = [bound for figure in figures for bound in (figure.value, figure.low, figure.high) if bound is not None]
    finite = [bound for bound in drawn if math.isfinite(bound)] or [0.0]
    # What is better when lower is drawn from 0, so that heights are true to scale; a share would be flat there.
    bottom, top = (min(0.0, *finite), max(finite)) if metric.better == "lower" else (min(finite), max(finite))
    span, width = (top - bottom) or 1.0, 100 / len(segments)

    def at(value: float) -> float:
        return min(max((value - bottom) / span, 0.0), 1.0) if not math.isnan(value) else 0.0

    write = metric.unit.write
    stretches = tuple(
        Stretch(
            left=i * width,
            width=width,
            value=at(segment.figure.value),
            low=None if segment.figure.low is None else at(segment.figure.low),
            high=None if segment.figure.high is None else at(segment.figure.high),
            title=f"{write(segment.figure.value)} ({units.interval(segment.figure, write)}) at {segment.first:,} to "
            f"{segment.last:,} tokens of context, {segment.tokens:,} tokens",
        )
        for i, segment in enumerate(segments)
    )
    every = math.ceil(len(segments) / 7)  # as many labels as a narrow window has room for
    first, last = segments[0], segments[-1]
    return Curve(
        title=f"{metric.title}, {metric.meaning}",
        description=f"{metric.title}: {write(first.figure.value)} at {first.first} to {first.last} tokens of context, "
        f"{write(last.figure.value)} at {last.first} to {last.last}",
        bottom=write(bottom),
        top=write(top),
        stretches=stretches,
        ticks=tuple(Mark(i * width, f"{segments[i].first:,}") for i in range(0, len(segments), every)),
    )


@dataclass(frozen=True)
class LatencyBar:
    """One side at one load; p50 and p95 in percent of the largest of the chart."""

    load: tuple[str, ...]
    side: str
    spread: Spread
    percent: float
    tail_percent: float


def latency(measured: Latency) -> dict[str, list[LatencyBar]]:
    """Lay out every duration of the catalog that has a chart, by its title."""
    found = {}
    for metric in catalog.of_kind(TimingMetric):
        if metric.chart:
            spreads: list[tuple[tuple[str, ...], str, Spread]] = [
                (load, side, timing.figures[metric.name])
                for point, load in zip(measured.points, view.loads(measured).rows, strict=True)
                for side, timing in point.sides.items()
            ]
            longest = max(max(spread.p50.value, spread.p95.value) for _, _, spread in spreads)
            found[f"{metric.title}: {metric.meaning}"] = [
                LatencyBar(load, side, spread, 100 * spread.p50.value / longest, 100 * spread.p95.value / longest)
                for load, side, spread in spreads
            ]
    return found


@dataclass(frozen=True)
class Line:
    """One line of a diagram: its places in percent of the width and shares of the height, each with what it says."""

    label: str
    style: int  # a color; a line and its bound share one
    bound: bool  # drawn as what cannot be passed
    places: tuple[tuple[float, float, str], ...]

    @property
    def segments(self) -> list[tuple[tuple[float, float, str], tuple[float, float, str]]]:
        """Pairs of neighbouring places."""
        return list(pairwise(self.places))


@dataclass(frozen=True)
class Diagram:
    """Lines over an axis with one place for each value that was measured."""

    title: str
    description: str
    top: str  # what the height is
    axis: str
    ticks: tuple[Mark, ...]
    lines: tuple[Line, ...]


_MOST_LINES = 4  # that can be told apart; a table beside the diagram has all


def over_load(measured: Latency) -> list[Diagram]:
    """Lay out the time per token over the length of the prompt, above what the bandwidth allows; and rates over batch.

    Only what was measured at several lengths, or several batch sizes, has a diagram. Answers of the longest length
    stand for all.
    """
    output = max(point.output_tokens for point in measured.points)
    points = [point for point in measured.points if point.output_tokens == output]
    batches, prompts = (
        sorted({point.batch for point in points}),
        sorted({point.prompt_tokens for point in points}),
    )
    found: list[Diagram] = []
    if len(prompts) > 1:
        lines = []
        for style, batch in enumerate(_spread_out(batches)):
            own = sorted((p for p in points if p.batch == batch), key=lambda p: p.prompt_tokens)
            label = "1 sequence" if batch == 1 else f"{batch} sequences"
            lines.append(
                (label, style, False, [(p.prompt_tokens, p.artifact.figures["tpot_ms"].p50.value) for p in own])
            )
            if (bandwidth := measured.bandwidth) is not None:
                floor = 1e3 / bandwidth.working_set_bytes_per_second
                at = [(p.prompt_tokens, p.figures["bytes_read_per_token"] * floor) for p in own]
                lines.append((f"{label}: limit of the bandwidth", style, True, at))
        found.append(_diagram("Time per output token (TPOT), median", "ms", "prompt tokens", prompts, lines))
    if len(batches) > 1:
        rates = []
        for style, prompt in enumerate(_spread_out(prompts)):
            own = sorted((p for p in points if p.prompt_tokens == prompt), key=lambda p: p.batch)
            at = [(p.batch, p.figures["output_tokens_per_second"].value) for p in own]
            rates.append((f"{prompt}-token prompts", style, False, at))
        found.append(_diagram("Output tokens per second", "tokens/s", "sequences at once", batches, rates))
    return found


def _spread_out(values: Sequence[int]) -> list[int]:
    """Choose some of ascending values: the first, the last, and what lies evenly between."""
    if len(values) <= _MOST_LINES:
        return list(values)
    return [values[round(at * (len(values) - 1) / (_MOST_LINES - 1))] for at in range(_MOST_LINES)]


def _diagram(
    title: str,
    unit: str,
    axis: str,
    at: Sequence[int],
    lines: Sequence[tuple[str, int, bool, Sequence[tuple[int, float]]]],
) -> Diagram:
    """Lay out lines of (place on the axis, value); places are evenly spaced, whatever lies between them."""
    top = max(value for *_, line in lines for _, value in line) or 1.0
    across = {place: 4 + 92 * number / (len(at) - 1) for number, place in enumerate(at)}
    made = tuple(
        Line(
            label,
            style,
            bound,
            tuple(
                (across[x], value / top, f"{label}, {x} {axis}: {units.significant(value)} {unit}") for x, value in line
            ),
        )
        for label, style, bound, line in lines
    )
    return Diagram(
        title=title,
        description=f"{title}, by {axis}: " + "; ".join(line.places[-1][2] for line in made if line.places),
        top=f"{units.significant(top)} {unit}",
        axis=axis,
        ticks=tuple(Mark(across[place], str(place)) for place in at),
        lines=made,
    )


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
