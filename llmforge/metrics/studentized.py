"""Figures of documents with their standard errors: how far a figure, or the paired difference of two, may be off.

Tokens of one document are not independent, so documents are what is counted. A figure's standard error is that of the
jackknife: how it changes where a document is left out. Its bounds lie as many standard errors off as `skewed_t` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import numpy as np

from llmforge.metrics import skewed_t
from llmforge.metrics.intervals import SMALLEST_SAMPLE, TAIL, Estimate
from llmforge.metrics.tokens import Floats

_MOST_NEEDED = 10**9  # documents; more are not named


@dataclass(frozen=True)
class Studentized:
    """A figure of `documents` documents, its standard error, and what its bounds depend on."""

    value: float
    error: float  # standard error; NaN of a single document
    documents: int
    effective: float  # of equally long documents that tell as much: (Σ tokens)² / Σ tokens² (Kish 1965)
    skewness: float  # L-skewness of how documents move the figure; NaN: none moves it

    of: ClassVar[str] = "documents"
    is_exact: ClassVar[bool] = False

    @property
    def samples(self) -> int:
        """How many documents it rests on."""
        return self.documents

    def estimate(self, alpha: float) -> Estimate:
        """Give it as reports have it, with the bounds that it lies between at this `alpha`."""
        low, high = self.interval(alpha) if self.decides else (None, None)
        return Estimate(value=self.value, low=low, high=high, samples=self.documents)

    @property
    def decides(self) -> bool:
        """Whether there are documents enough for a decision."""
        return self.documents >= SMALLEST_SAMPLE and math.isfinite(self.error)

    def p_below(self, limit: float) -> float:
        """Probability of a figure as low as this one, if the true one were at `limit`: small where it is below."""
        return self._tail(limit - self.value, self.skewness)

    def p_above(self, limit: float) -> float:
        """Probability of a figure as high as this one, if the true one were at `limit`: small where it is above."""
        return self._tail(self.value - limit, -self.skewness)

    def interval(self, alpha: float) -> tuple[float, float]:
        """Bounds, each of which the true figure is beyond with probability `alpha`."""
        low, high = (self._critical(alpha, upper=upper) for upper in (False, True))
        return self.value - low * self.error, self.value + high * self.error

    def detectable(self, alpha: float, power: float, *, upper: bool) -> float:
        """Smallest margin above (or below) that a figure which did not change is shown to keep, with that `power`."""
        return self.error * (NormalDist().inv_cdf(power) + self._critical(alpha, upper=upper))

    def power(self, margin: float, alpha: float, *, upper: bool) -> float:
        """Probability that a figure which did not change is shown not to be above (or below) by more than `margin`."""
        if self.error == 0:
            return float(margin > 0)
        return NormalDist().cdf(margin / self.error - self._critical(alpha, upper=upper))

    def documents_needed(self, limit: float, alpha: float, power: float) -> int | None:
        """How many documents would tell the figure from `limit` with probability `power`, if it stays where it is.

        Few documents tell little of how much documents differ: the standard error is taken at its upper 80 % bound.
        None where the figure is so near the limit that more than 10⁹ documents would be named.
        """
        distance = abs(limit - self.value)
        if not math.isfinite(self.error):
            return SMALLEST_SAMPLE
        if distance == 0 or not math.isfinite(distance):
            return None
        error = self.error * _upper_factor(self.documents - 1)
        skewness = math.copysign(1, limit - self.value) * self.skewness

        def suffice(documents: int) -> bool:
            critical = float(skewed_t.critical(documents * self.effective / self.documents, skewness, alpha))
            spans = critical + NormalDist().inv_cdf(power)
            return spans * error * math.sqrt(self.documents / documents) <= distance

        low, high = max(self.documents, SMALLEST_SAMPLE - 1), max(self.documents + 1, SMALLEST_SAMPLE)
        while not suffice(high):
            if high > _MOST_NEEDED:
                return None
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if suffice(middle) else (middle, high)
        return high

    def _critical(self, alpha: float, *, upper: bool) -> float:
        if self.error == 0:
            return 0.0
        return float(skewed_t.critical(self.effective, self.skewness if upper else -self.skewness, alpha))

    def _tail(self, moved: float, skewness: float) -> float:
        if self.error == 0:
            return 0.0 if moved > 0 else 1.0
        return skewed_t.tail(self.effective, skewness, moved / self.error)


def studentized(sums: Floats, statistic: Callable[[Floats], Floats]) -> list[Studentized]:
    """Studentize the K figures that `statistic` makes [r, K] of totals [r, M], of the sums [D, M] of each document.

    The first column counts tokens: how much of a document there is. Memory is D times that of the figures.
    """
    documents, total = len(sums), sums.sum(0, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):  # where no document, or only one, has what a figure counts
        values = statistic(total)[0]
        if documents < 2:
            return [Studentized(float(value), math.nan, documents, documents, math.nan) for value in values]
        influence = influences(statistic(total - sums), values)
    return _of_influences(values, influence, np.broadcast_to(sums[:, :1], influence.shape))


def means(sums: Floats, counts: Floats) -> list[Studentized]:
    """Studentize K means, each of its own tokens: `sums` and `counts` of every document are [D, K].

    Documents without a token of a mean do not count for it.
    """
    found = []
    for column in range(sums.shape[1]):
        has = counts[:, column] > 0
        of = np.stack([counts[has, column], sums[has, column]], 1)
        found += studentized(of, lambda totals: totals[:, 1:] / totals[:, :1])
    return found


def influences(jackknife: Floats, values: Floats) -> Floats:
    """Say how each document moves figures, from those without it [D, K]: of mean 0, on the scale of a mean's values."""
    influence: Floats = (len(jackknife) - 1) * (jackknife.mean(0) - jackknife)
    # Documents that are equal differ by rounding.
    equal = np.abs(influence).max(0) <= 1e-12 * np.maximum(1.0, np.abs(values))
    influence[:, equal] = 0.0
    return influence


def effective(tokens: Floats) -> Floats:
    """Count the equally long documents that would tell as much as those with so many `tokens` [D, …]."""
    with np.errstate(invalid="ignore", divide="ignore"):
        count: Floats = tokens.sum(0) ** 2 / (tokens**2).sum(0)
    return count


def _of_influences(values: Floats, influence: Floats, tokens: Floats) -> list[Studentized]:
    documents = len(influence)
    errors = influence.std(0, ddof=1) / math.sqrt(documents)
    skewness = skewed_t.l_skewness(influence.T) if documents > 2 else np.full(len(values), math.nan)
    columns = (each.tolist() for each in (values, errors, effective(tokens), skewness))
    return [Studentized(value, error, documents, of, skewed) for value, error, of, skewed in zip(*columns, strict=True)]


def bounds(found: Studentized) -> tuple[float, float] | None:
    """Bound a figure at the confidence of reports; None: there are too few documents."""
    return found.interval(TAIL) if found.decides else None


def _upper_factor(freedom: int) -> float:
    """Upper 80 % bound of a standard deviation by the one found (chi-square, after Wilson and Hilferty 1931)."""
    part = 2 / (9 * freedom)
    lowest = freedom * max(1e-3, 1 - part + NormalDist().inv_cdf(0.2) * math.sqrt(part)) ** 3
    return math.sqrt(freedom / lowest)
