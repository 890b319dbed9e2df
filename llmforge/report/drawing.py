"""Parts that all charts are made of: scales, figures placed on them, labelled marks.

Lengths across a drawing are percentages of its width, so that it fits any window; heights are shares of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from llmforge.metrics.intervals import Estimate

Kind = Literal["better", "worse", "same"]  # "same": its interval holds 0
_NARROWEST = 300.0  # pixels of a drawing in a window of 390
_LETTER = 6.5  # pixels of a letter of a label, about


@dataclass(frozen=True)
class Scale:
    """Values along an axis; what lies beyond it ends at its end."""

    low: float
    high: float

    @classmethod
    def over(cls, figures: Iterable[Estimate], *more: float) -> Scale:
        """Span figures, their bounds and `more` values, as far as they are finite."""
        drawn = [bound for each in figures for bound in (each.value, each.low, each.high) if bound is not None]
        finite = [value for value in (*drawn, *more) if math.isfinite(value)] or [0.0]
        return cls(min(finite), max(finite))

    def wider(self, margin: float) -> Scale:
        """Leave a share of the span free on both sides."""
        span = (self.high - self.low) or abs(self.high) or 1.0
        return Scale(self.low - margin * span, self.low + span * (1 + margin))

    def share(self, value: float) -> float:
        """Give the place of a value, 0 to 1."""
        return min(max((value - self.low) / ((self.high - self.low) or 1.0), 0.0), 1.0)

    def percent(self, value: float) -> float:
        """Give the place of a value, 0 to 100."""
        return 100 * self.share(value)

    def height(self, value: float | None) -> float | None:
        """Give the place of a value, 0 to 1; None where it is none or NaN."""
        return None if value is None or math.isnan(value) else self.share(value)


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
class Placed:
    """A figure of a plot: left edge and width in percent; it and its bounds as shares of the height."""

    left: float
    width: float
    value: float | None  # None: it is NaN, and has no place
    low: float | None
    high: float | None
    title: str
    kind: Kind = "same"  # than the one before

    @property
    def at(self) -> float:
        """Where its figure is drawn, in percent."""
        return self.left + self.width / 2


@dataclass(frozen=True)
class FigurePlot:
    """Figures side by side over an axis."""

    title: str
    description: str
    placed: tuple[Placed, ...]
    ticks: tuple[Mark, ...]
    bottom: str = ""  # of the vertical axis, as written
    top: str = ""
    zero: float = 0.0  # height of 0
    flags: tuple[Flag, ...] = ()
    others: tuple[tuple[str, str], ...] = ()  # letter on the axis, and what it means


def bounds(figure: Estimate) -> tuple[float, float]:
    """Give the bounds of a figure: itself where it has none, and no end where a bound is NaN."""
    low = figure.value if figure.low is None else figure.low
    high = figure.value if figure.high is None else figure.high
    return -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high


def flags(marks: Sequence[Mark]) -> tuple[Flag, ...]:
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
