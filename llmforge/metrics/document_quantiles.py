"""How far quantiles of tokens may be off, where whole documents of tokens were drawn.

A quantile is at most a value where the share of tokens beyond that value is at most 1 - q. So the bound is the smallest
value for which the bound of that share, a mean over documents, says so (Woodruff, Confidence Intervals for Medians and
Other Position Measures, 1952, with the bounds of `skewed_t`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from llmforge.metrics import skewed_t
from llmforge.metrics.intervals import SMALLEST_SAMPLE, TAIL
from llmforge.metrics.studentized import effective, influences
from llmforge.metrics.tokens import Floats

FEWEST_BEYOND = 10  # tokens beyond a quantile; with fewer, its bound on that side is infinite
FEWEST_DOCUMENTS = 5  # that have tokens beyond a bound; tokens of fewer tell nothing of how documents differ there
_SLOPE = 2.0  # standard errors of the share over which a quantile's slope is taken

Owners = NDArray[np.int64]


def bounds(values: Floats, documents: Owners, quantiles: Sequence[float]) -> list[tuple[float, float]] | None:
    """Bound quantiles of the tokens `values` [N], of the documents 0 … D-1 given by `documents` [N].

    Returns bounds for each quantile, infinite where too few tokens or documents lie beyond it; None below
    `SMALLEST_SAMPLE` documents.
    """
    if int(documents.max()) + 1 < SMALLEST_SAMPLE:
        return None
    upwards, downwards = OwnedTokens(values, documents), OwnedTokens(-values, documents)
    return [(-downwards.upper(1 - q), upwards.upper(q)) for q in quantiles]


def difference_bounds(
    ours: Floats, theirs: Floats, documents: Owners, quantiles: Sequence[float]
) -> list[tuple[float, float]] | None:
    """Bound how far quantiles of `ours` [N] lie above those of `theirs` [N], of the same tokens, as `bounds`.

    How a document moves a quantile is how it moves the share of tokens beyond it, times the quantile's slope (Bahadur,
    A Note on Quantiles in Large Samples, 1966): those above the quantiles or those below, whichever are worse.
    """
    if int(documents.max()) + 1 < SMALLEST_SAMPLE:
        return None
    left, right = OwnedTokens(ours, documents), OwnedTokens(theirs, documents)
    found = []
    for q in quantiles:
        moved = left.at(q) - right.at(q)
        below, above = (max(_off(left, right, q, sign, side) for side in (1, -1)) for sign in (-1, 1))
        found.append((moved - below, moved + above))
    return found


class OwnedTokens:
    """Values of tokens in their order, and of which of the documents each is."""

    def __init__(self, values: Floats, documents: Owners) -> None:
        order = np.argsort(values, kind="stable")
        self.ordered, self.owners = values[order], documents[order]
        self.count = int(documents.max()) + 1
        self.tokens = np.bincount(documents, minlength=self.count).astype(np.float64)
        self.effective = float(effective(self.tokens))

    def at(self, q: float) -> float:
        """Take a quantile, between two tokens linearly."""
        place = q * (len(self.ordered) - 1)
        low = int(place)
        high = min(low + 1, len(self.ordered) - 1)
        return float(self.ordered[low] + (place - low) * (self.ordered[high] - self.ordered[low]))

    def upper(self, q: float) -> float:
        """Bound a quantile from above."""
        if len(self.ordered) * (1 - q) < FEWEST_BEYOND:
            return math.inf
        last = np.zeros(self.count, np.int64)  # rank of each document's largest token, from 1
        np.maximum.at(last, self.owners, np.arange(1, len(self.owners) + 1))
        low, high = math.ceil(q * len(self.ordered)), int(np.sort(last)[-FEWEST_DOCUMENTS]) - 1
        if high < low or not self._holds(high, q):
            return math.inf
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._holds(middle, q) else (middle + 1, high)
        return float(self.ordered[low - 1])

    def influence(self, rank: int) -> tuple[float, Floats]:
        """Give the share of tokens beyond a rank, and how each document moves it [D]."""
        beyond = np.bincount(self.owners[rank:], minlength=self.count).astype(np.float64)
        total, tokens = beyond.sum(), self.tokens.sum()
        share = np.array([total / tokens])
        return float(share[0]), influences(((total - beyond) / (tokens - self.tokens))[:, None], share)[:, 0]

    def off(self, influence: Floats, q: float) -> float:
        """Distance of a share to its upper bound: over documents, or that of independent tokens if it is larger."""
        critical = float(skewed_t.critical(self.effective, float(skewed_t.l_skewness(influence)), TAIL))
        return max(critical * _error(influence), NormalDist().inv_cdf(1 - TAIL) * self._independent(q))

    def slope(self, q: float, side: int) -> float:
        """How fast a quantile rises with `q` above (1) or below (-1) it; infinite where its tokens end."""
        _, influence = self.influence(math.ceil(q * len(self.ordered)))
        span = _SLOPE * max(_error(influence), self._independent(q))
        there = q + side * span
        if not len(self.ordered) * min(q, 1 - q) >= FEWEST_BEYOND or not 0 < there < 1:
            return math.inf
        return abs(self.at(there) - self.at(q)) / span

    def _independent(self, q: float) -> float:
        """Standard error of the share beyond `q` if tokens were independent."""
        return math.sqrt(q * (1 - q) / len(self.ordered))

    def _holds(self, rank: int, q: float) -> bool:
        share, influence = self.influence(rank)
        return share + self.off(influence, q) <= 1 - q


def _off(left: OwnedTokens, right: OwnedTokens, q: float, sign: int, side: int) -> float:
    """Say how far the upper (1) or lower (-1) bound of a difference is off, by the slopes on one side of `q`."""
    ours, theirs = left.slope(q, side), right.slope(q, side)
    if not math.isfinite(ours + theirs):
        return math.inf
    rank = math.ceil(q * len(left.ordered))
    moved = ours * left.influence(rank)[1] - theirs * right.influence(rank)[1]
    skewness = sign * float(skewed_t.l_skewness(moved))
    return float(skewed_t.critical(left.effective, skewness, TAIL)) * _error(moved) if moved.any() else 0.0


def _error(influence: Floats) -> float:
    return float(influence.std(ddof=1)) / math.sqrt(len(influence))
