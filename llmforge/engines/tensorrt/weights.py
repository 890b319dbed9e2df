"""Quantized weights as TensorRT reads them: DequantizeLinear of int4 codes in front of a MatMul or a Gather.

    y = com.microsoft::MatMulNBits(x, codes, scales[, , , bias])
    becomes  y = Add(MatMul(x, Transpose(DequantizeLinear(codes4, scales))), bias)
    rows = com.microsoft::GatherBlockQuantized(codes, ids, scales)
    becomes  rows = Gather(DequantizeLinear(codes4, scales), ids)

`codes` are uint8, two a byte, around 8; `codes4` int4 [N, K], the same bits with the upper one of each turned, and made
when they are written; `scales` [N, K / block_size]. Every reader has a DequantizeLinear of its own: one for two readers
was computed in whole by TensorRT-RTX 1.7, in every step.

What the builder said of its memory (a matrix [1024, 4096] and what a step needs besides): blocks of 4 bits are
multiplied as they are, and so are int8 and fp8 with one scale a column; blocks of 8 bits are dequantized into memory
first, 8 MiB in every step, so they are refused. Zero points other than 0 are refused by the parser.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph as g
from llmforge.ir.builder import Builder

BITS = 4
BLOCK_SIZES = (32, 64, 128)  # those that were seen to build
_CODES, _ZERO_POINTS, _ORDER, _BIAS = 1, 3, 4, 5  # inputs of MatMulNBits; of GatherBlockQuantized, codes are the first
_UPPER_BITS = 0x88  # of the two codes of a byte: turns 0 … 15 around 8 into int4, -8 … 7


def refusal_reason(node: ir.Node) -> str | None:
    """Say why TensorRT does not read the weights of a MatMulNBits or GatherBlockQuantized; None where it does."""
    bits, block_size = (node.attributes.get_int(name, default) for name, default in (("bits", 4), ("block_size", 128)))
    if bits != BITS:
        return (
            f"blocks of {bits} bits are dequantized into memory in every step; "
            "`bits: 4` and `embedding_bits: 4` or 16 are not, nor is what quantize-channels writes"
        )
    if g.operand(node, _ZERO_POINTS) is not None:
        return "its weights have zero points, which the parser refuses; set `symmetric: true`"
    if node.op_type == "MatMulNBits" and g.operand(node, _ORDER) is not None:
        return "its input features are reordered (g_idx)"
    if block_size not in BLOCK_SIZES:
        return f"its blocks are {block_size} wide; {', '.join(map(str, BLOCK_SIZES))} were seen to build"
    k = _features(node)
    if k % block_size:
        return f"its {k} input features are no multiple of block_size, {block_size}"
    return None


@dataclass
class Weights(Builder):
    """Rewrites quantized weights of `model`."""

    def multiply(self, node: ir.Node) -> str:
        """Replace one MatMulNBits; say what it became."""
        weight = self._dequantized(node, _CODES, g.operand(node, 2))
        weight = self._add(node, "Transpose", [weight], {"perm": [1, 0]})
        [y] = g.insert(node, "MatMul", [node.inputs[0], weight], name=node.name)
        if (bias := g.operand(node, _BIAS)) is not None:
            y.type = node.outputs[0].type
            y = self._add(node, "Add", [y, bias])
        g.supersede(node.outputs[0], y)
        return "MatMulNBits to DequantizeLinear of int4 and MatMul"

    def gather(self, node: ir.Node) -> str:
        """Replace one GatherBlockQuantized; rows come out as [B, S, K], where they were [B, S, blocks, block], too."""
        scales = g.operand(node, 2)
        maker = None if scales is None else scales.producer()
        if maker is not None:  # [V, blocks, 1]: of an embedding that shares its codes with the head
            scales = maker.inputs[0]
        table = self._dequantized(node, 0, scales)
        [rows] = g.insert(node, "Gather", [table, node.inputs[1]], {"axis": 0}, name=node.name)
        old = node.outputs[0]
        ids = node.inputs[1]
        if ids is not None and ids.shape is not None:
            rows.shape = ir.Shape([*ids.shape, _features(node)])
        g.supersede(old, rows)
        return "GatherBlockQuantized to DequantizeLinear of int4 and Gather"

    def _dequantized(self, node: ir.Node, index: int, scales: ir.Value | None) -> ir.Value:
        """Add a DequantizeLinear: [N, K] in the dtype of `scales`."""
        codes = node.inputs[index]
        assert codes is not None
        assert scales is not None
        attributes = {"axis": 1, "block_size": node.attributes.get_int("block_size")}
        weight = self._add(node, "DequantizeLinear", [self._int4(codes, _features(node)), scales], attributes)
        weight.type = scales.type
        return weight

    def _int4(self, codes: ir.Value, k: int) -> ir.Value:
        """Register the codes as int4 [N, K], once for all their readers."""
        tensor, name = codes.const_value, f"{codes.name}.int4"
        assert tensor is not None
        existing = self.model.graph.initializers.get(name)
        if existing is not None:
            return existing
        shape = ir.Shape([int(tensor.shape.numpy()[0]), k])
        lazy = ir.LazyTensor(_signed(tensor, shape, name), ir.DataType.INT4, shape, name=name)
        value = g.initializer(self.model, name, lazy)
        if names := g.sources(codes):
            g.set_sources(value, names)
        return value


def _signed(tensor: ir.TensorProtocol, shape: ir.Shape, name: str) -> Callable[[], ir.TensorProtocol]:
    """Return what turns codes of `tensor` around 8 into int4; both keep the first of two codes in the lower bits."""

    def read() -> ir.TensorProtocol:
        packed = np.ascontiguousarray(tensor.numpy()).reshape(-1) ^ np.uint8(_UPPER_BITS)
        return ir.PackedTensor(packed, ir.DataType.INT4, shape=shape, name=name)

    return read


def _features(node: ir.Node) -> int:
    """Count the input features of a MatMulNBits, or the columns of the table of a GatherBlockQuantized."""
    if node.op_type == "MatMulNBits":
        return node.attributes.get_int("K")
    codes = node.inputs[0]
    dims = None if codes is None else g.dims(codes)
    assert dims
    per_byte = 8 // node.attributes.get_int("bits", 4)
    return int(np.prod([int(str(dim)) for dim in dims[1:]])) * per_byte
