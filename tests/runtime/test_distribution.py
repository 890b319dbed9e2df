"""Truncated distributions against definitions written as loops, at sizes that take each way through the code."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmforge import native
from llmforge.ir.interface import HEAD, mass_blocks
from llmforge.runtime.sampling import distribution
from llmforge.runtime.sampling.distribution import draw, largest, log_probabilities
from llmforge.runtime.sampling.distribution_numpy import further
from llmforge.runtime.sampling.options import Sampling

logits_of_tokens = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40).map(
    lambda values: np.array(values, np.float32)
)
PLAIN = Sampling(temperature=1.0)


@pytest.fixture(params=["compiled", "numpy"], scope="module", autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw by the compiled kernels, and as where there are none."""
    if request.param == "compiled" and native.library() is None:
        pytest.skip("the kernels are not compiled here")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(distribution.kernels, "available", lambda: False)
        yield


def strata(logits: np.ndarray, sampling: Sampling, count: int) -> dict[int, float]:
    """Token -> share of what is drawn with `count` evenly spaced numbers."""
    drawn = [draw(logits, sampling, (i + 0.5) / count) for i in range(count)]
    tokens, counts = np.unique(drawn, return_counts=True)
    return dict(zip(tokens.tolist(), (counts / count).tolist(), strict=True))


@functools.lru_cache(maxsize=16)
def naive_weights(logits: tuple[float, ...], temperature: float) -> tuple[list[int], dict[int, float]]:
    """Rank tokens, and give each its weight; many cases have the same logits."""
    highest = max(logits)
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    return ranked, {token: math.exp((logits[token] - highest) / temperature) for token in ranked}


def naive_distribution(logits: np.ndarray, sampling: Sampling) -> dict[int, float]:
    """Token -> probability, by the definition."""
    ranked, weights = naive_weights(tuple(logits.tolist()), sampling.temperature)
    kept = [token for token in ranked if weights[token] >= sampling.min_p]
    kept = kept[: sampling.top_k] if sampling.top_k else kept
    total = math.fsum(weights[token] for token in kept)
    nucleus, mass = {}, 0.0
    for token in kept:
        if sampling.top_p < 1 and mass >= sampling.top_p:
            break
        nucleus[token] = weights[token] / total
        mass += weights[token] / total
    scale = math.fsum(nucleus.values())
    return {token: probability / scale for token, probability in nucleus.items()}


def check(logits: np.ndarray, sampling: Sampling, border: int, count: int) -> None:
    """Compare with the definition; rounding may decide about the tokens on a border, at most `border` of them."""
    got, wanted = strata(logits, sampling, count), naive_distribution(logits, sampling)
    differing = got.keys() - wanted.keys()
    on_border = {float(logits[token]) for token in differing}  # equal logits are kept and left out together
    assert len(on_border) <= (border if sampling.top_p < 1 or sampling.min_p > 0 else 0)
    if len(logits) <= HEAD and not differing and abs(len(got) - len(wanted)) <= border:
        shares = (abs(got.get(token, 0.0) - wanted[token]) for token in wanted)
        assert max(shares) <= (1 + 1e-5) / count + border * min(wanted.values())


@example(np.array([-2e-30, 0.0], np.float32), 1.0, 0, 0.5, 0.0)  # probabilities are equal, logits are not
@given(
    logits_of_tokens,
    st.floats(0.1, 5),
    st.integers(0, 45),
    st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-9]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_a_small_distribution_is_the_definition(logits, temperature, top_k, top_p, min_p):
    check(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p), border=1, count=100)


@pytest.mark.parametrize("top_p", [1.0, 0.99, 0.9, 0.5, 0.05, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, 50, 3000, 19_000])
@pytest.mark.parametrize("shape", ["peaked", "flat", "head and tail", "few levels", "equal"])
def test_a_large_distribution_is_the_definition(shape, top_k, top_p):
    random = np.random.default_rng(0)
    logits = (random.standard_normal(20_001) * {"peaked": 6, "flat": 0.5}.get(shape, 1)).astype(np.float32)
    if shape == "head and tail":  # half of the mass in ten tokens, the rest in all others
        logits[random.integers(0, len(logits), 10)] += 8
    if shape == "few levels":  # thousands of equals at every border
        logits = np.round(logits)
    if shape == "equal":
        logits[:] = 1.5
    check(logits, Sampling(temperature=0.9, top_k=top_k, top_p=top_p), border=2, count=20)


@pytest.mark.parametrize("min_p", [0.5, 0.01])
def test_a_large_distribution_is_cut_at_min_p(min_p):
    logits = np.random.default_rng(1).standard_normal(20_000).astype(np.float32)
    check(logits, Sampling(temperature=1.3, min_p=min_p, top_p=0.9), border=2, count=300)


