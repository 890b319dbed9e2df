"""Arithmetic of serving: from the times of requests to TTFT, TPOT, ITL, throughput and goodput. No clock, no engine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmforge.base.errors import UsageError
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.record import ReportRecord

_MILLISECONDS = {"ms": 1.0, "s": 1000.0}
_OBJECTIVE = re.compile(r"(?P<name>[a-z]+)=(?P<number>\d+(?:\.\d+)?)(?P<unit>ms|s)")


@dataclass(frozen=True)
class RequestOutcome:
    """What became of one request; times in seconds of one monotonic clock.

    `sent_s` is when the request was due: in an open loop its planned arrival, so that a load generator that lags
    behind makes answers look slow and not fast ("coordinated omission"). `token_s` holds the arrival of each token, or
    of each piece of text where tokens are not told apart. A request with an `error` counts as failed.
    """

    sent_s: float
    token_s: tuple[float, ...]
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    error: str | None = None
    token_ids: tuple[int, ...] = ()  # where they are known

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token; None where there was none."""
        return (self.token_s[0] - self.sent_s) * 1e3 if self.token_s else None

    @property
    def tpot_ms(self) -> float | None:
        """Mean time of each token after the first; None where there was none."""
        if self.output_tokens < 2 or not self.token_s:
            return None
        return (self.token_s[-1] - self.token_s[0]) * 1e3 / (self.output_tokens - 1)

    @property
    def latency_ms(self) -> float:
        """Time to the end of the answer."""
        return (self.ended_s - self.sent_s) * 1e3


@dataclass(frozen=True)
class Objective:
    """A service level objective: upper bounds in milliseconds that a good request meets, all of them."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    latency_ms: float | None = None
    text: str | None = field(default=None, compare=False)  # as it was written

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Read `ttft=200ms,tpot=50ms,latency=2s`.

        Raises:
            UsageError: an entry is not NAME=NUMBER and a unit, or its name is unknown or given twice.
        """
        bounds: dict[str, float] = {}
        for entry in text.split(","):
            match = _OBJECTIVE.fullmatch(entry.strip())
            name = f"{match['name']}_ms" if match else ""
            if match is None or name not in cls.__dataclass_fields__ or name in bounds or float(match["number"]) == 0:
                raise UsageError(
                    f"objective {entry.strip()!r} of {text!r}: expected ttft, tpot or latency, each at most once, "
                    "'=', a number above 0, and ms or s",
                    hint="for example ttft=200ms,tpot=50ms",
                )
            bounds[name] = float(match["number"]) * _MILLISECONDS[match["unit"]]
        return cls(**bounds, text=text)

    def meets(self, outcome: RequestOutcome) -> bool:
        """Say whether a request was answered within all bounds; one token has no TPOT, and meets any."""
        if outcome.error is not None:
            return False
        bounds = self.ttft_ms, self.tpot_ms, self.latency_ms
        found = outcome.ttft_ms, outcome.tpot_ms, outcome.latency_ms
        return all(b is None or ms is None or ms <= b for b, ms in zip(bounds, found, strict=True))


class Distribution(ReportRecord):
    """Percentiles of a duration in milliseconds; `p50` has bounds where samples are enough and independent."""

    mean: float
    p50: Estimate
    p95: float
    p99: float

    @classmethod
    def of(cls, durations_ms: Sequence[float], *, samples: str, independent: bool = True) -> Distribution | None:
        """Summarize durations, `samples` says what they are; None of none.

        Requests that were in flight together are not independent in the strict sense: bounds tell how well the median
        of this run is known, not how another day's would differ.
        """
        if not durations_ms:
            return None
        p50 = Estimate.median(durations_ms, of=samples)
        p95, p99 = (float(value) for value in np.quantile(durations_ms, (0.95, 0.99)))
        return cls(
            mean=float(np.mean(durations_ms)),
            p50=p50 if independent else p50.model_copy(update={"low": None, "high": None}),
            p95=p95,
            p99=p99,
        )


class LoadFigures(ReportRecord):
    """All figures of one load, over one run of it or several.

    Durations are those of the completed requests of all runs, `itl_ms` the gaps between their arrivals. A rate is the
    median over the runs; each run lasts from its first request to the end of its last answer. `goodput_rps` counts the
    requests that meet the objective, `good_share` is their part of all that were sent.
    """

    runs: int
    completed: int
    failed: int
    duration_s: float  # of all runs together
    prompt_tokens: int
    output_tokens: int
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    latency_ms: Distribution | None
    requests_per_second: Estimate
    output_tokens_per_second: Estimate
    total_tokens_per_second: Estimate  # of prompts and answers
    goodput_rps: Estimate | None
    good_share: float | None
    errors: dict[str, int]  # how often each was met


def figures(runs: Sequence[Sequence[RequestOutcome]], objective: Objective | None = None) -> LoadFigures:
    """Sum up a load that was sent once or several times.

    Raises:
        UsageError: a run has no request.
    """
    if not runs or not all(runs):
        raise UsageError("a load without requests has no results")
    outcomes = [outcome for run in runs for outcome in run]
    done = [outcome for outcome in outcomes if outcome.error is None]
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    gaps_ms = [float(gap) for outcome in done for gap in np.diff(outcome.token_s) * 1e3]
    return LoadFigures(
        runs=len(runs),
        completed=len(done),
        failed=len(errors),
        duration_s=sum(_duration_s(run) for run in runs),
        prompt_tokens=sum(each.prompt_tokens for each in done),
        output_tokens=sum(each.output_tokens for each in done),
        ttft_ms=Distribution.of([ms for each in done if (ms := each.ttft_ms) is not None], samples="requests"),
        tpot_ms=Distribution.of([ms for each in done if (ms := each.tpot_ms) is not None], samples="requests"),
        itl_ms=Distribution.of(gaps_ms, samples="gaps", independent=False),
        latency_ms=Distribution.of([each.latency_ms for each in done], samples="requests"),
        requests_per_second=_rate(runs, lambda each: 1),
        output_tokens_per_second=_rate(runs, lambda each: each.output_tokens),
        total_tokens_per_second=_rate(runs, lambda each: each.prompt_tokens + each.output_tokens),
        goodput_rps=None if objective is None else _rate(runs, objective.meets),
        good_share=None if objective is None else sum(map(objective.meets, done)) / len(outcomes),
        errors=dict(sorted(Counter(errors).items())),
    )


def _rate(runs: Sequence[Sequence[RequestOutcome]], count: Callable[[RequestOutcome], int]) -> Estimate:
    """Estimate what the completed requests of a run come to per second."""
    counts = [sum(count(each) for each in run if each.error is None) for run in runs]
    durations = [_duration_s(run) for run in runs]
    return Estimate.median([n / s if s > 0 else 0.0 for n, s in zip(counts, durations, strict=True)], of="runs")


def _duration_s(run: Sequence[RequestOutcome]) -> float:
    return max(outcome.ended_s for outcome in run) - min(outcome.sent_s for outcome in run)
