"""Which format each weight gets where bytes are limited: an exact knapsack over predicted losses.

Losses, in nats a token, of different weights are taken to add up; `calibration.pricing` has what one is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import UsageError
from llmforge.quantization import cpu_layout
from llmforge.quantization.formats import K_SCALES, SUPERBLOCK
from llmforge.quantization.grid import IQ4_NL, IQ4_XS, Q2_K, TRELLIS_BITS, Grid, Scale, gguf_type
from llmforge.quantization.trellis import LANES

# Types of GGUF: Q3_K, Q4_K, Q5_K, Q6_K, in rows of whole superblocks; Q4_0, Q4_1, Q5_0, Q5_1, Q8_0; Q2_K and IQ4_XS in
# rows of whole superblocks, IQ4_NL in others.
GGUF = (
    *map(gguf_type, (3, 4, 5, 6)),
    *(Grid(4, 32, True, "fp16"), Grid(4, 32, False, "fp16", minimums=True)),
    *(Grid(5, 32, True, "fp16"), Grid(5, 32, False, "fp16", minimums=True), Grid(8, 32, True, "fp16")),
    *(Q2_K, IQ4_XS, IQ4_NL),
)
# What weights may be given, by the scales that a pass asks for: int8 are for the CPU kernels, which have every width,
# int6-fp16 for GGUF files.
LINEARS: Mapping[Scale, tuple[Grid, ...]] = {
    "int8": tuple(
        Grid(bits, block_size, symmetric, "int8", trellis)
        for bits, block_size, symmetric, trellis in (
            (3, 64, False, False),
            (3, 32, False, False),
            (4, 64, True, True),
            (4, 32, True, True),
            (4, 32, False, False),  # where rows are too few for a trellis
            (5, 64, True, True),
            (5, 32, True, True),
            (5, 32, False, False),  # where rows are too few, too, or have outliers
            (6, 64, True, False),
            (6, 32, True, False),
            (8, 64, True, False),
        )
    ),
    "int6-fp16": GGUF,
    **{
        scale: (*(Grid(4, size, False, scale) for size in (128, 64, 32)), Grid(8, 128, True, scale))
        for scale in ("fp16", "bf16", "fp32")
    },
}
TABLES: Mapping[Scale, tuple[Grid, ...]] = {
    "int8": tuple(
        Grid(bits, block_size, True, "int8", trellis=bits in TRELLIS_BITS)
        for bits, block_size in ((4, 32), (5, 64), (5, 32), (6, 64), (6, 32), (8, 64))
    ),
    "int6-fp16": GGUF,
    **{scale: (Grid(4, 32, True, scale), Grid(8, 128, True, scale)) for scale in ("fp16", "bf16", "fp32")},
}
# Of bytes above the smallest formats, that are told apart. SmolLM2-135M at 6 bits has 53,000; with 20,000 of the whole
# budget, sizes rounded up left .26 % of it unused, and 2.0 % more was predicted to be lost.
CELLS = 60_000


@dataclass(frozen=True)
class FormatOption:
    """One format that weights which must share it may have: what it takes, and what it costs, nats a token.

    `nearest` is what they would lose if they were rounded to nearest.
    """

    size_bytes: int
    loss: float
    nearest: float = 0.0


def size_bytes(n: int, k: int, grid: Grid) -> int:
    """Return what a matrix [n, k] on `grid` takes where it is stored."""
    if not grid.portable and grid in GGUF:
        return round(n * k * grid.format.bits_per_number / 8)
    if not grid.portable:
        return cpu_layout.groups(n) * cpu_layout.group_bytes(k, grid)
    blocks = grid.blocks(k)
    zero_points = 0 if grid.symmetric else -(-blocks * grid.zero_bits // 8)
    return n * (blocks * (grid.block_size * grid.bits // 8 + (4 if grid.scale == "fp32" else 2)) + zero_points)


def fits(heights: Sequence[int], k: int, grid: Grid) -> bool:
    """Say whether matrices of `heights` rows of `k`, which may be put on top of each other, can be stored on `grid`."""
    if grid.trellis and any(n % LANES for n in heights[:-1]):
        return False
    if grid.scale in K_SCALES:
        return k % grid.whole == 0
    if grid.codebook:
        return k % grid.block_size == 0 and k % SUPERBLOCK != 0
    return grid.portable or (k % grid.block_size == 0 and grid.block_size >= cpu_layout.SMALLEST_BLOCK)


def allocate(choices: Mapping[str, Sequence[FormatOption]], budget_bytes: int) -> dict[str, int]:
    """Choose one of the formats of each weight, by its place, with the least sum of losses in `budget_bytes`.

    Weights that must share a format stand under one name, with their sums. What counts is how much larger a format is
    than the smallest of its weight. Where that is a multiple of one number, and the budget has no more than `CELLS` of
    it above the smallest formats, the choice is the best there is; else it is rounded up to a share of 1 / `CELLS` of
    that, so that the budget holds all the same.

    Raises:
        UsageError: not even the smallest formats fit.
        ValueError: a weight has no format, or a loss is not a finite number.
    """
    for name, formats in choices.items():
        if not formats or not all(math.isfinite(each.loss) for each in formats):
            raise ValueError(f"{name} has no format, or one whose loss is not finite")
    smallest = {name: min(each.size_bytes for each in formats) for name, formats in choices.items()}
    left = budget_bytes - sum(smallest.values())
    if left < 0:
        raise UsageError(
            f"weights take {budget_bytes - left} bytes in their smallest formats, the budget has {budget_bytes}",
            hint="allow more bytes, or smaller formats",
        )
    more = {name: [each.size_bytes - smallest[name] for each in formats] for name, formats in choices.items()}
    left = min(left, sum(map(max, more.values())))
    unit = math.gcd(*itertools.chain(*more.values())) or 1
    if left // unit > CELLS:
        unit = -(-left // CELLS)
    cells = left // unit
    sizes = {name: [-(-size // unit) for size in own] for name, own in more.items()}
    best = np.zeros(cells + 1)  # least loss of the weights so far in at most so many cells
    taken: list[NDArray[np.uint8]] = []  # of at most 256 formats
    for name, formats in choices.items():
        ways = np.full((len(formats), cells + 1), np.inf)
        for i, (each, size) in enumerate(zip(formats, sizes[name], strict=True)):
            if size <= cells:
                ways[i, size:] = best[: cells + 1 - size] + each.loss
        taken.append(ways.argmin(0).astype(np.uint8))
        best = ways.min(0)
    chosen: dict[str, int] = {}
    for name, at in zip(reversed(list(choices)), reversed(taken), strict=True):
        chosen[name] = int(at[cells])
        cells -= sizes[name][chosen[name]]
    return {name: chosen[name] for name in choices}
