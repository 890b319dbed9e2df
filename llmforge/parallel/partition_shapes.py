"""What shapes say of cuts: sizes, axes, and how a cut passes a Reshape."""

from __future__ import annotations

import onnx_ir as ir

from llmforge.ir import graph
from llmforge.parallel.partition import Cut


class Undivided(Exception):
    """Why something stays whole."""


def through_reshape(made: ir.Value | None, read: ir.Value | None, cut: Cut) -> Cut | None:
    """Carry a cut of `made` over to `read`, where one is [..., heads·D] and the other [..., heads, D]; else None."""
    assert made is not None
    assert read is not None
    a, b = graph.dims(made) or (), graph.dims(read) or ()
    if len(a) == len(b) and a == b:
        return cut
    if len(a) == 3 and len(b) == 4 and cut.axis == 2 and isinstance(b[3], int):
        return cut.divided(b[3])
    if len(a) == 4 and len(b) == 3 and cut.axis == 2 and isinstance(a[3], int):
        return cut.scaled(a[3])
    if len(a) == len(b) == 4 and cut.axis == 2 and b[1] == 1 and isinstance(a[3], int):  # [B, 1, S, heads·D]
        return cut.scaled(a[3], axis=3)
    return None


def axis_of(node: ir.Node, last: int) -> int:
    """Return the axis, from the front, that Split, Concat or Slice works along; -1 of others: none."""
    if node.op_type == "Slice":
        axes = graph.operand(node, 3)
        if axes is None or axes.const_value is None or axes.const_value.size != 1:
            raise Undivided(f"Slice {node.name} works along several axes")
        axis = int(axes.const_value.numpy().reshape(-1)[0])
    elif node.op_type == "Expand":
        return -1
    else:
        axis = node.attributes.get_int("axis", 0)
    return axis + last + 1 if axis < 0 else axis


def size_of(value: ir.Value, axis: int, last: int) -> int:
    """Return the size of an axis, counted from the front of a tensor whose last axis is `last`; 1 where it is none."""
    dims = graph.dims(value)
    if dims is None:
        raise Undivided(f"the shape of {value.name} is not known")
    place = axis - (last + 1 - len(dims))
    size = dims[place] if place >= 0 else 1
    return size if isinstance(size, int) else 0


def static(value: ir.Value | None) -> tuple[int, ...]:
    """Return the dimensions of `value`, 0 for those that are not fixed."""
    dims = None if value is None else graph.dims(value)
    return tuple(dim if isinstance(dim, int) else 0 for dim in dims or ())
