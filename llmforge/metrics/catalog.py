"""The catalog of metrics: one record each, that recipes, gates, and every form of a report read.

Who asks goes over `ALL` and knows no metric by name. A new metric of quality is a record here and, where none of
`tokens` says it, the value of a token that it is made from. One of a plug-in (llmforge.base.plugins) is measured where
a recipe names it, and found by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import AfterValidator
from pydantic_core import PydanticKnownError

from llmforge.base.errors import InputError
from llmforge.base.plugins import Plugin, Seam, blamed, refusal
from llmforge.base.wording import shown
from llmforge.metrics import adapters, intervals, latency, units
from llmforge.metrics.adapters import AdapterQuality
from llmforge.metrics.agreement import DISTRIBUTIONS, RUNTIMES, RuntimeName, RuntimeRun
from llmforge.metrics.intervals import SMALLEST_SAMPLE, Estimate
from llmforge.metrics.latency import Conditions, Latency, Point, Side, Spread, Timing, Trial
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
from llmforge.metrics.serving import Distribution, Figures
from llmforge.metrics.tasks import PREFIX, Score, TaskResult
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
    TokenBlock,
    TokenValue,
)
from llmforge.metrics.units import (
    BITS,
    BITS_A_BYTE,
    BYTES,
    JOULES,
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
    USD,
    Unit,
)

Kind = TypeVar("Kind", bound="Metric")


@dataclass(frozen=True)
class Sizes:
    """What is shipped, and what it was made of."""

    engine_bytes: int  # all files of the engine
    checkpoint_bytes: int  # all tensors of the checkpoint, as stored
    parameters: int  # of the checkpoint


@dataclass(frozen=True)
class Measured:
    """All that was measured of one artifact; None: it was not."""

    quality: Quality | None = None
    latency: Latency | None = None
    sizes: Sizes | None = None
    runtimes: tuple[RuntimeRun, ...] = ()  # of others, that ran it
    tasks: tuple[TaskResult, ...] = ()
    adapters: tuple[AdapterQuality, ...] = ()  # those that requests choose

    @property
    def scores(self) -> dict[str, Score]:
        """Scores of tasks, by the name of their metric."""
        return {name: score for task in self.tasks for name, score in task.metrics.items()}


@dataclass(frozen=True)
class Metric:
    """One figure of a report."""

    section: ClassVar[Literal["quality", "latency", "runtimes", "tasks"] | None] = (
        None  # of a recipe's `validation` that measures it
    )

    name: str  # in recipes and in a report's JSON
    title: str
    unit: Unit
    better: Literal["lower", "higher", "neither"]
    meaning: str = field(default="", kw_only=True)
    key: int | None = field(default=None, kw_only=True)  # place among a report's key figures; None: it is none of them

    def fewest(self, samples: int) -> int | None:
        """Say how many samples bounds need, where `samples` have none; None: more, and nobody can tell how many."""
        return SMALLEST_SAMPLE if samples < SMALLEST_SAMPLE else None

    @property
    def more(self) -> str:
        """What gives more samples, in words."""
        return ""


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
        """What gives more samples, in words."""
        return "raise validation.quality.samples" if self.source == "samples" else "measure on more documents"

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
    """A figure of each side, at each load."""

    section = "latency"

    figure: Callable[[Side], Spread | Estimate | float | None]
    spread: bool = False  # whether `figure` is percentiles
    chart: bool = False  # whether percentiles are drawn
    notes: Callable[[Point], tuple[str, ...]] = lambda point: ()  # beside the key figure


@dataclass(frozen=True)
class PointMetric(Metric):
    """A figure of the artifact, at each load."""

    section = "latency"

    figure: Callable[[Trial], Estimate | int | float | None]


@dataclass(frozen=True)
class SlowestMetric(Metric):
    """A percentile of a duration of the artifact, one sequence at a time, at the length where it is largest."""

    section = "latency"
    decides = True

    of: TimingMetric
    at: Literal["p50", "p95", "p99"] = "p50"

    @property
    def repetitions(self) -> int:
        """Say how many repetitions its interval needs; those of tokens of one generation may do with fewer."""
        return max(SMALLEST_SAMPLE, intervals.fewest(int(self.at[1:]) / 100))

    def fewest(self, samples: int) -> int | None:
        """Say how many repetitions bounds need; of tokens that come in generations, that depends on them all."""
        if self.of is ITL:
            return super().fewest(samples)
        return intervals.fewest(int(self.at[1:]) / 100)

    @property
    def more(self) -> str:
        """What gives more samples, in words."""
        return "raise validation.latency.repetitions"

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it; None where it was not measured."""
        points = () if measured.latency is None else measured.latency.single
        spreads = [point.artifact.figures[self.of.name] for point in points if self.of.name in point.artifact.figures]
        found = (getattr(spread, self.at) for spread in spreads)
        return max(found, key=lambda percentile: float(percentile.value), default=None)


