"""What shapes say of partitions: sizes, axes, and how a partition passes a Reshape."""

from __future__ import annotations

import onnx_ir as ir

from llmforge.ir import graph
from llmforge.ir.operators.standard import Concat, Expand, Slice, Split
from llmforge.parallel.partition import Partition


class Undivided(Exception):
    """Why something stays whole; `unit`: because a rank's part would end within a block of so many features."""

    def __init__(self, reason: str, unit: int = 0) -> None:
        super().__init__(reason)
        self.unit = unit


def through_reshape(made: ir.Value, read: ir.Value, partition: Partition) -> Partition | None:
    """Carry what holds of `made` over to `read`: one is [..., heads·D], the other [..., heads, D]; else None."""
    a, b = graph.dims(made) or (), graph.dims(read) or ()
    if len(a) == len(b) and a == b:
        return partition
    if len(a) == 3 and len(b) == 4 and partition.axis == 2 and isinstance(b[3], int):
        return partition.divided(b[3])
    if len(a) == 4 and len(b) == 3 and partition.axis == 2 and isinstance(a[3], int):
        return partition.scaled(a[3])
    if len(a) == len(b) == 4 and partition.axis == 2 and b[1] == 1 and isinstance(a[3], int):  # [B, 1, S, heads·D]
        return partition.scaled(a[3]).on(3)
    return None


def axis_of(view: Split | Concat | Slice | Expand, last: int) -> int:
    """Return the axis, from the front, that `view` works along; -1: none."""
    if isinstance(view, Expand):
        return -1
    if not isinstance(view, Slice):
        axis = view.axis
    elif view.axes is None or view.axes.const_value is None or view.axes.const_value.size != 1:
        raise Undivided(f"Slice {view.name} works along several axes")
    else:
        axis = int(view.axes.const_value.numpy().reshape(-1)[0])
    return axis + last + 1 if axis < 0 else axis


def size_of(value: ir.Value, axis: int, last: int) -> int:
    """Return the size of an axis, counted from the front of a tensor whose last axis is `last`; 1 where it is none."""
    dims = graph.dims(value)
    if dims is None:
        raise Undivided(f"the shape of {value.name} is not known")
    place = axis - (last + 1 - len(dims))
    size = dims[place] if place >= 0 else 1
    return size if isinstance(size, int) else 0
