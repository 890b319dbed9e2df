"""2:4 sparsity: what is kept, and what SparseGPT gains over keeping the largest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmforge.quantization import sparsity
from llmforge.quantization.sparsity import SparseMatrix


def inputs(k: int, seed: int = 0) -> np.ndarray:
    """Tokens whose features go together, one of them always 0."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((4 * k, k // 4)) @ random.standard_normal((k // 4, k))
    x += 0.3 * random.standard_normal(x.shape)
    x[:, 3] = 0
    return x.astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 5), groups=st.integers(1, 40), seed=st.integers(0, 99))
def test_two_of_every_four_are_kept(n: int, groups: int, seed: int) -> None:
    weight = np.random.default_rng(seed).standard_normal((n, 4 * groups)).astype(np.float32)
    x = inputs(4 * groups, seed)
    pruned, damping = sparsity.sparsegpt(weight, x.T @ x, 0.01)
    dense = pruned.dense()
    assert damping == 0.01
    assert sparsity.is_sparse(dense.T)
    assert not sparsity.is_sparse(weight.T)
    kept = np.zeros(dense.shape, bool)
    np.put_along_axis(
        kept.reshape(n, groups, 4), pruned.places.reshape(n, groups, 2).astype(np.int64), values=True, axis=2
    )
    again = SparseMatrix.of(dense, kept)
    np.testing.assert_array_equal(again.values, pruned.values)
    np.testing.assert_array_equal(again.places, pruned.places)


def test_features_that_do_not_go_together_keep_the_largest_as_they_are() -> None:
    weight = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
    pruned, _ = sparsity.sparsegpt(weight, np.eye(32, dtype=np.float32), 0.01)
    largest = sparsity.magnitude(weight)
    np.testing.assert_array_equal(pruned.places, largest.places)
    np.testing.assert_allclose(pruned.values, largest.values, rtol=1e-6)


def test_what_is_left_makes_up_for_what_goes() -> None:
    k = 192  # more than a block of columns
    x, weight = inputs(k), np.random.default_rng(1).standard_normal((24, k)).astype(np.float32)
    moments = x.T @ x
    pruned, _ = sparsity.sparsegpt(weight, moments, 0.01)
    lost = sparsity.output_error(weight, pruned.dense(), moments)
    assert lost < 0.4 * sparsity.output_error(weight, sparsity.magnitude(weight).dense(), moments)
    assert lost == pytest.approx(
        float(np.square(x @ (weight - pruned.dense()).T).sum() / np.square(x @ weight.T).sum()), rel=1e-3
    )


def test_the_first_column_is_the_obs_update() -> None:
    """Of one group the first weight goes, by an update that is known in closed form: δ = -w₀ / [H⁻¹]₀₀ · H⁻¹[:, 0]."""
    random = np.random.default_rng(0)
    x = random.standard_normal((50, 4)).astype(np.float32)
    x[:, 2] += 0.9 * x[:, 0]
    moments = (x.T @ x).astype(np.float32)
    weight = np.array([[0.01, 0.02, 1.0, -1.0]], np.float32)
    pruned, _ = sparsity.sparsegpt(weight, moments, 1e-9)
    inverse = np.linalg.inv(moments.astype(np.float64))
    left = weight[0] - weight[0, 0] / inverse[0, 0] * inverse[0]
    rest = np.linalg.inv(moments[1:, 1:].astype(np.float64))
    left[1:] -= left[1] / rest[0, 0] * rest[0]
    np.testing.assert_allclose(pruned.dense()[0], [0, 0, left[2], left[3]], rtol=1e-4, atol=1e-6)


def test_moments_that_cannot_be_factored_take_more_damping() -> None:
    moments = np.ones((8, 8), np.float32) * 1e6 - 10 * np.eye(8, dtype=np.float32)
    _, damping = sparsity.sparsegpt(np.ones((2, 8), np.float32), moments, 1e-9)
    assert damping > 1e-9


@pytest.mark.parametrize("shape", [(2, 6), (2, 8)])
def test_what_has_no_groups_or_no_numbers_is_refused(shape: tuple[int, int]) -> None:
    moments = np.full((shape[1], shape[1]), np.nan if shape[1] == 8 else 1, np.float32)
    with pytest.raises(ValueError, match="groups of 4"):
        sparsity.sparsegpt(np.ones(shape, np.float32), moments, 0.01)
