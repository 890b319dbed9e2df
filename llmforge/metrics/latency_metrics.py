"""The metrics of latency: durations, rates, shares of ceilings, costs, and what a start takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from llmforge.metrics import intervals, latency, units
from llmforge.metrics.intervals import SMALLEST_SAMPLE, Estimate
from llmforge.metrics.latency import EngineStart, Latency, LatencyPoint, LoadTrial, Spread, TimedSide
from llmforge.metrics.metric import Measured, Metric
from llmforge.metrics.serving import Distribution, LoadFigures
from llmforge.metrics.units import BYTES, JOULES, MILLISECONDS, PER_SECOND, SHARE, SPEEDUP, USD

Needs = Literal["slo", "starts", "lengths", "output_tokens"]  # keys of a recipe's `validation.latency`


@dataclass(frozen=True)
class LoadMetric(Metric):
    """A figure at each load, of runs that generate tokens, that encode texts, or of both."""

    section = "latency"

    runs: Literal["generate", "encode", "both"] = field(default="generate", kw_only=True)

    def is_of(self, *, encodes: bool) -> bool:
        """Say whether runs that encode have it, or those that generate."""
        return self.runs in ("both", "encode" if encodes else "generate")


@dataclass(frozen=True)
class TimingMetric(LoadMetric):
    """A figure of each side, at each load."""

    figure: Callable[[TimedSide], Spread | Estimate | float | None]
    spread: bool = False  # whether `figure` is percentiles
    chart: bool = False  # whether percentiles are drawn
    clustered: bool = False  # its samples come in generations, whose tokens are not independent
    notes: Callable[[LatencyPoint], tuple[str, ...]] = lambda point: ()  # beside the key figure


@dataclass(frozen=True)
class PointMetric(LoadMetric):
    """A figure of the artifact, at each load."""

    figure: Callable[[LoadTrial], Estimate | int | float | None]


@dataclass(frozen=True)
class SlowestMetric(Metric):
    """A percentile of a duration of the artifact, one sequence at a time, at the length where it is largest."""

    section = "latency"
    decides = True

    of: TimingMetric
    at: Literal["p50", "p95", "p99"] = "p50"

    @property
    def needs(self) -> Needs | None:
        """What a recipe's `validation.latency` must ask for."""
        return _needed_by(self.of)

    @property
    def repetitions(self) -> int:
        """Say how many repetitions its interval needs; those of tokens of one generation may do with fewer."""
        return max(SMALLEST_SAMPLE, intervals.fewest(int(self.at[1:]) / 100))

    def fewest(self, samples: int) -> int | None:
        """Say how many repetitions bounds need; of tokens that come in generations, that depends on them all."""
        if self.of.clustered:
            return super().fewest(samples)
        return intervals.fewest(int(self.at[1:]) / 100)

    @property
    def more(self) -> str:
        """What gives more samples."""
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
    of_workload: Callable[[LoadFigures, Latency], Estimate | None]

    @property
    def needs(self) -> Needs | None:
        """What a recipe's `validation.latency` must ask for."""
        return _needed_by(self.of)

    def fewest(self, samples: int) -> int | None:
        """Say how many repetitions, or runs of a workload, bounds need: it is a median of them."""
        return intervals.fewest(0.5)

    @property
    def more(self) -> str:
        """What gives more samples."""
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
    needs: Needs | None = None  # what a recipe's `validation.latency` must ask for
    quantile: float | None = None  # of its samples that it is; None: a share of them

    def fewest(self, samples: int) -> int | None:
        """Say how many starts, rounds or requests bounds need."""
        return super().fewest(samples) if self.quantile is None else intervals.fewest(self.quantile)

    @property
    def more(self) -> str:
        """What gives more samples."""
        return "raise validation.latency.starts" if self.needs == "starts" else "measure for longer"

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it; None where it was not measured."""
        return None if measured.latency is None else self.figure(measured.latency)


@dataclass(frozen=True)
class WorkloadMetric(Metric):
    """A figure of each workload."""

    section = "latency"

    figure: Callable[[LoadFigures, Latency], Distribution | Estimate | float | None]
    spread: bool = False  # whether `figure` is percentiles


def _needed_by(of: LoadMetric) -> Needs | None:
    """Name what a recipe must ask for so that runs have a figure; None: all have it."""
    needed: dict[str, Needs] = {"encode": "lengths", "generate": "output_tokens"}
    return needed.get(of.runs)


def _decoding(point: LatencyPoint) -> tuple[str, ...]:
    rate = units.significant(point.artifact.figures["tokens_per_second"])
    return f"{_lengths(point)}: {rate} tokens/s", *_speed(point.figures["tpot_speedup"])


def _prefilling(point: LatencyPoint) -> tuple[str, ...]:
    return _lengths(point), *_speed(point.figures["ttft_speedup"])


def _encoding(point: LatencyPoint) -> tuple[str, ...]:
    rate = units.significant(point.figures["read_tokens_per_second"].value)
    several = f"{point.batch} texts" if point.batch > 1 else "1 text"
    return f"{several} of {point.prompt_tokens} tokens: {rate} tokens/s", *_speed(point.figures["batch_speedup"])


def _lengths(point: LatencyPoint) -> str:
    several = f"{point.batch} sequences, " if point.batch > 1 else ""
    return f"{several}{point.prompt_tokens}-token prompt"


def _speed(speedup: Estimate | None) -> tuple[str, ...]:
    return () if speedup is None else (f"{units.times(speedup.value)} baseline speed",)


def _worst_share(found: Latency) -> Estimate | None:
    """Give the smallest share of good requests, over loads of one sequence and workloads."""
    shares = [point.figures.get("good_share") for point in found.single]
    for workload in found.workloads:
        figures = workload.figures
        if figures.good_share is not None:
            sent = figures.completed + figures.failed
            shares.append(Estimate.share(round(figures.good_share * sent), sent, of="requests"))
    return min((each for each in shares if isinstance(each, Estimate)), key=lambda share: share.value, default=None)


def _worst_speedup(found: Latency) -> Estimate | None:
    """Give the smallest speed-up of what encodes, over all loads."""
    known = [point.figures.get("batch_speedup") for point in found.points]
    return min((each for each in known if isinstance(each, Estimate)), key=lambda ratio: ratio.value, default=None)


def _cost(figures: LoadFigures, found: Latency) -> Estimate | None:
    if found.price is None:
        return None
    return figures.output_tokens_per_second.inverted(found.price.usd_per_hour / 3600 * 1e6)


def _of_starts(read: Callable[[EngineStart], float | None], found: Latency) -> Estimate | None:
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


_PERCENTILES: dict[Literal["p50", "p95", "p99"], str] = {"p50": "median", "p95": "95 %", "p99": "99 %"}

# fmt: off

TTFT = TimingMetric(
    "ttft_ms", "TTFT", MILLISECONDS, "lower", partial(latency.spread, latency.first_token_ms), spread=True, chart=True,
    meaning="time to the first token", key=5, notes=_prefilling,
)

TPOT = TimingMetric(
    "tpot_ms", "TPOT", MILLISECONDS, "lower", partial(latency.spread, latency.later_token_ms), spread=True, chart=True,
    meaning="time per output token after the first", key=4, notes=_decoding,
)

ITL = TimingMetric(
    "itl_ms", "ITL", MILLISECONDS, "lower", latency.between_tokens, spread=True, clustered=True,
    meaning="time between two tokens of one sequence",
)

END_TO_END = TimingMetric(
    "e2e_ms", "end to end", MILLISECONDS, "lower", partial(latency.spread, latency.whole_ms), spread=True,
    meaning="time from the prompt to the last token",
)

ENCODE = TimingMetric(
    "encode_ms", "Batch time", MILLISECONDS, "lower", partial(latency.spread, latency.whole_ms), spread=True,
    chart=True, meaning="time until all texts of a batch are encoded", key=4, notes=_encoding, runs="encode",
)

READ_RATE = PointMetric(
    "read_tokens_per_second", "tokens/s", PER_SECOND, "higher", latency.tokens_read, runs="encode",
    meaning="tokens of texts encoded per second",
)

OUTPUT_RATE = PointMetric(
    "output_tokens_per_second", "output tokens/s", PER_SECOND, "higher",
    lambda trial: latency.throughput(trial.artifact),
    meaning="tokens given per second, the time of their prompts included",
)

COST = PointMetric(
    "usd_per_million", "USD per million tokens", USD, "lower", latency.usd_per_million_tokens, runs="both",
    meaning="price of the target for the time of a million output tokens, or of texts that are encoded",
)

NOISE = RunMetric(
    "machine_noise", "Machine noise", SHARE, "lower", _noise, quantile=0.95,
    meaning="by how much 5 % of the times of one small computation exceed their median, at least",
)


LATENCY: tuple[Metric, ...] = (

    TTFT,
    TPOT,
    ITL,
    END_TO_END,
    ENCODE,
    TimingMetric("texts_per_second", "texts/s", PER_SECOND, "higher", latency.throughput, runs="encode"),
    TimingMetric("tokens_per_second", "tokens/s", PER_SECOND, "higher", latency.tokens_per_second),
    TimingMetric("joules_per_token", "energy per token", JOULES, "lower", latency.joules_per_token),
    PointMetric("ttft_speedup", "TTFT speed-up", SPEEDUP, "higher", partial(latency.speedup, latency.first_token_ms)),
    PointMetric("tpot_speedup", "TPOT speed-up", SPEEDUP, "higher", partial(latency.speedup, latency.later_token_ms)),
    READ_RATE,
    PointMetric(
        "batch_speedup", "speed-up", SPEEDUP, "higher", partial(latency.speedup, latency.whole_ms), runs="encode"
    ),
    OUTPUT_RATE,
    PointMetric("bytes_read_per_token", "read per step", BYTES, "lower", lambda trial: trial.bytes_read),
    PointMetric("bandwidth_utilization", "MBU", SHARE, "higher", latency.bandwidth_utilization),
    PointMetric(
        "data_sheet_bandwidth_utilization", "MBU, data sheet", SHARE, "higher",
        latency.data_sheet_bandwidth_utilization,
    ),
    PointMetric("compute_utilization", "MFU", SHARE, "higher", latency.compute_utilization, runs="both"),
    PointMetric(
        "data_sheet_compute_utilization", "MFU, data sheet", SHARE, "higher", latency.data_sheet_compute_utilization,
        runs="both",
    ),
    PointMetric("good_share", "meets the SLO", SHARE, "higher", latency.good_share, runs="both"),
    PointMetric("goodput_rps", "goodput/s", PER_SECOND, "higher", latency.goodput, runs="both"),
    COST,
    *(
        SlowestMetric(
            f"{of.name.removesuffix('_ms')}_{at}_ms", f"{of.title}, {said}", MILLISECONDS, "lower", of, at,
            meaning=f"{of.meaning}, at the slowest {'length' if of is ENCODE else 'prompt length'}",
        )
        for of in (TTFT, TPOT, ITL, END_TO_END, ENCODE)
        for at, said in _PERCENTILES.items()
    ),
    BestMetric(
        "encode_tokens_per_second", "Encoding throughput", PER_SECOND, "higher", READ_RATE, lambda figures, found: None,
        meaning="tokens of texts encoded per second, at the load that gives most",
    ),
    RunMetric(
        "encode_speedup", "Encoding speed-up", SPEEDUP, "higher", _worst_speedup, "lengths", quantile=0.5,
        meaning="baseline's time of a batch / artifact's, median, at the load where it is smallest",
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
        "load_ms", "Load time", MILLISECONDS, "lower", partial(_of_starts, lambda start: start.load_ms), "starts", 0.5,
        meaning="until the engine takes requests, in a process of its own; its files were read before",
    ),
    RunMetric(
        "peak_host_bytes", "Peak memory, host", BYTES, "lower",
        partial(_of_starts, lambda start: start.peak_host_bytes), "starts", 0.5,
        meaning="resident, with mapped files, in a process of its own at the largest load",
    ),
    RunMetric(
        "peak_device_bytes", "Peak memory, device", BYTES, "lower",
        partial(_of_starts, lambda start: start.peak_device_bytes), "starts", 0.5,
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

)
# fmt: on
