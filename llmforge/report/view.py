"""Figures of a report as written, the same in every form: how the gates ended, size, quality, speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from dataclasses import fields as fields_of
from enum import Enum
from functools import partial
from statistics import median
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from llmforge.base import wording
from llmforge.gates import records
from llmforge.gates.decision import GateResult, Verdict
from llmforge.gates.records import BuildRecord, Report
from llmforge.metrics import artifact_metrics, catalog, latency_metrics, quality_metrics, units
from llmforge.metrics.agreement import RuntimeRun
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import Bandwidth, Latency, LatencyPoint, Noise, Spread
from llmforge.metrics.latency_metrics import BestMetric, PointMetric, RunMetric, TimingMetric, WorkloadMetric
from llmforge.metrics.metric import Measured, Metric, Sizes
from llmforge.metrics.quality import ByPosition, OfSums, Quality
from llmforge.metrics.quality_metrics import QualityMetric
from llmforge.metrics.serving import Distribution
from llmforge.metrics.tasks import PREFIX, TaskResult
from llmforge.report import release_text
from llmforge.rewrite.pass_base import Rewritten, Skipped

LONGEST_TEXT = 1000  # characters of a text of a report
T = TypeVar("T")


@dataclass(frozen=True)
class KeyFigure:
    """One of the figures at the top."""

    title: str
    value: str
    notes: tuple[str, ...]
    metric: str  # of the catalog
    section: Literal["size", "quality", "latency"]


def plain(report: Report) -> Report:
    """Make the words of a report, which may be a stranger's, lines that a terminal may show."""
    return _plain(report, lambda text: wording.plain(text, LONGEST_TEXT))


def plain_page(shown: T) -> T:
    """Write out control characters in the words of a report, or of a part or several of them, but for line ends.

    Answers have several lines.
    """
    return _plain(shown, wording.plain_text)


def headline(report: Report) -> str:
    """Say how the gates ended, and what had to retreat, in a few words."""
    moved = records.retreated(report.passes)
    return _ended(report) if moved is None else f"{_ended(report)}, {moved}"


def _ended(report: Report) -> str:
    verdicts = [result.verdict for result in report.gates]
    if report.verdict is Verdict.NONE:
        return f"{'Not built yet' if report.engine.pending else 'Built'}; the recipe has no gates"
    if report.verdict is Verdict.PASS:
        return "The gate passed" if len(verdicts) == 1 else f"All {len(verdicts)} gates passed"
    if report.verdict is Verdict.FAIL:
        said = release_text.failed(verdicts.count(Verdict.FAIL), len(verdicts), len(report.excesses))
        return said[0].upper() + said[1:]
    unknown = "not enough data"
    if report.engine.unmeasured:
        unknown = "the engine was not run"
    elif not any(gate.measured for gate in report.gates if gate.verdict is report.verdict):
        unknown = "not measured"
    return f"{verdicts.count(report.verdict)} of {len(verdicts)} gates inconclusive: {unknown}"


def gate_limit(gate: GateResult) -> str:
    """Write the limit of a gate, "max 0.0300", "drop max 5.0 %"; how far something may move has no sign."""
    limit = catalog.named(gate.metric).unit.write(gate.limit)
    return f"{gate.bound.replace('_', ' ')} {limit.removeprefix('+') if gate.is_relative else limit}"


def gate_figures(gate: GateResult) -> tuple[str, str]:
    """Write what a gate measured and its interval; a difference has its sign."""
    measured, write = gate.measured, catalog.named(gate.metric).unit.write
    if measured is None:
        return "–", "not measured"
    if not gate.is_relative:
        return write(measured.value), units.interval(measured, write)
    signed = partial(units.signed, write=write)
    return signed(measured.value), units.interval(measured, signed)


