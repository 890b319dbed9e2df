"""Intervals of latency: percentiles over repetitions and over tokens that come in generations, shares, and inverses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmforge.metrics.intervals import Estimate, clustered_quantile_interval
from llmforge.metrics.latency import Footprint, TimedSide, between_tokens, spread, whole_ms


def test_a_percentile_of_tokens_covers_the_true_one_though_tokens_of_a_generation_are_alike() -> None:
    """At 95 %: of 200 samples of 30 generations whose tokens share half of their variance, at least 90 % cover it.

    Bounds that took tokens for independent would cover it far less often, as the test shows.
    """
    rng = np.random.default_rng(0)
    truth = math.sqrt(2) * 1.2815515655446004  # 90th percentile of a sum of two standard normals
    hits = naive = 0
    for _ in range(200):
        clusters = list(rng.normal(size=(30, 1)) + rng.normal(size=(30, 20)))
        low, high = clustered_quantile_interval(clusters, 0.9) or (math.inf, -math.inf)
        hits += low <= truth <= high
        alone = [np.array([value]) for value in np.concatenate(clusters)]
        low, high = clustered_quantile_interval(alone, 0.9) or (math.inf, -math.inf)
        naive += low <= truth <= high
    assert hits >= 0.9 * 200
    assert naive < 0.8 * 200


def test_too_few_generations_give_no_bounds() -> None:
    assert clustered_quantile_interval([np.arange(100.0)] * 7, 0.5) is None
    assert clustered_quantile_interval([np.arange(3.0)] * 8, 0.99) is None, "beyond the largest value"
    found = between_tokens(TimedSide([np.array([9.0, 1.0, 2.0])] * 4))
    assert (found.p50.value, found.p50.low, found.p50.samples) == (1.5, None, 4)


def test_percentiles_of_repetitions() -> None:
    generations = [np.array([float(i), 1.0]) for i in range(1, 101)]
    found = spread(whole_ms, TimedSide(generations))
    assert found.p50.value == 51.5
    assert found.p95.value == pytest.approx(np.quantile(np.arange(2, 102), 0.95))
    assert found.p95.low is not None
    assert found.p95.high is not None
    assert found.p95.low < found.p95.value < found.p95.high
    assert found.p99.high is None, "it takes 368 samples"


def test_a_share_has_wilson_s_interval() -> None:
    """Newcombe, Two-sided confidence intervals for the single proportion (1998), table I: 15 of 148 and 0 of 20."""
    found = Estimate.share(15, 148, of="requests")
    assert (found.low, found.high) == (pytest.approx(0.0624, abs=5e-5), pytest.approx(0.1605, abs=5e-5))
    none = Estimate.share(0, 20, of="requests")
    assert (none.value, none.low, none.high) == (0, 0, pytest.approx(0.1611, abs=5e-5))
    assert Estimate.share(7, 7, of="requests").low is None


def test_an_inverse_turns_the_bounds_round() -> None:
    found = Estimate(value=2.0, low=1.0, high=4.0, samples=9).inverted(8)
    assert (found.value, found.low, found.high) == (4, 2, 8)
    assert Estimate(value=0.0, low=0.0, high=4.0, samples=9).inverted(8).value == math.inf
    assert Estimate(value=2.0, low=None, high=None, samples=3).inverted(8).low is None


def test_the_head_counts_once_for_each_prompt() -> None:
    counted = {"artifact_bytes": 1, "weight_bytes_per_token": 1, "kv_bytes_per_token": 1}
    assert Footprint(**counted).prompt_operations(2, 10) is None
    older = Footprint(**counted, multiply_adds_per_token=100)
    assert older.prompt_operations(2, 10) == 2 * 2 * 10 * 100
    told = Footprint(**counted, multiply_adds_per_token=100, head_multiply_adds=40)
    assert told.prompt_operations(2, 10) == 2 * 2 * (10 * 60 + 40)
    assert told.prompt_operations(1, 1) == 2 * 100
    assert "head_multiply_adds" not in older.to_json(), "reports of older builds keep their bytes"
    for each in (older, told):
        assert Footprint.model_validate_json(each.to_json()) == each
