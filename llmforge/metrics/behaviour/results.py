"""Behaviour of an artifact and of its checkpoint on the same documents, and the figures that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Self

from pydantic import Field, model_validator

from llmforge.metrics import tasks
from llmforge.metrics.behaviour import document as documents_
from llmforge.metrics.behaviour import outcomes as outcomes_
from llmforge.metrics.behaviour.answer import BehaviourAnswer
from llmforge.metrics.behaviour.document import FEWEST_OF_A_SLICE, MOST_CHATS, BehaviourDocument
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.record import ReportRecord
from llmforge.metrics.tasks import ScoreFigures

PREFIX = "behaviour."  # of the name of a metric: behaviour.OUTCOME, behaviour.OUTCOME.SLICE
SHOWN = 5  # chats that a report has
_MOST_VALUES = MOST_CHATS * len(outcomes_.OUTCOMES)
_MOST_SHOWN = 4000  # characters of a message and of an answer


class ChatPair(ReportRecord):
    """Two answers to one chat, with thoughts and calls as text."""

    document: str
    slice: str
    asked: str  # the last message
    shared: str  # how both begin
    baseline: str  # how each goes on; "" for both: they are the same
    artifact: str
    changed: tuple[str, ...] = ()  # names of the outcomes that differ


class OutcomeValues(ReportRecord):
    """One outcome of every document that has it, or every check of each document."""

    documents: tuple[int, ...] = Field(max_length=_MOST_VALUES)  # by number, ascending
    artifact: tuple[float, ...] = Field(max_length=_MOST_VALUES)
    baseline: tuple[float, ...] | None = Field(max_length=_MOST_VALUES)
    figures: ScoreFigures
    slices: dict[str, ScoreFigures]  # of documents of each slice


class SpeculationRecord(ReportRecord):
    """What drafts tokens in the artifact, and how many times faster a token came by it, over some of the chats."""

    method: str
    max_tokens: int = Field(ge=1)  # of a draft
    speedup: Estimate | None  # of a token after the first, against the same chats without; None: not timed


class BehaviourResult(ReportRecord):
    """What chats did on an artifact and, where it was measured, on its checkpoint: the same prompts to both."""

    digest: str  # SHA-256 of all that was asked and expected
    documents: tuple[str, ...] = Field(min_length=1, max_length=MOST_CHATS)  # their ids
    slices: tuple[str, ...] = Field(max_length=MOST_CHATS)  # of each document
    outcomes: dict[str, OutcomeValues]
    chats: tuple[ChatPair, ...] = Field(default=(), max_length=SHOWN)
    speculation: SpeculationRecord | None = None  # None: the artifact drafts nothing
    created: str  # UTC, ISO 8601
    engine: str  # what ran the artifact, as text
    baseline: str | None  # what it was held against, as text

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        count = len(self.documents)
        if len(self.slices) != count or len(set(self.documents)) != count:
            raise ValueError("behaviour has documents of different ids, each with a slice")
        for name, each in self.outcomes.items():
            columns = (each.artifact, *(() if each.baseline is None else (each.baseline,)))
            if any(len(column) != len(each.documents) for column in columns):
                raise ValueError(f"the outcome {name[:64]} has another number of values than of documents")
            if [*each.documents] != sorted(each.documents) or not {*each.documents} <= {*range(count)}:
                raise ValueError(f"the outcome {name[:64]} is of documents that are not there")
        return self

    @property
    def metrics(self) -> dict[str, ScoreFigures]:
        """All figures, by the name of their metric."""
        found: dict[str, ScoreFigures] = {}
        for name, each in self.outcomes.items():
            found[f"{PREFIX}{name}"] = each.figures
            found |= {f"{PREFIX}{name}.{part}": figures for part, figures in each.slices.items()}
        return found

    def again(self) -> dict[str, OutcomeValues]:
        """Make the figures of each outcome of its values, again."""
        return {
            name: _outcome(each.documents, each.artifact, each.baseline, self.slices)
            for name, each in self.outcomes.items()
        }


def measured(
    documents: Sequence[BehaviourDocument],
    ours: Sequence[BehaviourAnswer],
    theirs: Sequence[BehaviourAnswer] | None,
    *,
    engine: str,
    baseline: str | None,
    speculation: SpeculationRecord | None = None,
) -> BehaviourResult:
    """Measure answers to `documents`, by place; without `theirs` only what a document itself expects."""
    if len(ours) != len(documents) or (theirs is not None and len(theirs) != len(documents)):
        raise ValueError(f"{len(documents)} documents, {len(ours)} answers")
    columns: dict[str, list[tuple[int, float, float | None]]] = {}
    beside: Sequence[BehaviourAnswer | None] = [None] * len(documents) if theirs is None else theirs
    rows, checked = [], set(outcomes_.of_checks())
    for number, (document, left, right) in enumerate(zip(documents, ours, beside, strict=True)):
        rows.append(outcomes_.values(document, left, right))
        for name, (here, there) in rows[-1].items():
            columns.setdefault(name, []).append((number, here, there))
            if name in checked:
                columns.setdefault(outcomes_.CHECKS, []).append((number, here, there))
    slices = tuple(document.slice for document in documents)
    order = [outcomes_.CHECKS, *(outcome.name for outcome in outcomes_.OUTCOMES)]
    found = {}
    for name in (name for name in order if name in columns):
        numbers, here_, there_ = zip(*columns[name], strict=True)
        found[name] = _outcome(numbers, here_, None if theirs is None else there_, slices)
    return BehaviourResult(
        digest=documents_.digest(documents),
        documents=tuple(document.id for document in documents),
        slices=slices,
        outcomes=found,
        chats=() if theirs is None else _chats(documents, ours, theirs, rows),
        created=datetime.now(UTC).replace(microsecond=0).isoformat(),
        engine=engine,
        baseline=baseline,
        speculation=speculation,
    )


def between(ours: BehaviourResult | None, theirs: BehaviourResult | None, name: str) -> Estimate | str:
    """Bound the difference of a metric between two artifacts that were asked the same; else say why not."""
    outcome, _, part = name.removeprefix(PREFIX).partition(".")
    here, there = (None if side is None else side.outcomes.get(outcome) for side in (ours, theirs))
    if ours is None or theirs is None or here is None or there is None:
        return f"{name} was not measured of both"
    if ours.digest != theirs.digest or here.documents != there.documents:
        return "its documents are others"
    made = _outcome(here.documents, here.artifact, there.artifact, ours.slices)
    figures = made.slices.get(part) if part else made.figures
    if figures is None or figures.difference is None:
        return f"{name} was not measured of both"
    return figures.difference


def _outcome(
    numbers: tuple[int, ...], ours: tuple[float, ...], theirs: tuple[float, ...] | None, slices: Sequence[str]
) -> OutcomeValues:
    parts: dict[str, list[int]] = {}
    for place, number in enumerate(numbers):
        parts.setdefault(slices[number], []).append(place)
    return OutcomeValues(
        documents=numbers,
        artifact=ours,
        baseline=theirs,
        figures=_figures(numbers, ours, theirs, range(len(numbers))),
        slices={name: _of_slice(numbers, ours, theirs, places) for name, places in parts.items()},
    )


def _figures(
    numbers: tuple[int, ...], ours: tuple[float, ...], theirs: tuple[float, ...] | None, places: Sequence[int]
) -> ScoreFigures:
    """Make the figures of the values at some places, over their documents."""
    clusters: dict[int, int] = {}
    for place in places:
        clusters.setdefault(numbers[place], len(clusters))
    return tasks.figures(
        "mean",
        tuple(ours[place] for place in places),
        None if theirs is None else tuple(theirs[place] for place in places),
        tuple(clusters[numbers[place]] for place in places),
    )


def _of_slice(
    numbers: tuple[int, ...], ours: tuple[float, ...], theirs: tuple[float, ...] | None, places: Sequence[int]
) -> ScoreFigures:
    """Make the figures of a slice; one of fewer than `FEWEST_OF_A_SLICE` documents has no bounds to decide by."""
    found = _figures(numbers, ours, theirs, places)
    if len({numbers[place] for place in places}) >= FEWEST_OF_A_SLICE:
        return found
    return ScoreFigures(
        artifact=_bare(found.artifact),
        baseline=None if found.baseline is None else _bare(found.baseline),
        difference=None if found.difference is None else _bare(found.difference),
    )


def _bare(figure: Estimate) -> Estimate:
    return figure.model_copy(update={"low": None, "high": None})


def _chats(
    documents: Sequence[BehaviourDocument],
    ours: Sequence[BehaviourAnswer],
    theirs: Sequence[BehaviourAnswer],
    rows: Sequence[dict[str, tuple[float, float | None]]],
) -> tuple[ChatPair, ...]:
    """Choose the chats of a report: of different slices, first where most checks went otherwise, then texts."""
    changed = [
        tuple(name for name in outcomes_.of_checks() if name in row and row[name][0] != row[name][1]) for row in rows
    ]
    same = [_written(left) == _written(right) for left, right in zip(ours, theirs, strict=True)]
    order = sorted(range(len(documents)), key=lambda number: (-len(changed[number]), same[number], number))
    chosen: dict[str, int] = {}
    for number in order:
        chosen.setdefault(documents[number].slice, number)
    picked = [*chosen.values(), *(number for number in order if number not in chosen.values())][:SHOWN]
    return tuple(_pair(documents[number], ours[number], theirs[number], changed[number]) for number in picked)


def _pair(
    document: BehaviourDocument, ours: BehaviourAnswer, theirs: BehaviourAnswer, changed: tuple[str, ...]
) -> ChatPair:
    left, right = _written(theirs), _written(ours)
    same = next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    content = document.messages[-1].get("content")
    return ChatPair(
        document=document.id,
        slice=document.slice,
        asked=str(content or "")[:_MOST_SHOWN],
        shared=left[:same],
        baseline=left[same:],
        artifact=right[same:],
        changed=changed,
    )


def _written(answer: BehaviourAnswer) -> str:
    """Write an answer with its thoughts and calls."""
    thoughts = f"[thinks] {answer.reasoning}\n" if answer.reasoning else ""
    calls = "".join(f"\n[calls] {call.name}({call.arguments})" for call in answer.calls)
    return f"{thoughts}{answer.text}{calls}"[:_MOST_SHOWN].strip()
