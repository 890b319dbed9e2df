"""The arithmetic of serving, on times that are written down by hand."""

from __future__ import annotations

import numpy as np
import pytest

from llmforge.base.errors import UsageError
from llmforge.metrics.serving import Distribution, Objective, RequestOutcome, figures


def outcome(sent: float, *tokens: float, ended: float | None = None, error: str | None = None) -> RequestOutcome:
    return RequestOutcome(sent, tokens, tokens[-1] if ended is None else ended, 10, len(tokens), error)


def test_one_request() -> None:
    one = outcome(1.0, 1.5, 1.6, 1.9, ended=2.0)
    assert one.ttft_ms == pytest.approx(500)
    assert one.tpot_ms == pytest.approx(200)  # 0.4 s for the two tokens after the first
    assert one.latency_ms == pytest.approx(1000)


def test_a_request_of_one_token_has_no_tpot_and_one_of_none_no_ttft() -> None:
    assert outcome(0.0, 0.5).tpot_ms is None
    assert RequestOutcome(0.0, (), 1.0, 10, 0).ttft_ms is None


def test_tpot_goes_by_tokens_where_arrivals_hold_several() -> None:
    assert RequestOutcome(0.0, (1.0, 2.0), 2.0, 10, 5).tpot_ms == pytest.approx(250)


def test_figures_of_a_load() -> None:
    # Two requests side by side for two seconds, and one that failed in its middle.
    measured = figures(
        [[outcome(0.0, 0.1, 0.2, 0.4), outcome(0.5, 1.0, 1.5, 2.0), outcome(0.2, 0.3, ended=0.5, error="broken")]],
        Objective(ttft_ms=200),
    )
    assert (measured.runs, measured.completed, measured.failed, measured.errors) == (1, 2, 1, {"broken": 1})
    assert measured.duration_s == pytest.approx(2.0)
    assert (measured.prompt_tokens, measured.output_tokens) == (20, 6)  # of what failed, nothing counts
    assert measured.requests_per_second.value == pytest.approx(1.0)
    assert measured.output_tokens_per_second.value == pytest.approx(3.0)
    assert measured.total_tokens_per_second.value == pytest.approx(13.0)
    assert measured.ttft_ms is not None
    assert measured.ttft_ms.p50.value == pytest.approx(300)  # of 100 and 500
    assert measured.ttft_ms.mean == pytest.approx(300)
    assert measured.tpot_ms is not None
    assert measured.tpot_ms.p50.value == pytest.approx(325)  # of 150 and 500
    assert measured.itl_ms is not None
    assert measured.itl_ms.p50.samples == 4
    assert measured.itl_ms.p50.value == pytest.approx(350)  # of 100, 200, 500, 500
    assert measured.latency_ms is not None
    assert measured.latency_ms.p99 == pytest.approx(400 + 0.99 * 1100)  # linear between 400 and 1500
    assert measured.goodput_rps is not None
    assert measured.goodput_rps.value == pytest.approx(0.5)  # the first alone
    assert measured.good_share == pytest.approx(1 / 3)


def test_rates_are_medians_over_runs_and_have_bounds_from_six_on() -> None:
    def run(seconds: float) -> list[RequestOutcome]:
        return [outcome(0.0, seconds)]

    few = figures([run(1.0), run(2.0), run(4.0)])
    assert few.requests_per_second.value == pytest.approx(0.5)
    assert few.requests_per_second.low is None
    assert few.duration_s == pytest.approx(7.0)
    many = figures([run(float(seconds)) for seconds in (1, 2, 3, 4, 5, 6)])
    assert (many.requests_per_second.low, many.requests_per_second.high) == (pytest.approx(1 / 6), 1.0)
    assert (few.goodput_rps, few.good_share) == (None, None)


def test_a_load_that_failed_whole_has_no_durations() -> None:
    measured = figures(
        [[RequestOutcome(0.0, (), 1.0, 10, 0, "full"), RequestOutcome(0.0, (), 1.0, 10, 0, "full")]], Objective()
    )
    assert (measured.completed, measured.failed, measured.errors) == (0, 2, {"full": 2})
    assert measured.ttft_ms is measured.tpot_ms is measured.itl_ms is measured.latency_ms is None
    assert measured.output_tokens_per_second.value == 0
    assert measured.good_share == 0


def test_no_request_has_no_figures() -> None:
    with pytest.raises(UsageError, match="without requests"):
        figures([])
    with pytest.raises(UsageError, match="without requests"):
        figures([[outcome(0.0, 1.0)], []])


def test_a_distribution_of_many_has_bounds_of_its_median_and_of_dependent_ones_none() -> None:
    values = np.random.default_rng(0).exponential(100, 5000).tolist()
    made = Distribution.of(values, samples="requests")
    assert made is not None
    assert made.p50.low is not None
    assert made.p50.high is not None
    assert made.p50.low < 100 * np.log(2) < made.p50.high < made.p95 < made.p99
    assert made.p50.high - made.p50.low < 10
    dependent = Distribution.of(values, samples="gaps", independent=False)
    assert dependent is not None
    assert dependent.p50.low is None
    assert Distribution.of([], samples="requests") is None


class TestObjective:
    def test_is_read_with_units(self) -> None:
        assert Objective.parse("ttft=200ms, tpot=50ms,latency=2.5s") == Objective(200, 50, 2500)
        assert Objective.parse("tpot=1s") == Objective(tpot_ms=1000)

    @pytest.mark.parametrize("text", ["", "ttft", "ttft=200", "ttft=0ms", "ttft=-1ms", "itl=5ms", "ttft=1ms,ttft=2ms"])
    def test_refuses_what_makes_no_sense(self, text: str) -> None:
        with pytest.raises(UsageError, match="expected ttft, tpot or latency"):
            Objective.parse(text)

    def test_is_met_by_requests_within_all_bounds(self) -> None:
        one = outcome(0.0, 0.2, 0.3, ended=0.4)  # 200, 100 and 400 ms
        assert Objective().meets(one)
        assert Objective(200.1, 100.1, 400.1).meets(one)
        assert not Objective(ttft_ms=199).meets(one)
        assert not Objective(tpot_ms=99).meets(one)
        assert not Objective(latency_ms=399).meets(one)
        assert not Objective().meets(outcome(0.0, 0.1, error="broken"))
        assert Objective(tpot_ms=1).meets(outcome(0.0, 0.1))
