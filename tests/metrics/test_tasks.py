"""Scores of tasks: the figures of their items, and what two artifacts can be compared on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from pydantic import ValidationError

from llmforge.metrics import catalog, tasks
from llmforge.metrics.metric import Measured
from llmforge.metrics.tasks import Score, TaskResult

ITEMS = 40


def result(
    ours: tuple[float, ...], theirs: tuple[float, ...] | None, digest: str = "00", **changed: object
) -> TaskResult:
    documents = tuple(range(len(ours)))
    fields: dict[str, object] = {
        "name": "quiz", "version": "1", "digest": digest, "few_shot": 0, "documents": documents,
        "scores": {"accuracy": Score.of("mean", ours, theirs, documents)}, "created": "2026-01-01T00:00:00+00:00",
        "engine": "an engine", "baseline": None if theirs is None else "a checkpoint",
    }  # fmt: skip
    return TaskResult.model_validate({**fields, **changed})


def answers(right: int) -> tuple[float, ...]:
    return tuple(float(i < right) for i in range(ITEMS))


def test_a_score_is_a_metric_that_gates_find_by_name() -> None:
    measured = Measured(tasks=(result(answers(30), answers(34)),))
    name = "task.quiz.accuracy"
    assert catalog.estimates(measured)[name].value == 0.75
    assert catalog.checkpoint_differences(measured)[name].value == pytest.approx(-0.1)
    assert catalog.names(measured)[-1] == name
    assert catalog.named(name).better == "higher"
    assert catalog.named("task.text.bits_per_byte").better == "lower"
    for unknown in ("task.quiz", "task.a/b.accuracy", "task..accuracy", "quiz.accuracy", "task.quiz.accuracy\n"):
        assert catalog.find(unknown) is None


def test_texts_give_perplexities_and_bits_of_all_their_words() -> None:
    rng = np.random.default_rng(0)
    ours, words = -rng.uniform(50, 90, ITEMS), rng.integers(10, 30, ITEMS)
    theirs = ours + 1
    columns = tuple(ours.tolist()), tuple(theirs.tolist()), tuple(range(ITEMS)), tuple(map(float, words))
    found = tasks.figures("perplexity", *columns)
    assert found.artifact.value == pytest.approx(math.exp(-ours.sum() / words.sum()))
    assert found.difference is not None
    assert found.difference.low is not None
    assert 0 < found.difference.low < found.difference.value
    bits = tasks.figures("bits", *columns)
    assert bits.artifact.value == pytest.approx(-ours.sum() / words.sum() / math.log(2))


def test_partial_scores_have_intervals_over_documents_and_what_is_not_finite_has_none() -> None:
    rng = np.random.default_rng(1)
    ours, theirs = tuple(rng.random(ITEMS)), tuple(rng.random(ITEMS))
    found = tasks.figures("mean", ours, theirs, tuple(range(ITEMS)))
    assert found.difference is not None
    assert found.difference.value == pytest.approx(np.mean(ours) - np.mean(theirs))
    assert found.difference.low is not None
    assert found.difference.low < found.difference.value
    broken = tasks.figures("mean", (*ours[:-1], math.nan), theirs, tuple(range(ITEMS)))
    assert math.isnan(broken.artifact.value)
    assert broken.difference is not None
    assert broken.difference.low is None


def test_two_artifacts_are_compared_where_they_were_asked_the_same() -> None:
    name = "task.quiz.accuracy"
    ours, theirs = result(answers(30), answers(34)), result(answers(36), None)
    found = tasks.between([ours], [theirs], name)
    assert not isinstance(found, str)
    assert found.value == pytest.approx(-0.15)
    assert found.high is not None
    assert found.high < 0
    assert "not measured of both" in str(tasks.between([ours], [], name))
    assert "items are others" in str(tasks.between([ours], [result(answers(36), None, digest="11")], name))


@pytest.mark.parametrize("changed", [{"documents": (0,) * 39}, {"documents": (1,) * 40}, {"scores": {}}])
def test_a_result_that_is_not_whole_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        result(answers(30), None, **changed)
