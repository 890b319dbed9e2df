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


def side_by_side(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Concatenate along the last axis."""
    return np.concatenate(parts, axis=-1)
