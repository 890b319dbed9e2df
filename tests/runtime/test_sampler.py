"""Samplers against each step written as a loop; rows that do not disturb each other."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from llmforge.base.errors import InputError, UsageError
from llmforge.native import sampling as kernels
from llmforge.runtime.sampling.sampler import SampledToken, Samplers, TokenSampler
from llmforge.serving import Sampling

SAMPLE = Path(__file__).parents[1] / "data" / "docs-llama-7m" / "tokenizer.json"
V = 20
EOS = 3


@functools.cache
def samplers(vocabulary: int = V) -> Samplers:
    return Samplers(Tokenizer.from_file(str(SAMPLE)), vocabulary, (EOS,))


def start(sampling: Sampling, prompt: Sequence[int] = (), vocabulary: int = V) -> TokenSampler:
    return samplers(vocabulary).start(sampling, prompt)


def steps(count: int, vocabulary: int = V, seed: int = 0) -> np.ndarray:
    """Logits of `count` steps, fp32 [count, V]."""
    return (np.random.default_rng(seed).standard_normal((count, vocabulary)) * 2).astype(np.float32)


def chosen(sampler: TokenSampler, logits: np.ndarray) -> list[int]:
    return [sampler.sample(row).token for row in logits]


def naive_scores(logits: np.ndarray, prompt: list[int], answer: list[int], sampling: Sampling) -> list[float]:
    """Steps 3 to 6 by the definition."""
    scores = [float(value) for value in logits]
    if len(answer) < sampling.min_tokens:
        for token in {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}:
            scores[token] = -math.inf
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in {*prompt, *answer}:
        if scores[token] > 0:
            scores[token] /= sampling.repetition_penalty
        else:
            scores[token] *= sampling.repetition_penalty
    for token in set(answer):
        scores[token] -= sampling.frequency_penalty * answer.count(token)
        scores[token] -= sampling.presence_penalty
    return scores


@settings(deadline=None)  # the first example loads the tokenizer
@given(data=st.data())
def test_greedy_tokens_are_those_of_the_definition(data):
    token = st.integers(0, V - 1)
    sampling = Sampling(
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.8])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.7, -0.5])),
        presence_penalty=data.draw(st.sampled_from([0.0, 1.5, -1.0])),
        logit_bias=tuple(data.draw(st.dictionaries(token, st.sampled_from([-100.0, -2.5, 3.5]), max_size=4)).items()),
        min_tokens=data.draw(st.integers(0, 4)),
        stop_token_ids=tuple(data.draw(st.lists(token, max_size=3))),
        ignore_eos=data.draw(st.booleans()),
    )
    prompt = data.draw(st.lists(token, max_size=30))
    sampler = start(sampling, prompt)
    answer: list[int] = []
    for row in steps(data.draw(st.integers(1, 12)), seed=data.draw(st.integers(0, 2**32))):
        before = row.copy()
        answer.append(sampler.sample(row).token)
        scores = naive_scores(row, prompt, answer[:-1], sampling)
        assert scores[answer[-1]] >= max(scores) - 1e-4
        assert (row == before).all()


def test_the_prompt_counts_for_the_repetition_penalty_alone():
    logits = np.array([2.0, 1.9, -5, -5], np.float32)
    assert start(Sampling(repetition_penalty=1.2), [0], 4).sample(logits).token == 1
    assert start(Sampling(presence_penalty=2.0, frequency_penalty=2.0), [0], 4).sample(logits).token == 0


def test_penalties_of_many_tokens_are_kept():
    """More than the arrays begin with: each token is chosen once, then the next best."""
    sampler = start(Sampling(frequency_penalty=2.0), vocabulary=500)
    logits = np.linspace(1, 0, 500, dtype=np.float32)
    assert chosen(sampler, np.broadcast_to(logits, (500, 500))) == list(range(500))
    assert sampler.sample(logits).token == 0


def test_penalties_change_what_is_drawn_too():
    logits = np.zeros(4, np.float32)
    sampling = Sampling(temperature=1.0, logit_bias=((0, -100.0), (2, -100.0)))
    assert set(chosen(start(sampling, vocabulary=4), np.broadcast_to(logits, (100, 4)))) == {1, 3}


def test_greedy_takes_the_lowest_of_equals():
    assert start(Sampling(), vocabulary=4).sample(np.array([0, 1, 1, 0], np.float32)) == SampledToken(1)


def test_what_ends_an_answer():
    assert [start(Sampling()).is_stop(token) for token in (EOS, 7)] == [True, False]
    assert [start(Sampling(ignore_eos=True)).is_stop(token) for token in (EOS, 7)] == [False, False]
    assert [start(Sampling(ignore_eos=True, stop_token_ids=(7,))).is_stop(token) for token in (EOS, 7)] == [False, True]


def test_log_probabilities_are_the_models_own():
    logits = np.log(np.array([0.1, 0.5, 0.25, 0.15], np.float32)) + 3
    sampling = Sampling(temperature=0.3, logit_bias=((3, 100.0),), repetition_penalty=2.0, logprobs=2)
    choice = start(sampling, [1], 4).sample(logits)
    assert choice.token == 3
    assert choice.logprob is not None
    assert choice.logprob.token_id == 3
    assert choice.logprob.logprob == pytest.approx(math.log(0.15), abs=1e-6)
    assert [token for token, _ in choice.logprob.top] == [1, 2]
    assert [math.exp(value) for _, value in choice.logprob.top] == pytest.approx([0.5, 0.25], abs=1e-6)
    own = start(Sampling(logprobs=0), vocabulary=4).sample(logits).logprob
    assert own is not None
    assert (own.token_id, own.top) == (1, ())
    assert start(Sampling(), vocabulary=4).sample(logits).logprob is None


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.6, top_p=0.9, seed=6, logprobs=3),
    Sampling(temperature=1.5, top_k=8, min_p=0.01, seed=7),
    Sampling(repetition_penalty=1.4, presence_penalty=0.5, min_tokens=6),
    Sampling(temperature=1.1, frequency_penalty=0.9, logit_bias=((4, 2.0),), seed=8, stop_token_ids=(9,)),
]


def test_answers_do_not_disturb_each_other():
    together = [start(sampling, [1, 2, 3]) for sampling in SAMPLINGS]
    logits = np.stack([steps(len(SAMPLINGS), seed=i) for i in range(20)])
    tokens = [[sampler.sample(row) for sampler, row in zip(together, rows, strict=True)] for rows in logits]
    for i, sampling in enumerate(SAMPLINGS):
        alone = start(sampling, [1, 2, 3])
        assert [alone.sample(rows[i]) for rows in logits] == [choices[i] for choices in tokens]


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.5), Sampling(min_tokens=2), Sampling(logprobs=0), Sampling(presence_penalty=1)]
)
def test_what_needs_more_than_the_largest_logit_is_not_argmax_only(sampling):
    assert start(Sampling(stop=("x",), max_tokens=7, seed=4)).argmax_only
    assert not start(sampling).argmax_only


def test_a_seed_decides_the_draws():
    logits = np.zeros((5, 1000), np.float32)

    def tokens(seed: int) -> list[int]:
        return chosen(start(Sampling(temperature=1.0, seed=seed), vocabulary=1000), logits)

    assert tokens(1) == tokens(1) != tokens(2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(repetition_penalty=1.1)])
def test_logits_that_are_not_finite_are_refused(sampling, bad):
    logits = steps(2)
    logits[1, 5] = bad
    sampler = start(sampling)
    assert 0 <= sampler.sample(logits[0]).token < V
    with pytest.raises(InputError, match="NaN or infinite logits"):
        sampler.sample(logits[1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_ends_too_early_where_nothing_else_can_come(temperature):
    logits = np.full(V, -np.inf, np.float32)
    logits[EOS] = 1
    sampler = start(Sampling(temperature=temperature, min_tokens=1, stop_token_ids=(EOS,)))
    assert sampler.sample(logits).token == EOS  # the end, rather than nothing


def test_token_ids_outside_of_the_vocabulary_are_refused():
    with pytest.raises(UsageError, match="logit_bias: token id 20; the vocabulary has 20"):
        start(Sampling(logit_bias=((V, 1.0),)))
    with pytest.raises(UsageError, match="stop_token_ids: token id 99; the vocabulary has 20"):
        start(Sampling(stop_token_ids=(1, 99)))


def test_a_token_takes_one_random_number_that_is_known_before():
    """A step may begin before the token before it is chosen: whatever that takes, the next number is the same."""
    logits = np.zeros(3000, np.float32)  # all stand behind the head, where further numbers are drawn
    one, other = (TokenSampler(Sampling(temperature=1.0, top_p=top_p, seed=3), (), ()) for top_p in (1.0, 0.3))
    known = [one.next_uniform(ahead) for ahead in range(4)]
    for number in known:
        assert one.next_uniform() == other.next_uniform() == number
        one.sample(logits)
        other.sample(logits)


@pytest.mark.skipif(not kernels.available(), reason="the kernels are not compiled here")
def test_without_compiled_kernels_numpy_draws_and_notes_say_so(monkeypatch):
    made = Samplers(Tokenizer(WordLevel({"a": 0}, "a")), 9000, ())
    assert made.notes == ()
    logits = np.random.default_rng(5).standard_normal(9000).astype(np.float32)
    drawn = []
    for available in (True, False):
        monkeypatch.setattr(kernels, "available", lambda answer=available: answer)
        sampler = made.start(Sampling(temperature=1.0, top_p=0.9, seed=1), [0])
        drawn.append([sampler.sample(logits).token for _ in range(40)])
    assert made.notes == ("tokens are drawn by numpy: the kernels are not compiled here",)
    assert drawn[0] == drawn[1]
