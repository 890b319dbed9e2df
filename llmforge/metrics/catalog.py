"""The catalog of metrics: one record each, that recipes, gates, and every form of a report read.

Who asks goes over `ALL` and knows no metric by name. A new metric of quality is a record here and, where none of
`tokens` says it, the value of a token that it is made from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, TypeVar

import numpy as np

from llmforge.metrics import latency, units
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import Generations, Latency, Point, Spread, Trial
from llmforge.metrics.quality import Form, Histogram, OfSums, OfTokens, Quality, exp
from llmforge.metrics.tokens import DELTA_P_SQUARED, KLD, NLL, REFERENCE_NLL, SAME_TOP
from llmforge.metrics.units import Unit

Kind = TypeVar("Kind", bound="Metric")


@dataclass(frozen=True)
class Measured:
    """All that was measured of one artifact; None: it was not."""

    quality: Quality | None = None
    latency: Latency | None = None
    size_bytes: int | None = None  # of the engine's files


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One figure of a report."""

    section: ClassVar[Literal["quality", "latency"] | None] = None  # of a recipe's `validation` that measures it

    name: str  # in recipes and in a report's JSON
    title: str
    unit: Unit
    better: Literal["lower", "higher"]
    meaning: str = ""

    @property
    def decides(self) -> bool:
        """Whether a gate can decide on it: it is one figure of an artifact, and exact or with bounds."""
        return False

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read what a gate decides on; None where it was not measured."""
        return None


@dataclass(frozen=True, kw_only=True)
class QualityMetric(Metric):
    """How far the artifact is from its checkpoint, on the same text."""

    section = "quality"

    form: Form  # from which values of tokens it is made, and how
    key: int | None = None  # place among a report's key figures; None: it is none of them
    note: Callable[[Quality], str] | None = None  # beside the key figure; None: its unit

    @property
    def decides(self) -> bool:
        """Whether it has an interval."""
        return isinstance(self.form, OfSums) and self.form.bounded

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it from a report of today or of before."""
        return measured.quality.figures.get(self.name) if measured.quality and self.decides else None


@dataclass(frozen=True, kw_only=True)
class TimingMetric(Metric):
    """A figure of each side, at each prompt length."""

    section = "latency"

    figure: Callable[[Generations], Spread | float]
    key: int | None = None  # place among a report's key figures
    key_at: Literal["shortest", "longest"] = "shortest"  # prompt, where the key figure is read
    notes: Callable[[Point], tuple[str, ...]] = lambda point: ()  # beside the key figure


@dataclass(frozen=True, kw_only=True)
class PointMetric(Metric):
    """A figure of the artifact at each prompt length."""

    section = "latency"

    figure: Callable[[Trial], Estimate | int | float | None]


@dataclass(frozen=True, kw_only=True)
class SlowestMetric(Metric):
    """The median of a duration of the artifact, at the prompt length where it is largest."""

    section = "latency"

    of: TimingMetric

    @property
    def decides(self) -> bool:
        """Always: it is a median with its bounds."""
        return True

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it at the prompt length where it is worst."""
        if measured.latency is None:
            return None
        medians: list[Estimate] = [point.artifact.figures[self.of.name].p50 for point in measured.latency.points]
        return max(medians, key=lambda median: median.value)


@dataclass(frozen=True, kw_only=True)
class SizeMetric(Metric):
    """What the engine's files weigh."""

    @property
    def decides(self) -> bool:
        """Always: it is exact."""
        return True

    def estimate(self, measured: Measured) -> Estimate | None:
        """Take the size as it is."""
        return None if measured.size_bytes is None else Estimate.exact(measured.size_bytes)


def _rate(point: Point) -> str:
    rate = TOKENS_PER_SECOND
    return f"{rate.unit.write(point.artifact.figures[rate.name])} {rate.title}"


def _against_baseline(metric: Metric, point: Point) -> tuple[str, ...]:
    found: Estimate | None = point.figures[metric.name]
    return () if found is None else (f"{metric.unit.write(found.value)} the baseline's speed",)


