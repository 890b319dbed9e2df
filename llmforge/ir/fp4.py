"""Write `llmforge::Fp4Linear` as standard ONNX without 4-bit types, which ONNX Runtime's CPU kernels do not know.

Codes become fp8, which holds them, under fp32 scales: of int8 codes ONNX Runtime would make MatMulNBits, which rounds
what the product reads to int8. What is read is rounded by comparisons and int8 QuantizeLinear, whose ties go to the
even integer: so the result is that of e2m1 and e4m3 to the bit, but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph
from llmforge.ir.builder import GraphBuilder
from llmforge.ir.derived import Derived
from llmforge.ir.operators.canonical import Fp4Linear

BLOCK = 16
_LEAST = np.float32(2.0**-100)  # scale of a block of zeros, by which nothing else is divided


def as_fp8(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Write e2m1 codes as e4m3."""
    wide: NDArray[Any] = parts[0].astype(np.float32).astype(ir.DataType.FLOAT8E4M3FN.numpy())
    return wide


def _steps(parts: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Multiply block scales and the scale of the tensor."""
    blocks, scale = parts
    steps: NDArray[np.float32] = blocks.astype(np.float32) * scale.astype(np.float32)
    return steps


class E2m1Rounding(GraphBuilder):
    """Rounds to e2m1."""

    def _number(self, value: float) -> ir.Value:
        return self._constant(f"fp4.{value:g}", np.float32(value))

    def _e2m1(self, node: ir.Node, blocks: ir.Value, size: ir.Value, step: ir.Value) -> ir.Value:
        """Round `blocks`, whose magnitudes are `size`, to multiples of `step`; what is above six becomes six."""
        number = self._number
        ratio = self._add(node, "Min", [self._add(node, "Div", [size, step]), number(6)])
        fine = self._add(node, "Less", [ratio, number(2)])
        middle = self._add(node, "Less", [ratio, number(4)])
        grain = self._add(node, "Where", [middle, number(1), number(2)])
        grain = self._add(node, "Where", [fine, number(0.5), grain])
        count = self._add(node, "Div", [ratio, grain])
        zero8 = self._constant("fp4.zero", np.int8(0))
        count = self._add(node, "QuantizeLinear", [count, number(1), zero8])
        count = self._add(node, "DequantizeLinear", [count, number(1)])
        value = self._add(node, "Mul", [self._add(node, "Mul", [count, grain]), step])
        below = self._add(node, "Less", [blocks, number(0)])
        return self._add(node, "Where", [below, self._add(node, "Neg", [value]), value])


class BlockRounding(E2m1Rounding):
    """Rounds to NVFP4: blocks of 16 under scales in fp8, in units of one of the tensor."""

    def rounded(self, node: ir.Node, x: ir.Value, scale: ir.Value, axes: int) -> ir.Value:
        """Round what `node` reads, x [..., K] of so many `axes`, in blocks."""
        kept = [0] * (axes - 1)
        blocks = self._add(node, "Reshape", [x, self._constant(f"fp4.blocks_{axes}", [*kept, -1, BLOCK])])
        size = self._add(node, "Abs", [blocks])
        peak = self._add(node, "ReduceMax", [size, self._constant("fp4.last", [-1])], {"keepdims": 1})
        zero = self._constant("fp4.zero8", np.zeros((), ir.DataType.FLOAT8E4M3FN.numpy()))
        sixth = self._add(node, "Div", [peak, self._number(6)])
        eighth = self._add(node, "QuantizeLinear", [sixth, scale, zero])
        step = self._add(node, "Max", [self._add(node, "DequantizeLinear", [eighth, scale]), self._tiny()])
        rounded = self._e2m1(node, blocks, size, step)
        return self._add(node, "Reshape", [rounded, self._constant(f"fp4.rows_{axes}", [*kept, -1])])

    def _tiny(self) -> ir.Value:
        return self._constant("fp4.least", _LEAST)


class Fp4Expansion(BlockRounding):
    """Expansions of one graph."""

    def expand(self, layer: Fp4Linear) -> None:
        """Replace one layer; x is [..., K], K / 16 = blocks."""
        node = layer.node
        codes, steps = graph.tensor(layer.codes), graph.tensor(layer.scales)
        name = str(layer.codes.name)
        shape = ir.Shape(codes.shape.numpy())
        eight = Derived(as_fp8, [codes], ir.DataType.FLOAT8E4M3FN, shape, f"{name}.fp8")
        parts = [steps, graph.tensor(layer.weight_scale)]
        wide = Derived(_steps, parts, ir.DataType.FLOAT, ir.Shape(steps.shape.numpy()), f"{layer.scales.name}.fp32")
        operands = [graph.initializer(self.model, str(each.name), each) for each in (eight, wide)]
        weight = self._add(node, "DequantizeLinear", operands, {"axis": 0, "block_size": BLOCK})
        weight.type = ir.TensorType(ir.DataType.FLOAT)
        graph.replace_value(
            layer.output, self._add(node, "MatMul", [self.rounded(node, layer.x, layer.input_scale, axes=3), weight])
        )
