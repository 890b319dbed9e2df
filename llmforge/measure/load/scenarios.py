"""The workloads of a recipe, sent to the engine as it serves: chat, sessions, shared prefixes, all at once, a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmforge.measure.load.drive import Responder, closed_loop, conversations, open_loop
from llmforge.measure.load.workload import LoadRequest, Prompts, make_load
from llmforge.metrics.serving import RequestOutcome
from llmforge.metrics.workload import MeasuredWorkload, RequestTimes, Slo
from llmforge.recipe import WorkloadSpec, WorkloadsSpec

Send = Callable[[Responder], list[RequestOutcome]]


@dataclass(frozen=True)
class Scenario:
    """A workload that is ready to be sent, as often as it has runs."""

    name: str
    description: str
    runs: tuple[Send, ...]


@dataclass(frozen=True)
class Served:
    """An engine that answers one workload, and what it reused; None: it does not tell."""

    subject: Responder
    prefix_hit_share: Callable[[], float | None] = lambda: None


def plan(
    spec: WorkloadsSpec, prompts: Prompts, trace: Sequence[LoadRequest] | None, *, seed: int = 0
) -> list[Scenario]:
    """Make the loads that `spec` asks for; no two runs share a prompt. `trace` is what its file says."""
    found: list[Scenario] = []

    def loads(number: int, spec: WorkloadSpec, count: int, **options: Any) -> list[list[LoadRequest]]:
        lengths = {"prompt_tokens": spec.prompt_tokens, "output_tokens": spec.output_tokens, **options}
        return [make_load(prompts, count, **lengths, seed=(seed, number, run)) for run in range(spec.runs)]

    if (chat := spec.chat) is not None:
        told = (
            f"{chat.requests} requests of {chat.prompt_tokens} → {chat.output_tokens} tokens, {chat.rate:g} a second "
            "(Poisson)"
        )
        each = loads(0, chat, chat.requests, rate=chat.rate)
        found.append(Scenario("chat", told, tuple(map(_open, each))))
    if (sessions := spec.sessions) is not None:
        told = (
            f"{sessions.requests} sessions of {sessions.turns} turns, each adds {sessions.prompt_tokens} and gets "
            f"{sessions.output_tokens} tokens, {sessions.concurrency} at once"
        )
        count, turns = sessions.requests * sessions.turns, sessions.turns
        each = loads(1, sessions, count)
        cut = [[load[at : at + turns] for at in range(0, count, turns)] for load in each]
        found.append(Scenario("sessions", told, tuple(_talk(load, sessions.concurrency) for load in cut)))
    if (shared := spec.shared_prefix) is not None:
        told = (
            f"{shared.requests} requests of {shared.prefix_tokens} shared and {shared.prompt_tokens} own → "
            f"{shared.output_tokens} tokens, {shared.concurrency} at once"
        )
        whole = shared.prefix_tokens + shared.prompt_tokens
        each = loads(2, shared, shared.requests, prompt_tokens=whole, prefix_tokens=shared.prefix_tokens)
        found.append(Scenario("shared_prefix", told, tuple(_closed(load, shared.concurrency) for load in each)))
    if (offline := spec.offline) is not None:
        told = f"{offline.requests} requests of {offline.prompt_tokens} → {offline.output_tokens} tokens, all at once"
        each = loads(3, offline, offline.requests)
        found.append(Scenario("offline", told, tuple(_closed(load, offline.requests) for load in each)))
    if spec.trace is not None and trace is not None:
        told = f"{len(trace)} requests at the times of {spec.trace.data.name}"
        found.append(Scenario("trace", told, (_open(trace),)))
    return found


def measure(
    scenarios: Sequence[Scenario],
    served: Callable[[], Served],
    warmup: LoadRequest,
    slo: Slo | None,
    done: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[MeasuredWorkload, ...]:
    """Send each workload to an engine of its own, which `served` makes, so that it remembers nothing of the others.

    `warmup` goes before each of them, untimed. `done` is told the runs that are done, and their number.
    """
    made, sent, total = [], 0, sum(len(scenario.runs) for scenario in scenarios)
    for scenario in scenarios:
        engine = served()
        closed_loop(engine.subject, [warmup], 1)
        runs = []
        for send in scenario.runs:
            done(sent, total)
            outcomes = send(engine.subject)
            began = min(outcome.sent_s for outcome in outcomes)
            runs.append(tuple(RequestTimes.of(outcome, began) for outcome in outcomes))
            sent += 1
        share = engine.prefix_hit_share()
        made.append(MeasuredWorkload.of(scenario.name, scenario.description, tuple(runs), slo, share))
    done(total, total)
    return tuple(made)


def _open(load: Sequence[LoadRequest]) -> Send:
    return lambda subject: open_loop(subject, load)


def _closed(load: Sequence[LoadRequest], concurrency: int) -> Send:
    return lambda subject: closed_loop(subject, load, concurrency)


def _talk(sessions: Sequence[Sequence[LoadRequest]], concurrency: int) -> Send:
    return lambda subject: conversations(subject, sessions, concurrency)