BASELINE_PERPLEXITY = QualityMetric(
    name="baseline_perplexity",
    title="Perplexity, baseline",
    unit=units.PERPLEXITY,
    better="lower",
    form=OfSums((REFERENCE_NLL,), lambda tokens, nll: nll / tokens, exp, bounded=False),
)
PERPLEXITY = QualityMetric(
    name="perplexity",
    title="Perplexity, artifact",
    unit=units.PERPLEXITY,
    better="lower",
    form=OfSums((NLL,), lambda tokens, nll: nll / tokens, exp, bounded=False),
)
PERPLEXITY_RATIO = QualityMetric(
    name="perplexity_ratio",
    title="Perplexity ratio",
    meaning="artifact / baseline; 1 is no loss",
    unit=units.RATIO,
    better="lower",
    form=OfSums((REFERENCE_NLL, NLL), lambda tokens, reference, nll: (nll - reference) / tokens, exp),
    key=2,
    note=lambda quality: " → ".join(f"{quality.figures[each.name]:.2f}" for each in (BASELINE_PERPLEXITY, PERPLEXITY)),
)
KLD_MEAN = QualityMetric(
    name="kld_mean",
    title="Mean KLD",
    meaning="KL(baseline ‖ artifact), nats a token; 0 is no loss",
    unit=units.NATS_A_TOKEN,
    better="lower",
    form=OfSums((KLD,), lambda tokens, kld: kld / tokens),
    key=1,
)
KLD_MEDIAN = QualityMetric(
    name="kld_median",
    title="KLD, median",
    unit=units.NATS,
    better="lower",
    form=OfTokens(KLD, np.median),
)
KLD_P95 = QualityMetric(
    name="kld_p95",
    title="KLD, 95 %",
    unit=units.NATS,
    better="lower",
    form=OfTokens(KLD, lambda kld: np.quantile(kld, 0.95)),
)
KLD_P99 = QualityMetric(
    name="kld_p99",
    title="KLD, 99 %",
    unit=units.NATS,
    better="lower",
    form=OfTokens(KLD, lambda kld: np.quantile(kld, 0.99)),
)
KLD_MAX = QualityMetric(
    name="kld_max",
    title="KLD, largest",
    unit=units.NATS,
    better="lower",
    form=OfTokens(KLD, np.max),
)
KLD_HISTOGRAM = QualityMetric(
    name="kld_histogram",
    title="Predicted tokens by their KLD, nats, logarithmic",
    meaning="Distribution of the KLD over tokens",
    unit=units.NATS,
    better="lower",
    # Below is rounding noise of fp32 logits; above no softmax gets.
    form=Histogram(KLD, decades=(-7, 2), marks={"median": "kld_median", "mean": "kld_mean", "99 %": "kld_p99"}),
)
TOP1_AGREEMENT = QualityMetric(
    name="top1_agreement",
    title="Top-1 agreement",
    meaning="tokens where both rank the same token first",
    unit=units.SHARE,
    better="higher",
    form=OfSums((SAME_TOP,), lambda tokens, same: same / tokens),
    key=3,
    note=lambda quality: f"of {units.count(quality.tokens)} tokens",
)
DELTA_P_RMS = QualityMetric(
    name="delta_p_rms",
    title="RMS Δp of the true token",
    unit=units.SHARE,
    better="lower",
    form=OfSums((DELTA_P_SQUARED,), lambda tokens, squares: squares / tokens, math.sqrt, bounded=False),
)

