"""Write `llmforge::MxLinear` as standard ONNX without its types, which ONNX Runtime's CPU kernels do not know.

A block of 32 numbers has a power of two for a scale, the smallest under which none of them exceeds the largest code
(OCP microscaling formats 1.0, section 6.3; scales round up, as those of ModelOpt do). Its exponent
is found by a logarithm and then moved by comparisons, which are exact. fp4 is rounded as in `fp4`, fp8 by
QuantizeLinear: the result is that of the formats to the bit, but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph
from llmforge.ir.derived import Derived
from llmforge.ir.fp4 import E2m1Rounding, as_fp8
from llmforge.ir.operators.canonical import MxLinear

BLOCK = 32
LARGEST = {ir.DataType.FLOAT4E2M1: 6.0, ir.DataType.FLOAT8E4M3FN: 448.0}
_LEAST, _MOST = -126, 126  # exponents of scales, so that a scale twice as large or half is a normal number, too


def _steps(parts: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Write scales, e8m0, as fp32."""
    wide: NDArray[np.float32] = parts[0].astype(np.float32)
    return wide


class MxExpansion(E2m1Rounding):
    """Expansions of one graph."""

    def expand(self, layer: MxLinear) -> None:
        """Replace one layer; x is [..., K], K / 32 = blocks."""
        node, codes, scales = layer.node, graph.tensor(layer.codes), graph.tensor(layer.scales)
        dtype, shape = graph.dtype(layer.codes), ir.Shape(scales.shape.numpy())
        wide = Derived(_steps, [scales], ir.DataType.FLOAT, shape, f"{layer.scales.name}.fp32")
        held = layer.codes
        if dtype == ir.DataType.FLOAT4E2M1:
            whole = ir.Shape(codes.shape.numpy())
            eight = Derived(as_fp8, [codes], ir.DataType.FLOAT8E4M3FN, whole, f"{held.name}.fp8")
            held = graph.initializer(self.model, str(eight.name), eight)
        operands = [held, graph.initializer(self.model, str(wide.name), wide)]
        weight = self._add(node, "DequantizeLinear", operands, {"axis": 0, "block_size": BLOCK})
        weight.type = ir.TensorType(ir.DataType.FLOAT)
        graph.replace_value(layer.output, self._add(node, "MatMul", [self._rounded(layer, dtype), weight]))

    def _rounded(self, layer: MxLinear, dtype: ir.DataType) -> ir.Value:
        """Round what is read, in blocks."""
        node = layer.node
        blocks = self._add(node, "Reshape", [layer.x, self._constant("mx.blocks", [0, 0, -1, BLOCK])])
        size = self._add(node, "Abs", [blocks])
        peak = self._add(node, "ReduceMax", [size, self._constant("mx.last", [-1])], {"keepdims": 1})
        step = self._step(node, peak, np.float32(LARGEST[dtype]))
        if dtype == ir.DataType.FLOAT4E2M1:
            rounded = self._e2m1(node, blocks, size, step)
        else:
            one, zero = self._number(1), self._constant("mx.zero", np.zeros((), dtype.numpy()))
            codes = self._add(node, "QuantizeLinear", [self._add(node, "Div", [blocks, step]), one, zero])
            rounded = self._add(node, "Mul", [self._add(node, "DequantizeLinear", [codes, one]), step])
        return self._add(node, "Reshape", [rounded, self._constant("mx.rows", [0, 0, -1])])

    def _step(self, node: ir.Node, peak: ir.Value, largest: np.float32) -> ir.Value:
        """Find the scale of each block, of whose numbers the largest is `peak`."""
        powers = np.ldexp(np.float32(1), np.arange(_LEAST, _MOST + 1)).astype(np.float32)
        table = self._constant("mx.powers", powers)
        logarithm = self._add(node, "Log", [self._add(node, "Div", [peak, self._constant(f"mx.{largest:g}", largest)])])
        exponent = self._add(node, "Div", [logarithm, self._constant("mx.ln2", np.float32(np.log(2)))])
        near = self._add(
            node, "Sub", [self._add(node, "Ceil", [exponent]), self._constant("mx.first", np.float32(_LEAST))]
        )
        bounds = [self._constant(f"mx.at{at}", np.float32(at)) for at in (0, len(powers) - 1)]
        index = self._add(node, "Cast", [self._add(node, "Clip", [near, *bounds])], {"to": int(ir.DataType.INT64)})
        step = self._add(node, "Gather", [table, index], {"axis": 0})
        limit, two = self._constant(f"mx.{largest:g}", largest), self._number(2)
        for grows in (True, False):  # the logarithm may be off by one where the quotient is near a power of two
            other = self._add(node, "Mul" if grows else "Div", [step, two])
            reach = self._add(node, "Mul", [step if grows else other, limit])
            change = self._add(node, "Less" if grows else "GreaterOrEqual", [reach, peak])
            step = self._add(node, "Where", [change, other, step])
        return self._add(node, "Max", [step, self._constant("mx.least", powers[0])])
