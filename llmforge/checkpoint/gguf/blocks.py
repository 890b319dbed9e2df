"""Blocks of quantized numbers as ggml has them in GGUF files: what each type holds, and its numbers.

A row of numbers is cut into blocks of 32, or superblocks of 256, each of so many bytes; fp16 scales, and minima of
some, lie in the block: those in `MINIMA` have one. IQ4's 16 levels are not evenly spaced, but whole
numbers of 8 bits, which stand for its codes.
Source: `ggml-quants.c` and `ggml-common.h` of llama.cpp; bit-equal to `gguf.quants.dequantize` of gguf 0.19.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.quantization import codebook

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]

_SUPERBLOCK = 256
IQ4_LEVELS = codebook.LEVELS.astype(np.int8)
_CHUNK_BYTES = 1 << 20  # of blocks that are dequantized at a time


@dataclass(frozen=True)
class Codes:
    """Numbers of one block size as `(code - zero_point) · scale`, the zero point 2**(bits - 1), or with a minimum.

    That is `code · scale + minimum`.
    codes: uint8 [rows, K].  scales: fp32 [rows, K / block_size]; a scale may be 0, or negative.
    minimums: of the same shape, or None.
    """

    bits: int
    block_size: int
    codes: Bytes
    scales: Float32
    minimums: Float32 | None = None


@dataclass(frozen=True)
class BlockType:
    """One type of block, by ggml's name and number."""

    name: str
    number: int
    elements: int
    size_bytes: int
    read: Callable[[Bytes], Float32] | None  # blocks uint8 [n, size_bytes] to fp32 [n, elements]; None: plain numbers
    dtype: str = ""  # of plain numbers, a name of numpy or ml_dtypes

    @property
    def quantized(self) -> bool:
        """Whether it has blocks."""
        return self.read is not None

    @property
    def bits(self) -> float:
        """The bits of a number with its share of scales."""
        return 8 * self.size_bytes / self.elements


