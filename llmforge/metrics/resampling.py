"""How far a figure, or the paired difference of two, may be from what was measured: studentized resamples of documents.

The bootstrap-t of Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 12.5, on the influence of each
document, or Student's t where that is wider. The one sees that documents are skewed, a few much worse than the others,
where a t interval says "no worse than" too often; the other that of a dozen documents the odd ones may be missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from llmforge.metrics.intervals import RESAMPLES, SMALLEST_SAMPLE
from llmforge.metrics.quality import DocumentSums, OfSums
from llmforge.metrics.tokens import REFERENCE_NLL, Floats

SAME_BASELINE = 1e-4  # relative; the baseline's fp32 logits differ by less between processors
_CHUNK = 2**20  # draws at once: 8 MB of indices, and the order of the seed is kept


@dataclass(frozen=True, eq=False)
class Resampled:
    """A figure of `documents` documents, and how its resamples lie about it."""

    value: float
    error: float  # standard error, by the jackknife; NaN of a single document
    documents: int
    studentized: Floats  # how (figure - true one) / error is spread, ascending [R]; [0] below SMALLEST_SAMPLE

    @property
    def decides(self) -> bool:
        """Whether there are documents enough for a decision."""
        return len(self.studentized) > 0

    def p_below(self, limit: float) -> float:
        """Probability of a figure as low as this one, if the true one were at `limit`: small where it is below."""
        return self._share(np.searchsorted(self.studentized, self._distance(limit), side="right"))

    def p_above(self, limit: float) -> float:
        """Probability of a figure as high as this one, if the true one were at `limit`: small where it is above."""
        below = np.searchsorted(self.studentized, self._distance(limit), side="left")
        return self._share(len(self.studentized) - below)

    def interval(self, alpha: float) -> tuple[float, float]:
        """Bounds, each of which the true figure is beyond with probability `alpha`."""
        low, high = (self.value - self._quantile(level) * self.error for level in (1 - alpha, alpha))
        return low, high

    def detectable(self, alpha: float, power: float) -> float:
        """Smallest margin that a figure which did not change is shown to keep, with probability `power`."""
        return self.error * (self._quantile(power) - self._quantile(alpha))

    def power(self, margin: float, alpha: float) -> float:
        """Probability that a figure which did not change is shown to stay within `margin`."""
        if self.error == 0:
            return float(margin > 0)
        reached = margin / self.error + self._quantile(alpha)
        return float(np.searchsorted(self.studentized, reached, side="right") / len(self.studentized))

    def documents_needed(self, limit: float, alpha: float, power: float) -> int | None:
        """How many documents would tell the figure from `limit` with probability `power`, if it stays where it is.

        Few documents tell little of how much documents differ: the standard error is taken at its upper 80 % bound.
        None where the figure is so near the limit that more than 10⁹ documents would be named.
        """
        distance = abs(limit - self.value)
        if not math.isfinite(self.error):
            return SMALLEST_SAMPLE
        if distance == 0:
            return None
        normal = NormalDist()
        spans = normal.inv_cdf(power) - normal.inv_cdf(alpha)
        if self.decides:
            spans = max(spans, self._quantile(power) - self._quantile(alpha))
        error = self.error * _upper_factor(self.documents - 1)
        needed = self.documents * (spans * error / distance) ** 2
        return None if needed > 1e9 else max(self.documents + 1, SMALLEST_SAMPLE, math.ceil(needed))

    def _distance(self, limit: float) -> float:
        moved = self.value - limit
        return moved / self.error if self.error > 0 else math.copysign(math.inf, moved) if moved else 0.0

    def _quantile(self, level: float) -> float:
        return float(np.quantile(self.studentized, level)) if self.error > 0 else 0.0

    def _share(self, beyond: int | np.integer) -> float:
        return (int(beyond) + 1) / (len(self.studentized) + 1)


def figure(form: OfSums, documents: Sequence[DocumentSums], *, seed: int, resamples: int = RESAMPLES) -> Resampled:
    """Resample a figure of `documents`."""
    return resampled(_columns(form, documents), lambda totals: _figures(form, totals), seed=seed, resamples=resamples)


def difference(
    form: OfSums,
    ours: Sequence[DocumentSums],
    theirs: Sequence[DocumentSums],
    *,
    seed: int,
    resamples: int = RESAMPLES,
) -> Resampled:
    """Resample ours - theirs of a figure, both over the same documents in the same order."""
    if [each.document for each in ours] != [each.document for each in theirs]:
        raise ValueError("a paired difference is of the same documents in the same order")
    left, right = _columns(form, ours), _columns(form, theirs)
    width = left.shape[1]

    def statistic(totals: Floats) -> Floats:
        return _figures(form, totals[:, :width]) - _figures(form, totals[:, width:])

    return resampled(np.concatenate([left, right], 1), statistic, seed=seed, resamples=resamples)


def paired(
    ours: Sequence[DocumentSums], theirs: Sequence[DocumentSums]
) -> tuple[list[DocumentSums], list[DocumentSums]]:
    """Keep the documents that both sides measured: by the same name, as many tokens, beside the same baseline."""
    known = {each.document: each for each in theirs}
    pairs = [(each, known[each.document]) for each in ours if _same(each, known.get(each.document))]
    return [ours for ours, _ in pairs], [theirs for _, theirs in pairs]


def _same(ours: DocumentSums, theirs: DocumentSums | None) -> bool:
    if theirs is None or ours.tokens != theirs.tokens:
        return False
    # The same text in another cut, or beside another checkpoint, has another likelihood.
    sums: list[Mapping[str, float]] = [ours.figures, theirs.figures]
    here, there = (each.get(REFERENCE_NLL.name, math.nan) for each in sums)
    return math.isclose(here, there, rel_tol=SAME_BASELINE)


def resampled(
    sums: Floats, statistic: Callable[[Floats], Floats], *, seed: int, resamples: int = RESAMPLES
) -> Resampled:
    """Resample what `statistic` makes, figures [r] of totals [r, M], of the sums [D, M] of each document.

    The influence of a document is how the figure changes where it is left out; resamples are made of influences.
    """
    documents = len(sums)
    total = sums.sum(0, keepdims=True)
    value = float(statistic(total)[0])
    if documents < 2:
        return Resampled(value, math.nan, documents, np.empty(0))
    left_out = statistic(total - sums)
    influence = (documents - 1) * (left_out.mean() - left_out)  # [D], of mean 0
    if float(np.abs(influence).max()) <= 1e-12 * max(1.0, abs(value)):  # rounding of equal documents
        influence = np.zeros(documents)
    error = _error(influence[None])[0]
    if documents < SMALLEST_SAMPLE:
        return Resampled(value, float(error), documents, np.empty(0))
    rng = np.random.default_rng(seed)
    found = []
    step = max(1, _CHUNK // documents)
    for low in range(0, resamples, step):
        drawn = influence[rng.integers(0, documents, (min(step, resamples - low), documents))]
        means, errors = drawn.mean(1), _error(drawn)
        with np.errstate(divide="ignore", invalid="ignore"):
            found.append(np.where(means == 0, 0.0, means / errors))
    return Resampled(value, float(error), documents, _wider(np.sort(np.concatenate(found)), documents - 1))


def _wider(studentized: Floats, freedom: int) -> Floats:
    """Move ascending values [R] out to the quantiles of Student's t, where these lie further from 0."""
    student = _student(len(studentized), freedom)
    return np.where(student < 0, np.minimum(studentized, student), np.maximum(studentized, student))


