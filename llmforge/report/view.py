"""What a person looks for first in a report, the same in every form: how the gates ended, size, quality, speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmforge.evaluation.gates import Verdict
from llmforge.evaluation.latency import Latency
from llmforge.evaluation.metrics import Estimate
from llmforge.evaluation.quality import DocumentSums, Quality
from llmforge.lowering.pass_base import Rewritten, Skipped
from llmforge.report import figures
from llmforge.report.model import Report


@dataclass(frozen=True)
class KeyFigure:
    """One of the figures at the top."""

    title: str
    value: str
    notes: tuple[str, ...]


def headline(report: Report) -> str:
    """Say how the gates ended, in a few words."""
    verdicts = [result.verdict for result in report.gates]
    if report.verdict is Verdict.NONE:
        return "Built; the recipe has no gates"
    if report.verdict is Verdict.PASS:
        return "The gate passed" if len(verdicts) == 1 else f"All {len(verdicts)} gates passed"
    unknown = "the engine was not run" if report.engine.unmeasured else "its data cannot tell"
    what = "failed" if report.verdict is Verdict.FAIL else f"undecided: {unknown}"
    return f"{verdicts.count(report.verdict)} of {len(verdicts)} gates {what}"


def key_figures(report: Report) -> list[KeyFigure]:
    """Pick the figures at the top; what was not measured is not there."""
    share = figures.percent(report.engine.size_bytes / report.checkpoint.size_bytes)
    bits = weight_bits(report)
    notes = (f"{share} of the checkpoint", *(() if bits is None else (f"{bits:.2f} bits a weight",)))
    return [
        KeyFigure("To build" if report.engine.pending else "Size", figures.size(report.engine.size_bytes), notes),
        *(_quality(report.quality) if report.quality else ()),
        *(_latency(report.latency) if report.latency else ()),
    ]


def unmeasured(report: Report) -> str:
    """Say why there are no figures."""
    return report.engine.unmeasured or "the recipe asks for none"


def weight_bits(report: Report) -> float | None:
    """Count the stored bits for each parameter of the checkpoint, scales and copies included; None without passes."""
    if not report.passes:
        return None
    return 8 * report.passes[-1].weight_bytes_after / report.checkpoint.parameters


def _quality(quality: Quality) -> Iterator[KeyFigure]:
    yield _estimate("kld_mean", quality.kld_mean, "nats a token")
    change = f"{quality.baseline_perplexity:.2f} → {quality.perplexity:.2f}"
    yield _estimate("perplexity_ratio", quality.perplexity_ratio, change)
    yield _estimate("top1_agreement", quality.top1_agreement, f"of {figures.count(quality.tokens)} tokens")


def _estimate(metric: str, estimate: Estimate, note: str) -> KeyFigure:
    text = figures.METRICS[metric]
    return KeyFigure(text.title, text.write(estimate.value), (note, figures.interval(estimate, text.write)))


def _latency(latency: Latency) -> Iterator[KeyFigure]:
    """Give TPOT after the shortest prompt and TTFT of the longest: where each matters."""
    short = min(latency.points, key=lambda point: point.prompt_tokens)
    long = max(latency.points, key=lambda point: point.prompt_tokens)
    rate = f"{figures.significant(short.artifact.tokens_per_second)} tokens/s, prompt of {short.prompt_tokens}"
    tpot, ttft = short.artifact.tpot_ms.p50.value, long.artifact.ttft_ms.p50.value
    yield KeyFigure("TPOT", figures.ms(tpot), (rate, *_against(short.tpot_speedup)))
    yield KeyFigure("TTFT", figures.ms(ttft), (f"prompt of {long.prompt_tokens}", *_against(long.ttft_speedup)))


def _against(speedup: Estimate | None) -> tuple[str, ...]:
    return () if speedup is None else (f"{figures.times(speedup.value)} the baseline's speed",)


def moved_most(quality: Quality, count: int = 5) -> list[DocumentSums]:
    """Find the documents with the highest mean KLD, highest first."""
    return sorted(quality.per_document, key=lambda document: -document.kld / document.tokens)[:count]


@dataclass(frozen=True)
class Places:
    """Nodes of which a pass says the same."""

    what: str
    nodes: tuple[str, ...]


def grouped(places: Sequence[Rewritten] | Sequence[Skipped]) -> list[Places]:
    """Put together what a pass did, or why it did not, at several nodes; in the order of the first of each."""
    groups: dict[str, list[str]] = {}
    for place in places:
        groups.setdefault(place.what if isinstance(place, Rewritten) else place.reason, []).append(place.node)
    return [Places(what, tuple(nodes)) for what, nodes in groups.items()]
