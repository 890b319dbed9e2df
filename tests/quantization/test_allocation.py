"""The knapsack of formats against every combination."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmforge.base.errors import UsageError
from llmforge.quantization import allocation
from llmforge.quantization.allocation import FormatOption, allocate
from llmforge.quantization.grid import Grid

CHOICES = st.lists(
    st.lists(st.builds(FormatOption, size_bytes=st.integers(1, 30), loss=st.floats(0, 10)), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
).map(lambda lists: {f"weight{i}": formats for i, formats in enumerate(lists)})


def total(choices: dict[str, list[FormatOption]], chosen: dict[str, int]) -> tuple[int, float]:
    picked = [choices[name][at] for name, at in chosen.items()]
    return sum(each.size_bytes for each in picked), sum(each.loss for each in picked)


@given(CHOICES, st.integers(1, 120))
@settings(deadline=None)
def test_it_is_the_best_of_all_combinations(choices: dict[str, list[FormatOption]], budget: int) -> None:
    every = [
        dict(zip(choices, at, strict=True)) for at in itertools.product(*(range(len(f)) for f in choices.values()))
    ]
    fitting = [total(choices, each)[1] for each in every if total(choices, each)[0] <= budget]
    if not fitting:
        with pytest.raises(UsageError, match="allow more bytes"):
            allocate(choices, budget)
        return
    size, cost = total(choices, allocate(choices, budget))
    assert size <= budget
    assert cost == pytest.approx(min(fitting))


@given(CHOICES, st.integers(1, 120))
@settings(deadline=None)
def test_a_coarse_knapsack_keeps_the_budget(choices: dict[str, list[FormatOption]], budget: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocation, "CELLS", 7)
        try:
            chosen = allocate(choices, budget)
        except UsageError:
            return
    assert total(choices, chosen)[0] <= budget


def test_bytes_that_every_format_takes_make_a_choice_no_coarser() -> None:
    weights = [[FormatOption(10**9, 2.0), FormatOption(10**9 + 3, 1.0 - 0.01 * i)] for i in range(9)]
    choices = {f"weight{i}": formats for i, formats in enumerate(weights)}
    chosen = allocate(choices, 9 * 10**9 + 14)
    assert [name for name, at in chosen.items() if at] == ["weight5", "weight6", "weight7", "weight8"]


def test_what_has_no_format_or_no_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="w has no format"):
        allocate({"w": []}, 10)
    with pytest.raises(ValueError, match="not finite"):
        allocate({"w": [FormatOption(1, float("nan"))]}, 10)


@pytest.mark.parametrize(
    ("heights", "k", "grid", "expected"),
    [
        ([32, 16], 64, Grid(4, 64, True, "int8", trellis=True), True),
        ([40], 64, Grid(4, 64, True, "int8", trellis=True), True),
        ([40, 16], 64, Grid(4, 64, True, "int8", trellis=True), False),  # of 16 rows, 8 would be of each matrix
        ([40, 16], 64, Grid(5, 64, True, "int8", trellis=True), False),
        ([40, 16], 64, Grid(4, 64, False, "int8"), True),
        ([40], 96, Grid(4, 64, False, "int8"), False),
        ([40], 96, Grid(4, 64, False, "fp16"), True),
    ],
)
def test_a_format_fits_rows_that_it_divides(heights: list[int], k: int, grid: Grid, expected: bool) -> None:
    assert allocation.fits(heights, k, grid) is expected


@pytest.mark.parametrize(("heights", "k"), [([40, 16], 64), ([40, 16], 96), ([16], 64)])
def test_weights_have_formats_of_every_size_whatever_their_rows(heights: list[int], k: int) -> None:
    fitting = [grid for grid in allocation.LINEARS["int8"] if allocation.fits(heights, k, grid)]
    assert {grid.bits for grid in fitting} >= {3, 4, 5, 6}
    assert any(grid.trellis and grid.bits == 5 for grid in fitting) == (heights == [16])


def test_a_trellis_takes_the_bytes_of_plain_codes_of_as_many_bits() -> None:
    for bits, block_size in ((4, 32), (5, 32), (5, 64)):
        plain, coded = (Grid(bits, block_size, True, "int8", trellis) for trellis in (False, True))
        assert allocation.size_bytes(48, 256, plain) == allocation.size_bytes(48, 256, coded)
