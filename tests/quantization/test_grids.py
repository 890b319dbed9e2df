"""Grids, rounding to nearest, packing, and ONNX Runtime's reading of what was packed."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from llmforge.quantization.grid import Grid, Scale
from llmforge.quantization.grids import (
    SUPERBLOCK,
    dequantize,
    pack,
    round_to_nearest,
    rows,
    split,
    stack,
    stored,
    unpack,
)

GRIDS = st.builds(
    Grid, bits=st.sampled_from([3, 4, 5, 6, 8]), block_size=st.sampled_from([16, 32]), symmetric=st.booleans()
)
# Ordinary weights, zeros, and magnitudes at both ends of fp32 (but for subnormal scales, which have few bits).
WEIGHTS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=40),
    elements=st.one_of(
        st.just(0.0),
        st.floats(-4, 4, width=32).map(lambda w: w if abs(w) > 2.0**-100 else 0.0),
        st.floats(2.0**-100, 2.0**-66, width=32),
        st.floats(2.0**100, 2.0**126, width=32).map(lambda w: -w),
    ),
)


def naive_rtn(weight: NDArray[np.float32], grid: Grid) -> NDArray[np.float64]:
    """Dequantized weights, one at a time, from the definition of the grids."""
    out = np.zeros(weight.shape)
    top, middle = 2**grid.bits - 1, 2 ** (grid.bits - 1)
    for n in range(weight.shape[0]):
        for start in range(0, weight.shape[1], grid.block_size):
            block = weight[n, start : start + grid.block_size].astype(np.float64)
            if grid.symmetric:
                scale, zero = block[np.abs(block).argmax()] / -middle, middle
            else:
                low, high = min(block.min(), 0.0), max(block.max(), 0.0)
                scale = (high - low) / top
                zero = round(-low / scale) if scale else 0
            for i, w in enumerate(block):
                code = min(max(round(w / scale) + zero, 0), top) if scale else zero
                out[n, start + i] = (code - zero) * scale
    return out


@given(WEIGHTS, GRIDS)
@settings(deadline=None)
def test_rtn_is_the_naive_loop(weight: NDArray[np.float32], grid: Grid) -> None:
    matrix = round_to_nearest(weight, grid)
    assert matrix.codes.shape == weight.shape
    assert matrix.codes.max() <= grid.top
    assert np.isfinite(matrix.scales).all()
    assert (matrix.scales != 0).all()
    # Rounding in fp32 and in fp64 may part where a weight lies half way between two points: one step, half a step off.
    step = np.repeat(np.abs(matrix.scales), grid.block_size, axis=1)[:, : weight.shape[1]]
    ours, theirs = dequantize(matrix), naive_rtn(weight, grid)
    assert (np.abs(ours - theirs) <= step * 1.001).all()
    assert (np.abs(ours - weight) <= np.abs(theirs - weight) + 1e-4 * step).all()


@given(WEIGHTS, GRIDS)
@settings(deadline=None)
def test_unpack_undoes_pack(weight: NDArray[np.float32], grid: Grid) -> None:
    matrix = round_to_nearest(weight, grid)
    packed = pack(matrix)
    n, k = weight.shape
    blocks = -(-k // grid.block_size)
    assert packed.codes.shape == (n, blocks, grid.block_size * grid.bits // 8)
    assert packed.scales.shape == (n, blocks)
    again = unpack(packed, grid, k)
    np.testing.assert_array_equal(again.codes, matrix.codes)
    np.testing.assert_array_equal(again.scales, matrix.scales)
    assert (again.zero_points is None) == grid.symmetric
    if matrix.zero_points is not None and again.zero_points is not None:
        assert packed.zero_points is not None
        assert packed.zero_points.shape == (n, blocks if grid.bits > 4 else -(-blocks // 2))
        np.testing.assert_array_equal(again.zero_points, matrix.zero_points)


def test_nibbles_are_packed_low_first() -> None:
    weight = np.zeros((1, 16), np.float32)
    weight[0, :3] = [-8, 7, 3]  # scale 1: codes 0, 15, 11, then 8
    packed = pack(round_to_nearest(weight, Grid(4, 16, True)))
    assert packed.codes.tolist() == [[[0xF0, 0x8B, *[0x88] * 6]]]
    assert packed.scales.tolist() == [[1.0]]


def test_the_extreme_weight_is_met_whatever_its_sign() -> None:
    weight = np.linspace(-0.5, 1.0, 32, dtype=np.float32)[None]
    matrix = round_to_nearest(weight, Grid(4, 32, True))
    assert matrix.scales[0, 0] == -0.125
    assert dequantize(matrix)[0, -1] == 1.0


def test_constant_and_zero_blocks_are_exact() -> None:
    weight = np.repeat(np.array([[0.0, 0.3, -0.7]], np.float32), 32, axis=1)
    for symmetric in (True, False):
        np.testing.assert_allclose(dequantize(round_to_nearest(weight, Grid(4, 32, symmetric))), weight, rtol=1e-6)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(0).standard_normal((37, 64)).astype(np.float32)
    whole = round_to_nearest(weight, Grid(4, 32, False))
    monkeypatch.setattr("llmforge.quantization.grids.CHUNK_BYTES", 5 * 64 * 4)
    np.testing.assert_array_equal(round_to_nearest(weight, Grid(4, 32, False)).codes, whole.codes)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(poison: float) -> None:
    weight = np.ones((2, 32), np.float32)
    weight[1, 3] = poison
    with pytest.raises(ValueError, match="NaN or infinity"):
        round_to_nearest(weight, Grid(4, 32, True))


@pytest.mark.parametrize(("bits", "block_size"), [(2, 32), (7, 32), (4, 24), (4, 8), (4, 0)])
def test_grids_without_a_kernel_are_refused(bits: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=r"must be|2 bits go with"):
        Grid(bits, block_size, True)


@pytest.mark.parametrize("symmetric", [True, False])
def test_stack_and_rows_undo_each_other(symmetric: bool) -> None:
    weight = np.random.default_rng(0).standard_normal((12, 40)).astype(np.float32)
    matrix = round_to_nearest(weight, Grid(4, 32, symmetric))
    parts = [rows(matrix, slice(0, 5)), rows(matrix, slice(5, 6)), rows(matrix, slice(6, 12))]
    np.testing.assert_array_equal(dequantize(stack(parts)), dequantize(matrix))
    assert parts[0].shape == (5, 40)
    with pytest.raises(ValueError, match="one grid"):
        stack([matrix, round_to_nearest(weight, Grid(8, 32, symmetric))])


@pytest.mark.parametrize("k", [96, 80, 16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "level"), [(4, 0), (4, 1), (8, 1)])
def test_onnxruntime_multiplies_by_what_dequantize_says(bits: int, level: int, symmetric: bool, k: int) -> None:
    random = np.random.default_rng(k)
    grid, n = Grid(bits, 32, symmetric), 24
    matrix = round_to_nearest(random.standard_normal((n, k)).astype(np.float32), grid)
    assert (matrix.scales < 0).any() == symmetric  # the kernel is asked about negative scales as well
    packed = pack(matrix)
    tensors = {"B": packed.codes, "scales": packed.scales}
    tensors |= {} if packed.zero_points is None else {"zero_points": packed.zero_points}
    node = helper.make_node(
        "MatMulNBits", ["A", *tensors], ["Y"], domain="com.microsoft", N=n, K=k, bits=bits, block_size=32,
        accuracy_level=level,
    )  # fmt: skip
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "product",
        [value("A", TensorProto.FLOAT, [5, k])],
        [value("Y", TensorProto.FLOAT, [5, n])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = random.standard_normal((5, k)).astype(np.float32)
    [y] = session.run(None, {"A": x})
    np.testing.assert_allclose(y, x @ dequantize(matrix).T, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("scale", ["fp16", "bf16", "int8"])
@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=40),
        elements=st.floats(2.0**-20, 2.0**10, width=32).flatmap(lambda s: st.sampled_from([s, -s])),
    ),
    st.sampled_from([32, 128, 512]),
)
@settings(deadline=None)
def test_stored_scales_can_be_stored(scale: Scale, scales: NDArray[np.float32], block_size: int) -> None:
    grid = Grid(4, block_size, True, scale)
    found = stored(scales, grid)
    assert (found != 0).all()
    np.testing.assert_array_equal(stored(found, grid), found)
    if scale == "fp16":
        np.testing.assert_array_equal(found.astype(np.float16).astype(np.float32), found)
        np.testing.assert_allclose(found, scales, rtol=2.0**-11, atol=2.0**-24)
        return
    if scale == "bf16":
        np.testing.assert_array_equal(found.astype(ml_dtypes.bfloat16).astype(np.float32), found)
        np.testing.assert_allclose(found, scales, rtol=2.0**-8)
        return
    codes, supers = split(found, grid)
    factors = (supers.astype(np.uint32) << np.uint32(16)).view(np.float32)
    each = max(SUPERBLOCK // block_size, 1)
    np.testing.assert_array_equal(codes * np.repeat(factors, each, axis=1)[:, : scales.shape[1]], found)
    # half a step of the superscale, or a whole one where it would be 0, or where the largest was cut off
    assert (np.abs(found - scales) <= 1.01 * np.repeat(factors, each, axis=1)[:, : scales.shape[1]]).all()


def test_scales_that_int8_does_not_store_are_refused() -> None:
    with pytest.raises(ValueError, match="not rounded to int8"):
        split(np.array([[0.1234567, 0.7654321]], np.float32), Grid(4, 32, True, "int8"))
    with pytest.raises(ValueError, match="65504"):
        stored(np.array([[1e6]], np.float32), Grid(4, 32, True, "fp16"))


@pytest.mark.parametrize(
    "grid", [Grid(8, 32, True, "int8"), *(Grid(bits, 32, True, "int8", trellis=True) for bits in (4, 5))]
)
def test_numbers_are_made_by_rows_in_little_more_memory_than_they_take(grid: Grid) -> None:
    matrix = round_to_nearest(np.random.default_rng(0).standard_normal((2005, 512)).astype(np.float32), grid)
    tracemalloc.start()
    try:
        values = dequantize(matrix)
        assert tracemalloc.get_traced_memory()[1] < 1.5 * values.nbytes
    finally:
        tracemalloc.stop()
    for rows_ in (slice(0, 16), slice(1984, 2005)):
        np.testing.assert_array_equal(values[rows_], dequantize(rows(matrix, rows_)))
