"""Differences of durations of two artifacts that run in turns, with sides that sleep."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from llmforge.base.errors import VerificationError
from llmforge.gates import decision
from llmforge.measure import turns
from llmforge.measure.latency import TimedLoad, TimedModel
from llmforge.metrics import catalog, intervals
from llmforge.metrics.latency_metrics import SlowestMetric
from llmforge.recipe import GateSpec


def side(
    name: str, first_s: float, later_s: float, calls: list[tuple[str, tuple[int, ...]]], lost: int = 0
) -> TimedModel:
    def generate(ids: np.ndarray, tokens: int) -> Iterator[int]:
        calls.append((name, ids.shape))
        for number in range(tokens - lost):
            time.sleep(later_s if number else first_s * ids.shape[1])
            yield number

    return TimedModel(name, generate, 0.0)


def test_medians_of_the_slowest_load_are_compared_and_sides_take_turns() -> None:
    calls: list[tuple[str, tuple[int, ...]]] = []
    ours, theirs = side("ours", 0.002, 0.004, calls), side("theirs", 0.001, 0.002, calls)
    found = turns.differences(ours, theirs, [TimedLoad(1, 1, 3, 8), TimedLoad(1, 5, 3, 8)], vocabulary=10)
    of_tails = {name for name in found if not name.endswith("_p50_ms")}
    assert found.keys() - of_tails == {"ttft_p50_ms", "tpot_p50_ms", "itl_p50_ms", "e2e_p50_ms"}
    assert all(found[name].low is None for name in of_tails), "8 repetitions have no tails"
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
            side("ours", 0, 0, calls), side("theirs", 0, 0, calls, lost=1), [TimedLoad(1, 4, 3, 2)], vocabulary=10
        )


def test_tails_are_compared_where_there_are_enough_repetitions() -> None:
    """One generation in ten of ours is slow: the medians are the same, the 95th percentiles are not."""
    clock = iter(range(10_000))

    def ours(ids: np.ndarray, tokens: int) -> Iterator[int]:
        slow = next(clock) % 10 == 0
        for number in range(tokens):
            time.sleep(0.02 if slow and number else 0.0)
            yield number

    steady = side("steady", 0, 0, [])
    metrics = [metric for metric in catalog.of_kind(SlowestMetric) if metric.name in ("tpot_p50_ms", "tpot_p95_ms")]
    count = turns.repetitions(metrics)
    assert count == 72
    found = turns.differences(TimedModel("ours", ours, 0.0), steady, [TimedLoad(1, 1, 2, count)], vocabulary=10)
    tail, median = found["tpot_p95_ms"], found["tpot_p50_ms"]
    assert tail.value == pytest.approx(20, rel=0.5)
    assert tail.low is not None
    assert tail.high is not None
    assert abs(median.value) < 2
    gate = decision.Earlier("before", found, {"tpot_p95_ms": 0.1, "tpot_p50_ms": 0.1})
    known = {name: found[name] for name in ("tpot_p95_ms", "tpot_p50_ms")}
    limits = {name: GateSpec(rise_max=5) for name in known}
    verdicts = {each.metric: each.verdict for each in decision.judge(limits, known, earlier=gate)}
    assert verdicts["tpot_p50_ms"] is decision.Verdict.PASS
    assert verdicts["tpot_p95_ms"] is not decision.Verdict.PASS, "1 of 10 is slow, which a limit on the tail must see"


@pytest.mark.parametrize(("quantile", "fewest"), [(0.5, 6), (0.95, 72), (0.99, 368)])
def test_the_fewest_repetitions_are_those_that_give_bounds(quantile: float, fewest: int) -> None:
    assert intervals.fewest(quantile) == fewest
    assert intervals.quantile_interval(np.arange(fewest, dtype=float), quantile) is not None
    assert intervals.quantile_interval(np.arange(fewest - 1, dtype=float), quantile) is None
