"""Scores of tasks, item by item, of an artifact and of its checkpoint, and the figures that they make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from llmforge.metrics import paired
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.record import ReportRecord
from llmforge.metrics.studentized import bounds, studentized

PREFIX = "task."  # of the name of a metric of a task: task.NAME.SCORE
MOST_TASKS = 256
MOST_ITEMS = 1_000_000

Form = Literal["mean", "perplexity", "bits"]
Floats = NDArray[np.float64]


class ScoreFigures(ReportRecord):
    """What the items of one score make; a difference is of the artifact less the checkpoint, item by item."""

    artifact: Estimate
    baseline: Estimate | None
    difference: Estimate | None


class Score(ReportRecord):
    """One score of every item of a task, in the order of its items.

    Of `mean` the figure is Σ values / N. Of texts, `values` are log-likelihoods in nats and `weights` words or bytes:
    perplexity is exp(-Σ values / Σ weights), and bits are -Σ values / Σ weights / ln 2.
    """

    form: Form = "mean"
    artifact: tuple[float, ...] = Field(max_length=MOST_ITEMS)
    baseline: tuple[float, ...] | None = Field(max_length=MOST_ITEMS)  # None: it was not measured
    weights: tuple[float, ...] | None = Field(default=None, max_length=MOST_ITEMS)
    figures: ScoreFigures

    @property
    def better(self) -> Literal["lower", "higher"]:
        """Which way is better."""
        return "higher" if self.form == "mean" else "lower"

    @classmethod
    def of(
        cls,
        form: Form,
        artifact: tuple[float, ...],
        baseline: tuple[float, ...] | None,
        documents: tuple[int, ...],
        weights: tuple[float, ...] | None = None,
    ) -> Score:
        """Make the figures of items, of which each is of one of the `documents` 0 … D-1."""
        made = figures(form, artifact, baseline, documents, weights)
        return cls(form=form, artifact=artifact, baseline=baseline, weights=weights, figures=made)


class TaskResult(ReportRecord):
    """A task on an artifact and, where it was measured, on its checkpoint: the same requests to both."""

    name: str
    version: str  # of the task, as its author counts
    digest: str  # SHA-256 of all requests and targets
    few_shot: int
    documents: tuple[int, ...] = Field(max_length=MOST_ITEMS)  # 0 … D-1, that each item is of
    scores: dict[str, Score]  # by name
    created: str  # UTC, ISO 8601
    engine: str  # what ran the artifact, as text
    baseline: str | None  # what it was held against, as text

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        count = len(self.documents)
        if not count or not self.scores or {*self.documents} != {*range(max(self.documents) + 1)}:
            raise ValueError("a task has items of documents 0 … D-1, and scores")
        for score in self.scores.values():
            columns = (score.artifact, score.baseline, score.weights)
            if any(column is not None and len(column) != count for column in columns):
                raise ValueError("a score of a task has another number of items")
        return self

    @property
    def metrics(self) -> dict[str, Score]:
        """Its scores, by the name of their metric."""
        return {f"{PREFIX}{self.name}.{name}": score for name, score in self.scores.items()}

    def again(self) -> dict[str, ScoreFigures]:
        """Make the figures of each score of its items, again."""
        return {
            name: figures(score.form, score.artifact, score.baseline, self.documents, score.weights)
            for name, score in self.scores.items()
        }


def merge(before: Sequence[TaskResult], measured: Sequence[TaskResult]) -> tuple[TaskResult, ...]:
    """Put results in the place of those of the same name."""
    return tuple({each.name: each for each in (*before, *measured)}.values())


def between(ours: Sequence[TaskResult], theirs: Sequence[TaskResult], name: str) -> Estimate | str:
    """Bound the difference of a metric of a task between two artifacts that were asked the same; else say why not."""
    here, there = (next((task for task in side if name in task.metrics), None) for side in (ours, theirs))
    if here is None or there is None:
        return f"{name} was not measured of both"
    left, right = here.metrics[name], there.metrics[name]
    if here.digest != there.digest or left.form != right.form or len(left.artifact) != len(right.artifact):
        return "its items are others: another task, or another number of items or examples"
    made = figures(left.form, left.artifact, right.artifact, here.documents, left.weights).difference
    assert made is not None
    return made


def figures(
    form: Form,
    artifact: tuple[float, ...],
    baseline: tuple[float, ...] | None,
    documents: tuple[int, ...],
    weights: tuple[float, ...] | None = None,
) -> ScoreFigures:
    """Estimate the figure of each side, and how far the artifact's is from the baseline's.

    Items that are right or wrong have score intervals (`paired`); others bounds over documents (`studentized`).
    """
    ours, clusters = np.asarray(artifact, np.float64), np.asarray(documents, np.int64)
    theirs = None if baseline is None else np.asarray(baseline, np.float64)
    sides = [ours] if theirs is None else [ours, theirs]
    if not all(np.isfinite(side).all() for side in sides):
        unknown = Estimate(value=math.nan, low=None, high=None, samples=len(ours), of="items")
        return ScoreFigures(
            artifact=unknown,
            baseline=theirs if theirs is None else unknown,
            difference=None if theirs is None else unknown,
        )
    if form == "mean" and all(np.isin(side, (0.0, 1.0)).all() for side in sides):
        return ScoreFigures(
            artifact=paired.share(ours, clusters),
            baseline=None if theirs is None else paired.share(theirs, clusters),
            difference=None if theirs is None else paired.difference(ours, theirs, clusters),
        )
    counts = np.ones(len(ours)) if weights is None else np.asarray(weights, np.float64)
    return ScoreFigures(
        artifact=over_documents(form, [ours], counts, clusters),
        baseline=None if theirs is None else over_documents(form, [theirs], counts, clusters),
        difference=None if theirs is None else over_documents(form, [ours, theirs], counts, clusters),
    )


def over_documents(form: Form, sides: list[Floats], counts: Floats, clusters: NDArray[np.int64]) -> Estimate:
    """Bound the figure of a side, or the difference of two, over documents."""
    documents = int(clusters.max()) + 1
    sums: Floats = np.stack([np.bincount(clusters, each, documents) for each in (counts, *sides)], 1).astype(np.float64)

    def statistic(totals: Floats) -> Floats:
        made = [_figure(form, totals[:, 1 + i], totals[:, 0]) for i in range(len(sides))]
        return (made[0] if len(made) == 1 else made[0] - made[1])[:, None]

    (found,) = studentized(sums, statistic)
    low, high = bounds(found) or (None, None)
    of = "items" if documents == len(clusters) else "documents"
    return Estimate(value=found.value, low=low, high=high, samples=documents, of=of)


def _figure(form: Form, sums: Floats, counts: Floats) -> Floats:
    mean: Floats = sums / counts
    if form == "mean":
        return mean
    made: Floats = np.exp(-mean) if form == "perplexity" else -mean / math.log(2)
    return made
