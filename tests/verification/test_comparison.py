from __future__ import annotations

import numpy as np
import pytest

from llmforge.verification import comparison


@pytest.mark.parametrize("rows_of", [1, 40, 1 << 20])
def test_rows_are_compared_a_few_at_a_time(rows_of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_ROWS_OF", rows_of)
    rng = np.random.default_rng(0)
    before = rng.standard_normal((2, 7, 16), np.float32)
    after = before.copy()
    after[1, 2] += rng.standard_normal(16, np.float32)
    after[0, 3, 5] = np.nan
    before[1, 6, 0] = np.inf  # what is not finite before counts as equal
    size = np.sqrt(np.square(before[1, 2].astype(np.float64)).mean())
    expected = np.zeros(14)
    expected[3] = np.inf
    expected[9] = np.abs(after[1, 2].astype(np.float64) - before[1, 2]).max() / size
    np.testing.assert_array_equal(comparison.in_rows(before, after), expected)
    exact = comparison.in_rows(before, after, exact=True)
    assert np.flatnonzero(exact == np.inf).tolist() == [3, 9]
    codes = np.arange(12, dtype=np.int8).reshape(3, 4)
    moved = codes + np.array([[0], [1], [2]], np.int8)
    assert comparison.in_rows(codes, moved).tolist() == [0, 0, np.inf]


def test_shapes_and_dtypes_that_differ_are_infinitely_apart() -> None:
    row = np.zeros((2, 3), np.float32)
    assert comparison.in_rows(row, row[:1]).tolist() == [np.inf]
    assert comparison.in_rows(row, row.astype(np.float64)).tolist() == [np.inf]
    assert comparison.in_rows(row[:0], row[:0]).max() == 0
