"""Score intervals of shares, and of the difference of two shares of the same items: right or wrong, on both sides.

McNemar's test asks whether two models are equal; a margin needs an interval of the difference. Tango's score interval
(Equivalence test and confidence interval for the difference in proportions for the paired-sample design, 1998) keeps
its level with few items that differ, and has a width where none does. Items of one document are not independent: counts
are divided by the design effect (Rao and Scott, A simple method for the analysis of clustered binary data, 1992).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from llmforge.metrics.intervals import SMALLEST_SAMPLE, TAIL, Estimate, student_t

_BISECTIONS = 60  # halvings of an interval of length 2 at most: below 2⁻⁵²

Floats = NDArray[np.float64]


def share(hits: Floats, clusters: NDArray[np.int64]) -> Estimate:
    """Estimate a share of items, each 0 or 1 [N], of the documents 0 … D-1 in `clusters` [N]: Wilson's interval."""
    sample = _Sample(hits, clusters)
    if (z := sample.critical) is None:
        return sample.estimate(None)
    n = len(hits) / (sample.design_effect or sample.items_a_document)
    p, z2 = sample.value, z * z
    centre, half = (p * n + z2 / 2) / (n + z2), z * math.sqrt(p * (1 - p) * n + z2 / 4) / (n + z2)
    return sample.estimate((centre - half, centre + half))


def difference(ours: Floats, theirs: Floats, clusters: NDArray[np.int64]) -> Estimate:
    """Estimate the share of `ours` less that of `theirs`, each 0 or 1 [N] on the same items: Tango's interval.

    Few items that differ say little of how alike those of one document are: the design effect is at least that of being
    right.
    """
    sample = _Sample(ours - theirs, clusters)
    if (z := sample.critical) is None:
        return sample.estimate(None)
    effects = (sample.design_effect, _Sample(theirs, clusters).design_effect)
    effect = max((known for known in effects if known is not None), default=sample.items_a_document)
    gained, lost = (float(np.count_nonzero(ours - theirs == sign)) / effect for sign in (1, -1))
    return sample.estimate(tango(gained, lost, len(ours) / effect, z))


def tango(gained: float, lost: float, pairs: float, z: float) -> tuple[float, float]:
    """Bound (gained - lost) / pairs, where so many of the pairs are right on one side alone; z is the normal quantile.

    The bounds are the differences at which the score statistic is z and -z; it falls with the difference.
    """
    moved = gained - lost

    def statistic(difference: float) -> float:
        a = 2 * pairs
        b = -gained - lost + (a - moved) * difference
        c = -lost * difference * (1 - difference)
        lost_share = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)  # the likeliest at this difference
        variance = pairs * (2 * lost_share + difference * (1 - difference))
        off = moved - pairs * difference
        return off / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, off) if off else 0.0

    middle = moved / pairs
    low = _root(lambda x: statistic(x) > z, -1.0, middle)
    high = _root(lambda x: statistic(x) > -z, middle, 1.0)
    return low, high


class _Sample:
    """Values of items, and how far those of one document are alike."""

    def __init__(self, values: Floats, clusters: NDArray[np.int64]) -> None:
        self.items, self.documents = len(values), int(clusters.max()) + 1
        self.value = float(values.mean())
        self._off = values - self.value
        self._clusters = clusters

    @property
    def critical(self) -> float | None:
        """Quantile of the interval; None: the sample is too small for one. Few documents tell their spread badly."""
        if self.documents < SMALLEST_SAMPLE:
            return None
        if self.documents == self.items:
            return NormalDist().inv_cdf(1 - TAIL)
        return student_t(self.documents - 1)

    @property
    def items_a_document(self) -> float:
        """The largest design effect that there can be, where documents are about as large: one item counts of each."""
        return self.items / self.documents

    @property
    def design_effect(self) -> float | None:
        """By how much the variance exceeds that of independent items, at least 1; None: all are equal."""
        independent = float(self._off @ self._off)
        if self.documents == self.items:
            return 1.0
        if independent == 0:
            return None
        sums = np.bincount(self._clusters, self._off, minlength=self.documents)
        between = self.documents / (self.documents - 1) * float(sums @ sums)
        return max(1.0, between / (self.items / (self.items - 1) * independent))

    def estimate(self, bounds: tuple[float, float] | None) -> Estimate:
        """Make the estimate; bounds include the value."""
        low, high = (None, None) if bounds is None else (min(self.value, bounds[0]), max(self.value, bounds[1]))
        of = "items" if self.documents == self.items else "documents"
        return Estimate(value=self.value, low=low, high=high, samples=self.documents, of=of)


def _root(is_below: Callable[[float], bool], low: float, high: float) -> float:
    """Find where `is_below` turns from true to false between `low` and `high`."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return (low + high) / 2
