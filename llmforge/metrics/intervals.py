"""How sure a figure is: an estimate with its bounds, over documents or over repetitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from llmforge.metrics.record import Record

CONFIDENCE = 0.95  # two-sided, for every interval of a report; a one-sided decision on a bound errs at most 2.5 %
RESAMPLES = 10_000  # as in the metric that the published figures of peers were made with
SMALLEST_SAMPLE = 8  # fewer documents than this get no interval: a bootstrap of them is far too narrow


class Estimate(Record):
    """A figure and the bounds it lies between at `CONFIDENCE`.

    An exact figure (a size) has both bounds equal to itself. A figure from too small a sample has no bounds (None),
    which is not the same: nothing can be decided on it.
    """

    value: float
    low: float | None
    high: float | None
    samples: int  # how many documents (or repetitions) it rests on; 0 for an exact figure
    of: str = "documents"  # what the samples are

    @classmethod
    def exact(cls, value: float) -> Estimate:
        """Make the estimate of a figure that is known without error."""
        return cls(value=value, low=value, high=value, samples=0, of="")

    @classmethod
    def median(cls, values: Sequence[float], of: str) -> Estimate:
        """Estimate the median of independent `values`; it has bounds from 6 of them on. `of` says what they are."""
        low, high = quantile_interval(np.asarray(values, np.float64), 0.5) or (None, None)
        return cls(value=float(np.median(values)), low=low, high=high, samples=len(values), of=of)

    @property
    def is_exact(self) -> bool:
        """Whether the figure is known without error."""
        return self.samples == 0


def bootstrap(
    sums: NDArray[np.float64],
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    seed: int,
    resamples: int = RESAMPLES,
) -> NDArray[np.float64] | None:
    """Bound figures that are made from sums over documents, by resampling whole documents with replacement.

    Tokens of one document are not independent, so documents are drawn, not tokens. `sums` is [D, M]: M sums of each of
    D documents. `statistic` makes K figures [r, K] of M totals [r, M]. All figures see the same draws.
    Returns [K, 2], the lower and upper bound at `CONFIDENCE`; None below `SMALLEST_SAMPLE` documents.

    The percentiles are the "expanded" ones of Hesterberg, What Teachers Should Know About the Bootstrap (2015),
    section 3.3: plain ones are too narrow by √((D-1)/D) and by normal instead of t quantiles.
    """
    documents = len(sums)
    if documents < SMALLEST_SAMPLE:
        return None
    rng = np.random.default_rng(seed)
    chunk = max(1, 2**20 // documents)  # about a million draws at once: bounded memory, and the seed's order is kept
    figures = []
    for low in range(0, resamples, chunk):
        draws = rng.integers(0, documents, (min(chunk, resamples - low), documents))
        figures.append(statistic(sums[draws].sum(1)))
    tail = _expanded_tail(documents)
    bounds: NDArray[np.float64] = np.quantile(np.concatenate(figures), (tail, 1 - tail), axis=0).T
    return bounds


def quantile_interval(samples: NDArray[np.float64], quantile: float) -> tuple[float, float] | None:
    """Bound a quantile of independent samples [n] by order statistics, with no assumption on their distribution.

    The number of samples below the true quantile is binomial(n, quantile); the bounds are the tightest pair of sorted
    samples that miss it with at most half of 1 - `CONFIDENCE` on each side (David and Nagaraja, Order Statistics,
    section 7.1). None where n is too small for that: a median needs 6 samples, a 95th percentile 72.
    """
    ordered = np.sort(samples)
    n, tail = len(ordered), (1 - CONFIDENCE) / 2
    k = np.arange(1, n + 1)
    log_odds = np.log((n + 1 - k) / k) + math.log(quantile / (1 - quantile))  # of k and k - 1 samples below
    below = np.cumsum(np.exp(n * math.log1p(-quantile) + np.concatenate([[0.0], np.cumsum(log_odds)])))
    lowest = int(np.searchsorted(below, tail, side="right"))  # P(count < lowest) <= tail
    highest = int(np.searchsorted(below, 1 - tail, side="left")) + 1  # P(count >= highest) <= tail
    if lowest < 1 or highest > n:
        return None
    return float(ordered[lowest - 1]), float(ordered[highest - 1])


def _expanded_tail(documents: int) -> float:
    """Level of the lower bootstrap percentile that covers like a t interval of `documents` samples would."""
    normal = NormalDist()
    freedom = documents - 1
    z = normal.inv_cdf(1 - (1 - CONFIDENCE) / 2)
    # Quantile of Student's t from the normal one: Abramowitz and Stegun 26.7.5; within 0.001 from 7 degrees on.
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return normal.cdf(-t * math.sqrt(documents / freedom))