def dequantize(data: Bytes, kind: BlockType, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the numbers of a tensor: fp32 [..., K] of blocks, plain ones as they are. data: its bytes, in order."""
    if kind.read is None:
        import ml_dtypes  # noqa: F401  by which numpy knows bfloat16; what serves has no such package

        return data.view(np.dtype(kind.dtype)).reshape(shape)
    blocks = data.reshape(-1, kind.size_bytes)
    result = np.empty((len(blocks), kind.elements), np.float32)
    step = max(1, _CHUNK_BYTES // kind.size_bytes)
    with np.errstate(over="ignore", invalid="ignore"):  # scales that are no numbers are refused where they are used
        for at in range(0, len(blocks), step):
            result[at : at + step] = kind.read(blocks[at : at + step])
    return result.reshape(shape)


def codes(data: Bytes, kind: BlockType, shape: tuple[int, ...]) -> Codes | None:
    """Return codes and scales of rows that stand for the very numbers of `dequantize`; None where the type has none."""
    rows = data.reshape(-1, kind.size_bytes)
    if (affine := MINIMA.get(kind.name)) is not None:
        bits, block_size, read_affine = affine
        with np.errstate(over="ignore", invalid="ignore"):
            held, *numbers = read_affine(rows)
        of_blocks = (each.reshape(-1, shape[-1] // block_size) for each in numbers)
        return Codes(bits, block_size, held.reshape(-1, shape[-1]), *of_blocks)
    found = CODES.get(kind.name)
    if found is None:
        return None
    bits, block_size, read = found
    with np.errstate(over="ignore", invalid="ignore"):
        signed, scales = read(rows)
    middle = np.int16(1 << (bits - 1))
    unsigned = (signed.astype(np.int16) + middle).astype(np.uint8)
    return Codes(bits, block_size, unsigned.reshape(-1, shape[-1]), scales.reshape(-1, shape[-1] // block_size))


def _half(blocks: Bytes, at: int) -> Float32:
    """The fp16 number of every block at byte `at`: fp32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _fields(data: Bytes, width: int, shifts: tuple[int, ...], mask: int) -> Bytes:
    """Read `len(shifts)` numbers out of each byte, those of `width` neighbours together: [n, bytes · shifts]."""
    shift = np.array(shifts, np.uint8).reshape(1, 1, -1, 1)
    fields = (data.reshape(len(data), -1, 1, width) >> shift) & np.uint8(mask)
    return fields.reshape(len(data), -1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """The 32 bits at byte `at`, each as bit 4 of a number: uint8 [n, 32]."""
    return np.unpackbits(np.ascontiguousarray(blocks[:, at : at + 4]), axis=1, bitorder="little") << np.uint8(4)


def _q4_0_codes(blocks: Bytes) -> tuple[NDArray[np.int8], Float32]:
    return _fields(blocks[:, 2:], 16, (0, 4), 15).astype(np.int8) - np.int8(8), _half(blocks, 0)


def _q5_0_codes(blocks: Bytes) -> tuple[NDArray[np.int8], Float32]:
    low = _fields(blocks[:, 6:], 16, (0, 4), 15)
    return (low | _fifth_bits(blocks, 2)).astype(np.int8) - np.int8(16), _half(blocks, 0)


def _q8_0_codes(blocks: Bytes) -> tuple[NDArray[np.int8], Float32]:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks, 0)


def _q3_k_codes(blocks: Bytes) -> tuple[NDArray[np.int8], Float32]:
    high, low, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    six_bits = _fields(packed[:, :8], 8, (0, 4), 15) | (_fields(packed[:, 8:], 4, (0, 2, 4, 6), 3) << np.uint8(4))
    scales = _half(blocks, 108) * (six_bits.astype(np.int8) - np.int8(32)).astype(np.float32)
    borrowed = _fields(high, 32, tuple(range(8)), 1) ^ np.uint8(1)  # 4 is taken away where the bit is not set
    return _fields(low, 32, (0, 2, 4, 6), 3).astype(np.int8) - (borrowed << np.uint8(2)).astype(np.int8), scales


def _q6_k_codes(blocks: Bytes) -> tuple[NDArray[np.int8], Float32]:
    low = _fields(blocks[:, :128], 64, (0, 4), 15)
    high = _fields(blocks[:, 128:192], 32, (0, 2, 4, 6), 3)
    scales = _half(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return (low | (high << np.uint8(4))).astype(np.int8) - np.int8(32), scales


def _iq4_nl_codes(blocks: Bytes) -> tuple[NDArray[np.int8], Float32]:
    return IQ4_LEVELS[_fields(blocks[:, 2:], 16, (0, 4), 15)], _half(blocks, 0)


def _iq4_xs_codes(blocks: Bytes) -> tuple[NDArray[np.int8], Float32]:
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    low = _fields(blocks[:, 4:8], 1, (0, 4), 15)
    six_bits = low | (high << np.uint16(4)).astype(np.uint8)
    scales = _half(blocks, 0) * (six_bits.astype(np.int8) - np.int8(32)).astype(np.float32)
    return IQ4_LEVELS[_fields(blocks[:, 8:], 16, (0, 4), 15)], scales


def _symmetric(
    read: Callable[[Bytes], tuple[NDArray[np.int8], Float32]], block_size: int
) -> Callable[[Bytes], Float32]:
    def numbers(blocks: Bytes) -> Float32:
        signed, scales = read(blocks)
        spread = signed.astype(np.float32).reshape(*scales.shape, block_size) * scales[..., None]
        return spread.reshape(len(blocks), -1)

    return numbers


Affine = tuple[Bytes, Float32, Float32]  # codes [n, elements], scales and minima [n, parts], each of its part


def _affine(read: Callable[[Bytes], Affine]) -> Callable[[Bytes], Float32]:
    def numbers(blocks: Bytes) -> Float32:
        code, scale, minimum = read(blocks)
        parts = code.astype(np.float32).reshape(*scale.shape, -1)
        return (scale[..., None] * parts + minimum[..., None]).reshape(len(code), -1)

    return numbers


def _q4_1_codes(blocks: Bytes) -> Affine:
    return _fields(blocks[:, 4:], 16, (0, 4), 15), _half(blocks, 0), _half(blocks, 2)


def _q5_1_codes(blocks: Bytes) -> Affine:
    code = _fields(blocks[:, 8:], 16, (0, 4), 15) | _fifth_bits(blocks, 4)
    return code, _half(blocks, 0), _half(blocks, 2)


def _q2_k_codes(blocks: Bytes) -> Affine:
    packed = blocks[:, :16]
    scale = _half(blocks, 80) * (packed & 15).astype(np.float32)
    minimum = -_half(blocks, 82) * (packed >> 4).astype(np.float32)
    return _fields(blocks[:, 16:80], 32, (0, 2, 4, 6), 3), scale, minimum


def _six_bit_scales(blocks: Bytes) -> tuple[Float32, Float32]:
    """Scales and minima of the 8 parts of a Q4_K or Q5_K superblock, from its bytes 4 to 15 (`get_scale_min_k4`)."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1)
    minimum = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1)
    return _half(blocks, 0) * scale.astype(np.float32), -_half(blocks, 2) * minimum.astype(np.float32)


def _q4_k_codes(blocks: Bytes) -> Affine:
    return _fields(blocks[:, 16:], 32, (0, 4), 15), *_six_bit_scales(blocks)


def _q5_k_codes(blocks: Bytes) -> Affine:
    low, high = _fields(blocks[:, 48:], 32, (0, 4), 15), _fields(blocks[:, 16:48], 32, tuple(range(8)), 1)
    return low | (high << np.uint8(4)), *_six_bit_scales(blocks)


# Of types without minima: bits, numbers that share a scale, and how signed codes are read.
CODES: Mapping[str, tuple[int, int, Callable[[Bytes], tuple[NDArray[np.int8], Float32]]]] = {
    "Q4_0": (4, 32, _q4_0_codes),
    "Q5_0": (5, 32, _q5_0_codes),
    "Q8_0": (8, 32, _q8_0_codes),
    "Q3_K": (3, 16, _q3_k_codes),
    "Q6_K": (6, 16, _q6_k_codes),
    "IQ4_NL": (8, 32, _iq4_nl_codes),
    "IQ4_XS": (8, 32, _iq4_xs_codes),
}
# Of types with minima: bits in which codes are held (Q2_K has 2), numbers that share a scale, and how all are read.
MINIMA: Mapping[str, tuple[int, int, Callable[[Bytes], Affine]]] = {
    "Q4_1": (4, 32, _q4_1_codes),
    "Q5_1": (5, 32, _q5_1_codes),
    "Q2_K": (3, 16, _q2_k_codes),
    "Q4_K": (4, 32, _q4_k_codes),
    "Q5_K": (5, 32, _q5_k_codes),
}
# ggml.h: `enum ggml_type`
TYPES: Mapping[int, BlockType] = {
    kind.number: kind
    for kind in (
        BlockType("F32", 0, 1, 4, None, "<f4"),
        BlockType("F16", 1, 1, 2, None, "<f2"),
        BlockType("BF16", 30, 1, 2, None, "bfloat16"),
        BlockType("Q4_0", 2, 32, 18, _symmetric(_q4_0_codes, 32)),
        BlockType("Q4_1", 3, 32, 20, _affine(_q4_1_codes)),
        BlockType("Q5_0", 6, 32, 22, _symmetric(_q5_0_codes, 32)),
        BlockType("Q5_1", 7, 32, 24, _affine(_q5_1_codes)),
        BlockType("Q8_0", 8, 32, 34, _symmetric(_q8_0_codes, 32)),
        BlockType("Q2_K", 10, _SUPERBLOCK, 84, _affine(_q2_k_codes)),
        BlockType("Q3_K", 11, _SUPERBLOCK, 110, _symmetric(_q3_k_codes, 16)),
        BlockType("Q4_K", 12, _SUPERBLOCK, 144, _affine(_q4_k_codes)),
        BlockType("Q5_K", 13, _SUPERBLOCK, 176, _affine(_q5_k_codes)),
        BlockType("Q6_K", 14, _SUPERBLOCK, 210, _symmetric(_q6_k_codes, 16)),
        BlockType("IQ4_NL", 20, 32, 18, _symmetric(_iq4_nl_codes, 32)),
        BlockType("IQ4_XS", 23, _SUPERBLOCK, 136, _symmetric(_iq4_xs_codes, 32)),
    )
}
# Those that are not read, so that a refusal can name them.
OTHER_TYPES: Mapping[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
