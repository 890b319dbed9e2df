"""Budgets of lossy passes: when the text that was read is enough, and that nothing is run twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from llmforge.verification import probe, text_loss
from llmforge.verification.text_loss import TextLoss

VOCABULARY, TOKENS, RUNS = 16, 40, 24


class Noisy:
    """Stands for a session: its logits for a run differ from the true ones by as much as `noise` says of the run."""

    def __init__(self, noise: list[float]) -> None:
        self.noise, self.ran = noise, 0

    def logits(self, number: int) -> np.ndarray:
        self.ran += 1
        rng = np.random.default_rng(number)
        true = rng.normal(size=(TOKENS, VOCABULARY))
        return (true + self.noise[number] * rng.normal(size=true.shape)).astype(np.float32)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[probe.Run]:
    runs = [probe.schedule(f"window {i}", [np.zeros(TOKENS, np.int64)], [(TOKENS,)]) for i in range(RUNS)]

    def drive(session: Noisy, run: probe.Run, *, caches: bool) -> Iterator[probe.StepOutcome]:
        yield probe.StepOutcome(session.logits(runs.index(run)), {})

    monkeypatch.setattr(probe, "drive", drive)
    return runs


def test_a_cost_far_below_its_budget_is_decided_early(runs: list[probe.Run]) -> None:
    before, after = Noisy([0.0] * RUNS), Noisy([0.1] * RUNS)
    cost = TextLoss(runs).measure(lambda: before, after, budget=0.02)
    assert cost.names == tuple(f"window {i}" for i in range(5))
    assert cost.tokens == 5 * TOKENS
    assert 0 < cost.kld_mean < 0.02


def test_one_near_its_budget_is_measured_on_everything(runs: list[probe.Run]) -> None:
    whole = TextLoss(runs).measure(lambda: Noisy([0.0] * RUNS), Noisy([0.1] * RUNS), budget=0.0)
    assert len(whole.names) == RUNS
    near = TextLoss(runs).measure(lambda: Noisy([0.0] * RUNS), Noisy([0.1] * RUNS), whole.kld_mean * 1.01)
    assert near == whole


def test_a_loss_that_few_texts_show_is_not_passed_over(runs: list[probe.Run]) -> None:
    """Two of the first five cost a hundred times as much: their spread keeps the rest from being left out."""
    noise = [0.05] * RUNS
    noise[2] = noise[4] = 0.5
    cost = TextLoss(runs).measure(lambda: Noisy([0.0] * RUNS), Noisy(noise), budget=0.06)
    assert len(cost.names) > 5
    assert (
        cost.kld_mean > TextLoss(runs).measure(lambda: Noisy([0.0] * RUNS), Noisy([0.05] * RUNS), budget=0.06).kld_mean
    )


def test_a_graph_that_was_measured_does_not_run_again(runs: list[probe.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    loss = TextLoss(runs)
    first, second, third = Noisy([0.0] * RUNS), Noisy([0.1] * RUNS), Noisy([0.12] * RUNS)
    loss.measure(lambda: first, second, budget=0.02)
    assert (first.ran, second.ran) == (5, 5)
    loss.measure(lambda: second, third, budget=0.02)
    assert (second.ran, third.ran) == (5, 5)
    monkeypatch.setattr(text_loss, "KEPT_BYTES", 2 * TOKENS * VOCABULARY * 4)
    loss.measure(lambda: third, second, budget=0.02)
    again = Noisy([0.12] * RUNS)
    loss.measure(lambda: second, again, budget=0.02)
    assert second.ran == 5 + 5 + 3  # two of its five runs were kept


def test_logits_that_are_not_finite_are_told_at_once(runs: list[probe.Run]) -> None:
    cost = TextLoss(runs).measure(lambda: Noisy([0.0] * RUNS), Noisy([0.0, np.nan, *[0.0] * 22]), budget=9.0)
    assert cost.not_finite is not None
    assert cost.not_finite[0].name == "window 1"
    assert np.isnan(cost.kld_mean)


def test_rows_of_a_run_are_texts_of_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's loss is its own; the mean of the tokens that were asked for counts for all of a step."""
    run = probe.schedule("ragged", [np.zeros(9, np.int64), np.zeros(6, np.int64)], [(8, 5), (1, 1)])
    run = probe.Run(run.name, (replace(run.steps[0], every=4), run.steps[1]))
    rng = np.random.default_rng(0)
    true = [rng.normal(size=(4, VOCABULARY)).astype(np.float32), rng.normal(size=(2, VOCABULARY)).astype(np.float32)]
    moved = [each.copy() for each in true]
    moved[0][2:] += rng.normal(size=(2, VOCABULARY)).astype(np.float32)  # of the second row: tokens 0 and 4

    def drive(session: list[np.ndarray], run: probe.Run, *, caches: bool) -> Iterator[probe.StepOutcome]:
        yield from (probe.StepOutcome(logits, {}) for logits in session)

    monkeypatch.setattr(probe, "drive", drive)
    cost = TextLoss([run]).measure(lambda: true, moved, budget=9.0)  # type: ignore[arg-type, return-value]
    assert cost.tokens == 15
    assert cost.kld_mean == pytest.approx(
        text_loss.score(true[0], moved[0], np.zeros(4, np.int64), (text_loss.KLD,))["kld"][2:].mean() * 5 / 15
    )
