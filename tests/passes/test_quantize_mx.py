"""quantize-mx: MXFP4 and MXFP8 weights and activations, against loops."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray

from llmforge.ir import expansion, graph
from llmforge.ir.mx import LARGEST
from llmforge.ir.operators.canonical import MxLinear
from llmforge.passes import QuantizeMx
from llmforge.quantization import mx
from llmforge.rewrite.pass_base import Budget
from llmforge.verification.verifier import Verifier

from ..models import graphs

LOOSE = Budget(kld_mean=1.0)
SIZES = graphs.Llama(layers=1, hidden=64, mlp=64)
TEXT = np.random.default_rng(0).integers(0, 96, 24)
DTYPES = ["fp4", "fp8"]


def rounded(block: NDArray[np.float32], dtype: ir.DataType) -> NDArray[np.float64]:
    """Round one block: under the smallest power of two that holds it, to the nearest code."""
    exponent, peak = -126, float(np.abs(block).max())
    while 2.0**exponent * LARGEST[dtype] < peak:
        exponent += 1
    codes = (block.astype(np.float64) / 2.0**exponent).astype(np.float32).astype(dtype.numpy())
    return codes.astype(np.float64) * 2.0**exponent


@pytest.mark.parametrize("size", [1e-30, 0.02, 1.0, 7e4])
@pytest.mark.parametrize("name", DTYPES)
def test_blocks_have_the_smallest_power_of_two_that_holds_them(name: str, size: float) -> None:
    dtype = mx.DTYPES[name]
    weight = (size * np.random.default_rng(0).standard_normal((96, 3))).astype(np.float32)
    weight[:32, 0] = 0
    weight[32:64, 1] = size * LARGEST[dtype]  # a quotient that is a power of two where `size` is
    scales, codes = mx.SCALES[dtype]([weight]), mx.CODES[dtype]([weight])
    assert (scales.dtype, scales.shape) == (ml_dtypes.float8_e8m0fnu, (3, 3))
    made = codes.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, axis=0)
    for block, column in np.ndindex(3, 3):
        rows = slice(32 * block, 32 * block + 32)
        assert np.array_equal(made[rows, column], rounded(weight[rows, column], dtype))


@pytest.mark.parametrize("weight", [np.full((32, 1), np.nan), np.ones((33, 1)), np.ones(32)])
def test_what_has_no_blocks_of_numbers_is_refused(weight: NDArray[np.float64]) -> None:
    with pytest.raises(ValueError, match="blocks of 32"):
        mx.SCALES[mx.FP8]([weight])


@pytest.mark.parametrize("name", DTYPES)
def test_every_layer_is_rewritten_once(name: str) -> None:
    model = graphs.llama(SIZES)
    step = QuantizeMx(budget=LOOSE, dtype=name, exclude=("*.down_proj.*",))  # type: ignore[arg-type]
    changes = step.run(model, graphs.CPU)
    assert len(changes.rewritten) == 6
    assert {each.node: each.reason for each in changes.skipped} == {
        "l0_down_node": "model.layers.0.mlp.down_proj.weight is excluded by '*.down_proj.*'"
    }
    first = MxLinear.all(model)[0]
    assert first.codes.dtype == mx.DTYPES[name]
    assert (graph.dims(first.codes), graph.dims(first.scales)) == ((64, 64), (2, 64))
    assert first.scales.dtype == ir.DataType.FLOAT8E8M0
    assert graph.sources(first.codes) == ["model.layers.0.self_attn.q_proj.weight"]
    assert not step.demands()
    before = graph.fingerprint(model)
    assert not step.run(model, graphs.CPU)
    assert graph.fingerprint(model) == before


def test_matrices_that_blocks_do_not_divide_stay() -> None:
    changes = QuantizeMx(budget=LOOSE).run(graphs.llama(graphs.Llama(layers=1, hidden=48, mlp=64)), graphs.CPU)
    assert "its 48 input features are not a multiple of 32" in {each.reason for each in changes.skipped}


@pytest.mark.parametrize("name", DTYPES)
def test_the_numerics_hold(name: str, tmp_path: Path) -> None:
    model = graphs.llama(SIZES)
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[TEXT])
    step = QuantizeMx(budget=LOOSE, dtype=name)  # type: ignore[arg-type]
    verifier.check(step, model, step.run(model, graphs.CPU))


@pytest.mark.parametrize("name", DTYPES)
def test_what_is_read_is_rounded_as_weights_are(name: str) -> None:
    """ONNX Runtime's CPU kernels, with blocks whose quotient is a power of two, or next to one, and of zeros."""
    dtype, k, n = mx.DTYPES[name], 128, 8
    random = np.random.default_rng(1)
    weight = random.standard_normal((k, n)).astype(np.float32)
    x = random.standard_normal((1, 300, k)).astype(np.float32)
    x *= np.ldexp(np.float32(1), random.integers(-40, 40, (1, 300, 1))).astype(np.float32)
    x[0, 0] = 0
    for row, beside in enumerate((0.0, np.inf, -np.inf), 1):
        peaks = np.ldexp(np.float32(LARGEST[dtype]), np.arange(4, dtype=np.int32) * 7 - 9).astype(np.float32)
        x[0, row, ::32] = np.nextafter(peaks, np.float32(beside)) if beside else peaks
        x[0, row].reshape(4, 32)[:, 1:] = peaks[:, None] * random.uniform(-0.9, 0.9, (4, 31))
    value = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["b", "s", k]))
    model = ir.Model(ir.Graph([value], [], nodes=[], opset_imports={"": 24, "llmforge": 1}), ir_version=11)
    parts = {"codes": mx.CODES[dtype]([weight]), "scales": mx.SCALES[dtype]([weight])}
    operands = [graph.initializer(model, part, ir.Tensor(array, name=part)) for part, array in parts.items()]
    node = ir.node("MxLinear", [value, *operands], domain="llmforge", name="layer")
    model.graph.append(node)
    node.outputs[0].name, node.outputs[0].type = "y", value.type
    node.outputs[0].shape = ir.Shape(["b", "s", n])
    model.graph.outputs.append(node.outputs[0])
    proto = ir.to_proto(expansion.expand(model))
    [found] = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})

    read = np.stack([rounded(block, dtype) for block in x.reshape(-1, 32)]).reshape(x.shape)
    wide = parts["codes"].astype(np.float64) * np.repeat(parts["scales"].astype(np.float64), 32, axis=0)
    wanted, size = read @ wide, np.abs(read) @ np.abs(wide)
    assert (np.abs(found - wanted) <= 1e-5 * size).all()
