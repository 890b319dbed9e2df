"""The metrics of quality: how far an artifact is from its checkpoint, on the same text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from llmforge.metrics import intervals, units
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.metric import Measured, Metric
from llmforge.metrics.quality import (
    ANSWER_TOKENS,
    ByPosition,
    Form,
    Histogram,
    OfAnswers,
    OfSums,
    OfTokens,
    Quality,
    Quantile,
    Source,
    Summed,
    ends_added,
    exp,
    length_ratio,
    median_difference,
    share_same,
)
from llmforge.metrics.tokens import (
    DELTA_P,
    DELTA_P_SQUARED,
    END_SHIFT,
    END_SHIFT_ELSEWHERE,
    KLD,
    NLL,
    REFERENCE_NLL,
    SAME_TOP,
    SHARED_TOP,
    TOP,
    Floats,
)
from llmforge.metrics.units import NATS, NATS_A_TOKEN, NATS_MOVED, RATIO, SHARE, SHIFT, TEXT, TOKENS


@dataclass(frozen=True)
class QualityMetric(Metric):
    """How far the artifact is from its checkpoint, on the same text."""

    section = "quality"

    form: Form  # from which values of tokens it is made, and how
    note: Callable[[Quality], str] | None = None  # beside the key figure; None: its unit
    row: tuple[str, str] | None = None  # of the summary: its title, which several figures share, and the figure's own

    def fewest(self, samples: int) -> int | None:
        """Say how many documents bounds need, or answers: their median is one of independent ones."""
        return intervals.fewest(0.5) if self.source == "samples" else super().fewest(samples)

    @property
    def more(self) -> str:
        """What gives more samples."""
        if self.source == "answer_tokens":
            return "measure on more chats"
        if self.source == "ends":
            return "measure on more documents that end within them"
        return "raise validation.quality.samples" if self.source == "samples" else "measure on more documents"

    @property
    def decides(self) -> bool:
        """Whether it has an interval, so that a gate can decide on it."""
        return self.form.decides

    @property
    def source(self) -> Source:
        """What it is made of; decode steps and answers have to be asked for in a recipe, under this name."""
        return self.form.source

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it; None where it was not measured."""
        return None if measured.quality is None else measured.quality.figures.get(self.name)


