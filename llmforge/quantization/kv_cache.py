"""Keys and values as caches of the CPU kernels hold them, a slot a token and head (native/kernels.h, `SLOT_*`).

The kernels (native/kv_slots.inc) write the same bytes: each operation rounds once, in this order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.quantization.formats import SlotFormat

Float32 = NDArray[np.float32]
_LANES, _FITS = 16, 4  # native/kv_slots.inc
_TOP4, _TOP8 = np.float32(15), np.float32(127)  # of codes 0 … 15, of codes mirrored around 0


def write(x: Float32, form: SlotFormat, scales: Float32 | None = None) -> NDArray[np.uint8]:
    """Store x [..., head_dim] in slots, uint8 [..., bytes]; `scales`, which x is divisible by, are static ones.

    A slot is what it holds of NaN or infinity: not finite as a whole, where it has a scale of its own.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        x = hadamard(x) if form.hadamard else np.asarray(x, np.float32)
        if form.scale != "token":
            assert scales is not None, "a static scale"
            codes: NDArray[np.int8] = np.clip(np.rint(x / scales), -_TOP8 - 1, _TOP8).astype(np.int8)
            return codes.view(np.uint8)
        return _write4(x) if form.dtype == "int4" else _write8(x)


def read(slots: NDArray[np.uint8], form: SlotFormat, head_dim: int, scales: Float32 | None = None) -> Float32:
    """Return what slots [..., bytes] stand for, fp32 [..., head_dim]."""
    with np.errstate(invalid="ignore", over="ignore"):
        held: Float32 = np.asarray(_stored(slots, form, head_dim, scales), np.float32)
        return (
            np.asarray(hadamard(held) / np.float32(rotated_together(head_dim)), np.float32) if form.hadamard else held
        )


def _stored(slots: NDArray[np.uint8], form: SlotFormat, head_dim: int, scales: Float32 | None) -> NDArray[Any]:
    if form.scale != "token":
        assert scales is not None, "a static scale"
        return np.asarray(slots.view(np.int8) * scales)
    if form.dtype == "int8":
        return np.asarray(slots[..., :head_dim].view(np.int8) * _halves(slots[..., head_dim:]))
    half = head_dim // 2
    codes = np.concatenate([slots[..., :half] & 15, slots[..., :half] >> 4], axis=-1)
    return np.asarray(_halves(slots[..., half + 2 :]) + codes * _halves(slots[..., half : half + 2]))


def rotated_together(n: int) -> int:
    """Return the largest power of two that divides n: so many of n channels are rotated together."""
    return n & -n


def hadamard(x: Float32) -> Float32:
    """Multiply blocks of x [..., n], of the largest power of two that divides n, with the Hadamard matrix of ±1.

    Twice gives x times the length of a block.
    """
    size = rotated_together(x.shape[-1])
    turned = np.array(x, np.float32).reshape(*x.shape[:-1], -1, size)
    for _ in range(size.bit_length() - 1):
        even, odd = turned[..., ::2], turned[..., 1::2]
        turned = np.concatenate([even + odd, even - odd], axis=-1)
    return turned.reshape(x.shape)


def _write8(x: Float32) -> NDArray[np.uint8]:
    most = np.abs(x).max(-1, keepdims=True)
    scale = _bf16_out(most / _TOP8)
    codes = np.rint(x / np.where(scale == 0, np.float32(1), scale))
    codes = np.where(np.isnan(codes), -_TOP8 - 1, np.clip(codes, -_TOP8 - 1, _TOP8))
    return _joined(codes.astype(np.int8).view(np.uint8), scale)


def _write4(x: Float32) -> NDArray[np.uint8]:
    """Span x first; then take the scale and the offset that fit best, in least squares, to the codes that this gave."""
    n = x.shape[-1]
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    low = _bf16_down(np.where(np.isnan(high - low), np.float32(np.nan), low)) + np.float32(0)  # no -0
    scale = _bf16_out((high - low) / _TOP4) + np.float32(0)
    codes, wide = _codes(x, scale, low), x.astype(np.float64)
    total = _in_order(wide)
    for _ in range(_FITS):
        count, squares = codes.sum(-1, keepdims=True), (codes**2).sum(-1, keepdims=True)
        spread, both = (squares * n - count * count).astype(np.float64), _in_order(wide * codes)
        fitted = _bf16_near(((both - count * total / n) * n / spread).astype(np.float32))
        better = (spread > 0) & (fitted > 0) & (fitted < np.inf)
        offset = _bf16_near(((total - fitted.astype(np.float64) * count) / n).astype(np.float32))
        scale, low = np.where(better, fitted, scale), np.where(better, offset, low)
        codes = np.where(better, _codes(x, scale, low), codes)
    codes8 = codes.astype(np.uint8)
    return _joined(codes8[..., : n // 2] | codes8[..., n // 2 :] << np.uint8(4), scale, low)


def _in_order(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Add up the last axis, every sixteenth number, then these sums: what is not exact must have an order."""
    sums = np.add.accumulate(x.reshape(*x.shape[:-1], -1, _LANES), axis=-2)[..., -1, :]
    return np.asarray(np.add.accumulate(sums, axis=-1)[..., -1:])


def _codes(x: Float32, scale: Float32, low: Float32) -> NDArray[np.int64]:
    codes = np.rint((x - low) / np.where(scale == 0, np.float32(1), scale))
    return np.where(codes > 0, np.minimum(codes, _TOP4), 0).astype(np.int64)


def _joined(codes: NDArray[np.uint8], *halves: Float32) -> NDArray[np.uint8]:
    """Put bf16 numbers [..., 1] behind codes."""
    stored = [np.where(np.isnan(h), np.uint16(0x7FC0), h.view(np.uint32) >> 16).astype(np.uint16) for h in halves]
    return np.concatenate([codes, *(half.view(np.uint8) for half in stored)], axis=-1)


def _halves(stored: NDArray[np.uint8]) -> Float32:
    """Read bf16 numbers [..., 2 bytes]."""
    wide = np.ascontiguousarray(stored).view(np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32)


def _bf16_out(x: Float32) -> Float32:
    return _bf16(x, lambda bits: bits + np.uint32(0xFFFF))


def _bf16_down(x: Float32) -> Float32:
    return _bf16(x, lambda bits: np.where(bits >> 31, bits + np.uint32(0xFFFF), bits))


def _bf16_near(x: Float32) -> Float32:
    return _bf16(x, lambda bits: bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1)))


def _bf16(x: Float32, add: Any) -> Float32:
    bits = np.asarray(x, np.float32).view(np.uint32)
    cut = np.asarray(add(bits) & np.uint32(0xFFFF0000), np.uint32).view(np.float32)
    return np.where(np.isnan(x), x, cut)
