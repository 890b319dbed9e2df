"""The charts of a report: which figures are drawn, and where."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from string import ascii_lowercase

from llmforge.gates.comparison import Change, HistoryEntry
from llmforge.gates.decision import GateResult
from llmforge.gates.records import BuildRecord, EngineRecord, PassRecord, Report, StageRecord
from llmforge.metrics import catalog, quality_metrics, units
from llmforge.metrics.attribution import AttributedStep, Attribution
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.quality import ByPosition, Histogram, Quality, Segment
from llmforge.metrics.quality_metrics import QualityMetric
from llmforge.report import view
from llmforge.report.drawing import FigurePlot, Kind, Mark, Placed, Scale, bounds, flags

_MARGIN = 0.2  # of a span, left free on both sides


@dataclass(frozen=True)
class GatePlot:
    """A figure and its interval against a limit, on one axis; all in percent of the width."""

    limit: float
    forbidden: tuple[float, float]  # start and width of the side on which the gate fails
    value: float
    low: float
    high: float
    label_at: str  # "start", "middle", "end": where the limit's label fits


def gate(result: GateResult) -> GatePlot | None:
    """Lay out one gate; None where nothing was measured. A bound that is not finite lies at the end of the axis."""
    measured = result.measured
    if measured is None or not math.isfinite(measured.value):
        return None
    at = Scale.over([measured], result.edge).wider(_MARGIN).percent
    low, high = bounds(measured)
    limit = at(result.edge)
    return GatePlot(
        limit=limit,
        forbidden=(limit, 100 - limit) if result.is_upper else (0.0, limit),
        value=at(measured.value),
        low=at(low),
        high=at(high),
        label_at="start" if limit < 25 else "end" if limit > 75 else "middle",
    )


def histograms(quality: Quality) -> list[FigurePlot]:
    """Lay out every distribution of the catalog that holds a token."""
    return [
        _histogram(metric, metric.form, quality)
        for metric in _measured(quality)
        if isinstance(metric.form, Histogram) and any(quality.figures[metric.name])
    ]


def _measured(quality: Quality) -> list[QualityMetric]:
    return [metric for metric in catalog.of_quality(quality.figures) if metric.name in quality.figures]


def _histogram(metric: QualityMetric, form: Histogram, quality: Quality) -> FigurePlot:
    """Lay out how a value is distributed over tokens, by its decade, with the figures that are marked on it."""
    counts: tuple[int, ...] = quality.figures[metric.name]
    each, (first, last) = form.bins_per_decade, form.decades
    filled = [i for i, tokens in enumerate(counts) if tokens]
    low = first + min(filled) // each  # whole decades that hold anything
    high = first + max(filled) // each + 1
    shown = counts[(low - first) * each : (high - first) * each]
    scale, width = Scale(low, high), 100 / len(shown)
    columns = tuple(
        Placed(
            left=i * width,
            width=width,
            value=tokens / max(counts),
            low=None,
            high=None,
            title=f"{tokens:,} tokens near {10 ** (low + (i + 0.5) / each):.1e} {metric.unit.name}",
        )
        for i, tokens in enumerate(shown)
    )
    figures = {label: view.value(quality.figures[name]) for label, name in form.marks.items()}
    labels = {label: f"{label} {metric.unit.write(figure)}" for label, figure in figures.items()}
    marks = [
        Mark(scale.percent(math.log10(max(figure, 10.0**low))), labels[label])
        for label, figure in figures.items()
        if not math.isnan(figure)
    ]
    return FigurePlot(
        title=metric.title,
        description=f"{metric.meaning}: {', '.join(labels.values())}",
        placed=columns,
        ticks=tuple(
            Mark(scale.percent(decade), f"1e{decade}" if decade < -2 else f"{10.0**decade:g}")
            for decade in range(low, min(high, last) + 1)
        ),
        flags=flags(marks),
    )


def by_position(quality: Quality) -> list[FigurePlot]:
    """Lay out every figure of the catalog that goes by position."""
    return [_curve(m, quality.figures[m.name]) for m in _measured(quality) if isinstance(m.form, ByPosition)]


def _curve(metric: QualityMetric, segments: Sequence[Segment]) -> FigurePlot:
    """Lay out a figure by tokens of context; stretches are of equal width, so that the axis is about logarithmic."""
    # What is better when lower is drawn from 0, so that heights are true to scale; a share would be flat there.
    scale = Scale.over([segment.figure for segment in segments], *([0.0] if metric.better == "lower" else []))
    width, write = 100 / len(segments), metric.unit.write
    stretches = tuple(
        Placed(
            left=i * width,
            width=width,
            value=scale.height(segment.figure.value),
            low=scale.height(segment.figure.low),
            high=scale.height(segment.figure.high),
            title=f"{write(segment.figure.value)} ({units.interval(segment.figure, write)}) at {segment.first:,} to "
            f"{segment.last:,} tokens of context, {segment.tokens:,} tokens",
        )
        for i, segment in enumerate(segments)
    )
    every = math.ceil(len(segments) / 7)  # as many labels as a narrow window has room for
    first, last = segments[0], segments[-1]
    return FigurePlot(
        title=f"{metric.title}, {metric.meaning}",
        description=f"{metric.title}: {write(first.figure.value)} at {first.first} to {first.last} tokens of context, "
        f"{write(last.figure.value)} at {last.first} to {last.last}",
        placed=stretches,
        ticks=tuple(Mark(i * width, f"{segments[i].first:,}") for i in range(0, len(segments), every)),
        bottom=write(scale.low),
        top=write(scale.high),
    )


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
    of_kld = Scale(0.0, max((abs(each.value) for each in added if each is not None), default=0.0))
    of_weights = Scale(0.0, max((record.weight_bytes_after for record in report.passes), default=0.0))
    return [
        PassBars(
            record,
            each,
            added_percent=0.0 if each is None else of_kld.percent(abs(each.value)),
            gains=each is not None and each.value < 0,
            weights_percent=of_weights.percent(record.weight_bytes_after),
        )
        for record, each in zip(report.passes, added, strict=True)
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


_LAYER = re.compile(r"layer (\d+)")


def by_layer(attribution: Attribution) -> list[FigurePlot]:
    """Lay out what keeping each layer as it was before a pass would gain, for every pass of which that is known."""
    return [_layers(step) for step in attribution.steps if step.layers]


def _layers(step: AttributedStep) -> FigurePlot:
    scale = Scale.over([layer.gain for layer in step.layers], 0.0)
    width, write = 100 / len(step.layers), quality_metrics.KLD_MEAN.unit.write
    columns = tuple(
        Placed(
            left=number * width,
            width=width,
            value=scale.height(layer.gain.value),
            low=scale.height(layer.gain.low),
            high=scale.height(layer.gain.high),
            title=f"{layer.name}: {write(layer.gain.value)} ({units.interval(layer.gain, write)})",
        )
        for number, layer in enumerate(step.layers)
    )
    most = max(step.layers, key=lambda layer: layer.gain.value)
    numbers = {layer.name: found[1] for layer in step.layers if (found := _LAYER.match(layer.name)) is not None}
    named = [layer.name for layer in step.layers if layer.name not in numbers]
    letters = dict(zip(named, ascii_lowercase, strict=False))
    every = math.ceil(len(columns) / 12)
    return FigurePlot(
        title=step.name,
        description=f"Mean KLD that keeping each layer as it was before {step.name} would gain; most: {most.name}, "
        f"{write(most.gain.value)} nats per token",
        placed=columns,
        ticks=tuple(
            Mark(column.at, numbers.get(layer.name, letters.get(layer.name, "")))
            for number, (column, layer) in enumerate(zip(columns, step.layers, strict=True))
            if number % every == 0 or layer.name in letters
        ),
        top=write(scale.high),
        zero=scale.share(0.0),
        others=tuple((letter, name) for name, letter in letters.items()),
    )


@dataclass(frozen=True)
class ChangePlot:
    """A difference and its interval around 0, which is in the middle; in percent of the width."""

    value: float
    low: float
    high: float
    kind: Kind


def change(found: Change) -> ChangePlot | None:
    """Lay out a difference; None where there is none, or no interval."""
    moved = found.difference
    if moved is None or moved.low is None or moved.high is None or not math.isfinite(moved.value):
        return None
    low, high = bounds(moved)
    reach = max(abs(bound) for bound in (moved.value, low, high) if math.isfinite(bound)) * (1 + _MARGIN) or 1.0
    at = Scale(-reach, reach).percent
    return ChangePlot(at(moved.value), at(low), at(high), _kind(found))


def _kind(found: Change) -> Kind:
    return "worse" if found.worse else "better" if found.better else "same"


def courses(entries: Sequence[HistoryEntry]) -> list[FigurePlot]:
    """Lay out every metric that a version has, over all versions."""
    by_metric = zip(*(entry.metrics for entry in entries), strict=True)
    return [_course(entries, of) for of in by_metric if any(_finite(change.b) is not None for change in of)]


def _finite(estimate: Estimate | None) -> Estimate | None:
    return None if estimate is None or not math.isfinite(estimate.value) else estimate


def _course(entries: Sequence[HistoryEntry], of: Sequence[Change]) -> FigurePlot:
    metric = catalog.named(of[0].metric)
    write, known = metric.unit.write, [each for change in of if (each := _finite(change.b)) is not None]
    scale = Scale.over(known)

    def height(value: float) -> float:
        return scale.share(value) if scale.high > scale.low else 0.5

    def place(number: int) -> float:
        return 22 + 72 * number / (len(entries) - 1) if len(entries) > 1 else 50.0

    placed = []
    for number, (entry, change) in enumerate(zip(entries, of, strict=True)):
        if (each := _finite(change.b)) is None:
            continue
        low, high = (None, None) if each.low is None or each.high is None else map(height, bounds(each))
        said = f"{entry.side.version}: {write(each.value)} ({units.interval(each, write)})"
        placed.append(Placed(place(number), 0.0, height(each.value), low, high, said, _kind(change)))
    every = math.ceil(len(entries) / 3)  # as many names of versions as a narrow window has room for
    shown = range(len(entries) - 1, -1, -every)
    regressions = [entry.side.version for entry, change in zip(entries, of, strict=True) if change.worse]
    said = f"regressions in {', '.join(regressions)}" if regressions else "no regression"
    return FigurePlot(
        title=metric.name,
        description=f"{metric.title} by version: {write(known[0].value)} to {write(known[-1].value)}; {said}",
        placed=tuple(placed),
        ticks=tuple(Mark(place(number), entries[number].side.version[:7]) for number in sorted(shown)),
        bottom=write(scale.low),
        top=write(scale.high),
    )


@dataclass(frozen=True)
class SizePart:
    """Part of the engine's size."""

    name: str
    what: str
    size_bytes: int
    share: float  # of the engine
    start: float  # where it begins, end to end, in percent
    style: int  # a color; all other weights have -1, the rest -2


