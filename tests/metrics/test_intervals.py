from __future__ import annotations

import numpy as np
import pytest

from llmforge.metrics import intervals


def test_bootstrap_resamples_documents_whole() -> None:
    """Against a naive loop over the same draws."""
    rng = np.random.default_rng(3)
    sums = np.stack([rng.integers(5, 50, 20), rng.normal(3, 1, 20)], axis=1)
    bounds = intervals.bootstrap(sums, lambda totals: totals[:, 1:] / totals[:, :1], seed=9, resamples=500)
    assert bounds is not None
    draws = np.random.default_rng(9).integers(0, 20, (500, 20))
    figures = [sum(sums[d, 1] for d in draw) / sum(sums[d, 0] for d in draw) for draw in draws]
    tail = intervals._expanded_tail(20)
    np.testing.assert_allclose(bounds[0], np.quantile(figures, (tail, 1 - tail)))


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """Means of 10 skewed documents: plain percentiles cover about 88 % here."""
    rng = np.random.default_rng(0)
    trials, hits = 400, 0
    for seed in range(trials):
        values = rng.gamma(4.0, 0.25, (10, 1))  # of mean 1
        bounds = intervals.bootstrap(values, lambda totals: totals / 10, seed=seed, resamples=1000)
        assert bounds is not None
        hits += bounds[0, 0] <= 1 <= bounds[0, 1]
    assert 0.92 <= hits / trials <= 0.98


def test_quantile_interval_is_the_tabulated_one() -> None:
    """Ranks of the tables of distribution-free intervals: 6 and 15 of 20; none below 6 samples."""
    assert intervals.quantile_interval(np.arange(1.0, 21.0)[::-1], 0.5) == (6.0, 15.0)
    assert intervals.quantile_interval(np.arange(5.0), 0.5) is None
    assert intervals.quantile_interval(np.arange(6.0), 0.5) == (0.0, 5.0)
    assert intervals.quantile_interval(np.arange(71.0), 0.95) is None
    assert intervals.quantile_interval(np.arange(72.0), 0.95) is not None


@pytest.mark.parametrize(("quantile", "samples"), [(0.5, 6), (0.9, 36), (0.95, 72), (0.99, 368), (0.05, 72)])
def test_the_fewest_samples_that_have_an_interval(quantile: float, samples: int) -> None:
    assert intervals.fewest(quantile) == samples
    values = np.arange(samples, dtype=np.float64)
    assert intervals.quantile_interval(values, quantile) is not None
    assert intervals.quantile_interval(values[1:], quantile) is None
