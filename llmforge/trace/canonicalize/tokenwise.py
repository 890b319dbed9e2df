"""A step computes for each token what a longer or shorter step would: only known operators look at other tokens.

A cache is right only under this rule. It also makes it safe to cache what attention reads in place of what the model
would cache, when the one is computed from the other.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph as g
from llmforge.ir import interface

SEQUENCE = "sequence"
OF_ITS_OWN = frozenset({"batch", "capacity", "rows"})  # dynamic dimensions that do not hold the tokens of the step


def check(model: ir.Model) -> None:
    """Return if no standard operator of `model` moves numbers from one token to another, as far as shapes are known.

    The selection of rows before the head is the exception. Operators of other domains state what they do themselves.

    Raises:
        UnsupportedError: names the node.
    """
    for node in model.graph:
        if node.domain == "" and _mixes(node):
            raise UnsupportedError(f"node {node.name!r} computes with several tokens outside attention")


def _mixes(node: ir.Node) -> bool:
    inputs = [() if value is None else g.dims(value) or () for value in node.inputs]
    match node.op_type:
        case "Split" | "Concat":
            axis = node.attributes.get_int("axis", 0)
            moved = inputs if node.op_type == "Concat" else inputs[:1]
            return any(dims and _holds_tokens(dims[axis]) for dims in moved)
        case "Reshape":
            before, after = _in_front(inputs[0]), _in_front(g.dims(node.outputs[0]) or ())
            return before is not None and after is not None and before != after
        case "Gather":
            rows = node.inputs[1] is not None and node.inputs[1].name == interface.LOGITS_ROWS
            return not rows and bool(inputs[0]) and _holds_tokens(inputs[0][node.attributes.get_int("axis", 0)])
        case "Slice":
            axes = node.inputs[3] if len(node.inputs) > 3 else None
            constant = None if axes is None else ir.convenience.get_const_tensor(axes)
            cut = range(len(inputs[0])) if constant is None else [int(axis) for axis in constant.numpy().ravel()]
            return bool(inputs[0]) and any(_holds_tokens(inputs[0][axis]) for axis in cut)
        case "MatMul":
            left, right = inputs
            return any(map(_holds_tokens, (*left[-1:], *right[-2:-1]))) or _pairs(node)
        case "Softmax" | "ArgMax" | "TopK" | "GatherElements":
            return bool(inputs[0]) and _holds_tokens(inputs[0][node.attributes.get_int("axis", -1)])
        case "ReduceMax" | "ReduceMean" | "ReduceSum":
            axes = node.inputs[1] if len(node.inputs) > 1 else None
            constant = None if axes is None else ir.convenience.get_const_tensor(axes)
            taken = range(len(inputs[0])) if constant is None else [int(axis) for axis in constant.numpy().ravel()]
            return bool(inputs[0]) and any(_holds_tokens(inputs[0][axis]) for axis in taken)
        case _:  # pointwise, or of the last axis
            return _pairs(node)


def _pairs(node: ir.Node) -> bool:
    """Say whether what `node` makes has the axis of the tokens twice: a product of tokens with tokens."""
    return any(sum(map(_holds_tokens, g.dims(value) or ())) > 1 for value in node.outputs)


def _in_front(dims: tuple[int | str | None, ...]) -> tuple[list[str], int] | None:
    """Multiply what stands in front of the sequence: symbols, number; None where there is no axis of just tokens."""
    if dims.count(SEQUENCE) != 1 or None in dims:
        return None
    front = dims[: dims.index(SEQUENCE)]
    return sorted(dim for dim in front if isinstance(dim, str)), math.prod(dim for dim in front if isinstance(dim, int))


def _holds_tokens(dim: int | str | None) -> bool:
    """Say whether a dimension is the sequence, or a product with it."""
    return isinstance(dim, str) and dim not in OF_ITS_OWN
