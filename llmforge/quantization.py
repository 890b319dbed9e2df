"""Arithmetic of weight quantization: grids, rounding to nearest, GPTQ, packing. No graph, no files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Grid:
    """Where quantized values may lie: one scale (and zero point) for `block_size` neighbours along K."""

    bits: int
    block_size: int
    symmetric: bool


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized [N, K] matrix: `w ≈ (codes - zero_points) * scales`, block by block along K.

    codes: uint8 [N, K], 0 … 2**bits - 1, unpacked.  scales: fp32 [N, ceil(K / block_size)].
    zero_points: uint8 of the scales' shape; None where the grid is symmetric (2**(bits - 1) everywhere).
    """

    grid: Grid
    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8] | None
