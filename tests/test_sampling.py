"""Sampling against definitions written as loops, and the frequencies of what is drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmforge.errors import InputError, UsageError
from llmforge.runtime.sampling import Sampler, Sampling, distribution, draw

logits_of_tokens = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40).map(
    lambda values: np.array(values, np.float32)
)


def naive_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Token -> probability, by the definition."""
    ranked = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    kept = ranked[:top_k] if top_k else ranked
    highest = max(float(value) for value in logits)
    weights = [math.exp((float(logits[token]) - highest) / temperature) for token in kept]
    total = math.fsum(weights)
    nucleus, mass = {}, 0.0
    for token, weight in zip(kept, weights, strict=True):
        if top_p < 1 and mass >= top_p:
            break
        nucleus[token] = weight / total
        mass += weight / total
    scale = math.fsum(nucleus.values())
    return {token: probability / scale for token, probability in nucleus.items()}


@example(np.array([-2e-30, 0.0], np.float32), 1.0, 0, 0.5)  # probabilities are equal, logits are not
@given(logits_of_tokens, st.floats(0.1, 5), st.integers(0, 45), st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-9]))
def test_distribution_is_the_definition(logits, temperature, top_k, top_p):
    tokens, probabilities = distribution(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    wanted = naive_distribution(logits, temperature, top_k, top_p)
    got = dict(zip(tokens.tolist(), probabilities.tolist(), strict=True))
    assert list(got) == sorted(got)
    assert math.isclose(sum(got.values()), 1, rel_tol=1e-9)
    differing = got.keys() ^ wanted.keys()
    # Rounding of the sum may decide whether the token on the border of the nucleus is in it.
    assert len(differing) <= (top_p < 1)
    if not differing:
        assert all(math.isclose(got[token], wanted[token], rel_tol=1e-6, abs_tol=1e-12) for token in wanted)


def test_frequencies_follow_the_distribution():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    sampler = Sampler([Sampling(temperature=1.0, seed=7)])
    drawn = np.bincount([sampler.choose(logits[None], [0])[0] for _ in range(20_000)], minlength=4) / 20_000
    # 5 standard deviations of a frequency of 0.5: 5 · sqrt(0.25 / 20000) = 0.018
    np.testing.assert_allclose(drawn, [0.5, 0.3, 0.15, 0.05], atol=0.018)


def test_inversion_takes_tokens_in_order_of_their_ids():
    logits = np.log(np.array([0.25, 0.5, 0.25], np.float32))
    plain = Sampling(temperature=1.0)
    assert [draw(logits, plain, u) for u in (0.0, 0.2, 0.3, 0.7, 0.8, 0.999999)] == [0, 0, 1, 1, 2, 2]


def test_a_token_without_probability_is_never_drawn():
    logits = np.array([-np.inf, 0, -np.inf, 0, -np.inf], np.float32)
    plain = Sampling(temperature=1.0)
    assert {draw(logits, plain, u) for u in (0.0, 0.49, 0.51, np.nextafter(1, 0))} == {1, 3}


def test_ties_on_the_border_of_top_k_go_to_the_lower_ids():
    tokens, probabilities = distribution(np.array([1, 2, 1, 1], np.float32), Sampling(temperature=1.0, top_k=2))
    assert tokens.tolist() == [0, 1]
    assert probabilities[1] > probabilities[0]


def test_a_tiny_temperature_is_greedy_without_overflow():
    logits = np.array([3, 8, -90, 7.999], np.float32)
    assert draw(logits, Sampling(temperature=1e-300), 0.999) == 1


def test_greedy_rows_and_sampled_rows_share_a_batch_and_do_not_disturb_each_other():
    random = np.random.default_rng(0)
    steps = [random.standard_normal((3, 50)).astype(np.float32) for _ in range(20)]
    sampled = Sampling(temperature=1.0, seed=3)
    together = Sampler([Sampling(), sampled, Sampling(temperature=2.0, seed=9)])
    alone = Sampler([sampled])
    for i, logits in enumerate(steps):
        rows = [0, 1, 2] if i < 10 else [0, 1]
        chosen = together.choose(logits, rows)
        assert chosen[0] == logits[0].argmax()
        assert chosen[1] == alone.choose(logits[1:2], [0])[0]


def test_a_seed_decides_the_draws():
    logits = np.zeros((1, 1000), np.float32)

    def tokens(seed: int) -> list[int]:
        sampler = Sampler([Sampling(temperature=1.0, seed=seed)])
        return [sampler.choose(logits, [0])[0] for _ in range(5)]

    assert tokens(1) == tokens(1) != tokens(2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    logits = np.zeros((2, 8), np.float32)
    logits[1, 5] = bad
    sampler = Sampler([Sampling(temperature=temperature)] * 2)
    assert 0 <= sampler.choose(logits, [0])[0] < 8
    with pytest.raises(InputError, match="not finite, for row 1"):
        sampler.choose(logits, [0, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1: wanted a finite number"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"top_p": 0.0}, "top_p 0.0: wanted more than 0, at most 1"),
        ({"top_p": 1.1}, "top_p 1.1"),
        ({"top_k": -1}, "top_k -1"),
        ({"seed": -1}, "seed -1"),
        ({"max_tokens": 0}, "max_tokens 0: wanted 1 or more"),
        ({"stop": ("a", "")}, "an empty stop string"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Sampling(**options)
