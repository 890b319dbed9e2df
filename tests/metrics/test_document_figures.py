"""Figures of documents and their paired differences: against numpy by hand, and on real documents."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from llmforge.metrics import catalog, document_figures
from llmforge.metrics.quality import DocumentSums, OfSums
from llmforge.metrics.studentized import Studentized, bounds, means, studentized

from ..samples import releases


def form(name: str) -> OfSums:
    found = catalog.deciding()[name].form  # type: ignore[union-attr]
    assert isinstance(found, OfSums)
    return found


def test_a_difference_is_the_jackknife_of_totals() -> None:
    ours, theirs = releases.documents("rtn"), releases.documents("gptq")
    found = document_figures.difference(form("kld_mean"), ours, theirs)
    tokens = np.array([each.tokens for each in ours])
    left, right = (np.array([each.figures["kld"] for each in side]) for side in (ours, theirs))
    moved = left - right
    assert found.value == pytest.approx(moved.sum() / tokens.sum(), rel=1e-12)
    without = (moved.sum() - moved) / (tokens.sum() - tokens)
    n = len(tokens)
    assert found.error == pytest.approx(math.sqrt((n - 1) / n * np.square(without - without.mean()).sum()), rel=1e-9)
    assert found.documents == n == 56
    assert found.effective == pytest.approx(tokens.sum() ** 2 / (tokens**2).sum())


def test_equal_artifacts_differ_by_nothing() -> None:
    ours = releases.documents("gptq")
    for name in ("kld_mean", "perplexity_ratio", "top1_agreement"):
        found = document_figures.difference(form(name), ours, ours)
        assert (found.value, found.error, found.interval(0.025)) == (0, 0, (0, 0))
        assert found.p_below(1e-9) < 0.001
        assert found.p_below(0) >= 0.5
        assert (found.power(1e-9, 0.025, upper=True), found.detectable(0.025, 0.8, upper=True)) == (1, 0)


def test_bounds_and_p_values_agree() -> None:
    found = document_figures.difference(form("kld_mean"), releases.documents("rtn"), releases.documents("gptq"))
    low, high = found.interval(0.025)
    assert low < found.value < high
    for limit in (high * 1.01, high * 0.99):
        assert (found.p_below(limit) <= 0.025) == (limit > high)
    for limit in (low * 1.01, low * 0.99):
        assert (found.p_above(limit) <= 0.025) == (limit < low)


def test_few_documents_decide_nothing_and_name_a_number() -> None:
    ours, theirs = releases.documents("rtn"), releases.documents("gptq")
    three = document_figures.difference(form("kld_mean"), ours[:3], theirs[:3])
    assert not three.decides
    needed = three.documents_needed(0.01, 0.025, 0.8)
    assert needed is not None
    assert needed >= 8
    one = document_figures.difference(form("kld_mean"), ours[:1], theirs[:1])
    assert math.isnan(one.error)
    assert one.documents_needed(0.01, 0.025, 0.8) == 8
    on_it = Studentized(0.5, 0.1, 20, 20.0, 0.1)
    assert on_it.documents_needed(0.5, 0.025, 0.8) is None


def test_documents_are_paired_by_name_tokens_and_baseline() -> None:
    ours = releases.documents("rtn")
    theirs = list(reversed(releases.documents("gptq")))
    left, right = document_figures.paired(ours, theirs)
    assert [each.document for each in left] == [each.document for each in right] == [each.document for each in ours]

    def edited(**changes: float) -> list[DocumentSums]:
        return [DocumentSums.model_validate({**theirs[0].model_dump(), **changes}), *theirs[1:]]

    lost = theirs[0].document
    for changes in ({"tokens": theirs[0].tokens + 1}, {"baseline_nll": theirs[0].figures["baseline_nll"] * 1.001}):
        left, right = document_figures.paired(ours, edited(**changes))
        assert len(left) == len(right) == 55
        assert lost not in {each.document for each in left}
    with pytest.raises(ValueError, match="same documents"):
        document_figures.difference(form("kld_mean"), ours, theirs)


def test_bounds_reach_further_towards_where_few_documents_pull() -> None:
    rng = np.random.default_rng(0)
    tokens = np.full(20, 100.0)
    skewed = np.stack([tokens, tokens * rng.exponential(size=20)], 1)
    (up,), (down,) = (
        studentized(skewed, lambda totals, sign=sign: sign * totals[:, 1:] / totals[:, :1]) for sign in (1, -1)
    )
    assert up.skewness == pytest.approx(-down.skewness)
    (low, high), mirrored = bounds(up), bounds(down)
    assert high - up.value > 1.5 * (up.value - low)
    assert mirrored == pytest.approx((-high, -low))
    uneven = np.stack([np.r_[np.full(19, 100.0), 2000.0], skewed[:, 1]], 1)
    (one,) = studentized(uneven, lambda totals: totals[:, 1:] / totals[:, :1])
    assert one.effective < 4


def test_means_are_bounded_like_a_ratio_of_sums_and_by_documents_that_have_tokens_of_them() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 50, (15, 2)).astype(float)
    counts[9:, 1] = 0
    sums = counts * rng.normal(1, 0.2, (15, 2))
    first, second = means(sums, counts)
    (alone,) = studentized(np.stack([counts[:, 0], sums[:, 0]], 1), lambda totals: totals[:, 1:] / totals[:, :1])
    assert first == alone
    assert (first.documents, second.documents) == (15, 9)
    assert second.value == pytest.approx(sums[:9, 1].sum() / counts[:9, 1].sum())
    assert bounds(means(sums[:7], counts[:7])[0]) is None


def test_the_named_number_of_documents_decides_four_times_in_five() -> None:
    """Documents of mean 1 and deviation 0.3, a little skewed, against a limit of 1.05: draw that many, and count."""
    rng = np.random.default_rng(0)

    def drawn(documents: int) -> Studentized:
        sums = np.stack([np.ones(documents), rng.gamma(11, 1 / 11, documents)], 1)
        return studentized(sums, lambda totals: totals[:, 1:] / totals[:, :1])[0]

    asked = [replace(drawn(60), value=1.0).documents_needed(1.05, 0.025, 0.8) for _ in range(20)]
    count = int(np.median([each for each in asked if each is not None]))
    assert 280 < count < 450  # with the error at its upper 80 % bound
    passed = sum(drawn(count).p_below(1.05) <= 0.025 for _ in range(300))
    assert 0.75 < passed / 300 < 0.95
