"""Numbers of 4 bits under shared scales: MXFP4 as GPT-OSS stores it, and the parts that NVFP4 has in common with it.

A number is E2M1 (one sign, two exponent bits, one of the mantissa), two to a byte, the first in the low half. Sources:
OCP Microscaling Formats (MX) 1.0, sections 5.3.3 and 5.4.1; transformers' `integrations/mxfp4.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=-1)  # of every byte: [256, 2]
_E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.nan).astype(np.float32)  # of every byte
MXFP4_BLOCK = 32
NVFP4_BLOCK = 16


def unpack_e2m1(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Read two numbers out of every byte: uint8 [..., n] to fp32 [..., 2n]."""
    return _PAIRS[packed].reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def e8m0(scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Read scales that are an exponent alone, 2**(byte - 127); 255 is NaN."""
    return _E8M0[scales]


def scaled_blocks(values: NDArray[np.float32], scales: NDArray[np.float32], block_size: int) -> NDArray[np.float32]:
    """Multiply neighbours along the last axis by the scale of their block: [..., K] by [..., K / block_size]."""
    blocks = values.reshape(*scales.shape, block_size)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is infinity, and refused where it is used
        return (blocks * scales[..., None]).reshape(values.shape)


def dequantize_mxfp4(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[Any]:
    """Return the bf16 weights [E, K, N] of experts, the transpose of how they are stored.

    blocks: uint8 [E, N, K / 32, 16], two numbers a byte.  scales: E8M0 as uint8 [E, N, K / 32]. Every number is exact
    in bf16 but the few beyond its range. Bit-equal to transformers' `convert_moe_packed_tensors`.

    Raises:
        ValueError: blocks and scales do not belong together.
    """
    if blocks.ndim != 4 or blocks.shape[:-1] != scales.shape or 2 * blocks.shape[-1] != MXFP4_BLOCK:
        raise ValueError(f"blocks of shape {list(blocks.shape)} and scales of shape {list(scales.shape)}")
    experts, rows, count, _ = blocks.shape
    import ml_dtypes  # what serves has no such package

    result = np.empty((experts, count * MXFP4_BLOCK, rows), ml_dtypes.bfloat16)
    for expert in range(experts):  # one at a time in fp32
        values = unpack_e2m1(blocks[expert]).reshape(rows, -1)
        result[expert] = scaled_blocks(values, e8m0(scales[expert]), MXFP4_BLOCK).T.astype(ml_dtypes.bfloat16)
    return result
