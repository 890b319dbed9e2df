"""A trellis against its definition, code by code, and against every sequence of codes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmforge.quantization import rounding, trellis
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import QuantizedMatrix, dequantize, round_to_nearest, rows, stack

ROOT = Path(__file__).parents[2]
GRID = Grid(4, 32, True, "int8", True)


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
    for file in ("native/operators.c", "quantization/rounding/rounding.inc"):
        table = re.search(r"TRELLIS\[4\]\[8\] = \{(.*?)\};", (ROOT / "llmforge" / file).read_text(), re.DOTALL)
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


def inputs(k: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Make a Hessian [k, k] and the factor of its inverse that rounding reads."""
    x = np.random.default_rng(seed).standard_normal((4 * k, k)) * np.linspace(1, 0.1, k)
    hessian = x.T @ x + 0.01 * np.eye(k)
    upper = np.linalg.inv(np.linalg.cholesky(hessian[::-1, ::-1])[::-1, ::-1])
    return hessian.astype(np.float32), np.ascontiguousarray(upper.T, np.float32)


@pytest.mark.parametrize("n", [16, 32, 50])
def test_compiled_loops_choose_the_codes_of_the_definition(n: int) -> None:
    weight = np.random.default_rng(5).standard_normal((n, 96)).astype(np.float32)
    start = round_to_nearest(weight, GRID)
    one, order = np.eye(96, dtype=np.float32), np.arange(96, dtype=np.int32)
    found, _ = rounding.choose(weight, rounding.OrderedColumns(order, one, one), GRID, steps=0, sweeps=0, start=start)
    np.testing.assert_array_equal(found.scales, start.scales)
    steps = np.repeat(start.scales, 32, axis=1)
    np.testing.assert_array_equal(found.codes, trellis.nearest(weight / steps, steps * steps))


def test_zeros_do_not_sway_the_rows_beside_them() -> None:
    weight = np.random.default_rng(9).standard_normal((16, 32)).astype(np.float32) / 100
    alone = round_to_nearest(weight[:8], GRID)
    weight[8:] = 0
    beside = round_to_nearest(weight, GRID)
    np.testing.assert_allclose(dequantize(beside)[:8], dequantize(alone), atol=1e-4)
    assert np.abs(dequantize(beside)[8:]).max() < 1e-20


def test_sweeps_never_raise_the_error() -> None:
    weight = np.random.default_rng(6).standard_normal((64, 128)).astype(np.float32)
    hessian, lower = inputs(128, 7)
    columns, losses = rounding.OrderedColumns(np.arange(128, dtype=np.int32), hessian, lower), []
    for sweeps in range(4):
        matrix, left = rounding.choose(weight, columns, GRID, steps=8, sweeps=sweeps, with_errors=True)
        np.testing.assert_allclose(left, weight - dequantize(matrix), atol=1e-6)
        losses.append(np.einsum("nk,kl,nl->", left, hessian, left))
    assert losses == sorted(losses, reverse=True)
    plain, left = rounding.choose(weight, columns, Grid(4, 32, False), steps=8, sweeps=2, with_errors=True)
    assert plain.zero_points is not None
    assert losses[2] < 0.9 * np.einsum("nk,kl,nl->", left, hessian, left)


def test_groups_of_rows_are_not_parted() -> None:
    matrix = round_to_nearest(np.random.default_rng(8).standard_normal((40, 32)).astype(np.float32), GRID)
    whole = np.concatenate([np.arange(16, 32), np.arange(16)])
    np.testing.assert_array_equal(dequantize(rows(matrix, whole)), dequantize(matrix)[whole])
    np.testing.assert_array_equal(dequantize(rows(matrix, slice(16, 40))), dequantize(matrix)[16:])
    for parted in (slice(0, 20), slice(8, 24), np.arange(0, 32, 2)):
        with pytest.raises(ValueError, match="hang together"):
            rows(matrix, parted)
    first = QuantizedMatrix(GRID, matrix.codes[:20], matrix.scales[:20], None)
    with pytest.raises(ValueError, match="hang together"):
        stack([first, matrix])
