"""How sure a figure is: an estimate with its bounds, over documents or over repetitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from llmforge.metrics.record import ReportRecord

CONFIDENCE = 0.95  # two-sided, for every interval of a report; a one-sided decision on a bound errs at most 2.5 %
TAIL = (1 - CONFIDENCE) / 2  # what lies beyond each bound
SMALLEST_SAMPLE = 8  # fewer documents than this get no interval: what was simulated of them is too wide to decide


class Estimate(ReportRecord):
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
        return cls.quantile(values, 0.5, of)

    @classmethod
    def quantile(cls, values: Sequence[float], quantile: float, of: str) -> Estimate:
        """Estimate a quantile of independent `values`; it has bounds where `quantile_interval` finds some."""
        low, high = quantile_interval(np.asarray(values, np.float64), quantile) or (None, None)
        return cls(value=float(np.quantile(values, quantile)), low=low, high=high, samples=len(values), of=of)

    @classmethod
    def clustered_quantile(cls, clusters: Sequence[NDArray[np.float64]], quantile: float, of: str) -> Estimate:
        """Estimate a quantile of the values of all `clusters` together; `of` says what a cluster is."""
        low, high = clustered_quantile_interval(clusters, quantile) or (None, None)
        value = float(np.quantile(np.concatenate(clusters), quantile))
        return cls(value=value, low=low, high=high, samples=len(clusters), of=of)

    @classmethod
    def share(cls, hits: int, samples: int, of: str) -> Estimate:
        """Estimate a share of independent `samples`, with Wilson's score interval; none below `SMALLEST_SAMPLE`."""
        value = hits / samples
        if samples < SMALLEST_SAMPLE:
            return cls(value=value, low=None, high=None, samples=samples, of=of)
        z2 = NormalDist().inv_cdf(1 - TAIL) ** 2
        centre = (hits + z2 / 2) / (samples + z2)
        half = math.sqrt(z2 * (hits * (samples - hits) / samples + z2 / 4)) / (samples + z2)
        low, high = min(value, max(0.0, centre - half)), max(value, min(1.0, centre + half))
        return cls(value=value, low=low, high=high, samples=samples, of=of)

    def scaled(self, factor: float) -> Estimate:
        """Multiply by an exact positive number."""
        low, high = (None if bound is None else bound * factor for bound in (self.low, self.high))
        return self.model_copy(update={"value": self.value * factor, "low": low, "high": high})

    def inverted(self, numerator: float) -> Estimate:
        """Divide an exact positive number by it; a figure that is not above 0 gives infinity."""
        value, low, high = (
            None if each is None else numerator / each if each > 0 else math.inf
            for each in (self.value, self.high, self.low)
        )
        return self.model_copy(update={"value": value, "low": low, "high": high})

    def less(self, other: Estimate) -> Estimate:
        """Subtract one of other samples: wider than a paired difference of the same ones.

        Each side's distance to its bound is added in squares (MOVER; Zou and Donner 2008).
        """
        value, few = self.value - other.value, min(self.samples, other.samples)
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return Estimate(value=value, low=None, high=None, samples=few, of=self.of)
        low = value - math.hypot(self.value - self.low, other.high - other.value)
        high = value + math.hypot(self.high - self.value, other.value - other.low)
        return Estimate(value=value, low=low, high=high, samples=few, of=self.of)

    @property
    def is_exact(self) -> bool:
        """Whether the figure is known without error."""
        return self.samples == 0

    @property
    def decides(self) -> bool:
        """Whether there are samples enough for a decision."""
        return self.low is not None and self.high is not None

    def interval(self, alpha: float) -> tuple[float, float]:
        """Bounds, each of which the true figure is beyond with probability `alpha`."""
        assert self.low is not None
        assert self.high is not None
        wider = _Z(alpha) / _Z(TAIL) if alpha != TAIL else 1.0
        return self.value - wider * (self.value - self.low), self.value + wider * (self.high - self.value)

    def p_below(self, limit: float) -> float:
        """Probability of a figure as low as this one, if the true one were at `limit`: small where it is below."""
        assert self.high is not None
        return _p_beyond(limit - self.value, self.high - self.value)

    def p_above(self, limit: float) -> float:
        """Probability of a figure as high as this one, if the true one were at `limit`: small where it is above."""
        assert self.low is not None
        return _p_beyond(self.value - limit, self.value - self.low)

    def detectable(self, alpha: float, power: float, *, upper: bool) -> float:
        """Smallest margin above (or below) that a figure which did not change is shown to keep, with that `power`."""
        low, high = self.interval(alpha)
        return (self.value - low if upper else high - self.value) * (1 - _Z(power) / _Z(alpha))


