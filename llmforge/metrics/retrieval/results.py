"""What an embedder finds, or a reranker puts first, beside its checkpoint on the same queries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from llmforge.metrics import tasks
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.record import ReportRecord
from llmforge.metrics.retrieval import ranking
from llmforge.metrics.retrieval.corpus import MOST_PASSAGES, MOST_QUERIES, RetrievalCorpus
from llmforge.metrics.tasks import ScoreFigures

PREFIX = "retrieval."  # of the name of a metric
NDCG, RECALL, COSINE, SPEARMAN, KENDALL = "ndcg_10", "recall_10", "cosine", "spearman", "kendall"
TAIL_COSINE = "cosine_p01"  # the 1 % quantile of `COSINE`, whose mean is `cosine_mean`
_TAIL = 0.01
_MOST = MOST_PASSAGES + MOST_QUERIES
_DIGITS = 7  # of a cosine that is kept: embeddings are fp32

Figure = Callable[[Sequence[int], Collection[int]], float]  # of an order, and what of it is relevant
Scores = Sequence[NDArray[np.float32]]


@dataclass(frozen=True)
class Side:
    """What one side made: scores of each query's passages, and all embeddings [queries + passages, D] if there are."""

    scores: Scores
    embeddings: NDArray[np.float32] | None = None


class Column(ReportRecord):
    """One value of each query, or of each text, of the artifact and, where it has its own, of the checkpoint."""

    artifact: tuple[float, ...] = Field(max_length=_MOST)
    baseline: tuple[float, ...] | None = Field(default=None, max_length=_MOST)


class RetrievalResult(ReportRecord):
    """An artifact and its checkpoint on one corpus."""

    kind: Literal["embedder", "reranker"]
    digest: str  # SHA-256 of the corpus, and of how many candidates a reranker orders
    queries: int
    passages: int
    columns: dict[str, Column]
    metrics: dict[str, ScoreFigures]  # by the name of their metric
    created: str  # UTC, ISO 8601
    engine: str  # what ran the artifact, as text
    baseline: str  # what it was held against, as text

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for name, column in self.columns.items():
            expected = self.queries + self.passages if name == COSINE else self.queries
            sides = (column.artifact, *(() if column.baseline is None else (column.baseline,)))
            if any(len(side) != expected for side in sides):
                raise ValueError(f"{name[:64]} has another number of values than {expected}")
        return self

    def again(self) -> dict[str, ScoreFigures]:
        """Make all figures of the values, again."""
        return _figures(self.columns)


def measured(
    corpus: RetrievalCorpus, chosen: Sequence[Sequence[int]] | None, ours: Side, theirs: Side, *, engine: str,
    baseline: str,
) -> RetrievalResult:  # fmt: skip
    """Measure both sides' scores of each query's passages: all of the corpus, or those `chosen` for a reranker."""
    every = range(len(corpus.passages))
    places = [every] * len(corpus.queries) if chosen is None else chosen
    columns = {NDCG: _column(corpus, places, ours, theirs, ranking.ndcg)}
    if ours.embeddings is not None and theirs.embeddings is not None:
        columns[RECALL] = _column(corpus, places, ours, theirs, ranking.recall)
        columns[COSINE] = Column(artifact=_cosines(ours.embeddings, theirs.embeddings))
    else:
        pairs = list(zip(ours.scores, theirs.scores, strict=True))
        columns[SPEARMAN] = Column(artifact=tuple(ranking.spearman(left, right) for left, right in pairs))
        columns[KENDALL] = Column(artifact=tuple(ranking.kendall(left, right) for left, right in pairs))
    return RetrievalResult(
        kind="embedder" if COSINE in columns else "reranker",
        digest=corpus.digest if chosen is None else f"{corpus.digest}/{max(map(len, chosen))}",
        queries=len(corpus.queries),
        passages=len(corpus.passages),
        columns=columns,
        metrics=_figures(columns),
        created=datetime.now(UTC).replace(microsecond=0).isoformat(),
        engine=engine,
        baseline=baseline,
    )


def between(ours: RetrievalResult | None, theirs: RetrievalResult | None, name: str) -> Estimate | str:
    """Bound the difference of a metric between two artifacts that were asked the same; else say why not."""
    column = name.removeprefix(PREFIX)
    column = COSINE if column == TAIL_COSINE or column == f"{COSINE}_mean" else column
    here, there = (None if side is None else side.columns.get(column) for side in (ours, theirs))
    if ours is None or theirs is None or here is None or there is None:
        return f"{name} was not measured of both"
    if ours.digest != theirs.digest:
        return "its queries or passages are others"
    if name == f"{PREFIX}{TAIL_COSINE}":
        return ours.metrics[name].artifact.less(theirs.metrics[name].artifact)
    found = tasks.figures("mean", here.artifact, there.artifact, tuple(range(len(here.artifact)))).difference
    assert found is not None
    return found


def _column(
    corpus: RetrievalCorpus, places: Sequence[Sequence[int]], ours: Side, theirs: Side, figure: Figure
) -> Column:
    sides = []
    for side in (ours, theirs):
        ranked = [
            [numbers[at] for at in ranking.order(scores)] for numbers, scores in zip(places, side.scores, strict=True)
        ]
        sides.append(tuple(figure(order, answers) for order, answers in zip(ranked, corpus.relevant, strict=True)))
    return Column(artifact=sides[0], baseline=sides[1])


def _cosines(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> tuple[float, ...]:
    """Give the cosine of each row's two embeddings, in fp64."""
    left, right = ours.astype(np.float64), theirs.astype(np.float64)
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    made = (left * right).sum(1) / np.maximum(lengths, np.finfo(np.float64).tiny)
    return tuple(np.round(made, _DIGITS).tolist())


def _figures(columns: Mapping[str, Column]) -> dict[str, ScoreFigures]:
    made = {}
    for name, column in columns.items():
        figures = tasks.figures("mean", column.artifact, column.baseline, tuple(range(len(column.artifact))))
        if name == COSINE:
            tail = Estimate.quantile(column.artifact, _TAIL, "texts")
            made[f"{PREFIX}{COSINE}_mean"] = figures
            made[f"{PREFIX}{TAIL_COSINE}"] = ScoreFigures(artifact=tail, baseline=None, difference=None)
        else:
            made[f"{PREFIX}{name}"] = figures
    return made
