"""Arithmetic of evidence: how far logits moved, and how sure a figure is. No torch, no files, no graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from llmforge.base.errors import VerificationError

CONFIDENCE = 0.95  # two-sided, for every interval of a report; a one-sided decision on a bound errs at most 2.5 %
RESAMPLES = 10_000  # as in the metric that the published figures of peers were made with
SMALLEST_SAMPLE = 8  # fewer documents than this get no interval: a bootstrap of them is far too narrow

_BLOCK_ROWS = 16  # rows a time: 16 x 8192 fp64 is 1 MB, which stays in a core's L2 cache


class Estimate(BaseModel):
    """A figure and the bounds it lies between at `CONFIDENCE`.

    An exact figure (a size) has both bounds equal to itself. A figure from too small a sample has no bounds (None),
    which is not the same: nothing can be decided on it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    value: float
    low: float | None
    high: float | None
    samples: int  # how many documents (or repetitions) it rests on; 0 for an exact figure
    of: str = "documents"  # what the samples are

    @classmethod
    def exact(cls, value: float) -> Estimate:
        """Make the estimate of a figure that is known without error."""
        return cls(value=value, low=value, high=value, samples=0, of="")

    @property
    def is_exact(self) -> bool:
        """Whether the figure is known without error."""
        return self.samples == 0


@dataclass(frozen=True)
class TokenScores:
    """What each of R predicted tokens says about `logits` against `reference`; fp64 [R] unless said otherwise."""

    reference_nll: NDArray[np.float64]  # -ln p_reference(true token), nats
    nll: NDArray[np.float64]  # -ln p(true token), nats
    kld: NDArray[np.float64]  # KL(reference || logits), nats
    same_top: NDArray[np.bool_]  # both rank the same token first
    delta_p: NDArray[np.float64]  # p(true token) - p_reference(true token), -1 … 1


def score(reference: NDArray[np.float32], logits: NDArray[np.float32], targets: NDArray[np.int64]) -> TokenScores:
    """Compare two sets of logits [R, V] on the true next tokens `targets` [R].

    Both softmaxes and all sums are fp64, a few rows at a time: with p, q the two distributions and a, b the logits less
    their maximum, KL(p || q) = Σ eᵃ(a - b) / Σ eᵃ - ln Σ eᵃ + ln Σ eᵇ, so that no log-probability is ever stored.

    Raises:
        VerificationError: a logit is NaN or infinite.
    """
    rows = len(targets)
    if reference.shape != logits.shape or logits.shape[:1] != (rows,):
        raise ValueError(f"logits of shapes {reference.shape} and {logits.shape} for {rows} targets")
    require_finite("reference", reference)
    require_finite("compared", logits)
    reference_nll, nll, kld = (np.empty(rows) for _ in range(3))
    for low in range(0, rows, _BLOCK_ROWS):
        block = slice(low, low + _BLOCK_ROWS)
        truth = targets[block, None]
        a, b = _shifted(reference[block]), _shifted(logits[block])
        a_exp, b_log_sum = np.exp(a), np.log(np.exp(b).sum(-1))
        a_sum = a_exp.sum(-1)
        reference_nll[block] = np.log(a_sum) - np.take_along_axis(a, truth, -1)[:, 0]
        nll[block] = b_log_sum - np.take_along_axis(b, truth, -1)[:, 0]
        a -= b
        kld[block] = np.einsum("rv,rv->r", a_exp, a) / a_sum - np.log(a_sum) + b_log_sum
    return TokenScores(
        reference_nll=reference_nll,
        nll=nll,
        kld=kld,
        same_top=reference.argmax(-1) == logits.argmax(-1),
        delta_p=np.exp(-nll) - np.exp(-reference_nll),
    )


def kld_mean(reference: NDArray[np.float32], logits: NDArray[np.float32]) -> float:
    """Average KL(reference || logits) over all rows of two logit arrays [..., V], in nats a token.

    Raises:
        VerificationError: a logit is NaN or infinite.
    """
    vocabulary = logits.shape[-1]
    flat = logits.reshape(-1, vocabulary)
    scores = score(reference.reshape(-1, vocabulary), flat, np.zeros(len(flat), np.int64))
    return float(scores.kld.mean())


def require_finite(what: str, logits: NDArray[np.float32], where: str = "") -> None:
    """Refuse logits [R, V] that hold NaN or an infinity; `what` names the side and `where` the place.

    Raises:
        VerificationError: a logit is NaN or infinite.
    """
    finite = np.isfinite(logits)
    if not finite.all():
        row, column = (int(i) for i in np.argwhere(~finite)[0])
        raise VerificationError(
            f"{what} logits hold {int((~finite).sum())} values that are not finite{where and ' in ' + where}, "
            f"the first ({logits[row, column]}) at row {row}, token id {column}",
            hint="look for overflow in the weights or in the last pass; nothing was averaged over these values",
        )


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


def _shifted(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Widen logits to fp64 and move each row's maximum to 0."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide


def _expanded_tail(documents: int) -> float:
    """Level of the lower bootstrap percentile that covers like a t interval of `documents` samples would."""
    normal = NormalDist()
    freedom = documents - 1
    z = normal.inv_cdf(1 - (1 - CONFIDENCE) / 2)
    # Quantile of Student's t from the normal one: Abramowitz and Stegun 26.7.5; within 0.001 from 7 degrees on.
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return normal.cdf(-t * math.sqrt(documents / freedom))
