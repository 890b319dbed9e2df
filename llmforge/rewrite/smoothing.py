"""Move factors of activations into what makes them and what reads them, with every product's bits as they were.

    x = RMSNormalization(r)·g        becomes  x / s = RMSNormalization(r)·(g / s)        [K]
    y = x·W, for all readers of x    becomes  y = (x / s)·(diag(s)·W)                    [K, N]
    x = f(gate)·(u·U + b)            becomes  x / s = f(gate)·(u·(U / s) + b / s)

s are powers of two (`llmforge.quantization.smoothing`), so that no mantissa changes. x, and what lies between u and x,
hold other numbers and get names of their own. Weights are lazy tensors: nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph, operators
from llmforge.ir.derived import Derived, Function
from llmforge.ir.operators import contrib
from llmforge.ir.operators.standard import (
    LayerNormalization,
    MatMul,
    Mul,
    RMSNormalization,
    SimplifiedLayerNormalization,
    Split,
)
from llmforge.quantization.statistics import factors
from llmforge.rewrite import linear

_SUFFIX = "smoothed"
_Exponents = NDArray[np.int8]
_NORMS = (
    RMSNormalization,
    SimplifiedLayerNormalization,
    LayerNormalization,
    contrib.SkipSimplifiedLayerNormalization,
    contrib.SkipLayerNormalization,
)


def divided(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Divide numbers [..., K] by 2**exponents [K]."""
    numbers, exponents = parts
    return numbers / factors(exponents)


def multiplied(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Multiply a matrix [K, N] by 2**exponents [K], row by row."""
    weight, exponents = parts
    return weight * factors(exponents)[:, None]


class _Reason(Exception):
    """Why a value cannot be smoothed; raised before anything is changed."""


@dataclass(frozen=True)
class _Change:
    """An initializer that becomes another: input `index` of `node`."""

    node: ir.Node
    index: int
    function: Function
    exponents: _Exponents


@dataclass
class _Plan:
    """What has to change, and the values that then hold other numbers."""

    changes: list[_Change] = field(default_factory=list)
    moved: list[ir.Value] = field(default_factory=list)


def smooth(model: ir.Model, x: ir.Value, exponents: _Exponents) -> str | None:
    """Divide `x` [..., K] by 2**`exponents` [K] where it is made, and multiply what reads it; or say why not.

    What is no longer read stays in the graph.
    """
    try:
        plan = _maker(x, exponents)
        plan.changes += _readers(x, exponents)
    except _Reason as reason:
        return str(reason)
    for change in plan.changes:
        value = change.node.inputs[change.index]
        assert value is not None
        name, tensor = f"{value.name}.{_SUFFIX}", graph.tensor(value)
        by = ir.Tensor(change.exponents, name=f"{name}.exponents")
        derived = Derived(change.function, [tensor, by], tensor.dtype, ir.Shape(tensor.shape.numpy()), name)
        change.node.replace_input_with(change.index, graph.initializer(model, name, derived))
    for value in plan.moved:
        value.name = f"{value.name}.{_SUFFIX}"
    return None


def _readers(x: ir.Value, exponents: _Exponents) -> Iterator[_Change]:
    """Multiply the rows of the matrices that `x` is multiplied with, all of them."""
    if x.is_graph_output():
        raise _Reason(f"{x.name} is an output of the graph")
    for node, index in x.uses():
        product = MatMul.of(node)
        if product is None or index != 0:
            raise _Reason(f"{node.op_type} {node.name} reads {x.name}, too")
        if reason := _reason(product.w, 2):
            raise _Reason(reason)
        yield _Change(node, 1, multiplied, exponents)


def _maker(x: ir.Value, exponents: _Exponents) -> _Plan:
    """Divide what makes `x`: the weights of a norm, or one factor of a product whose columns a linear layer makes."""
    node = x.producer()
    view = None if node is None else operators.view(node)
    if node is not None and isinstance(view, _NORMS) and x is node.outputs[0]:
        own = [each for each in type(view).inputs if each.name in ("scale", "gamma", "bias", "beta")]
        if isinstance(view, contrib.SkipSimplifiedLayerNormalization | contrib.SkipLayerNormalization):
            own = [each for each in own if each.name != "bias"]  # of the sum in front of the norm
        given = [each for each in own if graph.operand(node, each.index) is not None]
        for each in given:
            if reason := _reason(view.required(each), 1):
                raise _Reason(reason)
        return _Plan([_Change(node, each.index, divided, exponents) for each in given], [x])
    if isinstance(view, Mul):
        for value, _ in view.either_way:
            if (plan := _linear(value, exponents)) is not None:
                return _Plan(plan.changes, [*plan.moved, x])
    raise _Reason(f"{x.name} is made by {'the caller' if node is None else node.op_type}, which takes no factors")


def _linear(value: ir.Value, exponents: _Exponents) -> _Plan | None:
    """Divide columns of the linear layer that makes `value` for one reader, whole or as a section; None: none does."""
    if graph.only_reader(value) is None:
        return None
    made = value
    split = Split.made(value)
    if split is not None:
        widths = [graph.static(each)[-1] for each in split.node.outputs]
        if 0 in widths or split.axis not in (-1, 2) or graph.only_reader(split.x) is None:
            return None
        place = split.node.outputs.index(value)
        zeros = np.zeros(sum(widths), np.int8)
        zeros[sum(widths[:place]) : sum(widths[: place + 1])] = exponents
        made, exponents = split.x, zeros
    layer = linear.of(made)
    if layer is None or _reason(layer.weight, 2) or graph.width(layer.weight) != len(exponents):
        return None
    changes = [_Change(layer.matmul, 1, divided, exponents)]
    moved = [layer.matmul.outputs[0]]
    if layer.add is not None and layer.bias is not None:
        index = next(index for index, each in enumerate(layer.add.inputs) if each is layer.bias)
        changes.append(_Change(layer.add, index, divided, exponents))
        moved.append(layer.add.outputs[0])
    return _Plan(changes, [*moved, value] if split is not None else moved)


def _reason(value: ir.Value, rank: int) -> str | None:
    """Say why an initializer cannot be scaled; None where it can."""
    if not graph.is_constant(value) or value.is_graph_output() or len(graph.dims(value) or ()) != rank:
        return f"{value.name} is no weight of rank {rank}"
    return None if value.dtype == ir.DataType.FLOAT else f"{value.name} is {value.dtype}; expected fp32"