_Z = NormalDist().inv_cdf


def _p_beyond(moved: float, half: float) -> float:
    """Probability of a figure so far from a limit, by half of its interval, which is 1.96 errors long."""
    if half <= 0:
        return 0.0 if moved > 0 else 1.0
    return NormalDist().cdf(_Z(TAIL) * moved / half)


def share_interval(found: int, samples: int) -> tuple[float, float]:
    """Bound the share of which `found` of `samples` independent samples are: Clopper and Pearson (1934), exact.

    Never too narrow, also where none or all are: equal samples do not differ.
    """
    tail = TAIL

    def at_most(count: int, share: float) -> float:  # P(binomial(samples, share) <= count)
        terms = (
            math.lgamma(samples + 1) - math.lgamma(k + 1) - math.lgamma(samples - k + 1)
            + k * math.log(share) + (samples - k) * math.log1p(-share)
            for k in range(count + 1)
        )  # fmt: skip
        return math.fsum(map(math.exp, terms))

    def solve(is_below: Callable[[float], bool]) -> float:
        low, high = 0.0, 1.0
        for _ in range(52):  # bits of the result
            middle = (low + high) / 2
            low, high = (middle, high) if is_below(middle) else (low, middle)
        return (low + high) / 2

    lower = 0.0 if found == 0 else solve(lambda share: 1 - at_most(found - 1, share) < tail)
    upper = 1.0 if found == samples else solve(lambda share: at_most(found, share) > tail)
    return lower, upper


def quantile_interval(samples: NDArray[np.float64], quantile: float) -> tuple[float, float] | None:
    """Bound a quantile of independent samples [n] by order statistics, with no assumption on their distribution.

    The number of samples below the true quantile is binomial(n, quantile); the bounds are the tightest pair of sorted
    samples that miss it with at most half of 1 - `CONFIDENCE` on each side (David and Nagaraja, Order Statistics,
    section 7.1). None where n is too small for that: a median needs 6 samples, a 95th percentile 72.
    """
    ordered = np.sort(samples)
    n, tail = len(ordered), TAIL
    k = np.arange(1, n + 1)
    log_odds = np.log((n + 1 - k) / k) + math.log(quantile / (1 - quantile))  # of k and k - 1 samples below
    below = np.cumsum(np.exp(n * math.log1p(-quantile) + np.concatenate([[0.0], np.cumsum(log_odds)])))
    lowest = int(np.searchsorted(below, tail, side="right"))  # P(count < lowest) <= tail
    highest = int(np.searchsorted(below, 1 - tail, side="left")) + 1  # P(count >= highest) <= tail
    if lowest < 1 or highest > n:
        return None
    return float(ordered[lowest - 1]), float(ordered[highest - 1])


def fewest(quantile: float) -> int:
    """Say how many independent samples `quantile_interval` needs: for a median 6, for a 99th percentile 368.

    With fewer, all of them lie on one side of it with a higher probability than half of 1 - `CONFIDENCE`.
    """
    return math.ceil(math.log(TAIL) / math.log(max(quantile, 1 - quantile)))


def clustered_quantile_interval(clusters: Sequence[NDArray[np.float64]], quantile: float) -> tuple[float, float] | None:
    """Bound a quantile of values that come in clusters, such as the tokens of one generation: not independent.

    Woodruff's interval (Confidence Intervals for Medians and Other Position Measures, 1952): the share of values below
    the quantile has a standard error over clusters, or that of independent values if it is larger; its t interval is
    carried over to the values. None below `SMALLEST_SAMPLE` clusters, or where it reaches beyond the values.
    """
    count = len(clusters)
    if count < SMALLEST_SAMPLE:
        return None
    values = np.concatenate(clusters)
    at = np.quantile(values, quantile)
    below = np.array([(cluster <= at).sum() for cluster in clusters], np.float64)
    sizes = np.array([len(cluster) for cluster in clusters], np.float64)
    spread = below - below.sum() / sizes.sum() * sizes
    between = math.sqrt(count / (count - 1) * float(spread @ spread)) / len(values)
    half = student_t(count - 1) * max(between, math.sqrt(quantile * (1 - quantile) / len(values)))
    if quantile - half <= 0 or quantile + half >= 1:
        return None
    low, high = np.quantile(values, (quantile - half, quantile + half))
    return float(low), float(high)


def student_t(freedom: int) -> float:
    """Quantile of Student's t at `CONFIDENCE`, two-sided, from the normal one.

    Abramowitz and Stegun 26.7.5; within 0.001 from 7 degrees of freedom on.
    """
    z = NormalDist().inv_cdf(1 - TAIL)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return t + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