_MOST_PARTS = 6  # that have a color of their own


def sizes(engine: EngineRecord) -> list[SizePart]:
    """Break the engine's size down: the largest groups of weights, all others, and what is no weight."""
    shown, others = engine.weights[:_MOST_PARTS], engine.weights[_MOST_PARTS:]
    total = engine.size_bytes or 1
    found = [
        (group.name, f"{group.tensors} × {group.dtype}" if group.tensors > 1 else group.dtype, group.size_bytes, number)
        for number, group in enumerate(shown)
    ]
    if others:
        tensors, size = sum(group.tensors for group in others), sum(group.size_bytes for group in others)
        found.append(("all other weights", f"{tensors} tensors", size, -1))
    rest = engine.size_bytes - sum(group.size_bytes for group in engine.weights)
    if found and rest > 0:
        found.append(("no weights", "graph, configuration and alignment", rest, -2))
    starts = accumulate((size for *_, size, _ in found), initial=0)
    return [
        SizePart(name, what, size, size / total, 100 * start / total, style)
        for (name, what, size, style), start in zip(found, starts, strict=False)
    ]


def stages(build: BuildRecord) -> list[tuple[StageRecord, float, float]]:
    """Lay out the stages of a build one after the other: where each bar begins and how long it is, in percent."""
    ends = accumulate(stage.seconds for stage in build.stages)
    scale = 100 / (build.seconds or 1.0)
    return [
        (stage, (end - stage.seconds) * scale, stage.seconds * scale)
        for stage, end in zip(build.stages, ends, strict=True)
    ]
