"""Intervals of quantiles and of shares."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmforge.metrics import document_quantiles
from llmforge.metrics.intervals import share_interval


def text(seed: int, documents: int, tokens: int = 60):
    """Make values of tokens, correlated in each document, and whose they are."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(tokens // 2, tokens * 2, documents)
    level = np.exp(rng.normal(0, 0.5, documents))
    owners = np.repeat(np.arange(documents), lengths)
    return rng.exponential(1, len(owners)) * level[owners], owners


def test_bounds_of_a_quantile_hold_it_as_often_as_they_say() -> None:
    truth = np.quantile(text(1, 20_000)[0], 0.9)
    held = 0
    for seed in range(100):
        values, owners = text(1000 + seed, 40)
        [(low, high)] = document_quantiles.bounds(values, owners, (0.9,)) or []
        held += low <= truth <= high
    assert 88 <= held <= 100  # of 95; one in a thousand runs has fewer than 88


def test_a_quantile_with_few_tokens_beyond_has_no_bound_there() -> None:
    values, owners = text(0, 20, 20)
    assert len(values) < 1000
    low, middle, high = document_quantiles.bounds(values, owners, (0.001, 0.5, 0.999)) or []
    assert low[0] == -math.inf
    assert math.isfinite(low[1])
    assert all(map(math.isfinite, middle))
    assert high[1] == math.inf
    assert math.isfinite(high[0])


def test_a_bound_is_the_smallest_value_whose_share_beyond_is_small_enough() -> None:
    """And tokens of three documents alone bound nothing, however many there are."""
    values, owners = text(3, 30, 200)
    [(low, high)] = document_quantiles.bounds(values, owners, (0.9,)) or []
    tokens = document_quantiles.OwnedTokens(values, owners)
    rank = int(np.searchsorted(tokens.ordered, high)) + 1
    assert tokens._holds(rank, 0.9)
    assert not tokens._holds(rank - 1, 0.9)
    assert low < np.quantile(values, 0.9) < high
    few = np.where(owners < 3, values + 100, values)
    [(_, bound)] = document_quantiles.bounds(few, owners, (0.98,)) or []
    assert bound == math.inf


def test_few_documents_have_no_bounds() -> None:
    assert document_quantiles.bounds(*text(0, 7), (0.5,)) is None


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


def test_bounds_of_a_difference_of_quantiles_hold_it_as_often_as_they_say() -> None:
    """Two sides that share what makes a document hard; unpaired bounds of the same are several times as wide."""

    def both(seed: int, documents: int):
        theirs, owners = text(seed, documents)
        return theirs * np.random.default_rng(seed).lognormal(0.05, 0.3, len(theirs)), theirs, owners

    ours, theirs, _ = both(1, 20_000)
    truth = np.quantile(ours, 0.9) - np.quantile(theirs, 0.9)
    held, ratios = 0, []
    for seed in range(150):
        ours, theirs, owners = both(1000 + seed, 40)
        [(low, high)] = document_quantiles.difference_bounds(ours, theirs, owners, (0.9,)) or []
        held += low <= truth <= high
        if seed < 10:
            sides = [(document_quantiles.bounds(side, owners, (0.9,)) or [])[0] for side in (ours, theirs)]
            ratios.append(math.hypot(*(upper - lower for lower, upper in sides)) / (high - low))
    assert 134 <= held <= 150  # of 142.5; one in a thousand runs has fewer than 134
    assert np.median(ratios) > 2


def test_a_difference_of_quantiles_needs_documents_and_tokens_beyond() -> None:
    values, owners = text(0, 10, 20)
    assert document_quantiles.difference_bounds(values, values, owners, (0.5,)) == [(0.0, 0.0)]
    [first, last] = document_quantiles.difference_bounds(values, values, owners, (0.001, 0.999)) or []
    assert first == last == (-math.inf, math.inf)
    assert document_quantiles.difference_bounds(*[text(0, 7)[0]] * 2, text(0, 7)[1], (0.5,)) is None
