"""Score intervals of paired shares: against the likelihood by brute force, and by how often they hold the truth."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from llmforge.metrics import paired

Z = NormalDist().inv_cdf(0.975)


def score_statistic(gained: int, lost: int, pairs: int, difference: float) -> float:
    """Hold a difference against counts by the likeliest shares on a fine grid: no formula of Tango's."""
    lost_share = np.linspace(max(0.0, -difference), (1 - difference) / 2, 200_001)[1:-1]
    gained_share, same = lost_share + difference, 1 - 2 * lost_share - difference
    log_likelihood = gained * np.log(gained_share) + lost * np.log(lost_share) + (pairs - gained - lost) * np.log(same)
    best = lost_share[np.argmax(log_likelihood)]
    return (gained - lost - pairs * difference) / np.sqrt(pairs * (2 * best + difference - difference**2))


@pytest.mark.parametrize(("gained", "lost", "pairs"), [(12, 2, 50), (3, 9, 100), (1, 1, 40), (5, 1, 8)])
def test_bounds_are_where_the_score_statistic_is_z(gained: int, lost: int, pairs: int) -> None:
    low, high = paired.tango(gained, lost, pairs, Z)
    assert low < (gained - lost) / pairs < high
    assert score_statistic(gained, lost, pairs, low) == pytest.approx(Z, abs=2e-3)
    assert score_statistic(gained, lost, pairs, high) == pytest.approx(-Z, abs=2e-3)


def test_bounds_turn_round_with_the_sides_and_have_a_width_where_no_item_differs() -> None:
    low, high = paired.tango(9, 3, 60, Z)
    assert paired.tango(3, 9, 60, Z) == pytest.approx((-high, -low))
    low, high = paired.tango(0, 0, 60, Z)
    assert (low, high) == pytest.approx((-(Z**2) / (60 + Z**2), Z**2 / (60 + Z**2)))
    assert paired.tango(8, 0, 8, Z)[1] == pytest.approx(1, abs=1e-9)


def alike(rng: np.random.Generator, documents: int, items: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw items of which a quarter of the documents changes many, and of one document in one direction."""
    clusters = np.repeat(np.arange(documents), items)
    changed = rng.random(documents * items) < rng.choice([0.0, 0.4], documents, p=[0.75, 0.25])[clusters]
    worse = np.repeat(rng.random(documents) < 0.5, items)
    return np.where(changed, ~worse, True) * 1.0, np.where(changed, worse, True) * 1.0, clusters


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng, rounds, held = np.random.default_rng(0), 1500, 0
    for _ in range(rounds):
        kind = rng.random(120)
        ours, theirs = ((kind < 0.6) | (kind >= 0.9)).astype(float), (kind < 0.85).astype(float)  # 0.7 and 0.85
        found = paired.difference(ours, theirs, np.arange(120))
        held += found.low <= -0.15 <= found.high
    assert 0.935 <= held / rounds <= 0.975


def test_items_of_one_document_widen_an_interval_as_much_as_they_must() -> None:
    rng, rounds = np.random.default_rng(1), 1500
    held = alone = 0
    for _ in range(rounds):
        ours, theirs, clusters = alike(rng, 40, 6)
        clustered = paired.difference(ours, theirs, clusters)
        ignored = paired.difference(ours, theirs, np.arange(len(ours)))
        held += clustered.low <= 0 <= clustered.high
        alone += ignored.low <= 0 <= ignored.high
    assert held / rounds >= 0.93
    assert alone / rounds <= 0.9  # as if items were independent


def test_what_a_sample_is_too_small_for_has_no_interval() -> None:
    ours, theirs = np.ones(28), np.zeros(28)
    few = paired.difference(ours, theirs, np.repeat(np.arange(7), 4))
    assert (few.value, few.low, few.high, few.samples, few.of) == (1.0, None, None, 7, "documents")
    enough = paired.difference(ours, theirs, np.arange(28))
    assert enough.low is not None
    assert enough.low < 1.0 == enough.high
    assert (enough.samples, enough.of) == (28, "items")


def test_where_nothing_differs_the_width_is_that_of_items_that_are_right_as_alike() -> None:
    rng = np.random.default_rng(2)
    clusters = np.repeat(np.arange(30), 5)
    right = (rng.random(150) < 0.6).astype(float)
    alike = np.repeat((rng.random(30) < 0.6).astype(float), 5)
    apart, together = (paired.difference(each, each, clusters) for each in (right, alike))
    assert apart.value == together.value == 0
    assert apart.high == pytest.approx(2.045**2 / (150 + 2.045**2), rel=0.3)  # about 150 items
    assert together.high == pytest.approx(2.045**2 / (30 + 2.045**2), rel=0.1)  # 30


def test_where_all_are_right_a_document_counts_as_one_item() -> None:
    same = np.ones(40)
    clustered = paired.difference(same, same, np.repeat(np.arange(10), 4))
    assert clustered.value == 0
    assert clustered.high == pytest.approx(2.2622**2 / (10 + 2.2622**2), abs=1e-3)  # t with 9 degrees of freedom
    share = paired.share(same, np.repeat(np.arange(10), 4))
    assert share.value == share.high == 1
    assert share.low == pytest.approx(10 / (10 + 2.2622**2), abs=1e-3)
