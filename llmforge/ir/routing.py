"""What a graph says of its experts: their routers, the signs of their weights, and how much of them a token reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

import onnx_ir as ir

from llmforge.ir import graph

MOE = ("llmforge", "MoE")
# Operators of experts: where the inputs stand that have an axis of experts in front.
_EXPERTS: Mapping[tuple[str, str], range] = {
    MOE: range(3, 7),
    ("com.microsoft", "MoE"): range(2, 8),
    ("com.microsoft", "QMoE"): range(2, 14),
}
# Operators of experts: the inputs that choose and weigh them; input 0 is what they read.
_CHOICES: Mapping[tuple[str, str], tuple[int, ...]] = {
    MOE: (1, 2),
    ("com.microsoft", "MoE"): (1,),
    ("com.microsoft", "QMoE"): (1, 14),
}
_READ_AT_MOST = 4096  # elements of a constant that are looked at: a number for each expert, not a matrix

_NEVER = {"Sigmoid", "Softmax", "Softplus", "Exp", "Abs", "Relu"}  # whatever they read
_AS_FIRST = {  # where their first input is not
    *("TopK", "Gather", "GatherElements", "Slice", "Split", "Reshape", "Transpose", "Expand", "Squeeze", "Unsqueeze"),
    *("ReduceSum", "ReduceMax", "Cast", "Pow"),
}
_AS_ALL = {"Add", "Mul", "Div", "Concat"}  # where no input is


def routers(model: ir.Model) -> dict[ir.Node, ir.Node]:
    """Map every node of a router to the `llmforge::MoE`, or what a pass made of it, that it chooses experts for.

    A router is what the choice and the weights of experts depend on and the tokens, which the experts read, do not.
    """
    found: dict[ir.Node, ir.Node] = {}
    for node in model.graph:
        if choices := _CHOICES.get((node.domain, node.op_type)):
            behind = _ancestors(node.inputs[:1])
            found |= dict.fromkeys(_ancestors((graph.operand(node, index) for index in choices), behind), node)
    return found


def _ancestors(values: Iterable[ir.Value | None], without: Iterable[ir.Node] = ()) -> dict[ir.Node, None]:
    """Collect the nodes that `values` depend on, but for those of `without` and what only they depend on."""
    seen: dict[ir.Node, None] = {}
    left = set(without)
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        node = None if value is None else value.producer()
        if node is not None and node not in seen and node not in left:
            seen[node] = None
            waiting.extend(node.inputs)
    return seen


def never_negative(value: ir.Value | None) -> bool:
    """Say whether it is certain that no element of `value` is negative, whatever the tokens are.

    True of what a `Softmax` or `Sigmoid` yields and of what selecting, summing, scaling and normalizing make of that;
    constants are looked at.
    """
    if value is None:
        return False
    node = value.producer()
    if node is None:
        return _constant(value)
    if node.domain:
        return False
    inputs = list(node.inputs)
    match node.op_type:
        case name if name in _NEVER:
            return True
        case name if name in _AS_FIRST:
            return never_negative(inputs[0])
        case "Mul" if inputs[0] is inputs[1]:
            return True
        case name if name in _AS_ALL:
            return all(map(never_negative, inputs))
        case "Max":
            return any(map(never_negative, inputs))
        case "Where":
            return all(map(never_negative, inputs[1:3]))
        case "Clip":
            low, high = ([*inputs, None, None])[1:3]
            held = never_negative(inputs[0]) or never_negative(low)
            return held and (high is None or never_negative(high))
    return False


def _constant(value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or value.is_graph_input() or tensor.size > _READ_AT_MOST:
        return False
    return bool((tensor.numpy() >= 0).all())


def share_read(value: ir.Value) -> Fraction:
    """Say which part of the initializer `value` one token reads: of experts those that it chooses, else all of it."""
    shares = [_share(value, node, index) for node, index in value.uses()]
    return max(shares, default=Fraction(1))


def _share(value: ir.Value, node: ir.Node, index: int) -> Fraction:
    if index not in _EXPERTS.get((node.domain, node.op_type), ()):
        return Fraction(1)
    ids = node.inputs[1]
    count, top_k = graph.dims(value) or (None,), (graph.dims(ids) if ids is not None else None) or (None,)
    chosen = top_k[-1] if (node.domain, node.op_type) == MOE else node.attributes.get_int("k")
    if not isinstance(count[0], int) or not isinstance(chosen, int):
        return Fraction(1)
    return min(Fraction(1), Fraction(chosen, count[0]))