@dataclass(frozen=True)
class BestMetric(Metric):
    """A figure of the artifact at each load and of each workload, where it is best: what a well-filled engine gives."""

    section = "latency"
    decides = True

    of: PointMetric
    of_workload: Callable[[Figures, Latency], Estimate | None]

    def fewest(self, samples: int) -> int | None:
        """Say how many repetitions, or runs of a workload, bounds need: it is a median of them."""
        return intervals.fewest(0.5)

    @property
    def more(self) -> str:
        """What gives more samples, in words."""
        return "raise validation.latency.repetitions, or the runs of the workload"

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it; None where it was not measured."""
        if (found := measured.latency) is None:
            return None
        figures = [point.figures.get(self.of.name) for point in found.points]
        figures += [self.of_workload(workload.figures, found) for workload in found.workloads]
        best = min if self.better == "lower" else max
        known = [figure for figure in figures if isinstance(figure, Estimate)]
        return best(known, key=lambda figure: figure.value, default=None)


@dataclass(frozen=True)
class RunMetric(Metric):
    """A figure of the whole run."""

    section = "latency"
    decides = True

    figure: Callable[[Latency], Estimate | None]
    needs: Literal["slo", "starts"] | None = None  # what a recipe's `validation.latency` must ask for

    def fewest(self, samples: int) -> int | None:
        """Say how many starts bounds need, of which it is a median; or rounds; or requests, of which it is a share."""
        if self.needs == "starts":
            return intervals.fewest(0.5)
        return intervals.fewest(0.95) if self is NOISE else super().fewest(samples)

    @property
    def more(self) -> str:
        """What gives more samples, in words."""
        return "raise validation.latency.starts" if self.needs == "starts" else "measure for longer"

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it; None where it was not measured."""
        return None if measured.latency is None else self.figure(measured.latency)


@dataclass(frozen=True)
class WorkloadMetric(Metric):
    """A figure of each workload."""

    section = "latency"

    figure: Callable[[Figures, Latency], Distribution | Estimate | float | None]
    spread: bool = False  # whether `figure` is percentiles


@dataclass(frozen=True)
class RuntimeMetric(Metric):
    """How far another runtime gives the same as llmforge's, for the same artifact."""

    section = "runtimes"
    decides = True

    runtime: RuntimeName
    figure: Literal["agreement", "same_answers", "equal_tokens", "kld_mean"]  # of an `Agreement`

    @property
    def more(self) -> str:
        """What gives more samples, in words."""
        return "measure on more documents"

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it; None where the runtime did not run it, or failed."""
        runs = [run for run in measured.runtimes if run.runtime == self.runtime]
        if not runs or runs[-1].figures is None:
            return None
        found: Estimate = getattr(runs[-1].figures, self.figure)
        return found


@dataclass(frozen=True)
class SizeMetric(Metric):
    """What the engine's files weigh."""

    decides = True

    figure: Callable[[Sizes], float]

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it, exactly; None where there is no engine."""
        return None if measured.sizes is None else Estimate.exact(self.figure(measured.sizes))


@dataclass(frozen=True)
class TaskMetric(Metric):
    """A score of a task, under `task.NAME.SCORE`: which tasks there are, a recipe or `llmforge eval` says."""

    section = "tasks"
    decides = True

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it; None where it was not measured."""
        score = measured.scores.get(self.name)
        return None if score is None else score.figures.artifact


def point(prompt_tokens: int, artifact: Side, baseline: Side | None, conditions: Conditions) -> Point:
    """Make every figure of one load of what was timed."""
    trial = Trial(prompt_tokens, artifact, baseline, conditions)
    figures: dict[str, Any] = {metric.name: metric.figure(trial) for metric in of_kind(PointMetric)}
    return Point(
        prompt_tokens=prompt_tokens,
        batch=artifact.batch,
        artifact=_timing(artifact),
        baseline=None if baseline is None else _timing(baseline),
        **figures,
    )


