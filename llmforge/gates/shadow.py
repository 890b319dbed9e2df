"""The decision between two servers that answer the same requests: its record, its gates, and its seal.

Bounds hold at every moment at once (`metrics.confidence_sequence`), so that one may look after each request and stop.
Of m limits each has the m-th part of α: a limit is ever passed or failed wrongly, by any of them, with probability α at
most.

A record is `evidence/<SHA-256 of its bytes>.json` in a folder, and names the one before it. Bounds and verdicts are
made again from the values of each request, under the limits that it was begun with.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field

from llmforge.base.errors import ForgedVerdict, UsageError
from llmforge.gates import decision
from llmforge.gates.decision import Bound, GateResult, Verdict
from llmforge.gates.sealed_line import SealedLine
from llmforge.measure.shadow import ReplyPair
from llmforge.metrics import paired_answers
from llmforge.metrics.confidence_sequence import BettingSequence
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.paired_answers import FIGURES
from llmforge.metrics.record import ReportRecord
from llmforge.metrics.serving import Distribution
from llmforge.recipe import GateSpec

ALPHA = 0.05  # how often a limit is passed or failed wrongly, ever and by any of them, at most
MOST_REQUESTS = 20_000  # of one record: with twelve figures each it stays below `sealed.MOST_VALUES`
SAMPLES = 5  # requests whose answers are kept to be shown: the first that differ
_BOUNDS: tuple[Bound, ...] = ("min", "max")
_OF = "requests"


class DifferingReply(ReportRecord):
    """One request whose answers differ, to be looked at; nothing is decided on it."""

    request: str
    a: str
    b: str


class ShadowRecord(ReportRecord):
    """What `llmforge shadow` found. `values` has a column for each figure, a number for each request that has one."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    kind: Literal["shadow"] = "shadow"
    previous: str | None = None  # digest of the record before this one
    created: str  # UTC, ISO 8601
    a: str  # the addresses
    b: str
    source: str  # where requests came from
    duration_s: float
    limits: dict[str, GateSpec]
    alpha: float = Field(gt=0, lt=1)
    requests: int  # that both were asked
    dropped: int  # copies that found no room
    values: dict[str, tuple[float, ...]]
    figures: dict[str, Estimate]
    latency_ms: dict[str, Distribution]  # of `a` and `b`, of requests that both answered
    errors: dict[str, str]  # of `a` and `b`, the first that was met
    samples: tuple[DifferingReply, ...] = ()  # none, unless they were asked for
    gates: tuple[GateResult, ...]
    verdict: Verdict


def check(limits: Mapping[str, GateSpec], source: str) -> None:
    """Refuse limits on what is not measured of pairs, and those that decide nothing.

    Raises:
        UsageError: there is one.
    """
    for name, gate in limits.items():
        if name not in FIGURES:
            raise UsageError(f"{source}: {name[:80]!r} is not measured of pairs", hint=f"use {', '.join(FIGURES)}")
        figure = FIGURES[name]
        for bound, limit in gate.limits.items():
            if bound not in _BOUNDS:
                raise UsageError(
                    f"{source}: {name}: figures of pairs are differences already", hint="use `min` or `max`"
                )
            if not figure.low < limit < figure.high:
                raise UsageError(
                    f"{source}: {name}: {bound} {limit:g} decides nothing: the figure is {figure.low:g} to "
                    f"{figure.high:g} in any case",
                    hint="use a limit in between",
                )


class PairedDecision:
    """Takes values of one request after the other, and says how the gates stand."""

    def __init__(self, limits: Mapping[str, GateSpec], alpha: float = ALPHA) -> None:
        self.limits, self.alpha, self.requests = dict(limits), alpha, 0
        self.values: dict[str, list[float]] = {}
        self._tests = sum(len(gate.limits) for gate in limits.values())
        self._sequences: dict[str, BettingSequence] = {}

    def add(self, values: Mapping[str, float]) -> None:
        """Take the figures of the next request."""
        self.requests += 1
        for name, value in values.items():
            figure = FIGURES[name]
            if name not in self._sequences:
                share = self.alpha / max(self._tests, 1)
                self._sequences[name] = BettingSequence(share, figure.low, figure.high)
            self._sequences[name].add(value)
            self.values.setdefault(name, []).append(value)

    def figures(self) -> dict[str, Estimate]:
        """Give each figure with its bounds."""
        return {name: each.estimate(_OF) for name, each in sorted(self._sequences.items())}

    def gates(self) -> tuple[GateResult, ...]:
        """Decide each limit on the bounds of this moment."""
        return tuple(
            self._decide(name, bound, gate.limits[bound])
            for name, gate in self.limits.items()
            for bound in _BOUNDS
            if bound in gate.limits
        )

    @property
    def verdict(self) -> Verdict:
        """How all gates stand together."""
        return decision.overall(self.gates())

    def _decide(self, name: str, bound: Bound, limit: float) -> GateResult:
        sequence = self._sequences.get(name)
        found = None if sequence is None else sequence.estimate(_OF)
        wanted = f"at {'most' if bound == 'max' else 'least'} {limit:g}"
        if found is None or found.low is None or found.high is None:
            return _result(name, bound, limit, None, Verdict.INCONCLUSIVE, f"no request has it; limit: {wanted}")
        upper = bound == "max"
        within, beyond = (found.high <= limit, found.low > limit) if upper else (found.low >= limit, found.high < limit)
        said = (
            f"{found.value:.4g}, between {found.low:.4g} and {found.high:.4g} at all times after {found.samples} "
            f"{_OF}; limit: {wanted}"
        )
        verdict = Verdict.PASS if within else Verdict.FAIL if beyond else Verdict.INCONCLUSIVE
        return _result(name, bound, limit, found, verdict, said)


