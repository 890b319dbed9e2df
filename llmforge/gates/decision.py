"""Decide gates on the bounds of what was measured, never on the point alone.

All gates together pass where each passes at `ALPHA`: to pass wrongly, the one gate that should have stopped the release
must pass wrongly (an intersection-union test; Berger 1982), so that many gates need no correction there. A FAIL is
declared with Holm's correction (1979): of many gates that hold one would else soon seem broken.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, get_args

from llmforge.metrics import catalog
from llmforge.metrics.intervals import CONFIDENCE, SMALLEST_SAMPLE, TAIL, Estimate
from llmforge.metrics.metric import Measured
from llmforge.metrics.record import ReportRecord
from llmforge.metrics.studentized import Studentized
from llmforge.recipe import GateSpec

ALPHA = TAIL  # one-sided: how often a gate passes wrongly, at most, where the true figure is at it
POWER = 0.8  # how likely the named sample size is to decide, if the figure stays where it is

GROWTH = 2  # times as many documents at each look: few looks, and at most twice as many documents as were needed


Bound = Literal["min", "max", "drop_max", "rise_max"]
_BOUNDS: dict[str, Bound] = {each: each for each in get_args(Bound)}
RELATIVE: tuple[Bound, ...] = ("drop_max", "rise_max")  # to an earlier artifact; of tasks, to the checkpoint as well
UPPER: tuple[Bound, ...] = ("max", "rise_max")  # what is above the edge fails; of others, what is below
CHECKPOINT = "the checkpoint"

Figure = Estimate | Studentized


class Verdict(enum.Enum):
    """How a gate, or all of them together, ended."""

    PASS = "pass"  # the whole interval lies within the limit
    FAIL = "fail"  # the whole interval lies beyond the limit, or the figure was not measured
    INCONCLUSIVE = "inconclusive"  # the limit lies within the interval, there is none, or it cannot be measured here
    NONE = "none"  # there are no gates


class GateResult(ReportRecord):
    """One limit against what was measured, or against how far that moved from an earlier artifact."""

    metric: str
    bound: Bound
    limit: float
    measured: (
        Estimate | None
    )  # of `drop_max` and `rise_max`, the difference to what it is held against; None: not measured
    verdict: Verdict
    samples_needed: int | None  # INCONCLUSIVE only: how many would decide with 80 % probability; None: cannot be told
    explanation: str  # one line that begins with the metric
    detectable: float | None = None  # smallest difference that this sample shows with 80 % probability
    power: float | None = None  # of `drop_max` and `rise_max`: how likely one that did not change passes
    underpowered: bool = False  # the sample is so small that the gate could not fail
    post_hoc: bool = False  # its limit is another than was sealed before it was measured

    @property
    def is_relative(self) -> bool:
        """Whether `measured` is a difference."""
        return self.bound in RELATIVE

    @property
    def is_upper(self) -> bool:
        """Whether `measured` fails above the edge, and not below it."""
        return self.bound in UPPER

    @property
    def edge(self) -> float:
        """The limit on the axis of `measured`: a drop of at most 0.05 is a difference of at least -0.05."""
        return edge(self.bound, self.limit)


def edge(bound: Bound, limit: float) -> float:
    """Give the limit of the figure, or of the difference."""
    return -limit if bound == "drop_max" else limit


@dataclass(frozen=True)
class Earlier:
    """What a release is held against: ours less theirs, by metric, or why that cannot be told."""

    name: str
    differences: Mapping[str, Figure | str]
    values: Mapping[str, float]  # of its own figures


def judge(
    gates: Mapping[str, GateSpec],
    measured: Mapping[str, Estimate],
    *,
    unmeasured: str | None = None,
    original: Earlier | None = None,
    earlier: Earlier | None = None,
    studentized: Mapping[str, Studentized] | None = None,
    spreads: Mapping[str, Studentized] | None = None,
    alpha: float = ALPHA,
) -> tuple[GateResult, ...]:
    """Decide every limit; a gate with several limits gives a result for each.

    A figure that is missing or NaN fails, but where nothing could be measured: `unmeasured` says why, and leaves what
    is missing undecided. Limits that are relative to an `earlier` artifact are left out without one; those of tasks
    hold against the `original` checkpoint, too. `studentized` are figures to be decided at another `alpha` than that of
    their intervals: the part of `ALPHA` that one of several looks may spend. What no look changes is decided at
    `ALPHA`, and fails at `alpha`. `spreads` tell of figures how many documents would decide them.
    """
    trials = []
    for metric, gate in gates.items():
        known = catalog.named(metric)
        highest, lowest = known.unit.highest, known.unit.lowest
        for written, limit in gate.limits.items():
            bound = _BOUNDS[written]
            found: Figure | str | None
            if bound not in RELATIVE:
                found = (studentized or {}).get(metric) or measured.get(metric)
                room = highest - limit if bound == "max" else limit - lowest
                looked = alpha if isinstance(found, Studentized) else ALPHA
                spread = (spreads or {}).get(metric)
                trials.append(_LimitTest(metric, bound, limit, found, unmeasured, room, looked, spread=spread))
                continue
            for other in (original if known.beside_checkpoint else None, earlier):
                if other is not None:
                    found = other.differences.get(metric)
                    was = other.values.get(metric, lowest if bound == "rise_max" else math.inf)
                    room = (highest - was if bound == "rise_max" else was - lowest) - limit
                    looked = alpha if isinstance(found, Studentized) else ALPHA
                    trials.append(_LimitTest(metric, bound, limit, found, unmeasured, room, looked, other.name))
    failing = _holm([trial.p_beyond for trial in trials], alpha)
    return tuple(trial.result(fails) for trial, fails in zip(trials, failing, strict=True))


def checkpoint(measured: Measured) -> Earlier:
    """Give the checkpoint that tasks and chats of an artifact were answered by, too, as what it is held against."""
    asked = catalog.beside_checkpoint(measured)
    values = {name: figures.baseline.value for name, figures in asked.items() if figures.baseline is not None}
    alone = {name: "it was not run" for name, figures in asked.items() if figures.difference is None}
    return Earlier(CHECKPOINT, {**alone, **catalog.checkpoint_differences(measured)}, values)


def overall(results: Sequence[GateResult]) -> Verdict:
    """Combine: one FAIL fails all, else one INCONCLUSIVE leaves all undecided; NONE where there are no gates."""
    verdicts = {result.verdict for result in results}
    return next((v for v in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS) if v in verdicts), Verdict.NONE)


def schedule(first: int, total: int) -> Iterator[tuple[int, float]]:
    """Say at how many documents to look, and at what alpha: their sum is `ALPHA`. Too few to decide are no look."""
    size, before = max(first, SMALLEST_SAMPLE), 0
    while True:
        size = min(size, total)
        yield size, ALPHA * (size - before) / total
        if size == total:
            return
        size, before = size * GROWTH, size


@dataclass(frozen=True)
class _LimitTest:
    """One limit, and the figure that it is held against."""

    metric: str
    bound: Bound
    limit: float
    found: Figure | str | None  # a string says why it cannot be told
    unmeasured: str | None
    room: float  # how far beyond the limit such a figure can be
    alpha: float
    against: str | None = None
    spread: Studentized | None = None  # of `found`

    @property
    def upper(self) -> bool:
        """Whether the figure must be at most at the edge."""
        return self.bound in UPPER

    @property
    def edge(self) -> float:
        """The limit of the figure, or of the difference."""
        return edge(self.bound, self.limit)

    @property
    def p_beyond(self) -> float | None:
        """How likely the figure would seem so bad if it were at the edge; None: chance has no part in it."""
        found = self.found
        if found is None or isinstance(found, str) or found.is_exact or not found.decides:
            return None
        if not math.isfinite(found.value):
            return None
        return found.p_above(self.edge) if self.upper else found.p_below(self.edge)

    def result(self, fails: bool) -> GateResult:
        """Decide it; `fails` says if it fails beside the other gates."""
        found = self.found
        if isinstance(found, str):
            return self._result(Verdict.INCONCLUSIVE, None, f"not compared with {self.against}: {found}")
        if found is None and self.unmeasured is not None:
            return self._result(Verdict.INCONCLUSIVE, None, f"not measured: {self.unmeasured}; limit: {self._wanted}")
        if found is None:
            return self._result(Verdict.FAIL, None, f"not measured, limit: {self._wanted}")
        if not math.isfinite(found.value):
            return self._result(Verdict.FAIL, None, f"{found.value} is not finite, limit: {self._wanted}")
        if found.is_exact:
            passed = found.value <= self.edge if self.upper else found.value >= self.edge
            verdict = Verdict.PASS if passed else Verdict.FAIL
            return self._result(verdict, None, f"{self._value(found)} (exact), limit: {self._wanted}")
        if not found.decides:
            needed = self._documents_needed(found)
            metric = catalog.named(self.metric)
            fewest = metric.fewest(found.samples)
            what = f"an interval needs {fewest or 'more'}"
            if fewest is not None and (needed or 0) > fewest:
                what += f", and about {needed} would decide"
            advice = f": {metric.more}" if metric.more else ""
            enough = None if fewest is None else max(fewest, needed or 0)
            said = f"{self._value(found)} from only {_samples(found)}; {what}{advice}"
            return self._result(Verdict.INCONCLUSIVE, enough, said, underpowered=True)
        return self._decided(found, fails)

    def _decided(self, found: Figure, fails: bool) -> GateResult:
        low, high = found.interval(self.alpha)
        interval = (
            f"{self._value(found)} ({100 * (1 - 2 * self.alpha):.3g}% interval {_number(low)} to {_number(high)})"
        )
        detectable = found.detectable(self.alpha, POWER, upper=self.upper)
        power = None
        if isinstance(found, Studentized) and self.against:
            power = found.power(self.limit, self.alpha, upper=self.upper)
        facts: dict[str, Any] = {"detectable": detectable, "power": power}
        inside, outside = (high <= self.edge, low > self.edge) if self.upper else (low >= self.edge, high < self.edge)
        if not math.isfinite(high if self.upper else low):
            needed = self._documents_needed(found)
            enough = "" if needed is None else f", about {needed} would decide"
            side = "upper" if self.upper else "lower"
            said = f"{interval}: no {side} bound, for {_samples(found)} are too few or too uneven{enough}"
            return self._result(Verdict.INCONCLUSIVE, needed, said, underpowered=True, **facts)
        if self.room <= detectable:
            return self._result(
                Verdict.INCONCLUSIVE, None,
                f"{interval}: underpowered, for a figure so bad that it fails cannot be told from the limit, "
                f"{self._wanted}, by {_samples(found)}", underpowered=True, **facts,
            )  # fmt: skip
        p_within = found.p_below(self.edge) if self.upper else found.p_above(self.edge)
        if inside and p_within <= self.alpha * (1 + 1e-9):
            return self._result(Verdict.PASS, None, f"{interval} is {self._wanted}", **facts)
        if outside and fails:
            if self.against is not None:
                return self._result(Verdict.FAIL, None, f"{interval}; allowed is {self._wanted}", **facts)
            side = "above" if self.upper else "below"
            return self._result(Verdict.FAIL, None, f"{interval} is {side} {_number(self.edge)}", **facts)
        needed = self._needed(found, low, high)
        advice = (
            "too close to the limit to estimate how much data would decide"
            if needed is None
            else f"about {needed} {found.of} needed to decide (now {found.samples})"
        )
        relation = "is beyond" if outside else "includes"
        chance = ", but of so many gates one may be by chance" if outside else ""
        return self._result(
            Verdict.INCONCLUSIVE, needed, f"{interval} {relation} the limit {_number(self.edge)}{chance}; {advice}",
            **facts,
        )  # fmt: skip

    def _needed(self, found: Figure, low: float, high: float) -> int | None:
        if isinstance(found, Studentized) or self.spread is not None:
            return self._documents_needed(found)
        return samples_needed(found.samples, found.value, low, high, self.edge)

    def _documents_needed(self, found: Figure) -> int | None:
        spread = found if isinstance(found, Studentized) else self.spread
        return None if spread is None else spread.documents_needed(self.edge, self.alpha, POWER)

    def _result(
        self,
        verdict: Verdict,
        needed: int | None,
        why: str,
        *,
        detectable: float | None = None,
        power: float | None = None,
        underpowered: bool = False,
    ) -> GateResult:
        found = None if isinstance(self.found, str) else self.found
        if isinstance(found, Studentized):
            found = found.estimate(self.alpha)
        return GateResult(
            metric=self.metric,
            bound=self.bound,
            limit=self.limit,
            measured=found,
            verdict=verdict,
            samples_needed=needed,
            explanation=f"{self.metric}: {why}",
            detectable=detectable,
            power=power,
            underpowered=underpowered,
        )

    @property
    def _wanted(self) -> str:
        if self.against is None:
            return f"at {'most' if self.upper else 'least'} {_number(self.limit)}"
        return f"a {'rise' if self.upper else 'drop'} of at most {_number(self.limit)} against {self.against}"

    def _value(self, found: Figure) -> str:
        return _number(found.value) if self.against is None else f"change {_signed(found.value)}"


def _samples(found: Figure) -> str:
    return f"{found.samples} {found.of}"


def _holm(p_values: Sequence[float | None], alpha: float) -> list[bool]:
    """Say of which the null hypothesis is rejected, so that one is wrongly with probability `alpha` at most."""
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    rejected = [False] * len(p_values)
    for rank, (p, i) in enumerate(order):
        if p > alpha / (len(order) - rank) * (1 + 1e-9):
            break
        rejected[i] = True
    return rejected


def samples_needed(samples: int, value: float, low: float, high: float, limit: float) -> int | None:
    """Estimate how many samples would put the limit outside the interval with probability `POWER`.

    Half an interval shrinks with 1/√n. To decide with probability `POWER`, the distance from the figure to the limit
    must be z(confidence) + z(power) standard errors, where half an interval is z(confidence) of them. None where the
    figure lies on the limit, or so near that more than 10⁹ samples would be named.
    """
    distance = abs(limit - value)
    half = high - value if limit >= value else value - low
    if distance == 0:
        return None
    normal = NormalDist()
    z = normal.inv_cdf(1 - (1 - CONFIDENCE) / 2)
    needed = samples * (half / distance * (1 + normal.inv_cdf(POWER) / z)) ** 2
    return None if needed > 1e9 else max(samples + 1, math.ceil(needed))


def _number(value: float) -> str:
    """Write whole numbers in full and others with five significant digits."""
    return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.5g}"


def _signed(value: float) -> str:
    """Write a change with its sign."""
    return _number(value) if value <= 0 else f"+{_number(value)}"


def told(results: Sequence[GateResult], verdict: Verdict) -> str:
    """Say in a few words how many gates ended as all together did."""
    of, ended = len(results), sum(each.verdict is verdict for each in results)
    return {
        Verdict.PASS: f"all {of} gates passed" if of > 1 else "the gate passed",
        Verdict.FAIL: f"{ended} of {of} gates failed",
        Verdict.INCONCLUSIVE: f"{ended} of {of} gates inconclusive",
        Verdict.NONE: "no gates",
    }[verdict]
