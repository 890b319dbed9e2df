"""Experts of a graph: their routers, the signs of their weights, and how much of them a token reads."""

from __future__ import annotations

from fractions import Fraction

import onnx_ir as ir

from llmforge.ir import graph, operators
from llmforge.ir.operators.record import ChosenExperts, Sign
from llmforge.ir.operators.standard import Clip, Mul, Where
from llmforge.ir.subgraph import behind

_READ_AT_MOST = 4096  # elements of a constant that are looked at: a number for each expert, not a matrix


def routers(model: ir.Model) -> dict[ir.Node, ir.Node]:
    """Map every node of a router to the `llmforge::MoE`, or what a pass made of it, that it chooses experts for.

    A router is what the choice and the weights of experts depend on and the tokens, which the experts read, do not.
    """
    found: dict[ir.Node, ir.Node] = {}
    for node in model.graph:
        view = operators.view(node)
        choices = [value for field in view.inputs if field.chooses and (value := view.operand(field)) is not None]
        if choices:
            tokens = {made for each in behind([view.first_input], lambda _: False)[0] for made in each.outputs}
            found |= dict.fromkeys(behind(choices, tokens.__contains__)[0], node)
    return found


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
    if (product := Mul.of(node)) is not None and product.a is product.b:
        return True
    if (choice := Where.of(node)) is not None:
        return never_negative(choice.x) and never_negative(choice.y)
    if (clipped := Clip.of(node)) is not None:
        held = never_negative(clipped.x) or never_negative(clipped.min)
        return held and (clipped.max is None or never_negative(clipped.max))
    match operators.view(node).sign:
        case Sign.NEVER_NEGATIVE:
            return True
        case Sign.AS_FIRST:
            return never_negative(operators.view(node).first_input)
        case Sign.AS_ALL:
            return all(map(never_negative, node.inputs))
        case Sign.AS_ANY:
            return any(map(never_negative, node.inputs))
        case Sign.UNKNOWN:
            return False


def _constant(value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or value.is_graph_input() or tensor.size > _READ_AT_MOST:
        return False
    return bool((tensor.numpy() >= 0).all())


def share_read(value: ir.Value) -> Fraction:
    """Say which part of the initializer `value` one token reads: of experts and adapters, those chosen."""
    shares = [_share(value, node, index) for node, index in value.uses()]
    return max(shares, default=Fraction(1))


def _share(value: ir.Value, node: ir.Node, index: int) -> Fraction:
    view, (count, *_) = operators.view(node), graph.static(value) or (0,)
    if count and index < len(view.inputs) and view.inputs[index].of == "adapters":
        return Fraction(1, count)
    if not isinstance(view, ChosenExperts) or view.inputs[index].of != "experts" or not count or view.chosen is None:
        return Fraction(1)
    return min(Fraction(1), Fraction(view.chosen, count))