def task_rows(tasks: Sequence[TaskResult]) -> list[tuple[str, ...]]:
    """Write the scores of tasks as rows, the titles first."""
    rows: list[tuple[str, ...]] = [("TASK", "SCORE", "ITEMS", "CHECKPOINT", "ARTIFACT", "DIFFERENCE", "95 % INTERVAL")]
    for task in tasks:
        for name, score in task.scores.items():
            write, found = catalog.named(f"{PREFIX}{task.name}.{name}").unit.write, score.figures
            moved = found.difference
            change = ("–", "–")
            if moved is not None:
                change = units.signed(moved.value, write), units.interval(moved, partial(units.signed, write=write))
            baseline = "–" if found.baseline is None else write(found.baseline.value)
            items = units.count(len(score.artifact))
            rows.append((task.name, name, items, baseline, write(found.artifact.value), *change))
    return rows


def adapter_rows(report: Report) -> list[tuple[str, ...]]:
    """Write the quality of each adapter as rows, the titles first: figures with their intervals."""
    shown = [metric for metric in catalog.OF_ADAPTERS.values() if metric.key is not None]
    rows: list[tuple[str, ...]] = [("ADAPTER", "DOCUMENTS", "TOKENS", *(metric.title for metric in shown))]
    for each in report.adapters:
        cells = []
        for metric in shown:
            figure, write = each.quality.figures[metric.name], metric.unit.write
            cells.append(f"{write(figure.value)} ({units.interval(figure, write)})")
        counts = units.count(each.quality.documents), units.count(each.quality.tokens)
        rows.append((each.adapter, *counts, *cells))
    return rows


NOT_ATTRIBUTED = "not measured; set validation.attribution to true in the recipe to measure it"
HELD_TO_BUDGET = (
    "KLD from the graph before the pass, on the budget's windows. The budget limits it; it is no share of the total."
)


def added_kld(report: Report) -> list[Estimate | None]:
    """Find what each pass added to the KLD from the traced graph; None: it cannot lose, or that was not measured."""
    steps = iter(() if report.attribution is None else report.attribution.steps[1:])
    lost = (next(steps, None) if done.may_lose else None for done in report.passes)
    return [None if step is None else step.added for step in lost]


def added_meaning(report: Report) -> str:
    """Say what the added KLD of passes is, or that it was not measured."""
    if (found := report.attribution) is None:
        return f"{NOT_ATTRIBUTED}."
    return (
        f"what the pass added to the KLD from the traced graph, on {units.count(found.documents)} documents: about "
        "what leaving it out would save."
    )


def added_row(report: Report) -> str | None:
    """Write in a line what each pass added to the KLD; None: no pass can lose."""
    if not any(done.may_lose for done in report.passes):
        return None
    added = zip(report.passes, added_kld(report), strict=True)
    write = partial(units.signed, write=quality_metrics.KLD_MEAN.unit.write)
    return "; ".join(f"{done.name} {write(each.value)}" for done, each in added if each is not None) or NOT_ATTRIBUTED


def key_figures(report: Report) -> list[KeyFigure]:
    """Pick the figures at the top; what was not measured is not there."""
    sizes = Sizes(report.engine.size_bytes, report.checkpoint.size_bytes, report.checkpoint.parameters)
    notes = (
        f"{units.percent(artifact_metrics.SIZE_RATIO.figure(sizes))} of the checkpoint",
        f"{artifact_metrics.WEIGHT_BITS.unit.write(artifact_metrics.WEIGHT_BITS.figure(sizes))} bits per weight",
    )
    title = "To build" if report.engine.pending else artifact_metrics.SIZE.title
    written = artifact_metrics.SIZE.unit.write(artifact_metrics.SIZE.figure(sizes))
    size = KeyFigure(title, written, notes, artifact_metrics.SIZE.name, "size")
    return [size, *(figure for _, figure in sorted(_key_metrics(report), key=lambda placed: placed[0]))]


def value(figure: Estimate | float) -> float:
    """Take a figure without its bounds."""
    return figure.value if isinstance(figure, Estimate) else figure


