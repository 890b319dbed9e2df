from __future__ import annotations

import math

import pytest

from llmforge.metrics import units


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.02104, "0.0210"), (9.996, "10.0"), (99.96, "100"), (2071.4, "2,070"), (3.8e-6, "3.80e-06"),
     (-0.5, "-0.500"), (math.inf, "inf"), (1e-4, "0.000100")],
)  # fmt: skip
def test_significant(value: float, text: str) -> None:
    assert units.significant(value) == text


@pytest.mark.parametrize(
    ("written", "text"),
    [(units.size(999), "999 B"), (units.size(5_087_122), "5.09 MB"), (units.size(70e9), "70.0 GB"),
     (units.duration(4.24), "4.2 s"), (units.duration(185), "3 min 05 s"), (units.duration(7260), "2 h 01 min"),
     (units.ranges((0, 1, 2, 5, 7, 8)), "0–2, 5, 7–8"), (units.ranges((3,)), "3"), (units.ranges(()), ""),
     (units.percent(0.8993), "89.9 %"), (units.times(11.8), "12×"), (units.times(0.83), "0.83×")],
)  # fmt: skip
def test_figures(written: str, text: str) -> None:
    assert written == text
