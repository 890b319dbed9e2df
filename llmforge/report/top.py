"""The first screen of the page: verdict, reasons, and the figures that count beside those of the version before."""

from __future__ import annotations

from dataclasses import dataclass

from llmforge.gates.comparison import Change, Previous
from llmforge.gates.decision import GateResult, Verdict
from llmforge.gates.records import Report
from llmforge.metrics import catalog, latency_metrics, units
from llmforge.metrics.metric import Measured
from llmforge.report import view
from llmforge.report.view import KeyFigure

NOISY = 0.25  # of a median: above, figures of latency come with a warning
_MOST_REASONS = 3  # that the verdict gives; the gates below give all


@dataclass(frozen=True)
class KeyTile:
    """A key figure, and that of the version before."""

    figure: KeyFigure
    before: str | None  # as written; None: there is none of the same load
    change: Change | None  # None: chance, or the machine, cannot be told from it

    @property
    def moved(self) -> tuple[str, str]:
        """Say how it moved since, as far as that is shown, and in which color a terminal says so."""
        if self.change is not None and self.change.worse:
            return "▼ worse than", "red"
        if self.change is not None and self.change.better:
            return "▲ better than", "green"
        return "", "dim"


@dataclass(frozen=True)
class Panel:
    """Key figures of one kind, and what all of them are of."""

    title: str
    of: str
    tiles: list[KeyTile]


def reasons(report: Report) -> list[str]:
    """Say why the verdict is what it is: what stands against it, or else what was gained and what it cost."""
    if report.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE):
        reasons = [f"{each[0].upper()}{each[1:]}." for each in report.excesses]
        reasons += [explained(gate) for gate in report.gates if gate.verdict is report.verdict]
        rest = len(reasons) - _MOST_REASONS
        return [*reasons[:_MOST_REASONS], *([f"And {rest} more, below."] if rest > 0 else [])]
    return [_gains(report)]


def warnings(report: Report) -> list[str]:
    """Say what speaks against the figures themselves."""
    found = []
    if report.engine.unmeasured is not None:
        found.append(f"the engine was not run: {report.engine.unmeasured}. What takes its device is unverified.")
    noise = latency_metrics.NOISE.estimate(Measured(latency=report.latency))
    if noise is not None and noise.value > NOISY:
        found.append(
            f"the machine was noisy while latency was measured: the slowest 5 % of one computation took "
            f"{noise.value:.0%} longer than usual."
        )
    return found


def explained(gate: GateResult) -> str:
    """Say what was measured and what the limit is, as the page writes figures; or what would decide it."""
    metric, measured = catalog.named(gate.metric), gate.measured
    if gate.verdict is not Verdict.FAIL or measured is None or gate.is_relative:  # what it is relative to is said there
        return metric.title + gate.explanation.removeprefix(gate.metric)
    value, interval = view.gate_figures(gate)
    bounds = "" if measured.is_exact else f" (95 % interval {interval})"
    return f"{metric.title} is {value}{bounds}; the limit is {view.gate_limit(gate)}."


def _gains(report: Report) -> str:
    """Say in a sentence how large, how fast and how good it is, as far as that was measured."""
    share = units.percent(report.engine.size_bytes / report.checkpoint.size_bytes)
    size = f"{share} of the checkpoint's size"
    parts = [f"an engine to be built from {size}" if report.engine.pending else size]
    if report.latency is not None:
        point = view.key_load(report.latency)
        faster = point.figures.get("batch_speedup" if point.encodes else "tpot_speedup")
        if faster is not None:
            doing = "encoding" if point.encodes else "decoding"
            parts.append(f"{units.times(view.value(faster))} the speed of the baseline in {doing}")
    if report.quality is not None:
        for name in ("perplexity_ratio", "top1_agreement"):
            if name in report.quality.figures:
                metric = catalog.named(name)
                parts.append(f"{metric.title.lower()} {metric.unit.write(report.quality.figures[name].value)}")
    return f"{', '.join(parts)}."


def panels(report: Report, previous: Previous | None) -> list[Panel]:
    """Lay out the key figures; what was not measured has no panel."""
    before = {} if previous is None else {figure.metric: figure for figure in view.key_figures(previous.report)}
    same_load = previous is not None and _load(previous.report) == _load(report)
    by_section: dict[str, list[KeyTile]] = {}
    for figure in view.key_figures(report):
        was = before.get(figure.metric) if figure.section != "latency" or same_load else None
        change = None if previous is None else previous.change(figure.metric)
        tile = KeyTile(figure, None if was is None else was.value, change)
        by_section.setdefault(figure.section, []).append(tile)
    return [Panel(*_titles(report, section), tiles) for section, tiles in by_section.items()]


def _load(report: Report) -> tuple[int, int, int] | None:
    if report.latency is None:
        return None
    point = view.key_load(report.latency)
    return point.batch, point.prompt_tokens, point.output_tokens


def _titles(report: Report, section: str) -> tuple[str, str]:
    if section == "size":
        return "On disk", "all files of the engine"
    if section == "quality":
        assert report.quality is not None
        return "Quality", f"{units.count(report.quality.documents)} documents, beside the checkpoint"
    assert report.latency is not None
    point = view.key_load(report.latency)
    one = "text" if point.encodes else "sequence"
    alone = f"one {one} at a time" if point.batch == 1 else f"{point.batch} {one}s at once"
    beside = "" if point.baseline is None else ", beside transformers"
    return "Speed", f"{alone}, medians{beside}"
