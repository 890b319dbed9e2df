"""Causal attention of one window by the compiled loops (attention.inc), and its gradients.

torch multiplies by MKL, which on AMD's processors uses half of their vectors. 512 tokens, 9 heads of 64 channels, one
thread of an EPYC (Zen 5) that others use, too: 9.8 CPU ms there, and 36 with gradients; 4.0 and 14 here. On one of
Zen 4 that others use, too, 3.8 and 13, and 2.4 and 7.7 in products of bf16; 16 heads of 128 channels take 15 and 53,
and 7.5 and 26.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import numpy as np

from llmforge.quantization import rounding
from llmforge.quantization.grids import Float32

_SIZES = ("heads", "group", "tokens", "width", "v_width")
_STRIDED = ("q", "k", "v", "out", "d")
_ARRAYS = ("q", "k", "v", "out", "lse", "d_out", "d_q", "d_k", "d_v")


class _Attention(ctypes.Structure):
    """`Attention` of attention.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((f"{name}_{of}", ctypes.c_int64) for name in _STRIDED for of in ("head", "token")),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        ("scale", ctypes.c_float),
        ("bf16", ctypes.c_int32),
    )


class Attended(NamedTuple):
    """What attention makes, [heads, tokens, V], and the logarithm to base 2 of what its weights are divided by."""

    out: Float32
    lse: Float32  # [heads, tokens]


@cache
def is_compiled() -> bool:
    """Say whether `attend` is compiled here, and this processor has its instructions, AVX-512."""
    return rounding.place() is not None and bool(rounding._library().llmforge_can_attend())


def attend(q: Float32, k: Float32, v: Float32, scale: float, *, bf16: bool = False) -> Attended:
    """Let each token of q [heads, tokens, D] attend to itself and those before it.

    Keys k are [kv_heads, tokens, D], values v [kv_heads, tokens, V]; all is fp32, and channels lie next to each other.
    It runs on this thread alone. With `bf16`, which needs `products.has_bf16`, factors of products are rounded to that
    (q times scale, k, weights before they are divided by their sum, v); sums and softmax are fp32.

    Raises:
        MemoryError: there is no memory for the scores of 64 queries.
    """
    heads, tokens, _ = q.shape
    made = np.empty((tokens, heads, v.shape[2]), np.float32).transpose(1, 0, 2)
    found = Attended(made, np.empty((heads, tokens), np.float32))
    _run(q, k, v, found, scale, bf16=bf16)
    return found


def attend_backwards(
    q: Float32, k: Float32, v: Float32, found: Attended, scale: float, gradient: Float32, *, bf16: bool = False
) -> tuple[Float32, Float32, Float32]:
    """Return gradients in q, k and v, of the `gradient` in what was `found`, [heads, tokens, V]; see `attend`.

    With `bf16`, if it was found so: factors are also `gradient`, weights and gradients of scores.
    """
    gradients = np.empty(q.shape, np.float32), np.zeros(k.shape, np.float32), np.zeros(v.shape, np.float32)
    _run(q, k, v, found, scale, gradient, gradients, bf16=bf16)
    return gradients


def _run(
    q: Float32,
    k: Float32,
    v: Float32,
    found: Attended,
    scale: float,
    gradient: Float32 | None = None,
    gradients: tuple[Float32, ...] = (),
    *,
    bf16: bool,
) -> None:
    heads, tokens, width = q.shape
    strided = (q, k, v, found.out, found.out if gradient is None else gradient)
    assert all(each.strides[2] == 4 or each.shape[2] == 1 for each in strided)
    assert k.shape == (len(k), tokens, width)
    assert v.shape[:2] == k.shape[:2]
    assert heads % len(k) == 0
    sizes = (heads, heads // len(k), tokens, width, v.shape[2])
    strides = (each.strides[axis] // 4 for each in strided for axis in (0, 1))
    arrays = (q, k, v, *found, gradient, *gradients)
    places = [None if each is None else each.ctypes.data for each in arrays]
    places += [None] * (len(_ARRAYS) - len(places))
    if rounding._library().llmforge_attend(ctypes.byref(_Attention(*sizes, *strides, *places, scale, bf16))):
        raise MemoryError(f"attention of {tokens} tokens")
