"""Places are drawn so often that a fault of a known share is missed no more often than stated."""

from __future__ import annotations

import numpy as np
import pytest

from llmforge.verification.drawn_places import DRAWS, MISSED, SHARE, Extent, Share, draw, draws_for, stratified
from llmforge.verification.promises import ROWS, Promises, SyntheticStep

PROMISED = Promises(context=1024, batch=8, vocabulary=96)
EXTENT = Extent(reach=1024, tokens=512, slots=1 << 16, rows_of_tokens=10_000)


def steps(promised: Promises = PROMISED, extent: Extent = EXTENT, share: Share | None = None) -> list[SyntheticStep]:
    return list(draw(promised, extent, share or Share(1)))


def test_the_count_of_draws_is_the_least_that_keeps_what_is_stated() -> None:
    assert DRAWS == draws_for(SHARE, MISSED) == 90
    assert (1 - SHARE) ** DRAWS <= MISSED < (1 - SHARE) ** (DRAWS - 1)


@pytest.mark.parametrize("faulty", ["a range", "every twentieth", "at random"])
def test_a_fault_of_the_share_is_missed_no_more_often_than_stated(faulty: str) -> None:
    size = 1000
    wrong = np.zeros(size, bool)
    if faulty == "a range":
        wrong[431:481] = True
    elif faulty == "every twentieth":
        wrong[::20] = True
    else:
        wrong[np.random.default_rng(3).choice(size, 50, replace=False)] = True
    trials = 4000
    missed = sum(not wrong[stratified(np.random.default_rng(seed), 0, size - 1)].any() for seed in range(trials))
    assert missed / trials <= MISSED + 3 * np.sqrt(MISSED / trials)
    assert missed == 0 or faulty != "a range"


def test_strata_cover_their_range_and_a_short_axis_whole() -> None:
    drawn = stratified(np.random.default_rng(1), 5, 1004)
    assert len(drawn) == DRAWS
    assert drawn.min() >= 5
    assert drawn.max() <= 1004
    assert (np.diff(drawn) >= 0).all()
    assert stratified(np.random.default_rng(1), 2, 40).tolist() == list(range(2, 41))


def test_all_axes_are_drawn_within_what_is_promised() -> None:
    made = steps()
    single = [each for each in made if each.batch == 1 and each.step.ids.shape[1] == 1]
    several = [each for each in made if each.batch == 1 and each.step.ids.shape[1] > 1 and not each.alike]
    assert len(single) == len(several) == DRAWS
    assert max(each.step.ids.shape[1] for each in several) > 500
    assert all(each.capacity <= PROMISED.context for each in made)
    assert {each.batch for each in made} == set(range(1, PROMISED.batch + 1))
    assert sum(each.alike for each in made) == 2
    lengths = np.array([each.step.ids.shape[1] for each in several])
    past = np.array([int(each.step.past[0]) for each in several])
    assert len({*past}) > 60
    assert abs(np.corrcoef(lengths, past / (PROMISED.context - lengths))[0, 1]) < 0.3


def test_large_batches_are_drawn_where_caches_have_room() -> None:
    many = steps(Promises(context=64, batch=64, vocabulary=96), Extent(64, 32, 1 << 12, 100_000))
    assert max(each.batch for each in many) > 60
    assert set(range(2, ROWS + 1)) <= {each.batch for each in many}
    few = steps(Promises(context=64, batch=64, vocabulary=96), Extent(64, 32, 20, 100_000))
    assert all(each.batch == 1 or each.batch * each.step.past.max() <= 20 for each in few)
    assert max(each.batch for each in few) <= 20


def test_a_build_repeats_and_another_seed_draws_others() -> None:
    def described(made: list[SyntheticStep]) -> list[str]:
        return [each.where for each in made]

    assert described(steps()) == described(steps())
    assert described(steps()) != described(steps(share=Share(2)))


def test_subgraphs_that_share_draws_have_all_of_them_together() -> None:
    parts = [[each.where for each in steps(share=Share(1, number, 3))] for number in range(3)]
    whole = [each.where for each in steps(share=Share(1))]
    assert abs(sum(map(len, parts)) - len(whole)) <= 3
    assert all(len(part) >= len(whole) // 3 for part in parts)
