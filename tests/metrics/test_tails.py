"""Intervals of quantiles and of shares."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmforge.metrics import intervals
from llmforge.metrics.intervals import bootstrap, bootstrap_means, bootstrap_quantiles, resample, share_interval


def text(seed: int, documents: int, tokens: int = 60):
    """Make values of tokens, correlated in each document, and whose they are."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(tokens // 2, tokens * 2, documents)
    level = np.exp(rng.normal(0, 0.5, documents))
    owners = np.repeat(np.arange(documents), lengths)
    return rng.exponential(1, len(owners)) * level[owners], owners


def test_resamples_are_the_draws_of_documents() -> None:
    drawn = np.concatenate(list(resample(9, seed=4, resamples=50)))
    draws = np.random.default_rng(4).integers(0, 9, (50, 9))
    assert drawn.tolist() == [np.bincount(row, minlength=9).tolist() for row in draws]


@pytest.mark.parametrize("seed", range(3))
def test_bounds_equal_quantiles_of_resampled_tokens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each resample spelled out: its tokens in a list, sorted, and the first one that the share reaches."""
    monkeypatch.setattr(intervals, "RESAMPLES", 400)
    monkeypatch.setattr(intervals.resample, "__kwdefaults__", {"resamples": 400})
    values, owners = text(seed, 12)
    shares = (0.1, 0.5, 0.9)
    found = bootstrap_quantiles(values, owners, shares, seed=seed)
    assert found is not None
    by_document = [values[owners == document] for document in range(12)]
    made: dict[float, list[float]] = {share: [] for share in shares}
    for row in np.random.default_rng(seed).integers(0, 12, (400, 12)):
        tokens = np.sort(np.concatenate([by_document[document] for document in row]))
        for share in shares:
            made[share].append(float(tokens[math.ceil(share * len(tokens) - 1e-9) - 1]))
    tail = intervals._expanded_tail(12)
    for share, (low, high) in zip(shares, found, strict=True):
        ordered = sorted(made[share])
        assert low == ordered[math.ceil(tail * 400) - 1]
        assert high == ordered[math.ceil((1 - tail) * 400) - 1]


def test_bounds_of_a_quantile_hold_it_as_often_as_they_say() -> None:
    truth = np.quantile(text(1, 20_000)[0], 0.9)
    held = 0
    for seed in range(100):
        values, owners = text(1000 + seed, 40)
        [(low, high)] = bootstrap_quantiles(values, owners, (0.9,), seed=0) or []
        held += low <= truth <= high
    assert 88 <= held <= 100  # of 95; one in a thousand runs has fewer than 88


def test_a_quantile_with_few_tokens_beyond_has_no_bound_there() -> None:
    values, owners = text(0, 10, 20)
    assert len(values) < 1000
    low, middle, high = bootstrap_quantiles(values, owners, (0.001, 0.5, 0.999), seed=0) or []
    assert low[0] == -math.inf
    assert math.isfinite(low[1])
    assert all(map(math.isfinite, middle))
    assert high[1] == math.inf
    assert math.isfinite(high[0])


def test_few_documents_have_no_bounds() -> None:
    assert bootstrap_quantiles(*text(0, 7), (0.5,), seed=0) is None
    assert bootstrap_means(np.ones((7, 2)), np.ones((7, 2)), seed=0) == [None, None]


def test_means_are_bounded_like_a_ratio_of_sums() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 50, (15, 1)).astype(float)
    sums = counts * rng.normal(1, 0.2, (15, 1))
    (found,) = bootstrap_means(sums, counts, seed=3)
    expected = bootstrap(np.hstack([sums, counts]), lambda totals: totals[:, :1] / totals[:, 1:], seed=3)
    assert expected is not None
    assert found == pytest.approx(tuple(expected[0]))


def test_a_mean_of_few_documents_has_no_bounds_and_spoils_no_other() -> None:
    counts = np.ones((12, 2))
    counts[5:, 1] = 0
    first, second = bootstrap_means(counts * np.arange(12)[:, None], counts, seed=0)
    assert second is None
    assert first is not None
    assert first[0] < 5.5 < first[1]


@pytest.mark.parametrize(
    ("found", "samples", "low", "high"),
    [  # Clopper and Pearson's, as in R's binom.test
        (0, 10, 0.0, 0.3084971),
        (10, 10, 0.6915029, 1.0),
        (9, 12, 0.4281415, 0.9451394),
        (1, 3, 0.0084038, 0.9057007),
    ],
)
def test_a_share_is_bounded_exactly(found: int, samples: int, low: float, high: float) -> None:
    assert share_interval(found, samples) == pytest.approx((low, high), abs=1e-6)


@given(samples=st.integers(1, 200), share=st.floats(0, 1))
def test_bounds_of_a_share_hold_it(samples: int, share: float) -> None:
    found = round(share * samples)
    low, high = share_interval(found, samples)
    assert 0 <= low <= found / samples <= high <= 1
    assert high - low > 0.5 / samples


@pytest.mark.parametrize("seed", range(3))
def test_differences_of_quantiles_see_the_same_draws_on_both_sides(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each resample spelled out, on both sides: what the grid gives is within a sixteenth of a standard error."""
    monkeypatch.setattr(intervals.resample, "__kwdefaults__", {"resamples": 400})
    theirs, owners = text(seed, 30)
    ours = theirs * np.random.default_rng(seed).uniform(0.9, 1.3, len(theirs))
    found = intervals.bootstrap_quantile_differences(ours, theirs, owners, (0.5, 0.9), seed=seed)
    assert found is not None
    made: dict[float, list[float]] = {0.5: [], 0.9: []}
    for row in np.random.default_rng(seed).integers(0, 30, (400, 30)):
        places = np.concatenate([np.flatnonzero(owners == document) for document in row])
        for share, moved in made.items():
            moved.append(float(np.quantile(ours[places], share) - np.quantile(theirs[places], share)))
    tail = intervals._expanded_tail(30)
    for (share, moved), bounds in zip(made.items(), found, strict=True):
        expected = np.quantile(moved, (tail, 1 - tail))
        assert np.abs(np.array(bounds) - expected).max() < 0.15 * np.std(moved), share


