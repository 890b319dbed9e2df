"""Two artifacts beside each other: passes of recipes are told apart by name, and figures are better or worse."""

from __future__ import annotations

from typing import Any

import pytest

from llmforge.gates.comparison import Change, _change, _differing
from llmforge.metrics import catalog
from llmforge.metrics.intervals import Estimate
from llmforge.recipe import GateSpec, misdirected

A: list[dict[str, Any]] = [{"fuse": {}}, {"quantize": {"bits": 4}}, {"quantize": {"bits": 8}}]


@pytest.mark.parametrize(
    ("b", "found"),
    [
        (A, {}),
        (A[1:], {"passes.fuse": ({}, None)}),
        (A[:2], {"passes.quantize (2)": ({"bits": 8}, None)}),
        ([*A, {"lower": {}}], {"passes.lower": (None, {})}),
        ([A[0], {"quantize": {"bits": 2}}, A[2]], {"passes.quantize.bits": (4, 2)}),
    ],
)
def test_passes_are_told_apart_by_name(b: list[Any], found: dict[str, Any]) -> None:
    got = dict(_differing({"passes": A}, {"passes": b}))
    assert got == found


def test_another_order_is_told_place_by_place() -> None:
    got = dict(_differing({"passes": A}, {"passes": [A[1], A[0], A[2]]}))
    assert got["passes.0.fuse"] == ({}, None)
    assert got["passes.1.fuse"] == (None, {})


DEVIATIONS = {"eos_shift_at_ends": 0, "eos_shift_elsewhere": 0, "greedy_ends_added": 0, "greedy_length_ratio": 1}


def moved(metric: str, a: float, b: float, around: float = 0.1) -> Change:
    """Make the change of a metric from A to B, whose interval is so far around it."""
    before, after = (Estimate(value=value, low=value, high=value, samples=40) for value in (a, b))
    difference = Estimate(value=b - a, low=b - a - around, high=b - a + around, samples=40)
    return _change(metric, before, after, difference)


@pytest.mark.parametrize("metric", DEVIATIONS)
@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        (0.8, 0.3, "better"),
        (0.8, 0.0, "better"),  # the checkpoint's own
        (0.3, 0.8, "worse"),
        (0.0, 0.8, "worse"),
        (0.8, 0.75, "neither"),  # the interval has 0 in it
        (0.75, 0.8, "neither"),
        (0.8, -0.1, "neither"),  # crosses it
        (0.1, -0.8, "neither"),
        (0.0, 0.0, "neither"),
    ],
)
def test_nearer_to_the_checkpoint_is_better_on_either_side(
    metric: str, side: int, a: float, b: float, found: str
) -> None:
    ideal = DEVIATIONS[metric]
    change = moved(metric, ideal + side * a, ideal + side * b)
    assert (change.better, change.worse) == (found == "better", found == "worse")


@pytest.mark.parametrize(("metric", "sign"), [("kld_mean", 1), ("top1_agreement", -1), ("delta_p_mean", -1)])
def test_without_an_ideal_the_direction_decides(metric: str, sign: int) -> None:
    assert moved(metric, 0.5, 0.5 - sign * 0.9).better  # across 0, too
    assert moved(metric, 0.5, 0.5 + sign * 0.9).worse


def test_what_is_no_number_is_neither_better_nor_worse() -> None:
    change = moved("eos_shift_elsewhere", 0.8, float("nan"))
    assert (change.better, change.worse) == (False, False)


def test_an_ideal_changes_no_limit_of_a_gate() -> None:
    assert {name: metric.ideal for name, metric in catalog.deciding().items() if metric.ideal is not None} == DEVIATIONS
    for metric in ("eos_shift_elsewhere", "greedy_length_ratio"):
        assert misdirected(metric, GateSpec(min=-1, max=2, rise_max=0.5)) is None
        assert misdirected(metric, GateSpec(drop_max=0.5)) is not None
    for metric in ("eos_shift_at_ends", "greedy_ends_added"):
        assert misdirected(metric, GateSpec(min=-1, max=2, drop_max=0.5)) is None
        assert misdirected(metric, GateSpec(rise_max=0.5)) is not None
    assert catalog.named("adapter.a.eos_shift_elsewhere").ideal == 0
