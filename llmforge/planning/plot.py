"""Draw the roofline of a plan: its steps under the ceilings of the device, as SVG or as an HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmforge.base.errors import UsageError
from llmforge.metrics.units import significant
from llmforge.planning.deployment import DeploymentPlan
from llmforge.planning.roofline import StepCost
from llmforge.report.drawing import Mark
from llmforge.report.render import environment_of

SUFFIXES = (".svg", ".html")
_WIDTH, _HEIGHT = 820.0, 420.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 80.0, 30.0, 62.0, 52.0  # margins
_APART = 22.0  # that labels keep from each other


@dataclass(frozen=True)
class RooflineDot:
    """One step: its place, its label and where that stands."""

    x: float
    y: float
    label: str
    label_x: float
    label_y: float
    anchor: str
    kind: str  # "decode" or "prefill"
    title: str


@dataclass(frozen=True)
class Roof:
    """A ceiling of bandwidth and one of operations, as a broken line, and its label."""

    points: str
    label: str
    kind: str  # "peak" or "reached"


@dataclass(frozen=True)
class Chart:
    """The roofline of one plan; lengths in the units of the drawing."""

    title: str
    subtitle: str
    top: float  # of this chart in the drawing
    x_ticks: tuple[Mark, ...]
    y_ticks: tuple[Mark, ...]
    roofs: tuple[Roof, ...]
    dots: tuple[RooflineDot, ...]
    frame: tuple[float, float, float, float]  # left, top, width, height


def write(plans: Sequence[DeploymentPlan], path: Path) -> None:
    """Draw `plans` below each other into `path`, by its suffix as SVG or as HTML.

    Raises:
        UsageError: another suffix, or the file cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: the file name must end in {' or '.join(SUFFIXES)}")
    charts = [chart(plan, index * _HEIGHT) for index, plan in enumerate(plans)]
    environment = environment_of("llmforge.planning", "llmforge.report")
    text = environment.get_template(f"roofline{path.suffix}.jinja").render(
        charts=charts, width=_WIDTH, height=_HEIGHT * len(charts), model=plans[0].shape.name
    )
    try:
        path.write_text(text.strip() + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


@dataclass(frozen=True)
class _Axes:
    """Logarithmic axes: decades of operations for each byte, and of operations a second."""

    first: int
    last: int
    low: int
    high: int

    def x(self, intensity: float) -> float:
        """Place operations for each byte."""
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (math.log10(intensity) - self.first) / (self.last - self.first)

    def y(self, rate: float) -> float:
        """Place operations a second; what is lower than the axis stands on it."""
        decades = max(math.log10(rate), self.low) - self.low
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * decades / (self.high - self.low)


def chart(plan: DeploymentPlan, top: float = 0.0) -> Chart:
    """Lay out the roofline of `plan`: the steps that fit, and the one that was asked for."""
    ceilings = plan.ceilings
    shown = [each for each in plan.decodes if each.fits or each.batch == plan.workload.batch]
    steps = [("decode", f"{each.batch:,}", each.step) for each in shown]
    steps.append(("prefill", f"prompt of {plan.workload.prompt:,}", plan.asked.prefill))
    intensities = [ceilings.balance, *(step.intensity for _, _, step in steps)]
    rates = [step.operations / step.seconds for _, _, step in steps]
    axes = _Axes(
        first=math.floor(math.log10(min(intensities)) - 0.1),
        last=math.ceil(math.log10(max(intensities)) + 0.1),
        low=math.floor(math.log10(min(rates))),
        high=math.ceil(math.log10(ceilings.rate) + 0.15),
    )
    device = plan.target.title if plan.asked.ranks == 1 else f"{plan.target.title}, one of {plan.asked.ranks}"
    reached = (ceilings.bandwidth * ceilings.bandwidth_share, ceilings.rate * ceilings.rate_share)
    dots: list[RooflineDot] = []
    for kind, label, step in steps:
        dots.append(_dot(kind, label, step, axes, dots))
    return Chart(
        title=f"{plan.shape.name} on {device}",
        subtitle=plan.scheme.words(),
        top=top,
        x_ticks=tuple(Mark(axes.x(10.0**each), _power(each)) for each in range(axes.first, axes.last + 1)),
        y_ticks=tuple(Mark(axes.y(10.0**each), _power(each - 12)) for each in range(axes.low, axes.high + 1)),
        roofs=(_roof("peak", ceilings.bandwidth, ceilings.rate, axes), _roof("reached", *reached, axes)),
        dots=tuple(dots),
        frame=(_LEFT, _TOP, _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM),
    )


def _roof(kind: str, bandwidth: float, rate: float, axes: _Axes) -> Roof:
    """Draw the line min(bandwidth · intensity, rate), from where it enters the frame."""
    start = max(10.0**axes.first, 10.0**axes.low / bandwidth)
    corners = ((start, bandwidth * start), (rate / bandwidth, rate), (10.0**axes.last, rate))
    points = " ".join(f"{axes.x(intensity):.1f},{axes.y(value):.1f}" for intensity, value in corners)
    label = f"{kind}: {significant(rate / 1e12, 4)} T operations/s, {significant(bandwidth / 1e9, 4)} GB/s"
    return Roof(points, label, kind)


def _dot(kind: str, label: str, step: StepCost, axes: _Axes, others: Sequence[RooflineDot]) -> RooflineDot:
    """Place a step and its label, below the dot unless another label is there."""
    rate = step.operations / step.seconds
    x, y = axes.x(step.intensity), axes.y(rate)
    free = all(math.hypot(x - other.x, y - other.y) >= _APART for other in others if other.label)
    title = (
        f"{kind} {label}: {significant(rate / 1e12)} T operations/s, {significant(step.intensity)} operations a byte, "
        f"bound by {step.bound}"
    )
    if kind == "prefill":
        return RooflineDot(x, y, label, x, y + 20, "middle", kind, title)
    return RooflineDot(x, y, label if free else "", x + 9, y + 12, "start", kind, title)


def _power(exponent: int) -> str:
    """Write 10**exponent plainly."""
    return f"{10**exponent:,}" if exponent >= 0 else f"{10.0**exponent:.{-exponent}f}"
