"""Arithmetic of NVFP4: numbers of 4 bits (e2m1) in blocks of 16, with an fp8 scale (e4m3) each, and one of the tensor.

    w ≈ code·block_scale·scale,   code ∈ ±{0, ½, 1, 1½, 2, 3, 4, 6}

Weights are [K, N] in blocks along K; codes have their shape, block scales are fp8 [K / 16, N], the scale is one fp32
number, the reciprocal of 6·448 over the largest magnitude, which is what checkpoints store. Matrices that read one
tensor share it: servers multiply by them as one. (NVIDIA, "Pretraining large language models with NVFP4", arXiv
2509.25149, appendix B; OCP microscaling formats 1.0, section 5.3.3.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmforge.ir.fp4 import BLOCK

LARGEST_CODE, LARGEST_SCALE = 6.0, 448.0


def tensor_scale(peak: float) -> np.float32:
    """Return the scale of a tensor whose largest magnitude is `peak`; 1 where it holds zeros alone."""
    if peak <= 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        divisor = np.float32(LARGEST_CODE * LARGEST_SCALE) / np.float32(peak)
    return np.float32(1) / divisor if np.isfinite(divisor) else np.float32(1)


def divisor(scale: np.float32) -> np.float32:
    """Return a number whose reciprocal in fp32 is `scale`, as `tensor_scale` gives it.

    Raises:
        ValueError: there is none.
    """
    near = np.float32(1) / scale
    for candidate in (near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))):
        if np.float32(1) / candidate == scale:
            return candidate
    raise ValueError(f"{scale} is not the reciprocal of a number in fp32")


def scale(parts: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Return the scale that matrices [K, N] share.

    Raises:
        ValueError: they are not matrices of finite numbers whose rows divide into blocks.
    """
    for weight in parts:
        if weight.ndim != 2 or len(weight) % BLOCK or not np.isfinite(weight).all():
            raise ValueError(f"a finite matrix of blocks of {BLOCK} rows is needed; this has shape {weight.shape}")
    return np.asarray(tensor_scale(max(float(np.abs(weight).max(initial=0)) for weight in parts)))


def block_scales(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the scale of each block of a matrix [K, N], fp8 [K / 16, N]: its largest magnitude becomes code 6.

    The second operand is the scale of the tensor.
    """
    weight, whole = parts
    k, n = weight.shape
    peaks = np.abs(weight.astype(np.float32)).reshape(k // BLOCK, BLOCK, n).max(1)
    steps = np.minimum(peaks / (LARGEST_CODE * whole), LARGEST_SCALE)
    found: NDArray[Any] = steps.astype(ml_dtypes.float8_e4m3fn)
    return found


def codes(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Round a matrix [K, N] to codes, e2m1, under the scale of the tensor; ties go to the even one."""
    steps = np.repeat(block_scales(parts).astype(np.float32) * parts[1], BLOCK, axis=0)
    numbers = np.divide(parts[0].astype(np.float32), steps, out=np.zeros(steps.shape, np.float32), where=steps > 0)
    found: NDArray[Any] = np.clip(numbers, -LARGEST_CODE, LARGEST_CODE).astype(ml_dtypes.float4_e2m1fn)
    return found
