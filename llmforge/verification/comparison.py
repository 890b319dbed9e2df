"""How two arrays that two graphs made of the same numbers are compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.verification import probe

_ROWS_OF = 1 << 20  # numbers of rows that are compared at a time
_CHUNK = 1 << 15  # numbers that are compared at a time: two arrays of fp64 and their difference stay in the L2 cache


def diverges(before: NDArray[Any], after: NDArray[Any], tolerance: float, unit: float) -> bool:
    """Say whether `after` differs by more than `tolerance · unit`; with a tolerance of 0, in any bit."""
    if before.shape != after.shape:
        return True
    if tolerance == 0.0:
        return before.tobytes() != after.tobytes()
    return not largest(before, after) <= tolerance * unit  # `not <=`: NaN diverges


def largest(before: NDArray[Any], after: NDArray[Any]) -> float:
    """Return the largest |difference|; infinite where the shapes differ."""
    return float(np.abs(after - before).max(initial=0.0)) if before.shape == after.shape else np.inf


def in_rows(before: NDArray[Any], after: NDArray[Any], *, exact: bool = False) -> NDArray[np.float64]:
    """Return the largest |difference| of each row along the last axis, in sizes of the row: √mean(before²).

    Infinite where shapes or dtypes differ, or only `after` is not finite; a row of `before` that is not finite counts
    as equal. Codes may differ by one where a rounding error crosses a border. `exact`: any other bit is infinite.
    """
    if before.shape != after.shape or before.dtype != after.dtype:
        return np.array([np.inf])
    if before.size == 0:
        return np.zeros(1)
    width = before.shape[-1] if before.ndim else 1
    b, a = (array.reshape(-1, width) for array in (before, after))
    rows = max(1, _ROWS_OF // width)
    return np.concatenate([_in_rows(b[at : at + rows], a[at : at + rows], exact) for at in range(0, len(b), rows)])


def _in_rows(b: NDArray[Any], a: NDArray[Any], exact: bool) -> NDArray[np.float64]:
    """Compare rows [n, width] as `in_rows` does; its temporaries are several times as large."""
    integers = np.issubdtype(b.dtype, np.integer)
    other = (b.view(np.uint8).reshape(len(b), -1) != a.view(np.uint8).reshape(len(b), -1)).any(axis=1)
    found = np.zeros(len(b))
    b, a = b[other].astype(np.float64), a[other].astype(np.float64)
    usable = np.isfinite(b).all(axis=1)
    with np.errstate(invalid="ignore"):
        moved = np.nan_to_num(np.abs(a - b).max(axis=1), nan=np.inf, posinf=np.inf)
        size = np.sqrt(np.square(b).mean(axis=1))
    units = np.where(exact | (moved > integers), np.inf, 0.0)
    if not exact and not integers:
        with np.errstate(invalid="ignore"):  # of a row that is infinite before
            np.divide(moved, size, out=units, where=size > 0)
    found[other] = np.where(usable, units, 0.0)
    return found


def deviation(before: NDArray[Any], after: NDArray[Any], unit: float | None = None) -> float:
    """Return the largest |difference| in units, standard deviations of `before` by default.

    Infinite where only `after` is not finite.
    """
    if not _finite(after):
        return np.inf if _finite(before) else 0.0
    difference = max((float(np.abs(a - b).max()) for b, a in _widened(before, after)), default=0.0)
    spread = float(before.astype(np.float64).std()) if unit is None else unit
    if spread == 0.0:
        return np.inf if difference else 0.0
    return difference / spread


def _finite(array: NDArray[Any]) -> bool:
    return all(bool(np.isfinite(part).all()) for (part,) in _widened(array))


def _widened(*arrays: NDArray[Any]) -> Iterator[tuple[NDArray[np.float64], ...]]:
    """Give arrays of one shape in fp64, so many numbers at a time that they stay in the L2 cache."""
    flat = [array.ravel() for array in arrays]
    for at in range(0, flat[0].size, _CHUNK):
        yield tuple(each[at : at + _CHUNK].astype(np.float64) for each in flat)


def valid(array: NDArray[Any], step: probe.ProbeCall, cache: str | None = None) -> NDArray[Any] | None:
    """Take the real tokens of an intermediate value; None where its layout does not tell them from padding.

    `cache` names it where it is an output that continues a cache.
    """
    if cache is not None:
        return joined(probe.real(cache, array, step.past + step.lengths))
    if array.shape[:2] == step.ids.shape:
        return array[step.valid]
    return array if step.valid.all() else None


def joined(rows: Iterable[NDArray[Any]]) -> NDArray[Any]:
    """Put the rows of a batch into one flat array."""
    return np.concatenate([row.ravel() for row in rows])
