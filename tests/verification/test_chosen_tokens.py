"""What chooses tokens is held to its definition: kernels that are wrong for some ids are refused, honest ones never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llmforge import native
from llmforge.base.errors import VerificationError
from llmforge.native import sampling as kernels
from llmforge.verification import chosen_tokens
from llmforge.verification.chosen_tokens import DRAWS, require_right

VOCABULARY = 2000
WRONG = 1200, 1300  # ids, 5 % of them

pytestmark = pytest.mark.skipif(native.library() is None, reason="the kernels are not compiled")


@pytest.mark.parametrize("vocabulary", [1, 2, 255, 256, 257, VOCABULARY])
def test_kernels_as_they_are_choose_as_defined(vocabulary: int) -> None:
    for seed in range(20):
        assert require_right(vocabulary, seed) == DRAWS


def hidden(values: np.ndarray) -> np.ndarray:
    """Let a range of ids look as if it could not be chosen."""
    left = np.array(values)
    left[WRONG[0] : WRONG[1]] = -np.inf
    return left


FAULTS = (
    ("largest", "largest logits are others"),
    ("sum_exponentials", "the sum of"),
    ("draw_row", "draws are others"),
)


@pytest.mark.parametrize(("name", "said"), FAULTS)
def test_a_kernel_that_is_wrong_for_some_ids_is_refused(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true: Callable[..., Any] = getattr(kernels, name)
    monkeypatch.setattr(kernels, name, lambda values, *rest: true(hidden(values), *rest))
    for seed in range(20):
        with pytest.raises(VerificationError, match=f"do not choose tokens as defined: .*{said}"):
            require_right(VOCABULARY, seed)


def test_without_kernels_there_is_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_tokens.kernels, "available", lambda: False)
    assert require_right(VOCABULARY, 0) == 0
