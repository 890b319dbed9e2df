"""Figures of latency: made from the time of each token of each generation, at each load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from llmforge.metrics.intervals import Estimate
from llmforge.metrics.record import FiguresRecord, ReportRecord
from llmforge.metrics.tokens import Floats
from llmforge.metrics.workload import MeasuredWorkload, Slo

Generations = Sequence[Floats]  # of each repetition, the milliseconds that each token took [tokens]; first the TTFT

MOST_LENGTHS = 64  # prompt lengths that a recipe may ask for
MOST_OF_SURFACE = 16  # values of each of the three axes of a surface
MOST_LOADS = MOST_LENGTHS + MOST_OF_SURFACE**3
MOST_STARTS = 100
MOST_WORKLOADS = 16  # kinds of them; each is measured once
_HOUR_S = 3600.0


@dataclass(frozen=True)
class TimedSide:
    """What was timed of the artifact or of its baseline, at one load."""

    generations: Generations
    batch: int = 1  # sequences that run together; each step gives each of them a token
    energy_j: Sequence[float] | None = None  # that the device took for each generation; None: not measured

    @property
    def tokens(self) -> int:
        """Tokens that one generation gives, of all its sequences."""
        return self.batch * len(self.generations[0])

    @property
    def encodes(self) -> bool:
        """Whether texts were encoded: a run has the one time until all of them are; a generation has two or more."""
        return len(self.generations[0]) == 1


@dataclass(frozen=True)
class LoadTrial:
    """What was timed at one load, and what it is held against."""

    prompt_tokens: int
    artifact: TimedSide
    baseline: TimedSide | None
    conditions: Conditions

    @property
    def bytes_read(self) -> int:
        """Bytes that a decode step reads: weights, and of each sequence the cache at the middle of its generation."""
        context = self.prompt_tokens + len(self.artifact.generations[0]) // 2
        footprint = self.conditions.footprint
        return footprint.weight_bytes_per_token + self.artifact.batch * context * footprint.kv_bytes_per_token

    @property
    def operations(self) -> int | None:
        """Operations of the weights for the prompts; None: not counted."""
        return self.conditions.footprint.prompt_operations(self.artifact.batch, self.prompt_tokens)


class Spread(ReportRecord):
    """Percentiles of a duration, in milliseconds; bounds where there are enough repetitions."""

    p50: Estimate
    p95: Estimate
    p99: Estimate


class Timing(FiguresRecord):
    """One side at one load: what was timed, and the figures that are made of it."""

    __pydantic_extra__: dict[str, Spread | Estimate | float]

    energy_j: tuple[float, ...] | None = None  # of each repetition
    generations_ms: tuple[tuple[float, ...], ...]  # of each repetition, what each token took; first the TTFT

    def side(self, batch: int) -> TimedSide:
        """What was timed, as figures are made of it."""
        return TimedSide([np.asarray(each, np.float64) for each in self.generations_ms], batch, self.energy_j)

    @model_serializer(mode="wrap")
    def _long_ones_last(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write what is long after the figures."""
        fields: dict[str, Any] = write(self)
        fields["generations_ms"] = fields.pop("generations_ms")
        return fields


class LatencyPoint(FiguresRecord):
    """Both sides at one load: `batch` prompts of one length, together; of an encoder, texts of `prompt_tokens` each."""

    __pydantic_extra__: dict[str, Estimate | int | float | None]

    prompt_tokens: int
    batch: int = 1
    artifact: Timing
    baseline: Timing | None

    @property
    def sides(self) -> dict[str, Timing]:
        """What was timed, by name."""
        return {"artifact": self.artifact, **({} if self.baseline is None else {"baseline": self.baseline})}

    @property
    def output_tokens(self) -> int:
        """Tokens that each sequence got; 0 where texts were encoded."""
        return 0 if self.encodes else len(self.artifact.generations_ms[0])

    @property
    def encodes(self) -> bool:
        """Whether texts were encoded."""
        return len(self.artifact.generations_ms[0]) == 1