def _plain(value: T, write: Callable[[str], str]) -> T:
    """Make every text inside of a value plain; what has none is returned as it is."""
    made: Any = value
    if isinstance(value, str) and not isinstance(value, Enum):
        made = write(value)
    elif isinstance(value, BaseModel):
        fields = {**dict(value), **(value.__pydantic_extra__ or {})}
        changed = {name: new for name, old in fields.items() if (new := _plain(old, write)) is not old}
        made = value.model_copy(update=changed) if changed else value
    elif is_dataclass(value) and not isinstance(value, type):
        old = {each.name: getattr(value, each.name) for each in fields_of(value)}
        changed = {name: new for name, each in old.items() if (new := _plain(each, write)) is not each}
        made = replace(value, **changed) if changed else value
    elif isinstance(value, dict):
        made = {_plain(key, write): _plain(each, write) for key, each in value.items()}
    elif isinstance(value, tuple | list):
        parts = [_plain(each, write) for each in value]
        if any(new is not old for new, old in zip(parts, value, strict=True)):
            made = type(value)(parts)
    return made  # type: ignore[no-any-return]


def _key_metrics(report: Report) -> Iterator[tuple[int, KeyFigure]]:
    """Find the key figures that are metrics, each with its place."""
    if (quality := report.quality) is not None:
        for metric in catalog.of_quality(quality.figures):
            if metric.key is not None and metric.name in quality.figures:
                estimate, write = quality.figures[metric.name], metric.unit.write
                note = metric.unit.name if metric.note is None else metric.note(quality)
                notes = (note, units.interval(estimate, write))
                yield metric.key, KeyFigure(metric.title, write(estimate.value), notes, metric.name, "quality")
    if report.latency is not None:
        point = key_load(report.latency)
        for timed in catalog.of_kind(TimingMetric):
            if timed.key is not None and timed.name in point.artifact.figures:
                spread: Spread = point.artifact.figures[timed.name]
                written = timed.unit.write(spread.p50.value)
                yield timed.key, KeyFigure(timed.title, written, timed.notes(point), timed.name, "latency")


def key_load(latency: Latency) -> LatencyPoint:
    """Choose the load of the key figures: the longest prompt of one sequence.

    There is one: figures that stand side by side belong together.
    """
    return max(latency.single, key=lambda point: (point.prompt_tokens, point.output_tokens))


@dataclass(frozen=True)
class FigureTable:
    """A table of figures, as written; a row begins with what its figures are of."""

    head: tuple[str, ...]  # titles of the figures
    rows: list[tuple[str, ...]]
    lead: tuple[str, ...] = ()  # titles of what stands before the figures in a row

    def without_empty(self) -> FigureTable:
        """Leave out figures that no row has."""
        first = len(self.lead)
        kept = [at for at in range(len(self.head)) if any(row[first + at] not in ("", "–") for row in self.rows)]
        rows = [(*row[:first], *(row[first + at] for at in kept)) for row in self.rows]
        return FigureTable(tuple(self.head[at] for at in kept), rows, self.lead)


def quality_rows(quality: Quality) -> list[tuple[str, str, str]]:
    """Write every figure of quality that is a number: title, value and interval."""
    rows = []
    for metric in catalog.of_quality(quality.figures):
        figure, write = quality.figures.get(metric.name), metric.unit.write
        if isinstance(figure, Estimate | float):
            bounds = units.interval(figure, write) if isinstance(figure, Estimate) else ""
            rows.append((metric.title, write(value(figure)), bounds))
    return rows


def summary_rows(quality: Quality) -> list[tuple[str, str]]:
    """Write what the summary says of quality beyond the key figures: a title, and its figures in one line."""
    rows: dict[str, list[str]] = {}
    for metric in catalog.of_quality(quality.figures):
        if metric.row is not None and metric.name in quality.figures:
            title, label = metric.row
            rows.setdefault(title, []).append(f"{label} {_brief(metric, quality.figures[metric.name])}".strip())
    return [(title, "; ".join(parts)) for title, parts in rows.items()]


