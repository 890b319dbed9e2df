"""Figures of latency: made from the time of each token of each generation, at each length of prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from llmforge.metrics.intervals import Estimate
from llmforge.metrics.record import Figures, Record
from llmforge.metrics.tokens import Floats

Generations = Sequence[Floats]  # of each repetition, the milliseconds that each token took [tokens]; first the TTFT


@dataclass(frozen=True)
class Trial:
    """What was timed at one prompt length, and what it is held against."""

    artifact: Generations
    baseline: Generations | None
    bytes_read_per_token: int  # weights, and the cache at the middle of the generation
    bandwidth: float  # bytes a second that this machine reads of a working set that large


class Spread(Record):
    """Percentiles of a duration over the repetitions, in milliseconds."""

    p50: Estimate
    p95: float


class Timing(Figures):
    """One side at one prompt length: what was timed, and the figures that are made of it."""

    __pydantic_extra__: dict[str, Spread | float]

    generations_ms: tuple[tuple[float, ...], ...]  # of each repetition, what each token took; first the TTFT

    @property
    def generations(self) -> Generations:
        """What was timed, as figures are made of it."""
        return [np.asarray(durations, np.float64) for durations in self.generations_ms]

    @model_serializer(mode="wrap")
    def _long_ones_last(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write what is long behind the figures."""
        fields: dict[str, Any] = write(self)
        fields["generations_ms"] = fields.pop("generations_ms")
        return fields


class Point(Figures):
    """Both sides at one prompt length, one sequence at a time."""

    __pydantic_extra__: dict[str, Estimate | int | float | None]

    prompt_tokens: int
    artifact: Timing
    baseline: Timing | None

    @property
    def sides(self) -> dict[str, Timing]:
        """What was timed, by name."""
        return {"artifact": self.artifact, **({} if self.baseline is None else {"baseline": self.baseline})}


class Footprint(Record):
    """What an artifact weighs, on disk and on the memory bus."""

    artifact_bytes: int  # all files of the engine
    weight_bytes_per_token: int  # that one decode step reads: initializers but tables and experts it does not choose
    kv_bytes_per_token: int  # of cache, for each token of context, all layers


class Bandwidth(Record):
    """What this machine reads, measured in the same run by a numpy probe (llmforge.evaluation.machine)."""

    threads: int
    dram_bytes_per_second: float  # a working set that no cache holds
    working_set_bytes: int  # what one decode step reads at the shortest prompt
    working_set_bytes_per_second: float  # the same probe on that much; far above DRAM where a cache holds it


class Latency(Record):
    """All timings of one run."""

    repetitions: int
    output_tokens: int
    threads: int
    seed: int
    artifact: str  # what ran, in words
    baseline: str | None
    artifact_load_ms: float
    baseline_load_ms: float | None
    footprint: Footprint
    bandwidth: Bandwidth
    points: tuple[Point, ...] = Field(max_length=64)  # as many as a recipe may ask for


def first_token_ms(durations: Floats) -> float:
    """Time of a generation from handing over the prompt to the first token."""
    return float(durations[0])


def later_token_ms(durations: Floats) -> float:
    """Mean time of each later token of a generation."""
    return float(durations[1:].mean())


def spread(duration: Callable[[Floats], float], generations: Generations) -> Spread:
    """Summarize a duration of each generation."""
    found = [duration(durations) for durations in generations]
    return Spread(p50=Estimate.median(found, of="repetitions"), p95=float(np.quantile(found, 0.95)))


def between_tokens_ms(quantile: float, generations: Generations) -> float:
    """Find a quantile of the time between two tokens, over all generations together."""
    return float(np.quantile(np.concatenate([durations[1:] for durations in generations]), quantile))


def tokens_per_second(generations: Generations) -> float:
    """Rate of decoding, 1000 / median time of each later token in ms."""
    return 1e3 / spread(later_token_ms, generations).p50.value


def speedup(duration: Callable[[Floats], float], trial: Trial) -> Estimate | None:
    """Estimate the median over the repetitions of baseline / artifact; None without a baseline."""
    if trial.baseline is None:
        return None
    pairs = zip(trial.baseline, trial.artifact, strict=True)
    return Estimate.median([duration(theirs) / duration(ours) for theirs, ours in pairs], of="repetitions")


def bandwidth_utilization(trial: Trial) -> float:
    """Share of the memory bandwidth that decoding uses (MBU): bytes read per token / median TPOT / bandwidth."""
    tpot_ms = spread(later_token_ms, trial.artifact).p50.value
    return trial.bytes_read_per_token / (tpot_ms / 1e3) / trial.bandwidth
