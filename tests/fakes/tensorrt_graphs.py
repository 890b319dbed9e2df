"""Tiny graphs of the form that is lowered for TensorRT, each with one feature; shapes are fixed, so that no profile is
needed, and a build takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from llmforge.backends.tensorrt.refusals import Feature

F16, F32, BF16, I64 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.BFLOAT16, TensorProto.INT64
NUMPY = {F16: np.float16, F32: np.float32, BF16: ml_dtypes.bfloat16}
K, N = 128, 64  # of matrix products
BATCH, TOKENS, CAPACITY = 1, 4, 16

Tensor = tuple[str, int, Sequence[int]]


def graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    initializers: Sequence[onnx.TensorProto] = (),
) -> ir.Model:
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "graph",
            [helper.make_tensor_value_info(*each) for each in inputs],
            [helper.make_tensor_value_info(*each) for each in outputs],
            initializers,
        ),
        opset_imports=[helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)],
        ir_version=11,
    )
    return ir.from_proto(model)


def stored(name: str, kind: int, shape: Sequence[int], fill: int = 0) -> onnx.TensorProto:
    """Make an initializer whose bytes are all `fill`; 4-bit elements are two a byte."""
    halves = (
        1 if kind in (TensorProto.INT4, TensorProto.FLOAT4E2M1) else 2 * helper.tensor_dtype_to_np_dtype(kind).itemsize
    )
    return helper.make_tensor(name, kind, shape, bytes([fill]) * (int(np.prod(shape)) * halves // 2), raw=True)


def scales(name: str, kind: int, shape: Sequence[int]) -> onnx.TensorProto:
    return helper.make_tensor(name, kind, shape, np.full(shape, 0.01).astype(NUMPY[kind]).tobytes(), raw=True)


def product(dtype: int) -> ir.Model:
    """y = x · W in one dtype."""
    return graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        [("x", dtype, (TOKENS, K))],
        [("y", dtype, (TOKENS, N))],
        [scales("w", dtype, (K, N))],
    )


def codes(kind: int, *, block: int | None, zero_point: int | None = None, scale_kind: int = F16) -> ir.Model:
    """y = x · DequantizeLinear(codes), in blocks along K, or a scale a channel."""
    shape = (N,) if block is None else (K // block, N)
    layout = {"axis": 1} if block is None else {"axis": 0, "block_size": block}
    weights, names = [stored("codes", kind, (K, N), 0x11)], ["codes", "scales"]
    if scale_kind == TensorProto.FLOAT8E8M0:
        weights.append(stored("scales", scale_kind, shape, 0x7F))
        layout["output_dtype"] = F16
    else:
        weights.append(scales("scales", scale_kind, shape))
    if zero_point is not None:
        weights.append(stored("zeros", kind, shape, zero_point))
        names.append("zeros")
    return graph(
        [
            helper.make_node("DequantizeLinear", names, ["w"], name="weights", **layout),
            helper.make_node("MatMul", ["x", "w"], ["y"], name="product"),
        ],
        [("x", F16, (TOKENS, K))],
        [("y", F16, (TOKENS, N))],
        weights,
    )


def quantized_activations(kind: int) -> ir.Model:
    """y = DQ(Q(x)) · DQ(codes): a scale a tensor for x, a scale a channel for the weights."""
    return graph(
        [
            helper.make_node("QuantizeLinear", ["x", "s"], ["xq"], name="quantize", output_dtype=kind),
            helper.make_node("DequantizeLinear", ["xq", "s"], ["xd"], name="activations"),
            helper.make_node("DequantizeLinear", ["codes", "scales"], ["w"], name="weights", axis=1),
            helper.make_node("MatMul", ["xd", "w"], ["y"], name="product"),
        ],
        [("x", F16, (TOKENS, K))],
        [("y", F16, (TOKENS, N))],
        [stored("codes", kind, (K, N), 0x11), scales("scales", F16, (N,)), scales("s", F16, ())],
    )


def four_bit_floats() -> ir.Model:
    """NVFP4: e2m1 codes in blocks of 16, whose e4m3 scales have a scale of their own."""
    return graph(
        [
            helper.make_node("DequantizeLinear", ["block_scales", "scale"], ["scales"], name="scales"),
            helper.make_node("DequantizeLinear", ["codes", "scales"], ["w"], name="weights", axis=0, block_size=16),
            helper.make_node("MatMul", ["x", "w"], ["y"], name="product"),
        ],
        [("x", F16, (TOKENS, K))],
        [("y", F16, (TOKENS, N))],
        [
            stored("codes", TensorProto.FLOAT4E2M1, (K, N), 0x11),
            stored("block_scales", TensorProto.FLOAT8E4M3FN, (K // 16, N), 0x38),
            scales("scale", F16, ()),
        ],
    )


def attention(
    dtype: int = F16,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    channels: int = 32,
    value_channels: int | None = None,
    masked: bool = True,
    past: bool = False,
    lengths: bool = False,
    updated: bool = False,
    int8: bool = False,
    softcap: float = 0.0,
) -> ir.Model:
    """One attention over [1, kv_heads, CAPACITY, channels], with what is asked for beside it."""
    cache = (BATCH, kv_heads, CAPACITY, channels)
    values = (BATCH, kv_heads, CAPACITY, value_channels or channels)
    stored_as = TensorProto.INT8 if int8 else dtype
    inputs: list[Tensor] = [
        ("q", dtype, (BATCH, heads, TOKENS, channels)),
        ("k", stored_as, cache),
        ("v", stored_as, values),
    ]
    nodes, weights, outputs = [], [], [("y", dtype, (BATCH, heads, TOKENS, value_channels or channels))]
    names, made = ["q", "k", "v", "mask" if masked else ""], ["y"]
    if masked:
        inputs.append(("mask", TensorProto.BOOL, (BATCH, 1, TOKENS, CAPACITY)))
    if int8:
        weights.append(scales("s", dtype, ()))
        nodes += [helper.make_node("DequantizeLinear", [name, "s"], [f"{name}d"], name=f"read_{name}") for name in "kv"]
        names[1:3] = ["kd", "vd"]
    if updated:
        inputs += [("new", dtype, (BATCH, kv_heads, TOKENS, channels)), ("at", I64, (BATCH,))]
        nodes += [
            helper.make_node("TensorScatter", [name, "new", "at"], [f"{name}u"], name=f"write_{name}", axis=-2)
            for name in "kv"
        ]
        names[1:3] = ["ku", "vu"]
        outputs += [("ku", dtype, cache), ("vu", dtype, cache)]
    if past:
        inputs += [("pk", dtype, cache), ("pv", dtype, cache)]
        names, made = [*names[:3], "", "pk", "pv"], ["y", "nk", "nv"]
        longer = (BATCH, kv_heads, 2 * CAPACITY, channels)
        outputs += [("nk", dtype, longer), ("nv", dtype, longer)]
    if lengths:
        inputs.append(("lengths", I64, (BATCH,)))
        names += ["", "", "lengths"]
    extra = {"softcap": softcap} if softcap else {}
    nodes.append(helper.make_node("Attention", names, made, name="attention", **extra))
    return graph(nodes, [each for each in inputs if past is False or each[0] != "mask"], outputs, weights)


def quantized_update() -> ir.Model:
    """An int8 cache that new int8 values are written into."""
    cache, new = (BATCH, 2, CAPACITY, 32), (BATCH, 2, TOKENS, 32)
    return graph(
        [
            helper.make_node("QuantizeLinear", ["x", "s"], ["xq"], name="quantize", output_dtype=TensorProto.INT8),
            helper.make_node("TensorScatter", ["cache", "xq", "at"], ["y"], name="write", axis=-2),
        ],
        [("x", F16, new), ("cache", TensorProto.INT8, cache), ("at", I64, (BATCH,))],
        [("y", TensorProto.INT8, cache)],
        [scales("s", F16, ())],
    )


def foreign() -> ir.Model:
    return graph(
        [helper.make_node("FusedMatMul", ["x", "w"], ["y"], name="product", domain="com.microsoft")],
        [("x", F16, (TOKENS, K))],
        [("y", F16, (TOKENS, N))],
        [scales("w", F16, (K, N))],
    )


# what a graph shows → how it is made, and the features of the table that it has; none: every device builds it
GRAPHS: dict[str, tuple[Callable[[], ir.Model], set[Feature]]] = {
    "fp16 product": (partial(product, F16), set()),
    "bf16 product": (partial(product, BF16), {Feature.BF16}),
    "fp32 product": (partial(product, F32), {Feature.FP32_MATMUL}),
    "int8 weights, a scale a channel": (partial(codes, TensorProto.INT8, block=None), set()),
    "int8 weights and activations": (partial(quantized_activations, TensorProto.INT8), set()),
    "int4 weights, blocks of 128": (partial(codes, TensorProto.INT4, block=128), {Feature.INT4}),
    "int4 weights, blocks of 32": (partial(codes, TensorProto.INT4, block=32), {Feature.INT4}),
    "int8 weights, a zero point": (partial(codes, TensorProto.INT8, block=None, zero_point=1), {Feature.ZERO_POINT}),
    "fp8 weights": (partial(codes, TensorProto.FLOAT8E4M3FN, block=None), {Feature.FP8}),
    "fp8 weights and activations": (partial(quantized_activations, TensorProto.FLOAT8E4M3FN), {Feature.FP8}),
    "fp4 weights": (four_bit_floats, {Feature.FP4, Feature.FP8}),
    "mxfp8 weights": (
        partial(codes, TensorProto.FLOAT8E4M3FN, block=32, scale_kind=TensorProto.FLOAT8E8M0),
        {Feature.E8M0, Feature.FP8},
    ),
    "attention with a mask, as of a window": (attention, set()),
    "attention of one KV head": (partial(attention, kv_heads=1), set()),
    "attention without a mask": (partial(attention, masked=False), set()),
    "attention of 16 channels": (partial(attention, channels=16), set()),
    "attention of 256 channels": (partial(attention, channels=256), set()),
    "attention over updated caches": (partial(attention, updated=True), set()),
    "attention over int8 caches": (partial(attention, int8=True), set()),
    "bf16 attention": (partial(attention, BF16), {Feature.BF16}),
    "fp32 attention": (partial(attention, F32), {Feature.FP32_ATTENTION}),
    "attention of 8 channels": (partial(attention, channels=8), {Feature.HEAD_DIM}),
    "attention of 20 channels": (partial(attention, channels=20), {Feature.HEAD_DIM}),
    "attention of 264 channels": (partial(attention, channels=264), {Feature.HEAD_DIM}),
    "keys of 32 channels, values of 16": (partial(attention, value_channels=16), {Feature.HEAD_DIMS_DIFFER}),
    "soft cap": (partial(attention, softcap=30.0), {Feature.SOFTCAP}),
    "past and present": (partial(attention, past=True), {Feature.PAST}),
    "lengths of padded keys": (partial(attention, masked=False, lengths=True), {Feature.PADDED_LENGTHS}),
    "int8 cache updated in place": (quantized_update, {Feature.QUANTIZED_UPDATE}),
    "an operator outside ONNX": (foreign, {Feature.FOREIGN_OPERATOR}),
}
