"""Products of rounded activations with int8 channels, as quantize-channels writes them, as Linear of `llmforge.cpu`.

    y = t·(r·DequantizeLinear(codes, scales)) + b,     becomes  y = llmforge.cpu::Linear(x, W', b)
    r = DequantizeLinear(QuantizeLinear(x / t, 1), 1)

The kernel rounds each row of `x` [.., K] by its own largest magnitude, as `t` says, where its blocks are whole rows:
`W'` holds the codes [N, K] with 128 added to each, in one block of K columns, and the scale of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph
from llmforge.ir.derived import Derived, Function
from llmforge.ir.operators import cpu
from llmforge.ir.operators.standard import Abs, Add, DequantizeLinear, Div, MatMul, Max, Mul, QuantizeLinear, ReduceMax
from llmforge.ir.scratch import Scratch
from llmforge.quantization import cpu_layout
from llmforge.quantization.grid import Grid
from llmforge.rewrite.cpu_linear import grid_attributes

_CENTER = 128


@dataclass(frozen=True, eq=False)
class ChannelProduct:
    """A product with int8 codes of what is rounded token by token; `output` is the sum with its bias, if it has one."""

    product: MatMul
    x: ir.Value
    codes: ir.Value  # int8 [K, N]
    scales: ir.Value  # fp32 [N]
    bias: ir.Value | None
    output: ir.Value

    @property
    def name(self) -> str:
        """The name of the product."""
        return self.product.name

    @classmethod
    def of(cls, product: MatMul) -> ChannelProduct | None:
        """Recognize one; None where `product` is something else."""
        read, weight = DequantizeLinear.made(product.x), DequantizeLinear.made(product.w)
        if read is None or weight is None or weight.codes.dtype != ir.DataType.INT8 or weight.axis not in (1, -1):
            return None
        if weight.zero_points is not None or weight.block_size or len(graph.dims(weight.scales) or ()) != 1:
            return None
        rounded = QuantizeLinear.made(read.codes)
        found = None if rounded is None else _per_token(rounded)
        scaled = Mul.only_reader(product.output)
        if found is None or scaled is None or found[1] not in scaled.node.inputs:
            return None
        bias, output = _bias(scaled.output)
        return cls(product, found[0], weight.codes, weight.scales, bias, output)


def reason_against(found: ChannelProduct) -> str | None:
    """Say why a product cannot become a Linear; None where it can."""
    k = graph.static(found.codes)[0]
    if not (found.codes.is_initializer() and found.scales.is_initializer()):
        return "its weights are computed"
    return f"its {k} input features are not a multiple of {cpu_layout.PART}" if k % cpu_layout.PART else None


def lower(model: ir.Model, found: ChannelProduct, scratch: Scratch | None) -> str:
    """Put a Linear in the place of a product; say so."""
    k, n = graph.static(found.codes)
    grid = Grid(8, k, symmetric=True)
    shape = ir.Shape([cpu_layout.groups(n), cpu_layout.group_bytes(k, grid)])
    name = f"{found.codes.name}.groups"
    parts = [graph.tensor(found.codes), graph.tensor(found.scales)]
    tensor = Derived(_arrangement(k, n), parts, ir.DataType.UINT8, shape, name, scratch=scratch)
    weights = graph.initializer(model, name, tensor, graph.sources(found.codes))
    attributes = {**grid_attributes(n, k, grid), "terms": 1, "outliers": 0.0, "activation": 0, "epsilon": 0.0}
    operands = {"x": found.x, "weights": weights, "bias": found.bias, "norm": None, "residual": None}
    own = found.product.name
    found.product.node.name = f"{own}.replaced"
    linear = cpu.CpuLinear.insert(graph.producer(found.output), operands, attributes, name=own)
    graph.replace_value(found.output, linear.output)
    return f"Linear of 8 bits, one scale a row and a token, [{n}, {k}]"


@cache
def _arrangement(k: int, n: int) -> Function:
    """Return what arranges codes [K, N] and scales [N]; one object for equal arguments."""

    def arrange(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        codes = (parts[0].T.astype(np.int16) + _CENTER).astype(np.uint8)
        return cpu_layout.arrange(codes, parts[1].reshape(n, 1), None, Grid(8, k, symmetric=True))

    return arrange


def _per_token(rounded: QuantizeLinear) -> tuple[ir.Value, ir.Value] | None:
    """Return what is rounded, and the scale of each token: its largest magnitude over 127; None where it is no such."""
    steps = Div.made(rounded.x)
    if steps is None or not _is_number(rounded.scale, 1):
        return None
    x, scale = (_given(value) for value in steps.node.inputs)
    limited = Max.made(scale)
    step = None if limited is None else Div.made(limited.node.inputs[0])
    if step is None or not _is_number(_given(step.node.inputs[1]), 127):
        return None
    top = ReduceMax.made(step.node.inputs[0])
    size = None if top is None else Abs.made(top.node.inputs[0])
    return (x, scale) if size is not None and size.node.inputs[0] is x else None


def _given(value: ir.Value | None) -> ir.Value:
    assert value is not None
    return value


def _is_number(value: ir.Value, wanted: float) -> bool:
    return value.is_initializer() and graph.tensor(value).numpy().reshape(-1).tolist() == [wanted]


def _bias(value: ir.Value) -> tuple[ir.Value | None, ir.Value]:
    """Find the bias that is added to `value`, and nothing else reads it; with the sum."""
    add = Add.only_reader(value)
    if add is None or value.is_graph_output():
        return None, value
    other = add.b if add.a is value else add.a
    if other.is_initializer() and len(graph.dims(other) or ()) == 1 and other.dtype == ir.DataType.FLOAT:
        return other, add.output
    return None, value
