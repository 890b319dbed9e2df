"""Arithmetic of weights in 8 bits with one scale an output feature: int8, or fp8 (4 bits of exponent, 3 of mantissa).

Weights are [K, N] (input by output features), codes have their shape, scales are fp32 [N]: `w ≈ codes·scales`. The
largest magnitude of a column becomes the largest code.

fp8 may have one scale for several matrices (`tensor_scale`), or one for each square of 128 × 128 instead (DeepSeek-V3,
arXiv 2412.19437, section 3.3.2), K a multiple of 128, the last squares along N narrower: scales are fp32 [K / 128, N],
those of a square alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir.derived import Function
from llmforge.quantization.formats import FP8_CHANNEL, INT8_CHANNEL

INT8, FP8 = ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN
DTYPES: Mapping[str, ir.DataType] = {"int8": INT8, "fp8": FP8}
SQUARE = 128  # input and output features that share a scale, and input features that share one of a token
LARGEST: Mapping[ir.DataType, float] = {INT8: INT8_CHANNEL.largest, FP8: FP8_CHANNEL.largest}


def _scales(dtype: ir.DataType, parts: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Divide the largest magnitude of each column of one matrix [K, N] by the largest code; 1 for a column of zeros."""
    [weight] = parts
    if weight.ndim != 2 or not np.isfinite(weight).all():
        raise ValueError(f"a matrix of finite numbers is needed; this has shape {weight.shape}, or NaN or infinity")
    scales = np.abs(weight).max(0, initial=0).astype(np.float32) / np.float32(LARGEST[dtype])
    return np.where(scales == 0, np.float32(1), scales)


def _codes(dtype: ir.DataType, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Round one matrix [K, N] to codes; ties go to the even one."""
    weight = parts[0].astype(np.float32)
    return codes(weight, _scales(dtype, [weight]), dtype)


def codes(numbers: NDArray[np.float32], scales: NDArray[np.float32], dtype: ir.DataType) -> NDArray[Any]:
    """Divide `numbers` by `scales`, which broadcast, and round to codes; ties go to the even one."""
    limit = np.float32(LARGEST[dtype])  # a quotient may be a bit above it, which in fp8 would become NaN
    steps = np.clip(numbers / scales, -limit, limit)
    rounded: NDArray[Any] = (np.rint(steps) if dtype == INT8 else steps).astype(dtype.numpy())
    return rounded


def tensor_scale(parts: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Divide the largest magnitude of matrices that share a scale by that of fp8: fp32 [], 1 for zeros alone.

    Raises:
        ValueError: they are no finite numbers.
    """
    if not all(np.isfinite(weight).all() for weight in parts):
        raise ValueError("matrices of finite numbers are needed; these have NaN or infinity")
    peak = np.float32(max(np.abs(weight).max(initial=0) for weight in parts))
    return np.asarray(peak / np.float32(LARGEST[FP8]) if peak else np.float32(1), np.float32)


def tensor_codes(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Round the first matrix to fp8 under the `tensor_scale` of all others; ties go to the even code."""
    weight, *beside = parts
    return codes(weight.astype(np.float32), tensor_scale(beside), FP8)


def square_scales(parts: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Divide the largest magnitude of each square of one matrix [K, N] by that of fp8; 1 for a square of zeros.

    Raises:
        ValueError: it is no finite matrix whose rows divide into squares.
    """
    [weight] = parts
    if weight.ndim != 2 or len(weight) % SQUARE or not np.isfinite(weight).all():
        raise ValueError(
            f"a finite matrix of {SQUARE}·n rows is needed; this has shape {weight.shape}, NaN or infinity"
        )
    k, n = weight.shape
    peaks = np.abs(weight).reshape(k // SQUARE, SQUARE, n).max(1).astype(np.float32)
    wide = np.maximum.reduceat(peaks, np.arange(0, n, SQUARE), axis=1) / np.float32(LARGEST[FP8])
    return np.repeat(np.where(wide == 0, np.float32(1), wide), SQUARE, axis=1)[:, :n]


def square_codes(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Round one matrix [K, N] to fp8 under `square_scales`; ties go to the even code."""
    weight = parts[0].astype(np.float32)
    return codes(weight, np.repeat(square_scales([weight]), SQUARE, axis=0), FP8)


CODES: Mapping[ir.DataType, Function] = {dtype: partial(_codes, dtype) for dtype in LARGEST}
SCALES: Mapping[ir.DataType, Function] = {dtype: partial(_scales, dtype) for dtype in LARGEST}


BLOCK_LARGEST = 127
_BLOCKS = (64, 32, 16)


def block_of(k: int) -> int | None:
    """Choose the columns that share a scale, of `k`; None: no block divides them."""
    return next((block for block in _BLOCKS if k % block == 0), None)


def block_scales(parts: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Divide the largest magnitude of each block by the largest code; 1 for a block of zeros.

    The operands are the matrix [N, K] and the size of a block.

    Raises:
        ValueError: the matrix has NaN or infinity.
    """
    weight, block = parts
    if not np.isfinite(weight).all():
        raise ValueError("a matrix of finite numbers is needed; this has NaN or infinity")
    peaks = np.abs(weight).reshape(len(weight), -1, int(block)).max(2).astype(np.float32)
    return np.where(peaks == 0, np.float32(1), peaks / np.float32(BLOCK_LARGEST))


def block_codes(parts: Sequence[NDArray[Any]]) -> NDArray[np.int8]:
    """Round to block_codes, as `block_scales` has them; ties go to the even one."""
    weight, block = parts
    blocks = weight.astype(np.float32).reshape(len(weight), -1, int(block))
    rounded = np.rint(blocks / block_scales(parts)[:, :, None])
    result: NDArray[np.int8] = np.clip(rounded, -BLOCK_LARGEST, BLOCK_LARGEST).astype(np.int8).reshape(weight.shape)
    return result
