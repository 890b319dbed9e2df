"""The decision between two servers in the forms that people and pipelines read: text, JUnit XML, one HTML page."""

from __future__ import annotations

from llmforge.gates.shadow import ShadowRecord, headline
from llmforge.metrics import units
from llmforge.metrics.paired_answers import FIGURES
from llmforge.report import release_text, render, view


def rows(made: ShadowRecord) -> list[tuple[str, str, str, str]]:
    """Write each figure: title, mean, bounds, requests."""
    return [
        (
            FIGURES[name].title,
            units.significant(found.value),
            units.interval(found, units.significant),
            units.count(found.samples),
        )
        for name, found in made.figures.items()
    ]


def latency_rows(made: ShadowRecord) -> list[tuple[str, str, str, str]]:
    """Write the latency of both servers: which, p50, p95, p99."""
    return [
        (side.upper(), units.ms(each.p50.value), units.ms(each.p95), units.ms(each.p99))
        for side, each in made.latency_ms.items()
    ]


def text(made: ShadowRecord) -> list[str]:
    """Write it for a terminal."""
    lines = [headline(made), *(f"{gate.verdict.value.upper()}  {gate.explanation}" for gate in made.gates)]
    gated = {FIGURES[gate.metric].title for gate in made.gates}
    lines += [f"{title}: {value} ({within})" for title, value, within, _ in rows(made) if title not in gated]
    lines += [f"latency of {side}: p50 {p50}, p95 {p95}, p99 {p99}" for side, p50, p95, p99 in latency_rows(made)]
    lines += [f"first error of {side.upper()}: {said}" for side, said in made.errors.items()]
    if made.dropped:
        lines.append(f"{units.count(made.dropped)} copies found no room and were dropped")
    return lines


def junit(made: ShadowRecord) -> str:
    """Write its gates as JUnit XML."""
    facts = {"a": made.a, "requests": str(made.requests), "alpha": f"{made.alpha:g}", "verdict": made.verdict.value}
    return release_text.junit_of("llmforge shadow", made.b, facts, made.gates)


def page(made: ShadowRecord) -> str:
    """Write it as one HTML file like that of a report."""
    made = view.plain_page(made)
    return render.page(
        "shadow.html.jinja",
        made=made,
        headline=headline(made).partition(": ")[2],
        figures=FIGURES,
        rows=rows(made),
        latency=latency_rows(made),
    )
