"""The workloads of a recipe, on a subject whose answers are known: what is sent, to whom, and what is remembered."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llmforge.base.errors import UsageError
from llmforge.measure.load import scenarios
from llmforge.measure.load.drive import conversations
from llmforge.measure.load.scenarios import Served
from llmforge.measure.load.workload import LoadRequest, RandomPrompts
from llmforge.metrics import workload
from llmforge.metrics.serving import RequestOutcome
from llmforge.metrics.workload import Slo
from llmforge.recipe import WorkloadsSpec

SPEC = WorkloadsSpec.model_validate(
    {
        "chat": {"requests": 3, "prompt_tokens": 5, "output_tokens": 2, "rate": 1000.0, "runs": 2},
        "sessions": {"requests": 2, "turns": 3, "prompt_tokens": 4, "output_tokens": 2, "concurrency": 2},
        "shared_prefix": {"requests": 3, "prefix_tokens": 6, "prompt_tokens": 2, "output_tokens": 2, "concurrency": 1},
        "offline": {"requests": 4, "prompt_tokens": 3, "output_tokens": 2},
        "trace": {"data": Path("arrivals.jsonl")},
    }
)
TRACE = [LoadRequest((9, 9), 2, 0.0), LoadRequest((8,), 2, 0.001)]


@dataclass
class Fake:
    """Answers 100, 101, … at once, remembers what it was asked, and fails where the prompt holds `poison`."""

    poison: int = -1
    description: str = "fake"
    asked: list[LoadRequest] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, request: LoadRequest, due_s: float) -> RequestOutcome:
        with self._lock:
            self.asked.append(request)
        now, count = time.perf_counter(), request.output_tokens
        if self.poison in request.prompt:
            return RequestOutcome(due_s, (), now, len(request.prompt), 0, error="refused")
        ids = tuple(range(100, 100 + count))
        return RequestOutcome(due_s, (now,) * count, now, len(request.prompt), count, token_ids=ids)


def test_each_workload_has_an_engine_of_its_own_and_a_warm_up_that_does_not_count() -> None:
    fakes: list[Fake] = []

    def served() -> Served:
        fakes.append(Fake())
        return Served(fakes[-1], lambda: 0.25)

    told: list[tuple[int, int]] = []
    planned = scenarios.plan(SPEC, RandomPrompts(50), TRACE)
    warmup = LoadRequest((0,), 1)
    made = scenarios.measure(planned, served, warmup, Slo(ttft_ms=1e6), lambda done, total: told.append((done, total)))
    assert [each.name for each in made] == ["chat", "sessions", "shared_prefix", "offline", "trace"]
    assert [len(fake.asked) for fake in fakes] == [1 + 6, 1 + 6, 1 + 3, 1 + 4, 1 + 2]
    assert all(fake.asked[0] == warmup for fake in fakes)
    assert [[len(run) for run in each.runs] for each in made] == [[3, 3], [6], [3], [4], [2]]
    assert told == [(done, 6) for done in range(7)]
    for each in made:
        assert each.figures.failed == 0
        assert each.figures.good_share == 1
        assert each.prefix_hit_share == 0.25
        assert each.runs[0][0].sent_ms == 0
        assert workload.made_of(each.runs, Slo(ttft_ms=1e6)) == each.figures  # what `verify` computes


def test_a_turn_repeats_what_was_said_before() -> None:
    fake = Fake()
    (sessions,) = (each for each in scenarios.plan(SPEC, RandomPrompts(50), None) if each.name == "sessions")
    sessions.runs[0](fake)
    talks: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for request in fake.asked:
        talks.setdefault(request.prompt[:4], []).append(request.prompt)
    assert len(talks) == 2
    for first, second, third in talks.values():
        assert [len(prompt) for prompt in (first, second, third)] == [4, 10, 16]
        assert second[:6] == (*first, 100, 101)
        assert third[:12] == (*second, 100, 101)


def test_a_failed_turn_ends_its_conversation_and_no_other() -> None:
    talks = [[LoadRequest((1,), 2), LoadRequest((7,), 2), LoadRequest((3,), 2)], [LoadRequest((4,), 2)]]
    outcomes = conversations(Fake(poison=7), talks, 1)
    assert [outcome.error for outcome in outcomes] == [None, "refused", "the turn before it failed", None]
    with pytest.raises(UsageError, match="0 conversations at once"):
        conversations(Fake(), talks, 0)


def test_prompts_share_their_prefix_within_a_run_alone() -> None:
    spec = WorkloadsSpec.model_validate(
        {"shared_prefix": {"requests": 3, "prefix_tokens": 20, "prompt_tokens": 5, "output_tokens": 2, "runs": 2}}
    )
    (shared,) = scenarios.plan(spec, RandomPrompts(1000), None)
    prefixes = []
    for run in shared.runs:
        fake = Fake()
        run(fake)
        assert {len(request.prompt) for request in fake.asked} == {25}
        assert len({request.prompt[20:] for request in fake.asked}) == 3
        (prefix,) = {request.prompt[:20] for request in fake.asked}
        prefixes.append(prefix)
    assert prefixes[0] != prefixes[1]


def test_plans_follow_the_seed() -> None:
    def sent(seed: int) -> list[LoadRequest]:
        fake = Fake()
        scenarios.plan(SPEC, RandomPrompts(50), TRACE, seed=seed)[3].runs[0](fake)
        return sorted(fake.asked, key=lambda request: request.prompt)

    assert sent(1) == sent(1) != sent(2)
