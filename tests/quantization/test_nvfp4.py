"""NVFP4: codes, block scales and the scale of a tensor, against a loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmforge.quantization import nvfp4

POINTS = np.unique([sign * size for sign in (-1, 1) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])


@settings(max_examples=30, deadline=None)
@given(
    blocks=st.integers(1, 3),
    n=st.integers(1, 4),
    size=st.sampled_from([1e-6, 0.02, 1e4]),
    seed=st.integers(0, 999),
    zeros=st.booleans(),
)
def test_every_weight_becomes_the_nearest_point_of_its_block(
    blocks: int, n: int, size: float, seed: int, zeros: bool
) -> None:
    weight = (size * np.random.default_rng(seed).standard_normal((16 * blocks, n))).astype(np.float32)
    if zeros:
        weight[:16, 0] = 0
    scale = nvfp4.scale([weight])
    codes, steps = nvfp4.codes([weight, scale]), nvfp4.block_scales([weight, scale])
    assert codes.shape == weight.shape
    assert steps.shape == (blocks, n)
    if weight.any():
        assert np.abs(steps.astype(np.float32)).max() == 448  # the largest number uses all of the range
    for k, column in np.ndindex(*weight.shape):
        step = float(steps[k // 16, column]) * float(scale)
        own = np.abs(weight[k, column] - POINTS * step).min()
        lost = abs(float(codes[k, column]) * step - weight[k, column])
        assert lost <= own + 1e-5 * abs(weight[k, column])


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_what_checkpoints_divide_by_gives_the_scale_again(peak: float) -> None:
    scale = nvfp4.tensor_scale(peak)
    assert scale == pytest.approx(peak / 6 / 448, rel=1e-6)
    assert np.float32(1) / nvfp4.divisor(scale) == scale


def test_matrices_share_the_scale_of_the_larger() -> None:
    small, large = np.full((16, 1), 2.0, np.float32), np.full((32, 2), -8.0, np.float32)
    assert nvfp4.scale([small, large]) == nvfp4.scale([large]) == nvfp4.tensor_scale(8)
    assert nvfp4.block_scales([small, nvfp4.scale([small, large])]).astype(np.float32).tolist() == [[112.0]]


def test_zeros_have_a_scale() -> None:
    zeros = np.zeros((16, 2), np.float32)
    assert nvfp4.scale([zeros]) == 1
    assert not nvfp4.codes([zeros, nvfp4.scale([zeros])]).astype(np.float32).any()


@pytest.mark.parametrize("weight", [np.full((16, 1), np.nan), np.ones((15, 1)), np.ones(16)])
def test_what_has_no_blocks_of_numbers_is_refused(weight: np.ndarray) -> None:
    with pytest.raises(ValueError, match="blocks of 16"):
        nvfp4.scale([weight])
