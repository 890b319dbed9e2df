"""Rounding in view of mean and square of each input: against GPTQ with the matrix that they make, and what it keeps."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from llmforge.quantization import rounding
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import dequantize, round_to_nearest
from llmforge.quantization.methods.base import InputStatistic, LayerInputs
from llmforge.quantization.methods.gptq import SHRINKAGE, Curvature
from llmforge.quantization.methods.importance import DAMPING, STEPS, Importance

GRIDS = [
    Grid(4, 32, False, "int8"),
    Grid(6, 32, True, "int8"),
    Grid(5, 64, False),
    Grid(4, 32, True, "int8", trellis=True),
    Grid(5, 32, True, "int8", trellis=True),
]


def inputs(tokens: int, k: int) -> NDArray[np.float32]:
    """Inputs [tokens, K] that share no more than a mean; channels differ in size, as in a transformer."""
    random = np.random.default_rng(0)
    scale, mean = np.exp(random.standard_normal((2, k)))
    return (random.standard_normal((tokens, k)) * scale + mean).astype(np.float32)


def seen(x: NDArray[np.float32]) -> LayerInputs:
    return LayerInputs(len(x), False, {InputStatistic.SUMS: x.sum(0), InputStatistic.SQUARES: np.square(x).sum(0)})


def weights(n: int, k: int) -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal((n, k)).astype(np.float32)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.format.name)
def test_it_is_gptq_with_a_diagonal_and_the_mean(grid: Grid) -> None:
    """By the dense factor of that matrix; a code may differ where a rounding error decides."""
    x, weight = inputs(500, 80), weights(70, 80)
    mean, square = x.mean(0), np.square(x).mean(0)
    dense = np.outer(mean, mean) / (1 - SHRINKAGE)  # which the factor takes away again
    dense[np.diag_indices(80)] = square + DAMPING * square.mean()
    curvature = Curvature.of(dense.astype(np.float32), 1e-9)
    factor = np.ascontiguousarray(curvature.inverse.T)
    columns = rounding.OrderedColumns(curvature.order.astype(np.int32), curvature.hessian, factor)
    expected, _ = rounding.choose(weight, columns, grid, steps=STEPS, sweeps=0)
    found = Importance().quantize(weight, grid, seen(x))
    assert np.mean(found.codes != expected.codes) < 0.005
    np.testing.assert_array_equal(found.scales, expected.scales)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.format.name)
def test_outputs_keep_their_mean_and_lose_less(grid: Grid) -> None:
    x, weight = inputs(500, 192), weights(64, 192)
    ours, nearest = (
        (dequantize(made) - weight) @ x.T
        for made in (Importance().quantize(weight, grid, seen(x)), round_to_nearest(weight, grid))
    )
    assert np.square(ours).mean() < 0.5 * np.square(nearest).mean()
    assert np.abs(ours.mean(1)).mean() < 0.1 * np.abs(nearest.mean(1)).mean()


@pytest.mark.parametrize("unseen", [LayerInputs(0, False, {}), seen(np.zeros((3, 64), np.float32))])
def test_a_weight_whose_inputs_are_unknown_is_rounded_to_nearest(unseen: LayerInputs) -> None:
    weight = weights(5, 64)
    found, nearest = Importance().quantize(weight, GRIDS[0], unseen), round_to_nearest(weight, GRIDS[0])
    np.testing.assert_array_equal(found.codes, nearest.codes)
    np.testing.assert_array_equal(found.scales, nearest.scales)


def test_what_is_not_finite_is_refused() -> None:
    x, weight = inputs(9, 64), weights(5, 64)
    with pytest.raises(ValueError, match="NaN or infinity"):
        Importance().quantize(np.full_like(weight, np.nan), GRIDS[0], seen(x))
    with pytest.raises(ValueError, match="NaN or infinity"):
        Importance().quantize(weight, GRIDS[0], seen(np.full_like(x, np.inf)))
