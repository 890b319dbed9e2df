"""How two arrays that two graphs made of the same numbers are compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.verification import probe


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


def deviation(before: NDArray[Any], after: NDArray[Any], unit: float | None = None) -> float:
    """Return the largest |difference| in units, standard deviations of `before` by default.

    Infinite where only `after` is not finite.
    """
    b, a = before.astype(np.float64), after.astype(np.float64)
    if not np.isfinite(a).all():
        return np.inf if np.isfinite(b).all() else 0.0
    difference, spread = float(np.abs(a - b).max(initial=0.0)), float(b.std()) if unit is None else unit
    if spread == 0.0:
        return np.inf if difference else 0.0
    return difference / spread


def valid(array: NDArray[Any], step: probe.ProbeStep, cache: str | None = None) -> NDArray[Any] | None:
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
