"""How tensors are divided among ranks: ranges of one axis, and lazy tensors that hold them.

A `Partition` says for every rank which ranges of an axis it holds, in their order. A packed tensor has one range a
section: with query, key and value side by side a rank holds a range of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph
from llmforge.ir.derived import CASTS, Derived, Stored, side_by_side
from llmforge.ir.operators.standard import Concat, Expand, Slice, Split

Range = tuple[int, int]  # start, stop
Ranges = tuple[Range, ...]  # what one rank holds


@dataclass(frozen=True)
class Partition:
    """Which ranges of `axis` each rank holds."""

    axis: int  # counted from the front
    ranks: tuple[Ranges, ...]

    def scaled(self, factor: int) -> Partition:
        """Say the same of an axis whose every element became `factor` neighbours."""
        return Partition(self.axis, tuple(tuple((a * factor, b * factor) for a, b in ranges) for ranges in self.ranks))

    def divided(self, factor: int) -> Partition | None:
        """Say the same of an axis whose every `factor` neighbours became one; None where a range parts some."""
        if any(bound % factor for ranges in self.ranks for item in ranges for bound in item):
            return None
        ranks = tuple(tuple((a // factor, b // factor) for a, b in ranges) for ranges in self.ranks)
        return Partition(self.axis, ranks)

    def in_blocks(self, size: int) -> Partition:
        """Say the same of blocks of `size` neighbours.

        Raises:
            ValueError: a range ends within one.
        """
        if (blocks := self.divided(size)) is None:
            raise ValueError(f"a range of {self} ends within a block of {size}")
        return blocks

    def shifted(self, offset: int) -> Partition:
        """Say the same of an axis that has `offset` elements in front."""
        return Partition(self.axis, tuple(tuple((a + offset, b + offset) for a, b in ranges) for ranges in self.ranks))

    def beside(self, other: Partition) -> Partition:
        """Let each rank hold what `other` says behind what this one says."""
        assert self.axis == other.axis
        return Partition(self.axis, tuple(a + b for a, b in zip(self.ranks, other.ranks, strict=True)))

    def on(self, axis: int) -> Partition:
        """Say the same of another axis."""
        return Partition(axis, self.ranks)

    def size(self, rank: int) -> int:
        """Count what one rank holds."""
        return sum(stop - start for start, stop in self.ranks[rank])


def even(size: int, degree: int, axis: int) -> Partition:
    """Give each rank its part of `size` elements in turn; sizes differ by one where `degree` does not divide `size`."""
    bounds = [size * rank // degree for rank in range(degree + 1)]
    return Partition(axis, tuple(((bounds[rank], bounds[rank + 1]),) for rank in range(degree)))


def spread(size: int, degree: int, axis: int) -> Partition:
    """Give each rank one of `size` elements, of which `degree` is a multiple: neighbours share one."""
    return Partition(axis, tuple(((rank * size // degree, rank * size // degree + 1),) for rank in range(degree)))


def take(array: NDArray[Any], axis: int, ranges: Ranges) -> NDArray[Any]:
    """Take `ranges` of one axis out of `array`, side by side; one range alone is not copied."""
    places = (slice(None),) * axis
    taken = [array[(*places, slice(start, stop))] for start, stop in ranges]
    return taken[0] if len(taken) == 1 else np.concatenate(taken, axis)


def shard(tensor: ir.TensorProtocol, axis: int, ranges: Ranges, name: str) -> ir.TensorProtocol:
    """Hold `ranges` of one axis of `tensor`, lazily where that is lazy.

    Of a stored matrix no more than the part is read; a mapped file is touched there alone.
    """
    dims = [*tensor.shape.numpy()]
    dims[axis] = sum(stop - start for start, stop in ranges)
    shape = ir.Shape(dims)

    def read() -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(take(tensor.numpy(), axis, ranges)), dtype=tensor.dtype, name=name)

    if not isinstance(tensor, ir.LazyTensor | ir.ExternalTensor):
        return read()
    if isinstance(tensor, Stored) and tensor.is_matrix:
        return _of_stored(tensor, axis, ranges, shape, name)
    if isinstance(tensor, Derived) and tensor.function in CASTS.values():
        operands = [shard(each, axis, ranges, name) for each in tensor.operands]
        return Derived(tensor.function, operands, tensor.dtype, shape, name)
    if isinstance(tensor, Derived) and tensor.function is side_by_side:
        return Derived(side_by_side, _of_side_by_side(tensor.operands, axis, ranges), tensor.dtype, shape, name)
    return ir.LazyTensor(read, tensor.dtype, shape, name=name)


def _of_stored(tensor: Stored, axis: int, ranges: Ranges, shape: ir.Shape, name: str) -> Stored:
    """Take ranges of a matrix where it is stored: along the other axis where it is stored transposed."""
    place = 1 - axis if tensor.transposed else axis

    def pieces() -> list[NDArray[Any]]:
        return [take(tensor.stored(), place, ranges)]

    return Stored(pieces, tensor.dtype, shape, name, transposed=tensor.transposed)


def _of_side_by_side(tensors: Sequence[ir.TensorProtocol], axis: int, ranges: Ranges) -> list[ir.TensorProtocol]:
    """Take ranges of tensors that stand side by side along their last axis."""
    if axis != len(tensors[0].shape) - 1:
        return [shard(tensor, axis, ranges, str(tensor.name)) for tensor in tensors]
    begins = np.cumsum([0, *(tensor.shape.numpy()[-1] for tensor in tensors)]).tolist()
    made = []
    for start, stop in ranges:
        for tensor, begin, end in zip(tensors, begins[:-1], begins[1:], strict=True):
            a, b = max(start, begin), min(stop, end)
            if a < b:
                made.append(shard(tensor, axis, ((a - begin, b - begin),), str(tensor.name)))
    return made


def nibbles(tensor: ir.TensorProtocol, ranges: Ranges, name: str) -> ir.TensorProtocol:
    """Take blocks `ranges` out of 4-bit zero points, uint8 [..., ceil(blocks / 2)], the first block in the low half."""
    count = sum(stop - start for start, stop in ranges)
    shape = ir.Shape([*tensor.shape.numpy()[:-1], -(-count // 2)])

    def read() -> ir.TensorProtocol:
        packed = tensor.numpy()
        apart = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
        own = take(apart, apart.ndim - 1, ranges)
        if count % 2:
            own = np.concatenate([own, np.zeros_like(own[..., :1])], -1)
        return ir.Tensor(np.ascontiguousarray(own[..., 0::2] | own[..., 1::2] << 4), name=name)

    return ir.LazyTensor(read, tensor.dtype, shape, name=name)


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
