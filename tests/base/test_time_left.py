"""The time left of a build: from predictions, from what is done, and from how fast stages before were."""

from __future__ import annotations

import pytest

from llmforge.base.time_left import TimeLeft

PREDICTED = (("Trace", 4.0), ("Finish proofs", 2.0), ("Calibrate", 100.0), ("Pass", 1.0), ("Finish proofs", 10.0))


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_without_a_prediction_the_pace_tells(clock: Clock) -> None:
    left = TimeLeft(clock=clock)
    assert (left.of_stage(), left.of_all()) == (None, None)
    left.stage("Send requests")
    clock.now += 5
    left.advance(0, 4)
    assert left.of_stage() is None
    clock.now += 10
    left.advance(1, 4)
    assert left.of_stage() == pytest.approx(30)
    clock.now += 4
    assert left.of_stage() == pytest.approx(26)
    assert left.of_all() is None
    left.advance(4, 4)
    assert left.of_stage() is None


def test_a_prediction_counts_the_less_the_more_is_done(clock: Clock) -> None:
    left = TimeLeft(PREDICTED, clock)
    left.stage("Trace")
    assert left.of_all() == pytest.approx(117)
    clock.now += 1
    assert (left.of_stage(), left.of_all()) == (pytest.approx(3), pytest.approx(116))
    clock.now += 4  # longer than predicted: nobody knows
    assert (left.of_stage(), left.of_all()) == (None, pytest.approx(113))
    left = TimeLeft(PREDICTED, clock)
    left.stage("Calibrate")
    clock.now += 20  # of what comes before the layers
    assert left.of_stage() == pytest.approx(80)
    left.advance(0, 10)
    assert left.of_stage() == pytest.approx(80)
    clock.now += 32
    assert left.of_stage() == pytest.approx(48)
    left.advance(2, 10)  # whose pace says 128
    assert left.of_stage() == pytest.approx(0.8 * (0.8 * 80 + 0.2 * 160))
    clock.now += 112
    left.advance(9, 10)  # whose pace says 16
    assert left.of_stage() == pytest.approx(0.1 * (0.1 * 80 + 0.9 * 160))
    clock.now += 14
    assert left.of_stage() == pytest.approx(1.2)
    clock.now += 2
    assert (left.of_stage(), left.of_all()) == (None, pytest.approx(11))


def test_layers_that_were_kept_are_no_measure_of_pace(clock: Clock) -> None:
    left = TimeLeft(PREDICTED, clock)
    left.stage("Calibrate: 5/10 layers reused")
    left.advance(5, 10)
    assert left.of_stage() == pytest.approx(50)
    clock.now += 10
    left.advance(6, 10)  # ten seconds a layer
    assert left.of_stage() == pytest.approx(0.4 * (0.4 * 100 + 0.6 * 100))


def test_what_took_longer_before_is_taken_to_hold(clock: Clock) -> None:
    left = TimeLeft(PREDICTED, clock)
    left.stage("Trace")
    clock.now += 28
    left.stage("Check passes")  # not predicted
    clock.now += 1
    left.stage("Finish proofs")
    assert left.of_stage() == pytest.approx(2 * 2)  # 28 + 20 of 4 + 20
    assert left.of_all() == pytest.approx(2 * 113)
    left = TimeLeft(PREDICTED, clock)
    left.stage("Trace")
    clock.now += 1000
    left.stage("Finish proofs")
    assert left.of_stage() == pytest.approx(16)  # at most eight times


def test_stages_are_found_in_their_order(clock: Clock) -> None:
    left = TimeLeft(PREDICTED, clock)
    for title in ("Trace", "Finish proofs", "Calibrate: 3/4 reused", "Pass one"):
        left.stage(title)
    clock.now += 0.25
    left.stage("Pass two")  # the prediction is for all of them
    assert left.of_stage() == pytest.approx(0.5 - 0.25)  # stages before took no time: half, at least
    left.stage("Finish proofs")
    assert left.of_stage() == pytest.approx(5)
    left.stage("Publish")
    assert left.of_stage() is None


def test_what_is_reused_is_no_measure(clock: Clock) -> None:
    left = TimeLeft(PREDICTED, clock)
    left.stage("Trace: reused")
    assert left.of_stage() is None
    clock.now += 0.01
    left.stage("Calibrate")
    assert left.of_stage() == pytest.approx(100)
