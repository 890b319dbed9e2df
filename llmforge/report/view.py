"""What a person looks for first in a report, the same in every form: how the gates ended, size, quality, speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmforge.evaluate.latency import Latency
from llmforge.evaluate.quality import Quality
from llmforge.gates import Verdict
from llmforge.metrics import Estimate
from llmforge.report import figures
from llmforge.report.model import Report


@dataclass(frozen=True)
class KeyFigure:
    """One of the figures at the top."""

    title: str
    value: str
    note: str


def headline(report: Report) -> str:
    """Say how the gates ended, in a few words."""
    verdicts = [result.verdict for result in report.gates]
    if report.verdict is Verdict.NONE:
        return "Built; the recipe has no gates"
    if report.verdict is Verdict.PASS:
        return "The gate passed" if len(verdicts) == 1 else f"All {len(verdicts)} gates passed"
    what = "failed" if report.verdict is Verdict.FAIL else "undecided: its data cannot tell"
    return f"{verdicts.count(report.verdict)} of {len(verdicts)} gates {what}"


def key_figures(report: Report) -> list[KeyFigure]:
    """Pick the figures at the top; what was not measured is not there."""
    share = figures.percent(report.engine.size_bytes / report.checkpoint.size_bytes)
    bits = weight_bits(report)
    note = f"{share} of the checkpoint" + ("" if bits is None else f"; {bits:.2f} bits a weight")
    return [
        KeyFigure("Size", figures.size(report.engine.size_bytes), note),
        *(_quality(report.quality) if report.quality else ()),
        *(_latency(report.latency) if report.latency else ()),
    ]


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
    return KeyFigure(text.title, text.write(estimate.value), f"{note}; {figures.interval(estimate, text.write)}")


def _latency(latency: Latency) -> Iterator[KeyFigure]:
    """Give TPOT after the shortest prompt and TTFT of the longest: where each matters."""
    short = min(latency.points, key=lambda point: point.prompt_tokens)
    long = max(latency.points, key=lambda point: point.prompt_tokens)
    rate = f"{figures.significant(short.artifact.tokens_per_second)} tokens/s after {short.prompt_tokens}"
    yield KeyFigure("TPOT", figures.ms(short.artifact.tpot_ms.p50.value), rate + _against(short.tpot_speedup))
    prompt = f"prompt of {long.prompt_tokens} tokens"
    yield KeyFigure("TTFT", figures.ms(long.artifact.ttft_ms.p50.value), prompt + _against(long.ttft_speedup))


def _against(speedup: Estimate | None) -> str:
    return "" if speedup is None else f"; {figures.times(speedup.value)} the baseline's speed"
