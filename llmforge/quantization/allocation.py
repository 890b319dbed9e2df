"""Which format each weight gets where bytes are limited: an exact knapsack over predicted losses.

Losses, in nats a token, of different weights are taken to add up; `calibration.pricing` has what one is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmforge.base.errors import UsageError
from llmforge.quantization import cpu_layout
from llmforge.quantization.grid import Grid, Scale
from llmforge.quantization.trellis import LANES

# What weights may be given, by the scales that a pass asks for: int8 are for the CPU kernels, which have every width.
LINEARS: Mapping[Scale, tuple[Grid, ...]] = {
    "int8": tuple(
        Grid(bits, block_size, symmetric, "int8", trellis)
        for bits, block_size, symmetric, trellis in (
            (3, 64, False, False),
            (3, 32, False, False),
            (4, 64, True, True),
            (4, 32, True, True),
            (4, 32, False, False),  # where rows are too few for a trellis
            (5, 64, True, False),
            (5, 32, True, False),
            (5, 32, False, False),
            (6, 64, True, False),
            (6, 32, True, False),
            (8, 64, True, False),
        )
    ),
    **{
        scale: (*(Grid(4, size, False, scale) for size in (128, 64, 32)), Grid(8, 128, True, scale))
        for scale in ("fp16", "fp32")
    },
}
TABLES: Mapping[Scale, tuple[Grid, ...]] = {
    "int8": tuple(
        Grid(bits, block_size, True, "int8", trellis=bits == 4)
        for bits, block_size in ((4, 32), (5, 64), (5, 32), (6, 64), (6, 32), (8, 64))
    ),
    **{scale: (Grid(4, 32, True, scale), Grid(8, 128, True, scale)) for scale in ("fp16", "fp32")},
}
CELLS = 20_000  # of bytes that are told apart: a choice is exact but for so small a share of the budget a weight


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
    if not grid.portable:
        return cpu_layout.groups(n) * cpu_layout.group_bytes(k, grid)
    blocks = grid.blocks(k)
    zero_points = 0 if grid.symmetric else -(-blocks * grid.zero_bits // 8)
    return n * (blocks * (grid.block_size * grid.bits // 8 + (4 if grid.scale == "fp32" else 2)) + zero_points)


def fits(heights: Sequence[int], k: int, grid: Grid) -> bool:
    """Say whether matrices of `heights` rows of `k`, which may be put on top of each other, can be stored on `grid`."""
    if grid.trellis and any(n % LANES for n in heights[:-1]):
        return False
    return grid.portable or (k % grid.block_size == 0 and grid.block_size >= cpu_layout.SMALLEST_BLOCK)


def allocate(choices: Mapping[str, Sequence[FormatOption]], budget_bytes: int) -> dict[str, int]:
    """Choose one of the formats of each weight, by its place, with the least sum of losses in `budget_bytes`.

    Weights that must share a format stand under one name, with their sums. Where sizes are multiples of one number and
    the budget has no more than `CELLS` of it, the choice is the best there is; else sizes are rounded up to
    budget / `CELLS`, so that the budget holds all the same.

    Raises:
        UsageError: not even the smallest formats fit.
        ValueError: a weight has no format, or a loss is not a finite number.
    """
    for name, formats in choices.items():
        if not formats or not all(math.isfinite(each.loss) for each in formats):
            raise ValueError(f"{name} has no format, or one whose loss is not finite")
    least = sum(min(each.size_bytes for each in formats) for formats in choices.values())
    if least > budget_bytes:
        raise UsageError(
            f"weights take {least} bytes in their smallest formats, the budget has {budget_bytes}",
            hint="allow more bytes, or smaller formats",
        )
    sizes = [each.size_bytes for formats in choices.values() for each in formats]
    unit = math.gcd(*sizes) or 1
    if budget_bytes // unit > CELLS:
        unit = -(-budget_bytes // CELLS)
    cells = budget_bytes // unit
    needed = sum(min(-(-each.size_bytes // unit) for each in formats) for formats in choices.values())
    if needed > cells:  # rounding up alone made it too much: the smallest formats fit, and are all that does
        return {name: min(range(len(f)), key=lambda i: f[i].size_bytes) for name, f in choices.items()}
    best = np.zeros(cells + 1)  # least loss of the weights so far in at most so many cells
    taken: list[np.ndarray[tuple[int], np.dtype[np.intp]]] = []
    for formats in choices.values():
        ways = np.full((len(formats), cells + 1), np.inf)
        for i, each in enumerate(formats):
            size = -(-each.size_bytes // unit)
            if size <= cells:
                ways[i, size:] = best[: cells + 1 - size] + each.loss
        taken.append(ways.argmin(0))
        best = ways.min(0)
    chosen: dict[str, int] = {}
    left = cells
    for name, at in zip(reversed(list(choices)), reversed(taken), strict=True):
        chosen[name] = int(at[left])
        left -= -(-choices[name][chosen[name]].size_bytes // unit)
    return {name: chosen[name] for name in choices}
