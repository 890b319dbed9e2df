"""Differences of durations of two artifacts that run in turns, with sides that sleep."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from llmforge.base.errors import VerificationError
from llmforge.evaluation import turns
from llmforge.evaluation.latency import Load, Subject


def side(name: str, first_s: float, later_s: float, calls: list[tuple[str, tuple[int, ...]]], lost: int = 0) -> Subject:
    def generate(ids: np.ndarray, tokens: int) -> Iterator[int]:
        calls.append((name, ids.shape))
        for number in range(tokens - lost):
            time.sleep(later_s if number else first_s * ids.shape[1])
            yield number

    return Subject(name, generate, 0.0)


def test_medians_of_the_slowest_load_are_compared_and_sides_take_turns() -> None:
    calls: list[tuple[str, tuple[int, ...]]] = []
    ours, theirs = side("ours", 0.002, 0.004, calls), side("theirs", 0.001, 0.002, calls)
    found = turns.differences(ours, theirs, [Load(1, 1, 3, 8), Load(1, 5, 3, 8)], vocabulary=10)
    assert set(found) == {"ttft_p50_ms", "tpot_p50_ms", "itl_p50_ms", "e2e_p50_ms"}  # no tails
    for name, ms in (("ttft_p50_ms", 5.0), ("tpot_p50_ms", 2.0), ("itl_p50_ms", 2.0), ("e2e_p50_ms", 9.0)):
        assert found[name].value == pytest.approx(ms, rel=0.6), name
        assert found[name].samples == 8
        assert found[name].low is not None
    assert {shape for _, shape in calls} == {(1, 1), (1, 5)}
    firsts = [name for name, shape in calls[::2] if shape == (1, 5)]
    assert len(firsts) == 9
    assert firsts[1:] == ["ours", "theirs"] * 4


def test_a_side_that_gives_fewer_tokens_is_not_compared() -> None:
    calls: list[tuple[str, tuple[int, ...]]] = []
    with pytest.raises(VerificationError, match="theirs yielded 2 tokens"):
        turns.differences(
            side("ours", 0, 0, calls), side("theirs", 0, 0, calls, lost=1), [Load(1, 4, 3, 2)], vocabulary=10
        )
