"""Show a report to people: Markdown, one self-contained HTML page, and a summary for the terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmforge.gates.comparison import ArtifactComparison, HistoryEntry, Previous
from llmforge.gates.decision import Verdict
from llmforge.gates.records import Report
from llmforge.metrics import catalog, latency_metrics, units
from llmforge.metrics.latency import Latency
from llmforge.metrics.metric import Measured
from llmforge.report import behaviour, by_layer, charts, differences, load_charts, retrieval, top, view

_STYLES = {
    Verdict.PASS: "bold green",
    Verdict.FAIL: "bold red",
    Verdict.INCONCLUSIVE: "bold yellow",
    Verdict.NONE: "bold",
}
_LOADS_AT_THE_TOP = 2  # that a summary has no table for: its key figures have the one, and the report has the other
_NOTES = 100  # that a summary shows
_SEPARATOR = re.compile(r"([./_-])(?=\w)")  # a `;`, which ends what is escaped, is none of them
_MARKDOWN_SPECIAL = re.compile(r"([\\`*\[\]|<>])")


def write(report: Report, folder: Path, previous: Previous | None = None) -> None:
    """Write `report.md` and `report.html` into an existing folder; `previous` stands beside it on the page."""
    (folder / "report.md").write_text(to_markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(to_html(report, previous), encoding="utf-8")


def to_markdown(report: Report) -> str:
    """Write the report as Markdown with tables; every value is escaped."""
    return _render("report.md.jinja", report, autoescape=False, finalize=_markdown_escaped)


def to_card(report: Report, facts: Mapping[str, Any]) -> str:
    """Write what a model card says, with `facts` beyond the report; every value is escaped."""
    return _render("card.md.jinja", report, autoescape=False, finalize=_markdown_escaped, facts=facts)


def to_html(report: Report, previous: Previous | None = None) -> str:
    """Write the report as one HTML file with nothing from outside and no script; every value is escaped."""
    report, previous = view.plain_page(report), view.plain_page(previous)
    facts = {
        "previous": previous,
        "reasons": top.reasons(report),
        "panels": top.panels(report, previous),
        "warnings": top.warnings(report),
    }
    return _render("report.html.jinja", report, autoescape=True, finalize=None, facts=facts)


def diff_page(found: ArtifactComparison, graph: Sequence[str]) -> str:
    """Write a comparison as one HTML file like that of a report; `graph` is what differs in the graphs."""
    return page("diff.html.jinja", found=view.plain_page(found), graph=view.plain_page(graph))


def history_page(name: str, entries: Sequence[HistoryEntry]) -> str:
    """Write the history of `name` as one HTML file like that of a report."""
    shown = view.plain_page(entries)
    return page("history.html.jinja", name=name, entries=shown, courses=charts.courses(shown))


def summary(report: Report, previous: Previous | None = None) -> RenderableType:
    """Make what the command line shows after a build: verdict, the figures that count, every gate, every note.

    Figures of the `previous` version stand beside those that count.
    """
    report = view.plain(report)
    head = Text.assemble(
        (f" {report.verdict.name} ", f"{_STYLES[report.verdict]} reverse"),
        f"  {view.headline(report)}  ",
        (f"{report.name} {report.version}", "dim"),
    )
    key = Table.grid(padding=(0, 2))
    for tile in (tile for panel in top.panels(report, previous) for tile in panel.tiles):
        notes = Text("; ".join(tile.figure.notes))
        if tile.before is not None:
            kind, style = tile.moved
            notes.append("; ").append(f"{kind} {tile.before} before".strip(), style)
        key.add_row(Text(tile.figure.title, "dim"), Text(tile.figure.value, "bold"), notes)
    quality = Table.grid(padding=(0, 2))
    for title, figures in () if report.quality is None else view.summary_rows(report.quality):
        quality.add_row(Text(title, "dim"), Text(figures))
    if (added := view.added_row(report)) is not None:
        quality.add_row(Text("KLD added by pass", "dim"), Text(added))
    gates = Table.grid(padding=(0, 2))
    for excess in report.excesses:
        gates.add_row(Text(Verdict.FAIL.name, _STYLES[Verdict.FAIL]), Text(excess))
    for result in report.gates:
        gates.add_row(Text(result.verdict.name, _STYLES[result.verdict]), Text(result.explanation))
    unverified = report.engine.unmeasured
    labels = (Text(f"unverified: the engine was not run: {unverified}", "yellow"),) if unverified else ()
    proven = (Text.assemble(("proven: ", "green"), (proof, "dim")) for proof in report.proven)
    more = [f"{len(report.notes) - _NOTES} more notes"] if len(report.notes) > _NOTES else []
    said = (*labels, *proven, *(Text(f"note: {note}", "dim") for note in (*report.notes[:_NOTES], *more)))
    reused = view.reused(report.build)
    cached = (Text(f"reused from the build cache: {reused}", "dim"),) if reused else ()
    since = () if previous is None else (Text(f"before: {previous.reference}", "dim"),)
    others = Table.grid(padding=(0, 2))
    for title, found in view.runtime_rows(report):
        others.add_row(Text(title, "dim"), Text(found))
    blocks: list[list[RenderableType]] = [[head], [key], [gates] if gates.row_count else [], [quality]]
    blocks += [[*_latency(report.latency)], [others], [*since, *cached, *said]]
    shown = [block for block in blocks if block and not (isinstance(block[0], Table) and not block[0].row_count)]
    return Group(*(part for block in shown for part in (*block, Text())))


def _latency(measured: Latency | None) -> Iterator[RenderableType]:
    """Show more than two loads, and workloads, as tables; what the key figures say already is not repeated."""
    if measured is None:
        return
    if len(measured.points) > _LOADS_AT_THE_TOP:
        yield _encoded(measured) if measured.encodes else _generated(measured)
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
    noise = latency_metrics.NOISE.estimate(Measured(latency=measured))
    if noise is not None and noise.value > top.NOISY:
        told = (
            f"note: the machine was noisy: the slowest 5 % of one computation took {noise.value:.0%} longer than usual"
        )
        yield Text(told, "yellow")


def _generated(measured: Latency) -> Table:
    """Write the durations and rates of every load."""
    loads = view.loads(measured)
    shown = Table(*loads.lead, "TTFT", "p95", "TPOT", "p95", "tokens/s", "MBU", box=None, pad_edge=False)
    for point, load in zip(measured.points, loads.rows, strict=True):
        figures = point.artifact.figures
        durations = [figures[name] for name in (latency_metrics.TTFT.name, latency_metrics.TPOT.name)]
        mbu = point.figures["bandwidth_utilization"]
        shown.add_row(
            *load,
            *(units.ms(each.value) for duration in durations for each in (duration.p50, duration.p95)),
            units.significant(point.figures[latency_metrics.OUTPUT_RATE.name].value),
            "–" if mbu is None else units.percent(mbu),
        )
    return _to_the_right(shown)


def _encoded(measured: Latency) -> Table:
    """Write the time of a batch and the rates of every load."""
    loads = view.loads(measured)
    shown = Table(*loads.lead, "batch", "p95", "texts/s", "tokens/s", "baseline speed", box=None, pad_edge=False)
    for point, load in zip(measured.points, loads.rows, strict=True):
        figures, faster = point.artifact.figures, point.figures["batch_speedup"]
        took = figures[latency_metrics.ENCODE.name]
        rates = figures["texts_per_second"], point.figures[latency_metrics.READ_RATE.name]
        shown.add_row(
            *load,
            *(units.ms(each.value) for each in (took.p50, took.p95)),
            *(units.significant(rate.value) for rate in rates),
            "–" if faster is None else units.times(faster.value),
        )
    return _to_the_right(shown)


def _to_the_right(table: Table) -> Table:
    for column in table.columns:
        column.justify = "right"
    return table


def _render(
    template: str,
    report: Report,
    *,
    autoescape: bool,
    finalize: Callable[[object], object] | None,
    facts: Mapping[str, Any] | None = None,
) -> str:
    report = view.plain_page(report)
    known: dict[str, Any] = {
        "report": report,
        "headline": view.headline(report),
        "key_figures": view.key_figures(report),
        "unmeasured": report.engine.unmeasured or "the recipe does not ask for it",
        "metrics": {**catalog.deciding(), **{gate.metric: catalog.named(gate.metric) for gate in report.gates}},
        "load_charts": load_charts,
        "by_layer": by_layer,
        "behaviour": behaviour,
        "retrieval": retrieval,
        "view": view,
        "explained": top.explained,
        "recipe": json.dumps(report.recipe, indent=2, ensure_ascii=False),
    }
    return page(template, autoescape=autoescape, finalize=finalize, **known, **(facts or {}))


def page(
    template: str, *, autoescape: bool = True, finalize: Callable[[object], object] | None = None, **facts: Any
) -> str:
    """Fill a template of this room; it knows the catalog, the charts and how figures are written."""
    known = {"metrics": _Metrics(catalog.deciding()), "charts": charts, "ms": units.ms}
    template_of = _environment(autoescape, finalize).get_template
    return template_of(template).render({**known, **facts}).strip() + "\n"


def prepare() -> None:
    """Compile the templates of a report, which takes a third of a second: a build may have nothing else to do."""
    for name in _environment(True, None).list_templates(extensions=["jinja"]):
        if name.startswith("sections/") or name in ("report.html.jinja", "page.jinja", "charts.jinja", "style.jinja"):
            _environment(True, None).get_template(name)
    for name in (
        "report.md.jinja",
        "runtimes.md.jinja",
        "tasks.md.jinja",
        "behaviour.md.jinja",
        "retrieval.md.jinja",
        "card.md.jinja",
    ):
        _environment(False, _markdown_escaped).get_template(name)


def environment_of(
    *rooms: str, autoescape: bool = True, finalize: Callable[[object], object] | None = None
) -> jinja2.Environment:
    """Make what fills the templates of some packages, the first before the others; an unknown name is an error."""
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(room, "") for room in rooms]),
        autoescape=autoescape,
        finalize=finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _environment(autoescape: bool, finalize: Callable[[object], object] | None) -> jinja2.Environment:
    environment = environment_of("llmforge.report", autoescape=autoescape, finalize=finalize)
    written = (units.significant, units.size, units.count, units.ms, units.duration, units.interval, units.percent)
    environment.filters.update({write.__name__: write for write in written}, words=_words)
    environment.globals["differing"] = differences.pieces
    environment.filters.update(minute=_minute, moved=_moved, breakable=_breakable)
    return environment


class _Metrics(dict[str, catalog.Deciding]):
    """Metrics by name; a score of a task has its metric by its name alone."""

    def __missing__(self, name: str) -> catalog.Deciding:
        return catalog.named(name)


def _minute(written: str) -> str:
    """Write a moment to the minute, "2026-11-21 10:42 UTC"."""
    return f"{datetime.fromisoformat(written).astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _moved(difference: float, unit: units.Unit) -> str:
    """Write a difference with its sign."""
    return units.signed(difference, unit.write).replace("-", "−")


def _breakable(name: str) -> Markup:
    """Let a long name break after what separates its words, and nowhere else."""
    return Markup(_SEPARATOR.sub(r"\1<wbr>", str(escape(name))))


def _words(value: object) -> str:
    """Write an option's value as in YAML's flow style: strings bare, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _markdown_escaped(value: object) -> str:
    """Keep a value from being read as markup or from leaving its table cell."""
    return _MARKDOWN_SPECIAL.sub(r"\\\1", str(value)).replace("\r", " ").replace("\n", " ")
