"""Gates on tasks: a drop is decided on the score interval of the paired difference to the checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

from llmforge.base.errors import RecipeError
from llmforge.gates import decision
from llmforge.gates.decision import GateResult, Verdict
from llmforge.metrics import catalog
from llmforge.metrics.metric import Measured
from llmforge.metrics.tasks import Score, TaskResult
from llmforge.recipe import GatesFile, GateSpec

NAME = "task.quiz.accuracy"


def measured(items: int, lost: int, gained: int) -> Measured:
    """Make a task of which the artifact loses some items of its checkpoint, and gains others."""
    theirs = (np.arange(items) >= items // 4).astype(float)  # three quarters are right
    ours = theirs.copy()
    ours[items - lost :] = 0.0
    ours[:gained] = 1.0
    documents = tuple(range(items))
    score = Score.of("mean", tuple(ours.tolist()), tuple(theirs.tolist()), documents)
    task = TaskResult(
        name="quiz", version="1", digest="0", few_shot=0, documents=documents, scores={"accuracy": score},
        created="2026-01-01T00:00:00+00:00", engine="engine", baseline="checkpoint",
    )  # fmt: skip
    return Measured(tasks=(task,))


def judge(found: Measured, **limits: float) -> GateResult:
    (result,) = decision.judge(
        {NAME: GateSpec.model_validate(limits)}, catalog.estimates(found), original=decision.checkpoint(found)
    )
    return result


def test_a_drop_passes_fails_or_is_left_open_by_its_interval() -> None:
    passed = judge(measured(2000, 10, 10), drop_max=0.01)
    assert passed.verdict is Verdict.PASS
    assert "against the checkpoint" in passed.explanation
    failed = judge(measured(2000, 80, 10), drop_max=0.01)
    assert failed.verdict is Verdict.FAIL
    assert failed.measured is not None
    assert failed.measured.value == pytest.approx(-0.035)
    few = judge(measured(200, 1, 1), drop_max=0.01)
    assert few.verdict is Verdict.INCONCLUSIVE
    assert few.samples_needed is not None
    assert few.samples_needed > 200
    assert "items needed to decide" in few.explanation


def test_the_number_that_an_open_gate_names_decides() -> None:
    few = judge(measured(400, 4, 4), drop_max=0.01)
    assert few.samples_needed is not None
    more = few.samples_needed
    assert judge(measured(more, more // 100, more // 100), drop_max=0.01).verdict is Verdict.PASS


def test_the_pairs_decide_what_both_shares_alone_would_leave_open() -> None:
    found = measured(2000, 10, 10)
    figures = found.tasks[0].scores["accuracy"].figures
    assert figures.baseline is not None
    assert figures.artifact.low is not None
    assert figures.artifact.low - figures.baseline.value < -0.01  # of one side alone, and the other has a width, too
    assert judge(found, drop_max=0.01).verdict is Verdict.PASS


def test_an_absolute_limit_is_held_against_the_share() -> None:
    assert judge(measured(2000, 10, 10), min=0.7).verdict is Verdict.PASS
    assert judge(measured(2000, 10, 10), min=0.8).verdict is Verdict.FAIL


def test_a_task_that_was_not_measured_fails() -> None:
    (result,) = decision.judge({NAME: GateSpec(drop_max=0.01)}, {}, original=decision.checkpoint(Measured()))
    assert result.verdict is Verdict.FAIL
    assert "not measured" in result.explanation


def test_a_file_of_gates_takes_scores_of_tasks_and_refuses_to_limit_their_rise(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "gates.yaml"
    file.write_text("gates: {task.quiz.accuracy: {drop_max: 0.01}, task.text.bits_per_byte: {rise_max: 0.1}}")
    assert set(GatesFile.load(file).gates) == {NAME, "task.text.bits_per_byte"}
    file.write_text("gates: {task.quiz.accuracy: {rise_max: 0.01}}")
    with pytest.raises(RecipeError, match="would limit an improvement"):
        GatesFile.load(file)
    file.write_text("gates: {task.quiz: {min: 0.5}}")
    with pytest.raises(RecipeError, match=r"task\.quiz"):
        GatesFile.load(file)
