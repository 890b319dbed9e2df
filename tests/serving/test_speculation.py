"""Speculative decoding: what is drafted, that nothing is lost, what is counted, and when it is left."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np
import onnx_ir as ir
import pytest

from llmforge.backends.onnxruntime.session import HostCache, Session
from llmforge.runtime.config import SessionConfig
from llmforge.runtime.interface import StepInputs
from llmforge.serving import Constraint, EngineOptions, Request, Runner, Sampling
from llmforge.serving.interface import EngineStats
from llmforge.serving.scheduler import Scheduler, SlotScheduler
from llmforge.serving.speculation import DraftModel, Payoff, PromptLookup, Proposer, Speculation

from ..models.decoder_graph import decoder
from ..models.small_engines import VOCABULARY, AlwaysPays, Received, prompt, small_runner

CAPACITY = 128


@pytest.fixture(scope="module")
def runner(tmp_path_factory, sample_checkpoint) -> Runner:
    return small_runner(tmp_path_factory.mktemp("speculation"), sample_checkpoint)


def answered(
    runner: Runner, requests: Sequence[Request], speculation: Speculation | None
) -> tuple[list[Received], EngineStats]:
    cache = runner.session.allocate(3, CAPACITY)
    scheduler: Scheduler[HostCache] = SlotScheduler(
        runner.session,
        cache,
        runner.samplers,
        EngineOptions(max_queue=99, step_tokens=64, prefix_cache_bytes=0),
        speculation=speculation,
    )
    received = [Received() for _ in requests]
    for request, answer in zip(requests, received, strict=True):
        scheduler.add(request, answer.receive)
    while scheduler.step():
        pass
    return received, scheduler.stats()


def asks(length: int, variant: int, answer: int, **sampling: float) -> Request:
    return Request(prompt(length, variant), Sampling(max_tokens=answer, ignore_eos=True, **sampling))


class Oracle:
    """Drafts from the right answers, of which every `wrong`-th token is replaced."""

    def __init__(self, right: dict[tuple[int, ...], list[int]], wrong: int) -> None:
        self.texts = [[*asked, *answer] for asked, answer in right.items()]
        self.wrong = wrong
        self.forgotten: list[Hashable] = []

    def propose(self, key: Hashable, tokens: Sequence[int], most: int) -> list[int]:
        (text,) = [text for text in self.texts if text[: len(tokens)] == list(tokens)]
        places = range(len(tokens), min(len(tokens) + most, len(text)))
        return [text[i] if i % self.wrong else (text[i] + 1) % VOCABULARY for i in places]

    def forget(self, key: Hashable) -> None:
        self.forgotten.append(key)


# Who drafts ----------------------------------------------------------------------------------------------------------


def test_prompt_lookup_goes_on_as_the_text_did_before():
    lookup = PromptLookup()
    text = [1, 2, 3, 4, 5, 9, 2, 3]
    assert lookup.propose("a", text, 3) == [4, 5, 9]
    assert lookup.propose("a", text, 9) == [4, 5, 9, 2, 3]
    assert lookup.propose("a", [*text, 8], 3) == []
    assert lookup.propose("a", [*text, 8, 2, 3], 3) == [8, 2, 3]  # the latest place
    assert lookup.propose("a", [*text, 8, 2, 3, 4], 2) == [5, 9]  # three tokens say more than two
    assert lookup.propose("b", [2, 3], 3) == []
    lookup.forget("a")
    assert lookup.propose("a", [7, 2, 3], 3) == []


def test_a_draft_model_drafts_what_it_would_answer_however_the_text_goes_on():
    session = Session(ir.to_proto(decoder()).SerializeToString(), SessionConfig(threads=1))

    def greedy(text: list[int], count: int) -> list[int]:
        made = list(text)
        for _ in range(count):
            cache = session.allocate(1, CAPACITY)
            made.append(int(session.step(StepInputs(np.array([made]), np.zeros(1, np.int32)), cache)[0, 0].argmax()))
        return made[len(text) :]

    draft = DraftModel(session, vocabulary=97, rows=2, capacity=40, chunk=4)
    random = np.random.default_rng(0)
    texts = {key: random.integers(0, 97, 9).tolist() for key in ("a", "b")}
    for round_ in range(5):
        for key, text in texts.items():
            drafted = draft.propose(key, text, 4)
            assert drafted == greedy(text, 4)
            right = round_ % 4
            text += [*drafted[:right], int(random.integers(0, 97))]
    assert draft.propose("c", texts["a"], 4) == []  # no row left
    draft.forget("a")
    assert draft.propose("c", texts["a"], 4) == greedy(texts["a"], 4)
    assert draft.propose("b", random.integers(0, 97, 39).tolist(), 4) != []
    assert len(draft.propose("b", random.integers(0, 97, 39).tolist(), 4)) == 2  # room for one more token
    assert draft.propose("b", random.integers(0, 97, 42).tolist(), 4) == []
    assert DraftModel(session, 97, 1, 40, 4).propose("d", [5, 97], 4) == []  # a token that it does not have


# Nothing is lost -----------------------------------------------------------------------------------------------------

REQUESTS = [
    asks(9, 1, 30),
    asks(20, 2, 25, temperature=1.0, seed=3),
    asks(5, 3, 40, temperature=0.7, top_p=0.9, seed=4),
    asks(30, 4, 1),
    asks(40, 5, 88),
]


@pytest.mark.parametrize("wrong", [1, 3, 1000])
def test_answers_are_the_same_whatever_is_drafted(runner, wrong):
    plain, _ = answered(runner, REQUESTS, None)
    right = {request.prompt: answer.tokens for request, answer in zip(REQUESTS, plain, strict=True)}
    oracle = Oracle(right, wrong)
    drafted, stats = answered(runner, REQUESTS, Speculation(oracle, AlwaysPays()))
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert [answer.text for answer in drafted] == [answer.text for answer in plain]
    assert [answer.reason for answer in drafted] == ["length"] * len(REQUESTS)
    usages = [answer.chunks[-1].usage for answer in drafted]
    assert stats.drafted_tokens == sum(usage.drafted_tokens for usage in usages) > 0
    assert stats.accepted_tokens == sum(usage.accepted_tokens for usage in usages)
    assert stats.verified_tokens + stats.decode_tokens == stats.output_tokens - len(REQUESTS)
    if wrong == 1:
        assert stats.accepted_tokens == 0
    if wrong == 1000:
        assert stats.accepted_tokens == stats.drafted_tokens
        assert stats.verified_tokens > 5 * stats.decode_tokens
        assert usages[3].drafted_tokens == 0  # its only token comes with the prompt
    assert len(set(oracle.forgotten)) == len(REQUESTS)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 9}])
def test_drafts_change_no_token_of_a_constrained_answer(runner, options):
    """Right drafts, wrong ones, and such as the grammar forbids: the state advances by accepted tokens alone."""
    pytest.importorskip("llguidance", reason="constraints need llguidance")
    constraint = Constraint("regex", "[a-z ]{80,120}")
    request = Request(prompt(9, 1), Sampling(max_tokens=90, constraint=constraint, **options))
    (plain,), _ = answered(runner, [request], None)
    oracle = Oracle({request.prompt: plain.tokens}, 5)
    (drafted,), stats = answered(runner, [request], Speculation(oracle, AlwaysPays()))
    assert drafted.tokens == plain.tokens
    assert 5 < stats.accepted_tokens < stats.drafted_tokens


def test_an_answer_that_ends_within_a_draft_ends_there(runner):
    (plain,), _ = answered(runner, [asks(9, 1, 30)], None)
    text = plain.text
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    request = Request(prompt(9, 1), Sampling(max_tokens=30, ignore_eos=True, stop=(stop,)))
    oracle = Oracle({request.prompt: plain.tokens}, 1000)
    (drafted,), _ = answered(runner, [request], Speculation(oracle, AlwaysPays()))
    assert drafted.text == text[: text.index(stop)]
    assert drafted.reason == "stop"
    token = plain.tokens[len(plain.tokens) // 2]
    end = dataclasses.replace(request.sampling, stop=(), stop_token_ids=(token,))
    (drafted,), _ = answered(runner, [Request(request.prompt, end)], Speculation(oracle, AlwaysPays()))
    assert drafted.tokens == plain.tokens[: plain.tokens.index(token)]
    assert drafted.reason == "stop"


def test_a_draft_model_that_is_the_model_is_always_right(runner):
    draft = DraftModel(runner.session, VOCABULARY, 3, CAPACITY, 16)
    greedy = [request for request in REQUESTS if request.sampling.temperature == 0]
    plain, _ = answered(runner, greedy, None)
    drafted, stats = answered(runner, greedy, Speculation(draft, AlwaysPays(), max_tokens=4))
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert stats.drafted_tokens > 50
    assert stats.accepted_tokens == stats.drafted_tokens


# Off when it does not pay -------------------------------------------------------------------------------------------


def payoff(*, decode_s: float, verify_s: float, gained: int) -> Payoff:
    measured = Payoff()
    measured.decoded(1, decode_s)
    for _ in range(20):
        measured.verified("a", 7, gained, verify_s)
        measured.decoded(1, decode_s)
    return measured


def test_drafts_are_verified_where_that_is_faster():
    assert payoff(decode_s=1.0, verify_s=2.0, gained=4).pays("a", 7, 1)
    assert not payoff(decode_s=1.0, verify_s=5.0, gained=4).pays("a", 7, 1)
    # Beside others: verifying takes 2 s for 4 tokens, and a step of 4 answers is no shorter for one answer less.
    crowd = payoff(decode_s=1.0, verify_s=2.0, gained=4)
    for rows in (3, 4):
        crowd.decoded(rows, 1.0)
    assert not crowd.pays("a", 7, 4)
    crowd.verified("b", 7, 8, 0.1)
    assert crowd.pays("b", 7, 1)


def test_nothing_is_decided_before_it_is_measured():
    new = Payoff()
    assert not new.pays("a", 7, 1)  # what a step takes comes first
    new.decoded(1, 1.0)
    assert new.pays("a", 7, 1)  # then what a verification takes
    new.verified("a", 7, 1, 10.0)
    assert not new.pays("a", 7, 1)


def test_the_other_way_is_tried_now_and_then():
    slow = payoff(decode_s=1.0, verify_s=5.0, gained=1)
    asked = [slow.pays("a", 7, 1) for _ in range(Payoff.PROBE)]
    assert asked == [False] * (Payoff.PROBE - 1) + [True]
    slow.verified("a", 7, 1, 5.0)
    assert not slow.pays("a", 7, 1)
    fast = payoff(decode_s=1.0, verify_s=0.1, gained=8)
    for _ in range(Payoff.PROBE):
        assert fast.pays("a", 7, 1)
        fast.verified("a", 7, 8, 0.1)
    assert not fast.pays("a", 7, 1)
    fast.decoded(1, 1.0)
    assert fast.pays("a", 7, 1)


class Timed:
    """A clock that stands still but for what `Slow` lets pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("verify_s", "pays"), [(1.5, True), (9.0, False)])
