"""Decide the gates of a recipe on the bounds of what was measured, never on the point alone."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Literal

from llmforge.metrics.intervals import CONFIDENCE, SMALLEST_SAMPLE, Estimate
from llmforge.metrics.record import Record
from llmforge.recipe import GateSpec

POWER = 0.8  # how likely the named sample size is to decide, if the figure stays where it is


Bound = Literal["min", "max"]


class Verdict(enum.Enum):
    """How a gate, or all of them together, ended."""

    PASS = "pass"  # the whole interval lies within the limit
    FAIL = "fail"  # the whole interval lies beyond the limit, or the figure was not measured
    INCONCLUSIVE = "inconclusive"  # the limit lies within the interval, there is none, or it cannot be measured here
    NONE = "none"  # there are no gates


class GateResult(Record):
    """One limit of the recipe against what was measured."""

    metric: str
    bound: Bound
    limit: float
    measured: Estimate | None  # None: not measured
    verdict: Verdict
    samples_needed: int | None  # INCONCLUSIVE only: how many would decide with 80 % probability; None: cannot be told
    explanation: str  # one line that begins with the metric


def judge(
    gates: Mapping[str, GateSpec], measured: Mapping[str, Estimate], *, unmeasured: str | None = None
) -> tuple[GateResult, ...]:
    """Decide every limit; a gate with `min` and `max` gives two results.

    A figure that is missing or NaN fails, but where nothing could be measured: `unmeasured` says why, and leaves what
    is missing undecided.
    """
    results: list[GateResult] = []
    for metric, gate in gates.items():
        found = measured.get(metric)
        limits: dict[Bound, float | None] = {"min": gate.min, "max": gate.max}
        for bound, limit in limits.items():
            if limit is not None:
                verdict, needed, why = _verdict(bound, limit, found, unmeasured)
                results.append(
                    GateResult(
                        metric=metric,
                        bound=bound,
                        limit=limit,
                        measured=found,
                        verdict=verdict,
                        samples_needed=needed,
                        explanation=f"{metric}: {why}",
                    )
                )
    return tuple(results)


def overall(results: Sequence[GateResult]) -> Verdict:
    """Combine: one FAIL fails all, else one INCONCLUSIVE leaves all undecided; NONE where there are no gates."""
    verdicts = {result.verdict for result in results}
    return next((v for v in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS) if v in verdicts), Verdict.NONE)


def _verdict(
    bound: Bound, limit: float, measured: Estimate | None, unmeasured: str | None
) -> tuple[Verdict, int | None, str]:
    """Decide one limit: verdict, sample size that would decide, and why."""
    wanted = f"at {'most' if bound == 'max' else 'least'} {_number(limit)}"
    if measured is None and unmeasured is not None:
        return Verdict.INCONCLUSIVE, None, f"not measured: {unmeasured}; limit: {wanted}"
    if measured is None:
        return Verdict.FAIL, None, f"not measured, limit: {wanted}"
    value, low, high = measured.value, measured.low, measured.high
    if not math.isfinite(value):
        return Verdict.FAIL, None, f"{value} is not finite, limit: {wanted}"
    if measured.is_exact:
        passed = value <= limit if bound == "max" else value >= limit
        return Verdict.PASS if passed else Verdict.FAIL, None, f"{_number(value)} (exact), limit: {wanted}"
    if low is None or high is None:
        return (
            Verdict.INCONCLUSIVE,
            SMALLEST_SAMPLE,
            f"{_number(value)} from only {measured.samples} {measured.of}; an interval needs {SMALLEST_SAMPLE}",
        )
    interval = f"{_number(value)} ({CONFIDENCE:.0%} interval {_number(low)} to {_number(high)})"
    within, beyond = (high <= limit, low > limit) if bound == "max" else (low >= limit, high < limit)
    if within:
        return Verdict.PASS, None, f"{interval} is {wanted}"
    if beyond:
        side = "above" if bound == "max" else "below"
        return Verdict.FAIL, None, f"{interval} is {side} {_number(limit)}"
    needed = samples_needed(measured.samples, value, low, high, limit)
    advice = (
        "too close to the limit to estimate how much data would decide"
        if needed is None
        else f"about {needed} {measured.of} needed to decide (now {measured.samples})"
    )
    return Verdict.INCONCLUSIVE, needed, f"{interval} includes the limit {_number(limit)}; {advice}"


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
