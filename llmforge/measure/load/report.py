"""The report of `llmforge bench`: a record that is complete, and a table to read."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from llmforge.measure.machine import Machine
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.record import ReportRecord
from llmforge.metrics.serving import Distribution, LoadFigures


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
    figures: LoadFigures
    bandwidth: Utilization | None = None


class BenchEngine(ReportRecord):
    """The engine in this process, and what it counted over all loads, warm-up included."""

    threads: int
    slots: int  # requests that run at once
    prefix_hit_share: float | None  # of prompt tokens that were looked up in the prefix cache
    drafted_tokens: int
    accepted_tokens: int


class BenchReport(ReportRecord):
    """All that one `llmforge bench` measured."""

    schema_version: Literal[1] = 1
    llmforge: str
    subject: str  # what answered, as text
    machine: Machine  # that sent the load; and answered it, where the engine ran in this process
    engine: BenchEngine | None  # None where it is behind an address
    workload: str  # prompts, as text
    warmup: int
    seed: int
    objective: str | None
    points: tuple[LoadPoint, ...]
    notes: tuple[str, ...] = ()  # what a reader might miss


def table(report: BenchReport) -> Group:
    """Show a report: a line per point, medians with their bounds where they have some."""
    goodput = report.objective is not None
    columns = ["load", "prompt", "output", "TTFT p50", "p95", "p99", "TPOT p50", "ITL p95", "p99", "latency p50", "p99"]
    columns += ["tok/s", "req/s", *(["goodput/s"] if goodput else []), "MBU", "failed"]
    shown = Table(*columns, title=report.subject, title_justify="left", box=None, pad_edge=False)
    for column in shown.columns[1:]:
        column.justify = "right"
    for point in report.points:
        shown.add_row(*_row(point))
    notes = [*report.notes, f"{report.workload}; times in ms, medians with 95 % confidence intervals"]
    if goodput:
        notes.append(f"goodput: requests per second that meet {report.objective}")
    if report.engine is not None and report.engine.prefix_hit_share is not None:
        notes.append(f"prefix cache: {report.engine.prefix_hit_share:.1%} of prompt tokens reused")
    if report.engine is not None and report.engine.drafted_tokens:
        accepted = report.engine.accepted_tokens / report.engine.drafted_tokens
        notes.append(f"speculation: {accepted:.1%} of {report.engine.drafted_tokens:,} drafted tokens accepted")
    errors = sum((Counter(point.figures.errors) for point in report.points), Counter[str]())
    notes += [f"{error}: {count} requests" for error, count in errors.items()]
    return Group(shown, *(Text(note, style="dim") for note in notes))


def _row(point: LoadPoint) -> list[str]:
    measured = point.figures
    load = "trace"
    if point.concurrency is not None:
        load = f"{point.concurrency} in flight"
    elif point.rate is not None:
        load = f"{point.rate:g}/s"
    return [
        load,
        "-" if point.prompt_tokens is None else str(point.prompt_tokens),
        "-" if point.output_tokens is None else str(point.output_tokens),
        *_percentiles(measured.ttft_ms, "p50", "p95", "p99"),
        *_percentiles(measured.tpot_ms, "p50"),
        *_percentiles(measured.itl_ms, "p95", "p99"),
        *_percentiles(measured.latency_ms, "p50", "p99"),
        _estimate(measured.output_tokens_per_second),
        _estimate(measured.requests_per_second),
        *([] if measured.goodput_rps is None else [_number(measured.goodput_rps.value)]),
        "-" if point.bandwidth is None else f"{point.bandwidth.share:.0%}",
        str(measured.failed),
    ]


def _percentiles(values: Distribution | None, *names: str) -> list[str]:
    if values is None:
        return ["-"] * len(names)
    known = {"p50": _estimate(values.p50), "p95": _number(values.p95), "p99": _number(values.p99)}
    return [known[name] for name in names]


def _estimate(value: Estimate) -> str:
    if value.low is None or value.high is None:
        return _number(value.value)
    return f"{_number(value.value)} ({_number(value.low)}–{_number(value.high)})"


def _number(value: float) -> str:
    """Three digits that count; more before the point where there are more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