@given(
    st.lists(st.one_of(st.just(-math.inf), st.integers(-3, 3).map(float), st.floats(-9, 9, width=32)), max_size=400),
    st.integers(1, 30),
)
def test_the_largest_are_those_of_a_sort(values, count):
    wanted = sorted((i for i, value in enumerate(values) if value > -math.inf), key=lambda i: (-values[i], i))
    assert not values or largest(np.array(values, np.float32), count).tolist() == wanted[:count]


@pytest.mark.parametrize("count", [1, 20, 100, 5000, 20_000, 30_000])
def test_the_largest_of_many(count):
    values = np.random.default_rng(2).standard_normal(20_000).astype(np.float32)
    assert largest(values, count).tolist() == np.argsort(-values, kind="stable")[:count].tolist()


def test_inversion_takes_the_most_probable_first_then_the_lower_ids():
    logits = np.log(np.array([0.25, 0.5, 0.25], np.float32))
    assert [draw(logits, PLAIN, u) for u in (0.0, 0.4, 0.6, 0.7, 0.8, 0.999999)] == [1, 1, 0, 0, 2, 2]


def test_behind_the_head_stand_blocks_in_which_a_second_number_draws():
    logits = np.zeros(4 * HEAD, np.float32)
    logits[-HEAD:] = 1e-3 * np.arange(HEAD)  # the least of the head equals the others, and stands with them
    size = mass_blocks(len(logits))[1]
    numbers = np.linspace(0, 1, 1999, endpoint=False).tolist()
    drawn = [draw(logits, PLAIN, u) for u in numbers]
    behind = next(i for i, token in enumerate(drawn) if token <= 3 * HEAD)
    assert drawn[:behind] == sorted(drawn[:behind], reverse=True)
    assert set(drawn[:behind]) == set(range(3 * HEAD + 1, 4 * HEAD))
    blocks = [token // size for token in drawn[behind:]]
    assert blocks == sorted(blocks)
    assert set(blocks) == set(range(3 * HEAD // size + 1))
    for u, token in zip(numbers[behind:], drawn[behind:], strict=True):
        assert token == 3 * HEAD or token % size == int(next(further(u)) * size)


def test_a_token_without_probability_is_never_drawn():
    logits = np.array([-np.inf, 0, -np.inf, 0, -np.inf], np.float32)
    for sampling in (PLAIN, Sampling(temperature=1.0, top_k=4), Sampling(temperature=1.0, top_p=0.9)):
        assert {draw(logits, sampling, u) for u in (0.0, 0.49, 0.51, np.nextafter(1, 0))} == {1, 3}


def test_ties_on_the_border_of_top_k_go_to_the_lower_ids():
    got = strata(np.array([1, 2, 1, 1], np.float32), Sampling(temperature=1.0, top_k=2), 100)
    assert list(got) == [0, 1]
    assert got[1] > got[0]


def test_a_tiny_temperature_is_greedy_without_overflow():
    logits = np.array([3, 8, -90, 7.999], np.float32)
    for temperature in (1e-300, 1e-40, 1e-6):
        assert draw(logits, Sampling(temperature=temperature), 0.999) == 1


def test_a_huge_temperature_is_uniform_over_what_is_allowed():
    logits = np.array([3, 8, -np.inf, 1], np.float32)
    assert strata(logits, Sampling(temperature=1e300), 300) == {0: 1 / 3, 1: 1 / 3, 3: 1 / 3}


@given(logits_of_tokens)
def test_log_probabilities_are_the_definition(logits):
    whole = math.fsum(math.exp(value) for value in logits.tolist())
    got = log_probabilities(logits, np.arange(len(logits)))
    np.testing.assert_allclose(got, [value - math.log(whole) for value in logits.tolist()], atol=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        PLAIN,
        Sampling(temperature=0.7, top_p=0.8),
        Sampling(temperature=1.5, top_p=0.9),
        Sampling(temperature=1.5, top_k=12),
        Sampling(temperature=1.0, min_p=0.1),
        Sampling(temperature=2.0, top_k=20, top_p=0.9, min_p=0.02),
    ],
)
@pytest.mark.parametrize("vocabulary", [30, 2 * HEAD])
def test_what_is_drawn_follows_the_distribution(sampling, vocabulary):
    """Chi-square at 99.9%; the stream is seeded, so this either always passes or never."""
    draws = 20_000
    logits = np.random.default_rng(4).standard_normal(vocabulary).astype(np.float32) * (2 if vocabulary == 30 else 0.7)
    stream = np.random.default_rng(11)
    counts = np.bincount([draw(logits, sampling, stream.random()) for _ in range(draws)], minlength=len(logits))
    wanted = naive_distribution(logits, sampling)
    assert set(np.flatnonzero(counts)) <= wanted.keys()
    statistic = sum((counts[token] - draws * p) ** 2 / (draws * p) for token, p in wanted.items())
    # Wilson & Hilferty 1931: the quantile of chi-square from that of the normal distribution, 3.09 at 99.9%.
    freedom = len(wanted) - 1
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
