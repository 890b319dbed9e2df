"""Weights in FP8 (E4M3) under scales of square blocks, as DeepSeek V3 publishes them.

A weight `X.weight` [N, K] in fp8 has `X.weight_scale_inv` beside it, in spite of its name the number to multiply by:
fp32, bf16 or E8M0, [ceil(N / rows), ceil(K / columns)], where `weight_block_size` of the configuration gives rows and
columns; without it, one number for the whole. Sources: `weight_dequant` of DeepSeek-V3's `inference/kernel.py`;
transformers' `integrations/finegrained_fp8.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.checkpoint.quantized.microscaling import e8m0


def dequantize(weight: NDArray[Any], scales: NDArray[Any], block_size: tuple[int, int] | None) -> NDArray[np.float32]:
    """Return the fp32 weights [..., N, K] of fp8 ones: each product is rounded once, to fp32.

    Blocks at the lower and the right edge may be cut.  scales: [..., blocks, blocks], fp32, bf16, E8M0 or uint8 that
    is read as E8M0.

    Raises:
        ValueError: the scales are not one for each block.
    """
    factors = e8m0(scales) if scales.dtype == np.uint8 else scales.astype(np.float32)
    values = weight.astype(np.float32)
    if block_size is None:
        if factors.size != 1:
            raise ValueError(f"one scale is expected for the whole, there are {factors.size}")
        values *= factors.reshape(())
        return values
    rows, columns = block_size
    wanted = (*weight.shape[:-2], -(-weight.shape[-2] // rows), -(-weight.shape[-1] // columns))
    if factors.shape != wanted:
        raise ValueError(f"scales of shape {list(wanted)} are expected, they are {list(factors.shape)}")
    for band in range(wanted[-2]):  # of rows: never more than one band of spread scales
        spread = np.repeat(factors[..., band, :], columns, axis=-1)[..., : weight.shape[-1]]
        values[..., band * rows : (band + 1) * rows, :] *= spread[..., None, :]
    return values
