"""The codebook of GGUF's IQ4 types: what a code of 4 bits stands for are levels that lie closer together around zero.

Weights are nearly normal, so that levels which are denser where most weights are lose less than even ones. They are
whole numbers of 8 bits, so that a kernel for codes of 8 bits with a minimum has the same numbers: `as_bytes`.
Source: `kvalues_iq4nl` in ggml-common.h of llama.cpp.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LEVELS: NDArray[np.float32] = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32
)
_BORDERS = (LEVELS[1:] + LEVELS[:-1]) / 2
LOWEST = np.float32(-127)


def decode(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the levels, fp32, that codes uint8 of any shape stand for."""
    levels: NDArray[np.float32] = LEVELS[codes]
    return levels


def nearest(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Choose the codes whose levels are nearest to `values`, in units of a level."""
    return np.searchsorted(_BORDERS, values).astype(np.uint8)


def as_bytes(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return each code's level above the lowest one, 0 … 240."""
    return (LEVELS - LOWEST).astype(np.uint8)[codes]


def of_bytes(levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Undo `as_bytes`.

    Raises:
        ValueError: one of them is no level.
    """
    known = (LEVELS - LOWEST).astype(np.uint8)
    codes = np.searchsorted(known, levels).astype(np.uint8)
    if not np.array_equal(known[np.minimum(codes, len(known) - 1)], levels):
        raise ValueError("these codes are no levels of the codebook")
    return codes
