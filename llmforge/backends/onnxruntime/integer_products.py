"""Products of codes by codes, written out for ONNX Runtime's CPU kernels, whose own fusion misses those that share one.

    y = DequantizeLinear(QuantizeLinear(x, s, 0), s)·DequantizeLinear(codes, scales)
    becomes  y = com.microsoft::MatMulIntegerToFloat(QuantizeLinear(x, s, 128), codes, s, scales, 128)

`codes` are int8 [K, N] and stay so; those of x become uint8 around 128, because the kernels of x86-64 multiply unsigned
by signed numbers: int8 by int8 takes 25 times as long (onnxruntime 1.31, 2048 × 2048, 64 tokens). Both round alike.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph
from llmforge.ir.operators.contrib import MatMulIntegerToFloat
from llmforge.ir.operators.standard import DequantizeLinear, MatMul, QuantizeLinear
from llmforge.rewrite.pass_base import Rewritten

_CENTER = 128
_INT8 = ir.DataType.INT8


def write(model: ir.Model) -> list[Rewritten]:
    """Rewrite every product of int8 codes of `model` in place; list where."""
    rewritten = []
    unsigned: dict[ir.Value, ir.Value] = {}
    for product in MatMul.all(model):
        read, weight = DequantizeLinear.made(product.x), DequantizeLinear.made(product.w)
        if read is None or weight is None or weight.codes.dtype != _INT8 or weight.axis not in (1, -1):
            continue
        rounded = QuantizeLinear.made(read.codes)
        if rounded is None or read.codes.dtype != _INT8 or read.zero_points or weight.zero_points:
            continue
        center = graph.initializer(model, "integer_products.center", np.uint8(_CENTER))
        if read.codes not in unsigned:
            inputs = {"x": rounded.x, "scale": rounded.scale, "zero_point": center}
            codes = QuantizeLinear.insert(rounded.node, inputs, name=f"{rounded.name}.unsigned").output
            codes.name, codes.shape = f"{read.codes.name}.unsigned", read.codes.shape
            codes.type = ir.TensorType(ir.DataType.UINT8)
            unsigned[read.codes] = codes
        operands = {
            "a": unsigned[read.codes],
            "b": weight.codes,
            "a_scale": read.scales,
            "b_scale": weight.scales,
            "a_zero_point": center,
        }
        made = MatMulIntegerToFloat.insert(product.node, operands, name=product.name)
        graph.replace_value(product.output, made.output)
        rewritten.append(Rewritten(product.name, "MatMul of int8 codes to MatMulIntegerToFloat"))
    if rewritten:
        graph.drop_unused(model)
    return rewritten
