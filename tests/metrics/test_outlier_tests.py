"""Tests of parts: signs, and how often something is found where nothing is."""

from __future__ import annotations

import numpy as np
import pytest

from llmforge.metrics import outlier_tests
from llmforge.metrics.outlier_tests import ALPHA, RATIO, judge, mostly_above_zero

# Sums of KLD over 48 documents of the sample's evaluation text, 128 tokens each, in nats: what quantize-weights (4
# bits, rounded to nearest) costs in all, and in the queries, keys and values of layer 0.
LOSS = (
    4.216, 2.888, 3.284, 3.588, 3.346, 5.116, 2.784, 3.622, 2.802, 3.028, 3.015, 4.797, 2.427, 3.079, 3.969, 3.030,
    3.613, 3.181, 3.256, 2.697, 2.801, 2.341, 3.463, 3.133, 5.570, 3.391, 3.548, 3.017, 1.755, 3.546, 3.695, 3.779,
    4.339, 3.870, 3.856, 3.727, 3.156, 3.000, 5.368, 4.444, 3.489, 4.158, 3.227, 4.498, 2.745, 3.521, 3.257, 2.547,
)  # fmt: skip
LOST = (
    1.110, 0.501, 0.656, 1.019, 0.663, 2.074, 0.366, 0.981, 0.742, 0.747, 0.547, 0.754, 0.622, 0.890, 1.477, 0.448,
    0.534, 0.978, 0.510, 0.427, 0.543, 0.503, 1.115, 0.780, 0.781, 0.937, 0.608, 0.624, 0.278, 0.936, 0.958, 0.564,
    1.203, 0.690, 0.930, 0.390, 0.781, 0.910, 1.450, 1.303, 0.354, 1.212, 1.032, 0.976, 0.655, 1.087, 0.883, 0.726,
)  # fmt: skip


def test_signs_are_counted() -> None:
    assert mostly_above_zero(np.ones(10)) == 2**-10
    assert mostly_above_zero(np.array([1.0] * 9 + [-100.0])) == 11 * 2**-10
    assert mostly_above_zero(np.zeros(9)) == 1.0


def test_a_part_at_the_margin_is_found_as_seldom_as_promised() -> None:
    """Twenty parts that lose exactly `RATIO` times what they should; documents are drawn from real ones."""
    rng = np.random.default_rng(0)
    lost, loss = np.array(LOST), np.array(LOSS)
    parts, runs, any_found = 20, 2000, 0
    for _ in range(runs):
        drawn = rng.integers(0, len(lost), (parts, len(lost)))
        noise = rng.permuted(np.broadcast_to(lost, (parts, len(lost))), axis=1)  # costs of the format, uncorrelated
        found = [
            judge(lost[own], expected * lost.mean() / expected.mean() / RATIO, loss[own] * 0, level=ALPHA / parts)
            for own, expected in zip(drawn, noise, strict=True)
        ]
        any_found += any(each.stands_out for each in found)
    assert any_found / runs <= ALPHA + 3 * (ALPHA * (1 - ALPHA) / runs) ** 0.5


def test_both_conditions_count() -> None:
    lost = np.array(LOST)
    assert judge(lost, lost / 10, lost, level=1e-3).stands_out
    assert not judge(lost, lost / 2, lost, level=1e-3).stands_out  # its format costs half of it
    assert not judge(lost, lost / 10, lost * 30, level=1e-3).stands_out  # it is a thirtieth of the loss
    assert outlier_tests.worth(3.0) == pytest.approx(0.1)
