"""Weights as the CPU kernels read them: one byte string a matrix, in the order of reading (kernels.h, `Weights`)."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from llmforge.quantization.grids import Grid

_T = TypeVar("_T", bound=np.generic)

LANES = 16  # rows side by side
ALIGNMENT = 64  # bytes that a group is a multiple of
SMALLEST_BLOCK = 32


def group_bytes(k: int, grid: Grid) -> int:
    """Size of a group of 16 rows of `k` columns."""
    blocks = k // grid.block_size
    zero_points = 0 if grid.symmetric else _aligned(blocks * LANES)
    return k * LANES * grid.bits // 8 + blocks * 4 * LANES + zero_points


def groups(n: int) -> int:
    """Count the groups of `n` rows."""
    return -(-n // LANES)


def arrange(
    codes: NDArray[np.uint8], scales: NDArray[np.float32], zero_points: NDArray[np.uint8] | None, grid: Grid
) -> NDArray[np.uint8]:
    """Arrange codes [n, k], scales [n, k / block_size] and zero points of that shape; returns uint8 [groups, bytes].

    `grid.block_size` is 32 or more and divides k. Rows of zeros fill the last group.
    """
    n, k = codes.shape
    count, blocks, block = groups(n), k // grid.block_size, grid.block_size
    padded = _rows(codes, count * LANES)
    if grid.bits == 4:
        # [group, lane, block, half, vector, column] -> [group, block, half, vector, lane, column]
        halves = padded.reshape(count, LANES, blocks, 2, block // 8, 4).transpose(0, 2, 3, 4, 1, 5)
        arranged = halves[:, :, 0] | (halves[:, :, 1] << np.uint8(4))
    else:
        arranged = padded.reshape(count, LANES, blocks, block // 4, 4).transpose(0, 2, 3, 1, 4)
    of_rows = _rows(scales.astype(np.float32), count * LANES).reshape(count, LANES, blocks).transpose(0, 2, 1)
    parts = [arranged.reshape(count, -1), np.ascontiguousarray(of_rows).view(np.uint8).reshape(count, -1)]
    if zero_points is not None:
        zeros = _rows(zero_points, count * LANES).reshape(count, LANES, blocks).transpose(0, 2, 1).reshape(count, -1)
        parts.append(np.pad(zeros, ((0, 0), (0, _aligned(zeros.shape[1]) - zeros.shape[1]))))
    return np.concatenate(parts, axis=1)


def alternating(n: int) -> NDArray[np.intp]:
    """Order the `n` rows of two halves, gate and up, so that groups of 16 of each take turns."""
    return np.arange(n).reshape(2, n // (2 * LANES), LANES).transpose(1, 0, 2).reshape(-1)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _rows(array: NDArray[_T], count: int) -> NDArray[_T]:
    return np.pad(array, ((0, count - len(array)), (0, 0)))
