"""Limits that what was measured would keep: behind the interval, judged again, and none where there is too little."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from llmforge.gates import relaxed
from llmforge.gates.decision import GateResult, Verdict, judge
from llmforge.metrics.intervals import Estimate
from llmforge.recipe import GateSpec

from ..samples import reports

MEASURED = {
    "kld_mean": Estimate(value=0.04, low=0.035, high=0.05, samples=50),  # fails
    "perplexity_ratio": Estimate(value=1.01, low=1.0, high=1.03, samples=50),  # undecided
    "top1_agreement": Estimate(value=0.8, low=0.78, high=0.82, samples=50),  # fails from below
    "kld_p99": Estimate(value=0.9, low=None, high=None, samples=3),  # of too few documents
    "size_bytes": Estimate.exact(123_456),
}
SPECS = {
    "kld_mean": GateSpec(max=0.03),
    "perplexity_ratio": GateSpec(max=1.02),
    "top1_agreement": GateSpec(min=0.9),
    "kld_p99": GateSpec(max=0.5),
    "size_bytes": GateSpec(max=100_000),
    "top5_agreement": GateSpec(min=0.9),  # not measured
}


def decide(specs: Mapping[str, GateSpec]) -> Sequence[GateResult]:
    return judge(specs, MEASURED)


def test_moved_limits_pass_and_the_rest_is_left_out() -> None:
    moved = relaxed.gates(SPECS, decide(SPECS), decide)
    assert moved.keys() == {"kld_mean", "perplexity_ratio", "top1_agreement", "size_bytes"}
    assert {each.verdict for each in decide({**SPECS, **moved}) if each.metric in moved} == {Verdict.PASS}
    assert relaxed.settings(SPECS, moved) == (
        "gates.kld_mean.max=0.0525",
        "gates.perplexity_ratio.max=1.035",
        "gates.top1_agreement.min=0.775",
        "gates.size_bytes.max=123500",
    )


def test_a_gate_that_passes_stays_as_it_is() -> None:
    specs = {"kld_mean": GateSpec(max=0.06)}
    assert relaxed.gates(specs, decide(specs), decide) == {}


def test_the_ways_out_of_a_verdict() -> None:
    report = reports.make()
    undecided, failed = report.gates[1], report.gates[2]
    assert (undecided.verdict, failed.verdict) == (Verdict.INCONCLUSIVE, Verdict.FAIL)
    measure, accept = relaxed.ways(report, "tiny/4f1c")
    assert measure == "measure more documents: llmforge gate tiny/4f1c --until-decided --text MORE.jsonl"
    assert accept.startswith("accept what was measured: build with --set gates.")
    assert f"--set gates.{failed.metric}.max=" in accept
    assert relaxed.ways(report.model_copy(update={"gates": report.gates[:1]}), "tiny/4f1c") == ()


@pytest.mark.parametrize(
    ("value", "digits", "up", "down"),
    [(0.0534, 2, 0.054, 0.053), (0.05, 2, 0.05, 0.05), (123_456, 4, 123_500, 123_400), (-0.0534, 2, -0.053, -0.054)],
)
def test_rounded_outward(value: float, digits: int, up: float, down: float) -> None:
    assert relaxed.rounded_outward(value, digits, upper=True) == up
    assert relaxed.rounded_outward(value, digits, upper=False) == down


@pytest.mark.parametrize("kld", [1e-6, 0.0534, 0.00613, 2.0])
def test_a_budget_has_a_margin_and_two_digits(kld: float) -> None:
    budget = relaxed.budget(kld)
    assert 1.1 * kld <= budget * (1 + 1e-9) <= 1.21 * kld
    assert float(f"{budget:.2g}") == budget
    assert math.isfinite(budget)
