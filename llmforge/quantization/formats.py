"""Formats of quantized numbers, and the bits that each number of one takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

BITS: Mapping[str, int] = (
    {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "fp4": 4}
    | {f"int{bits}": bits for bits in (2, 3, 4, 5, 6, 8)}
    | {"trellis4": 4, "trellis5": 5, "iq4": 4}  # quantization.trellis, quantization.codebook
    | {"int4-fp16": 4, "int6-fp16": 6, "int8-fp16": 8}  # scales of GGUF's K types
)
SUPERBLOCK = 256  # input features that share a superscale, 16 bits, where scales are codes
# Scales that are codes under a superscale: int8 under one in bf16, the others under one in fp16, as their minima are.
SUPERSCALED = ("int8", "int4-fp16", "int6-fp16", "int8-fp16")
K_SCALES = SUPERSCALED[1:]  # of GGUF's K types, whose rows are whole superblocks


@dataclass(frozen=True)
class Format:
    """A way to store numbers: `value ≈ (code - zero_point) · scale`.

    `dtype` is that of a code, `scale` that of a scale, both of `BITS`; a zero point takes 4 bits, or 8 where a code has
    more than 4. With `minimums` it is `code · scale + minimum`, the minimum stored as a scale is. `block_size`
    neighbours along the input features share a scale; None: all numbers of a channel do (an output feature of a weight,
    a cached channel of a KV head).
    """

    dtype: str
    block_size: int | None
    scale: str = "fp32"
    zero_points: bool = False
    minimums: bool = False

    @property
    def name(self) -> str:
        """The format in a word: int4-block32-asymmetric, fp8-channel."""
        shared = f"block{self.block_size}" if self.block_size else "channel"
        scale = "" if self.scale == "fp32" else f"-{self.scale}"
        return f"{self.dtype}-{shared}{scale}" + "-asymmetric" * self.zero_points + "-minima" * self.minimums

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
        shared = BITS[self.scale] * (1 + self.minimums) + self.zero_points * (4 if bits <= 4 else 8)
        superscale = 16 * (1 + self.minimums) / max(SUPERBLOCK, block_size) if self.scale in SUPERSCALED else 0
        return bits + shared / block_size + superscale


@dataclass(frozen=True)
class SlotFormat:
    """A way to store what a cache holds of a token: a key, or a value, of one head, [head_dim].

    `scale` says what has a scale of its own: a channel or the whole tensor (constants of the graph, from calibration,
    which are not counted), or the token, whose slot then has it, as bf16. 4 bits have a scale a token, and beside it
    what a code 0 stands for, as bf16. `hadamard`: blocks of the vector, of the largest power of two that divides it,
    are multiplied with the Hadamard matrix first, which spreads channels that are larger than others over all.
    """

    dtype: str  # int8 or int4
    scale: str  # channel, tensor or token
    hadamard: bool = False

    @property
    def name(self) -> str:
        """The format in a word: int8-channel, int4-token-hadamard."""
        return f"{self.dtype}-{self.scale}" + "-hadamard" * self.hadamard

    @property
    def portable(self) -> bool:
        """Whether GroupQueryAttention of ONNX Runtime has it; others are those of llmforge's CPU kernels."""
        return self.scale != "token"

    def bytes_per_slot(self, head_dim: int) -> int:
        """The bytes of one key or value, its own scale among them."""
        own = 0 if self.scale != "token" else 2 if self.dtype == "int8" else 4
        return math.ceil(head_dim * BITS[self.dtype] / 8) + own

    def bits_per_number(self, head_dim: int) -> float:
        """The bits of a number with its share of what its slot has beside codes."""
        return self.bytes_per_slot(head_dim) * 8 / head_dim

    def reason_against(self, head_dim: int) -> str | None:
        """Say why heads of so many channels cannot be stored so; None where they can."""
        if self.dtype == "int4" and head_dim % _NIBBLES:
            return f"heads have {head_dim} channels; 4 bits need a multiple of {_NIBBLES}"
        return None


@dataclass(frozen=True)
class KvFormat:
    """How a cache stores keys and values."""

    keys: SlotFormat
    values: SlotFormat

    @property
    def name(self) -> str:
        """The format in words: int8-channel; int8-token keys, int4-token values."""
        alike = self.keys == self.values
        return self.keys.name if alike else f"{self.keys.name} keys, {self.values.name} values"

    @property
    def portable(self) -> bool:
        """Whether GroupQueryAttention of ONNX Runtime has it."""
        return self.keys.portable and self.keys == self.values

    def bytes_per_token(self, key_dim: int, value_dim: int) -> int:
        """The bytes that one KV head takes for a token."""
        return self.keys.bytes_per_slot(key_dim) + self.values.bytes_per_slot(value_dim)


_NIBBLES = 32  # channels, that kernels of 4 bits read at a time
INT8_CHANNEL, FP8_CHANNEL = Format("int8", None), Format("fp8", None)
INT8_KV = INT8_CHANNEL  # of a cache: each channel of a head has a scale
SLOTS4_KV = KvFormat(*[SlotFormat("int4", "token")] * 2)
ROTATED8_KV = KvFormat(*[SlotFormat("int8", "token", hadamard=True)] * 2)
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
    for scale in ("fp32", "fp16", "bf16", "int8")
    for zero_points in (False, True)
    if scale != "bf16" or dtype in ("int4", "int8")  # as servers of others have them
)
# Types of GGUF: Q4_0, Q5_0, Q8_0, Q4_1, Q5_1, Q3_K, Q6_K, Q4_K, Q5_K, Q2_K, IQ4_NL, IQ4_XS.
GGUF = (
    *(Format(dtype, 32, "fp16") for dtype in ("int4", "int5", "int8")),
    *(Format(dtype, 32, "fp16", minimums=True) for dtype in ("int4", "int5")),
    *(Format(dtype, 16, scale) for dtype, scale in (("int3", "int6-fp16"), ("int6", "int8-fp16"))),
    *(Format(dtype, 32, "int6-fp16", minimums=True) for dtype in ("int4", "int5")),
    Format("int2", 16, "int4-fp16", minimums=True),
    *(Format("iq4", 32, scale) for scale in ("fp16", "int6-fp16")),
)
TRELLISES = tuple(
    Format(dtype, 2**size, scale)
    for dtype in ("trellis4", "trellis5")
    for size in range(4, 17)
    for scale in ("fp32", "fp16", "int8")
)
