"""Refusals of TensorRT, by feature of the graph and compute capability: data, asked before a weight is read.

Each rule was seen with TensorRT-RTX 1.7.1.116, which builds ahead of time, on SM75, 80, 86, 89 and 120; a test holds
every cell of the table against that builder. For TensorRT itself, and for SM90 and SM100, the rules are taken over and
not verified.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from llmforge.backends.record import ARITHMETIC
from llmforge.backends.tensorrt import HEAD_DIMS, INT4_SM
from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, operators
from llmforge.ir.operators import standard
from llmforge.targets import Target

_FIXED = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16  # what a cache may hold that is updated in place


@dataclass(frozen=True)
class Rule:
    """Where what is `named` builds: from compute capability `least_sm` on, or nowhere (None); why, and what to do."""

    named: str
    reason: str
    hint: str
    least_sm: int | None = None

    def refuses(self, sm: str) -> bool:
        """Say whether a device of compute capability `sm`, "89", cannot run the feature."""
        return self.least_sm is None or int(sm) < self.least_sm


class Feature(enum.Enum):
    """A property of a graph that not every device, or no device, has code for, and where it has."""

    BF16 = Rule("bf16", "the device has no bf16 arithmetic", "compute in fp16", ARITHMETIC["bf16"])
    FP32_MATMUL = Rule("fp32 matrix product", "TensorRT has no fp32 matrix product for Turing", "compute in fp16", 80)
    INT4 = Rule(
        "int4 weights",
        "TensorRT has no int4 weights for Turing",
        "store weights with `quantize-channels: {dtype: int8}`, or in fp16",
        INT4_SM,
    )
    FP8 = Rule("fp8", "the device has no fp8 arithmetic", "quantize weights to int4 or int8", ARITHMETIC["fp8"])
    FP4 = Rule("fp4", "the device has no fp4 arithmetic", "quantize weights to int4 or fp8", ARITHMETIC["fp4"])
    E8M0 = Rule(
        "e8m0 scales", "the ONNX parser does not support e8m0 tensors", "choose a format whose scales are fp16 or fp8"
    )
    ZERO_POINT = Rule(
        "zero points", "weights are symmetric: a zero point other than 0 is rejected", "quantize symmetrically"
    )
    FP32_ATTENTION = Rule(
        "fp32 attention", "no fused attention kernel computes in fp32", "add `lower-precision: {dtype: fp16}`"
    )
    HEAD_DIM = Rule(
        "head size",
        "fused attention kernels exist for 16 to 256 channels a head, in multiples of 8",
        "use another engine",
    )
    HEAD_DIMS_DIFFER = Rule(
        "keys and values of different sizes", "keys and values must have the same shape", "use another engine"
    )
    SOFTCAP = Rule("softcap", "the ONNX parser rejects a soft cap of attention scores", "use another engine")
    PAST = Rule(
        "past and present of attention",
        "the ONNX parser takes attention with one output only",
        "use TensorScatter for the cache",
    )
    PADDED_LENGTHS = Rule(
        "lengths of padded keys",
        "the ONNX parser drops nonpad_kv_seqlen without an error: results would be wrong",
        "use a mask",
    )
    QUANTIZED_UPDATE = Rule(
        "quantized cache updated in place",
        "an update in place takes fp32, fp16 and bf16 caches",
        "leave the KV cache in the model's dtype",
    )
    FOREIGN_OPERATOR = Rule("operators outside ONNX", "it needs a plugin", "remove the pass that writes it")


def check(model: ir.Model, target: Target, title: str) -> None:
    """Return if `title` ("TensorRT-RTX") builds the lowered `model` for `target`; no weight is read.

    Raises:
        UnsupportedError: it does not; every feature that is refused is named, with the first node or tensor of each.
    """
    sm = target.require_gpu().sm
    refused = {feature: where for feature, where in reversed(list(features(model))) if feature.value.refuses(sm)}
    if not refused:
        return
    ordered = [feature for feature in Feature if feature in refused]
    listed = "; ".join(f"{feature.value.named} ({refused[feature]}): {feature.value.reason}" for feature in ordered)
    raise UnsupportedError(
        f"{title} cannot build this engine for target {target.name} (SM{sm}): {listed}",
        hint="; ".join(dict.fromkeys(feature.value.hint for feature in ordered)),
    )


def features(model: ir.Model) -> Iterator[tuple[Feature, str]]:
    """Find every feature of the table in a lowered `model`, and where: the name of a node or a tensor."""
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    for node in model.graph.all_nodes():
        yield from ((feature, f"node {node.name}") for feature in _of_node(node))
        values += node.outputs
    for value in values:
        if value.dtype is not None and (feature := _BY_DTYPE.get(value.dtype)) is not None:
            yield feature, f"tensor {value.name}"


_BY_DTYPE = {
    ir.DataType.BFLOAT16: Feature.BF16,
    ir.DataType.INT4: Feature.INT4,
    ir.DataType.UINT4: Feature.INT4,
    ir.DataType.FLOAT8E4M3FN: Feature.FP8,
    ir.DataType.FLOAT4E2M1: Feature.FP4,
    ir.DataType.FLOAT8E8M0: Feature.E8M0,
}


def _of_node(node: ir.Node) -> Iterator[Feature]:
    match operators.view(node):
        case standard.MatMul(x=a) | standard.Gemm(a=a) if a.dtype is ir.DataType.FLOAT:
            yield Feature.FP32_MATMUL
        case standard.DequantizeLinear(zero_points=ir.Value()):
            yield Feature.ZERO_POINT
        case standard.TensorScatter() as update if update.past.dtype not in (None, *_FIXED):
            yield Feature.QUANTIZED_UPDATE
        case standard.OnnxAttention() as attention:
            yield from _of_attention(attention)
        case _ if node.domain:
            yield Feature.FOREIGN_OPERATOR


def _of_attention(attention: standard.OnnxAttention) -> Iterator[Feature]:
    """Look at Attention of opset 23 or 24: q, k, v [batch, heads, tokens, channels], mask, past, lengths."""
    if attention.q.dtype is ir.DataType.FLOAT:
        yield Feature.FP32_ATTENTION
    query, key, value = ((graph.dims(each) or (None,))[-1] for each in (attention.q, attention.k, attention.v))
    if isinstance(query, int) and query not in HEAD_DIMS:
        yield Feature.HEAD_DIM
    if key != value:
        yield Feature.HEAD_DIMS_DIFFER
    if attention.softcap != 0.0:
        yield Feature.SOFTCAP
    if attention.past_key is not None or len([output for output in attention.node.outputs if output.name]) > 1:
        yield Feature.PAST
    if attention.nonpad_kv_seqlen is not None:
        yield Feature.PADDED_LENGTHS
