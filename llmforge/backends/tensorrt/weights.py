"""Quantized weights as TensorRT reads them: DequantizeLinear of int4 codes in front of a MatMul or a Gather.

    y = com.microsoft::MatMulNBits(x, codes, scales[, , , bias])
    becomes  y = Add(MatMul(x, Transpose(DequantizeLinear(codes4, scales))), bias)
    rows = com.microsoft::GatherBlockQuantized(codes, ids, scales)
    becomes  rows = Gather(DequantizeLinear(codes4, scales), ids)

    y = llmforge::Fp4Linear(x, codes, scales, weight_scale, input_scale)
    becomes  y = MatMul(DequantizeLinear(xc, DequantizeLinear(xs, input_scale)),
                        DequantizeLinear(codes, DequantizeLinear(scales, weight_scale)))
             xc, xs = TRT_FP4DynamicQuantize(x, input_scale)

`codes` are uint8, two a byte, around 8; `codes4` int4 [N, K], the same bits with the upper one of each turned, and made
when they are written; `scales` [N, K / block_size]. Every reader has a DequantizeLinear of its own: one for two readers
was computed in whole by TensorRT-RTX 1.7, in every step.

What the builder said of its memory (a matrix [1024, 4096] and what a step needs besides): blocks of 4 bits are
multiplied as they are, and so are int8 and fp8 with one scale a column; blocks of 8 bits are dequantized into memory
first, 8 MiB in every step, so they are refused. Zero points other than 0 are refused by the parser.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph
from llmforge.ir.builder import GraphBuilder, shared
from llmforge.ir.fp4 import BLOCK
from llmforge.ir.operators.canonical import Fp4Linear
from llmforge.ir.operators.contrib import GatherBlockQuantized, MatMulNBits
from llmforge.ir.operators.standard import Reshape

BITS = 4
BLOCK_SIZES = (32, 64, 128)  # those that are supported
_UPPER_BITS = 0x88  # of the two codes of a byte: turns 0 … 15 around 8 into int4, -8 … 7


def reason_against(view: MatMulNBits | GatherBlockQuantized) -> str | None:
    """Say why TensorRT does not read the weights of `view`; None where it does."""
    if view.bits != BITS:
        return (
            f"blocks of {view.bits} bits are dequantized into memory in every step; "
            "`bits: 4` and `embedding_bits: 4` or 16 are not, nor is what quantize-channels writes"
        )
    if view.zero_points is not None:
        return "its weights have zero points, which the parser rejects; set `symmetric: true`"
    if isinstance(view, MatMulNBits) and view.g_idx is not None:
        return "its input features are reordered (g_idx)"
    if view.block_size not in BLOCK_SIZES:
        return f"its blocks are {view.block_size} wide; {', '.join(map(str, BLOCK_SIZES))} are supported"
    k = _features(view)
    if k % view.block_size:
        return f"its {k} input features are not a multiple of block_size, {view.block_size}"
    return None


@dataclass
class QuantizedWeights(GraphBuilder):
    """Rewrites quantized weights of `model`."""

    def multiply(self, product: MatMulNBits) -> str:
        """Replace one MatMulNBits; say what it became."""
        node = product.node
        weight = self._add(node, "Transpose", [self._dequantized(product, product.b, product.scales)], {"perm": [1, 0]})
        [y] = graph.insert(node, "MatMul", [product.a, weight], name=product.name)
        if (bias := product.bias) is not None:
            y.type = product.output.type
            y = self._add(node, "Add", [y, bias])
        graph.replace_value(product.output, y)
        return "MatMulNBits to DequantizeLinear of int4 and MatMul"

    def gather(self, lookup: GatherBlockQuantized) -> str:
        """Replace one GatherBlockQuantized; rows come out as [B, S, K], where they were [B, S, blocks, block], too."""
        shared = Reshape.made(lookup.scales)  # [V, blocks, 1]: of an embedding that shares its codes with the head
        table = self._dequantized(lookup, lookup.data, lookup.scales if shared is None else shared.x)
        [rows] = graph.insert(lookup.node, "Gather", [table, lookup.indices], {"axis": 0}, name=lookup.name)
        if lookup.indices.shape is not None:
            rows.shape = ir.Shape([*lookup.indices.shape, _features(lookup)])
        graph.replace_value(lookup.output, rows)
        return "GatherBlockQuantized to DequantizeLinear of int4 and Gather"

    def multiply_fp4(self, layer: Fp4Linear) -> str:
        """Replace one Fp4Linear; say what it became."""
        node, x = layer.node, layer.x
        attributes = {"axis": -1, "block_size": BLOCK, "scale_type": int(ir.DataType.FLOAT8E4M3FN)}
        codes, scales = graph.insert(node, "TRT_FP4DynamicQuantize", [x, layer.input_scale], attributes, outputs=2)
        read = self._from_fp4(node, codes, scales, layer.input_scale, x, -1)
        weight = self._from_fp4(node, layer.codes, layer.scales, layer.weight_scale, x, 0)
        [y] = graph.insert(node, "MatMul", [read, weight], name=layer.name)
        graph.replace_value(layer.output, y)
        return "Fp4Linear to TRT_FP4DynamicQuantize, DequantizeLinear and MatMul"

    def _from_fp4(
        self, node: ir.Node, codes: ir.Value, scales: ir.Value, scale: ir.Value, like: ir.Value, axis: int
    ) -> ir.Value:
        """Dequantize codes in blocks along `axis`, in the dtype of `like`."""
        steps = self._add(node, "DequantizeLinear", [scales, scale])
        steps.type = ir.TensorType(ir.DataType.FLOAT)
        if (dtype := graph.dtype(like)) != ir.DataType.FLOAT:
            steps = self._add(node, "Cast", [steps], {"to": int(dtype)})
            steps.type = like.type
        made = self._add(node, "DequantizeLinear", [codes, steps], {"axis": axis, "block_size": BLOCK})
        made.type = like.type
        return made

    def _dequantized(self, view: MatMulNBits | GatherBlockQuantized, codes: ir.Value, scales: ir.Value) -> ir.Value:
        """Add a DequantizeLinear: [N, K] in the dtype of `scales`."""
        attributes = {"axis": 1, "block_size": view.block_size}
        weight = self._add(view.node, "DequantizeLinear", [self._int4(codes, _features(view)), scales], attributes)
        weight.type = scales.type
        return weight

    @shared
    def _int4(self, codes: ir.Value, k: int) -> ir.Value:
        """Register the codes as int4 [N, K], once for all their readers."""
        tensor, name = graph.tensor(codes), f"{codes.name}.int4"
        shape = ir.Shape([int(tensor.shape.numpy()[0]), k])
        lazy = ir.LazyTensor(_signed(tensor, shape, name), ir.DataType.INT4, shape, name=name)
        return graph.initializer(self.model, name, lazy, graph.sources(codes))


def _signed(tensor: ir.TensorProtocol, shape: ir.Shape, name: str) -> Callable[[], ir.TensorProtocol]:
    """Return what turns codes of `tensor` around 8 into int4; both keep the first of two codes in the lower bits."""

    def read() -> ir.TensorProtocol:
        packed = np.ascontiguousarray(tensor.numpy()).reshape(-1) ^ np.uint8(_UPPER_BITS)
        return ir.PackedTensor(packed, ir.DataType.INT4, shape=shape, name=name)

    return read


def _features(view: MatMulNBits | GatherBlockQuantized) -> int:
    """Count the input features of a MatMulNBits, or the columns of the table of a GatherBlockQuantized."""
    if isinstance(view, MatMulNBits):
        return view.K
    return math.prod(graph.static(view.data)[1:]) * 8 // view.bits
