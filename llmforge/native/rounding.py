"""Rounding of weights by the compiled kernels: the bits that `llmforge.quantization.grids` computes in numpy.

The interpreter is free meanwhile: other threads go on.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge import native

_STORED = {"float32": 0, "float16": 1, "bfloat16": 2}  # kernels.h, STORED_*


class _RoundingArguments(ctypes.Structure):
    """kernels.h, `Rounding`."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("stored", ctypes.c_int),
        ("bits", ctypes.c_int),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zero_points", ctypes.c_void_p),
    ]


@cache
def _library() -> ctypes.CDLL | None:
    pack = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p], None
    levels = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, ctypes.c_int, ctypes.c_void_p], None
    rounding = [ctypes.POINTER(_RoundingArguments)], ctypes.c_int
    return native.functions({"round": rounding, "pack": pack, "nearest_levels": levels}, ctypes.CDLL)


def takes(weight: NDArray[Any]) -> bool:
    """Say whether there are kernels for matrices of the dtype of `weight` here."""
    return _library() is not None and weight.dtype.isnative and weight.dtype.name in _STORED


def round_to_nearest(
    weight: NDArray[Any],
    bits: int,
    block_size: int,
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    zero_points: NDArray[np.uint8] | None,
) -> bool:
    """Write codes, scales and zero points (None: a symmetric grid) of `weight` [N, K], which is one that `takes` takes.

    The others are contiguous: codes [N, K], scales and zero points [N, blocks]. Return False, and what was written is
    of no meaning, where a weight is NaN or infinite.

    Raises:
        MemoryError: there is none for a row.
    """
    library = _library()
    assert library is not None, "the kernels are not compiled here"
    stored = np.ascontiguousarray(weight)
    n, k = stored.shape
    rounding = _RoundingArguments(
        stored.ctypes.data,
        n,
        k,
        block_size,
        _STORED[stored.dtype.name],
        bits,
        codes.ctypes.data,
        scales.ctypes.data,
        None if zero_points is None else zero_points.ctypes.data,
    )
    found = library.llmforge_round(ctypes.byref(rounding))
    if found < 0:
        raise MemoryError(f"a row of {k} numbers")
    return bool(found)


def nearest_levels(values: NDArray[np.float32], weights: NDArray[np.float32], bits: int) -> NDArray[np.uint8] | None:
    """Choose codes [N, K] of a trellis as `quantization.trellis.nearest` does, of matrices [N, K]; None: no kernels."""
    library = _library()
    if library is None:
        return None
    values, weights = np.ascontiguousarray(values, np.float32), np.ascontiguousarray(weights, np.float32)
    assert values.shape == weights.shape
    codes = np.empty(values.shape, np.uint8)
    places = values.ctypes.data, weights.ctypes.data, *values.shape, bits, codes.ctypes.data
    library.llmforge_nearest_levels(*places)
    return codes


def pack(codes: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """Pack 4-bit codes [N, C], C even, into bytes [N, C / 2], the first of a pair in the low half; None: no kernels."""
    library = _library()
    if library is None:
        return None
    pairs = np.ascontiguousarray(codes)
    packed = np.empty((len(codes), codes.shape[1] // 2), np.uint8)
    library.llmforge_pack(pairs.ctypes.data, packed.size, packed.ctypes.data)
    return packed
