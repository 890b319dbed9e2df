"""Quality of an artifact against its checkpoint: the same text through both, compared token by token."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from llmforge.base.errors import DataError
from llmforge.checkpoint.text import Window
from llmforge.evaluation.metrics import Estimate, TokenScores, bootstrap, require_finite, score

Logits = Callable[[NDArray[np.int64]], NDArray[np.float32]]  # ids [S] -> logits [S, V]

HISTOGRAM_DECADES = (-7, 2)  # log10 of the KLD: below is rounding noise of fp32 logits, above no softmax gets
HISTOGRAM_BINS_PER_DECADE = 4


class DocumentSums(BaseModel):
    """Sums over the predicted tokens of one document: what every figure and every resample is made from."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    document: str
    tokens: int
    baseline_nll: float  # nats
    nll: float  # nats
    kld: float  # nats
    same_top: int
    delta_p_squared: float

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the artifact over that of the baseline, on this document."""
        return _exp((self.nll - self.baseline_nll) / self.tokens)


class Quality(BaseModel):
    """How far the artifact is from the baseline, over all predicted tokens; intervals are over documents."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    context: int  # tokens of the longest window, BOS included
    documents: int
    windows: int
    tokens: int  # predicted ones
    seed: int  # of the bootstrap
    baseline_perplexity: float
    perplexity: float
    perplexity_ratio: Estimate  # artifact / baseline
    kld_mean: Estimate  # KL(baseline || artifact), nats a token
    kld_median: float
    kld_p95: float
    kld_p99: float
    kld_max: float
    kld_histogram: tuple[int, ...]  # tokens by log10(KLD), HISTOGRAM_DECADES; the ends take what lies beyond
    top1_agreement: Estimate  # share of tokens where both rank the same token first
    delta_p_rms: float  # of the true token's probability
    per_document: tuple[DocumentSums, ...]

    def estimates(self) -> dict[str, Estimate]:
        """Name the figures that a gate can decide on."""
        return {
            "perplexity_ratio": self.perplexity_ratio,
            "kld_mean": self.kld_mean,
            "top1_agreement": self.top1_agreement,
        }


def compare(
    windows: Sequence[Window],
    baseline: Logits,
    artifact: Logits,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Quality:
    """Run every window through `baseline` and `artifact` and compare them on each next token.

    Logits of one window at a time are in memory, log-probabilities never; kept are four numbers a token. `progress` is
    told the windows done and their total.

    Raises:
        DataError: there is nothing to predict.
        VerificationError: a logit of either side is NaN or infinite; the message names the window.
    """
    windows = [window for window in windows if len(window.ids) > 1]
    if not windows:
        raise DataError("the evaluation text holds no token to predict", hint="give it documents of 2 tokens or more")
    scores: dict[str, list[TokenScores]] = {}
    for done, window in enumerate(windows):
        progress(done, len(windows))
        where = f"window {done} (document {window.document}, {len(window.ids)} tokens)"
        scores.setdefault(window.document, []).append(
            _score(window, _logits("baseline", baseline, window, where), _logits("artifact", artifact, window, where))
        )
    progress(len(windows), len(windows))
    return _summary(windows, scores, seed)


def _logits(side: str, logits: Logits, window: Window, where: str) -> NDArray[np.float32]:
    """Compute the logits [S, V] of a window and refuse what cannot be averaged."""
    values = logits(window.ids)
    require_finite(side, values, where)
    return values


def _score(window: Window, baseline: NDArray[np.float32], artifact: NDArray[np.float32]) -> TokenScores:
    """Compare both sides on every token of the window but the first, which nothing predicts."""
    return score(baseline[:-1], artifact[:-1], np.asarray(window.ids[1:]))


def _sums(document: str, parts: list[TokenScores]) -> DocumentSums:
    return DocumentSums(
        document=document,
        tokens=sum(len(part.kld) for part in parts),
        baseline_nll=math.fsum(float(part.reference_nll.sum()) for part in parts),
        nll=math.fsum(float(part.nll.sum()) for part in parts),
        kld=math.fsum(float(part.kld.sum()) for part in parts),
        same_top=sum(int(part.same_top.sum()) for part in parts),
        delta_p_squared=math.fsum(float(np.square(part.delta_p).sum()) for part in parts),
    )


def _means(totals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Make [ln perplexity ratio, mean KLD, top-1 agreement] [r, 3] of totals [r, 5] in the order of `_summary`."""
    tokens, baseline_nll, nll, kld, same_top = totals.T
    return np.stack([(nll - baseline_nll) / tokens, kld / tokens, same_top / tokens], axis=1)


def _summary(windows: Sequence[Window], scores: dict[str, list[TokenScores]], seed: int) -> Quality:
    """Turn the scores of each document into figures with their bounds."""
    per_document = tuple(_sums(document, parts) for document, parts in scores.items())
    sums = np.array([(d.tokens, d.baseline_nll, d.nll, d.kld, d.same_top) for d in per_document], np.float64)
    totals = sums.sum(0)
    tokens = int(totals[0])
    bounds = bootstrap(sums, _means, seed=seed)
    log_ratio, kld_mean, top1 = (
        Estimate(
            value=float(value),
            low=None if bounds is None else float(bounds[i, 0]),
            high=None if bounds is None else float(bounds[i, 1]),
            samples=len(per_document),
        )
        for i, value in enumerate(_means(totals[None])[0])
    )
    kld = np.concatenate([part.kld for parts in scores.values() for part in parts])
    median, p95, p99 = (float(value) for value in np.quantile(kld, (0.5, 0.95, 0.99)))
    return Quality(
        context=max(len(window.ids) for window in windows),
        documents=len(per_document),
        windows=len(windows),
        tokens=tokens,
        seed=seed,
        baseline_perplexity=_exp(totals[1] / tokens),
        perplexity=_exp(totals[2] / tokens),
        perplexity_ratio=Estimate(
            value=_exp(log_ratio.value),
            low=None if log_ratio.low is None else _exp(log_ratio.low),
            high=None if log_ratio.high is None else _exp(log_ratio.high),
            samples=log_ratio.samples,
        ),
        kld_mean=kld_mean,
        kld_median=median,
        kld_p95=p95,
        kld_p99=p99,
        kld_max=float(kld.max()),
        kld_histogram=_histogram(kld),
        top1_agreement=top1,
        delta_p_rms=math.sqrt(math.fsum(d.delta_p_squared for d in per_document) / tokens),
        per_document=per_document,
    )


def _exp(nats: float) -> float:
    """Raise e to a power; beyond fp64, infinity instead of an exception."""
    return math.exp(nats) if nats < math.log(sys.float_info.max) else math.inf


def _histogram(kld: NDArray[np.float64]) -> tuple[int, ...]:
    """Count tokens by the decade of their KLD; values beyond the ends (and rounding below 0) go to the end bins."""
    low, high = HISTOGRAM_DECADES
    bins = (high - low) * HISTOGRAM_BINS_PER_DECADE
    decades = np.log10(np.maximum(kld, 10.0**low))
    at = np.clip(np.floor((decades - low) * HISTOGRAM_BINS_PER_DECADE).astype(int), 0, bins - 1)
    return tuple(int(count) for count in np.bincount(at, minlength=bins))
