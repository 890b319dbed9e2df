"""Student's t for skewed samples: how many standard errors a bound lies off, so that it holds for uneven documents too.

Where a few documents are much worse than the others, a sample that happens to miss these has a small mean *and* a small
standard error, and a t interval or a bootstrap lies below the true mean too often. How often depends on the skewness,
which a small sample shows too little of. So a bound takes the quantile of the t statistic of the most skewed lognormal
population that leaves the skewness seen possible (at the level `POSSIBLE`), normal populations included.

Skewness is L-skewness (Hosking, L-moments: analysis and estimation of distributions using linear combinations of order
statistics, 1990): it is less biased in small samples than the third moment, and single values move it less.

`skewed_t.json` has what was simulated, by `python -m benchmarks.skewed_t`; `benchmarks/gate_errors.py` shows what it
achieves, `docs/gates.md` what that is.
"""

from __future__ import annotations

import json
import math
from functools import cache, lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

POSSIBLE = 0.15  # a shape is possible if so many of its samples, or more, have an L-skewness as low as the one seen
Floats = NDArray[np.float64]


class QuantileTable(NamedTuple):
    """Quantiles of the t statistic (mean - true mean) / standard error of lognormal samples, at its lower end."""

    documents: Floats  # [N], ascending
    levels: Floats  # [P], ascending, 0.5 at most
    possible: Floats  # [N, G]: quantile `POSSIBLE` of the L-skewness; the G shapes ascend, the first is normal
    quantiles: Floats  # [N, G, P]


@cache
def table() -> QuantileTable:
    """Read what was simulated."""
    read = json.loads((Path(__file__).parent / "skewed_t.json").read_text(encoding="ascii"))
    return QuantileTable(*(np.array(read[field], np.float64) for field in QuantileTable._fields))


def l_skewness(samples: Floats) -> Floats:
    """Estimate the L-skewness τ₃ of each row of `samples` [..., n], n > 2; NaN of equal values."""
    n = samples.shape[-1]
    ordered, rank = np.sort(samples, -1), np.arange(n)
    first = ordered.mean(-1)
    second = ordered @ (rank / (n - 1)) / n
    third = ordered @ (rank * (rank - 1) / ((n - 1) * (n - 2))) / n
    with np.errstate(invalid="ignore", divide="ignore"):
        skewness: Floats = (6 * third - 6 * second + first) / (2 * second - first)
    return skewness


def critical(documents: float, skewness: ArrayLike, alpha: float) -> Floats:
    """Standard errors from a mean to the bound that the true one is beyond with probability `alpha`, below 0.5.

    `skewness` [...] is the L-skewness of the documents towards that bound: for an upper bound their own, for a lower
    one with the other sign. Where it is NaN, none can be excluded. Below the smallest level simulated it is infinite.
    """
    known = table()
    if alpha < known.levels[0]:
        return np.full(np.shape(skewness), math.inf)
    z = NormalDist().inv_cdf(alpha)
    possible, quantiles = _at(documents)
    of_shapes = [float(np.interp(z, _normal_levels(), row)) for row in quantiles]
    found: Floats = np.sinh(np.interp(np.nan_to_num(skewness, nan=1.0), possible, of_shapes))
    return found


def tail(documents: float, skewness: float, distance: float) -> float:
    """Probability of a mean so many standard errors below the true one: the `alpha` at which `critical` is `distance`.

    At least the smallest level simulated. On the other side of the true mean it is that of Student's t.
    """
    possible, quantiles = _at(documents)
    if distance < 0:
        return 1 - tail(documents, -1.0, -distance)
    at = float(np.interp(1.0 if math.isnan(skewness) else skewness, possible, np.arange(len(possible))))
    low = int(at)
    row = quantiles[low] if low == at else (1 - (at - low)) * quantiles[low] + (at - low) * quantiles[low + 1]
    z = float(np.interp(-math.asinh(distance), -row, _normal_levels()))
    return NormalDist().cdf(z)


@cache
def _normal_levels() -> Floats:
    return np.array([NormalDist().inv_cdf(level) for level in table().levels])


@lru_cache(maxsize=64)
def _at(documents: float) -> tuple[Floats, Floats]:
    """Take the table at a number of documents, whole or not: `possible` [G], ascending, and asinh of -quantiles [G, P].

    Between two sizes linearly in 1/√n, by which a t statistic nears the normal one; beyond the table as at its ends.
    """
    known = table()
    near = 1 / np.sqrt(known.documents[::-1])
    at = float(np.interp(1 / math.sqrt(documents), near, np.arange(len(near))[::-1]))
    low = min(int(at), len(near) - 2)
    share = at - low
    possible = (1 - share) * known.possible[low] + share * known.possible[low + 1]
    quantiles = (1 - share) * known.quantiles[low] + share * known.quantiles[low + 1]
    # What was simulated has noise: a more skewed population neither shows less of it nor needs a nearer bound.
    return np.maximum.accumulate(possible), np.arcsinh(np.maximum.accumulate(np.maximum(-quantiles, 0), 0))
