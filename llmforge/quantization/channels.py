"""Arithmetic of weights in 8 bits with one scale an output feature: int8, or fp8 (4 bits of exponent, 3 of mantissa).

Weights are [K, N] (input by output features), codes have their shape, scales are fp32 [N]: `w ≈ codes·scales`. The
largest magnitude of a column becomes the largest code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir.derived import Function
from llmforge.quantization.formats import FP8_CHANNEL, INT8_CHANNEL

INT8, FP8 = ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN
LARGEST: Mapping[ir.DataType, float] = {INT8: INT8_CHANNEL.largest, FP8: FP8_CHANNEL.largest}


def int8_scales(parts: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Return the scales of one matrix [K, N] for int8 codes."""
    return _scales(parts[0], INT8)


def fp8_scales(parts: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Return the scales of one matrix [K, N] for fp8 codes."""
    return _scales(parts[0], FP8)


def int8_codes(parts: Sequence[NDArray[Any]]) -> NDArray[np.int8]:
    """Round one matrix [K, N] to int8 codes; ties go to the even one."""
    weight = parts[0].astype(np.float32)
    codes: NDArray[np.int8] = np.rint(weight / _scales(weight, INT8)).astype(np.int8)
    return codes


def fp8_codes(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Round one matrix [K, N] to fp8 codes; ties go to the even one."""
    weight = parts[0].astype(np.float32)
    limit = np.float32(LARGEST[FP8])  # a quotient may be a bit above it, which would become NaN
    codes: NDArray[Any] = np.clip(weight / _scales(weight, FP8), -limit, limit).astype(ml_dtypes.float8_e4m3fn)
    return codes


CODES: Mapping[ir.DataType, Function] = {INT8: int8_codes, FP8: fp8_codes}
SCALES: Mapping[ir.DataType, Function] = {INT8: int8_scales, FP8: fp8_scales}


def _scales(weight: NDArray[Any], dtype: ir.DataType) -> NDArray[np.float32]:
    """Divide the largest magnitude of each column by the largest code; 1 for a column of zeros.

    Raises:
        ValueError: `weight` is not a matrix of finite numbers.
    """
    if weight.ndim != 2 or not np.isfinite(weight).all():
        raise ValueError(f"a matrix of finite numbers is needed; this has shape {weight.shape}, or NaN or infinity")
    scales = np.abs(weight).max(0, initial=0).astype(np.float32) / np.float32(LARGEST[dtype])
    return np.where(scales == 0, np.float32(1), scales)
