"""Arithmetic of weights in int8 with one scale for each block of a row, stored row by row.

Weights are [N, K], codes have their shape, scales are fp32 [N, K / block]: `w ≈ codes·scales`. The largest magnitude of
a block becomes 127.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 127
_BLOCKS = (64, 32, 16)


def block_of(k: int) -> int | None:
    """Choose the columns that share a scale, of `k`; None: no block divides them."""
    return next((block for block in _BLOCKS if k % block == 0), None)


def scales(parts: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Divide the largest magnitude of each block by the largest code; 1 for a block of zeros.

    The operands are the matrix [N, K] and the size of a block.

    Raises:
        ValueError: the matrix has NaN or infinity.
    """
    weight, block = parts
    if not np.isfinite(weight).all():
        raise ValueError("a matrix of finite numbers is needed; this has NaN or infinity")
    peaks = np.abs(weight).reshape(len(weight), -1, int(block)).max(2).astype(np.float32)
    return np.where(peaks == 0, np.float32(1), peaks / np.float32(LARGEST))


def codes(parts: Sequence[NDArray[Any]]) -> NDArray[np.int8]:
    """Round to codes, as `scales` has them; ties go to the even one."""
    weight, block = parts
    blocks = weight.astype(np.float32).reshape(len(weight), -1, int(block))
    rounded = np.rint(blocks / scales(parts)[:, :, None])
    result: NDArray[np.int8] = np.clip(rounded, -LARGEST, LARGEST).astype(np.int8).reshape(weight.shape)
    return result
