"""Arithmetic of MXFP4 and MXFP8: numbers of 4 bits (e2m1) or 8 (e4m3) in blocks of 32, whose scale is a power of two.

    w ≈ code·2**(exponent - 127)

Weights are [K, N] in blocks along K; codes have their shape, scales are e8m0 [K / 32, N]: the smallest power of two
under which no number of the block exceeds the largest code. (OCP microscaling formats 1.0, sections 5.2 and 6.3; scales
round up, as those of ModelOpt 0.47 do, torch/quantization/qtensor/mxfp8_tensor.py.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir.derived import Function
from llmforge.ir.mx import BLOCK, LARGEST

FP4, FP8, E8M0 = ir.DataType.FLOAT4E2M1, ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E8M0
DTYPES: Mapping[str, ir.DataType] = {"fp4": FP4, "fp8": FP8}
_LEAST = np.float32(2.0**-126)  # scale of a block of zeros


def _scales(dtype: ir.DataType, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Choose the scale of each block of one matrix [K, N].

    Raises:
        ValueError: it is no matrix of finite numbers whose rows divide into blocks.
    """
    [weight] = parts
    if weight.ndim != 2 or len(weight) % BLOCK or not np.isfinite(weight).all():
        raise ValueError(f"a finite matrix of blocks of {BLOCK} rows is needed; this has shape {weight.shape}")
    k, n = weight.shape
    peaks = np.abs(weight.astype(np.float32)).reshape(k // BLOCK, BLOCK, n).max(1) / np.float32(LARGEST[dtype])
    fraction, exponent = np.frexp(np.maximum(peaks, _LEAST))  # a fraction of a half is a power of two itself
    found: NDArray[Any] = np.ldexp(np.float32(1), exponent - (fraction == 0.5)).astype(ml_dtypes.float8_e8m0fnu)
    return found


def _codes(dtype: ir.DataType, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Round one matrix [K, N] to codes under `_scales`; ties go to the even one."""
    limit = np.float32(LARGEST[dtype])
    steps = np.repeat(_scales(dtype, parts).astype(np.float32), BLOCK, axis=0)
    found: NDArray[Any] = np.clip(parts[0].astype(np.float32) / steps, -limit, limit).astype(dtype.numpy())
    return found


CODES: Mapping[ir.DataType, Function] = {dtype: partial(_codes, dtype) for dtype in LARGEST}
SCALES: Mapping[ir.DataType, Function] = {dtype: partial(_scales, dtype) for dtype in LARGEST}
