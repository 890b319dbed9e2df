"""The grid on which quantized weights lie: a record, without arithmetic, so that who names one needs no kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from llmforge.quantization.formats import K_SCALES, SUPERBLOCK, SUPERSCALED, Format

BITS = (2, 3, 4, 5, 6, 8)
# As what scales are stored: int8 under a superscale in bf16, those that end with -fp16 under one in fp16.
Scale = Literal["fp32", "fp16", "bf16", "int8", "int4-fp16", "int6-fp16", "int8-fp16"]
PORTABLE_BITS = (4, 8)  # that com.microsoft::MatMulNBits has, and servers of others
QMOE_BITS = (4, 8)  # that com.microsoft::QMoE has
TRELLIS_BITS = (4, 5)  # `quantization.trellis`
_FEWEST = 2  # bits
_CODEBOOKS = {(4, 32, scale, False) for scale in ("fp16", "int6-fp16")}  # of GGUF: IQ4_NL, IQ4_XS
SMALLEST_BLOCK = 16  # com.microsoft::MatMulNBits: "a power of two and not smaller than 16"


@dataclass(frozen=True)
class Grid:
    """Where quantized values may lie: one scale (and zero point) for `block_size` neighbours along K.

    Asymmetric: `(code - zero_point) * scale`, a range from the least to the largest weight of a block, 0 included.
    Symmetric: the zero point is 2**(bits - 1), and the weight of largest magnitude gets code 0, so that the scale has
    the sign opposite to it (llama.cpp's Q4_0 and ONNX Runtime do the same): all 2**bits codes are used, where a grid
    mirrored around zero would waste one.
    With `minimums`: `code * scale + minimum`, as several types of GGUF have it: the minimum of a block is a number of
    its own, stored as scales are, and there are no zero points. Scales `int6-fp16` are codes -31 … 31, with minima
    1 … 63, and minima then codes 0 … 63 times -1, each under a superscale of a superblock in fp16; int4-fp16 are those
    of 2 bits with minima, 1 … 15, and minima 0 … 15.
    With a `codebook`, a code of 4 bits stands for a level that is no multiple of it (`quantization.codebook`).

    Raises:
        ValueError: no kernel has this grid.
    """

    bits: int
    block_size: int
    symmetric: bool
    scale: Scale = "fp32"
    trellis: bool = False
    minimums: bool = False
    codebook: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {BITS}, is {self.bits}")
        held = self.bits, self.block_size, self.scale, self.minimums
        if (self.bits == _FEWEST or self.scale == "int4-fp16") and held != (_FEWEST, 16, "int4-fp16", True):
            raise ValueError("2 bits go with minima, blocks of 16 and int4-fp16 scales, and these with nothing else")
        if self.codebook and (self.trellis or not self.symmetric or held not in _CODEBOOKS):
            raise ValueError("a codebook has 4 bits, blocks of 32, fp16 or int6-fp16 scales, and no zero points")
        if self.trellis and (self.bits not in TRELLIS_BITS or not self.symmetric):
            raise ValueError("a trellis has 4 or 5 bits and no zero points")
        if self.minimums and (self.symmetric or self.scale in ("int8", "int8-fp16")):
            raise ValueError("minima go with fp32, fp16, int4-fp16 or int6-fp16 scales, and codes are not symmetric")
        if self.scale == "bf16" and (self.bits not in PORTABLE_BITS or self.trellis or self.minimums):
            raise ValueError("bf16 scales, for servers of others, go with uniform codes of 4 or 8 bits without minima")
        rows = self.bits == 8 and self.symmetric and self.block_size % (2 * SMALLEST_BLOCK) == 0  # a block can be a row
        odd = self.block_size & (self.block_size - 1) and not rows
        if self.block_size < SMALLEST_BLOCK or odd:
            raise ValueError(f"block_size must be a power of two from {SMALLEST_BLOCK} on, is {self.block_size}")

    @property
    def format(self) -> Format:
        """The format of codes on this grid."""
        kind = "trellis" if self.trellis else "iq" if self.codebook else "int"
        return Format(f"{kind}{self.bits}", self.block_size, self.scale, self.zero_points, self.minimums)

    @property
    def portable(self) -> bool:
        """Say whether com.microsoft::MatMulNBits and GatherBlockQuantized read it; others are for the CPU kernels."""
        uniform = not (self.trellis or self.minimums or self.codebook)
        return uniform and self.bits in PORTABLE_BITS and self.scale not in SUPERSCALED

    @property
    def largest_scale(self) -> int:
        """The largest code of a scale under a superscale."""
        if self.scale == "int4-fp16":
            return 15
        return 127 if self.scale != "int6-fp16" else 63 if self.minimums else 31

    @property
    def largest_minimum(self) -> int:
        """The largest code of a minimum under a superscale, times -1."""
        return 15 if self.scale == "int4-fp16" else 63

    @property
    def whole(self) -> int:
        """The columns that a row is a multiple of: those of a superblock of a K type of GGUF, else those of a block."""
        return SUPERBLOCK if self.scale in K_SCALES else self.block_size

    @property
    def zero_points(self) -> bool:
        """Say whether each block stores one."""
        return not self.symmetric and not self.minimums

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero point of a symmetric grid."""
        return 1 << (self.bits - 1)

    @property
    def zero_bits(self) -> int:
        """The bits that a zero point takes where it is stored."""
        return 4 if self.bits <= 4 else 8

    def blocks(self, k: int) -> int:
        """Count the blocks of a row of `k` weights."""
        return -(-k // self.block_size)

    def of_bits(self, bits: int) -> Grid:
        """Return this grid with other bits; a trellis has 4 or 5, a codebook 4: with others codes become uniform.

        In place of a K type of GGUF comes its type of so many bits.
        """
        if self.scale in K_SCALES:
            return gguf_type(bits)
        trellis, codebook = self.trellis and bits in TRELLIS_BITS, self.codebook and bits == self.bits
        return replace(self, bits=bits, trellis=trellis, codebook=codebook)

    def dividing(self, k: int) -> Grid | None:
        """Return this grid with the largest block, up to its own, that divides rows of `k`; None: it is too small.

        A K type of GGUF is that of blocks of 32 where superblocks do not divide k.
        """
        if self.scale in K_SCALES:
            return None if k % self._in_blocks.block_size else self.of_rows(k)
        if self.codebook:
            return None if k % self.block_size else self
        block_size = math.gcd(k, self.block_size)  # of a power of two: the largest one that divides both
        return None if block_size < SMALLEST_BLOCK else replace(self, block_size=block_size)

    def of_rows(self, k: int) -> Grid:
        """Return this grid, or in place of a K type of GGUF that of blocks of 32, where superblocks do not divide k.

        That has no fewer bits, as llama.cpp has it.
        """
        return self if self.scale not in K_SCALES or k % self.whole == 0 else self._in_blocks

    @property
    def _in_blocks(self) -> Grid:
        return IQ4_NL if self.codebook or self.bits not in _IN_BLOCKS else _IN_BLOCKS[self.bits]

    def fitting(self, *widths: int) -> Grid | None:
        """Return this grid as com.microsoft::QMoE has it: 4 or 8 bits, no trellis, no int8 scales (fp16).

        Its block is the largest, up to its own, that divides `widths` all, each of which holds it twice or more. None
        where that would be too small, or QMoE has not so many bits, or it has minima.
        """
        if self.bits not in QMOE_BITS or self.minimums:
            return None
        scale: Scale = "fp16" if self.scale in SUPERSCALED else self.scale
        block_size = self.block_size
        while block_size >= SMALLEST_BLOCK:
            if all(width % block_size == 0 and width > block_size for width in widths):
                return replace(self, block_size=block_size, scale=scale, trellis=False, codebook=False)
            block_size //= 2
        return None


_IN_BLOCKS = {
    3: Grid(4, 32, True, "fp16"),
    4: Grid(4, 32, False, "fp16", minimums=True),
    5: Grid(5, 32, False, "fp16", minimums=True),
    6: Grid(8, 32, True, "fp16"),
}
IQ4_NL = Grid(4, 32, True, "fp16", codebook=True)
IQ4_XS = Grid(4, 32, True, "int6-fp16", codebook=True)
Q2_K = Grid(2, 16, False, "int4-fp16", minimums=True)
# As kernels read codes of 2 bits, and levels of a codebook: grids that nothing else is on.
OF_2_BITS, OF_CODEBOOK = Grid(3, 16, False, minimums=True), Grid(8, 32, False, minimums=True)
_IN_SUPERBLOCKS = {
    3: Grid(3, 16, True, "int6-fp16"),
    4: Grid(4, 32, False, "int6-fp16", minimums=True),
    5: Grid(5, 32, False, "int6-fp16", minimums=True),
    6: Grid(6, 16, True, "int8-fp16"),
}


def gguf_type(bits: int) -> Grid:
    """Return the grid of GGUF's Q3_K, Q4_K, Q5_K, Q6_K, or Q8_0, by its bits."""
    return _IN_SUPERBLOCKS.get(bits, _IN_BLOCKS[6])
