"""Products and factors of matrices by the compiled loops (products.c), in place of numpy's BLAS.

OpenBLAS lets its threads wait for each other with the processors busy: a factor of [576, 576] takes 134 CPU ms on two
threads of a machine that others use too, in place of 3 on one, and a product [192, 1536]·[1536, 576] 36 in place of 3.
And sums here have their terms in one order, whatever the number of threads and whichever processor with AVX2 or
AVX-512 adds them.
"""

from __future__ import annotations

import ctypes
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llmforge.quantization import rounding
from llmforge.quantization.grids import Float32

_FORMS = {"whole": 0, "upper": 1, "lower": 2}  # products.h
_SIZES = ("m", "n", "k", "a_row", "a_column", "b_row", "b_column", "c_row")
_TOKEN_SIZES = ("tokens", "rows", "columns", "a_stride", "b_stride")
_NOT_POSITIVE = 2


class _Product(ctypes.Structure):
    """`Product` of products.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_int32) for name in ("form", "sign", "add")),
        *((name, ctypes.c_void_p) for name in ("a", "b", "c")),
    )


class _TokenProduct(ctypes.Structure):
    """`TokenProduct` of products.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _TOKEN_SIZES),
        ("lower", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("a", "b", "total")),
    )


def multiply(a: Float32, b: Float32, *, threads: int, form: Literal["whole", "upper", "lower"] = "whole") -> Float32:
    """Return a·b, fp32 [M, N], of a [M, K] and b [K, N], which may be views.

    Of a b that is an `upper` or a `lower` triangle, most zeros are not multiplied.

    Raises:
        EnvironmentLacks: llmforge was installed without a C compiler.
        MemoryError: there is no memory for a copy of `a`.
    """
    (m, k), (rows, n) = a.shape, b.shape
    assert k == rows
    assert a.dtype == b.dtype == np.float32
    made = np.empty((m, n), np.float32)
    strides = (*(stride // 4 for each in (a, b) for stride in each.strides), n)
    job = _Product(m, n, k, *strides, _FORMS[form], 1, 0, a.ctypes.data, b.ctypes.data, made.ctypes.data)
    if rounding._library().llmforge_multiply(ctypes.byref(job), 4, threads):
        raise MemoryError(f"a product [{m}, {k}]·[{k}, {n}]")
    return made


def inverse_factor(matrix: NDArray[np.float64], threads: int) -> NDArray[np.float64] | None:
    """Return U⁻¹ of U upper triangular, UᵀU = `matrix` [N, N], which is overwritten; None: it is not positive definite.

    Raises:
        EnvironmentLacks: llmforge was installed without a C compiler.
        MemoryError: there is no memory for some of its rows.
    """
    assert matrix.flags.c_contiguous
    assert matrix.dtype == np.float64
    inverse = np.zeros_like(matrix)
    address = ctypes.c_void_p(matrix.ctypes.data), ctypes.c_void_p(inverse.ctypes.data)
    failed = rounding._library().llmforge_factor(*address, ctypes.c_int64(len(matrix)), threads)
    if failed not in (0, _NOT_POSITIVE):
        raise MemoryError(f"a factor of [{len(matrix)}, {len(matrix)}]")
    return None if failed else inverse


def has_bf16() -> bool:
    """Say whether `add_tokens` is compiled here, and this processor has its instructions, AVX512-BF16."""
    return rounding.place() is not None and bool(rounding._library().llmforge_has_bf16())


def add_tokens(total: Float32, a: Float32, b: Float32, *, threads: int) -> None:
    """Add aᵀ·b of a [tokens, M] and b [tokens, N], rounded to bf16, to `total` [M, N]; sums are fp32.

    Where a is b, only what is on and below the diagonal of the total is sure to be added.

    Raises:
        MemoryError: there is no memory for a and b in bf16.
    """
    if not len(a):
        return  # strides of no numbers say nothing
    assert total.flags.c_contiguous
    assert a.strides[1] == b.strides[1] == 4
    assert total.shape == (a.shape[1], b.shape[1])
    strides = a.strides[0] // 4, b.strides[0] // 4
    places = a.ctypes.data, b.ctypes.data, total.ctypes.data
    job = _TokenProduct(len(a), *total.shape, *strides, a is b, *places)
    if rounding._library().llmforge_add_tokens(ctypes.byref(job), threads):
        raise MemoryError(f"a sum over {len(a)} tokens [{total.shape[0]}, {total.shape[1]}]")
