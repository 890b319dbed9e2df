"""Products and factors of the compiled loops against numpy's."""

from __future__ import annotations

import numpy as np
import pytest

from llmforge.quantization.rounding import products

SHAPES = [(1, 1, 1), (13, 200, 7), (100, 300, 130), (200, 129, 97)]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_products_are_those_of_numpy_on_any_number_of_threads(m: int, k: int, n: int) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    found = products.multiply(a, b, threads=1)
    np.testing.assert_allclose(found, a.astype(np.float64) @ b, atol=1e-4)
    for threads in (2, 5):
        np.testing.assert_array_equal(products.multiply(a, b, threads=threads), found)
    turned = np.ascontiguousarray(a.T).T, np.ascontiguousarray(b[:, ::-1])[:, ::-1]
    np.testing.assert_array_equal(products.multiply(*turned, threads=2), found)


def test_threads_that_begin_when_all_is_done_change_nothing() -> None:
    """Of 40 threads for each product most come too late for it, and some in the midst of the next one."""
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((512, 400)).astype(np.float32), rng.standard_normal((400, 500)).astype(np.float32)
    expected = products.multiply(a, b, threads=1)
    for _ in range(40):
        np.testing.assert_array_equal(products.multiply(a, b, threads=40), expected)


@pytest.mark.parametrize("n", [5, 130, 300])
def test_zeros_of_triangles_are_not_multiplied(n: int) -> None:
    """Whatever stands there far enough from the diagonal is not read."""
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((30, n)).astype(np.float32), rng.standard_normal((n, n)).astype(np.float32)
    upper, lower = np.triu(b), np.tril(b)
    np.testing.assert_allclose(products.multiply(a, upper, threads=2, form="upper"), a @ upper, atol=1e-3)
    np.testing.assert_allclose(products.multiply(a, lower, threads=2, form="lower"), a @ lower, atol=1e-3)
    if n == 300:
        upper[299, 0] = lower[0, 299] = np.nan
        assert np.isfinite(products.multiply(a, upper, threads=2, form="upper")).all()
        assert np.isfinite(products.multiply(a, lower, threads=2, form="lower")).all()


@pytest.mark.parametrize("n", [1, 7, 128, 129, 400])
def test_an_inverse_factor_is_that_of_the_matrix(n: int) -> None:
    x = np.random.default_rng(2).standard_normal((2 * n + 3, n))
    matrix = x.T @ x
    found = products.inverse_factor(matrix.copy(), threads=1)
    assert found is not None
    assert not np.tril(found, -1).any()
    np.testing.assert_allclose(found.T @ matrix @ found, np.eye(n), atol=1e-9)
    again = products.inverse_factor(matrix.copy(), threads=3)
    assert again is not None
    np.testing.assert_array_equal(found, again)
    matrix[n // 2, n // 2] = -1
    assert products.inverse_factor(matrix, threads=2) is None


@pytest.mark.skipif(not products.has_bf16(), reason="needs AVX512-BF16")
@pytest.mark.parametrize(("tokens", "m", "n"), [(0, 3, 4), (1, 1, 1), (37, 20, 50), (600, 70, 131)])
def test_sums_over_tokens_are_of_bf16_and_in_fp32(tokens: int, m: int, n: int) -> None:
    rng = np.random.default_rng(3)
    wide, b = (
        rng.standard_normal((tokens, m + 5)).astype(np.float32),
        rng.standard_normal((tokens, n)).astype(np.float32),
    )
    a, total = wide[:, 5:], np.ones((m, n), np.float32)
    products.add_tokens(total, a, b, threads=2)
    np.testing.assert_allclose(total, 1 + rounded(a).T @ rounded(b), atol=2e-5 * tokens**0.5)
    other = np.ones((m, n), np.float32)
    products.add_tokens(other, a, b, threads=1)
    np.testing.assert_array_equal(total, other)
    moments = np.zeros((n, n), np.float32)
    products.add_tokens(moments, b, b, threads=2)
    np.testing.assert_allclose(np.tril(moments), np.tril(rounded(b).T @ rounded(b)), atol=2e-5 * tokens**0.5)


def rounded(x: np.ndarray) -> np.ndarray:
    """To the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)