def test_bounds_of_a_difference_of_quantiles_hold_it_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sides that share what makes a document hard; unpaired bounds of the same are several times as wide."""
    monkeypatch.setattr(intervals.resample, "__kwdefaults__", {"resamples": 1000})

    def both(seed: int, documents: int):
        theirs, owners = text(seed, documents)
        return theirs * np.random.default_rng(seed).lognormal(0.05, 0.3, len(theirs)), theirs, owners

    ours, theirs, _ = both(1, 20_000)
    truth = np.quantile(ours, 0.9) - np.quantile(theirs, 0.9)
    held, ratios = 0, []
    for seed in range(150):
        ours, theirs, owners = both(1000 + seed, 40)
        [(low, high)] = intervals.bootstrap_quantile_differences(ours, theirs, owners, (0.9,), seed=0) or []
        held += low <= truth <= high
        if seed < 10:
            sides = [(bootstrap_quantiles(side, owners, (0.9,), seed=0) or [])[0] for side in (ours, theirs)]
            ratios.append(math.hypot(*(upper - lower for lower, upper in sides)) / (high - low))
    assert 134 <= held <= 150  # of 142.5; one in a thousand runs has fewer than 134
    assert np.median(ratios) > 2


def test_a_difference_of_quantiles_needs_documents_and_tokens_beyond() -> None:
    values, owners = text(0, 10, 20)
    assert intervals.bootstrap_quantile_differences(values, values, owners, (0.5,), seed=0) == [(0.0, 0.0)]
    [first, last] = intervals.bootstrap_quantile_differences(values, values, owners, (0.001, 0.999), seed=0) or []
    assert first == last == (-math.inf, math.inf)
    assert intervals.bootstrap_quantile_differences(*[text(0, 7)[0]] * 2, text(0, 7)[1], (0.5,), seed=0) is None
