"""The workloads of a recipe, sent to the engine as it serves: chat, sessions, shared prefixes, all at once, a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmforge.measure.load.drive import Responder, closed_loop, conversations, open_loop
from llmforge.measure.load.workload import LoadRequest, Prompts, make_load
from llmforge.metrics.serving import RequestOutcome
from llmforge.metrics.workload import MeasuredWorkload, RequestTimes, Slo
from llmforge.recipe import WorkloadsSpec

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

    def load(number: int, run: int, count: int, prompt: int, output: int, **options: float) -> list[LoadRequest]:
        rate, prefix = options.get("rate"), int(options.get("prefix", 0))
        return make_load(
            prompts, count, prompt_tokens=prompt, output_tokens=output, prefix_tokens=prefix, rate=rate,
            seed=(seed, number, run),
        )  # fmt: skip

    if (chat := spec.chat) is not None:
        loads = [
            load(0, run, chat.requests, chat.prompt_tokens, chat.output_tokens, rate=chat.rate)
            for run in range(chat.runs)
        ]
        told = (
            f"{chat.requests} requests of {chat.prompt_tokens} → {chat.output_tokens} tokens, {chat.rate:g} a second "
            "(Poisson)"
        )
        found.append(Scenario("chat", told, tuple(_open(each) for each in loads)))
    if (sessions := spec.sessions) is not None:
        told = (
            f"{sessions.requests} sessions of {sessions.turns} turns, each adds {sessions.prompt_tokens} and gets "
            f"{sessions.output_tokens} tokens, {sessions.concurrency} at once"
        )
        count = sessions.requests * sessions.turns
        turns = [load(1, run, count, sessions.prompt_tokens, sessions.output_tokens) for run in range(sessions.runs)]
        cut = [[each[at : at + sessions.turns] for at in range(0, count, sessions.turns)] for each in turns]
        found.append(Scenario("sessions", told, tuple(_talk(each, sessions.concurrency) for each in cut)))
    if (shared := spec.shared_prefix) is not None:
        told = (
            f"{shared.requests} requests of {shared.prefix_tokens} shared and {shared.prompt_tokens} own → "
            f"{shared.output_tokens} tokens, {shared.concurrency} at once"
        )
        whole = shared.prefix_tokens + shared.prompt_tokens
        loads = [
            load(2, run, shared.requests, whole, shared.output_tokens, prefix=shared.prefix_tokens)
            for run in range(shared.runs)
        ]
        found.append(Scenario("shared_prefix", told, tuple(_closed(each, shared.concurrency) for each in loads)))
    if (offline := spec.offline) is not None:
        told = f"{offline.requests} requests of {offline.prompt_tokens} → {offline.output_tokens} tokens, all at once"
        loads = [
            load(3, run, offline.requests, offline.prompt_tokens, offline.output_tokens) for run in range(offline.runs)
        ]
        found.append(Scenario("offline", told, tuple(_closed(each, offline.requests) for each in loads)))
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
