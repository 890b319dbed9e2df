"""Formats of quantized numbers, and the bits that each number of one takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

BITS: Mapping[str, int] = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4, "fp4": 4}


@dataclass(frozen=True)
class Format:
    """A way to store numbers: `value ≈ (code - zero_point) · scale`.

    `dtype` is that of a code and of its zero point, `scale` that of a scale, both of `BITS`. `block_size` neighbours
    along the input features share a scale; None: all numbers of a channel do (an output feature of a weight, a cached
    channel of a KV head).
    """

    dtype: str
    block_size: int | None
    scale: str = "fp32"
    zero_points: bool = False

    @property
    def name(self) -> str:
        """The format in a word: int4-block32-asymmetric, fp8-channel."""
        shared = f"block{self.block_size}" if self.block_size else "channel"
        return f"{self.dtype}-{shared}" + "-asymmetric" * self.zero_points

    @property
    def largest(self) -> float:
        """The largest code of a format whose codes are mirrored around 0.

        int8: of -128 … 127, as TensorRT has it. fp8: OCP 8-bit floating point, E4M3: 1.75·2⁸.
        """
        return {"int8": 127.0, "fp8": 448.0}[self.dtype]

    @property
    def bits_per_number(self) -> float:
        """The bits of a number with its share of scale and zero point; the scale of a channel is not counted."""
        bits = BITS[self.dtype]
        return bits + (BITS[self.scale] + bits * self.zero_points) / (self.block_size or math.inf)


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