@dataclass(frozen=True)
class AdapterMetric(Metric):
    """A figure of quality of an adapter that requests choose, under `adapter.NAME.METRIC`."""

    section = "quality"
    decides = True

    adapter: str
    of: QualityMetric

    @property
    def more(self) -> str:
        """What gives more samples."""
        return "raise validation.quality.adapter_tokens"

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it; None where it was not measured."""
        found = (each.quality.figures.get(self.of.name) for each in measured.adapters if each.adapter == self.adapter)
        return next(found, None)


def _mean(tokens: Floats, total: Floats) -> Floats:
    return total / tokens


def _log_ratio(tokens: Floats, reference: Floats, nll: Floats) -> Floats:
    return (nll - reference) / tokens


def _perplexities(quality: Quality) -> str:
    return f"{quality.figures['baseline_perplexity']:.2f} → {quality.figures['perplexity']:.2f}"


def _added(tokens: Floats, kld: Floats, prefill: Floats) -> Floats:
    return (kld - prefill) / tokens


PREFILL_KLD = Summed("prefill_kld")  # of a token that was read by a decode step as well

# fmt: off

_NOT_NEGATIVE, _SHARE = (0.0, math.inf), (0.0, 1.0)  # what figures cannot be beyond

KLD_MEAN = QualityMetric(
    "kld_mean", "Mean KLD", NATS_A_TOKEN, "lower", OfSums((KLD,), _mean, limits=_NOT_NEGATIVE), key=1,
    meaning="KL(baseline ‖ artifact), nats per token; 0 means no loss",
)


QUALITY: tuple[QualityMetric, ...] = (

    QualityMetric(
        "baseline_perplexity", "Perplexity, baseline", TOKENS, "lower",
        OfSums((REFERENCE_NLL,), _mean, exp, bounded=False),
    ),
    QualityMetric("perplexity", "Perplexity, artifact", TOKENS, "lower", OfSums((NLL,), _mean, exp, bounded=False)),
    QualityMetric(
        "perplexity_ratio", "Perplexity ratio", RATIO, "lower",
        OfSums((REFERENCE_NLL, NLL), _log_ratio, exp),
        meaning="artifact / baseline; 1 means no loss", key=2, note=_perplexities,
    ),
    KLD_MEAN,
    QualityMetric("kld_median", "KLD, median", NATS, "lower", Quantile(KLD, 0.5), row=("KLD of tokens", "median")),
    QualityMetric("kld_p90", "KLD, 90 %", NATS, "lower", Quantile(KLD, 0.9), row=("KLD of tokens", "90 %")),
    QualityMetric("kld_p95", "KLD, 95 %", NATS, "lower", Quantile(KLD, 0.95), row=("KLD of tokens", "95 %")),
    QualityMetric("kld_p99", "KLD, 99 %", NATS, "lower", Quantile(KLD, 0.99), row=("KLD of tokens", "99 %")),
    QualityMetric("kld_p999", "KLD, 99.9 %", NATS, "lower", Quantile(KLD, 0.999), row=("KLD of tokens", "99.9 %")),
    QualityMetric("kld_max", "KLD, largest", NATS, "lower", OfTokens(KLD, np.max), row=("KLD of tokens", "largest")),
    QualityMetric(
        "kld_histogram", "KLD per token (nats, log scale)", NATS, "lower",
        # Below is rounding noise of fp32 logits; above no softmax gets.
        Histogram(KLD, decades=(-7, 2), marks={"median": "kld_median", "mean": "kld_mean", "99 %": "kld_p99"}),
        meaning="Distribution of KLD over tokens",
    ),
    QualityMetric(
        "top1_agreement", "Top-1 agreement", SHARE, "higher", OfSums((SAME_TOP,), _mean, limits=_SHARE),
        meaning="positions with the same most likely token",
        key=3, note=lambda quality: f"of {units.count(quality.tokens)} tokens",
    ),
    QualityMetric(
        "top5_agreement", f"Top-{TOP} agreement", SHARE, "higher", OfSums((SHARED_TOP,), _mean, limits=_SHARE),
        meaning=f"share of the {TOP} most likely tokens that is the same, in any order",
        row=(f"Top-{TOP} agreement", "mean"),
    ),
    QualityMetric(
        "delta_p_mean", "Δp of the true token, mean", SHIFT, "higher", OfSums((DELTA_P,), _mean),
        meaning="probability of the true token, artifact less baseline", row=("Δp of the true token", "mean"),
    ),
    # How much likelier true tokens become at best is noise on the other side: neither more nor less of it is better.
    *(
        QualityMetric(
            f"delta_p_{name}", f"Δp of the true token, {label}", SHIFT, "higher" if share <= 0.5 else "neither",
            Quantile(DELTA_P, share), row=("Δp of the true token", label),
        )
        for name, label, share in (
            ("p01", "1 %", 0.01), ("p05", "5 %", 0.05), ("median", "median", 0.5), ("p95", "95 %", 0.95),
            ("p99", "99 %", 0.99),
        )
    ),
    QualityMetric(
        "delta_p_rms", "RMS Δp of the true token", SHARE, "lower",
        OfSums((DELTA_P_SQUARED,), _mean, math.sqrt, bounded=False),
    ),
    QualityMetric(
        "kld_by_position", "Mean KLD by position", NATS_A_TOKEN, "lower", ByPosition(KLD),
        meaning="by tokens of context", row=("KLD by position", ""),
    ),
    QualityMetric(
        "top1_by_position", "Top-1 agreement by position", SHARE, "higher", ByPosition(SAME_TOP),
        meaning="by tokens of context",
    ),
    QualityMetric(
        "answer_kld_mean", "Mean KLD of answers", NATS_A_TOKEN, "lower",
        OfSums((KLD,), _mean, source="answer_tokens", limits=_NOT_NEGATIVE),
        meaning="of the tokens that the model says in chats alone", row=("Answers of chats", "mean KLD"),
    ),
    QualityMetric(
        "answer_perplexity_ratio", "Perplexity ratio of answers", RATIO, "lower",
        OfSums((REFERENCE_NLL, NLL), _log_ratio, exp, source="answer_tokens"),
        meaning="artifact / baseline, of the same tokens", row=("Answers of chats", "perplexity ratio"),
    ),
    QualityMetric(
        "answer_top1_agreement", "Top-1 agreement of answers", SHARE, "higher",
        OfSums((SAME_TOP,), _mean, source="answer_tokens", limits=_SHARE), row=("Answers of chats", "top-1 agreement"),
    ),
    QualityMetric(
        "eos_shift_at_ends", "Shift of ln p(end) where a text ends", NATS_MOVED, "higher",
        OfSums((END_SHIFT,), _mean, source="ends"), ideal=0,
        meaning="artifact less baseline, after whole texts and answers; below 0 it stops less often",
        row=("End of a text", "ln p(end), at ends"),
    ),
    QualityMetric(
        "eos_shift_elsewhere", "Shift of ln p(end) elsewhere", NATS_MOVED, "lower",
        OfSums((END_SHIFT_ELSEWHERE,), _mean), ideal=0,
        meaning="artifact less baseline, before all other tokens; above 0 it stops more often",
        row=("End of a text", "elsewhere"),
    ),
    QualityMetric(
        "kld_decode", "Mean KLD through decode steps", NATS_A_TOKEN, "lower",
        OfSums((KLD,), _mean, source="decode_tokens", limits=_NOT_NEGATIVE),
        meaning="text read token by token through the KV cache", row=("Decode steps", "KLD"),
    ),
    QualityMetric(
        "kld_decode_prefill", "Mean KLD of the same tokens in prefill", NATS_A_TOKEN, "lower",
        OfSums((PREFILL_KLD,), _mean, source="decode_tokens", limits=_NOT_NEGATIVE), row=("Decode steps", "in prefill"),
    ),
    QualityMetric(
        "kld_decode_added", "Mean KLD that decode steps add", NATS_A_TOKEN, "lower",
        OfSums((KLD, PREFILL_KLD), _added, source="decode_tokens"),
        meaning="through decode steps less in prefill, on the same tokens", row=("Decode steps", "added"),
    ),
    *(
        QualityMetric(
            f"greedy_same_{tokens}", f"Greedy answers with the same first {tokens} tokens", SHARE, "higher",
            OfAnswers(partial(share_same, tokens=tokens)), row=("Greedy answers", f"same first {tokens} tokens"),
        )
        for tokens in (32, ANSWER_TOKENS)
    ),
    QualityMetric(
        "greedy_first_difference", "Equal tokens of greedy answers, median", TEXT, "higher",
        OfAnswers(median_difference), meaning=f"before the first difference; at most {ANSWER_TOKENS}",
        row=("Greedy answers", "equal tokens, median"),
    ),
    QualityMetric(
        "greedy_length_ratio", "Length of greedy answers", RATIO, "lower", OfAnswers(length_ratio), ideal=1,
        meaning=f"artifact / baseline, in tokens; an answer has at most {ANSWER_TOKENS}",
        row=("Length of greedy answers", "artifact / baseline"),
    ),
    QualityMetric(
        "greedy_ends_added", "Greedy answers that end, added", SHIFT, "higher", OfAnswers(ends_added), ideal=0,
        meaning=f"share that ends within {ANSWER_TOKENS} tokens, artifact less baseline; below 0 it stops less often",
        row=("Length of greedy answers", "ended, added"),
    ),

)
# fmt: on

APART = 1.5  # times: from here on, quality on documents tells little of that on chats


def answers_apart(quality: Quality) -> str | None:
    """Say how answers of chats and other documents differ in mean KLD; None: not by more than `APART` times."""
    chats = {sums.document for sums in quality.per_chat}
    plain = [sums for sums in quality.per_document if sums.document not in chats]
    if not plain or not quality.per_chat:
        return None
    answers, others = (
        math.fsum(sums.figures[KLD.name] for sums in each) / sum(sums.tokens for sums in each)
        for each in (quality.per_chat, plain)
    )
    low, high = sorted((answers, others))
    if high <= APART * low:
        return None
    times = f"{units.significant(high / low, 2)} times" if low > 0 else "any number of times"
    less, more = ("answers of chats", "documents") if answers < others else ("documents", "answers of chats")
    return (
        f"mean KLD is {times} as high on {more} ({units.significant(high)}) as on {less} ({units.significant(low)}): "
        "judge by the text that is like yours"
    )