TTFT_SPEEDUP = PointMetric(
    name="ttft_speedup",
    title="TTFT speed-up",
    unit=units.SPEEDUP,
    better="higher",
    figure=partial(latency.speedup, latency.first_token_ms),
)
TPOT_SPEEDUP = PointMetric(
    name="tpot_speedup",
    title="TPOT speed-up",
    unit=units.SPEEDUP,
    better="higher",
    figure=partial(latency.speedup, latency.later_token_ms),
)
TTFT = TimingMetric(
    name="ttft_ms",
    title="TTFT",
    meaning="time to the first token",
    unit=units.MILLISECONDS,
    better="lower",
    figure=partial(latency.spread, latency.first_token_ms),
    key=5,
    key_at="longest",
    notes=lambda point: (f"prompt of {point.prompt_tokens}", *_against_baseline(TTFT_SPEEDUP, point)),
)
TPOT = TimingMetric(
    name="tpot_ms",
    title="TPOT",
    meaning="time of each later token",
    unit=units.MILLISECONDS,
    better="lower",
    figure=partial(latency.spread, latency.later_token_ms),
    key=4,
    notes=lambda point: (
        f"{_rate(point)}, prompt of {point.prompt_tokens}",
        *_against_baseline(TPOT_SPEEDUP, point),
    ),
)
ITL_P95 = TimingMetric(
    name="itl_p95_ms",
    title="ITL p95",
    unit=units.MILLISECONDS,
    better="lower",
    figure=partial(latency.between_tokens_ms, 0.95),
)
ITL_P99 = TimingMetric(
    name="itl_p99_ms",
    title="ITL p99",
    unit=units.MILLISECONDS,
    better="lower",
    figure=partial(latency.between_tokens_ms, 0.99),
)
TOKENS_PER_SECOND = TimingMetric(
    name="tokens_per_second",
    title="tokens/s",
    unit=units.PER_SECOND,
    better="higher",
    figure=latency.tokens_per_second,
)
BYTES_READ = PointMetric(
    name="bytes_read_per_token",
    title="read a token",
    unit=units.BYTES,
    better="lower",
    figure=lambda trial: trial.bytes_read_per_token,
)
BANDWIDTH_UTILIZATION = PointMetric(
    name="bandwidth_utilization",
    title="MBU",
    unit=units.SHARE,
    better="higher",
    figure=latency.bandwidth_utilization,
)
TTFT_P50 = SlowestMetric(
    name="ttft_p50_ms",
    title="TTFT, median",
    meaning="time to the first token, at the slowest prompt length",
    unit=units.MILLISECONDS,
    better="lower",
    of=TTFT,
)
TPOT_P50 = SlowestMetric(
    name="tpot_p50_ms",
    title="TPOT, median",
    meaning="time of each later token, at the slowest prompt length",
    unit=units.MILLISECONDS,
    better="lower",
    of=TPOT,
)
SIZE = SizeMetric(name="size_bytes", title="Size", meaning="all files of the engine", unit=units.BYTES, better="lower")

ALL: tuple[Metric, ...] = (
    BASELINE_PERPLEXITY,
    PERPLEXITY,
    PERPLEXITY_RATIO,
    KLD_MEAN,
    KLD_MEDIAN,
    KLD_P95,
    KLD_P99,
    KLD_MAX,
    KLD_HISTOGRAM,
    TOP1_AGREEMENT,
    DELTA_P_RMS,
    TTFT,
    TPOT,
    ITL_P95,
    ITL_P99,
    TOKENS_PER_SECOND,
    TTFT_SPEEDUP,
    TPOT_SPEEDUP,
    BYTES_READ,
    BANDWIDTH_UTILIZATION,
    TTFT_P50,
    TPOT_P50,
    SIZE,
)

MOVED = KLD_MEAN  # how far one document moved, where a report orders documents


def of_kind(kind: type[Kind]) -> tuple[Kind, ...]:
    """List the metrics of one kind, in the order of the catalog."""
    return tuple(metric for metric in ALL if isinstance(metric, kind))


def deciding() -> dict[str, Metric]:
    """Give the metrics that a gate can decide on, by name."""
    return {metric.name: metric for metric in ALL if metric.decides}


def estimates(measured: Measured) -> dict[str, Estimate]:
    """Read every figure that a gate can decide on, as far as it was measured."""
    found = {name: metric.estimate(measured) for name, metric in deciding().items()}
    return {name: estimate for name, estimate in found.items() if estimate is not None}