def _timing(side: Side) -> Timing:
    figures: dict[str, Any] = {metric.name: metric.figure(side) for metric in of_kind(TimingMetric)}
    return Timing(
        generations_ms=tuple(tuple(durations.tolist()) for durations in side.generations),
        energy_j=None if side.energy_j is None else tuple(side.energy_j),
        **{name: figure for name, figure in figures.items() if figure is not None},
    )


def _mean(tokens: Floats, total: Floats) -> Floats:
    return total / tokens


def _perplexities(quality: Quality) -> str:
    return f"{quality.figures['baseline_perplexity']:.2f} → {quality.figures['perplexity']:.2f}"


def _decoding(point: Point) -> tuple[str, ...]:
    rate = units.significant(point.artifact.figures["tokens_per_second"])
    return f"{_lengths(point)}: {rate} tokens/s", *_speed(point.figures["tpot_speedup"])


def _prefilling(point: Point) -> tuple[str, ...]:
    return _lengths(point), *_speed(point.figures["ttft_speedup"])


def _lengths(point: Point) -> str:
    several = f"{point.batch} sequences, " if point.batch > 1 else ""
    return f"{several}{point.prompt_tokens}-token prompt"


def _speed(speedup: Estimate | None) -> tuple[str, ...]:
    return () if speedup is None else (f"{units.times(speedup.value)} baseline speed",)


def _added(tokens: Floats, kld: Floats, prefill: Floats) -> Floats:
    return (kld - prefill) / tokens


PREFILL_KLD = Summed("prefill_kld")  # of a token that was read by a decode step as well


def _worst_share(found: Latency) -> Estimate | None:
    """Give the smallest share of good requests, over loads of one sequence and workloads."""
    shares = [point.figures.get("good_share") for point in found.single]
    for workload in found.workloads:
        figures = workload.figures
        if figures.good_share is not None:
            sent = figures.completed + figures.failed
            shares.append(Estimate.share(round(figures.good_share * sent), sent, of="requests"))
    return min((each for each in shares if isinstance(each, Estimate)), key=lambda share: share.value, default=None)


def _cost(figures: Figures, found: Latency) -> Estimate | None:
    if found.price is None:
        return None
    return figures.output_tokens_per_second.inverted(found.price.usd_per_hour / 3600 * 1e6)


def _of_starts(read: Callable[[latency.Start], float | None], found: Latency) -> Estimate | None:
    """Estimate the median over the starts of the engine."""
    values = [value for start in found.starts if (value := read(start)) is not None]
    return Estimate.median(values, of="starts") if values else None


def _noise(found: Latency) -> Estimate | None:
    """Estimate by how much the slow times of the same small computation exceed its median."""
    if found.noise is None or len(found.noise.probe_ms) < 2:
        return None
    middle = float(np.median(found.noise.probe_ms))
    slow = Estimate.quantile(found.noise.probe_ms, 0.95, of="rounds")
    excess = {name: None if each is None else each / middle - 1 for name, each in _bounds(slow).items()}
    return slow.model_copy(update=excess)


def _bounds(estimate: Estimate) -> dict[str, float | None]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


