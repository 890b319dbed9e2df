"""Weights as the CPU kernels read them: one byte string a matrix, in the order of reading (kernels.h, `Weights`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmforge.quantization.formats import SUPERBLOCK
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import QuantizedMatrix, split

_T = TypeVar("_T", bound=np.generic)

LANES = 16  # rows side by side
ALIGNMENT = 64  # bytes that a group is a multiple of
SMALLEST_BLOCK = 32  # 16 without zero points and trellis: `reads`
PART = 32  # columns whose codes stand together


def group_bytes(k: int, grid: Grid) -> int:
    """Size of a group of 16 rows of `k` columns."""
    return k * LANES * grid.bits // 8 + sum(_aligned(size) for size in _sections(k, grid))


def groups(n: int) -> int:
    """Count the groups of `n` rows."""
    return -(-n // LANES)


def reads(k: int, grid: Grid) -> bool:
    """Say whether the kernels read rows of `k` columns: in blocks of a multiple of 32 that divides k, or of 16."""
    halves = grid.block_size == PART // 2 and k % PART == 0 and not grid.zero_points and not grid.trellis
    return halves or (grid.block_size >= SMALLEST_BLOCK and k % grid.block_size == 0)


def arrange(
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    zero_points: NDArray[np.uint8] | None,
    grid: Grid,
    minimums: NDArray[np.float32] | None = None,
) -> NDArray[np.uint8]:
    """Arrange codes [n, k], scales [n, k / block_size], and zero points or minima of that shape.

    The kernels read such rows (`reads`); `scales` and `minimums` are numbers that the grid stores. Rows of zeros fill
    the last group. Returns uint8 [groups, bytes].
    """
    n, k = codes.shape
    count, blocks = groups(n), k // grid.block_size
    # [group, lane, part, vector, column] -> [group, part, vector, lane, column]
    vectors = _rows(codes, count * LANES).reshape(count, LANES, k // PART, 8, 4).transpose(0, 2, 3, 1, 4)
    parts = [np.ascontiguousarray(plane).reshape(count, k // PART, -1) for plane in _planes(vectors, grid.bits)]
    arranged = [np.concatenate(parts, axis=2).reshape(count, -1)]
    padding = 127 if grid.scale == "int8" else 0  # a scale that int8 stores, as it does not store 0
    by_block = [
        _rows(each.astype(np.float32), count * LANES, padding).reshape(count, LANES, blocks).transpose(0, 2, 1)
        for each in (scales, minimums)
        if each is not None
    ]
    sections: list[NDArray[Any]] = []
    if grid.scale == "int8":
        stored, supers = split(by_block[0].transpose(0, 2, 1).reshape(-1, blocks), grid)
        sections = [stored.reshape(count, LANES, -1).transpose(0, 2, 1)]
    else:
        sections = [each.astype(np.float16 if grid.scale == "fp16" else np.float32) for each in by_block]
    if zero_points is not None:
        zeros = _rows(zero_points, count * LANES).reshape(count, LANES, blocks).transpose(0, 2, 1)
        half = LANES // 2
        sections.append(zeros if grid.bits > 4 else zeros[..., :half] | zeros[..., half:] << np.uint8(4))
    if grid.scale == "int8":
        sections.append(supers.reshape(count, LANES, -1).transpose(0, 2, 1))
    for section in sections:
        data = np.ascontiguousarray(section).view(np.uint8).reshape(count, -1)
        arranged.append(np.pad(data, ((0, 0), (0, _aligned(data.shape[1]) - data.shape[1]))))
    return np.concatenate(arranged, axis=1)


def read(arranged: NDArray[np.uint8], n: int, k: int, grid: Grid) -> QuantizedMatrix:
    """Undo `arrange` of a matrix [n, k]; arranged: uint8 [groups, bytes].

    Raises:
        ValueError: the grid has int8 scales, or a trellis.
    """
    if grid.scale == "int8" or grid.trellis:
        raise ValueError(f"{grid.format.name} is not read back")
    count, blocks = len(arranged), k // grid.block_size
    at = k * LANES * grid.bits // 8
    codes = _unplaned(arranged[:, :at].reshape(count, k // PART, -1), grid.bits)
    codes = codes.transpose(0, 3, 1, 2, 4).reshape(count * LANES, k)[:n]
    dtype = np.dtype(np.float16 if grid.scale == "fp16" else np.float32)
    of_blocks: list[NDArray[Any]] = []
    for size in _sections(k, grid):
        section = np.ascontiguousarray(arranged[:, at : at + size])
        at += _aligned(size)
        if len(of_blocks) == 1 + grid.minimums:  # zero points
            if grid.bits <= 4:
                halves = section.reshape(count, blocks, LANES // 2)
                section = np.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=-1)
            of_blocks.append(section.reshape(count, blocks, LANES))
        else:
            of_blocks.append(section.view(dtype).astype(np.float32).reshape(count, blocks, LANES))
    scales, *others = (each.transpose(0, 2, 1).reshape(-1, blocks)[:n] for each in of_blocks)
    minimums = others.pop(0) if grid.minimums else None
    return QuantizedMatrix(grid, codes, scales, others[0] if others else None, minimums)


def _unplaned(data: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Undo `_planes` of [groups, parts, bytes]: codes [groups, parts, 8, 16, 4]."""
    if bits == 8:
        return data.reshape(*data.shape[:2], 8, LANES, 4)
    codes = np.zeros((*data.shape[:2], 8, LANES, 4), np.uint8)
    each, at, below = LANES * 4, 0, 0
    if bits & 4:
        plane = data[:, :, : 4 * each].reshape(*data.shape[:2], 4, LANES, 4)
        codes[:, :, :4], codes[:, :, 4:] = plane & np.uint8(15), plane >> np.uint8(4)
        at, below = 4 * each, 4
    if bits & 2:
        plane = data[:, :, at : at + 2 * each].reshape(*data.shape[:2], 2, 1, LANES, 4)
        shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 1, 4, 1, 1)
        codes |= (plane >> shifts & np.uint8(3)).reshape(codes.shape) << np.uint8(below)
        at, below = at + 2 * each, below + 2
    if bits & 1:
        plane = data[:, :, at:].reshape(*data.shape[:2], 1, LANES, 4)
        shifts = np.arange(8, dtype=np.uint8).reshape(1, 1, 8, 1, 1)
        codes |= (plane >> shifts & np.uint8(1)) << np.uint8(below)
    return codes


