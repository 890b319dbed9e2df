"""Workloads: the times of each request of a load as users send it, and the figures that are made of them."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from llmforge.metrics.record import ReportRecord
from llmforge.metrics.serving import LoadFigures, Objective, RequestOutcome, figures

MOST_RUNS = 20  # of one workload
_DECIMALS = 3  # of milliseconds: 1 µs


class Slo(ReportRecord):
    """A service level objective: upper bounds in milliseconds that a good request meets, all of them."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    latency_ms: float | None = None

    def meets(self, ttft_ms: float, tpot_ms: float, latency_ms: float) -> bool:
        """Say whether a request that took so long is a good one."""
        pairs = (self.ttft_ms, ttft_ms), (self.tpot_ms, tpot_ms), (self.latency_ms, latency_ms)
        return all(bound is None or found <= bound for bound, found in pairs)

    @property
    def objective(self) -> Objective:
        """The same for requests of a load."""
        return Objective(ttft_ms=self.ttft_ms, tpot_ms=self.tpot_ms, latency_ms=self.latency_ms)


class RequestTimes(ReportRecord):
    """When what became of one request, in milliseconds after its run began."""

    sent_ms: float  # when it was due
    token_ms: tuple[float, ...]
    ended_ms: float
    prompt_tokens: int
    output_tokens: int
    error: str | None = None

    @classmethod
    def of(cls, outcome: RequestOutcome, began_s: float) -> Self:
        """Write down an outcome; `began_s` is when its run began."""

        def after(seconds: float) -> float:
            return round((seconds - began_s) * 1e3, _DECIMALS)

        return cls(
            sent_ms=after(outcome.sent_s),
            token_ms=tuple(map(after, outcome.token_s)),
            ended_ms=after(outcome.ended_s),
            prompt_tokens=outcome.prompt_tokens,
            output_tokens=outcome.output_tokens,
            error=outcome.error,
        )

    @property
    def outcome(self) -> RequestOutcome:
        """The outcome that figures are made of."""
        return RequestOutcome(
            sent_s=self.sent_ms / 1e3,
            token_s=tuple(ms / 1e3 for ms in self.token_ms),
            ended_s=self.ended_ms / 1e3,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            error=self.error,
        )


class MeasuredWorkload(ReportRecord):
    """One load, sent once or several times, and its figures."""

    name: str  # in the recipe
    description: str  # as text
    prefix_hit_share: float | None = None  # of prompt tokens that were looked up in the prefix cache
    figures: LoadFigures
    runs: tuple[tuple[RequestTimes, ...], ...] = Field(max_length=MOST_RUNS)

    @classmethod
    def of(
        cls,
        name: str,
        description: str,
        runs: tuple[tuple[RequestTimes, ...], ...],
        slo: Slo | None,
        prefix_hit_share: float | None = None,
    ) -> Self:
        """Make the figures of what was timed."""
        made = made_of(runs, slo)
        return cls(name=name, description=description, prefix_hit_share=prefix_hit_share, figures=made, runs=runs)


def made_of(runs: tuple[tuple[RequestTimes, ...], ...], slo: Slo | None) -> LoadFigures:
    """Make the figures of runs of a load.

    Raises:
        UsageError: there is no run, or one without requests.
    """
    objective = None if slo is None else slo.objective
    return figures([[request.outcome for request in run] for run in runs], objective)
