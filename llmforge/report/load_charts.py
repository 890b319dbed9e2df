"""Geometry of the charts of latency. Lengths are percentages of the drawing's width, so that it fits any window."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmforge.metrics import catalog, units
from llmforge.metrics.catalog import Metric, TimingMetric
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import Latency, Point, Spread
from llmforge.report import view
from llmforge.report.charts import Mark


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
    for metric in catalog.of_kind(TimingMetric):
        if metric.chart:
            spreads: list[tuple[tuple[str, ...], str, Spread]] = [
                (load, side, timing.figures[metric.name])
                for point, load in zip(alone.points, view.loads(alone).rows, strict=True)
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
    levels: tuple[Mark, ...]  # heights in percent, as written, from the bottom
    axis: str
    ticks: tuple[Mark, ...]
    lines: tuple[Line, ...]
    bound: str  # what lines that cannot be passed are; "": there are none


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
    rate = catalog.OUTPUT_RATE
    found = [
        _surface(metric, {_at(point): point.artifact.figures[metric.name].p50 for point in points}, ", median")
        for metric in catalog.of_kind(TimingMetric)
        if metric.chart
    ]
    return [*found, _surface(rate, {_at(point): point.figures[rate.name] for point in points})]


def _at(point: Point) -> tuple[int, int]:
    return point.batch, point.prompt_tokens


def _surface(metric: Metric, estimates: Mapping[tuple[int, int], Estimate], which: str = "") -> Surface:
    """Lay out estimates by batch size and length of prompt; shades go with the logarithm."""
    low, high = (choose(each.value for each in estimates.values()) for choose in (min, max))
    span = math.log(high / low) if 0 < low < high < math.inf else 0.0
    best = high if metric.better == "higher" else low
    cells = {
        at: Cell(
            metric.unit.write(estimate.value),
            units.interval(estimate, metric.unit.write),
            abs(math.log(estimate.value / best)) / span if span else 0.0,
        )
        for at, estimate in estimates.items()
    }
    batches, prompts = sorted({batch for batch, _ in estimates}), sorted({prompt for _, prompt in estimates})
    rows = tuple((batch, tuple(cells.get((batch, prompt)) for prompt in prompts)) for batch in batches)
    title = metric.title[0].upper() + metric.title[1:]
    return Surface(f"{title}{which}", metric.meaning, tuple(prompts), rows)


def single(measured: Latency) -> Latency:
    """Leave the loads of one sequence; all, where there is none."""
    return measured.model_copy(update={"points": measured.single})


def _of_longest_answers(measured: Latency) -> list[Point]:
    output = max(point.output_tokens for point in measured.points)
    return [point for point in measured.points if point.output_tokens == output]


def _axes(points: Sequence[Point]) -> tuple[list[int], list[int]]:
    return sorted({point.batch for point in points}), sorted({point.prompt_tokens for point in points})


_MEMORY, _COMPUTE = "limit of the bandwidth", "limit of the compute rate"
_MOST_LINES = 4  # that can be told apart; a table beside the diagram has all


def over_load(measured: Latency) -> list[Diagram]:
    """Lay out durations over the length of the prompt, above what the device allows, and rates over the batch size.

    Only what was measured at several lengths, or several batch sizes, has a diagram. Answers of the longest length
    stand for all.
    """
    points = _of_longest_answers(measured)
    batches, prompts = _axes(points)
    found: list[Diagram] = []
    if len(prompts) > 1:
        found.append(
            _over_prompts("Time per output token (TPOT), median", catalog.TPOT, _step_floor, _MEMORY, measured, points)
        )
        found.append(
            _over_prompts("Time to first token (TTFT), median", catalog.TTFT, _prompt_floor, _COMPUTE, measured, points)
        )
    if len(batches) > 1:
        rates = []
        for style, prompt in enumerate(_spread_out(prompts)):
            own = sorted((p for p in points if p.prompt_tokens == prompt), key=lambda p: p.batch)
            at = [(p.batch, p.figures["output_tokens_per_second"].value) for p in own]
            rates.append((f"{prompt}-token prompts", style, False, at))
        found.append(_diagram("Output tokens per second", "tokens/s", "sequences at once", batches, rates))
    return found


def _over_prompts(
    title: str,
    metric: TimingMetric,
    floor: Callable[[Latency, Point], float | None],
    bound: str,
    measured: Latency,
    points: Sequence[Point],
) -> Diagram:
    """Lay out a duration over the length of the prompt, a line for each batch size, above what the device allows."""
    batches, prompts = _axes(points)
    lines: list[tuple[str, int, bool, Sequence[tuple[int, float]]]] = []
    for style, batch in enumerate(_spread_out(batches)):
        own = sorted((point for point in points if point.batch == batch), key=lambda point: point.prompt_tokens)
        label = "1 sequence" if batch == 1 else f"{batch} sequences"
        lines.append((label, style, False, [(p.prompt_tokens, p.artifact.figures[metric.name].p50.value) for p in own]))
        bounds = [(point.prompt_tokens, floor(measured, point)) for point in own]
        known = [(at, bound) for at, bound in bounds if bound is not None]
        if known:
            lines.append((f"{label}: {bound}", style, True, known))
    return _diagram(title, "ms", "prompt tokens", prompts, lines, bound=bound, logarithmic=True)


def _step_floor(measured: Latency, point: Point) -> float | None:
    """Milliseconds in which the measured bandwidth reads what a decode step reads."""
    if measured.bandwidth is None:
        return None
    return 1e3 * float(point.figures["bytes_read_per_token"]) / measured.bandwidth.working_set_bytes_per_second


def _prompt_floor(measured: Latency, point: Point) -> float | None:
    """Milliseconds in which the measured rate makes the products of the weights for the prompts."""
    rate = None if measured.compute is None else measured.compute.rate
    each = measured.footprint.multiply_adds_per_token
    if rate is None or each is None:
        return None
    return 1e3 * 2 * each * point.batch * point.prompt_tokens / rate


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
    *,
    bound: str = "",
    logarithmic: bool = False,
) -> Diagram:
    """Lay out lines of (place on the axis, value); places are evenly spaced, whatever lies between them.

    A logarithmic height is of whole decades: what is measured may be far above its bound.
    """
    values = [value for *_, line in lines for _, value in line]
    positive = [value for value in values if value > 0]
    if logarithmic and positive:
        low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        high = max(high, low + 1)
        levels = {10.0**decade: 100 * (decade - low) / (high - low) for decade in range(low, high + 1)}
    else:
        low, high = 0, 0
        top = max(values) or 1.0
        levels = {0.0: 0.0, top / 2: 50.0, top: 100.0}

    def height(value: float) -> float:
        if high > low:
            return max((math.log10(value) - low) / (high - low), 0.0) if value > 0 else 0.0
        return value / max(levels)

    across = {place: 20 + 76 * number / (len(at) - 1) for number, place in enumerate(at)}
    made = tuple(
        Line(
            label,
            style,
            is_bound,
            tuple(
                (across[x], height(value), f"{label}, {x} {axis}: {units.significant(value)} {unit}")
                for x, value in line
            ),
        )
        for label, style, is_bound, line in lines
    )
    return Diagram(
        title=title,
        description=f"{title}, by {axis}: " + "; ".join(line.places[-1][2] for line in made if line.places),
        levels=tuple(
            Mark(share, f"{value:g} {unit}" if logarithmic else _level(value, unit)) for value, share in levels.items()
        ),
        axis=axis,
        ticks=tuple(Mark(across[place], str(place)) for place in at),
        lines=made,
        bound=bound if any(line.bound for line in made) else "",
    )


def _level(value: float, unit: str) -> str:
    return f"{units.significant(value, 2)} {unit}" if value else "0"