@dataclass(frozen=True)
class AdapterMetric(Metric):
    """A figure of quality of an adapter that requests choose, under `adapter.NAME.METRIC`."""

    section = "quality"
    decides = True

    adapter: str
    of: QualityMetric

    @property
    def more(self) -> str:
        """What gives more samples, in words."""
        return "raise validation.quality.adapter_tokens"

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it; None where it was not measured."""
        found = (each.quality.figures.get(self.of.name) for each in measured.adapters if each.adapter == self.adapter)
        return next(found, None)


ADAPTER_PATTERN = r"^adapter\.[a-z0-9][a-z0-9._-]{0,63}\.[a-z0-9_]{1,64}$"
TASK_PATTERN = r"^task\.[A-Za-z0-9_-]{1,128}\.[A-Za-z0-9_.-]{1,64}$"
_OF_TEXT = {"perplexity": RATIO, "word_perplexity": RATIO, "byte_perplexity": RATIO, "bits_per_byte": BITS_A_BYTE}
_PERCENTILES: dict[Literal["p50", "p95", "p99"], str] = {"p50": "median", "p95": "95 %", "p99": "99 %"}
# fmt: off
_NOT_NEGATIVE, _SHARE = (0.0, math.inf), (0.0, 1.0)  # what figures cannot be beyond
KLD_MEAN = QualityMetric(
    "kld_mean", "Mean KLD", NATS_A_TOKEN, "lower", OfSums((KLD,), _mean, limits=_NOT_NEGATIVE), key=1,
    meaning="KL(baseline ‖ artifact), nats per token; 0 means no loss",
)
TTFT = TimingMetric(
    "ttft_ms", "TTFT", MILLISECONDS, "lower", partial(latency.spread, latency.first_token_ms), spread=True, chart=True,
    meaning="time to the first token", key=5, notes=_prefilling,
)
TPOT = TimingMetric(
    "tpot_ms", "TPOT", MILLISECONDS, "lower", partial(latency.spread, latency.later_token_ms), spread=True, chart=True,
    meaning="time per output token after the first", key=4, notes=_decoding,
)
ITL = TimingMetric(
    "itl_ms", "ITL", MILLISECONDS, "lower", latency.between_tokens, spread=True,
    meaning="time between two tokens of one sequence",
)
END_TO_END = TimingMetric(
    "e2e_ms", "end to end", MILLISECONDS, "lower", partial(latency.spread, latency.whole_ms), spread=True,
    meaning="time from the prompt to the last token",
)
OUTPUT_RATE = PointMetric(
    "output_tokens_per_second", "output tokens/s", PER_SECOND, "higher",
    lambda trial: latency.throughput(trial.artifact),
    meaning="tokens given per second, the time of their prompts included",
)
COST = PointMetric(
    "usd_per_million", "USD per million tokens", USD, "lower", latency.usd_per_million_tokens,
    meaning="price of the target for the time of a million output tokens",
)
NOISE = RunMetric(
    "machine_noise", "Machine noise", SHARE, "lower", _noise,
    meaning="by how much 5 % of the times of one small computation exceed their median, at least",
)
SIZE = SizeMetric(
    "size_bytes", "Size", BYTES, "lower", lambda sizes: sizes.engine_bytes, meaning="all files of the engine"
)
SIZE_RATIO = SizeMetric(
    "size_ratio", "Size ratio", RATIO, "lower", lambda sizes: sizes.engine_bytes / sizes.checkpoint_bytes,
    meaning="all files of the engine / all tensors of the checkpoint, as stored",
)
WEIGHT_BITS = SizeMetric(
    "weight_bits", "Bits per weight", BITS, "lower", lambda sizes: 8 * sizes.engine_bytes / sizes.parameters,
    meaning="all files of the engine: embedding, scales, zero points and graph too, for each parameter",
)

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
    TTFT,
    TPOT,
    ITL,
    END_TO_END,
    TimingMetric("tokens_per_second", "tokens/s", PER_SECOND, "higher", latency.tokens_per_second),
    TimingMetric("joules_per_token", "energy per token", JOULES, "lower", latency.joules_per_token),
    PointMetric("ttft_speedup", "TTFT speed-up", SPEEDUP, "higher", partial(latency.speedup, latency.first_token_ms)),
    PointMetric("tpot_speedup", "TPOT speed-up", SPEEDUP, "higher", partial(latency.speedup, latency.later_token_ms)),
    OUTPUT_RATE,
    PointMetric("bytes_read_per_token", "read per step", BYTES, "lower", lambda trial: trial.bytes_read),
    PointMetric("bandwidth_utilization", "MBU", SHARE, "higher", latency.bandwidth_utilization),
    PointMetric(
        "data_sheet_bandwidth_utilization", "MBU, data sheet", SHARE, "higher",
        latency.data_sheet_bandwidth_utilization,
    ),
    PointMetric("compute_utilization", "MFU", SHARE, "higher", latency.compute_utilization),
    PointMetric(
        "data_sheet_compute_utilization", "MFU, data sheet", SHARE, "higher", latency.data_sheet_compute_utilization
    ),
    PointMetric("good_share", "meets the SLO", SHARE, "higher", latency.good_share),
    PointMetric("goodput_rps", "goodput/s", PER_SECOND, "higher", latency.goodput),
    COST,
    *(
        SlowestMetric(
            f"{of.name.removesuffix('_ms')}_{at}_ms", f"{of.title}, {said}", MILLISECONDS, "lower", of, at,
            meaning=f"{of.meaning}, at the slowest prompt length",
        )
        for of in (TTFT, TPOT, ITL, END_TO_END)
        for at, said in _PERCENTILES.items()
    ),
    BestMetric(
        "throughput_tokens_per_second", "Throughput", PER_SECOND, "higher", OUTPUT_RATE,
        lambda figures, found: figures.output_tokens_per_second,
        meaning="output tokens per second, at the load that gives most",
    ),
    BestMetric(
        "usd_per_million_tokens", "Cost of a million tokens", USD, "lower", COST, _cost,
        meaning=f"{COST.meaning}, at the load where they cost least",
    ),
    RunMetric(
        "goodput_share", "Requests that meet the SLO", SHARE, "higher", _worst_share, "slo",
        meaning="share of them, at the load or workload with the smallest",
    ),
    RunMetric(
        "load_ms", "Load time", MILLISECONDS, "lower", partial(_of_starts, lambda start: start.load_ms), "starts",
        meaning="until the engine takes requests, in a process of its own; its files were read before",
    ),
    RunMetric(
        "peak_host_bytes", "Peak memory, host", BYTES, "lower",
        partial(_of_starts, lambda start: start.peak_host_bytes), "starts",
        meaning="resident, with mapped files, in a process of its own at the largest load",
    ),
    RunMetric(
        "peak_device_bytes", "Peak memory, device", BYTES, "lower",
        partial(_of_starts, lambda start: start.peak_device_bytes), "starts",
        meaning="used on the device by a process of its own, at the largest load",
    ),
    NOISE,
    WorkloadMetric("workload_ttft_ms", "TTFT", MILLISECONDS, "lower", lambda made, found: made.ttft_ms, True),
    WorkloadMetric("workload_tpot_ms", "TPOT", MILLISECONDS, "lower", lambda made, found: made.tpot_ms, True),
    WorkloadMetric("workload_itl_ms", "ITL", MILLISECONDS, "lower", lambda made, found: made.itl_ms, True),
    WorkloadMetric("workload_e2e_ms", "end to end", MILLISECONDS, "lower", lambda made, found: made.latency_ms, True),
    WorkloadMetric(
        "workload_output_tokens_per_second", "output tokens/s", PER_SECOND, "higher",
        lambda made, found: made.output_tokens_per_second,
    ),
    WorkloadMetric(
        "workload_requests_per_second", "requests/s", PER_SECOND, "higher", lambda made, found: made.requests_per_second
    ),
    WorkloadMetric("workload_goodput_rps", "goodput/s", PER_SECOND, "higher", lambda made, found: made.goodput_rps),
    WorkloadMetric("workload_good_share", "meets the SLO", SHARE, "higher", lambda made, found: made.good_share),
    WorkloadMetric("workload_usd_per_million", "USD per million tokens", USD, "lower", _cost),
    SIZE,
    SIZE_RATIO,
    WEIGHT_BITS,
    *(
        metric
        for name in RUNTIMES
        for metric in (
            RuntimeMetric(
                f"runtime.{name}.agreement", f"{DISTRIBUTIONS[name]}: agreement", SHARE, "higher", name, "agreement",
                meaning="tokens of our greedy answers where both runtimes have the same most likely token",
            ),
            RuntimeMetric(
                f"runtime.{name}.same_answers", f"{DISTRIBUTIONS[name]}: same answers", SHARE, "higher", name,
                "same_answers", meaning="prompts with the same greedy answer in both runtimes",
            ),
            RuntimeMetric(
                f"runtime.{name}.equal_tokens", f"{DISTRIBUTIONS[name]}: equal tokens, median", TEXT, "higher", name,
                "equal_tokens", meaning="of greedy answers, before their first difference",
            ),
            RuntimeMetric(
                f"runtime.{name}.kld_mean", f"{DISTRIBUTIONS[name]}: mean KLD", NATS_A_TOKEN, "lower", name, "kld_mean",
                meaning="KL(our run ‖ its run) of the same artifact, nats per token",
            ),
        )
    ),
)
# fmt: on
MOVED = KLD_MEAN  # how far one document moved, where a report orders documents


def of_quality(measured: Collection[str]) -> tuple[QualityMetric, ...]:
    """List the metrics of quality, in the order of the catalog, and those of plug-ins that were `measured`.

    What a plug-in brought that is not installed here is left out.
    """
    known = {metric.name for metric in ALL}
    others = (SEAM.find(name, known) for name in sorted(set(measured) - known) if name in SEAM.names())
    return (*of_kind(QualityMetric), *(metric for metric in others if metric is not None))


def plugin_of(name: str) -> Plugin | None:
    """Find the plug-in that brings the metric `name`; None: it is one of `ALL`, of a task, or there is none.

    Raises:
        PluginError: several bring it, or it is written for another interface.
    """
    return SEAM.plugin(name, {metric.name for metric in ALL})


def _check(plugin: Plugin, given: Any) -> QualityMetric:
    """Return the metric that a plug-in gives, whose functions are blamed on it, if it leaves ours alone."""
    if type(given) is not QualityMetric:
        raise ValueError(f"it is a {type(given).__name__}, not an instance of llmforge.metrics.catalog.QualityMetric")
    if given.name != plugin.name:
        raise ValueError(f"its record calls itself {given.name!r}")
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", given.name):
        raise ValueError("its name must be lower-case letters, digits and `_`, at most 64")
    if given.name in Quality.model_fields:
        raise ValueError("a report has a field of this name")
    if not isinstance(given.unit, Unit) or given.better not in ("lower", "higher", "neither"):
        raise ValueError("its unit is no Unit of llmforge.metrics.units, or `better` is none of lower, higher, neither")
    if given.key is not None or given.note is not None:
        raise ValueError("key figures are llmforge's own: leave `key` and `note` out")
    if not isinstance(given.form, OfSums | OfTokens | Quantile | Histogram | ByPosition | OfAnswers):
        raise ValueError(f"its form is a {type(given.form).__name__}")
    if given.source == "decode_tokens":
        raise ValueError("decode steps are measured for llmforge's own figures alone")
    ours = {value.name: value for metric in of_kind(QualityMetric) for value in _values(metric.form)}
    for value in _values(given.form):
        if ours.get(value.name) is not value and value.name.partition(".")[0] != given.name:
            raise ValueError(f"its value {value.name!r} must be called {given.name!r}, or {given.name}.SOMETHING")
    return replace(given, form=_blamed(plugin, given.form, tuple(ours.values())))


SEAM = Seam("metrics", _check)


def _values(form: Form) -> tuple[TokenValue | Summed, ...]:
    return form.values if isinstance(form, OfSums) else () if isinstance(form, OfAnswers) else (form.value,)


def _blamed(plugin: Plugin, form: Form, ours: tuple[TokenValue | Summed, ...]) -> Form:
    """Let what the functions of a form raise, or give that no figure is made of, be an error of their plug-in."""

    def guard(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            with blamed(plugin):
                return function(*given)

        return call

    def value(each: Any) -> Any:
        if each in ours:
            return each

        def of(block: TokenBlock) -> Any:
            with blamed(plugin):
                found = np.asarray(each.of(block))
            if found.shape != block.targets.shape or found.dtype.kind not in "fbiu" or not np.isfinite(found).all():
                what = f"{each.name} is {found.dtype} {list(found.shape)} of {len(block.targets)} tokens"
                raise refusal(plugin, f"{what}; expected a finite number, or a truth, of each")
            return found

        return replace(each, of=of)

    changes: dict[str, Any] = {name: guard(getattr(form, name)) for name in ("figure", "finish") if hasattr(form, name)}
    if isinstance(form, OfSums):
        changes["values"] = tuple(map(value, form.values))
    elif not isinstance(form, OfAnswers):
        changes["value"] = value(form.value)
    return replace(form, **changes)


def of_kind(kind: type[Kind]) -> tuple[Kind, ...]:
    """List the metrics of one kind, in the order of the catalog."""
    return tuple(metric for metric in ALL if isinstance(metric, kind))


Deciding = (
    QualityMetric | SlowestMetric | BestMetric | RunMetric | RuntimeMetric | SizeMetric | TaskMetric | AdapterMetric
)


def deciding() -> dict[str, Deciding]:
    """Give the metrics of every artifact that a gate can decide on, by name: one figure, exact or with bounds."""
    found = (metric for metric in ALL if isinstance(metric, Deciding))
    return {metric.name: metric for metric in found if metric.decides}


def limitable() -> dict[str, Deciding]:
    """Give those of `deciding` that a gate may limit: one direction is better."""
    return {name: metric for name, metric in deciding().items() if metric.better != "neither"}


def find(name: str) -> Deciding | None:
    """Give the metric of that name that a gate can decide on, of tasks and adapters, too; None: there is none."""
    return deciding().get(name) or _of_task(name) or _of_adapter(name) or _of_plugin(name)


def _of_plugin(name: str) -> QualityMetric | None:
    metric = None if name not in SEAM.names() else SEAM.find(name, {each.name for each in ALL})
    return metric if metric is not None and metric.decides else None


def _known(name: str) -> str:
    """Allow the metrics that a gate can decide on, and say of others what pydantic says of a Literal."""
    if find(name) is None:
        known = [f"'{each}'" for each in (*limitable(), *SEAM.names())]
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(known[:-1])} or {known[-1]}"})
    return name


def _brought(name: str) -> str:
    """Allow the metrics of plug-ins."""
    if SEAM.find(name, {metric.name for metric in ALL}) is None:
        known = ", ".join(SEAM.names()) or "none is installed"
        raise ValueError(f"no plug-in brings a metric {shown(name)}; known: {known}")
    return name


PluginMetricName = Annotated[str, AfterValidator(_brought)]
MetricName = Annotated[str, AfterValidator(_known)]  # of one that a gate can decide on


def named(name: str) -> Deciding:
    """Give the metric of that name.

    Raises:
        InputError: there is none, as where a report is of another version.
    """
    metric = find(name)
    if metric is None:
        raise InputError(
            f"no gate decides on {shown(name)}",
            hint="what names it was written by another llmforge or with a plug-in that is not here, or was changed",
        )
    return metric


def names(*measured: Measured) -> tuple[str, ...]:
    """Name the metrics that a gate can decide on, with the scores of tasks and adapters that were `measured`."""
    figures = [name for each in measured if each.quality is not None for name in each.quality.figures]
    others = sorted({name for name in figures if _of_plugin(name) is not None} - {metric.name for metric in ALL})
    bounded = [name for name, metric in OF_ADAPTERS.items() if metric.decides]
    of_adapters = (
        f"{adapters.PREFIX}{found.adapter}.{name}" for each in measured for found in each.adapters for name in bounded
    )
    scores = (name for each in measured for name in each.scores)
    return (*deciding(), *others, *dict.fromkeys(scores), *dict.fromkeys(of_adapters))


OF_ADAPTERS: dict[str, QualityMetric] = {  # what is measured of each adapter: sums over its text, which are small
    metric.name: metric
    for metric in of_kind(QualityMetric)
    if isinstance(metric.form, OfSums) and metric.source == "text"
}


def _of_adapter(name: str) -> AdapterMetric | None:
    if re.fullmatch(ADAPTER_PATTERN, name) is None:
        return None
    adapter, _, of = name.removeprefix(adapters.PREFIX).rpartition(".")
    metric = OF_ADAPTERS.get(of)
    if metric is None or not metric.decides:
        return None
    return AdapterMetric(name, f"{adapter}, {metric.title}", metric.unit, metric.better, adapter, metric)


def _of_task(name: str) -> TaskMetric | None:
    if re.fullmatch(TASK_PATTERN, name) is None:
        return None
    task, _, score = name.removeprefix(PREFIX).partition(".")
    of_text = next((unit for known, unit in _OF_TEXT.items() if score.startswith(known)), None)
    title = f"{task}, {score.replace('_', ' ')}"
    if of_text is not None:
        return TaskMetric(name, title, of_text, "lower", meaning="of texts of the task")
    return TaskMetric(name, title, SHARE, "higher", meaning="mean over the items of the task")


def needed(name: str) -> str | None:
    """Name what a recipe's `validation.latency` must ask for, so that a metric is measured; None: nothing."""
    metric = named(name)
    return metric.needs if isinstance(metric, RunMetric) else None


def estimates(measured: Measured) -> dict[str, Estimate]:
    """Read every figure that a gate can decide on, as far as it was measured."""
    found = ((name, named(name).estimate(measured)) for name in names(measured))
    return {name: estimate for name, estimate in found if estimate is not None}


def task_differences(measured: Measured) -> dict[str, Estimate]:
    """Read how far each score of a task is from the checkpoint's, as far as both were measured."""
    found = ((name, score.figures.difference) for name, score in measured.scores.items())
    return {name: difference for name, difference in found if difference is not None}