def _result(name: str, bound: Bound, limit: float, found: Estimate | None, verdict: Verdict, said: str) -> GateResult:
    return GateResult(
        metric=name, bound=bound, limit=limit, measured=found, verdict=verdict, samples_needed=None,
        explanation=f"{name}: {said}",
    )  # fmt: skip


class ShadowJudge:
    """Looks after each pair, and keeps what its record says; `decided` once there is nothing left to find out.

    Args:
        limits: gates.
        alpha: how often they are wrong, at most.
        most: requests after which it ends, decided or not.
        text: whether answers that differ are kept to be shown.
    """

    def __init__(
        self, limits: Mapping[str, GateSpec], *, alpha: float = ALPHA, most: int = MOST_REQUESTS, text: bool = False
    ) -> None:
        self._decision, self._most, self._text = PairedDecision(limits, alpha), most, text
        self._began_s = time.monotonic()
        self._latency: dict[str, list[float]] = {"a": [], "b": []}
        self._errors: dict[str, str] = {}
        self._samples: list[DifferingReply] = []
        self._last_s = self._began_s

    def observe(self, pair: ReplyPair) -> bool:
        """Take a pair; say whether it is decided, or enough."""
        values = paired_answers.figures(pair.body, pair.a, pair.b)
        self._decision.add(values)
        self._last_s = time.monotonic()
        for side, reply in (("a", pair.a), ("b", pair.b)):
            if reply.error is not None:
                self._errors.setdefault(side, reply.error[:200])
            elif "latency_change" in values:
                self._latency[side].append(reply.latency_ms)
        if self._text and values.get("agreement", 1.0) < 1 and len(self._samples) < SAMPLES:
            asked = str(pair.body.get("prompt") or pair.body.get("messages"))
            self._samples.append(DifferingReply(request=asked, a=pair.a.answer.text, b=pair.b.answer.text))
        return self._decision.requests >= self._most or self._decision.verdict in (Verdict.PASS, Verdict.FAIL)

    @property
    def requests(self) -> int:
        """How many pairs there were."""
        return self._decision.requests

    def record(self, a: str, b: str, source: str, dropped: int) -> ShadowRecord:
        """Say what was found."""
        found = self._decision
        times = {side: Distribution.of(each, samples=_OF) for side, each in self._latency.items()}
        return ShadowRecord(
            created=datetime.now(UTC).replace(microsecond=0).isoformat(),
            a=a,
            b=b,
            source=source,
            duration_s=round(self._last_s - self._began_s, 3),
            limits=found.limits,
            alpha=found.alpha,
            requests=found.requests,
            dropped=dropped,
            values={name: tuple(values) for name, values in sorted(found.values.items())},
            figures=found.figures(),
            latency_ms={side: each for side, each in times.items() if each is not None},
            errors=dict(sorted(self._errors.items())),
            samples=tuple(self._samples),
            gates=found.gates(),
            verdict=found.verdict,
        )


def _confirm(made: ShadowRecord, file: Path) -> None:
    """Raises ForgedVerdict where a record says something else than its values."""
    wrong = []
    again = PairedDecision(made.limits, made.alpha)
    try:
        check(made.limits, str(file))
        for name, column in made.values.items():
            _replay(again, name, column)
    except (KeyError, ValueError, UsageError) as error:
        raise ForgedVerdict(f"{file}: its values are none that are measured: {str(error)[:80]}") from error
    if max(map(len, made.values.values()), default=0) != made.requests:
        wrong.append("requests")
    if again.figures() != made.figures:
        wrong.append("figures")
    if again.gates() != made.gates:
        wrong.append("gates")
    if again.verdict is not made.verdict:
        wrong.append(f"verdict: it says {made.verdict.value}, its values give {again.verdict.value}")
    if wrong:
        raise ForgedVerdict(
            f"{file}: does not follow from what was measured: {'; '.join(wrong)}",
            hint="do not use it unless you know who changed it; shadow again",
        )


def _replay(again: PairedDecision, name: str, column: Sequence[float]) -> None:
    for value in column:
        again.add({name: value})


SHADOWS = SealedLine(
    ShadowRecord,
    name="shadow",
    begin="compare two servers: llmforge shadow A B -o DIR",
    again="shadow again",
    confirm=_confirm,
)
seal, read = SHADOWS.seal, SHADOWS.read


def headline(made: ShadowRecord) -> str:
    """Say how it ended, in one line."""
    said = decision.told(made.gates, made.verdict)
    return f"{made.verdict.value.upper()}: {made.b} beside {made.a}: {said} after {made.requests} requests"
