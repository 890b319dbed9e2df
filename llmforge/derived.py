"""Tensors that are computed from other tensors by a function that is named, so that two can be seen to be made alike.

A plain lazy tensor hides how it comes about: only reading it tells what it holds. Of a derived one, its function and
its parts say it: where two layers derive their weights by one function from the corresponding tensors, what was proven
of one holds for the other (`llmforge.regions`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Function = Callable[[Sequence[NDArray[Any]]], NDArray[Any]]


class Derived(ir.LazyTensor):
    """`function` of the values of `parts`, computed whenever it is read.

    `function` is pure, and one object for all tensors that are made alike: a function of a module, not a closure.
    """

    def __init__(
        self, function: Function, parts: Sequence[ir.TensorProtocol], dtype: ir.DataType, shape: ir.Shape, name: str
    ) -> None:
        super().__init__(self._compute, dtype, shape, name=name)
        self.function = function
        self.parts = tuple(parts)

    def _compute(self) -> ir.TensorProtocol:
        return ir.Tensor(self.function([part.numpy() for part in self.parts]), name=self.name)


class Stored(ir.LazyTensor):
    """A matrix that is a cast, and perhaps the transpose, of one that is stored.

    What wants it as it is stored, piece by piece, need not pay for a whole copy in another layout.
    """

    def __init__(
        self,
        read: Callable[[], ir.TensorProtocol],
        stored: Callable[[], NDArray[Any]],
        dtype: ir.DataType,
        shape: ir.Shape,
        name: str,
        *,
        transposed: bool,
    ) -> None:
        super().__init__(read, dtype, shape, name=name)
        self.stored = stored
        self.transposed = transposed


def is_stored(tensor: ir.TensorProtocol) -> bool:
    """Say whether `tensor` [K, N] is stored as [N, K], whole or in parts that are side by side."""
    if isinstance(tensor, Derived):
        return tensor.function is side_by_side and all(map(is_stored, tensor.parts))
    return isinstance(tensor, Stored) and tensor.transposed


def by_output(tensor: ir.TensorProtocol, *, transposed: bool) -> NDArray[Any]:
    """Return the weight of a linear layer as [N, K], in the dtype in which it is stored.

    `transposed`: `tensor` is [K, N]. A matrix that is stored as [N, K] is not copied, and no more than its stored bytes
    where several are stacked.
    """
    if isinstance(tensor, Stored) and tensor.transposed == transposed:
        return tensor.stored()
    if isinstance(tensor, Derived) and transposed and is_stored(tensor):
        return np.concatenate([by_output(part, transposed=True) for part in tensor.parts])
    return tensor.numpy().T if transposed else tensor.numpy()


def side_by_side(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Concatenate along the last axis."""
    return np.concatenate(parts, axis=-1)
