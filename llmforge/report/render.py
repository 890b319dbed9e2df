"""Show a report to people: Markdown, one self-contained HTML page, and a summary for the terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmforge.evaluation.gates import Verdict
from llmforge.metrics import catalog, units
from llmforge.metrics.catalog import Measured
from llmforge.metrics.latency import Latency
from llmforge.report import charts, view
from llmforge.report.model import Report

_STYLES = {
    Verdict.PASS: "bold green",
    Verdict.FAIL: "bold red",
    Verdict.INCONCLUSIVE: "bold yellow",
    Verdict.NONE: "bold",
}
_LOADS_AT_THE_TOP = 2  # that a summary has no table for: its key figures have the one, and the report has the other
_NOISY = 0.25  # of a median: above, a summary says so
_NOTES = 100  # that a summary shows
_NAMED = 4  # nodes that Markdown names of those that a pass says the same of; HTML and JSON have all
_MARKDOWN_SPECIAL = re.compile(r"([\\`*\[\]|<>])")


def write(report: Report, folder: Path) -> None:
    """Write `report.md` and `report.html` into an existing folder."""
    (folder / "report.md").write_text(to_markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(to_html(report), encoding="utf-8")


def to_markdown(report: Report) -> str:
    """Write the report as Markdown with tables; every value is escaped."""
    return _render("report.md.jinja", report, autoescape=False, finalize=_markdown_escaped)


def to_card(report: Report, facts: Mapping[str, Any]) -> str:
    """Write what a model card says, with `facts` beyond the report; every value is escaped."""
    return _render("card.md.jinja", report, autoescape=False, finalize=_markdown_escaped, facts=facts)


def to_html(report: Report) -> str:
    """Write the report as one HTML file with nothing from outside and no script; every value is escaped."""
    return _render("report.html.jinja", report, autoescape=True, finalize=None)


def summary(report: Report) -> RenderableType:
    """Make what the command line shows after a build: verdict, the figures that count, every gate, every note."""
    report = view.plain(report)
    head = Text.assemble(
        (f" {report.verdict.name} ", f"{_STYLES[report.verdict]} reverse"),
        f"  {view.headline(report)}  ",
        (f"{report.name} {report.version}", "dim"),
    )
    key = Table.grid(padding=(0, 2))
    for figure in view.key_figures(report):
        key.add_row(Text(figure.title, "dim"), Text(figure.value, "bold"), Text("; ".join(figure.notes)))
    quality = Table.grid(padding=(0, 2))
    for title, figures in () if report.quality is None else view.summary_rows(report.quality):
        quality.add_row(Text(title, "dim"), Text(figures))
    gates = Table.grid(padding=(0, 2))
    for result in report.gates:
        gates.add_row(Text(result.verdict.name, _STYLES[result.verdict]), Text(result.explanation))
    unverified = report.engine.unmeasured
    labels = (Text(f"unverified: the engine was not run: {unverified}", "yellow"),) if unverified else ()
    more = [f"{len(report.notes) - _NOTES} more notes"] if len(report.notes) > _NOTES else []
    notes = (*labels, *(Text(f"note: {note}", "dim") for note in (*report.notes[:_NOTES], *more)))
    reused = view.reused(report.build)
    cached = (Text(f"reused from the build cache: {reused}", "dim"),) if reused else ()
    others = Table.grid(padding=(0, 2))
    for title, said in view.runtime_rows(report):
        others.add_row(Text(title, "dim"), Text(said))
    tables = (
        quality,
        *_latency(report.latency),
        *((others,) if report.runtimes else ()),
        *((gates,) if report.gates else ()),
    )
    return Group(head, key, *tables, *cached, *notes)


def _latency(measured: Latency | None) -> Iterator[RenderableType]:
    """Show more than two loads, and workloads, as tables; what the key figures say already is not repeated."""
    if measured is None:
        return
    if len(measured.points) > _LOADS_AT_THE_TOP:
        loads = view.loads(measured)
        shown = Table(*loads.lead, "TTFT", "p95", "TPOT", "p95", "tokens/s", "MBU", box=None, pad_edge=False)
        for point, load in zip(measured.points, loads.rows, strict=True):
            figures = point.artifact.figures
            durations = [figures[name] for name in (catalog.TTFT.name, catalog.TPOT.name)]
            mbu = point.figures["bandwidth_utilization"]
            shown.add_row(
                *load,
                *(units.ms(each.value) for duration in durations for each in (duration.p50, duration.p95)),
                units.significant(point.figures[catalog.OUTPUT_RATE.name].value),
                "–" if mbu is None else units.percent(mbu),
            )
        for column in shown.columns:
            column.justify = "right"
        yield shown
    for workload in measured.workloads:
        made = workload.figures
        parts = [
            f"{name} {units.ms(each.p50.value)} (p95 {units.ms(each.p95)})"
            for name, each in (("TTFT", made.ttft_ms), ("TPOT", made.tpot_ms))
            if each is not None
        ]
        parts.append(f"{units.significant(made.output_tokens_per_second.value)} tokens/s")
        if made.good_share is not None:
            parts.append(f"{units.percent(made.good_share)} meet the SLO")
        if made.failed:
            parts.append(f"{made.failed} failed")
        yield Text.assemble((f"{workload.name.replace('_', ' ')}: ", "dim"), ", ".join(parts))
    noise = catalog.NOISE.estimate(Measured(latency=measured))
    if noise is not None and noise.value > _NOISY:
        told = (
            f"note: the machine was noisy: the slowest 5 % of one computation took {noise.value:.0%} longer than usual"
        )
        yield Text(told, "yellow")


def _render(
    template: str,
    report: Report,
    *,
    autoescape: bool,
    finalize: Callable[[object], object] | None,
    facts: Mapping[str, Any] | None = None,
) -> str:
    report = view.plain_page(report)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("llmforge.report", ""),
        autoescape=autoescape,
        finalize=finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    written = (units.significant, units.size, units.count, units.ms, units.duration, units.interval)
    environment.filters.update({write.__name__: write for write in written}, words=_words, listed=_listed)
    known: dict[str, Any] = {
        "report": report,
        "headline": view.headline(report),
        "key_figures": view.key_figures(report),
        "unmeasured": report.engine.unmeasured or "the recipe does not ask for it",
        "metrics": {**catalog.deciding(), **{gate.metric: catalog.named(gate.metric) for gate in report.gates}},
        "charts": charts,
        "ms": units.ms,
        "view": view,
        "recipe": json.dumps(report.recipe, indent=2, ensure_ascii=False),
    }
    return environment.get_template(template).render({**known, **(facts or {})}).strip() + "\n"


def _words(value: object) -> str:
    """Write an option's value as in YAML's flow style: strings bare, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _listed(names: Sequence[str]) -> str:
    """Name the first few and count the rest."""
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def _markdown_escaped(value: object) -> str:
    """Keep a value from being read as markup or from leaving its table cell."""
    return _MARKDOWN_SPECIAL.sub(r"\\\1", str(value)).replace("\r", " ").replace("\n", " ")
