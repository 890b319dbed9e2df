"""The record of one `llmforge bench`."""

from __future__ import annotations

from typing import Literal

from llmforge.measure.machine import Machine
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.record import ReportRecord
from llmforge.metrics.serving import LoadFigures


class Utilization(ReportRecord):
    """How much of the memory bandwidth decoding uses (MBU)."""

    bytes_read_per_step: int  # weights once, and the cache of each row in flight at the middle of its answer
    bytes_per_second: float  # measured in the same run, on a working set of that size
    share: float  # bytes read per step / median TPOT / bandwidth


class LoadPoint(ReportRecord):
    """One load and its figures. A trace of arrivals has neither lengths nor concurrency nor rate of its own."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    concurrency: int | None = None  # of a closed loop: requests in flight
    rate: float | None = None  # of an open loop: Poisson arrivals per second
    texts: int | None = None  # to encode, of `prompt_tokens` each, that a request has
    figures: LoadFigures
    bandwidth: Utilization | None = None


class BenchEngine(ReportRecord):
    """The engine in this process, and what it counted over all loads, warm-up included."""

    threads: int
    slots: int  # requests that run at once
    prefix_hit_share: float | None  # of prompt tokens that were looked up in the prefix cache
    drafted_tokens: int
    accepted_tokens: int
    accepted_length: float | None = None  # tokens of a verification, the one after the draft too
    speculation_speedup: Estimate | None = None  # of a token after the first, against the same requests without drafts


class BenchReport(ReportRecord):
    """All that one `llmforge bench` measured."""

    schema_version: Literal[1] = 1
    llmforge: str
    subject: str  # what answered, as text
    machine: Machine  # that sent the load; and answered it, where the engine ran in this process
    engine: BenchEngine | None  # None where it is behind an address, or encodes
    workload: str  # prompts, as text
    warmup: int
    seed: int
    objective: str | None
    points: tuple[LoadPoint, ...]
    notes: tuple[str, ...] = ()  # what a reader might miss