def _brief(metric: QualityMetric, figure: Any) -> str:
    """Write a figure, or how a curve begins, where it is highest, and how it ends."""
    write = metric.unit.write
    if not isinstance(metric.form, ByPosition):
        return write(value(figure))
    places = sorted({0, max(range(len(figure)), key=lambda i: figure[i].figure.value), len(figure) - 1})
    return ", ".join(f"{write(figure[i].figure.value)} at {figure[i].first}–{figure[i].last} tokens" for i in places)


def curve_rows(quality: Quality) -> list[tuple[str, str]]:
    """Write every curve: its title, and the figure of each stretch."""
    rows = []
    for metric in catalog.of_quality(quality.figures):
        if isinstance(metric.form, ByPosition) and metric.name in quality.figures:
            parts = (f"{s.first}–{s.last} {metric.unit.write(s.figure.value)}" for s in quality.figures[metric.name])
            rows.append((f"{metric.title} ({metric.meaning})", ", ".join(parts)))
    return rows


def kept(quality: Quality) -> str:
    """Say of how many tokens quantiles and curves are made, where that is not all."""
    if quality.kept_tokens in (0, quality.tokens):
        return ""
    return (
        f"Quantiles, distributions and curves by position: from {units.count(quality.kept_tokens)} of the "
        f"{units.count(quality.tokens)} tokens, spread over all documents."
    )


def scored(quality: Quality) -> str:
    """Say which tokens count, where not all do."""
    if quality.scored == "all":
        return ""
    return "Only the second half of each window is scored, as llama.cpp does, and only full windows."


def runtime_rows(report: Report) -> list[tuple[str, str]]:
    """Write what became of the artifact in each other runtime: its name, and what there is to say in a line."""
    rows = []
    for run in report.runtimes:
        said = [f"failed: {run.failure}"]
        if (made := run.figures) is not None:
            places = sum(len(each.ours) for each in run.prompts)
            equal = sum(each.first_difference is None for each in run.prompts)
            ties = f" (near ties, of the others: {run.near_ties})" if run.near_ties else ""
            bounds = units.interval(made.agreement, units.percent)
            said = [
                f"{units.percent(made.agreement.value)} of {units.count(places)} tokens agree ({bounds})",
                f"{equal} of {run.asked} answers are equal{ties}",
                f"KLD {units.significant(made.kld_mean.value)}",
                f"largest |Δlogit| {units.significant(made.logit_difference_max)}",
            ]
        rows.append((run.title, "; ".join(said)))
    return rows


def runtime_prompts(run: RuntimeRun) -> FigureTable:
    """Write what both runtimes made of each prompt."""
    head = ("tokens", "agree", "first difference of answers", "mean KLD", "mean |Δlogit|", "largest |Δlogit|")
    rows = []
    for each in run.prompts:
        places = len(each.ours)
        figures = (sum(each.kld) / places, sum(each.difference_mean) / places, max(each.difference_max))
        first = "none" if each.first_difference is None else f"after {each.first_difference}"
        first += "" if each.margin is None else f", by {units.significant(each.margin)}"
        agree = units.percent(each.agreeing / places)
        rows.append((each.document, str(places), agree, first, *map(units.significant, figures)))
    return FigureTable(head, rows, ("document",))


def moved_most(quality: Quality, count: int = 5) -> FigureTable:
    """Write what moved the most of documents, in that order: their tokens, how far they moved, and other figures."""
    metrics = [
        metric for metric in catalog.of_quality(quality.figures) if metric.decides and metric.name in quality.figures
    ]
    of_text = [metric for metric in metrics if metric.source == "text"]
    shown = [(metric, metric.form) for metric in of_text if isinstance(metric.form, OfSums)]
    shown.sort(key=lambda pair: pair[0] is not quality_metrics.KLD_MEAN)
    most = sorted(quality.per_document, key=lambda sums: -shown[0][1].of(sums))[:count]
    rows = [
        (sums.document, units.count(sums.tokens), *(metric.unit.write(form.of(sums)) for metric, form in shown))
        for sums in most
    ]
    return FigureTable(tuple(metric.title for metric, _ in shown), rows)


