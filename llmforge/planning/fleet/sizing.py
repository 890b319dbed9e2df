"""The smallest fleet that meets an objective: replicas and slots, tried out in simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmforge.base.errors import UsageError
from llmforge.metrics.serving import Objective, RequestOutcome
from llmforge.metrics.units import ms, significant
from llmforge.planning.fleet.load import FleetLoad
from llmforge.planning.fleet.simulation import SimulatedEngine, SimulatedRun, simulate
from llmforge.planning.fleet.steps import StepTimes, chunks

# MLPerf Inference bounds p99 of TTFT and TPOT, DistServe (Zhong et al. 2024) p90 of both: 95 lies between.
PERCENTILE = 95.0
REQUESTS = 400  # of a simulation at least
TAIL = 20  # requests beyond the percentile at least
TURNS = 8  # times that a simulation fills all slots at least
WARM_UP = 0.2  # of the requests of a replica, which find it emptier than later ones do
MOST_REPLICAS = 1_000_000


@dataclass(frozen=True)
class FleetGoal:
    """An objective of which a percentile of the requests meets each bound by itself."""

    objective: Objective
    percentile: float = PERCENTILE

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds in milliseconds, by what they bound."""
        objective = self.objective
        bounds = {"TTFT": objective.ttft_ms, "TPOT": objective.tpot_ms, "latency": objective.latency_ms}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    @property
    def words(self) -> str:
        """The goal as text."""
        return ", ".join(f"p{self.percentile:g} of {name} ≤ {ms(bound)}" for name, bound in self.bounds.items())

    @property
    def tail_requests(self) -> int:
        """Requests of which `TAIL` lie beyond the percentile."""
        return math.ceil(TAIL / (1 - self.percentile / 100))

    def exceeded(self, outcomes: Sequence[RequestOutcome]) -> dict[str, float]:
        """Give the percentiles in milliseconds that exceed their bounds."""
        found = quantiles(outcomes, self.percentile)
        return {name: found[name] for name, bound in self.bounds.items() if name in found and found[name] > bound}


def quantiles(outcomes: Sequence[RequestOutcome], percentile: float) -> dict[str, float]:
    """Give a percentile of TTFT, TPOT and latency in milliseconds; answers of one token have no TPOT."""
    durations: dict[str, list[float | None]] = {
        "TTFT": [each.ttft_ms for each in outcomes],
        "TPOT": [each.tpot_ms for each in outcomes],
        "latency": [each.latency_ms for each in outcomes],
    }
    known = {name: [value for value in values if value is not None] for name, values in durations.items()}
    return {name: float(np.percentile(values, percentile)) for name, values in known.items() if values}


@dataclass(frozen=True)
class FleetSize:
    """A fleet that meets its goal, and what was simulated of it."""

    replicas: int
    slots: int
    outcomes: tuple[RequestOutcome, ...]  # of the replicas that were simulated, but for the first of each
    running: float  # mean requests that have a slot, on one replica
    alone: dict[str, float]  # the percentiles of requests that meet no other one, in milliseconds


def smallest(
    load: FleetLoad,
    goal: FleetGoal,
    engine: SimulatedEngine,
    slots: Sequence[int],
    tell: Callable[[str], None] = lambda what: None,
) -> FleetSize:
    """Find the fewest replicas of `engine`, with any of these numbers of `slots`, that meet `goal` under `load`.

    Of numbers of slots that need as few, the smallest. `tell` is told what is simulated next.

    Raises:
        UsageError: one request alone is too slow; or no number of slots is possible.
    """
    if not slots:
        raise UsageError("no number of slots is possible")
    tell("one request alone")
    one = _alone(load, goal, engine)
    trials = _FleetTrials(load, goal, engine, tell)
    best: FleetSize | None = None
    for least, count in sorted((_least_replicas(load, engine, each), each) for each in slots):
        if best is not None and (least > best.replicas or (least == best.replicas and count > best.slots)):
            continue
        found = trials.fewest(count, least, best)
        if found is not None:
            best = found
    if best is None:
        raise UsageError(
            f"no fleet of {MOST_REPLICAS:,} replicas or fewer meets {goal.words}", hint="relax the objective"
        )
    return replace(best, alone=one)


