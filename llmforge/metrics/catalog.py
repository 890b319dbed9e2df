"""The catalog of metrics: one record each, that recipes, gates, and every form of a report read.

Who asks goes over `ALL` and knows no metric by name. A new metric of quality is a record here and, where none of
`tokens` says it, the value of a token that it is made from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from llmforge.metrics import latency, units
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import Bandwidth, Footprint, Generations, Latency, Point, Spread, Timing, Trial
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
    exp,
    median_difference,
    share_same,
)
from llmforge.metrics.tokens import (
    DELTA_P,
    DELTA_P_SQUARED,
    KLD,
    NLL,
    REFERENCE_NLL,
    SAME_TOP,
    SHARED_TOP,
    TOP,
    Floats,
)
from llmforge.metrics.units import (
    BYTES,
    MILLISECONDS,
    NATS,
    NATS_A_TOKEN,
    PER_SECOND,
    RATIO,
    SHARE,
    SHIFT,
    SPEEDUP,
    TEXT,
    TOKENS,
    Unit,
)

Kind = TypeVar("Kind", bound="Metric")


@dataclass(frozen=True)
class Measured:
    """All that was measured of one artifact; None: it was not."""

    quality: Quality | None = None
    latency: Latency | None = None
    size_bytes: int | None = None  # of the engine's files


@dataclass(frozen=True)
class Metric:
    """One figure of a report."""

    section: ClassVar[Literal["quality", "latency"] | None] = None  # of a recipe's `validation` that measures it

    name: str  # in recipes and in a report's JSON
    title: str
    unit: Unit
    better: Literal["lower", "higher"]
    meaning: str = field(default="", kw_only=True)
    key: int | None = field(default=None, kw_only=True)  # place among a report's key figures; None: it is none of them


@dataclass(frozen=True)
class QualityMetric(Metric):
    """How far the artifact is from its checkpoint, on the same text."""

    section = "quality"

    form: Form  # from which values of tokens it is made, and how
    note: Callable[[Quality], str] | None = None  # beside the key figure; None: its unit
    row: tuple[str, str] | None = None  # of the summary: its title, which several figures share, and the figure's own

    @property
    def decides(self) -> bool:
        """Whether it has an interval, so that a gate can decide on it."""
        return self.form.decides

    @property
    def source(self) -> Source:
        """What it is made of; all but the text has to be asked for in a recipe, under this name."""
        return self.form.source

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it; None where it was not measured."""
        return None if measured.quality is None else measured.quality.figures.get(self.name)


@dataclass(frozen=True)
class TimingMetric(Metric):
    """A figure of each side, at each prompt length."""

    section = "latency"

    figure: Callable[[Generations], Spread | float]
    spread: bool = False  # whether `figure` is percentiles over the repetitions, which have a chart
    key_at: Literal["shortest", "longest"] = "shortest"  # prompt, where the key figure is read
    notes: Callable[[Point], tuple[str, ...]] = lambda point: ()  # beside the key figure


@dataclass(frozen=True)
class PointMetric(Metric):
    """A figure of the artifact, at each prompt length."""

    section = "latency"

    figure: Callable[[Trial], Estimate | int | float | None]


