"""The judgement of an endpoint in the forms that people and pipelines read: text, JUnit XML, one HTML page."""

from __future__ import annotations

import math

from llmforge.gates.endpoint import EndpointJudgement, headline
from llmforge.metrics import units
from llmforge.metrics.quality_metrics import QUALITY
from llmforge.metrics.served_quality import BoundedFigure, ServedQuality
from llmforge.metrics.serving import Distribution
from llmforge.report import behaviour, release_text, render, view

SIDES = ("Reference", "Endpoint")
_METRICS = {metric.name: metric for metric in QUALITY}
_WAYS = {
    "prompt_logprobs": "log-probabilities of prompts",
    "echo": "log-probabilities of echoed prompts",
    "logprobs": "log-probabilities of the token after each place, asked one by one",
}


def rows(quality: ServedQuality) -> list[tuple[str, str, str]]:
    """Write each figure: title, value or bounds, interval."""
    found = [(_title(name), *_written(name, figure)) for name, figure in quality.figures.items()]
    own = quality.figures["perplexity"]
    if own.is_exact:
        found.append(("Bits a token", units.significant(math.log2(own.at_least.value)), ""))
    if quality.kld_truncated is not None:
        found.append(("Mean KLD, bounds without the draws", *_written("kld_mean", quality.kld_truncated)))
    return found


def _title(name: str) -> str:
    """Name a figure by what it is of here."""
    return _METRICS[name].title.replace("artifact", "endpoint").replace("baseline", "reference")


def _written(name: str, figure: BoundedFigure) -> tuple[str, str]:
    write = _METRICS[name].unit.write
    low, high = figure.at_least.value, figure.at_most.value
    value = write(figure.estimate.value) if figure.is_exact else f"{write(low)} … {write(high)}"
    within = figure.estimate
    return value, "" if within.low is None else units.interval(within, write)


def method(quality: ServedQuality) -> str:
    """Say how quality was measured, and what was not seen."""
    said = f"{_WAYS[quality.way]}, {units.count(quality.listed)} of {units.count(quality.vocabulary)} tokens a place"
    share = f"{said}: {quality.told_share:.4%} of the probability"
    if quality.listed >= quality.vocabulary:
        share = f"{said}: exact"
    elif quality.kld_truncated is not None:
        share += "; KLD is estimated without bias, by a token drawn from the reference at each place"
    else:
        share += f"; upper bounds hold where no token is more than {quality.spread:g} nats below the likeliest"
    return share


def incomplete(quality: ServedQuality) -> str | None:
    """Say what was not measured of the text; None: nothing was left out."""
    parts = []
    if quality.windows_skipped:
        parts.append(f"{quality.windows_skipped} of {quality.windows} windows are read as other tokens")
    if quality.tokens_untold:
        parts.append(f"of {units.count(quality.tokens_untold)} tokens nothing was told")
    return f"left out: {'; '.join(parts)}" if parts else None


def latency_rows(made: EndpointJudgement) -> list[tuple[str, ...]]:
    """Write the times of answers, the titles first; []: none was answered."""
    found = made.latency
    if found is None or found.ttft_ms is None:
        return []
    kinds: dict[str, Distribution | None] = {"TTFT": found.ttft_ms, "TPOT": found.tpot_ms, "latency": found.latency_ms}
    shown = [
        (name, units.ms(each.p50.value), units.ms(each.p95), units.ms(each.p99)) for name, each in kinds.items() if each
    ]
    return [("", "p50", "p95", "p99"), *shown]


def text(made: EndpointJudgement) -> list[str]:
    """Write it for a terminal."""
    lines = [headline(made), *(f"{gate.verdict.value.upper()}  {gate.explanation}" for gate in made.gates)]
    if made.quality is not None:
        lines += [f"{title}: {value}{f' ({within})' if within else ''}" for title, value, within in rows(made.quality)]
        lines.append(f"{len(made.quality.per_document)} documents, {units.count(made.quality.tokens)} tokens")
        lines.append(method(made.quality))
        lines += filter(None, [incomplete(made.quality)])
    if made.unmeasured is not None:
        lines.append(f"quality was not measured: {made.unmeasured}")
    if made.behaviour is not None:
        lines.append(f"{len(made.behaviour.documents)} chats; of the reference, of the endpoint, difference:")
        lines += [f"{title}: {there}, {here}, {moved}" for title, _, there, here, moved, *_ in _behaviour_rows(made)]
    for name, p50, p95, p99 in latency_rows(made)[1:]:
        lines.append(f"{name}: p50 {p50}, p95 {p95}, p99 {p99}, one request at a time")
    if made.reference is not None and made.answers:
        lines.append(f"{made.equal_answers} of {len(made.answers)} greedy answers are the same")
    return [*lines, *(f"note: {note}" for note in made.notes)]


def _behaviour_rows(made: EndpointJudgement) -> list[behaviour.Row]:
    return [] if made.behaviour is None else behaviour.rows(made.behaviour, SIDES)[1:]


def junit(made: EndpointJudgement) -> str:
    """Write its gates as JUnit XML."""
    facts = {
        "reference": "" if made.reference is None else made.reference.title,
        "data": made.data_digest,
        "verdict": made.verdict.value,
    }
    return release_text.junit_of("llmforge judge", made.served.title, facts, made.gates)


def page(made: EndpointJudgement) -> str:
    """Write it as one HTML file like that of a report."""
    made = view.plain_page(made)
    quality = made.quality
    return render.page(
        "endpoint.html.jinja",
        made=made,
        headline=headline(made).partition(": ")[2],
        view=view,
        rows=[] if quality is None else rows(quality),
        method=None if quality is None else method(quality),
        incomplete=None if quality is None else incomplete(quality),
        latency=latency_rows(made),
        report=made,
        behaviour=behaviour,
        sides=SIDES,
    )
