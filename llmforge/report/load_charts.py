"""The charts of latency: durations and rates by load, against what the device allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llmforge.metrics import catalog, latency_metrics, units
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import Latency, LatencyPoint, Spread
from llmforge.metrics.latency_metrics import PointMetric, TimingMetric
from llmforge.metrics.metric import Metric
from llmforge.report import view
from llmforge.report.drawing import Mark, Scale

_MEMORY, _COMPUTE = "limit of the bandwidth", "limit of the compute rate"
_MOST_LINES = 4  # that can be told apart; a table beside the diagram has all


@dataclass(frozen=True)
class LatencyBar:
    """One side at one load; p50 and p95 in percent of the largest of the chart."""

    load: tuple[str, ...]
    side: str
    spread: Spread
    percent: float
    tail_percent: float


def bars(measured: Latency) -> dict[str, list[LatencyBar]]:
    """Lay out every duration of the catalog that has a chart, by its title, at the loads of one sequence.

    Those of several sequences stand in `surfaces`.
    """
    found = {}
    alone = single(measured)
    loads = view.loads(alone).rows
    for metric in drawn(measured):
        spreads: list[tuple[tuple[str, ...], str, Spread]] = [
            (load, side, timing.figures[metric.name])
            for point, load in zip(alone.points, loads, strict=True)
            for side, timing in point.sides.items()
        ]
        scale = Scale(0.0, max(max(spread.p50.value, spread.p95.value) for _, _, spread in spreads))
        found[f"{metric.title}: {metric.meaning}"] = [
            LatencyBar(load, side, spread, scale.percent(spread.p50.value), scale.percent(spread.p95.value))
            for load, side, spread in spreads
        ]
    return found


def drawn(measured: Latency) -> list[TimingMetric]:
    """List the durations of the catalog that have a chart, and that such runs have."""
    timed = catalog.of_kind(TimingMetric)
    return [metric for metric in timed if metric.chart and metric.is_of(encodes=measured.encodes)]


def _rate_of(measured: Latency) -> PointMetric:
    """Choose the rate that stands for a load: tokens given a second, or tokens of texts encoded."""
    return latency_metrics.READ_RATE if measured.encodes else latency_metrics.OUTPUT_RATE


def single(measured: Latency) -> Latency:
    """Leave the loads of one sequence; all, where there is none."""
    return measured.model_copy(update={"points": measured.single})


@dataclass(frozen=True)
class Surface:
    """A figure at each batch size and length of prompt."""

    title: str
    meaning: str
    prompts: tuple[int, ...]
    rows: tuple[tuple[int, tuple[Cell | None, ...]], ...]  # by batch size; None: not measured


@dataclass(frozen=True)
class Cell:
    """One figure of a surface; how far it is from the best one to the worst, 0 to 1."""

    value: str
    interval: str
    shade: float


def surfaces(measured: Latency) -> list[Surface]:
    """Lay out the durations and rates of every batch size and length of prompt, where there are several of both.

    Answers of the longest length stand for all.
    """
    points = _of_longest_answers(measured)
    batches, prompts = _axes(points)
    if len(batches) < 2 or len(prompts) < 2:
        return []
    rate = _rate_of(measured)
    found = [
        _surface(metric, {_at(point): point.artifact.figures[metric.name].p50 for point in points}, ", median")
        for metric in drawn(measured)
    ]
    return [*found, _surface(rate, {_at(point): point.figures[rate.name] for point in points})]


def _at(point: LatencyPoint) -> tuple[int, int]:
    return point.batch, point.prompt_tokens


def _surface(metric: Metric, estimates: Mapping[tuple[int, int], Estimate], which: str = "") -> Surface:
    """Lay out estimates by batch size and length of prompt; shades go with the logarithm."""
    low, high = (choose(each.value for each in estimates.values()) for choose in (min, max))
    span = math.log(high / low) if 0 < low < high < math.inf else 0.0
    best, write = high if metric.better == "higher" else low, metric.unit.write
    cells = {
        at: Cell(
            write(estimate.value),
            units.interval(estimate, write),
            abs(math.log(estimate.value / best)) / span if span else 0.0,
        )
        for at, estimate in estimates.items()
    }
    batches, prompts = (sorted({at[axis] for at in estimates}) for axis in (0, 1))
    rows = tuple((batch, tuple(cells.get((batch, prompt)) for prompt in prompts)) for batch in batches)
    title = metric.title[0].upper() + metric.title[1:]
    return Surface(f"{title}{which}", metric.meaning, tuple(prompts), rows)


def _of_longest_answers(measured: Latency) -> list[LatencyPoint]:
    output = max(point.output_tokens for point in measured.points)
    return [point for point in measured.points if point.output_tokens == output]


def _axes(points: Sequence[LatencyPoint]) -> tuple[list[int], list[int]]:
    return sorted({point.batch for point in points}), sorted({point.prompt_tokens for point in points})


@dataclass(frozen=True)
class Line:
    """One line of a diagram: its places in percent of the width and shares of the height, each with what it says."""

    label: str
    style: int  # a color; a line and its bound share one
    bound: bool  # drawn as what cannot be passed
    places: tuple[tuple[float, float, str], ...]


@dataclass(frozen=True)
class Diagram:
    """Lines over an axis with one place for each value that was measured."""

    title: str
    description: str
    levels: tuple[Mark, ...]  # heights in percent, as written, from the bottom
    axis: str
    ticks: tuple[Mark, ...]
    lines: tuple[Line, ...]
    bound: str  # what lines that cannot be passed are; "": there are none


@dataclass(frozen=True)
class _Series:
    """Values over an axis, before they are laid out."""

    label: str
    style: int
    values: Mapping[int, float]  # by place on the axis
    bound: bool = False


def over_load(measured: Latency) -> list[Diagram]:
    """Lay out durations over the length of the prompt, above what the device allows, and rates over the batch size.

    Only what was measured at several lengths, or several batch sizes, has a diagram. Answers of the longest length
    stand for all.
    """
    points = _of_longest_answers(measured)
    batches, prompts = _axes(points)
    found: list[Diagram] = []
    if len(prompts) > 1:
        for title, metric, floor, bound in (
            ("Time per output token (TPOT), median", latency_metrics.TPOT, _step_floor, _MEMORY),
            ("Time to first token (TTFT), median", latency_metrics.TTFT, _prompt_floor, _COMPUTE),
            ("Time of a batch, median", latency_metrics.ENCODE, _prompt_floor, _COMPUTE),
        ):
            if metric.is_of(encodes=measured.encodes):
                series = _durations(metric, floor, bound, measured, points)
                axis = view.length_title(measured)
                found.append(_diagram(title, "ms", axis, prompts, series, bound=bound, logarithmic=True))
    if len(batches) > 1:
        rate, of = _rate_of(measured).name, "texts" if measured.encodes else "prompts"
        rates = [
            _Series(
                f"{prompt}-token {of}",
                style,
                {point.batch: point.figures[rate].value for point in points if point.prompt_tokens == prompt},
            )
            for style, prompt in enumerate(_spread_out(prompts))
        ]
        title, axis = "Output tokens per second", "sequences at once"
        if measured.encodes:
            title, axis = "Tokens encoded per second", "texts at once"
        found.append(_diagram(title, "tokens/s", axis, batches, rates))
    return found


def _durations(
    metric: TimingMetric,
    floor: Callable[[Latency, LatencyPoint], float | None],
    bound: str,
    measured: Latency,
    points: Sequence[LatencyPoint],
) -> list[_Series]:
    """Take a duration by the length of the prompt for each batch size, and what the device allows."""
    found = []
    for style, batch in enumerate(_spread_out(_axes(points)[0])):
        own = [point for point in points if point.batch == batch]
        one = "text" if measured.encodes else "sequence"
        label = f"1 {one}" if batch == 1 else f"{batch} {one}s"
        medians = {point.prompt_tokens: point.artifact.figures[metric.name].p50.value for point in own}
        found.append(_Series(label, style, medians))
        floors = {point.prompt_tokens: least for point in own if (least := floor(measured, point)) is not None}
        if floors:
            found.append(_Series(f"{label}: {bound}", style, floors, bound=True))
    return found


def _step_floor(measured: Latency, point: LatencyPoint) -> float | None:
    """Milliseconds in which the measured bandwidth reads what a decode step reads."""
    if measured.bandwidth is None:
        return None
    return 1e3 * float(point.figures["bytes_read_per_token"]) / measured.bandwidth.working_set_bytes_per_second


def _prompt_floor(measured: Latency, point: LatencyPoint) -> float | None:
    """Milliseconds in which the measured rate makes the products of the weights for the prompts."""
    rate = None if measured.compute is None else measured.compute.rate
    operations = measured.footprint.prompt_operations(point.batch, point.prompt_tokens)
    return None if rate is None or operations is None else 1e3 * operations / rate


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
    series: Sequence[_Series],
    *,
    bound: str = "",
    logarithmic: bool = False,
) -> Diagram:
    """Lay out series over the places `at`, which are evenly spaced, whatever lies between them.

    A logarithmic height is of whole decades: what is measured may be far above its bound.
    """
    values = [value for each in series for value in each.values.values()]
    positive = [value for value in values if value > 0]
    logarithmic = logarithmic and bool(positive)
    levels: dict[str, float]
    if logarithmic:
        low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        scale = Scale(low, max(high, low + 1))
        levels = {f"{10.0**decade:g} {unit}": decade for decade in range(low, max(high, low + 1) + 1)}
    else:
        scale = Scale(0.0, max(values) or 1.0)
        levels = {_level(value, unit): value for value in (0.0, scale.high / 2, scale.high)}

    def height(value: float) -> float:
        if logarithmic:
            return scale.share(math.log10(value)) if value > 0 else 0.0
        return scale.share(value)

    across = {place: 20 + 76 * number / (len(at) - 1) for number, place in enumerate(at)}
    lines = tuple(
        Line(
            each.label,
            each.style,
            each.bound,
            tuple(
                (across[x], height(value), f"{each.label}, {x} {axis}: {units.significant(value)} {unit}")
                for x, value in sorted(each.values.items())
            ),
        )
        for each in series
    )
    return Diagram(
        title=title,
        description=f"{title}, by {axis}: " + "; ".join(line.places[-1][2] for line in lines if line.places),
        levels=tuple(Mark(scale.percent(value), label) for label, value in levels.items()),
        axis=axis,
        ticks=tuple(Mark(across[place], str(place)) for place in at),
        lines=lines,
        bound=bound if any(line.bound for line in lines) else "",
    )


def _level(value: float, unit: str) -> str:
    return f"{units.significant(value, 2)} {unit}" if value else "0"
