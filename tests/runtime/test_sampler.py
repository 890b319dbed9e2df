"""Choosers against each step written as a loop; drafts that change nothing; rows that do not disturb each other."""

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

from llmforge.base.errors import InputError, UsageError
from llmforge.runtime import Sampling
from llmforge.runtime.sampling.sampler import Choice, Choosers, TokenChooser

SAMPLE = Path(__file__).parents[1] / "data" / "docs-llama-7m" / "tokenizer.json"
V = 20
EOS = 3


@functools.cache
def choosers(vocabulary: int = V) -> Choosers:
    return Choosers(Tokenizer.from_file(str(SAMPLE)), vocabulary, (EOS,))


def start(sampling: Sampling, prompt: Sequence[int] = (), vocabulary: int = V) -> TokenChooser:
    return choosers(vocabulary).start(sampling, prompt)


def steps(count: int, vocabulary: int = V, seed: int = 0) -> np.ndarray:
    """Logits of `count` steps, fp32 [count, V]."""
    return (np.random.default_rng(seed).standard_normal((count, vocabulary)) * 2).astype(np.float32)


def chosen(chooser: TokenChooser, logits: np.ndarray) -> list[int]:
    return [chooser.choose(row).token for row in logits]


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
    chooser = start(sampling, prompt)
    answer: list[int] = []
    for row in steps(data.draw(st.integers(1, 12)), seed=data.draw(st.integers(0, 2**32))):
        before = row.copy()
        answer.append(chooser.choose(row).token)
        scores = naive_scores(row, prompt, answer[:-1], sampling)
        assert scores[answer[-1]] >= max(scores) - 1e-4
        assert (row == before).all()


def test_the_prompt_counts_for_the_repetition_penalty_alone():
    logits = np.array([2.0, 1.9, -5, -5], np.float32)
    assert start(Sampling(repetition_penalty=1.2), [0], 4).choose(logits).token == 1
    assert start(Sampling(presence_penalty=2.0, frequency_penalty=2.0), [0], 4).choose(logits).token == 0


def test_penalties_of_many_tokens_are_kept():
    """More than the arrays begin with: each token is chosen once, then the next best."""
    chooser = start(Sampling(frequency_penalty=2.0), vocabulary=500)
    logits = np.linspace(1, 0, 500, dtype=np.float32)
    assert chosen(chooser, np.broadcast_to(logits, (500, 500))) == list(range(500))
    assert chooser.choose(logits).token == 0


def test_penalties_change_what_is_drawn_too():
    logits = np.zeros(4, np.float32)
    sampling = Sampling(temperature=1.0, logit_bias=((0, -100.0), (2, -100.0)))
    assert set(chosen(start(sampling, vocabulary=4), np.broadcast_to(logits, (100, 4)))) == {1, 3}


def test_greedy_takes_the_lowest_of_equals():
    assert start(Sampling(), vocabulary=4).choose(np.array([0, 1, 1, 0], np.float32)) == Choice(1)


def test_what_ends_an_answer():
    assert [start(Sampling()).ends(token) for token in (EOS, 7)] == [True, False]
    assert [start(Sampling(ignore_eos=True)).ends(token) for token in (EOS, 7)] == [False, False]
    assert [start(Sampling(ignore_eos=True, stop_token_ids=(7,))).ends(token) for token in (EOS, 7)] == [False, True]


def test_log_probabilities_are_the_models_own():
    logits = np.log(np.array([0.1, 0.5, 0.25, 0.15], np.float32)) + 3
    sampling = Sampling(temperature=0.3, logit_bias=((3, 100.0),), repetition_penalty=2.0, logprobs=2)
    choice = start(sampling, [1], 4).choose(logits)
    assert choice.token == 3
    assert choice.logprob is not None
    assert choice.logprob.token_id == 3
    assert choice.logprob.logprob == pytest.approx(math.log(0.15), abs=1e-6)
    assert [token for token, _ in choice.logprob.top] == [1, 2]
    assert [math.exp(value) for _, value in choice.logprob.top] == pytest.approx([0.5, 0.25], abs=1e-6)
    own = start(Sampling(logprobs=0), vocabulary=4).choose(logits).logprob
    assert own is not None
    assert (own.token_id, own.top) == (1, ())
    assert start(Sampling(), vocabulary=4).choose(logits).logprob is None


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.6, top_p=0.9, seed=6, logprobs=3),
    Sampling(temperature=1.5, top_k=8, min_p=0.01, seed=7),
    Sampling(repetition_penalty=1.4, presence_penalty=0.5, min_tokens=6),
    Sampling(temperature=1.1, frequency_penalty=0.9, logit_bias=((4, 2.0),), seed=8, stop_token_ids=(9,)),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@settings(deadline=None)  # the first example loads the tokenizer
