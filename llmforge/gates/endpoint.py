"""The judgement of a served endpoint: its record, its gates, and its seal.

A record is `evidence/<SHA-256 of its bytes>.json` in a folder, and names the one before it. Nothing in it is believed:
figures and verdicts are made again from the sums over documents, under the limits that it was begun with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field

from llmforge.base.errors import ForgedVerdict, UsageError
from llmforge.gates import decision, release
from llmforge.gates.decision import GateResult, Verdict
from llmforge.gates.sealed_line import SealedLine
from llmforge.gates.verdict import CLOSE
from llmforge.metrics import catalog
from llmforge.metrics.behaviour.results import PREFIX as BEHAVIOUR
from llmforge.metrics.behaviour.results import BehaviourResult
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.metric import Measured
from llmforge.metrics.record import ReportRecord
from llmforge.metrics.served_quality import ServedQuality
from llmforge.metrics.serving import LoadFigures
from llmforge.recipe import GateSpec

MEASURED = ("kld_mean", "top1_agreement", "perplexity_ratio", "delta_p_mean")  # that gates decide on here


class JudgedSide(ReportRecord):
    """One of both: what is judged, or what it is held against."""

    kind: Literal["endpoint", "checkpoint", "artifact"]
    title: str  # the model and its address, or the name of a folder
    digest: str | None = None  # of the content; an endpoint has none
    description: str = ""  # what ran it


class ServedAnswer(ReportRecord):
    """Greedy answers to one prompt."""

    document: str
    prompt: str
    served: str
    reference: str | None  # None: there is none

    @property
    def same(self) -> int:
        """How many characters both begin with."""
        pairs = zip(self.served, self.reference or "", strict=False)
        return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(self.served), len(self.reference or "")))


class EndpointJudgement(ReportRecord):
    """What `llmforge judge` found."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    kind: Literal["endpoint"] = "endpoint"
    previous: str | None = None  # digest of the record before this one
    created: str  # UTC, ISO 8601
    served: JudgedSide
    reference: JudgedSide | None
    data: str  # name of the file
    data_digest: str  # SHA-256, hex
    limits: dict[str, GateSpec]
    quality: ServedQuality | None
    unmeasured: str | None  # why quality was not measured
    latency: LoadFigures | None
    behaviour: BehaviourResult | None = None
    answers: tuple[ServedAnswer, ...] = ()
    gates: tuple[GateResult, ...]
    verdict: Verdict
    notes: tuple[str, ...] = ()

    @property
    def equal_answers(self) -> int:
        """How many answers are the same to the last character."""
        return sum(each.served == each.reference for each in self.answers)


def check(limits: Mapping[str, GateSpec], source: str) -> None:
    """Refuse limits on what is not measured of an endpoint.

    Raises:
        UsageError: there is one.
    """
    if not limits:
        return
    release.check(limits, source, hint="")
    for metric, gate in limits.items():
        if of_behaviour(metric):
            continue
        if metric not in MEASURED:
            raise UsageError(
                f"{source}: {metric} is not measured of an endpoint; gates decide on {', '.join(MEASURED)}, and on "
                "behaviour.NAME",
                hint="leave it out, or gate an artifact: llmforge gate ARTIFACT",
            )
        if release.is_relative({metric: gate}):
            raise UsageError(
                f"{source}: {metric}: an endpoint has no earlier version to be held against",
                hint="use min or max, or give the earlier one with --reference URL",
            )


def of_behaviour(metric: str) -> bool:
    """Say whether a metric is of chats."""
    return metric.startswith(BEHAVIOUR)


def decide(
    limits: Mapping[str, GateSpec],
    quality: ServedQuality | None,
    unmeasured: str | None,
    behaviour: BehaviourResult | None = None,
) -> tuple[GateResult, ...]:
    """Decide the gates of an endpoint, each on the interval of its bounds, drops and rises against the reference."""
    figures = {} if quality is None else quality.figures
    of_text: dict[str, Estimate] = {name: figure.estimate for name, figure in figures.items()}
    chats = Measured(behaviour=behaviour)
    original = replace(decision.checkpoint(chats), name="the reference")
    results = decision.judge(limits, {**catalog.estimates(chats), **of_text}, unmeasured=unmeasured, original=original)
    return tuple(_explained(result, quality) for result in results)


