"""Compiled rounding gives the bits of the loop in numpy: every instruction set, dtype, grid and shape."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from llmforge import native
from llmforge.base.errors import UsageError
from llmforge.native import rounding
from llmforge.quantization import grids, trellis
from llmforge.quantization.grid import Grid

pytestmark = pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not compiled here")

GRIDS = [Grid(bits, size, symmetric) for bits in (4, 8) for size in (16, 64, 128) for symmetric in (True, False)]
DTYPES = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(params=native.INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Round with the kernels of one instruction set."""
    try:
        yield native.instruction_set(request.param)
    except UsageError:
        pytest.skip("this processor cannot run them")
    finally:
        native.instruction_set()


def numbers(dtype: np.dtype[np.generic], shape: tuple[int, int]) -> NDArray[np.generic]:
    """Draw finite numbers of all magnitudes, ties between both signs, ties between codes, zeros of both signs."""
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 1 << 8 * dtype.itemsize, shape, np.uint64)
    drawn = bits.astype(f"u{dtype.itemsize}").view(dtype)
    drawn[~np.isfinite(drawn.astype(np.float32))] = 0
    drawn[::4] = rng.standard_normal(shape)[::4].astype(dtype)
    drawn[1::8] = rng.choice([-1.0, 1.0, -0.0, 0.0, 0.5], shape)[1::8].astype(dtype)
    drawn[2::8] = (rng.integers(-15, 16, shape)[2::8] / 2).astype(dtype)
    drawn[3::16] = np.ldexp(rng.standard_normal(shape)[3::16], -146).astype(np.float32).astype(dtype)
    return drawn


def same(one: grids.QuantizedMatrix, other: grids.QuantizedMatrix) -> None:
    for part in ("codes", "scales", "zero_points"):
        a, b = getattr(one, part), getattr(other, part)
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes(), part


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_is_rounded_as_in_numpy(kernels: str, dtype: np.dtype[np.generic], grid: Grid) -> None:
    for k in (256, 131, 7, 1):
        weight = numbers(dtype, (96, k))
        assert rounding.takes(weight)
        same(grids.round_to_nearest(weight, grid), grids._round_in_numpy(weight, grid))
        same(grids.round_to_nearest(weight.T, grid), grids._round_in_numpy(weight.T, grid))


@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=40),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    st.sampled_from(GRIDS),
)
@settings(deadline=None)
def test_any_matrix_is_rounded_as_in_numpy(weight: NDArray[np.float32], grid: Grid) -> None:
    with np.errstate(over="ignore"):
        same(grids.round_to_nearest(weight, grid), grids._round_in_numpy(weight, grid))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(kernels: str, dtype: np.dtype[np.generic], wrong: float) -> None:
    for place in ((0, 0), (2, 36), (1, 17)):
        weight = np.zeros((3, 37), dtype)
        weight[place] = wrong
        with pytest.raises(ValueError, match="NaN or infinity"):
            grids.round_to_nearest(weight, GRIDS[0])


def test_every_number_of_two_bytes_is_widened_exactly(kernels: str) -> None:
    """A code of 8 bits that is 0 or 255 next to one alone shows the scale, and that shows the number."""
    for dtype in DTYPES[1:]:
        every = np.arange(1 << 16).astype(np.uint16).view(dtype)
        every = every[np.isfinite(every.astype(np.float32))][:, None]
        same(grids.round_to_nearest(every, GRIDS[0]), grids._round_in_numpy(every, GRIDS[0]))


@pytest.mark.parametrize("count", [0, 2, 62, 64, 130])
def test_codes_are_packed_in_pairs(kernels: str, count: int) -> None:
    codes = np.random.default_rng(1).integers(0, 16, (5, count), np.uint8)
    packed = rounding.pack(codes)
    assert packed is not None
    assert packed.tobytes() == (codes[:, ::2] | codes[:, 1::2] << 4).tobytes()
    turned = rounding.pack(np.asfortranarray(codes))
    assert turned is not None
    assert turned.tobytes() == packed.tobytes()


@pytest.mark.parametrize("bits", [4, 5])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (37, 19), (1, 1), (16, 16)])
def test_codes_of_a_trellis_are_chosen_as_in_numpy(kernels: str, bits: int, n: int, k: int) -> None:
    """Numbers between and beyond levels, on them and in the middle of two, rows that cost nothing."""
    rng = np.random.default_rng(n)
    for drawn in (rng.standard_normal((n, k)) * 50, rng.integers(-280, 280, (n, k)) / 2, np.full((n, k), 1e15)):
        values = drawn.astype(np.float32)
        for weights in (rng.uniform(0, 2, (n, k)), np.ones((n, k)), np.zeros((n, k))):
            found = rounding.nearest_levels(values, weights.astype(np.float32), bits)
            np.testing.assert_array_equal(found, trellis.nearest(values, weights.astype(np.float32), bits))
