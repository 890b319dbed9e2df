"""Codes, scales and minima of a matrix in the blocks of ggml: what llmforge.checkpoint.gguf.blocks reads, written.

Each type is a grid of ours, so that nothing is rounded here. Of K types a superblock of 256 columns stores its scales,
and minima, as codes of 6 or 8 bits under a superscale in fp16; those are found again in the scales of the matrix.
Source: `ggml-common.h` of llama.cpp, as in llmforge.checkpoint.gguf.blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llmforge.quantization import codebook
from llmforge.quantization.formats import SUPERBLOCK
from llmforge.quantization.grid import IQ4_XS, OF_2_BITS, OF_CODEBOOK, Q2_K, Grid, Scale
from llmforge.quantization.grids import QuantizedMatrix, split

Bytes = NDArray[np.uint8]

BLOCK = 32
# Of each grid, its scales in fp16 or, for K types, in fp32: bits, block, whether it has minima.
_FP16: Mapping[tuple[int, int, bool], str] = {
    (4, BLOCK, False): "Q4_0",
    (5, BLOCK, False): "Q5_0",
    (8, BLOCK, False): "Q8_0",
    (4, BLOCK, True): "Q4_1",
    (5, BLOCK, True): "Q5_1",
}
_SUPERSCALED: Mapping[tuple[int, int, bool], tuple[str, Scale]] = {
    (2, 16, True): ("Q2_K", "int4-fp16"),
    (3, 16, False): ("Q3_K", "int6-fp16"),
    (4, BLOCK, True): ("Q4_K", "int6-fp16"),
    (5, BLOCK, True): ("Q5_K", "int6-fp16"),
    (6, 16, False): ("Q6_K", "int8-fp16"),
}


def type_of(grid: Grid, k: int) -> str | None:
    """Name ggml's type that holds rows of `k` on `grid`; None: none does."""
    if grid.zero_points or grid.trellis:
        return None
    if grid == OF_CODEBOOK or grid.codebook:  # of rows of whole superblocks the one, of others the other
        iq4, own = ("IQ4_NL", "fp16") if k % SUPERBLOCK else ("IQ4_XS", "int6-fp16")
        return iq4 if grid.scale in ("fp32", own) and k % BLOCK == 0 else None
    if grid == OF_2_BITS:
        grid = Q2_K
    if grid.scale == "fp16" and grid.block_size % BLOCK == 0 and k % grid.block_size == 0:
        return _FP16.get((grid.bits, BLOCK, grid.minimums))
    name, scale = _SUPERSCALED.get((grid.bits, grid.block_size, grid.minimums), (None, None))
    return name if grid.scale in ("fp32", scale) and k % SUPERBLOCK == 0 else None


def pack(matrix: QuantizedMatrix) -> Bytes:
    """Lay out a matrix [N, K] whose grid is that of a type: uint8 [N, bytes of a row].

    Raises:
        ValueError: its scales or minima are none that the type stores.
    """
    n, k = matrix.shape
    kind = type_of(matrix.grid, k)
    assert kind is not None
    if kind.startswith("IQ4"):
        return _of_codebook(matrix, kind).reshape(n, -1)
    if kind.endswith("_K"):
        return _superblocks(matrix, kind).reshape(n, -1)
    codes = matrix.codes.reshape(-1, BLOCK)
    of_blocks = [each for each in (matrix.scales, matrix.minimums) if each is not None]
    times = matrix.grid.block_size // BLOCK
    parts = [_halves(np.repeat(each, times, axis=1).reshape(-1)) for each in of_blocks]
    if matrix.grid.bits == 5:
        parts.append(np.packbits(codes >> np.uint8(4), axis=1, bitorder="little"))
    if matrix.grid.bits == 8:
        parts.append(codes ^ np.uint8(128))  # code - 128 in two's complement
    else:
        parts.append(_merged(codes & np.uint8(15), 16, (0, 4)))
    return np.concatenate(parts, axis=1).reshape(n, -1)