def how_long(quality: Quality, document: str) -> tuple[str, str]:
    """Say how long both answers to the beginning of a document are, baseline's first; "" where that is not known."""
    answer = next((answer for answer in quality.answers if answer.document == document), None)
    if answer is None or answer.ended is None:
        return "", ""
    sides = (answer.baseline_tokens, answer.baseline_ended), (answer.tokens, answer.ended)
    told = [
        "" if tokens is None else f"{tokens} tokens{', ended' if over else ', not ended'}" for tokens, over in sides
    ]
    return told[0], told[1]


def loads(latency: Latency) -> FigureTable:
    """Name every load by what sets it apart: prompt tokens, and where they differ sequences and output tokens."""
    points = latency.points
    length = length_title(latency)
    columns = {
        "texts" if latency.encodes else "sequences": [point.batch for point in points],
        length: [point.prompt_tokens for point in points],
        "output tokens": [point.output_tokens for point in points],
    }
    lead = tuple(title for title, values in columns.items() if title == length or len(set(values)) > 1)
    rows = [tuple(str(columns[title][at]) for title in lead) for at in range(len(points))]
    return FigureTable((), rows, lead)


def length_title(latency: Latency) -> str:
    """Say what lengths of loads are of."""
    return "tokens of a text" if latency.encodes else "prompt tokens"


def timing_table(latency: Latency, *, charts: bool) -> FigureTable:
    """Write every duration and rate of each side at each load; those that have a chart, if wanted."""
    mine = [metric for metric in catalog.of_kind(TimingMetric) if metric.is_of(encodes=latency.encodes)]
    timed = [metric for metric in mine if charts or not metric.chart]
    head = [title for m in timed for title in ((f"{m.title} p50", "p95", "p99") if m.spread else (m.title,))]
    rows, named = [], loads(latency)
    for point, load in zip(latency.points, named.rows, strict=True):
        for side, timing in point.sides.items():
            cells = [cell for metric in timed for cell in _cells(metric, timing.figures.get(metric.name))]
            rows.append((*load, side, *cells))
    return FigureTable(tuple(head), rows, (*named.lead, "side")).without_empty()


def point_table(latency: Latency) -> FigureTable:
    """Write every other figure of the artifact at each load."""
    metrics, named = catalog.of_kind(PointMetric), loads(latency)
    rows = [
        (*load, *(cell for metric in metrics for cell in _cells(metric, point.figures.get(metric.name))))
        for point, load in zip(latency.points, named.rows, strict=True)
    ]
    return FigureTable(tuple(metric.title for metric in metrics), rows, named.lead).without_empty()


def workload_tables(latency: Latency) -> tuple[FigureTable, FigureTable]:
    """Write the durations of each workload, and its rates and shares."""
    metrics = catalog.of_kind(WorkloadMetric)
    timed, rated = [m for m in metrics if m.spread], [m for m in metrics if not m.spread]
    durations, rates = [], []
    for workload in latency.workloads:
        name, made = workload.name.replace("_", " "), workload.figures
        found = [metric.figure(made, latency) for metric in timed]
        spreads = zip(timed, found, strict=True)
        durations.append((name, *(cell for metric, figure in spreads for cell in _percentiles(metric, figure))))
        cells = [cell for metric in rated for cell in _cells(metric, metric.figure(made, latency))]
        reused = workload.prefix_hit_share
        rates.append((name, *cells, "–" if reused is None else units.percent(reused), str(made.failed)))
    head = tuple(title for m in timed for title in (f"{m.title} p50", "p95", "p99"))
    rest = (*(metric.title for metric in rated), "prefix reused", "failed")
    lead = ("workload",)
    return FigureTable(head, durations, lead).without_empty(), FigureTable(rest, rates, lead).without_empty()