def _alone(load: FleetLoad, goal: FleetGoal, engine: SimulatedEngine) -> dict[str, float]:
    """Give the percentiles of requests that meet no other one, in milliseconds: the sums of their steps.

    Raises:
        UsageError: they exceed the goal already.
    """
    requests = [each for part in load.split(1, REQUESTS) for each in part]
    outcomes = [_outcome_alone(engine.steps, len(each.prompt), each.output_tokens) for each in requests]
    exceeded = {} if engine.prefix_cache_bytes else goal.exceeded(outcomes)  # prompts of which all must be read
    if exceeded:
        what = "; ".join(
            f"p{goal.percentile:g} of {name} is {ms(value)}, {significant(value / goal.bounds[name])} times the "
            f"{ms(goal.bounds[name])} that are allowed"
            for name, value in exceeded.items()
        )
        raise UsageError(
            f"no number of replicas meets the objective, because one request alone is too slow: {what}",
            hint="relax the objective, plan for shorter prompts, or plan a checkpoint or recipe in fewer bits "
            "(--weights, --kv), on more devices (--tp) or on a faster target",
        )
    return quantiles(outcomes, goal.percentile)


def _outcome_alone(steps: StepTimes, prompt: int, output: int) -> RequestOutcome:
    """Sum up the steps of one request; those of decoding take what the one in the middle does."""
    first = sum(steps.seconds([tokens], [past]) for tokens, past in chunks(prompt))
    last = first
    if output > 1:
        last += (output - 1) * steps.seconds([1], [prompt + (output - 2) // 2])
    return RequestOutcome(0.0, (first, last), last, prompt, output)


def _least_replicas(load: FleetLoad, engine: SimulatedEngine, slots: int) -> int:
    """Say how many replicas must be busy all the time if every slot is taken in every step.

    Prompts do not count where a prefix cache may have them, and are read in the steps that decode over blocks.
    """
    prompt, output = load.mean_tokens()
    steps, pieces = engine.steps, [] if engine.prefix_cache_bytes else list(chunks(max(1, round(prompt))))
    reading = sum(steps.seconds([tokens], [past]) for tokens, past in pieces)
    writing = output * steps.seconds([1] * slots, [round(prompt + output / 2)] * slots) / slots
    busy = reading + writing if engine.blocks is None else max(reading, writing)
    return max(1, math.ceil(load.rate * busy))


@dataclass(frozen=True)
class _FleetTrials:
    """Simulates fleets of different sizes."""

    load: FleetLoad
    goal: FleetGoal
    engine: SimulatedEngine
    tell: Callable[[str], None]

    def fewest(self, slots: int, least: int, best: FleetSize | None) -> FleetSize | None:
        """Find the fewest replicas, `least` or more, that meet the goal; None: they are no better than `best`."""
        most = MOST_REPLICAS if best is None else best.replicas - (slots > best.slots)
        low, step, found = least, 1, None  # all below `low` fail
        while found is None and low <= most:
            at = min(low + step - 1, most)
            found = self._meets(at, slots)
            low, step = (low, step) if found is not None else (at + 1, 2 * step)
        while found is not None and low < found.replicas:
            at = (low + found.replicas) // 2
            better = self._meets(at, slots)
            low, found = (low, better) if better is not None else (at + 1, found)
        return found

    def _meets(self, replicas: int, slots: int) -> FleetSize | None:
        """Simulate a fleet; None: it misses the goal."""
        self.tell(f"{replicas:,} × {slots} slots")
        engine, wanted = replace(self.engine, slots=slots), max(REQUESTS, self.goal.tail_requests, TURNS * slots)
        runs = [simulate(engine, part) for part in self.load.split(replicas, wanted)]
        kept = tuple(each for run in runs for each in run.outcomes[int(WARM_UP * len(run.outcomes)) :])
        if self.goal.exceeded(kept):
            return None
        return FleetSize(replicas, slots, kept, _running(runs, replicas, self.load), {})


def _running(runs: Sequence[SimulatedRun], replicas: int, load: FleetLoad) -> float:
    """Give the mean number of requests that have a slot on one replica, by Little's law."""
    held = [
        each.latency_ms - usage.queue_ms for run in runs for each, usage in zip(run.outcomes, run.usages, strict=True)
    ]
    return load.rate / replicas * float(np.mean(held)) / 1e3
