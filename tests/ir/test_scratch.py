"""Arrays that are kept in a file: what comes back, what is computed once, and that nothing stays behind."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from llmforge.ir import graph
from llmforge.ir.derived import Derived, Stored, by_output_fp32, side_by_side, swapped
from llmforge.ir.scratch import Scratch
from llmforge.quantization import initializers
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import QuantizedMatrix, pack
from llmforge.quantization.methods.rtn import Rtn


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, ml_dtypes.bfloat16, np.int64])
def test_arrays_come_back_as_they_were_put_there(tmp_path: Path, dtype: type) -> None:
    scratch = Scratch(tmp_path)
    first, second = np.arange(24).reshape(2, 3, 4).astype(dtype), np.arange(7).astype(dtype)[::2]
    scratch.put("first", first)
    scratch.put("second", second)
    for key, array in (("second", second), ("first", first), ("second", second)):
        found = scratch.get(key)
        assert found is not None
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
    assert scratch.get("third") is None


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    scratch.put("a", np.zeros(1 << 16))
    assert list(tmp_path.iterdir()) == []  # the file has no name: the system frees it with the process


def test_a_matrix_is_quantized_once(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)  # [K, N]
    calls: list[str] = []

    class Counting(Rtn):
        def quantize(self, weight: NDArray[np.float32], grid: Grid, *inputs: object) -> QuantizedMatrix:
            calls.append("quantize")
            return super().quantize(weight, grid)

    def registered(scratch: Scratch | None) -> list[ir.TensorProtocol]:
        model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 24}), ir_version=12)
        value = graph.initializer(model, "w", weight)
        matrix = initializers.quantized(value, Counting(), Grid(4, 32, False))
        parts = initializers.register(model, value, matrix, scratch=scratch)
        assert parts.zero_points is not None
        return [graph.tensor(part) for part in (parts.codes, parts.scales, parts.zero_points)]

    wanted = pack(Rtn().quantize(weight.T, Grid(4, 32, False)))
    for scratch, times in ((Scratch(tmp_path), 1), (None, 3)):
        calls.clear()
        tensors = registered(scratch)
        for _ in range(3):  # a proof, another one, the engine
            codes, scales, points = (tensor.numpy() for tensor in tensors)
            np.testing.assert_array_equal(codes, wanted.codes)
            np.testing.assert_array_equal(scales, wanted.scales)
            np.testing.assert_array_equal(points, wanted.zero_points)
            for tensor in tensors:
                assert isinstance(tensor, ir.LazyTensor)
        assert len(calls) == times


def test_a_derived_tensor_is_computed_once(tmp_path: Path) -> None:
    calls: list[str] = []

    def doubled(arrays: object) -> NDArray[np.float32]:
        calls.append("doubled")
        return 2 * arrays[0]  # type: ignore[index, no-any-return]

    operand = ir.Tensor(np.arange(6, dtype=np.float32))
    tensor = Derived(doubled, [operand], ir.DataType.FLOAT, ir.Shape([6]), "twice", scratch=Scratch(tmp_path))
    for _ in range(3):
        np.testing.assert_array_equal(tensor.numpy(), 2 * operand.numpy())
    assert calls == ["doubled"]


def test_an_idle_scratch_is_given_nothing_and_still_read(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    operand = ir.Tensor(np.arange(6, dtype=np.float32))

    def made(name: str) -> Derived:
        return Derived(
            swapped, [ir.Tensor(operand.numpy()[None])], operand.dtype, ir.Shape([6, 1]), name, scratch=scratch
        )

    kept, other = made("kept"), made("other")
    expected = kept.numpy()
    with scratch.idle():
        np.testing.assert_array_equal(kept.numpy(), expected)
        np.testing.assert_array_equal(other.numpy(), expected)
    assert scratch.get(kept) is not None
    assert scratch.get(other) is None
    np.testing.assert_array_equal(other.numpy(), expected)
    assert scratch.get(other) is not None


def test_a_matrix_is_quantized_once_where_the_scratch_is_idle(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 24}), ir_version=12)
    value = graph.initializer(model, "w", weight)
    matrix = initializers.quantized(value, Rtn(), Grid(4, 32, False))
    calculate, calls = matrix.calculate, []

    def counted() -> QuantizedMatrix:
        calls.append("calculate")
        return calculate()

    matrix.calculate = counted
    scratch = Scratch(tmp_path)
    parts = initializers.register(model, value, matrix, scratch=scratch)
    assert parts.zero_points is not None
    with scratch.idle():
        read = [graph.tensor(part).numpy() for part in (parts.codes, parts.scales, parts.zero_points)]
    wanted = pack(Rtn().quantize(weight.T, Grid(4, 32, False)))
    for got, expected in zip(read, (wanted.codes, wanted.scales, wanted.zero_points), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert calls == ["calculate"]
    assert all(scratch.get((matrix, part)) is None for part in ("codes", "scales", "zero_points"))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_stored_weight_is_widened_by_output(dtype: type) -> None:
    rng = np.random.default_rng(3)
    stored = [rng.standard_normal((n, 8)).astype(dtype) for n in (4, 2, 6)]
    halves = [
        Stored(lambda array=array: [array], ir.DataType.FLOAT, ir.Shape((8, len(array))), "w", transposed=True)
        for array in stored
    ]
    side = Derived(side_by_side, halves, ir.DataType.FLOAT, ir.Shape((8, 12)), "side")
    plain = ir.Tensor(rng.standard_normal((8, 5)).astype(np.float32))
    for tensor in (halves[0], side, plain):
        np.testing.assert_array_equal(by_output_fp32(tensor), tensor.numpy().T)
