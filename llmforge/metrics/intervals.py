"""How sure a figure is: an estimate with its bounds, over documents or over repetitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from llmforge.metrics.record import Record

CONFIDENCE = 0.95  # two-sided, for every interval of a report; a one-sided decision on a bound errs at most 2.5 %
RESAMPLES = 10_000  # as in the metric that the published figures of peers were made with
SMALLEST_SAMPLE = 8  # fewer documents than this get no interval: a bootstrap of them is far too narrow
_GRID = 256  # ranks at which a resampled quantile is looked for: a sixteenth of its standard error apart
FEWEST_BEYOND = 10  # tokens beyond a quantile; with fewer, a resample cannot show how far it may lie


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
        z2 = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2) ** 2
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
    figures = [statistic(drawn @ sums) for drawn in resample(documents, seed=seed, resamples=resamples)]
    tail = _expanded_tail(documents)
    bounds: NDArray[np.float64] = np.quantile(np.concatenate(figures), (tail, 1 - tail), axis=0).T
    return bounds


def resample(documents: int, *, seed: int, resamples: int = RESAMPLES) -> Iterator[NDArray[np.float64]]:
    """Draw as many documents as there are, with replacement, `resamples` times: how often each was drawn [r, D]."""
    rng = np.random.default_rng(seed)
    chunk = max(1, 2**20 // documents)  # about a million draws at once: bounded memory, and the seed's order is kept
    for low in range(0, resamples, chunk):
        rows = min(chunk, resamples - low)
        draws = rng.integers(0, documents, (rows, documents)) + documents * np.arange(rows)[:, None]
        yield np.bincount(draws.ravel(), minlength=rows * documents).reshape(rows, documents).astype(np.float64)


def bootstrap_means(
    sums: NDArray[np.float64], counts: NDArray[np.float64], *, seed: int
) -> list[tuple[float, float] | None]:
    """Bound K means, each of its own tokens: `sums` and `counts` of every document are [D, K].

    As `bootstrap`. None for a mean that fewer than `SMALLEST_SAMPLE` documents have tokens of.
    """
    documents, means = np.count_nonzero(counts, 0), []
    if not (documents >= SMALLEST_SAMPLE).any():
        return [None] * len(documents)
    for drawn in resample(len(sums), seed=seed):
        with np.errstate(invalid="ignore"):  # 0/0, where none of its documents was drawn
            means.append(drawn @ sums / (drawn @ counts))
    found: list[tuple[float, float] | None] = []
    for column, of in zip(np.concatenate(means).T, documents.tolist(), strict=True):
        if of < SMALLEST_SAMPLE:
            found.append(None)
            continue
        tail = _expanded_tail(of)
        low, high = np.quantile(column[~np.isnan(column)], (tail, 1 - tail)).tolist()
        found.append((low, high))
    return found


def bootstrap_quantiles(
    values: NDArray[np.float64], documents: NDArray[np.int64], quantiles: Sequence[float], *, seed: int
) -> list[tuple[float, float]] | None:
    """Bound quantiles of the tokens `values` [N], of the documents 0 … D-1 given by `documents` [N], as `bootstrap`.

    With the draws of `bootstrap`, and no quantile made of any of them: the quantile of a resample is at most x where
    the share of its tokens up to x is at least q. So each bound is the smallest token for which that share of the
    resamples says so, found by bisection over all tokens. Returns bounds for each quantile, None below
    `SMALLEST_SAMPLE` documents. A bound with fewer than `FEWEST_BEYOND` tokens beyond the quantile is infinite.
    """
    count = int(documents.max()) + 1
    if count < SMALLEST_SAMPLE:
        return None
    order = np.argsort(values, kind="stable")
    ordered, owners = values[order], documents[order]
    tokens = np.bincount(documents, minlength=count).astype(np.float64)
    parts = [drawn.astype(np.uint8) for drawn in resample(count, seed=seed)]  # a count is far below 255
    tail = _expanded_tail(count)
    q = np.repeat(np.asarray(quantiles, np.float64), 2)
    wanted = np.tile((tail, 1 - tail), len(quantiles))
    low, high = np.ones(len(q), np.int64), np.full(len(q), len(ordered), np.int64)  # ranks, from 1
    while (low < high).any():
        middle = (low + high) // 2
        up_to = np.stack([np.bincount(owners[:rank], minlength=count) for rank in middle], 1)  # [D, bounds]
        beyond = up_to - tokens[:, None] * q
        # Whole numbers less multiples of q: what is nearer to 0 than this is 0, on every processor.
        reached = np.concatenate([part.astype(float) @ beyond > -1e-6 for part in parts]).mean(0) >= wanted
        low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
    bounds = ordered[low - 1].reshape(-1, 2)
    found = []
    for of, (lower, upper) in zip(quantiles, bounds.tolist(), strict=True):
        few_below, few_above = (len(ordered) * share < FEWEST_BEYOND for share in (of, 1 - of))
        found.append((-math.inf if few_below else lower, math.inf if few_above else upper))
    return found


def bootstrap_quantile_differences(
    ours: NDArray[np.float64],
    theirs: NDArray[np.float64],
    documents: NDArray[np.int64],
    quantiles: Sequence[float],
    *,
    seed: int,
) -> list[tuple[float, float]] | None:
    """Bound how far quantiles of `ours` [N] lie above those of `theirs` [N], of the same tokens, as `bootstrap`.

    Both sides see the same draws of the documents 0 … D-1 in `documents` [N], so that what makes a document hard for
    both cancels out. Returns bounds for each quantile, None below `SMALLEST_SAMPLE` documents. With fewer than
    `FEWEST_BEYOND` tokens on one side of a quantile both bounds are infinite.
    """
    count = int(documents.max()) + 1
    if count < SMALLEST_SAMPLE:
        return None
    sides = [_resampled_quantiles(values, documents, quantiles, seed=seed) for values in (ours, theirs)]
    tail = _expanded_tail(count)
    bounds = np.quantile(sides[0] - sides[1], (tail, 1 - tail), axis=0).T
    few = [len(ours) * min(share, 1 - share) < FEWEST_BEYOND for share in quantiles]
    return [
        (-math.inf, math.inf) if none else (low, high) for none, (low, high) in zip(few, bounds.tolist(), strict=True)
    ]


def _resampled_quantiles(
    values: NDArray[np.float64], documents: NDArray[np.int64], quantiles: Sequence[float], *, seed: int
) -> NDArray[np.float64]:
    """Make quantiles [R, Q] of the tokens `values` [N] of each draw of `documents` [N], between ranks of a grid.

    In a draw, the quantile is where the tokens up to it less q of all tokens, a sum over its documents, reach 0. That
    sum is known at `_GRID` ranks within eight standard errors of the quantile, and taken linearly between these.
    """
    count = int(documents.max()) + 1
    order = np.argsort(values, kind="stable")
    ordered, owners = values[order], documents[order]
    tokens = np.bincount(documents, minlength=count).astype(np.float64)
    grids, sums = [], []
    for q in quantiles:
        rank = min(len(ordered), max(1, math.ceil(q * len(ordered))))
        below = np.bincount(owners[:rank], minlength=count)
        reach = math.ceil(8 * float(np.linalg.norm(below - q * tokens))) + 16
        low, high = max(1, rank - reach), min(len(ordered), rank + reach)
        grid = np.unique(np.linspace(low, high, _GRID).round().astype(np.int64))  # ranks, from 1
        steps = [np.bincount(owners[a:b], minlength=count) for a, b in zip([0, *grid[:-1]], grid, strict=True)]
        grids.append(ordered[grid - 1])
        sums.append(np.cumsum(steps, 0).T - q * tokens[:, None])  # [D, G]
    found = []
    for drawn in resample(count, seed=seed):
        columns = []
        for at, over in zip(grids, sums, strict=True):
            reached = (drawn.astype(np.float32) @ over.astype(np.float32)).astype(np.float64)  # [r, G], ascending
            upper = np.minimum((reached < 0).sum(1), len(at) - 1)
            lower = np.maximum(upper - 1, 0)
            rows = np.arange(len(reached))
            left, right = reached[rows, lower], reached[rows, upper]
            with np.errstate(divide="ignore", invalid="ignore"):
                share = np.where(right > left, -left / (right - left), 0.0).clip(0.0, 1.0)
            columns.append(at[lower] + share * (at[upper] - at[lower]))
        found.append(np.stack(columns, 1))
    return np.concatenate(found)


def share_interval(found: int, samples: int) -> tuple[float, float]:
    """Bound the share of which `found` of `samples` independent samples are: Clopper and Pearson (1934), exact.

    Never too narrow, also where none or all are: no resample of equal samples would differ.
    """
    tail = (1 - CONFIDENCE) / 2

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
    n, tail = len(ordered), (1 - CONFIDENCE) / 2
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
    return math.ceil(math.log((1 - CONFIDENCE) / 2) / math.log(max(quantile, 1 - quantile)))


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
    half = _student_t(count - 1) * max(between, math.sqrt(quantile * (1 - quantile) / len(values)))
    if quantile - half <= 0 or quantile + half >= 1:
        return None
    low, high = np.quantile(values, (quantile - half, quantile + half))
    return float(low), float(high)


def _expanded_tail(documents: int) -> float:
    """Level of the lower bootstrap percentile that covers like a t interval of `documents` samples would."""
    return NormalDist().cdf(-_student_t(documents - 1) * math.sqrt(documents / (documents - 1)))


def _student_t(freedom: int) -> float:
    """Quantile of Student's t at `CONFIDENCE`, two-sided, from the normal one.

    Abramowitz and Stegun 26.7.5; within 0.001 from 7 degrees of freedom on.
    """
    z = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return t + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
