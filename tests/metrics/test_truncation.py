"""Bounds of KLD and top-1 agreement from what is told of distributions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmforge.metrics import truncation
from llmforge.metrics.truncation import Told


def told(logits: np.ndarray, listed: int, target: int) -> Told:
    """Tell the `listed` likeliest, rounded to fp32 as servers do, and `target`."""
    whole = Told.of_logits(logits)
    order = np.argsort(-whole.logprobs, kind="stable")[:listed]
    ids = order if target in order else np.append(order, target)
    rounded = whole.logprobs.astype(np.float32).astype(np.float64)
    return Told(ids, rounded[ids], len(logits), float(rounded[order[-1]]))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), moved=st.sampled_from([0.0, 1e-3, 0.1, 1.0, 5.0]), scale=st.floats(0.1, 8.0))
def test_bounds_contain_the_exact_value(seed: int, moved: float, scale: float) -> None:
    draw = np.random.default_rng(seed)
    size = int(draw.integers(3, 300))
    ours = (draw.normal(size=size) * scale).astype(np.float32)
    theirs = (ours + draw.normal(size=size) * moved).astype(np.float32)
    whole = Told.of_logits(ours), Told.of_logits(theirs)
    low, exact = truncation.kld(*whole)
    assert low == exact
    listed, target = draw.integers(1, size + 1, 2), int(draw.integers(size))
    parts = told(ours, int(listed[0]), target), told(theirs, int(listed[1]), target)
    for reference, served in ((whole[0], parts[1]), (parts[0], whole[1]), parts):
        low, high = truncation.kld(reference, served)
        assert low <= exact + 1e-6
        assert exact <= high + 1e-6
        least, most = truncation.same_top(reference, served)
        assert least <= float(ours.argmax() == theirs.argmax()) <= most


def test_the_lower_bound_is_reached_and_no_weaker_than_the_log_sum_inequality() -> None:
    ours, theirs = np.log(np.array([[0.4, 0.3, 0.2, 0.1], [0.5, 0.2, 0.2, 0.1]])).astype(np.float32)
    served = told(theirs, 1, 0)  # 0.5, and 0.5 for three that have 0.5 at most each
    low, _ = truncation.kld(Told.of_logits(ours), served)
    assert low == pytest.approx(0.4 * np.log(0.4 / 0.5) + 0.6 * np.log(0.6 / 0.5), abs=1e-5)
    capped = Told(np.array([0]), np.log([0.5]), 4, float(np.log(0.2)))  # in proportion, the first would have 0.25
    low, _ = truncation.kld(Told.of_logits(ours), capped)
    best = 0.4 * np.log(0.4 / 0.5) + 0.3 * np.log(0.3 / 0.2) + 0.3 * np.log(0.3 / 0.3)
    assert low == pytest.approx(best, abs=1e-5)


def test_the_upper_bound_is_that_of_the_stated_spread() -> None:
    ours = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    served = Told(np.array([0]), np.log([0.5]), 4, float(np.log(0.5)))
    for spread in (5.0, 50.0):
        _, high = truncation.kld(Told.of_logits(ours), served, spread)
        rest = sum(p * (np.log(p) - (np.log(0.5) - spread)) for p in (0.3, 0.2, 0.1))
        assert high == pytest.approx(0.4 * np.log(0.4 / 0.5) + rest, abs=1e-6)


def test_the_estimate_by_drawn_tokens_has_no_bias() -> None:
    draw = np.random.default_rng(3)
    ours = (2 * draw.normal(size=60)).astype(np.float32)
    theirs = (ours + 0.4 * draw.normal(size=60)).astype(np.float32)
    reference, served, whole = Told.of_logits(ours), told(theirs, 5, 0), Told.of_logits(theirs)
    each = [truncation.sampled_kld(reference, served, token, float(whole.logprobs[token])) for token in range(60)]
    mean = float(np.exp(reference.logprobs) @ each)
    assert mean == pytest.approx(truncation.kld(reference, whole)[0], abs=1e-6)


def test_ties_leave_the_most_likely_token_open() -> None:
    listed = Told(np.array([3]), np.log([0.3]), 10, float(np.log(0.3)))  # another may have 0.3
    alone = Told(np.array([3]), np.log([0.6]), 10, float(np.log(0.4)))
    assert truncation.same_top(alone, listed) == (0.0, 1.0)
    assert truncation.same_top(alone, alone) == (1.0, 1.0)
    other = Told(np.array([2]), np.log([0.6]), 10, float(np.log(0.4)))
    assert truncation.same_top(alone, other) == (0.0, 0.0)
