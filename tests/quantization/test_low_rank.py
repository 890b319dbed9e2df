"""Low-rank correction: the closed form is the least error in the norm of the inputs, and fits the bytes it is given."""

from __future__ import annotations

import numpy as np
import pytest

from llmforge.quantization import low_rank
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import Float32, dequantize, round_to_nearest
from llmforge.quantization.low_rank import Dtype

N, K, RANK = 48, 64, 6


def weighted() -> tuple[Float32, Float32]:
    """Return an error [N, K] and moments [K, K] of inputs, some of which are much larger than others."""
    random = np.random.default_rng(0)
    x = random.standard_normal((400, K)) @ random.standard_normal((K, K)) * np.geomspace(0.05, 5, K)
    return random.standard_normal((N, K)).astype(np.float32), (x.T @ x / len(x)).astype(np.float32)


def cost(error: Float32, moments: Float32) -> float:
    return float(np.trace(error.astype(np.float64) @ moments @ error.T))


def test_the_closed_form_is_the_bound_of_its_rank() -> None:
    """Eckart and Young: what is left are the other singular values of E·H^½, the symmetric root as published."""
    error, moments = weighted()
    values, vectors = np.linalg.eigh(moments.astype(np.float64))
    spectrum = np.linalg.svd(error @ (vectors * np.sqrt(values)) @ vectors.T, compute_uv=False)
    a, b = low_rank.fit(error, moments, RANK)
    assert (a.shape, b.shape) == ((K, RANK), (RANK, N))
    assert cost(error - (a @ b).T, moments) == pytest.approx(np.square(spectrum[RANK:]).sum(), rel=1e-4)


def test_no_other_product_of_the_rank_is_better() -> None:
    error, moments = weighted()
    a, b = low_rank.fit(error, moments, RANK)
    best, random = cost(error - (a @ b).T, moments), np.random.default_rng(1)
    for size in (1e-3, 1e-2, 1e-1, 1.0):  # near and far
        for _ in range(20):
            near = (
                a + size * a.std() * random.standard_normal(a.shape),
                b + size * b.std() * random.standard_normal(b.shape),
            )
            assert cost(error - (near[0] @ near[1]).T, moments) > best
    left, values, right = np.linalg.svd(error, full_matrices=False)  # best without a look at inputs
    plain = (left[:, :RANK] * values[:RANK]) @ right[:RANK]
    assert cost(error - plain, moments) > 1.2 * best
    for _ in range(20):  # a random A, and the best B that goes with it
        other = random.standard_normal((K, RANK))
        fitted = np.linalg.solve(other.T @ moments @ other, other.T @ moments @ error.T)
        assert cost(error - (other @ fitted).T, moments) > best


def test_int8_factors_are_codes_and_fitted_to_one_another() -> None:
    error, moments = weighted()
    a, b = low_rank.fit(error, moments, 32, "int8")
    for factor in (a.T, b.T):
        again = dequantize(round_to_nearest(np.ascontiguousarray(factor), low_rank.INT8))
        np.testing.assert_allclose(again, factor, atol=1e-6)
    exact = cost(error - np.transpose(np.matmul(*low_rank.fit(error, moments, 32))), moments)
    assert exact < cost(error - (a @ b).T, moments) < 1.1 * exact


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_ranks_fill_the_bits_and_never_exceed_them(dtype: Dtype) -> None:
    for bits, k, n in ((0.1, 4096, 4096), (0.5, 4096, 14336), (1.0, 1024, 512), (0.01, 256, 256)):
        rank = low_rank.rank_within(bits, k, n, dtype)
        step = 1 if dtype == "fp32" else 32
        assert low_rank.bits_of(rank, k, n, dtype) <= bits < low_rank.bits_of(rank + step, k, n, dtype)
        assert rank % step == 0
    assert low_rank.rank_within(100, 64, 32, "fp32") == 32  # no more than the matrix has


def test_correcting_rounded_codes_says_what_both_ways_leave() -> None:
    random, (_, moments) = np.random.default_rng(2), weighted()
    weight = random.standard_normal((N, K)).astype(np.float32)
    grid = Grid(3, 32, symmetric=False)
    codes = dequantize(round_to_nearest(weight, grid))
    found = low_rank.compute_correction(weight, codes, moments, RANK, "fp32", grid)
    whole = cost(weight, moments)
    assert found.before == pytest.approx(cost(weight - codes, moments) / whole, rel=1e-3)
    assert found.after == pytest.approx(cost(weight - codes - found.product(), moments) / whole, rel=1e-3)
    assert found.after < found.before
    larger = dequantize(round_to_nearest(weight, Grid(4, 32, symmetric=False)))
    share = cost(weight - larger, moments) / cost(weight - codes, moments)
    bits = low_rank.bits_of(RANK, K, N, "fp32")
    assert found.codes == pytest.approx(found.before * share**bits, rel=1e-3)


def test_moments_that_are_not_positive_are_refused() -> None:
    error, moments = weighted()
    with pytest.raises(np.linalg.LinAlgError):
        low_rank.fit(error, moments - 100 * np.eye(K, dtype=np.float32), RANK)
