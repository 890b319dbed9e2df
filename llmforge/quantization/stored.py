"""Matrices that a checkpoint stores as codes already: on which grid, and how several become one without rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmforge.quantization.grids import Grid, QuantizedMatrix, stack


class NotHeld(Exception):
    """Why no format of ours holds the codes of a tensor exactly; reads on from "its codes …".

    `is_plain`: because it has none.
    """

    def __init__(self, reason: str, *, is_plain: bool = False) -> None:
        super().__init__(reason)
        self.is_plain = is_plain


@dataclass(frozen=True, eq=False)
class StoredCodes:
    """A matrix [N, K] of a checkpoint on `grid`, read when it is wanted.

    Column i of its codes is that of input feature `columns`[i]; None: they are in their order.
    """

    grid: Grid
    columns: NDArray[np.intp] | None
    read: Callable[[], QuantizedMatrix]


def together(parts: Sequence[StoredCodes]) -> StoredCodes:
    """Put matrices that read the same on top of each other, on the grid that holds the codes of all.

    That has the smallest of their blocks, zero points where one has them, and fp32 scales where one has.

    Raises:
        NotHeld: their codes have different bits, or their columns different orders.
    """
    first = parts[0]
    if any(not _same(part.columns, first.columns) for part in parts):
        raise NotHeld("have input features in different orders in one matrix; leave out the pass that packs them")
    grid = common(*(part.grid for part in parts))
    return StoredCodes(grid, first.columns, lambda: stack([on_grid(part.read(), grid) for part in parts]))


def common(*grids: Grid) -> Grid:
    """Return the grid that holds what lies on any of `grids`.

    Raises:
        NotHeld: they have different bits.
    """
    bits = sorted({grid.bits for grid in grids})
    if len(bits) > 1:
        raise NotHeld(f"have {' and '.join(map(str, bits))} bits in one matrix; leave out the pass that packs them")
    return replace(
        grids[0],
        block_size=min(grid.block_size for grid in grids),
        symmetric=all(grid.symmetric for grid in grids),
        scale="fp16" if all(grid.scale == "fp16" for grid in grids) else "fp32",
    )


def on_grid(matrix: QuantizedMatrix, grid: Grid) -> QuantizedMatrix:
    """Give a matrix on a grid of the same bits, of blocks that divide its own, and perhaps with zero points."""
    times = matrix.grid.block_size // grid.block_size
    blocks = grid.blocks(matrix.shape[1])
    scales = np.repeat(matrix.scales, times, axis=1)[:, :blocks]
    points = None
    if not grid.symmetric:
        own = matrix.zero_points
        points = np.full(scales.shape, grid.middle, np.uint8) if own is None else np.repeat(own, times, 1)[:, :blocks]
    return QuantizedMatrix(grid, matrix.codes, np.ascontiguousarray(scales), points)


def _same(one: NDArray[np.intp] | None, other: NDArray[np.intp] | None) -> bool:
    return np.array_equal(one, other) if one is not None and other is not None else one is other
