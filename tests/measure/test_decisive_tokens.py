"""Odds of decisive tokens along an answer: exact, moved by a bias as far as it is, taken where they are due."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, models

from llmforge.base.errors import InputError
from llmforge.measure import decisive_tokens
from llmforge.measure.decisive_tokens import FARTHEST, DecisiveTokens, along, log_odds
from llmforge.measure.scoring import Pair, Reduce
from llmforge.metrics.behaviour import answer
from llmforge.metrics.behaviour.answer import TokenOdds
from llmforge.serving.prompts import PromptEncoder

VOCABULARY = 40
GROUPS = ((3,), (5, 9, 11))
WORDS = {"a": 0, "b": 1, "{": 2, '"}': 3, "Ġ[": 4, "end": 5}
TOKENS = DecisiveTokens(
    {answer.ENDS: (9,), answer.BRACKETS: (2, 3), answer.THOUGHTS: (7,), answer.CALLS: (8,)},
)


def naive(groups: Sequence[Sequence[int]], logits: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float64]:
    rows = []
    for row, token in zip(logits.astype(np.longdouble), tokens, strict=True):
        p = np.exp(row - row.max())
        p /= p.sum()
        rest = [np.delete(p, list(ids)).sum() for ids in ((token,), *groups)]
        rows.append([np.log(p[list(ids)].sum() / left) for ids, left in zip(((token,), *groups), rest, strict=True)])
    return np.array(rows, np.float64)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.1, 3.0, 15.0]))
def test_odds_are_those_of_a_plain_loop_however_sure_a_model_is(seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(6, VOCABULARY), scale=spread).astype(np.float32)
    tokens = rng.integers(VOCABULARY, size=6).tolist()
    np.testing.assert_allclose(
        log_odds(GROUPS, logits, tokens), naive(GROUPS, logits, tokens).clip(-FARTHEST, FARTHEST), atol=2e-5
    )


@given(st.integers(0, 2**32 - 1), st.floats(-4, 4))
def test_a_bias_moves_odds_as_far_as_it_is(seed: int, bias: float) -> None:
    logits = np.random.default_rng(seed).normal(size=(5, VOCABULARY), scale=4).astype(np.float32)
    biased = logits.copy()
    biased[:, list(GROUPS[1])] += np.float32(bias)
    moved = log_odds(GROUPS, biased, [0] * 5)[:, 2] - log_odds(GROUPS, logits, [0] * 5)[:, 2]
    np.testing.assert_allclose(moved, bias, atol=5e-5)


def test_odds_without_end_are_cut() -> None:
    sure = np.zeros((1, VOCABULARY), np.float32)
    sure[0, 3] = 500
    np.testing.assert_array_equal(log_odds(GROUPS, sure, [3]), [[FARTHEST, FARTHEST, -FARTHEST]])


def test_logits_that_are_not_finite_are_refused() -> None:
    broken = np.zeros((1, VOCABULARY), np.float32)
    broken[0, 3] = np.nan
    with pytest.raises(InputError, match="NaN"):
        log_odds(GROUPS, broken, [3])


def test_kinds_are_taken_where_they_are_due_and_elsewhere() -> None:
    said = [1, 7, 2, 6, 3, 9]  # a thought and its end; brackets around text; the end
    odds = np.arange(6)[:, None] + np.array([[0.0, 10, 20, 30, 40]])
    found = along(([1], said), TOKENS, odds, ended=True, tools=True)
    assert found == {
        answer.OWN: TokenOdds(2.0, None),
        answer.ENDS: TokenOdds(15.0, 12.0),
        answer.BRACKETS: TokenOdds(23.0, pytest.approx(22.25)),
        answer.THOUGHTS: TokenOdds(31.0, 30.0),  # what follows the thoughts is not looked at
        answer.CALLS: TokenOdds(None, 42.5),
    }
    short = along(([1], [1, 6]), TOKENS, odds[:2], ended=False, tools=False)
    assert short == {answer.OWN: TokenOdds(0.5, None), answer.ENDS: TokenOdds(None, 10.5)}
    assert along(([1], [9]), TOKENS, odds[:1], ended=True, tools=False) == {answer.ENDS: TokenOdds(10.0, None)}


def test_an_answer_that_ends_early_has_a_row_for_its_end() -> None:
    rows = [*np.arange(3)[:, None] + np.array([[0.0, 10, 20, 30, 40]])]
    short = decisive_tokens.answer_of([1, 6], rows, TOKENS, 4, tools=False)
    assert short == along(([], [1, 6, 9]), TOKENS, np.array(rows), ended=True, tools=False)
    assert short[answer.ENDS] == TokenOdds(12.0, 10.5)
    whole = decisive_tokens.answer_of([1, 6, 2], rows, TOKENS, 3, tools=True)
    assert whole == along(([], [1, 6, 2]), TOKENS, np.array(rows), ended=False, tools=True)


def test_tokens_are_found_in_a_tokenizer() -> None:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="a"))
    config: Any = SimpleNamespace(max_context=64, eos_token_ids=(5,), vocabulary=VOCABULARY)
    assert DecisiveTokens.of(PromptEncoder(config, tokenizer, None)).ids == {
        answer.ENDS: (5,), answer.BRACKETS: (2, 3, 4),
    }  # fmt: skip
    tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in ("<think>", "</think>")])
    assert DecisiveTokens.of(PromptEncoder(config, tokenizer, None)).ids[answer.THOUGHTS] == (7,)


class Reads:
    """A side whose every row prefers the token 9 by a bias."""

    def __init__(self, bias: float) -> None:
        self.bias = bias

    def read(self, pairs: Sequence[Pair], reduce: Reduce) -> list[Any]:
        logits = np.zeros(VOCABULARY, np.float32)
        logits[9] = self.bias
        return [reduce(np.tile(logits, (len(text), 1)), text) for _, text in pairs]


def test_a_side_reads_what_the_checkpoint_said() -> None:
    pairs: list[Pair] = [([1, 2], [4, 9]), ([1], [2, 3])]
    plain, biased = (
        decisive_tokens.measure(Reads(bias), pairs, TOKENS, [True, False], [False, True]) for bias in (0, 3)
    )
    for before, after in zip(plain, biased, strict=True):
        there, here = before[answer.ENDS].elsewhere, after[answer.ENDS].elsewhere
        assert there is not None
        assert here == pytest.approx(there + 3, abs=1e-5)
    assert set(plain[1]) == {answer.OWN, answer.ENDS, answer.BRACKETS, answer.CALLS}