def _of_codebook(matrix: QuantizedMatrix, kind: str) -> Bytes:
    """Lay out blocks of IQ4_NL, or superblocks of IQ4_XS: uint8 [blocks, bytes]."""
    codes = matrix.codes if matrix.grid.codebook else codebook.of_bytes(matrix.codes)
    nibbles = _merged(codes.reshape(-1, BLOCK) & np.uint8(15), 16, (0, 4))
    if kind == "IQ4_NL":
        return np.concatenate([_halves(matrix.scales.reshape(-1)), nibbles], axis=1)
    found, supers = split(matrix.scales, IQ4_XS)
    six = (found.reshape(-1, SUPERBLOCK // BLOCK) + np.int8(32)).view(np.uint8)
    high = np.bitwise_or.reduce((six >> np.uint8(4)).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
    low = _merged(six & np.uint8(15), 1, (0, 4))
    d = supers.reshape(-1, 1).view(np.uint8)
    return np.concatenate([d, high.reshape(-1, 1).view(np.uint8), low, nibbles.reshape(len(d), -1)], axis=1)


def _superblocks(matrix: QuantizedMatrix, kind: str) -> Bytes:
    """Lay out the superblocks of a K type: uint8 [superblocks, bytes]."""
    grid, codes = Q2_K if matrix.grid == OF_2_BITS else matrix.grid, matrix.codes.reshape(-1, SUPERBLOCK)
    _, scale = _SUPERSCALED[grid.bits, grid.block_size, grid.minimums]
    stored = replace(grid, scale=scale)
    found, supers = split(matrix.scales, stored)
    scales, d = found.reshape(len(codes), -1), supers.reshape(-1, 1).view(np.uint8)
    low = codes & np.uint8(15)
    if kind == "Q3_K":
        six = (scales + np.int8(32)).view(np.uint8)
        packed = [_merged(six & np.uint8(15), 8, (0, 4)), _merged(six >> np.uint8(4), 4, (0, 2, 4, 6))]
        high = _merged(codes >> np.uint8(2), 32, range(8))
        return np.concatenate([high, _merged(codes & np.uint8(3), 32, (0, 2, 4, 6)), *packed, d], axis=1)
    if kind == "Q6_K":
        high = _merged(codes >> np.uint8(4), 32, (0, 2, 4, 6))
        return np.concatenate([_merged(low, 64, (0, 4)), high, scales.view(np.uint8), d], axis=1)
    assert matrix.minimums is not None
    below, lowers = split(-matrix.minimums, stored)
    both = scales.view(np.uint8), below.reshape(len(codes), -1).view(np.uint8)
    if kind == "Q2_K":
        nibbles, pairs = both[0] | both[1] << np.uint8(4), _merged(codes, 32, (0, 2, 4, 6))
        return np.concatenate([nibbles, pairs, d, lowers.reshape(-1, 1).view(np.uint8)], axis=1)
    parts = [d, lowers.reshape(-1, 1).view(np.uint8), _six_bit_scales(*both)]
    if kind == "Q5_K":
        parts.append(_merged(codes >> np.uint8(4), 32, range(8)))
    return np.concatenate([*parts, _merged(low, 32, (0, 4))], axis=1)


def _six_bit_scales(scales: Bytes, minima: Bytes) -> Bytes:
    """Put codes of 8 scales and 8 minima, [n, 8] each, into 12 bytes."""
    first, second = (each[:, :4] | each[:, 4:] >> np.uint8(4) << np.uint8(6) for each in (scales, minima))
    third = scales[:, 4:] & np.uint8(15) | minima[:, 4:] << np.uint8(4)
    return np.concatenate([first, second, third], axis=1)


def _merged(fields: Bytes, width: int, shifts: Sequence[int]) -> Bytes:
    """Put `len(shifts)` fields [n, elements] into each byte, those of `width` neighbours beside one another."""
    apart = fields.reshape(len(fields), -1, len(shifts), width)
    found: Bytes = np.bitwise_or.reduce(apart << np.array(shifts, np.uint8).reshape(1, 1, -1, 1), axis=2)
    return found.reshape(len(fields), -1)


def _halves(numbers: NDArray[np.float32]) -> Bytes:
    """Return numbers [n], which fp16 holds, as bytes [n, 2]."""
    return numbers.astype("<f2").reshape(-1, 1).view(np.uint8)
