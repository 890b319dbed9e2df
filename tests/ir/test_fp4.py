"""NVFP4 written for ONNX Runtime's CPU kernels, and for TensorRT: both are what numpy computes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from llmforge.backends.tensorrt import lower
from llmforge.ir import dialect, graph
from llmforge.ir.fp4 import BLOCK
from llmforge.ir.operators.canonical import Fp4Linear
from llmforge.quantization import nvfp4

CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
K, N = 64, 24


def layer(weight: NDArray[np.float32], peak: float) -> ir.Model:
    """One Fp4Linear, whose input ranges to `peak`."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["b", "s", K]))
    model = ir.Model(ir.Graph([x], [], nodes=[], opset_imports={"": 24, "llmforge": 1}), ir_version=11)
    operands: dict[str, ir.Value | None] = {"x": x}
    for name, array in {
        "codes": nvfp4.codes([weight, nvfp4.scale([weight])]),
        "scales": nvfp4.block_scales([weight, nvfp4.scale([weight])]),
        "weight_scale": nvfp4.scale([weight]),
        "input_scale": np.asarray(nvfp4.tensor_scale(peak)),
    }.items():
        operands[name] = graph.initializer(model, name, ir.Tensor(array, name=name))
    node = ir.node("Fp4Linear", Fp4Linear.ordered(operands), domain="llmforge", name="layer")
    model.graph.append(node)
    y = node.outputs[0]
    y.name, y.type, y.shape = "y", x.type, ir.Shape(["b", "s", N])
    model.graph.outputs.append(y)
    return model


def nearest(value: float) -> float:
    """Round one number to a code; ties go to the one whose index is even."""
    size = min(abs(value), 6.0)
    below = int(np.searchsorted(CODES, size, side="right")) - 1
    above = min(below + 1, len(CODES) - 1)
    low, high = size - CODES[below], CODES[above] - size
    chosen = below if low < high or (low == high and below % 2 == 0) else above
    return float(np.copysign(CODES[chosen], value))


def rounded(x: NDArray[np.float32], peak: float) -> NDArray[np.float64]:
    """Round in blocks, number by number."""
    scale = float(nvfp4.tensor_scale(peak))
    made = np.zeros(x.shape)
    for place in np.ndindex(*x.shape[:-1], x.shape[-1] // BLOCK):
        block = slice(place[-1] * BLOCK, (place[-1] + 1) * BLOCK)
        numbers = x[place[:-1]][block].astype(np.float64)
        own = min(np.abs(numbers).max() / 6 / scale, 448.0)
        step = float(np.float32(own).astype(ml_dtypes.float8_e4m3fn)) * scale
        if step:
            made[place[:-1]][block] = [nearest(number / step) * step for number in numbers]
    return made


@pytest.fixture
def inputs() -> NDArray[np.float32]:
    """Tokens of all sizes, among them zeros, one beyond the calibrated range, and ties."""
    random = np.random.default_rng(0)
    x = (random.standard_normal((2, 5, K)) * 10.0 ** random.integers(-2, 1, (2, 5, 1))).astype(np.float32)
    x[1, 2] = 0
    x[0, 1, :BLOCK] = 0
    x[1, 4] *= 1e4
    x[0, 0, :8] = [6, 0.25, -0.75, 1.25, 1.75, 2.5, -3.5, 5]
    x[0, 0, 8:BLOCK] = 0.1
    return x


def on_cpu(model: ir.Model, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Run the expansion, optimized: what is read is not rounded to int8."""
    session = onnxruntime.InferenceSession(ir.to_proto(dialect.expand(model)).SerializeToString())
    made: NDArray[np.float32] = session.run(None, {"x": inputs})[0]
    return made


PEAK = 6 * 448 / 256.0  # its scale is a power of two, so that ties stay ties


def test_on_a_cpu_it_is_what_numpy_computes(inputs: NDArray[np.float32]) -> None:
    weight = np.random.default_rng(1).standard_normal((K, N)).astype(np.float32)
    made = on_cpu(layer(weight, PEAK), inputs)
    codes, blocks = nvfp4.codes([weight, nvfp4.scale([weight])]), nvfp4.block_scales([weight, nvfp4.scale([weight])])
    dequantized = codes.astype(np.float64) * np.repeat(blocks.astype(np.float64), BLOCK, 0) * nvfp4.scale([weight])
    expected = rounded(inputs, PEAK) @ dequantized
    assert (np.abs(made - expected) <= 1e-5 * np.abs(expected).max(-1, keepdims=True)).all()
    assert not made[1, 2].any()


class DynamicQuantize(OpRun):  # type: ignore[misc]
    """TensorRT's operator, by its documentation, in types of ml_dtypes."""

    op_domain = ""

    def _run(self, x: Any, scale: Any, axis: int = -1, block_size: int = 16, scale_type: int = 17) -> tuple[Any, Any]:
        assert (axis, block_size, scale_type) == (-1, BLOCK, int(ir.DataType.FLOAT8E4M3FN))
        blocks = x.reshape(*x.shape[:-1], -1, block_size)
        steps = np.minimum(np.abs(blocks).max(-1) / 6 / scale, 448).astype(ml_dtypes.float8_e4m3fn)
        own = steps.astype(np.float32)[..., None] * scale
        ratio = np.divide(blocks, own, out=np.zeros_like(blocks), where=own > 0)
        return np.clip(ratio, -6, 6).astype(ml_dtypes.float4_e2m1fn).reshape(x.shape), steps


DynamicQuantize.__name__ = "TRT_FP4DynamicQuantize"


def test_what_tensorrt_reads_is_the_canonical_graph(inputs: NDArray[np.float32]) -> None:
    """The lowered graph, in ONNX's reference evaluator, with TensorRT's own operator by its documentation."""
    weight = np.random.default_rng(1).standard_normal((K, N)).astype(np.float32)
    model = layer(weight, PEAK)
    lowered, _ = lower.rewrite(model, 8)
    evaluator = ReferenceEvaluator(ir.to_proto(lowered), new_ops=[DynamicQuantize])
    [made] = evaluator.run(None, {"x": inputs})
    expected = on_cpu(model, inputs)
    assert (np.abs(made - expected) <= 1e-5 * np.abs(expected).max(-1, keepdims=True)).all()
