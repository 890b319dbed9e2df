"""Geometry of the report's charts. Lengths are percentages of the drawing's width, so that it fits any window."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from string import ascii_lowercase
from typing import Literal

from llmforge.gates.decision import GateResult
from llmforge.gates.records import BuildRecord, EngineRecord, PassRecord, Report, StageRecord
from llmforge.metrics import catalog, units
from llmforge.metrics.attribution import AttributedStep, Attribution
from llmforge.metrics.catalog import QualityMetric
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.quality import ByPosition, Quality, Segment
from llmforge.metrics.quality import Histogram as LogHistogram
from llmforge.report import view
from llmforge.report.comparing import Change, Entry

_MARGIN = 0.2  # of a gate's span, left free on both sides
_NARROWEST = 300.0  # pixels of a drawing in a window of 390
_LETTER = 6.5  # pixels of a letter of a label, about


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
class Flag(Mark):
    """A mark whose label lies in a row above the drawing, to one side of its line."""

    row: int  # from the top
    side: Literal["start", "end"]  # of the label that is at the line


@dataclass(frozen=True)
class Histogram:
    """Tokens by the decade of a value."""

    title: str
    description: str
    columns: tuple[Column, ...]
    ticks: tuple[Mark, ...]
    marks: tuple[Flag, ...]


def gate(result: GateResult) -> GatePlot | None:
    """Lay out one gate; None where nothing was measured. A bound that is not finite lies at the end of the axis."""
    measured = result.measured
    if measured is None or not math.isfinite(measured.value):
        return None
    low, high = _bounds(measured)
    drawn = [value for value in (low, measured.value, high, result.edge) if math.isfinite(value)]
    first, last = min(drawn), max(drawn)
    span = (last - first) or abs(last) or 1.0
    start, width = first - _MARGIN * span, span * (1 + 2 * _MARGIN)

    def at(value: float) -> float:
        return min(max(100 * (value - start) / width, 0.0), 100.0)

    limit = at(result.edge)
    return GatePlot(
        limit=limit,
        forbidden=(limit, 100 - limit) if result.is_upper else (0.0, limit),
        value=at(measured.value),
        low=at(low),
        high=at(high),
        label_at="start" if limit < 25 else "end" if limit > 75 else "middle",
    )


def _bounds(figure: Estimate) -> tuple[float, float]:
    """Give the bounds of a figure: itself where it has none, and no end where a bound is NaN."""
    low = figure.value if figure.low is None else figure.low
    high = figure.value if figure.high is None else figure.high
    return -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high


def histograms(quality: Quality) -> list[Histogram]:
    """Lay out every distribution of the catalog that holds a token."""
    found = [metric for metric in catalog.of_quality(quality.figures) if metric.name in quality.figures]
    return [
        _histogram(metric, metric.form, quality)
        for metric in found
        if isinstance(metric.form, LogHistogram) and any(quality.figures[metric.name])
    ]


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
    figures = {label: quality.figures[name] for label, name in form.marks.items()}
    labels = {label: f"{label} {metric.unit.write(view.value(figure))}" for label, figure in figures.items()}
    places = [
        Mark(min(at(place), 100), labels[label])
        for label, figure in figures.items()
        if not math.isnan(place := view.value(figure))
    ]
    return Histogram(
        title=metric.title,
        description=f"{metric.meaning}: {', '.join(labels.values())}",
        columns=columns,
        ticks=tuple(
            Mark(100 * (decade - low) / (high - low), f"1e{decade}" if decade < -2 else f"{10.0**decade:g}")
            for decade in range(low, min(high, last) + 1)
        ),
        marks=_apart(places),
    )


def _apart(marks: Sequence[Mark]) -> tuple[Flag, ...]:
    """Give the label of each mark a row of its own, so that neither another label nor another line runs through it.

    A line begins at the row of its label. Labels go to the right, the leftmost in the top row; where the last one has
    no room there, to the left, the rightmost in the top row.
    """
    if not marks:
        return ()
    ordered = sorted(marks, key=lambda mark: mark.at)
    room = max(100 * _LETTER * (len(mark.label) + 1) / _NARROWEST for mark in ordered)
    right = ordered[-1].at + room <= 100
    if not right:
        ordered.reverse()
    return tuple(Flag(mark.at, mark.label, row, "start" if right else "end") for row, mark in enumerate(ordered))


@dataclass(frozen=True)
class Stretch:
    """One stretch of a curve: left edge and width in percent; figure and bounds as shares of the height."""

    left: float
    width: float
    value: float | None  # None: it is NaN, and has no place
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
    found = [metric for metric in catalog.of_quality(quality.figures) if metric.name in quality.figures]
    return [_curve(m, quality.figures[m.name]) for m in found if isinstance(m.form, ByPosition)]


def _curve(metric: QualityMetric, segments: Sequence[Segment]) -> Curve:
    figures = [segment.figure for segment in segments]
    drawn = [bound for figure in figures for bound in (figure.value, figure.low, figure.high) if bound is not None]
    finite = [bound for bound in drawn if math.isfinite(bound)] or [0.0]
    # What is better when lower is drawn from 0, so that heights are true to scale; a share would be flat there.
    bottom, top = (min(0.0, *finite), max(finite)) if metric.better == "lower" else (min(finite), max(finite))
    span, width = (top - bottom) or 1.0, 100 / len(segments)

    def at(value: float | None) -> float | None:
        return _height(value, bottom, span)

    write = metric.unit.write
    stretches = tuple(
        Stretch(
            left=i * width,
            width=width,
            value=at(segment.figure.value),
            low=at(segment.figure.low),
            high=at(segment.figure.high),
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


def _height(value: float | None, bottom: float, span: float) -> float | None:
    """Give a value as a share of the height, within it; None where it is none or NaN."""
    return None if value is None or math.isnan(value) else min(max((value - bottom) / span, 0.0), 1.0)


@dataclass(frozen=True)
class PassBars:
    """A pass, what it added to the KLD, and what the weights came to after it; the lengths of both bars in percent."""

    record: PassRecord
    added: Estimate | None  # None: it lost nothing, or that was not measured
    added_percent: float
    gains: bool  # the divergence became smaller
    weights_percent: float


def passes(report: Report) -> list[PassBars]:
    """Lay out what each pass added to the KLD from the traced graph and what the weights came to after it."""
    added = view.added_kld(report)
    of_kld = _shares([None if each is None else abs(each.value) for each in added])
    weights = _shares([record.weight_bytes_after for record in report.passes])
    return [
        PassBars(record, each, of_added, each is not None and each.value < 0, of_weights)
        for record, each, of_added, of_weights in zip(report.passes, added, of_kld, weights, strict=True)
    ]


@dataclass(frozen=True)
class Fall:
    """One bar of a waterfall: where it begins, how long it is and where it ends, in percent of the width."""

    step: AttributedStep
    start: float
    width: float
    end: float  # what the next bar begins at
    gains: bool  # the divergence becomes smaller


def waterfall(attribution: Attribution) -> list[Fall]:
    """Lay out what each lossy pass added to the divergence, end to end."""
    scale = 100 / (max(step.kld_mean.value for step in attribution.steps) or 1.0)
    falls = []
    for before, step in pairwise(attribution.steps):
        begin, added = before.kld_mean.value, step.added.value
        start, end = min(begin, begin + added) * scale, (begin + added) * scale
        falls.append(Fall(step, max(start, 0.0), abs(added) * scale, max(end, 0.0), added < 0))
    return falls


@dataclass(frozen=True)
class LayerColumn:
    """What one layer costs; left edge and width in percent, heights as shares of the largest bound of the pass."""

    left: float
    width: float
    zero: float  # height of 0: below it is what would not be gained but lost
    value: float
    low: float | None
    high: float | None
    label: str
    title: str


@dataclass(frozen=True)
class Layers:
    """What keeping each layer as it was before a pass would gain."""

    name: str  # of the pass
    description: str
    top: str
    columns: tuple[LayerColumn, ...]
    ticks: tuple[Mark, ...]
    others: tuple[tuple[str, str], ...]  # letter and name of what is no layer


def by_layer(attribution: Attribution) -> list[Layers]:
    """Lay out the cost of each layer, for every pass that has them."""
    return [_layers(step) for step in attribution.steps if step.layers]


def _layers(step: AttributedStep) -> Layers:
    gains = [layer.gain for layer in step.layers]
    drawn = [bound for gain in gains for bound in (gain.value, gain.low, gain.high) if bound is not None]
    bottom, top = min(0.0, *drawn), max(0.0, *drawn)
    span, width, write = (top - bottom) or 1.0, 100 / len(gains), catalog.KLD_MEAN.unit.write

    def at(value: float | None) -> float | None:
        return None if value is None else (value - bottom) / span

    columns = tuple(
        LayerColumn(
            left=number * width,
            width=width,
            zero=-bottom / span,
            value=(layer.gain.value - bottom) / span,
            low=at(layer.gain.low),
            high=at(layer.gain.high),
            label=layer.name,
            title=f"{layer.name}: {write(layer.gain.value)} ({units.interval(layer.gain, write)})",
        )
        for number, layer in enumerate(step.layers)
    )
    most = max(step.layers, key=lambda layer: layer.gain.value)
    named = [layer.name for layer in step.layers if _LAYER.match(layer.name) is None]
    others = dict(zip(named, ascii_lowercase, strict=False))
    labels = [_label(column.label, others) for column in columns]
    every = math.ceil(len(columns) / 12)
    return Layers(
        name=step.name,
        description=f"Mean KLD that keeping each layer as it was before {step.name} would gain; most: {most.name}, "
        f"{write(most.gain.value)} nats per token",
        top=write(top),
        columns=columns,
        ticks=tuple(
            Mark(column.left + column.width / 2, label)
            for number, (column, label) in enumerate(zip(columns, labels, strict=True))
            if number % every == 0 or label in others.values()
        ),
        others=tuple((letter, name) for name, letter in others.items()),
    )


_LAYER = re.compile(r"layer (\d+)")


def _label(name: str, others: Mapping[str, str]) -> str:
    """Write a layer as its number, what is none as its letter."""
    found = _LAYER.match(name)
    return others.get(name, "") if found is None else found[1]


@dataclass(frozen=True)
class ChangePlot:
    """A difference and its interval around 0, which is in the middle; in percent of the width."""

    value: float
    low: float
    high: float
    kind: Literal["better", "worse", "same"]  # "same": its interval holds 0


def change(found: Change) -> ChangePlot | None:
    """Lay out a difference; None where there is none, or no interval."""
    moved = found.difference
    if moved is None or moved.low is None or moved.high is None or not math.isfinite(moved.value):
        return None
    low, high = _bounds(moved)
    reach = max(abs(bound) for bound in (moved.value, low, high) if math.isfinite(bound)) * (1 + _MARGIN) or 1.0

    def at(value: float) -> float:
        return min(max(50 + 50 * value / reach, 0.0), 100.0)

    kind: Literal["better", "worse", "same"] = "worse" if found.worse else "better" if found.better else "same"
    return ChangePlot(at(moved.value), at(low), at(high), kind)


@dataclass(frozen=True)
class Place:
    """A version in the course of a metric: its place in percent of the width, heights as shares."""

    at: float
    value: float
    low: float | None
    high: float | None
    kind: Literal["better", "worse", "same"]  # than the version before
    title: str


@dataclass(frozen=True)
class Course:
    """A metric by version."""

    title: str
    meaning: str
    better: Literal["lower", "higher", "neither"]
    description: str
    bottom: str  # of the vertical axis, as written
    top: str
    places: tuple[Place, ...]
    ticks: tuple[Mark, ...]


def courses(entries: Sequence[Entry]) -> list[Course]:
    """Lay out every metric that a version has, over all versions."""
    by_metric = zip(*(entry.metrics for entry in entries), strict=True)
    return [_course(entries, of) for of in by_metric if any(_finite(change.b) is not None for change in of)]


def _finite(estimate: Estimate | None) -> Estimate | None:
    return None if estimate is None or not math.isfinite(estimate.value) else estimate


def _course(entries: Sequence[Entry], of: Sequence[Change]) -> Course:
    metric = catalog.named(of[0].metric)
    write, known = metric.unit.write, [each for change in of if (each := _finite(change.b)) is not None]
    drawn = [
        bound
        for each in known
        for bound in (each.value, each.low, each.high)
        if bound is not None and math.isfinite(bound)
    ]
    bottom, top = min(drawn), max(drawn)
    span = (top - bottom) or 1.0

    def height(value: float) -> float:
        return min(max((value - bottom) / span, 0.0), 1.0) if top > bottom else 0.5

    def place(number: int) -> float:
        return 22 + 72 * number / (len(entries) - 1) if len(entries) > 1 else 50.0

    places = []
    for number, (entry, change) in enumerate(zip(entries, of, strict=True)):
        if (each := _finite(change.b)) is None:
            continue
        kind: Literal["better", "worse", "same"] = "worse" if change.worse else "better" if change.better else "same"
        low, high = (None, None) if each.low is None or each.high is None else map(height, _bounds(each))
        said = f"{entry.side.version}: {write(each.value)} ({units.interval(each, write)})"
        places.append(Place(place(number), height(each.value), low, high, kind, said))
    every = math.ceil(len(entries) / 3)  # as many names of versions as a narrow window has room for
    shown = range(len(entries) - 1, -1, -every)
    regressions = [entry.side.version for entry, change in zip(entries, of, strict=True) if change.worse]
    said = f"regressions in {', '.join(regressions)}" if regressions else "no regression"
    return Course(
        title=metric.title,
        meaning=metric.meaning,
        better=metric.better,
        description=f"{metric.title} by version: {write(known[0].value)} to {write(known[-1].value)}; {said}",
        bottom=write(bottom),
        top=write(top),
        places=tuple(places),
        ticks=tuple(Mark(place(number), entries[number].side.version[:7]) for number in sorted(shown)),
    )


@dataclass(frozen=True)
class Part:
    """Part of the engine's size."""

    name: str
    what: str
    size_bytes: int
    share: float  # of the engine
    start: float  # where it begins, end to end, in percent
    style: int  # a color; the rest has -1


_MOST_PARTS = 6  # that have a color of their own


def sizes(engine: EngineRecord) -> list[Part]:
    """Break the engine's size down: the largest groups of weights, all others, and what is no weight."""
    shown, others = engine.weights[:_MOST_PARTS], engine.weights[_MOST_PARTS:]
    total = engine.size_bytes or 1
    found = [
        (group.name, f"{group.tensors} × {group.dtype}" if group.tensors > 1 else group.dtype, group.size_bytes, number)
        for number, group in enumerate(shown)
    ]
    if others:
        found.append(
            (
                "all other weights",
                f"{sum(group.tensors for group in others)} tensors",
                sum(g.size_bytes for g in others),
                -1,
            )
        )
    rest = engine.size_bytes - sum(group.size_bytes for group in engine.weights)
    if found and rest > 0:
        found.append(("no weights", "graph, configuration and alignment", rest, -2))
    ends = accumulate((size for *_, size, _ in found), initial=0)
    return [
        Part(name, what, size, size / total, 100 * start / total, style)
        for (name, what, size, style), start in zip(found, ends, strict=False)
    ]


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