class Footprint(ReportRecord):
    """What an artifact weighs, on disk and on the memory bus, and what it computes."""

    artifact_bytes: int  # all files of the engine
    weight_bytes_per_token: int  # that one decode step reads: initializers but tables and experts it does not choose
    kv_bytes_per_token: int  # of cache, for each token of context, all layers
    multiply_adds_per_token: int | None = None  # of the weights, attention's own left out; None: not counted
    head_multiply_adds: int = 0  # of these, those that only the last token of a prompt takes; 0: all do, or unknown

    @model_serializer(mode="wrap")
    def _counted(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the head where it is not told apart."""
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if name != "head_multiply_adds" or value}

    def prompt_operations(self, batch: int, tokens: int) -> int | None:
        """Count operations of the weights for `batch` prompts of so many `tokens`, a multiply-add being two.

        None: multiply-adds were not counted.
        """
        if self.multiply_adds_per_token is None:
            return None
        layers = self.multiply_adds_per_token - self.head_multiply_adds
        return 2 * batch * (tokens * layers + self.head_multiply_adds)


class Bandwidth(ReportRecord):
    """What memory this machine reads, measured in the same run: the device's own, where the engine runs on one."""

    threads: int
    dram_bytes_per_second: float  # a working set that no cache holds
    working_set_bytes: int  # what one decode step reads at the smallest load
    working_set_bytes_per_second: float  # the same probe on that much; far above DRAM where a cache holds it
    probe: str = "loads of host memory"  # as text


class Compute(ReportRecord):
    """What this device computes, measured in the same run."""

    dtype: str  # of the engine's products, as far as it is known: what MFU is relative to
    operations_per_second: dict[str, float]  # by dtype; a multiplication and an addition are two
    probe: str  # as text

    @property
    def rate(self) -> float | None:
        """Operations a second in the engine's dtype; None: not measured."""
        return self.operations_per_second.get(self.dtype)


class DataSheet(ReportRecord):
    """What the target's file says of the device."""

    target: str
    bytes_per_second: float | None
    operations_per_second: dict[str, float]  # by dtype; none where the target has none
    source: str


class HourlyPrice(ReportRecord):
    """What an hour of the target costs."""

    usd_per_hour: float
    source: str
    date: str


class Conditions(ReportRecord):
    """What timings are held against."""

    footprint: Footprint
    bandwidth: Bandwidth | None
    compute: Compute | None = None
    data_sheet: DataSheet | None = None
    price: HourlyPrice | None = None  # of all devices that the engine runs on
    slo: Slo | None = None


class Noise(ReportRecord):
    """What else the machine did meanwhile, as far as it shows."""

    probe_ms: tuple[float, ...]  # the same small computation, before each round of measurements
    stolen_share: float | None  # of CPU time, taken by other virtual machines; None: the system does not tell
    waits: int | None  # of this process, for a core that another one had (involuntary context switches)
    load_average: float | None  # of the last minute, when the measurements began


class EngineStart(ReportRecord):
    """One start of the engine in a process of its own: load, then one generation at the largest load."""

    load_ms: float
    peak_host_bytes: int  # resident, with mapped files
    peak_device_bytes: int | None  # None: there is no device, or it does not tell


class Latency(Conditions):
    """All timings of one run."""

    repetitions: int  # of each load at least
    output_tokens: int
    threads: int
    seed: int
    artifact: str  # what ran, as text
    baseline: str | None
    artifact_load_ms: float
    baseline_load_ms: float | None
    stopped: str = ""  # why no more repetitions were made, where they did not have a fixed number
    noise: Noise | None = None
    starts: tuple[EngineStart, ...] = Field(default=(), max_length=MOST_STARTS)
    points: tuple[LatencyPoint, ...] = Field(max_length=MOST_LOADS)
    workloads: tuple[MeasuredWorkload, ...] = Field(default=(), max_length=MOST_WORKLOADS)

    @property
    def single(self) -> tuple[LatencyPoint, ...]:
        """The loads of one sequence; all of them, where there is none."""
        return tuple(point for point in self.points if point.batch == 1) or self.points

    @property
    def encodes(self) -> bool:
        """Whether texts were encoded, and no tokens generated."""
        return self.points[0].encodes


def first_token_ms(durations: Floats) -> float:
    """Time of a generation from handing over the prompts to the first token of each."""
    return float(durations[0])


def later_token_ms(durations: Floats) -> float:
    """Mean time of each later token of a generation."""
    return float(durations[1:].mean())


def whole_ms(durations: Floats) -> float:
    """Time of a generation from handing over the prompts to the last token."""
    return float(durations.sum())


def spread(duration: Callable[[Floats], float], side: TimedSide) -> Spread:
    """Summarize a duration of each generation."""
    found = [duration(durations) for durations in side.generations]
    p50, p95, p99 = (Estimate.quantile(found, quantile, of="repetitions") for quantile in (0.5, 0.95, 0.99))
    return Spread(p50=p50, p95=p95, p99=p99)


def between_tokens(side: TimedSide) -> Spread:
    """Summarize the time between two tokens, over all generations together."""
    gaps = [durations[1:] for durations in side.generations]
    p50, p95, p99 = (Estimate.clustered_quantile(gaps, quantile, of="repetitions") for quantile in (0.5, 0.95, 0.99))
    return Spread(p50=p50, p95=p95, p99=p99)


def tokens_per_second(side: TimedSide) -> float:
    """Rate of decoding, of all sequences: 1000 · batch / median time of each later token in ms."""
    return 1e3 * side.batch / float(np.median([later_token_ms(durations) for durations in side.generations]))


def throughput(side: TimedSide) -> Estimate:
    """Tokens given per second, the time of their prompts included."""
    return Estimate.median([whole_ms(each) for each in side.generations], of="repetitions").inverted(1e3 * side.tokens)


def tokens_read(trial: LoadTrial) -> Estimate:
    """Tokens of texts that are encoded per second."""
    return throughput(trial.artifact).scaled(trial.prompt_tokens)


def joules_per_token(side: TimedSide) -> Estimate | None:
    """Energy of the device for each token given, that of the prompts included; None: not measured."""
    if side.energy_j is None:
        return None
    return Estimate.median(side.energy_j, of="repetitions").scaled(1 / side.tokens)


def speedup(duration: Callable[[Floats], float], trial: LoadTrial) -> Estimate | None:
    """Estimate the median over the repetitions of baseline / artifact; None without a baseline.

    The baseline may have taken its turn in the first repetitions alone.
    """
    if trial.baseline is None:
        return None
    pairs = zip(trial.baseline.generations, trial.artifact.generations, strict=False)
    return Estimate.median([duration(theirs) / duration(ours) for theirs, ours in pairs], of="repetitions")


def bandwidth_utilization(trial: LoadTrial) -> float | None:
    """Share of the measured bandwidth that decoding uses (MBU): bytes read per step / median TPOT / bandwidth.

    None: it was not measured.
    """
    bandwidth = trial.conditions.bandwidth
    rate = None if bandwidth is None else bandwidth.working_set_bytes_per_second
    return _share_of_rate(trial.bytes_read, later_token_ms, trial, rate)


def data_sheet_bandwidth_utilization(trial: LoadTrial) -> float | None:
    """The same share of what the data sheet says; None: it says nothing."""
    sheet = trial.conditions.data_sheet
    return _share_of_rate(trial.bytes_read, later_token_ms, trial, None if sheet is None else sheet.bytes_per_second)


def compute_utilization(trial: LoadTrial) -> float | None:
    """Share of the measured rate that prompts use (MFU): operations of the weights / median TTFT / rate."""
    compute = trial.conditions.compute
    return _share_of_rate(trial.operations, first_token_ms, trial, None if compute is None else compute.rate)


def data_sheet_compute_utilization(trial: LoadTrial) -> float | None:
    """The same share of what the data sheet says; None: it says nothing of the dtype."""
    compute, sheet = trial.conditions.compute, trial.conditions.data_sheet
    rate = None if compute is None or sheet is None else sheet.operations_per_second.get(compute.dtype)
    return _share_of_rate(trial.operations, first_token_ms, trial, rate)


def _share_of_rate(
    amount: float | None, duration: Callable[[Floats], float], trial: LoadTrial, rate: float | None
) -> float | None:
    """Share of a `rate` at which an `amount` is read, or computed, in the median of a duration."""
    if amount is None or rate is None:
        return None
    median_ms = float(np.median([duration(durations) for durations in trial.artifact.generations]))
    return amount / (median_ms / 1e3) / rate


def usd_per_million_tokens(trial: LoadTrial) -> Estimate | None:
    """Cost of a million tokens given at this load, all the time; None: the target has no price."""
    price = trial.conditions.price
    if price is None:
        return None
    rate = tokens_read(trial) if trial.artifact.encodes else throughput(trial.artifact)
    return rate.inverted(price.usd_per_hour / _HOUR_S * 1e6)


def good_share(trial: LoadTrial) -> Estimate | None:
    """Share of generations that meet the objective; None without one. What encodes is bound by the whole time alone."""
    slo = trial.conditions.slo
    if slo is None:
        return None
    generations = trial.artifact.generations
    met = [
        slo.meets(first_token_ms(each), later_token_ms(each) if len(each) > 1 else 0.0, whole_ms(each))
        for each in generations
    ]
    return Estimate.share(sum(met), len(met), of="repetitions")


def goodput(trial: LoadTrial) -> float | None:
    """Requests a second that meet the objective, at this load; None without one."""
    share = good_share(trial)
    if share is None:
        return None
    return share.value * throughput(trial.artifact).value / len(trial.artifact.generations[0])