def test_a_scheduler_measures_and_decides(runner, monkeypatch, verify_s, pays):
    clock, step = Timed(), runner.session.step

    def timed(inputs: StepInputs, *args: object, **kwargs: object) -> np.ndarray:
        clock.now += 1.0 if inputs.ids.shape[1] == 1 else verify_s
        return step(inputs, *args, **kwargs)

    request = asks(9, 1, 100)
    (plain,), _ = answered(runner, [request], None)
    monkeypatch.setattr(runner.session, "step", timed)
    proposer: Proposer = Oracle({request.prompt: plain.tokens}, 4)  # three of four are right
    scheduler: Scheduler[HostCache] = SlotScheduler(
        runner.session,
        runner.session.allocate(1, CAPACITY),
        runner.samplers,
        EngineOptions(max_queue=0, step_tokens=64, prefix_cache_bytes=0),
        speculation=Speculation(proposer),
        clock=clock,
    )
    answer = Received()
    scheduler.add(request, answer.receive)
    while scheduler.step():
        pass
    assert answer.tokens == plain.tokens
    stats = scheduler.stats()
    assert (stats.verified_tokens > stats.decode_tokens) == pays
    assert stats.decode_s == pytest.approx(stats.decode_tokens)
    assert stats.verify_s == pytest.approx(verify_s * stats.drafted_tokens / 7, rel=0.3)
    gain = stats.speculation_gain
    assert gain is not None
    assert (gain > 1) == pays
