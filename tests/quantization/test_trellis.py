"""A trellis against its definition, code by code, and against every sequence of codes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmforge.quantization import trellis
from llmforge.quantization.grids import Grid, dequantize, round_to_nearest

ROOT = Path(__file__).parents[2]


def level(codes: list[int], row: int) -> float:
    """Read the level of one code of a column, from the definition."""
    top = [code >> 3 for code in codes[row // 16 * 16 : row + 1]]
    before, two = ([0, 0, *top])[-2], ([0, 0, *top])[-3]
    return float(trellis.SUBSETS[2 * before + (top[-1] ^ two), codes[row] & 7])


def test_codes_are_read_as_they_are_defined() -> None:
    codes = np.random.default_rng(0).integers(0, 16, (37, 5)).astype(np.uint8)
    levels = trellis.decode(codes)
    for column in range(5):
        of_column = codes[:, column].tolist()
        assert levels[:, column].tolist() == [level(of_column, row) for row in range(37)]


def test_nearest_is_the_best_of_all_sequences() -> None:
    rng = np.random.default_rng(1)
    values = rng.uniform(-140, 140, (4, 3)).astype(np.float32)
    weights = rng.uniform(0.1, 2, (4, 3)).astype(np.float32)
    levels = trellis.decode(np.array(list(itertools.product(range(16), repeat=4)), np.uint8).T)  # [4, 16^4]
    for column in range(3):
        losses = (weights[:, column, None] * (values[:, column, None] - levels) ** 2).sum(0)
        found = trellis.decode(trellis.nearest(values, weights))[:, column]
        assert (weights[:, column] * (values[:, column] - found) ** 2).sum() == pytest.approx(losses.min(), rel=1e-5)


def test_groups_of_rows_do_not_depend_on_one_another() -> None:
    values = np.random.default_rng(2).uniform(-127, 127, (48, 9)).astype(np.float32)
    ones = np.ones_like(values)
    together = trellis.nearest(values, ones)
    for at in (0, 16, 32):
        np.testing.assert_array_equal(trellis.nearest(values[at : at + 16], ones[at : at + 16]), together[at : at + 16])


def test_error_is_that_of_plain_codes_with_more_bits() -> None:
    weight = np.random.default_rng(3).standard_normal((64, 512)).astype(np.float32)

    def error(grid: Grid) -> float:
        return float(np.mean((dequantize(round_to_nearest(weight, grid)) - weight) ** 2))

    coded = error(Grid(4, 32, True, "int8", True))
    assert coded < 0.8 * error(Grid(4, 32, False))  # 4.31 bits against 5.125
    assert coded < 0.7 * error(Grid(4, 32, True, "int8"))


def test_kernels_have_the_levels_of_the_package() -> None:
    source = (ROOT / "llmforge/native/operators.c").read_text()
    table = re.search(r"TRELLIS\[4\]\[8\] = \{(.*?)\};", source, re.DOTALL)
    assert table is not None
    numbers = [int(number) for number in re.findall(r"-?\d+", table[1])]
    assert numbers == trellis.SUBSETS.reshape(-1).tolist()


def test_levels_are_the_best_of_normal_numbers_in_blocks() -> None:
    """A step of Lloyd's method, each level to the mean of what was rounded to it, gains next to nothing."""
    blocks = np.random.default_rng(4).standard_normal((256, 64, 32)).astype(np.float32)
    scale = np.abs(blocks).max(-1, keepdims=True) / trellis.FULL
    values, weights = (blocks / scale).reshape(256, -1), np.broadcast_to(scale**2, blocks.shape).reshape(256, -1)
    levels = trellis.decode(trellis.nearest(values, np.ascontiguousarray(weights)))

    def loss(of: NDArray[np.float32]) -> float:
        return float((weights * (values - of) ** 2).sum())

    moved = levels.copy()
    for each in trellis.LEVELS:
        own = levels == each
        moved[own] = (weights[own] * values[own]).sum() / weights[own].sum()
    assert loss(moved) > 0.98 * loss(levels)
