"""Gates on 2,000 simulated releases each, whose documents are drawn from real ones: how often they err, and decide."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from llmforge.gates.decision import ALPHA, Earlier, Verdict, judge, overall, schedule
from llmforge.metrics import catalog, document_figures
from llmforge.metrics.quality import OfSums
from llmforge.metrics.studentized import Studentized, studentized
from llmforge.metrics.tokens import Floats
from llmforge.recipe import GateSpec

from ..samples import releases

RELEASES = 2000
ERROR = 3 * math.sqrt(ALPHA * (1 - ALPHA) / RELEASES)  # Monte Carlo


class Population:
    """A figure of ours less theirs, over drawn documents; `shift` is added to ours, a token."""

    def __init__(self, name: str, *, shift: float = 0.0, both: bool = True) -> None:
        form = catalog.deciding()[name].form  # type: ignore[union-attr]
        assert isinstance(form, OfSums)
        left, right = (document_figures._columns(form, releases.documents(side)) for side in ("rtn", "gptq"))
        left = left.copy()
        left[:, -1] += shift * left[:, 0]
        width = left.shape[1]
        self.sums = np.concatenate([left, right], 1)

        def difference(totals: Floats) -> Floats:
            ours, theirs = totals[:, :width], totals[:, width:]
            return (document_figures._figures(form, ours) - document_figures._figures(form, theirs))[:, None]

        self.statistic: Callable[[Floats], Floats] = difference
        if not both:
            self.sums, self.statistic = left, lambda totals: document_figures._figures(form, totals)[:, None]
        self.truth = float(self.statistic(self.sums.sum(0, keepdims=True))[0, 0])

    def of(self, places: np.ndarray) -> Studentized:
        return studentized(self.sums[places], self.statistic)[0]


def passes(gates: dict[str, GateSpec], differences: dict[str, Studentized], **more: dict[str, Studentized]) -> Verdict:
    return overall(judge(gates, {}, earlier=Earlier("tiny/0", differences, {}), **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "bound"), [("kld_mean", "rise_max"), ("top1_agreement", "drop_max")])
def test_a_release_at_the_margin_passes_and_fails_by_chance_alone(name: str, bound: str) -> None:
    population = Population(name)
    gates = {name: GateSpec.model_validate({bound: abs(population.truth)})}
    verdicts = [passes(gates, {name: population.of(places)}) for places in releases.drawn(RELEASES, 40)]
    assert 0 < verdicts.count(Verdict.PASS) / RELEASES <= ALPHA + ERROR
    assert 0 < verdicts.count(Verdict.FAIL) / RELEASES <= ALPHA + ERROR


@pytest.mark.thorough
def test_five_gates_pass_wrongly_no_more_often_than_one_and_fail_no_more_often() -> None:
    moved = {name: Population(name) for name in ("kld_mean", "perplexity_ratio", "top1_agreement")}
    alone = {name: Population(name, both=False) for name in ("kld_mean", "perplexity_ratio")}
    at = {name: abs(population.truth) for name, population in moved.items()}
    wide = {  # one at the margin, four held
        "kld_mean": GateSpec(rise_max=at["kld_mean"], max=2 * alone["kld_mean"].truth),
        "perplexity_ratio": GateSpec(rise_max=2 * at["perplexity_ratio"], max=1.1),
        "top1_agreement": GateSpec(drop_max=2 * at["top1_agreement"]),
    }
    tight = {  # all five at the margin
        "kld_mean": GateSpec(rise_max=at["kld_mean"], max=alone["kld_mean"].truth),
        "perplexity_ratio": GateSpec(rise_max=at["perplexity_ratio"], max=alone["perplexity_ratio"].truth),
        "top1_agreement": GateSpec(drop_max=at["top1_agreement"]),
    }
    passed, failed = 0, 0
    for places in releases.drawn(RELEASES, 40):
        differences = {name: population.of(places) for name, population in moved.items()}
        studentized = {name: population.of(places) for name, population in alone.items()}
        passed += passes(wide, differences, studentized=studentized) is Verdict.PASS
        failed += passes(tight, differences, studentized=studentized) is Verdict.FAIL
    assert 0 < passed / RELEASES <= ALPHA + ERROR
    assert 0 < failed / RELEASES <= ALPHA + ERROR  # with no correction it would be several times as often


@pytest.mark.thorough
def test_looking_again_and_again_costs_no_validity() -> None:
    population = Population("kld_mean")
    gates = {"kld_mean": GateSpec(rise_max=population.truth)}
    looks = list(schedule(10, 80))
    assert [size for size, _ in looks] == [10, 20, 40, 80]
    assert sum(alpha for _, alpha in looks) == pytest.approx(ALPHA)
    passed = naive = 0
    for places in releases.drawn(RELEASES, 80):
        found = [(population.of(places[:size]), alpha) for size, alpha in looks]
        ends = (
            overall(judge(gates, {}, earlier=Earlier("tiny/0", {"kld_mean": each}, {}), alpha=alpha))
            for each, alpha in found
        )
        passed += next((end for end in ends if end is not Verdict.INCONCLUSIVE), None) is Verdict.PASS
        naive += any(each.p_below(population.truth) <= ALPHA for each, _ in found)
    assert 0 < passed / RELEASES <= ALPHA + ERROR
    assert naive / RELEASES > ALPHA + ERROR  # looks that are not paid for err more often


def test_looks_begin_where_something_can_be_decided() -> None:
    assert list(schedule(3, 8)) == [(8, ALPHA)]
    assert [size for size, _ in schedule(3, 20)] == [8, 16, 20]
    assert [size for size, _ in schedule(40, 40)] == [40]


def test_power_without_a_difference_is_what_the_report_says() -> None:
    truth = Population("kld_mean").truth
    population = Population("kld_mean", shift=-truth)
    assert population.truth == pytest.approx(0, abs=1e-12)
    margin = population.of(np.arange(56)).detectable(ALPHA, 0.8, upper=True) * math.sqrt(56 / 40)
    said, passed = [], 0
    for places in releases.drawn(RELEASES, 40):
        (result,) = judge(
            {"kld_mean": GateSpec(rise_max=margin)},
            {},
            earlier=Earlier("tiny/0", {"kld_mean": population.of(places)}, {}),
        )
        assert result.power is not None
        said.append(result.power)
        passed += result.verdict is Verdict.PASS
    assert passed / RELEASES == pytest.approx(np.mean(said), abs=0.05)
    assert 0.7 < passed / RELEASES < 0.9


def test_an_unpaired_test_needs_several_times_the_documents() -> None:
    """Each side on documents of its own: the variances add up, and what documents share is not cancelled."""
    left, right = (
        np.array([(each.tokens, each.figures["nll"]) for each in releases.documents(side)]) for side in ("rtn", "gptq")
    )
    left[:, 1] -= left[:, 0] * (left[:, 1].sum() - right[:, 1].sum()) / left[:, 0].sum()  # no difference

    def statistic(totals: Floats) -> Floats:
        return (totals[:, 1] / totals[:, 0] - totals[:, 3] / totals[:, 2])[:, None]

    def measure(ours: np.ndarray, theirs: np.ndarray) -> Studentized:
        return studentized(np.concatenate([left[ours], right[theirs]], 1), statistic)[0]

    everything = np.arange(56)
    margin = measure(everything, everything).detectable(ALPHA, 0.8, upper=True)
    rng, count = np.random.default_rng(1), 200

    def power(size: int, *, paired: bool) -> float:
        found = [
            measure(places, places if paired else rng.integers(0, 56, size)) for places in releases.drawn(count, size)
        ]
        return sum(each.p_below(margin) <= ALPHA for each in found) / count

    assert power(56, paired=True) > 0.7
    assert power(8 * 56, paired=False) < 0.2
    # Of KLD, which each side has of the same baseline already, two to three times as many.
    kld = catalog.deciding()["kld_mean"].form  # type: ignore[union-attr]
    assert isinstance(kld, OfSums)
    sides = [releases.documents(side) for side in ("rtn", "gptq")]
    apart = sum(document_figures.figure(kld, side).error ** 2 for side in sides)
    assert 2 < apart / document_figures.difference(kld, *sides).error ** 2 < 3
