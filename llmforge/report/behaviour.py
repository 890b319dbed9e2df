"""How behaviour of chats is written: rows of its figures, of its slices, and what of two answers differs."""

from __future__ import annotations

from functools import partial

from llmforge.metrics import catalog, units
from llmforge.metrics.behaviour.outcomes import CHECKS
from llmforge.metrics.behaviour.results import PREFIX, BehaviourResult, OutcomeValues
from llmforge.metrics.metric import Metric
from llmforge.metrics.tasks import ScoreFigures

Row = tuple[str, ...]

SIDES = ("Checkpoint", "Artifact")  # what is held against, and what is measured
_MEASURED = ("DIFFERENCE", "95 % INTERVAL")


def rows(found: BehaviourResult, sides: tuple[str, str] = SIDES) -> list[Row]:
    """Write every figure as a row, the titles first."""
    made: list[Row] = [("FIGURE", "DOCUMENTS", *map(str.upper, sides), *_MEASURED, "WORST SLICE")]
    for name, outcome in found.outcomes.items():
        metric = catalog.named(f"{PREFIX}{name}")
        made.append((metric.title, *_cells(metric, outcome.figures), _worst(metric, outcome)))
    return made


def slice_rows(found: BehaviourResult, sides: tuple[str, str] = SIDES) -> list[Row]:
    """Write the checks of each slice as a row, the titles first; {} where no document has any."""
    outcome = found.outcomes.get(CHECKS)
    if outcome is None:
        return []
    metric = catalog.named(f"{PREFIX}{CHECKS}")
    titles = ("SLICE", "DOCUMENTS", *map(str.upper, sides), *_MEASURED)
    return [titles, *((name, *_cells(metric, figures)) for name, figures in sorted(outcome.slices.items()))]


def title(name: str) -> str:
    """Give the title of an outcome."""
    return catalog.named(f"{PREFIX}{name}").title


def _cells(metric: Metric, figures: ScoreFigures) -> Row:
    write, moved = metric.unit.write, figures.difference
    signed = partial(units.signed, write=write)
    change = ("–", "–") if moved is None else (signed(moved.value), units.interval(moved, signed))
    baseline = "–" if figures.baseline is None else write(figures.baseline.value)
    return units.count(figures.artifact.samples), baseline, write(figures.artifact.value), *change


def _worst(metric: Metric, outcome: OutcomeValues) -> str:
    """Name the slice that lost most."""
    sign = 1 if metric.better == "lower" else -1
    moved = {name: each.difference.value for name, each in outcome.slices.items() if each.difference is not None}
    lost = {name: value for name, value in moved.items() if sign * value > 0}
    if len(outcome.slices) < 2 or not lost:
        return "–"
    worst = max(lost, key=lambda name: sign * lost[name])
    return f"{worst}, {units.signed(lost[worst], metric.unit.write)}"
