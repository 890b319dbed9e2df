"""Factors of activations: the formula, powers of two, and the choice of alpha."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmforge.quantization import smoothing
from llmforge.quantization.grids import Float32
from llmforge.quantization.statistics import Smoothing, factors


@settings(max_examples=50, deadline=None)
@given(alpha=st.floats(0, 1), seed=st.integers(0, 999), k=st.integers(2, 40))
def test_ratios_are_those_of_the_formula_within_a_factor_of_2(alpha: float, seed: int, k: int) -> None:
    random = np.random.default_rng(seed)
    inputs, weights = (np.exp(random.normal(0, 2, k)).astype(np.float32) for _ in range(2))
    found = factors(smoothing.exponents(inputs, weights, alpha))
    wanted = inputs.astype(np.float64) ** alpha / weights.astype(np.float64) ** (1 - alpha)
    ratios = np.log2(found / wanted)
    assert ratios.max() - ratios.min() <= 1 + 1e-5
    assert abs(np.log2(found).mean()) <= 1
    assert (np.frexp(found)[0] == 0.5).all()  # powers of two


def test_features_of_zeros_stay() -> None:
    found = smoothing.exponents(np.array([0, 8, 64, 2], np.float32), np.array([1, 0, 1, 1], np.float32), 0.5)
    assert found.tolist()[:2] == [0, 0]
    assert found[2] > found[3]
    assert not smoothing.exponents(np.zeros(3, np.float32), np.ones(3, np.float32), 0.5).any()


def outliers(seed: int = 0) -> tuple[Float32, list[Float32]]:
    """Inputs of which one feature is 100 times as large as the others, and the weights of two readers."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((64, 48)).astype(np.float32)
    x[:, 5] *= 100
    return x, [(random.standard_normal((n, 48)) * 0.1).astype(np.float32) for n in (32, 400)]


@pytest.mark.parametrize("per_token", [False, True])
def test_the_alpha_of_least_loss_is_chosen(per_token: bool) -> None:
    x, weights = outliers()
    peaks = np.abs(x).max(0)
    best = smoothing.choose(x, peaks, weights, Smoothing("int8", per_token))
    losses = {
        alpha: smoothing.choose(x, peaks, weights, Smoothing("int8", per_token, alpha)).loss
        for alpha in smoothing.ALPHAS
    }
    assert best.alpha is not None
    assert best.loss == min(losses.values()) == losses[best.alpha]
    assert best.loss < best.loss_before / 8
    assert best.factors[5] >= 4 * np.median(best.factors)


def test_the_loss_is_that_of_rounded_products() -> None:
    """Against a loop over tokens and outputs, in fp64."""
    x, weights = outliers()
    weight = weights[0]
    peaks = np.abs(x).max(0) * 1.5  # other tokens of the text had more
    found = smoothing.choose(x, peaks, [weight], Smoothing("int8", per_token=False, alpha=0.5))
    step = float((peaks / found.factors).max()) / 127
    losses = []
    for token in x.astype(np.float64):
        read = np.rint(token / found.factors / step) * step
        exact, made = [], []
        for row in weight.astype(np.float64):
            heavy = row * found.factors
            own = np.abs(heavy).max() / 127
            exact.append(token @ row)
            made.append(read @ (np.rint(heavy / own) * own))
        losses.append(np.square(np.subtract(made, exact)).sum() / np.square(exact).sum())
    assert found.loss == pytest.approx(float(np.mean(losses)), rel=1e-3)


def test_none_is_chosen_where_none_helps() -> None:
    x = np.ones((8, 4), np.float32)
    found = smoothing.choose(x, np.abs(x).max(0), [np.eye(4, dtype=np.float32)], Smoothing("int8", per_token=True))
    assert found.alpha is None
    assert not found.exponents.any()