@given(data=st.data())
def test_drafts_change_no_token(sampling, data):
    """An answer whose logits depend on all of it, with drafts that are often right and of all lengths."""

    def logits_after(answer: list[int]) -> np.ndarray:
        return steps(1, seed=hash(tuple(answer)) % 2**32)[0]

    def whole(limit: int) -> list[Choice]:
        chooser, choices = start(sampling, [1, 2, 3]), []
        while len(choices) < limit and not (choices and chooser.ends(choices[-1].token)):
            choices.append(chooser.choose(logits_after([each.token for each in choices])))
        return choices

    wanted = whole(15)
    tokens = [each.token for each in wanted]
    chooser, got = start(sampling, [1, 2, 3]), []
    while len(got) < 15 and not (got and chooser.ends(got[-1].token)):
        right = data.draw(st.integers(0, 4))
        draft = [*tokens[len(got) :][:right], *data.draw(st.lists(st.integers(0, V - 1), max_size=2))]
        draft = draft[: 15 - len(got) - 1]
        answer = [each.token for each in got]
        rows = np.stack([logits_after(answer + draft[:i]) for i in range(len(draft) + 1)])
        accepted = chooser.accept(rows, draft)
        assert 1 <= len(accepted) <= len(draft) + 1
        got += accepted
    assert got == wanted


def test_a_drafted_token_stands_as_often_as_the_model_would_give_it():
    """Chi-square over pairs of tokens, of answers that are drafted alike: the distribution is that of the model."""
    first, second = (np.log(np.array(p, np.float32)) for p in ([0.5, 0.3, 0.2], [0.1, 0.6, 0.3]))
    counts, accepted = np.zeros((3, 3)), 0
    rounds = 9000
    for seed in range(rounds):
        chooser = start(Sampling(temperature=1.0, seed=seed), vocabulary=3)
        choices = chooser.accept(np.stack([first, second]), [1])
        accepted += len(choices) == 2
        if len(choices) == 1:  # rejected: a token of its own, and the next one
            choices.append(chooser.choose(second))
        counts[choices[0].token, choices[1].token] += 1
    wanted = rounds * np.outer([0.5, 0.3, 0.2], [0.1, 0.6, 0.3])
    assert ((counts - wanted) ** 2 / wanted).sum() < 26.1  # chi-square, 8 degrees of freedom, 99.9%
    # 4 standard deviations of a frequency of 0.3: 4 · sqrt(0.3 · 0.7 / 9000) = 0.019
    assert accepted / rounds == pytest.approx(0.3, abs=0.02)


def test_nothing_is_accepted_behind_the_end():
    rows = np.zeros((3, V), np.float32)
    rows[0, 5] = rows[1, EOS] = rows[2, 6] = 9
    assert [each.token for each in start(Sampling()).accept(rows, [5, EOS])] == [5, EOS]
    assert [each.token for each in start(Sampling(ignore_eos=True)).accept(rows, [5, EOS])] == [5, EOS, 6]


def test_answers_do_not_disturb_each_other():
    together = [start(sampling, [1, 2, 3]) for sampling in SAMPLINGS]
    logits = np.stack([steps(len(SAMPLINGS), seed=i) for i in range(20)])
    tokens = [[chooser.choose(row) for chooser, row in zip(together, rows, strict=True)] for rows in logits]
    for i, sampling in enumerate(SAMPLINGS):
        alone = start(sampling, [1, 2, 3])
        assert [alone.choose(rows[i]) for rows in logits] == [choices[i] for choices in tokens]


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.5), Sampling(min_tokens=2), Sampling(logprobs=0), Sampling(presence_penalty=1)]
)
def test_what_needs_more_than_the_largest_logit_is_not_plain(sampling):
    assert start(Sampling(stop=("x",), max_tokens=7, seed=4)).plain
    assert not start(sampling).plain


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
    chooser = start(sampling)
    assert 0 <= chooser.choose(logits[0]).token < V
    with pytest.raises(InputError, match="logits that are not finite"):
        chooser.choose(logits[1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_ends_too_early_where_nothing_else_can_come(temperature):
    logits = np.full(V, -np.inf, np.float32)
    logits[EOS] = 1
    chooser = start(Sampling(temperature=temperature, min_tokens=1, stop_token_ids=(EOS,)))
    assert chooser.choose(logits).token == EOS  # the end, rather than nothing


def test_token_ids_outside_of_the_vocabulary_are_refused():
    with pytest.raises(UsageError, match="logit_bias: token id 20; the vocabulary has 20"):
        start(Sampling(logit_bias=((V, 1.0),)))
    with pytest.raises(UsageError, match="stop_token_ids: token id 99; the vocabulary has 20"):
        start(Sampling(stop_token_ids=(1, 99)))
