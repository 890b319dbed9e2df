from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmforge.base.errors import VerificationError
from llmforge.metrics import tokens
from llmforge.metrics.tokens import KLD, NLL, REFERENCE_NLL, SAME_TOP, TokenValue, mean_kld, score

from ..models.logits import V, naive, random_logits

DELTA_P = TokenValue("delta_p", lambda block: block.delta_p)
VALUES = (REFERENCE_NLL, NLL, KLD, SAME_TOP, DELTA_P)  # in the order of `naive`


@given(rows=st.integers(1, 40), scale=st.floats(0.01, 30), seed=st.integers(0, 2**32 - 1))
def test_scores_equal_a_naive_loop(rows: int, scale: float, seed: int) -> None:
    reference, logits = random_logits(seed, rows, scale), random_logits(seed + 1, rows, scale)
    targets = np.random.default_rng(seed).integers(0, V, rows)
    expected = naive(reference, logits, targets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "_BLOCK_LOGITS", 16 * V)
        got = score(reference, logits, targets, VALUES)
    for value, wanted in zip(VALUES, expected, strict=True):
        np.testing.assert_allclose(got[value.name], wanted, rtol=1e-11, atol=1e-11)


def test_logits_far_from_zero_lose_nothing() -> None:
    reference, logits, targets = random_logits(0, 20), random_logits(1, 20), np.arange(20)
    shifted = score(reference + 4096, logits - 4096, targets, (KLD,))["kld"]
    np.testing.assert_allclose(shifted, score(reference, logits, targets, (KLD,))["kld"], rtol=2e-3)
    huge = score(reference * 1e4, logits, targets, (KLD,))  # one-hot: KLD is the NLL of the reference's choice
    nll = score(reference, logits, reference.argmax(-1), (NLL,))["nll"]
    np.testing.assert_allclose(huge["kld"], nll, rtol=1e-12)


def test_the_same_logits_have_no_divergence() -> None:
    logits = random_logits(0, 33)
    scores = score(logits, logits, np.zeros(33, np.int64), VALUES)
    assert np.abs(scores["kld"]).max() < 1e-15
    assert scores["same_top"].all()
    assert not scores["delta_p"].any()


def test_mean_kld_takes_any_leading_axes() -> None:
    reference, logits = random_logits(0, 24), random_logits(1, 24)
    expected = naive(reference, logits, np.zeros(24, np.int64))[2].mean()
    assert mean_kld(reference, logits) == pytest.approx(expected, rel=1e-12)
    assert mean_kld(reference.reshape(2, 12, V), logits.reshape(2, 12, V)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_mean_kld_refuses_what_is_not_finite(value: float) -> None:
    logits = random_logits(0, 3)
    logits[2, 7] = value
    with pytest.raises(VerificationError, match=r"compared logits hold 1 values .* at row 2, token id 7"):
        mean_kld(random_logits(1, 3), logits)
