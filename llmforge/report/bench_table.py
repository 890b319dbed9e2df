"""The report of `llmforge bench` as a table for a terminal."""

from __future__ import annotations

from collections import Counter

from rich.console import Group
from rich.table import Table
from rich.text import Text

from llmforge.measure.load import BenchReport, LoadPoint
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.serving import Distribution

_OF_TOKENS = ["load", "prompt", "output", "TTFT p50", "p95", "p99", "TPOT p50", "ITL p95", "p99", "latency p50", "p99"]


def table(report: BenchReport) -> Group:
    """Show a report: a line per point, medians with their bounds where they have some."""
    goodput = report.objective is not None
    encodes = any(point.texts is not None for point in report.points)
    columns = ["load", "texts", "tokens", "latency p50", "p95", "p99", "tok/s", "texts/s", "req/s"]
    columns += [*(["goodput/s"] if goodput else []), "failed"]
    if not encodes:
        columns = [*_OF_TOKENS, "tok/s", "req/s", *(["goodput/s"] if goodput else []), "MBU", "failed"]
    shown = Table(*columns, title=report.subject, title_justify="left", box=None, pad_edge=False)
    for column in shown.columns[1:]:
        column.justify = "right"
    for point in report.points:
        shown.add_row(*(_row(point) if point.texts is None else _encoded(point, point.texts)))
    notes = [*report.notes, f"{report.workload}; times in ms, medians with 95 % confidence intervals"]
    if goodput:
        notes.append(f"goodput: requests per second that meet {report.objective}")
    if report.engine is not None and report.engine.prefix_hit_share is not None:
        notes.append(f"prefix cache: {report.engine.prefix_hit_share:.1%} of prompt tokens reused")
    if report.engine is not None and report.engine.drafted_tokens:
        accepted = report.engine.accepted_tokens / report.engine.drafted_tokens
        text = f"speculation: {accepted:.1%} of {report.engine.drafted_tokens:,} drafted tokens accepted"
        if (length := report.engine.accepted_length) is not None:
            text += f", {length:.2f} tokens by verification"
        if (speedup := report.engine.speculation_speedup) is not None:
            text += f"; {_estimate(speedup)} times as fast as without (95 %, {speedup.samples} {speedup.of})"
        notes.append(text)
    errors = sum((Counter(point.figures.errors) for point in report.points), Counter[str]())
    notes += [f"{error}: {count} requests" for error, count in errors.items()]
    return Group(shown, *(Text(note, style="dim") for note in notes))


def _load(point: LoadPoint) -> str:
    if point.concurrency is not None:
        return f"{point.concurrency} in flight"
    return "trace" if point.rate is None else f"{point.rate:g}/s"


def _encoded(point: LoadPoint, texts: int) -> list[str]:
    measured = point.figures
    return [
        _load(point),
        str(texts),
        "-" if point.prompt_tokens is None else str(point.prompt_tokens),
        *_percentiles(measured.latency_ms, "p50", "p95", "p99"),
        _estimate(measured.total_tokens_per_second),
        _estimate(measured.requests_per_second.scaled(texts)),
        _estimate(measured.requests_per_second),
        *([] if measured.goodput_rps is None else [_number(measured.goodput_rps.value)]),
        str(measured.failed),
    ]


def _row(point: LoadPoint) -> list[str]:
    measured = point.figures
    return [
        _load(point),
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
