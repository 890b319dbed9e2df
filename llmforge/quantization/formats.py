"""Formats of quantized numbers, and the bits that each number of one takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

BITS: Mapping[str, int] = (
    {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "fp4": 4}
    | {f"int{bits}": bits for bits in (3, 4, 5, 6, 8)}
    | {"trellis4": 4}
)  # quantization.trellis
SUPERBLOCK = 256  # input features that share a superscale, 16 bits, where scales are int8


@dataclass(frozen=True)
class Format:
    """A way to store numbers: `value ≈ (code - zero_point) · scale`.

    `dtype` is that of a code, `scale` that of a scale, both of `BITS`; a zero point takes 4 bits, or 8 where a code has
    more than 4. `block_size` neighbours along the input features share a scale; None: all numbers of a channel do (an
    output feature of a weight, a cached channel of a KV head).
    """

    dtype: str
    block_size: int | None
    scale: str = "fp32"
    zero_points: bool = False

    @property
    def name(self) -> str:
        """The format in a word: int4-block32-asymmetric, fp8-channel."""
        shared = f"block{self.block_size}" if self.block_size else "channel"
        scale = "" if self.scale == "fp32" else f"-{self.scale}"
        return f"{self.dtype}-{shared}{scale}" + "-asymmetric" * self.zero_points

    @property
    def largest(self) -> float:
        """The largest code of a format whose codes are mirrored around 0.

        int8: of -128 … 127, as TensorRT has it. fp8: OCP 8-bit floating point, E4M3: 1.75·2⁸.
        """
        return {"int8": 127.0, "fp8": 448.0}[self.dtype]

    @property
    def bits_per_number(self) -> float:
        """The bits of a number with its share of scale and zero point; the scale of a channel is not counted."""
        bits, block_size = BITS[self.dtype], self.block_size or math.inf
        shared = BITS[self.scale] + self.zero_points * (4 if bits <= 4 else 8)
        superscale = 16 / max(SUPERBLOCK, block_size) if self.scale == "int8" else 0
        return bits + shared / block_size + superscale


INT8_CHANNEL, FP8_CHANNEL = Format("int8", None), Format("fp8", None)
INT8_KV = INT8_CHANNEL  # of a cache: each channel of a head has a scale
NVFP4 = Format("fp4", 16, "fp8")  # 4 bits in blocks of 16, as NVIDIA's GPUs multiply them
# What MatMulNBits, QMoE and GatherBlockQuantized of ONNX Runtime read; 16 is the smallest block of theirs.
BLOCKS = tuple(
    Format(dtype, size, zero_points=zero_points)
    for dtype in ("int4", "int8")
    for size in (16, 32, 64, 128)
    for zero_points in (False, True)
)
# What integer codes in blocks may be beside them: more widths, narrower scales, blocks up to a whole row.
NATIVE = tuple(
    Format(dtype, 2**size, scale, zero_points=zero_points)
    for dtype in ("int3", "int4", "int5", "int6", "int8")
    for size in range(4, 17)
    for scale in ("fp32", "fp16", "int8")
    for zero_points in (False, True)
)
TRELLISES = tuple(Format("trellis4", 2**size, scale) for size in range(4, 17) for scale in ("fp32", "fp16", "int8"))
