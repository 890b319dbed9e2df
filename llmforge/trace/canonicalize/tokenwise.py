"""A step computes for each token what a longer or shorter step would: only known operators look at other tokens.

A cache is right only under this rule. It also makes it safe to cache what attention reads in place of what the model
would cache, when the one is computed from the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, interface, operators
from llmforge.ir.operators import standard
from llmforge.ir.operators.record import STANDARD, Operator, Reduction
from llmforge.trace.canonicalize.rewriting import integers

SEQUENCE = "sequence"
SEQUENCES = "starts"  # a graph of whole sequences has "starts - 1" of them, each pooled to a row
OF_ITS_OWN = frozenset({"batch", "capacity", "rows"})  # dynamic dimensions that do not hold the tokens of the step


def check(model: ir.Model) -> None:
    """Return if no standard operator of `model` moves numbers from one token to another, as far as shapes are known.

    The selection of rows before the head is the exception. Operators of other domains state what they do themselves.

    Raises:
        UnsupportedError: names the node.
    """
    for node in model.graph:
        if node.domain == STANDARD and _mixes(operators.view(node)):
            raise UnsupportedError(f"node {node.name!r} computes with several tokens outside attention")


def _mixes(operator: Operator) -> bool:
    match operator:
        case standard.Concat():
            return any(_axis_holds_tokens(value, [operator.axis]) for value in operator.node.inputs)
        case standard.Reshape():
            before, after = _in_front(operator.x), _in_front(operator.output)
            return before is not None and after is not None and before != after
        case standard.Gather():
            rows = operator.indices.name == interface.LOGITS_ROWS
            return not rows and _axis_holds_tokens(operator.data, [operator.axis])
        case standard.GatherElements():
            return _axis_holds_tokens(operator.data, [operator.axis])
        case standard.Split() | standard.Softmax() | standard.ArgMax() | standard.TopK():
            return _axis_holds_tokens(operator.x, [operator.axis])
        case standard.Slice() | Reduction():
            return _axis_holds_tokens(operator.x, integers(operator.operand(type(operator).axes)))
        case standard.MatMul():
            left, right = graph.dims(operator.x) or (), graph.dims(operator.w) or ()
            return any(map(_holds_tokens, (*left[-1:], *right[-2:-1]))) or _pairs(operator)
        case _:  # pointwise, or of the last axis
            return _pairs(operator)


def _axis_holds_tokens(value: ir.Value | None, axes: Sequence[int] | None) -> bool:
    """Say whether one of `axes` of `value` (None: of all) holds tokens; no axis of unknown rank does."""
    dims = () if value is None else graph.dims(value) or ()
    return bool(dims) and any(_holds_tokens(dims[axis]) for axis in (range(len(dims)) if axes is None else axes))


def _pairs(operator: Operator) -> bool:
    """Say whether a node makes something that has the axis of tokens twice: a product of tokens with tokens."""
    return any(sum(map(_holds_tokens, graph.dims(value) or ())) > 1 for value in operator.node.outputs)


def _in_front(value: ir.Value) -> tuple[list[str], int] | None:
    """Multiply what stands in front of the sequence: symbols, number; None where there is no axis of just tokens."""
    dims = graph.dims(value) or ()
    if dims.count(SEQUENCE) != 1 or None in dims:
        return None
    front = dims[: dims.index(SEQUENCE)]
    return sorted(dim for dim in front if isinstance(dim, str)), math.prod(dim for dim in front if isinstance(dim, int))


def _holds_tokens(dim: int | str | None) -> bool:
    """Say whether a dimension is the sequence, or a product with it."""
    return isinstance(dim, str) and dim not in OF_ITS_OWN and not dim.startswith(SEQUENCES)
