"""Pareto front of builds or trials, which no other beats in every figure, and its drawing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmforge.farm.worker import Figure
from llmforge.metrics import catalog
from llmforge.metrics.catalog import Deciding
from llmforge.report.drawing import Mark

QUALITY = "kld_mean"
AGAINST = ("tpot_p50_ms", "size_bytes", "usd_per_million_tokens")  # speed, size, cost
_LEFT, _RIGHT, _TOP, _BOTTOM = 74.0, 18.0, 16.0, 46.0  # margins, in the units of the drawing
WIDTH, HEIGHT = 420.0, 300.0


@dataclass(frozen=True)
class ParetoPoint:
    """A build or a trial: what it is called, its group, and what was measured."""

    label: str  # short, in the dot
    title: str
    group: int  # of those that have one color
    figures: Mapping[str, Figure]


@dataclass(frozen=True)
class Dot:
    """A point in a drawing, in its units."""

    x: float
    y: float
    label: str
    title: str
    group: int
    best: bool  # on the front


@dataclass(frozen=True)
class Plot:
    """Two metrics against each other."""

    title: str
    x: Deciding
    y: Deciding
    x_ticks: tuple[Mark, ...]
    y_ticks: tuple[Mark, ...]
    dots: tuple[Dot, ...]
    front: str  # of a polyline
    frame: tuple[float, float, float, float] = (_LEFT, _TOP, WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM)


def front(values: Sequence[Sequence[float]]) -> list[int]:
    """Give the places of those that no other dominates: is as small everywhere, and smaller somewhere."""

    def dominated(own: Sequence[float]) -> bool:
        return any(
            all(a <= b for a, b in zip(other, own, strict=True)) and list(other) != list(own) for other in values
        )

    return [index for index, own in enumerate(values) if not dominated(own)]


def losses(figures: Mapping[str, Figure], names: Sequence[str]) -> tuple[float, ...] | None:
    """Write figures so that less is better; None where one was not measured, or is no number."""
    found = [figures.get(name) for name in names]
    if any(each is None or not math.isfinite(each.value) for each in found):
        return None
    signs = [-1.0 if catalog.named(name).better == "higher" else 1.0 for name in names]
    return tuple(sign * each.value for sign, each in zip(signs, found, strict=True) if each is not None)


def plot(points: Sequence[ParetoPoint], x: str, y: str) -> Plot | None:
    """Draw `y` against `x`; None where fewer than two points have both."""
    measured = [(point, found) for point in points if (found := losses(point.figures, (x, y))) is not None]
    if len(measured) < 2:
        return None
    best = set(front([found for _, found in measured]))
    of_x, of_y = catalog.named(x), catalog.named(y)
    xs = _Axis([point.figures[x].value for point, _ in measured], _LEFT, WIDTH - _RIGHT)
    ys = _Axis([point.figures[y].value for point, _ in measured], HEIGHT - _BOTTOM, _TOP)
    dots = tuple(
        Dot(
            xs.at(point.figures[x].value),
            ys.at(point.figures[y].value),
            point.label,
            f"{point.title}: {of_x.unit.write(point.figures[x].value)}, {of_y.unit.write(point.figures[y].value)}",
            point.group,
            index in best,
        )
        for index, (point, _) in enumerate(measured)
    )
    line = sorted((dot.x, dot.y) for dot in dots if dot.best)
    return Plot(
        title=f"{of_y.title} against {of_x.title.lower() if of_x.title[1:2].islower() else of_x.title}",
        x=of_x,
        y=of_y,
        x_ticks=tuple(Mark(xs.at(value), of_x.unit.write(value)) for value in xs.ticks(4)),
        y_ticks=tuple(Mark(ys.at(value), of_y.unit.write(value)) for value in ys.ticks(5)),
        dots=dots,
        front=" ".join(f"{left:.1f},{top:.1f}" for left, top in line),
    )


class _Axis:
    """A linear axis over some values, with room on both sides, from place `first` to place `last`."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        low, high = min(values), max(values)
        room = 0.12 * (high - low) or 0.5 * abs(high) or 1.0
        self._low, self._high = (max(low - room, 0.0) if low >= 0 else low - room), high + room
        self._first, self._last = first, last

    def at(self, value: float) -> float:
        """Place a value."""
        share = (value - self._low) / (self._high - self._low)
        return self._first + share * (self._last - self._first)

    def ticks(self, most: int) -> list[float]:
        """Choose round values, at most so many."""
        raw = (self._high - self._low) / most
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw)
        first, last = math.ceil(self._low / step), math.floor(self._high / step)
        return [number * step for number in range(first, last + 1)]