def _sections(k: int, grid: Grid) -> Iterator[int]:
    """Count the bytes of scales, minima, zero points and superscales of a group."""
    blocks = k // grid.block_size
    for _ in range(1 + grid.minimums):
        yield blocks * LANES * {"fp32": 4, "fp16": 2, "int8": 1}[grid.scale]
    if grid.zero_points:
        yield blocks * LANES // (2 if grid.bits <= 4 else 1)
    if grid.scale == "int8":
        yield -(-k // SUPERBLOCK) * 2 * LANES


def _planes(vectors: NDArray[np.uint8], bits: int) -> Iterator[NDArray[np.uint8]]:
    """Cut codes [groups, parts, 8, 16, 4] into planes of 4, 2 and 1 bits (kernels.h); of 8 bits there is one."""
    if bits == 8:
        yield vectors
        return
    if bits & 4:
        yield vectors[:, :, :4] & np.uint8(15) | (vectors[:, :, 4:] & np.uint8(15)) << np.uint8(4)
    below = bits & 4
    if bits & 2:
        pairs = (vectors >> np.uint8(below) & np.uint8(3)).reshape(*vectors.shape[:2], 2, 4, LANES, 4)
        yield sum((pairs[:, :, :, v] << np.uint8(2 * v) for v in range(4)), start=np.zeros((), np.uint8))
    below += bits & 2
    if bits & 1:
        single = vectors >> np.uint8(below) & np.uint8(1)
        yield sum((single[:, :, v] << np.uint8(v) for v in range(8)), start=np.zeros((), np.uint8))


def alternating(n: int) -> NDArray[np.intp]:
    """Order the `n` rows of two halves, gate and up, so that groups of 16 of each take turns."""
    return np.arange(n).reshape(2, n // (2 * LANES), LANES).transpose(1, 0, 2).reshape(-1)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _rows(array: NDArray[_T], count: int, value: int = 0) -> NDArray[_T]:
    return np.pad(array, ((0, count - len(array)), (0, 0)), constant_values=value)
