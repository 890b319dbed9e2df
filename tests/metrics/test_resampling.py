"""Resampled figures and paired differences: against numpy by hand, and on resampled real documents."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmforge.metrics import catalog, resampling
from llmforge.metrics.quality import DocumentSums, OfSums
from llmforge.metrics.resampling import Resampled

from .. import releases


def form(name: str) -> OfSums:
    found = catalog.deciding()[name].form  # type: ignore[union-attr]
    assert isinstance(found, OfSums)
    return found


def test_a_difference_is_the_jackknife_of_totals() -> None:
    ours, theirs = releases.documents("rtn"), releases.documents("gptq")
    found = resampling.difference(form("kld_mean"), ours, theirs, seed=0)
    tokens = np.array([each.tokens for each in ours])
    left, right = (np.array([each.figures["kld"] for each in side]) for side in (ours, theirs))
    moved = left - right
    assert found.value == pytest.approx(moved.sum() / tokens.sum(), rel=1e-12)
    without = (moved.sum() - moved) / (tokens.sum() - tokens)
    n = len(tokens)
    assert found.error == pytest.approx(math.sqrt((n - 1) / n * np.square(without - without.mean()).sum()), rel=1e-9)
    assert found.documents == n == 56


def test_quantiles_of_student_are_those_of_tables() -> None:
    levels = np.array([0.95, 0.975, 0.995, 0.025, 0.5])
    for freedom, wanted in {
        1: (6.314, 12.706, 63.657),
        2: (2.920, 4.303, 9.925),
        7: (1.895, 2.365, 3.499),
        30: (1.697, 2.042, 2.750),
    }.items():
        found = resampling.student_quantiles(levels, freedom)
        assert found[:3] == pytest.approx(wanted, abs=6e-4)
        assert found[3] == pytest.approx(-found[1])
        assert found[4] == pytest.approx(0, abs=1e-3)


def test_equal_artifacts_differ_by_nothing() -> None:
    ours = releases.documents("gptq")
    for name in ("kld_mean", "perplexity_ratio", "top1_agreement"):
        found = resampling.difference(form(name), ours, ours, seed=0)
        assert (found.value, found.error, found.interval(0.025)) == (0, 0, (0, 0))
        assert found.p_below(1e-9) < 0.001
        assert found.p_below(0) >= 0.5
        assert (found.power(1e-9, 0.025), found.detectable(0.025, 0.8)) == (1, 0)


def test_bounds_and_p_values_agree() -> None:
    found = resampling.difference(form("kld_mean"), releases.documents("rtn"), releases.documents("gptq"), seed=0)
    low, high = found.interval(0.025)
    assert low < found.value < high
    for limit in (high * 1.01, high * 0.99):
        assert (found.p_below(limit) <= 0.025) == (limit > high)
    for limit in (low * 1.01, low * 0.99):
        assert (found.p_above(limit) <= 0.025) == (limit < low)


def test_few_documents_decide_nothing_and_name_a_number() -> None:
    ours, theirs = releases.documents("rtn"), releases.documents("gptq")
    three = resampling.difference(form("kld_mean"), ours[:3], theirs[:3], seed=0)
    assert not three.decides
    needed = three.documents_needed(0.01, 0.025, 0.8)
    assert needed is not None
    assert needed >= 8
    one = resampling.difference(form("kld_mean"), ours[:1], theirs[:1], seed=0)
    assert math.isnan(one.error)
    assert one.documents_needed(0.01, 0.025, 0.8) == 8
    on_it = Resampled(0.5, 0.1, 20, np.sort(np.random.default_rng(0).normal(size=999)))
    assert on_it.documents_needed(0.5, 0.025, 0.8) is None


def test_documents_are_paired_by_name_tokens_and_baseline() -> None:
    ours = releases.documents("rtn")
    theirs = list(reversed(releases.documents("gptq")))
    left, right = resampling.paired(ours, theirs)
    assert [each.document for each in left] == [each.document for each in right] == [each.document for each in ours]

    def edited(**changes: float) -> list[DocumentSums]:
        return [DocumentSums.model_validate({**theirs[0].model_dump(), **changes}), *theirs[1:]]

    lost = theirs[0].document
    for changes in ({"tokens": theirs[0].tokens + 1}, {"baseline_nll": theirs[0].figures["baseline_nll"] * 1.001}):
        left, right = resampling.paired(ours, edited(**changes))
        assert len(left) == len(right) == 55
        assert lost not in {each.document for each in left}
    with pytest.raises(ValueError, match="same documents"):
        resampling.difference(form("kld_mean"), ours, theirs, seed=0)