def _percentiles(metric: Metric, figure: Distribution | Estimate | float | None) -> list[str]:
    if not isinstance(figure, Distribution):  # answers of one token each have no time per later token
        return ["–"] * 3
    return [metric.unit.write(each) for each in (figure.p50.value, figure.p95, figure.p99)]


def _cells(metric: Metric, figure: Spread | Distribution | Estimate | float | None) -> list[str]:
    """Write a figure; of a spread its percentiles."""
    if figure is None or isinstance(figure, Distribution):
        return ["–"]
    figures = (figure.p50, figure.p95, figure.p99) if isinstance(figure, Spread) else (figure,)
    return [metric.unit.write(value(each)) for each in figures]


def how_measured(latency: Latency) -> str:
    """Say in a line what was timed, and how often."""
    alone = sum(point.batch == 1 for point in latency.points)
    several = len(latency.points) - alone
    counts = sorted({len(point.artifact.generations_ms) for point in latency.points})
    outputs = sorted({point.output_tokens for point in latency.points})
    turns = sorted({0 if point.baseline is None else len(point.baseline.generations_ms) for point in latency.points})
    beside = ""
    if latency.baseline is not None:
        beside = f"{' in' if turns == counts else f', {_range(turns)} of them in'} turns with the baseline"
    one = "text" if latency.encodes else "sequence"
    loads = f"{_counted([alone], 'load')} of one {one}, {several} of several"
    if not (alone and several):
        loads = f"one {one} at a time" if alone else f"several {one}s at once"
    parts = [
        loads,
        "random token ids" if latency.encodes else _counted(outputs, "output token"),
        f"{_counted(counts, 'repetition')}{beside}",
        _counted([latency.threads], "thread"),
    ]
    said = ", ".join(parts) + "."
    stopped = f" Repeated until {latency.stopped}." if latency.stopped else ""
    return said[0].upper() + said[1:] + stopped


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _counted(numbers: Sequence[int], thing: str) -> str:
    """Write how many things, "1 thread", "3 to 7 repetitions"."""
    return f"{_range(numbers)} {thing}{'' if list(numbers) == [1] else 's'}"


def latency_facts(latency: Latency) -> list[tuple[str, str]]:
    """List what timings are held against and what was measured beside them: title and text."""
    footprint, found = latency.footprint, []
    text = (
        f"{units.size(footprint.weight_bytes_per_token)} of weights, and {units.size(footprint.kv_bytes_per_token)} of "
        "KV cache for each sequence and token of context"
    )
    if latency.encodes:
        found.append(("a batch reads", f"{units.size(footprint.weight_bytes_per_token)} of weights"))
    else:
        found.append(("a decode step reads", text))
    if (bandwidth := latency.bandwidth) is not None:
        found.append(("MBU is relative to", _bandwidth(bandwidth)))
    if (compute := latency.compute) is not None and compute.operations_per_second:
        rates = [f"{dtype} {_rate(rate)}" for dtype, rate in compute.operations_per_second.items()]
        counted = "" if footprint.multiply_adds_per_token is not None else "; not counted: older build"
        found.append(
            ("MFU is relative to", f"{compute.dtype}; measured: {', '.join(rates)} ({compute.probe}){counted}")
        )
    if (sheet := latency.data_sheet) is not None:
        parts = [] if sheet.bytes_per_second is None else [f"{units.size(sheet.bytes_per_second)}/s"]
        parts += [f"{dtype} {_rate(rate)}" for dtype, rate in sheet.operations_per_second.items()]
        found.append(("data sheet", f"{sheet.target}: {', '.join(parts)} ({sheet.source})"))
    if latency.slo is not None:
        whole = "a batch" if latency.encodes else "end to end"
        bounds = {"TTFT": latency.slo.ttft_ms, "TPOT": latency.slo.tpot_ms, whole: latency.slo.latency_ms}
        found.append(("SLO", ", ".join(f"{name} ≤ {bound:g} ms" for name, bound in bounds.items() if bound)))
    if latency.price is not None:
        found.append(
            ("price", f"${latency.price.usd_per_hour:g} per hour, {latency.price.date} ({latency.price.source})")
        )
    if (noise := latency.noise) is not None:
        found.append(("machine noise", _noise(latency, noise)))
    sample = Measured(latency=latency)
    filled = len(latency.points) > len(latency.single) or bool(latency.workloads)
    metrics: list[RunMetric | BestMetric] = [*catalog.of_kind(RunMetric)]
    metrics += catalog.of_kind(BestMetric) if filled else ()
    for metric in metrics:
        estimate = metric.estimate(sample)
        if estimate is not None and metric is not latency_metrics.NOISE:
            write = metric.unit.write
            found.append(
                (metric.title, f"{write(estimate.value)} ({units.interval(estimate, write)}); {metric.meaning}")
            )
    ours = f"{latency.artifact}; loaded in {units.ms(latency.artifact_load_ms)}"
    found.append(("artifact", ours))
    if latency.baseline is not None and latency.baseline_load_ms is not None:
        found.append(("baseline", f"{latency.baseline}; loaded in {units.ms(latency.baseline_load_ms)}"))
    return found