@lru_cache(maxsize=8)
def _student(count: int, freedom: int) -> Floats:
    """`count` evenly spread quantiles of Student's t, ascending."""
    return student_quantiles((np.arange(count) + 0.5) / count, freedom)


def student_quantiles(levels: Floats, freedom: int) -> Floats:
    """Quantiles of Student's t with `freedom` degrees, at most 10⁴ (beyond, those of 10⁴), to four digits.

    The distribution function for whole degrees is a finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    freedom = min(freedom, 10_000)
    angle = np.linspace(0, math.pi / 2, 20_001)[:-1]  # of t = √freedom · tan(angle), 0 … 10⁴ √freedom
    cosine, sine = np.cos(angle), np.sin(angle)
    odd = freedom % 2 == 1
    term = cosine.copy() if odd else np.ones_like(cosine)
    total = np.zeros_like(cosine) if freedom == 1 else term.copy()
    for k in range(3 if odd else 2, freedom - 1, 2):
        term = term * (k - 1) / k * cosine**2
        total += term
    inner = (angle + sine * total) * 2 / math.pi if odd else sine * total  # P(|T| < t)
    found: Floats = np.interp(np.abs(2 * levels - 1), inner, math.sqrt(freedom) * np.tan(angle))
    return np.copysign(found, levels - 0.5)


def _error(drawn: Floats) -> Floats:
    """Standard error of the mean of each row [r, D]."""
    spread: Floats = drawn.std(1, ddof=1) / math.sqrt(drawn.shape[1])
    return spread


def _columns(form: OfSums, documents: Sequence[DocumentSums]) -> Floats:
    names = [value.name for value in form.values]
    return np.array([(each.tokens, *(each.figures[name] for name in names)) for each in documents], np.float64)


def _figures(form: OfSums, totals: Floats) -> Floats:
    made = form.figure(*totals.T)
    if form.finish is float:
        return made
    return np.array([form.finish(float(each)) for each in made])


def _upper_factor(freedom: int) -> float:
    """Upper 80 % bound of a standard deviation by the one found (chi-square, after Wilson and Hilferty 1931)."""
    part = 2 / (9 * freedom)
    lowest = freedom * max(1e-3, 1 - part + NormalDist().inv_cdf(0.2) * math.sqrt(part)) ** 3
    return math.sqrt(freedom / lowest)
