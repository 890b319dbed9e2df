"""Codes of blocks that a checkpoint comes with, for the weights of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph
from llmforge.ir.derived import Stored, stored_in
from llmforge.quantization.grids import Grid, Scale, rows
from llmforge.quantization.initializers import LazyMatrix
from llmforge.quantization.stored import (
    QuantizedSource,
    SkippedCodes,
    StoredCodes,
    UnrepresentableCodes,
    common,
    on_grid,
    stack_codes,
)
from llmforge.rewrite.moe_kernels import FusableExperts
from llmforge.rewrite.patterns import NotApplicable


@dataclass(eq=False)
class StoredBlocks:
    """Finds the codes of `source` for the pass `step`, with scales of type `scale` where that holds them."""

    step: str
    source: QuantizedSource
    scale: Scale
    skipped: SkippedCodes = field(init=False)

    def __post_init__(self) -> None:
        self.skipped = SkippedCodes(self.step)

    def are_codes(self, weight: ir.Value, *, transposed: bool = True) -> bool:
        """Say whether the checkpoint stores all of a weight as codes, which a format here may hold or not."""
        tensors = stored_in(graph.tensor(weight), transposed=transposed)
        try:
            for tensor in tensors:
                self.source.codes(tensor)
        except UnrepresentableCodes as reason:
            return not reason.is_plain
        return bool(tensors)

    def matrix(
        self, weight: ir.Value, n: int, k: int, *, transposed: bool = True
    ) -> tuple[LazyMatrix, NDArray[np.intp] | None]:
        """Take the codes of a weight [K, N] from the checkpoint, with the input feature of each of their columns.

        Raises:
            NotApplicable: it has none that are held here.
        """
        tensors = stored_in(graph.tensor(weight), transposed=transposed)
        if not tensors:
            raise NotApplicable(
                f"its numbers are not those of the checkpoint any more; put {self.step} further in front"
            )
        try:
            found = self._stacked(tensors)
        except UnrepresentableCodes as reason:
            self.skipped.add(tensors, reason)
            raise NotApplicable(
                f"its codes {reason}" + ("" if reason.is_plain else "; it stays dequantized")
            ) from reason
        return LazyMatrix(found.read, n, k, found.grid), found.columns

    def _stacked(self, tensors: Sequence[str]) -> StoredCodes:
        """Put the codes of tensors on top of each other, with fp32 scales unless fp16 is wanted and holds them.

        Raises:
            UnrepresentableCodes: no format here holds them.
        """
        found = stack_codes([self.source.codes(tensor) for tensor in tensors])
        if found.grid.scale == self.scale:
            return found
        grid = replace(found.grid, scale="fp32")
        return StoredCodes(grid, found.columns, lambda: on_grid(found.read(), grid))

    def of_experts(self, experts: FusableExperts) -> tuple[LazyMatrix, LazyMatrix]:
        """Take the codes of experts, `up` and `down`, on one grid that QMoE reads.

        Raises:
            NotApplicable: the checkpoint has none that QMoE reads.
        """
        layer = experts.layer
        try:
            up, down = (self._codes_of_experts(weight) for weight in (layer.up, layer.down))
            grid = common(up.grid, down.grid).fitting(experts.hidden, experts.inner)
            if grid is None:
                raise UnrepresentableCodes("have bits, or blocks, that QMoE does not read")
        except UnrepresentableCodes as reason:
            self.skipped.add(experts.parameters, reason)
            raise NotApplicable(f"its codes {reason}; its matrices stay dequantized") from reason
        return (
            _ordered(layer.up, up, grid, experts.order),
            _ordered(layer.down, down, grid, np.arange(experts.hidden)),
        )

    def _codes_of_experts(self, weight: ir.Value) -> StoredCodes:
        """Return the codes of an initializer [E, K, N] as one matrix [E·N, K].

        Raises:
            UnrepresentableCodes: they are not put together here.
        """
        tensor = graph.tensor(weight)
        if not isinstance(tensor, Stored) or tensor.is_matrix or not tensor.sources or not tensor.transposed:
            raise UnrepresentableCodes("are not put together of matrices of experts")
        found = self._stacked([name for names in tensor.sources for name in names])
        if found.columns is not None:
            raise UnrepresentableCodes("have input features in another order, which QMoE does not read")
        return found


def _ordered(weight: ir.Value, found: StoredCodes, grid: Grid, order: NDArray[np.intp]) -> LazyMatrix:
    """Make a matrix [E·N, K] on `grid` of the codes of experts [E, K, N], the output features of each in `order`."""
    count, k, n = graph.static(weight)
    stacked = (n * np.arange(count)[:, None] + order).reshape(-1)
    return LazyMatrix(lambda: rows(on_grid(found.read(), grid), stacked), count * n, k, grid)