@dataclass(frozen=True)
class SlowestMetric(Metric):
    """The median of a duration of the artifact, at the prompt length where it is largest."""

    section = "latency"
    decides = True

    of: TimingMetric

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it; None where it was not measured."""
        points = () if measured.latency is None else measured.latency.points
        medians = (point.artifact.figures[self.of.name].p50 for point in points)
        return max(medians, key=lambda median: float(median.value), default=None)


@dataclass(frozen=True)
class SizeMetric(Metric):
    """What the engine's files weigh."""

    decides = True

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it, exactly; None where there is no engine."""
        return None if measured.size_bytes is None else Estimate.exact(measured.size_bytes)


def point(
    prompt_tokens: int,
    artifact: Generations,
    baseline: Generations | None,
    footprint: Footprint,
    bandwidth: Bandwidth,
) -> Point:
    """Make every figure of one prompt length of what was timed."""
    output_tokens = len(artifact[0])
    bytes_read = footprint.weight_bytes_per_token + footprint.kv_bytes_per_token * (prompt_tokens + output_tokens // 2)
    trial = Trial(artifact, baseline, bytes_read, bandwidth.working_set_bytes_per_second)
    figures: dict[str, Any] = {metric.name: metric.figure(trial) for metric in of_kind(PointMetric)}
    return Point(
        prompt_tokens=prompt_tokens,
        artifact=_timing(artifact),
        baseline=None if baseline is None else _timing(baseline),
        **figures,
    )


def _timing(generations: Generations) -> Timing:
    figures: dict[str, Any] = {metric.name: metric.figure(generations) for metric in of_kind(TimingMetric)}
    return Timing(generations_ms=tuple(tuple(durations.tolist()) for durations in generations), **figures)


def _mean(tokens: Floats, total: Floats) -> Floats:
    return total / tokens


def _perplexities(quality: Quality) -> str:
    return f"{quality.figures['baseline_perplexity']:.2f} → {quality.figures['perplexity']:.2f}"


def _decoding(point: Point) -> tuple[str, ...]:
    rate = units.significant(point.artifact.figures["tokens_per_second"])
    return f"{rate} tokens/s, {point.prompt_tokens}-token prompt", *_speed(point.figures["tpot_speedup"])


def _prefilling(point: Point) -> tuple[str, ...]:
    return f"{point.prompt_tokens}-token prompt", *_speed(point.figures["ttft_speedup"])


def _speed(speedup: Estimate | None) -> tuple[str, ...]:
    return () if speedup is None else (f"{units.times(speedup.value)} baseline speed",)


def _added(tokens: Floats, kld: Floats, prefill: Floats) -> Floats:
    return (kld - prefill) / tokens


PREFILL_KLD = Summed("prefill_kld")  # of a token that was read by a decode step as well


# fmt: off
KLD_MEAN = QualityMetric(
    "kld_mean", "Mean KLD", NATS_A_TOKEN, "lower", OfSums((KLD,), _mean), key=1,
    meaning="KL(baseline ‖ artifact), nats per token; 0 means no loss",
)
TTFT = TimingMetric(
    "ttft_ms", "TTFT", MILLISECONDS, "lower", partial(latency.spread, latency.first_token_ms), spread=True,
    meaning="time to the first token", key=5, key_at="longest", notes=_prefilling,
)
TPOT = TimingMetric(
    "tpot_ms", "TPOT", MILLISECONDS, "lower", partial(latency.spread, latency.later_token_ms), spread=True,
    meaning="time per output token after the first", key=4, notes=_decoding,
)
SIZE = SizeMetric("size_bytes", "Size", BYTES, "lower", meaning="all files of the engine")

ALL: tuple[Metric, ...] = (
    QualityMetric(
        "baseline_perplexity", "Perplexity, baseline", TOKENS, "lower",
        OfSums((REFERENCE_NLL,), _mean, exp, bounded=False),
    ),
    QualityMetric("perplexity", "Perplexity, artifact", TOKENS, "lower", OfSums((NLL,), _mean, exp, bounded=False)),
    QualityMetric(
        "perplexity_ratio", "Perplexity ratio", RATIO, "lower",
        OfSums((REFERENCE_NLL, NLL), lambda tokens, reference, nll: (nll - reference) / tokens, exp),
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
        "top1_agreement", "Top-1 agreement", SHARE, "higher", OfSums((SAME_TOP,), _mean),
        meaning="positions with the same most likely token",
        key=3, note=lambda quality: f"of {units.count(quality.tokens)} tokens",
    ),
    QualityMetric(
        "top5_agreement", f"Top-{TOP} agreement", SHARE, "higher", OfSums((SHARED_TOP,), _mean),
        meaning=f"share of the {TOP} most likely tokens that is the same, in any order",
        row=(f"Top-{TOP} agreement", "mean"),
    ),
    QualityMetric(
        "delta_p_mean", "Δp of the true token, mean", SHIFT, "higher", OfSums((DELTA_P,), _mean),
        meaning="probability of the true token, artifact less baseline", row=("Δp of the true token", "mean"),
    ),
    *(
        QualityMetric(
            f"delta_p_{name}", f"Δp of the true token, {label}", SHIFT, "higher", Quantile(DELTA_P, share),
            row=("Δp of the true token", label),
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
        "kld_decode", "Mean KLD through decode steps", NATS_A_TOKEN, "lower",
        OfSums((KLD,), _mean, source="decode_tokens"),
        meaning="text read token by token through the KV cache", row=("Decode steps", "KLD"),
    ),
    QualityMetric(
        "kld_decode_prefill", "Mean KLD of the same tokens in prefill", NATS_A_TOKEN, "lower",
        OfSums((PREFILL_KLD,), _mean, source="decode_tokens"), row=("Decode steps", "in prefill"),
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
    TTFT,
    TPOT,
    TimingMetric("itl_p95_ms", "ITL p95", MILLISECONDS, "lower", partial(latency.between_tokens_ms, 0.95)),
    TimingMetric("itl_p99_ms", "ITL p99", MILLISECONDS, "lower", partial(latency.between_tokens_ms, 0.99)),
    TimingMetric("tokens_per_second", "tokens/s", PER_SECOND, "higher", latency.tokens_per_second),
    PointMetric("ttft_speedup", "TTFT speed-up", SPEEDUP, "higher", partial(latency.speedup, latency.first_token_ms)),
    PointMetric("tpot_speedup", "TPOT speed-up", SPEEDUP, "higher", partial(latency.speedup, latency.later_token_ms)),
    PointMetric("bytes_read_per_token", "read per token", BYTES, "lower", lambda trial: trial.bytes_read_per_token),
    PointMetric("bandwidth_utilization", "MBU", SHARE, "higher", latency.bandwidth_utilization),
    SlowestMetric(
        "ttft_p50_ms", "TTFT, median", MILLISECONDS, "lower", TTFT,
        meaning=f"{TTFT.meaning}, at the slowest prompt length",
    ),
    SlowestMetric(
        "tpot_p50_ms", "TPOT, median", MILLISECONDS, "lower", TPOT,
        meaning=f"{TPOT.meaning}, at the slowest prompt length",
    ),
    SIZE,
)
# fmt: on
MOVED = KLD_MEAN  # how far one document moved, where a report orders documents


def of_kind(kind: type[Kind]) -> tuple[Kind, ...]:
    """List the metrics of one kind, in the order of the catalog."""
    return tuple(metric for metric in ALL if isinstance(metric, kind))


def deciding() -> dict[str, QualityMetric | SlowestMetric | SizeMetric]:
    """Give the metrics that a gate can decide on, by name: one figure of an artifact, exact or with bounds."""
    found = (metric for metric in ALL if isinstance(metric, QualityMetric | SlowestMetric | SizeMetric))
    return {metric.name: metric for metric in found if metric.decides}


def estimates(measured: Measured) -> dict[str, Estimate]:
    """Read every figure that a gate can decide on, as far as it was measured."""
    found = ((name, metric.estimate(measured)) for name, metric in deciding().items())
    return {name: estimate for name, estimate in found if estimate is not None}
