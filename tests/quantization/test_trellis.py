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
GRIDS = {bits: Grid(bits, 32, True, "int8", True) for bits in (4, 5)}
GRID = GRIDS[4]
widths = pytest.mark.parametrize("bits", GRIDS)


def level(codes: list[int], row: int, bits: int) -> float:
    """Read the level of one code of a column, from the definition."""
    top = [code >> (bits - 1) for code in codes[row // 16 * 16 : row + 1]]
    before, two = ([0, 0, *top])[-2], ([0, 0, *top])[-3]
    return float(trellis.SUBSETS[bits][2 * before + (top[-1] ^ two), codes[row] % 2 ** (bits - 1)])


@widths
def test_codes_are_read_as_they_are_defined(bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << bits, (37, 5)).astype(np.uint8)
    levels = trellis.decode(codes, bits)
    for column in range(5):
        of_column = codes[:, column].tolist()
        assert levels[:, column].tolist() == [level(of_column, row, bits) for row in range(37)]


@widths
def test_levels_are_bytes_mirrored_around_zero_each_in_one_subset(bits: int) -> None:
    levels, subsets = list(trellis.LEVELS[bits]), trellis.SUBSETS[bits]
    assert len(set(levels)) == 2 ** (bits + 1)
    assert levels == sorted(levels)
    assert levels == [-each for each in reversed(levels)]
    assert levels[-1] == trellis.FULL == 127
    for number, each in enumerate(levels):
        assert subsets[2 * (number % 2) + number // 2 % 2, number // 4] == each
    np.testing.assert_array_equal(subsets[::-1, ::-1], -subsets)  # what kernels count on


@widths
def test_nearest_is_the_best_of_all_sequences(bits: int) -> None:
    rng = np.random.default_rng(1)
    rows_of = 4 if bits == 4 else 3
    values = rng.uniform(-140, 140, (rows_of, 3)).astype(np.float32)
    weights = rng.uniform(0.1, 2, (rows_of, 3)).astype(np.float32)
    every = np.array(list(itertools.product(range(1 << bits), repeat=rows_of)), np.uint8).T  # [4, 16^4]
    levels = trellis.decode(every, bits)
    for column in range(3):
        losses = (weights[:, column, None] * (values[:, column, None] - levels) ** 2).sum(0)
        found = trellis.decode(trellis.nearest(values, weights, bits), bits)[:, column]
        assert (weights[:, column] * (values[:, column] - found) ** 2).sum() == pytest.approx(losses.min(), rel=1e-5)


@widths
def test_groups_of_rows_do_not_depend_on_one_another(bits: int) -> None:
    values = np.random.default_rng(2).uniform(-127, 127, (48, 9)).astype(np.float32)
    ones = np.ones_like(values)
    together = trellis.nearest(values, ones, bits)
    for at in (0, 16, 32):
        alone = trellis.nearest(values[at : at + 16], ones[at : at + 16], bits)
        np.testing.assert_array_equal(alone, together[at : at + 16])


@widths
def test_error_is_that_of_plain_codes_with_more_bits(bits: int) -> None:
    weight = np.random.default_rng(3).standard_normal((64, 512)).astype(np.float32)

    def error(grid: Grid) -> float:
        return float(np.mean((dequantize(round_to_nearest(weight, grid)) - weight) ** 2))

    coded = error(GRIDS[bits])
    assert coded < 0.8 * error(Grid(bits, 32, False))  # of 4 bits 4.31 a weight against 5.125, of 5 5.31 against 6.25
    assert coded < 0.7 * error(Grid(bits, 32, True, "int8"))


@widths
def test_kernels_have_the_levels_of_the_package(bits: int) -> None:
    for file in ("native/operators.c", "quantization/rounding/rounding.inc"):
        source = (ROOT / "llmforge" / file).read_text()
        table = re.search(rf"TRELLIS{bits}\[4\]\[\w+\] = \{{(.*?)\}};", source, re.DOTALL)
        assert table is not None
        numbers = [int(number) for number in re.findall(r"-?\d+", table[1])]
        assert numbers == trellis.SUBSETS[bits].reshape(-1).tolist()


@widths
def test_levels_are_the_best_of_normal_numbers_in_blocks(bits: int) -> None:
    """A step of Lloyd's method, each level to the mean of what was rounded to it, gains next to nothing."""
    blocks = np.random.default_rng(4).standard_normal((256, 64, 32)).astype(np.float32)
    scale = np.abs(blocks).max(-1, keepdims=True) / trellis.FULL
    values, weights = (blocks / scale).reshape(256, -1), np.broadcast_to(scale**2, blocks.shape).reshape(256, -1)
    levels = trellis.decode(trellis.nearest(values, np.ascontiguousarray(weights), bits), bits)

    def loss(of: NDArray[np.float32]) -> float:
        return float((weights * (values - of) ** 2).sum())

    moved = levels.copy()
    for each in trellis.LEVELS[bits]:
        own = levels == each
        moved[own] = (weights[own] * values[own]).sum() / weights[own].sum()
    assert loss(moved) > 0.98 * loss(levels)


def inputs(k: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Make a Hessian [k, k] and the factor of its inverse that rounding reads."""
    x = np.random.default_rng(seed).standard_normal((4 * k, k)) * np.linspace(1, 0.1, k)
    hessian = x.T @ x + 0.01 * np.eye(k)
    upper = np.linalg.inv(np.linalg.cholesky(hessian[::-1, ::-1])[::-1, ::-1])
    return hessian.astype(np.float32), np.ascontiguousarray(upper.T, np.float32)


@widths
@pytest.mark.parametrize("n", [16, 32, 50])
def test_compiled_loops_choose_the_codes_of_the_definition(n: int, bits: int) -> None:
    weight, grid = np.random.default_rng(5).standard_normal((n, 96)).astype(np.float32), GRIDS[bits]
    start = round_to_nearest(weight, grid)
    one, order = np.eye(96, dtype=np.float32), np.arange(96, dtype=np.int32)
    found, _ = rounding.choose(weight, rounding.OrderedColumns(order, one, one), grid, steps=0, sweeps=0, start=start)
    np.testing.assert_array_equal(found.scales, start.scales)
    steps = np.repeat(start.scales, 32, axis=1)
    np.testing.assert_array_equal(found.codes, trellis.nearest(weight / steps, steps * steps, bits))


@widths
@pytest.mark.parametrize("off", [0, 0.001, -0.001])
def test_compiled_loops_find_each_level_and_its_borders(bits: int, off: float) -> None:
    """Of columns that lie on a level, in the middle of two of a subset, beyond all, or next to them."""
    subsets = trellis.SUBSETS[bits]
    places = np.concatenate(
        [[-900, -127.5, 0, 128], subsets.reshape(-1), (subsets[:, 1:] + subsets[:, :-1]).ravel() / 2]
    )
    values = np.tile(places.astype(np.float32) + np.float32(off), (16, 1))
    count = -values.shape[1] % 32
    weight = np.pad(values, ((0, 0), (0, count))) * np.linspace(1, 2, 16, dtype=np.float32)[:, None]
    k, grid = weight.shape[1], Grid(bits, 32, True, "fp32", True)
    scales = np.repeat(np.linspace(1, 2, 16, dtype=np.float32)[:, None], k // 32, axis=1)
    start = QuantizedMatrix(grid, np.zeros(weight.shape, np.uint8), scales, None)
    one, order = np.eye(k, dtype=np.float32), np.arange(k, dtype=np.int32)
    found, _ = rounding.choose(weight, rounding.OrderedColumns(order, one, one), grid, steps=0, sweeps=0, start=start)
    steps = np.repeat(scales, 32, axis=1)
    wanted = trellis.decode(trellis.nearest(weight / steps, steps * steps, bits), bits)
    lost = (steps * (weight / steps - trellis.decode(found.codes, bits))) ** 2
    least = (steps * (weight / steps - wanted)) ** 2
    np.testing.assert_allclose(lost.sum(0), least.sum(0), rtol=1e-5, atol=1e-6)  # of two that are as near, either


@widths
def test_zeros_do_not_sway_the_rows_beside_them(bits: int) -> None:
    weight = np.random.default_rng(9).standard_normal((16, 32)).astype(np.float32) / 100
    alone = round_to_nearest(weight[:8], GRIDS[bits])
    weight[8:] = 0
    beside = round_to_nearest(weight, GRIDS[bits])
    np.testing.assert_allclose(dequantize(beside)[:8], dequantize(alone), atol=1e-4)
    assert np.abs(dequantize(beside)[8:]).max() < 1e-20


@widths
def test_sweeps_never_raise_the_error(bits: int) -> None:
    weight = np.random.default_rng(6).standard_normal((64, 128)).astype(np.float32)
    hessian, lower = inputs(128, 7)
    columns, losses = rounding.OrderedColumns(np.arange(128, dtype=np.int32), hessian, lower), []
    for sweeps in range(4):
        matrix, left = rounding.choose(weight, columns, GRIDS[bits], steps=8, sweeps=sweeps, with_errors=True)
        np.testing.assert_allclose(left, weight - dequantize(matrix), atol=1e-6)
        losses.append(np.einsum("nk,kl,nl->", left, hessian, left))
    assert losses == sorted(losses, reverse=True)
    plain, left = rounding.choose(weight, columns, Grid(bits, 32, False), steps=8, sweeps=2, with_errors=True)
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