def _bandwidth(found: Bandwidth) -> str:
    """Say what was read how fast; where both rates are one, a device copied its memory, without threads and caches."""
    rate = f"{units.size(found.working_set_bytes_per_second)}/s"
    if found.working_set_bytes_per_second == found.dram_bytes_per_second:
        return f"{rate} ({found.probe})"
    return (
        f"{rate} ({found.probe}, {_counted([found.threads], 'thread')}, a working set of "
        f"{units.size(found.working_set_bytes)}; beyond all caches {units.size(found.dram_bytes_per_second)}/s)"
    )


def _rate(operations_per_second: float) -> str:
    return f"{units.significant(operations_per_second / 1e12)} TOP/s"


def _noise(latency: Latency, noise: Noise) -> str:
    """Say what else the machine did."""
    parts = []
    if (estimate := latency_metrics.NOISE.estimate(Measured(latency=latency))) is not None:
        middle, slow = (units.ms(value) for value in (median(noise.probe_ms), max(noise.probe_ms)))
        parts.append(f"{units.percent(estimate.value)}: a fixed computation took {middle} (median), {slow} at most")
    if noise.load_average is not None:
        parts.append(f"load average {noise.load_average:.1f} at the start")
    if noise.stolen_share is not None:
        parts.append(f"{units.percent(noise.stolen_share)} of CPU time taken by other virtual machines")
    if noise.waits is not None:
        parts.append(f"{units.count(noise.waits)} involuntary context switches")
    return "; ".join(parts) or "not measured"


def stage_memory(build: BuildRecord) -> bool:
    """Say if the peak memory of stages was measured."""
    return any(stage.peak_rss_bytes is not None for stage in build.stages)


def reused(build: BuildRecord) -> str:
    """Say what a build took from the cache; "" where it computed everything."""
    found = build.reused
    titles = {
        "trace": "trace",
        "trace-proof": "proof of the trace",
        "engine": "proof of the engine",
        "baseline": "logits of the baseline",
    }
    parts = [titles[stage] for stage in found.stages]
    if found.layers:
        word = "layer" if len(found.layers) == 1 else "layers"
        parts.append(f"calibration of {word} {units.ranges(found.layers)}")
    if found.passes:
        parts.append(f"{'pass' if len(found.passes) == 1 else 'passes'} {', '.join(found.passes)}")
    return "; ".join(parts)


def grouped(places: Sequence[Rewritten] | Sequence[Skipped]) -> dict[str, list[str]]:
    """List the nodes of what a pass did, or why it did not, at several of them; in the order of the first of each."""
    groups: dict[str, list[str]] = {}
    for place in places:
        groups.setdefault(place.what if isinstance(place, Rewritten) else place.reason, []).append(place.node)
    return groups