def _explained(result: GateResult, quality: ServedQuality | None) -> GateResult:
    """Say where no number of documents would decide a gate, for the server leaves it open."""
    figure = None if quality is None else quality.figures.get(result.metric)
    if figure is None or figure.is_exact or result.verdict is not Verdict.INCONCLUSIVE or quality is None:
        return result
    low, high = figure.at_least.value, figure.at_most.value
    if not low <= result.limit <= high:
        return result
    return result.model_copy(
        update={
            "samples_needed": None,
            "underpowered": False,
            "explanation": f"{result.metric}: between {low:.5g} and {high:.5g}, and the limit {result.limit:.5g} lies "
            f"there: the server told {quality.told_share:.1%} of the probability; more documents do not decide it, "
            "more log-probabilities do",
        }
    )


def _confirm(made: EndpointJudgement, file: Path) -> None:
    """Raises ForgedVerdict where a record says something else than its sums."""
    wrong = []
    quality = made.quality
    try:
        again = None if quality is None else quality.again()
    except (KeyError, ValueError, ArithmeticError, IndexError, UsageError) as error:
        raise ForgedVerdict(f"{file}: its sums are none that a measurement gives: {str(error)[:80]}") from error
    if quality is not None and again is not None:
        for name in sorted(quality.figures.keys() | again.figures.keys()):
            if not _same(quality.figures.get(name), again.figures.get(name)):
                wrong.append(name)
        if not _same(quality.kld_truncated, again.kld_truncated):
            wrong.append("kld_truncated")
        if any(low > each.high[name] for each in quality.per_document for name, low in each.low.items()):
            wrong.append("bounds")
        if quality.tokens != sum(each.tokens for each in quality.per_document):
            wrong.append("tokens")
    if made.behaviour is not None:
        outcomes = made.behaviour.again()
        wrong += [name[:64] for name, each in made.behaviour.outcomes.items() if not _same(each, outcomes[name])]
    results = decide(made.limits, again, made.unmeasured, made.behaviour)
    if [_verdict(each) for each in results] != [_verdict(each) for each in made.gates]:
        wrong.append("gates")
    if decision.overall(results) is not made.verdict:
        wrong.append(f"verdict: it says {made.verdict.value}, its figures give {decision.overall(results).value}")
    if wrong:
        raise ForgedVerdict(
            f"{file}: does not follow from what was measured: {'; '.join(wrong[:5])}",
            hint="do not use it unless you know who changed it; judge the endpoint again",
        )


def _verdict(gate: GateResult) -> tuple[str, str, float, str]:
    return gate.metric, gate.bound, gate.limit, gate.verdict.value


def _same(said: object, made: object) -> bool:
    if isinstance(said, ReportRecord) and type(said) is type(made):
        return all(_same(getattr(said, name), getattr(made, name)) for name in type(said).model_fields)
    if isinstance(said, dict) and isinstance(made, dict):
        return said.keys() == made.keys() and all(_same(each, made[name]) for name, each in said.items())
    if isinstance(said, float) and isinstance(made, float):
        return (math.isnan(said) and math.isnan(made)) or math.isclose(said, made, rel_tol=CLOSE, abs_tol=1e-12)
    return said == made


JUDGEMENTS = SealedLine(
    EndpointJudgement,
    name="judgement",
    begin="judge an endpoint: llmforge judge --url URL -o DIR",
    again="judge the endpoint again",
    confirm=_confirm,
)
seal, read = JUDGEMENTS.seal, JUDGEMENTS.read


def headline(made: EndpointJudgement) -> str:
    """Say how it ended, in one line."""
    said = decision.told(made.gates, made.verdict)
    against = "" if made.reference is None else f" against {made.reference.title}"
    return f"{made.verdict.value.upper()}: {made.served.title}{against}: {said}"
