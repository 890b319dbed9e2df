"""The scheduler, step by step: who runs when, what a step costs, and that nobody's tokens depend on neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from llmforge import targets
from llmforge.backends.onnxruntime import builder as engine
from llmforge.backends.onnxruntime.session import HostCache
from llmforge.base.errors import InputError, Unavailable, UsageError
from llmforge.checkpoint import Checkpoint
from llmforge.runtime.interface import StepInputs
from llmforge.runtime.sampling.sampler import Samplers
from llmforge.serving import EngineOptions, Request, Runner, Sampling
from llmforge.serving.prefix_cache import BLOCK
from llmforge.serving.scheduler import Scheduler, SlotScheduler
from llmforge.serving.sequence import LEVEL_S
from llmforge.serving.speculation import PromptLookup, Speculation
from llmforge.trace import trace
from llmforge.verification import probe

from ..models import zoo
from ..models.checkpoints import write_tokenizer
from ..models.small_engines import VOCABULARY, AlwaysPays, Received, prompt, small_runner

CHUNK = 16
CAPACITY = 256
PLENTY = 1 << 20


class Watched:
    """The small decoder, which notes every step as (past lengths, tokens a row); logits of `broken` prompts are NaN."""

    def __init__(self, runner: Runner, buckets: tuple[int, ...] = ()) -> None:
        self._session = runner.session
        self.decodes_ahead = False
        self.spare_bytes: int | None = None
        self.vocabulary = self._session.vocabulary
        self.signature = SimpleNamespace(no_reuse_reason=self._session.signature.no_reuse_reason, steady_from=2)
        self.allocate = self._session.allocate
        self.buckets = buckets
        self.longest_step: int | None = None
        self.prompt_shapes: tuple[tuple[int, int], ...] = ()
        self.notes: tuple[str, ...] = ()
        self.logits_array = self._session.logits_array
        self.steps: list[tuple[list[int], int]] = []
        self.broken_token: int | None = None

    def step(self, inputs: StepInputs, cache: HostCache, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        self.steps.append((inputs.past_lengths.tolist(), inputs.ids.shape[1]))
        logits = self._session.step(inputs, cache, out)
        if self.broken_token is not None:
            logits[(inputs.ids == self.broken_token).any(axis=1)] = np.nan
        return logits

    def taken(self) -> list[tuple[list[int], int]]:
        """What ran since the last call."""
        steps, self.steps = self.steps, []
        return steps


class Clock:
    """Seconds, as a test sets them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def runner(tmp_path_factory, sample_checkpoint) -> Runner:
    return small_runner(tmp_path_factory.mktemp("scheduler"), sample_checkpoint)


@pytest.fixture
def watched(runner) -> Watched:
    return Watched(runner)


def scheduler(runner: Runner, backend: Any = None, *, slots: int = 3, **options: Any) -> Scheduler[HostCache]:
    backend = backend or runner.session
    own = {name: options.pop(name) for name in ("chunk", "clock") if name in options}
    served = EngineOptions(**{"max_queue": 10, "step_tokens": CHUNK, "prefix_cache_bytes": 0, **options})
    return SlotScheduler(backend, backend.allocate(slots, CAPACITY), runner.samplers, served, **{"chunk": CHUNK, **own})


def run(scheduled: Scheduler[HostCache]) -> None:
    while scheduled.step():
        pass


def asks(length: int, variant: int, answer: int, **sampling: Any) -> Request:
    return Request(prompt(length, variant), Sampling(max_tokens=answer, ignore_eos=True, **sampling))


def alone(runner: Runner, request: Request) -> list[int]:
    """The answer in a scheduler of one slot, prompts read in one piece."""
    answer = Received()
    single = scheduler(runner, slots=1, step_tokens=CAPACITY, chunk=CAPACITY)
    single.add(request, answer.receive)
    run(single)
    return answer.tokens


@pytest.fixture
def answers() -> Iterator[list[Received]]:
    received = [Received() for _ in range(8)]
    yield received
    assert all(answer.ended for answer in received if answer.chunks)


# Fairness ------------------------------------------------------------------------------------------------------------


def test_a_long_prompt_does_not_hold_up_those_who_decode_nor_they_the_prompt(runner, watched, answers):
    scheduled = scheduler(runner, watched)
    quick, long = asks(5, 1, 20), asks(80, 2, 3)
    scheduled.add(quick, answers[0].receive)
    scheduled.step()
    scheduled.add(long, answers[1].receive)
    watched.taken()
    for piece in range(5):
        scheduled.step()
        assert len(answers[0].tokens) == 2 + piece  # one token in every step
        assert watched.taken() == [([5 + piece], 1), ([16 * piece], 16)]
        assert bool(answers[1].tokens) == (piece == 4)
    run(scheduled)
    assert answers[0].tokens == alone(runner, quick)
    assert answers[1].tokens == alone(runner, long)


def test_a_step_stays_within_its_budget_and_prompts_are_read_in_order(runner, watched, answers):
    scheduled = scheduler(runner, watched, step_tokens=20)
    lengths = [6, 7, 30, 3]
    for i, length in enumerate(lengths):
        scheduled.add(asks(length, i, 50), answers[i].receive)
    scheduled.step()
    assert [size for _, size in watched.taken()] == [6, 7]  # 6 + 7 + 16 would be too much
    scheduled.step()
    assert watched.taken() == [([6, 7], 1), ([0], 16)]  # 2 + 16 + 14 would be too much
    scheduled.step()
    assert watched.taken() == [([7, 8], 1), ([16], 14)]
    assert [len(answer.tokens) for answer in answers[:4]] == [3, 3, 1, 0]
    scheduled.cancel_all()
    scheduled.step()


def test_prompts_are_read_even_where_decoding_alone_exceeds_the_budget(runner, watched, answers):
    scheduled = scheduler(runner, watched, step_tokens=2)
    for i in range(2):
        scheduled.add(asks(2, i, 40), answers[i].receive)
    scheduled.step()
    scheduled.step()
    scheduled.add(asks(7, 3, 2), answers[2].receive)
    watched.taken()
    for _ in range(4):
        scheduled.step()
    assert [past for past, size in watched.taken() if len(past) == 1] == [[0], [2], [4], [6]]
    assert len(answers[2].tokens) == 1
    run(scheduled)
    assert answers[2].tokens == alone(runner, asks(7, 3, 2))


def test_slots_go_to_those_who_came_first(runner, answers):
    scheduled = scheduler(runner)
    for i, answer in enumerate(answers[:6]):
        scheduled.add(asks(3, i, 4 + i), answer.receive)
    ended: list[int] = []
    while scheduled.step():
        ended += [i for i, answer in enumerate(answers[:6]) if answer.ended and i not in ended]
    assert ended == [0, 1, 2, 3, 4, 5]
    assert [answer.tokens for answer in answers[:6]] == [alone(runner, asks(3, i, 4 + i)) for i in range(6)]


def test_of_those_who_wait_the_client_with_the_fewest_slots_is_next(runner, answers):
    scheduled = scheduler(runner)
    for i, (who, tokens) in enumerate([("many", 4), ("many", 20), ("many", 20), *[("many", 5)] * 3, ("few", 2)]):
        scheduled.add(replace(asks(3, i, tokens), client=who), answers[i].receive)
    while not answers[0].ended:
        scheduled.step()
    for _ in range(3):  # read, and answer twice
        scheduled.step()
    assert [answer.ended for answer in answers[:7]] == [True, False, False, False, False, False, True]
    run(scheduled)
    assert all(answer.ended for answer in answers[:7])


# Slots ---------------------------------------------------------------------------------------------------------------


def test_lower_priorities_go_first_and_then_clients_in_turns(runner, answers):
    scheduled = scheduler(runner, slots=1)
    given = [("a", 0), ("a", 3), ("b", -2), ("a", -2), ("b", 0)]
    for number, (client, priority) in enumerate(given):
        asked = Request(prompt(4, seed=number), Sampling(max_tokens=1), client=client, priority=priority)
        scheduled.add(asked, answers[number].receive)
    ended = []
    while scheduled.step():
        ended += [number for number in range(len(given)) if answers[number].ended and number not in ended]
    assert ended == [2, 3, 0, 4, 1]


@pytest.mark.parametrize("levels", [1, 6])
def test_a_low_priority_waits_so_many_seconds_for_those_who_come_later(runner, answers, levels):
    """New requests of a lower priority come without end; the one behind is taken up once it has waited for it."""
    clock = Clock()
    scheduled = scheduler(runner, slots=1, clock=clock)
    one = Sampling(max_tokens=1)
    scheduled.add(Request(prompt(4), one, priority=levels - 2), answers[0].receive)
    came = 0
    while not answers[0].ended:
        came += 1
        scheduled.add(Request(prompt(4, seed=came), one, priority=-2, client=str(came)), Received().receive)
        scheduled.step()
        clock.now += 1.0
        assert came < 100
    assert came == levels * LEVEL_S + 1


def test_a_slot_that_was_left_is_filled_by_the_next_and_then_by_the_last(runner, watched, answers):
    scheduled = scheduler(runner, watched, step_tokens=CAPACITY, chunk=CAPACITY)
    requests = [asks(40, 1, 60), asks(9, 2, 3), asks(70, 3, 40, temperature=1.0, seed=5), asks(12, 4, 4)]
    for i, request in enumerate(requests):
        scheduled.add(request, answers[i].receive)
    run(scheduled)
    assert [answer.tokens for answer in answers[:4]] == [alone(runner, request) for request in requests]
    batches = [len(past) for past, size in watched.taken() if size == 1]
    assert batches == sorted(batches, reverse=True)
    # Slot 1 serves for 2 steps, is read into for 1 and serves for 3; free, it runs 2 times, then the last one moves in.
    assert batches.count(3) == 2 + 1 + 3 + 2
    assert (batches.count(2), batches.count(1)) == (39 - 8, 59 - 39)
    assert scheduled.stats().kv_tokens_used == 0


def test_a_prompt_that_is_read_between_rows_that_decode_stays_as_it_is(runner, watched, answers):
    scheduled = scheduler(runner, watched)
    requests = [asks(5, 1, 3), asks(6, 2, 30), asks(80, 3, 8)]
    for i, request in enumerate(requests):
        scheduled.add(request, answers[i].receive)
        if i == 1:
            while not answers[0].ended:
                scheduled.step()
    run(scheduled)
    assert ([16, 9], 1) in watched.taken()  # slot 0 holds 16 tokens of the prompt, and runs beside slot 1
    assert [answer.tokens for answer in answers[:3]] == [alone(runner, request) for request in requests]


def test_decode_steps_are_padded_to_buckets_where_the_backend_has_them(runner, answers):
    watched = Watched(runner, buckets=(2, 4))
    scheduled = scheduler(runner, watched, slots=5, step_tokens=CAPACITY)
    requests = [asks(4 + i, i, 3 * i + 2) for i in range(5)]
    for i, request in enumerate(requests):
        scheduled.add(request, answers[i].receive)
    run(scheduled)
    assert [answer.tokens for answer in answers[:5]] == [alone(runner, request) for request in requests]
    assert set(scheduled.stats().steps) == {2, 4, 5}


def test_a_prefix_cache_takes_what_a_device_has_left(runner, monkeypatch):
    block = runner.session.allocate(1, BLOCK).size_bytes

    def made(left: int | None) -> Scheduler[HostCache]:
        monkeypatch.setattr(type(runner.session), "spare_bytes", property(lambda _: left))
        return scheduler(runner, prefix_cache_bytes=8 * block)

    assert [made(left).stats().prefix_tokens_capacity for left in (None, 9 * block, 3 * block)] == [
        8 * BLOCK, 8 * BLOCK, 3 * BLOCK,
    ]  # fmt: skip
    assert made(8 * block).stats().notes == ()
    assert made(3 * block).stats().notes[0].startswith("a smaller prefix cache: 0.00 GB are left on the device")
    none = made(block - 1)
    assert none.stats().prefix_tokens_capacity == 0
    assert none.stats().notes[0].startswith("no prefix cache: ")
    monkeypatch.setattr(type(runner.session), "spare_bytes", property(lambda _: None))
    with pytest.raises(UsageError):  # too small, as it was asked for
        scheduler(runner, prefix_cache_bytes=block - 1)


def test_everything_is_free_again_after_many_joins_and_leaves(runner):
    scheduled = scheduler(runner, prefix_cache_bytes=PLENTY)
    random = np.random.default_rng(3)
    received = [Received() for _ in range(60)]
    waiting = list(enumerate(received))
    tickets = []
    while scheduled.busy or waiting:
        while waiting and random.random() < 0.4:
            i, answer = waiting.pop(0)
            try:
                request = asks(int(random.integers(1, 90)), i, int(random.integers(1, 20)))
                tickets.append(scheduled.add(request, answer.receive))
            except Unavailable:
                waiting.insert(0, (i, answer))
                break
        if tickets and random.random() < 0.1:
            tickets[int(random.integers(len(tickets)))].cancelled = True
        scheduled.step()
        stats = scheduled.stats()
        assert stats.running + stats.waiting <= 13
    assert all(answer.ended for answer in received)
    assert (stats.running, stats.waiting, stats.kv_tokens_used) == (0, 0, 0)
    assert stats.finished["length"] + stats.finished["cancelled"] == 60
    assert stats.finished["cancelled"] > 3
    assert stats.output_tokens == sum(len(answer.tokens) for answer in received)


# Endings -------------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_one_more(runner, answers):
    scheduled = scheduler(runner, slots=2, max_queue=1)
    for i in range(3):
        scheduled.add(asks(3, i, 2), answers[i].receive)
    with pytest.raises(Unavailable, match="the queue is full: 1 requests are waiting") as caught:
        scheduled.add(asks(3, 3, 2), answers[3].receive)
    assert caught.value.exit_code == 9
    run(scheduled)
    scheduled.add(asks(3, 3, 2), answers[3].receive)
    run(scheduled)
    assert [answer.reason for answer in answers[:4]] == ["length"] * 4


def test_what_is_cancelled_ends_at_the_next_step_and_leaves_its_slot(runner, answers):
    scheduled = scheduler(runner, slots=1)
    running = scheduled.add(asks(3, 1, 50), answers[0].receive)
    waiting = scheduled.add(asks(3, 2, 50), answers[1].receive)
    scheduled.add(asks(3, 3, 2), answers[2].receive)
    for _ in range(4):
        scheduled.step()
    running.cancelled = waiting.cancelled = True
    assert not answers[0].ended
    scheduled.step()
    assert [answer.reason for answer in answers[:2]] == ["cancelled"] * 2
    assert len(answers[2].tokens) == 1  # it has the slot in the same step
    usage = answers[0].chunks[-1].usage
    assert (usage.prompt_tokens, usage.output_tokens) == (3, 4)
    usage = answers[1].chunks[-1].usage
    assert (usage.output_tokens, usage.ttft_ms, usage.tpot_ms) == (0, None, None)
    run(scheduled)
    running.cancelled = True  # nothing happens
    assert not scheduled.step()


def test_deadlines_end_what_runs_and_what_waits(runner, answers):
    clock = Clock()
    scheduled = scheduler(runner, slots=1, clock=clock)
    scheduled.add(Request(prompt(3, 1), Sampling(ignore_eos=True), timeout_s=5.0), answers[0].receive)
    scheduled.add(Request(prompt(3, 2), Sampling(ignore_eos=True), timeout_s=3.0), answers[1].receive)
    clock.now = 1.0
    scheduled.step()
    clock.now = 2.5
    scheduled.step()
    assert not any(answer.ended for answer in answers)
    clock.now = 3.0
    scheduled.step()
    assert answers[1].reason == "timeout"
    clock.now = 4.9
    scheduled.step()
    assert not answers[0].ended
    clock.now = 5.0
    scheduled.step()
    assert answers[0].reason == "timeout"
    usage = answers[0].chunks[-1].usage
    assert usage.output_tokens == 4
    assert (usage.queue_ms, usage.ttft_ms) == (1000.0, 1000.0)
    assert usage.tpot_ms == pytest.approx((4.9 - 1.0) / 3 * 1e3)
    assert answers[1].chunks[-1].usage.queue_ms == 3000.0


def test_logits_that_are_not_finite_fail_one_answer_and_no_other(runner, watched, answers):
    watched.broken_token = 7
    scheduled = scheduler(runner, watched)
    broken = Request((9, 8, 7), Sampling(max_tokens=4))
    requests = [asks(5, 1, 6), broken, asks(6, 2, 6)]
    for i, request in enumerate(requests):
        scheduled.add(request, answers[i].receive)
    run(scheduled)
    assert isinstance(answers[1].error, InputError)
    assert "NaN or infinite" in str(answers[1].error)
    assert answers[0].tokens == alone(runner, requests[0])
    assert answers[2].tokens == alone(runner, requests[2])
    assert scheduled.stats().finished == {"error": 1, "length": 2}


def test_a_receiver_that_raises_loses_its_own_answer(runner, answers, caplog):
    scheduled = scheduler(runner)
    calls = []

    def broken(item: object) -> None:
        calls.append(item)
        raise OSError("the connection is gone")

    scheduled.add(asks(5, 1, 6), answers[0].receive)
    scheduled.add(asks(5, 2, 6), broken)
    run(scheduled)
    assert answers[0].tokens == alone(runner, asks(5, 1, 6))
    assert len(calls) == 1
    assert "the connection is gone" in caplog.text
    assert scheduled.stats().finished == {"error": 1, "length": 1}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(()), "the prompt is empty"),
        (Request(tuple(range(1, CAPACITY + 1))), f"{CAPACITY} tokens; this artifact allows at most {CAPACITY - 1}"),
        (Request((1, VOCABULARY)), f"token id {VOCABULARY}; the vocabulary has {VOCABULARY}"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused_at_once(runner, request_, message):
    with pytest.raises(UsageError, match=message):
        scheduler(runner).add(request_, Received().receive)


# Prefixes ------------------------------------------------------------------------------------------------------------


def test_a_prompt_that_was_read_before_is_read_from_its_last_block_on(runner, watched, answers):
    scheduled = scheduler(runner, watched, prefix_cache_bytes=PLENTY)
    request = asks(3 * BLOCK + 5, 1, 4)
    scheduled.add(request, answers[0].receive)
    run(scheduled)
    watched.taken()
    scheduled.add(request, answers[1].receive)
    run(scheduled)
    assert watched.taken()[0] == ([3 * BLOCK], 5)
    assert answers[0].tokens == answers[1].tokens == alone(runner, request)
    assert [answer.chunks[-1].usage.cached_tokens for answer in answers[:2]] == [0, 3 * BLOCK]
    stats = scheduled.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (2 * (3 * BLOCK + 5), 3 * BLOCK)
    assert (stats.prompt_tokens, stats.prefill_tokens) == (2 * (3 * BLOCK + 5), 3 * BLOCK + 10)


def test_pieces_end_where_they_would_without_a_cached_beginning(runner, watched, answers):
    scheduled = scheduler(runner, watched, prefix_cache_bytes=PLENTY, step_tokens=CAPACITY, chunk=40)
    first = asks(BLOCK + 9, 1, 1)
    second = Request(first.prompt + prompt(80, 2), Sampling(max_tokens=1))
    scheduled.add(first, answers[0].receive)
    run(scheduled)
    watched.taken()
    scheduled.add(second, answers[1].receive)
    run(scheduled)
    assert watched.taken() == [([BLOCK], 40 - BLOCK), ([40], 40), ([80], 40), ([120], 1)]


def test_what_went_wrong_with_a_text_is_not_kept_for_others(runner, watched, answers):
    scheduled = scheduler(runner, watched, prefix_cache_bytes=PLENTY)
    shared = prompt(2 * BLOCK, 1)
    requests = [Request((*shared, *last), Sampling(max_tokens=2, ignore_eos=True)) for last in ((7, 8), (9, 7), (8, 9))]
    watched.broken_token = 7
    for i, request in enumerate(requests):
        scheduled.add(request, answers[i].receive)
        run(scheduled)
    assert all(answer.error is not None for answer in answers[:2])
    assert answers[2].chunks[-1].usage.cached_tokens == 0
    assert answers[2].tokens == alone(runner, requests[2])


@pytest.mark.parametrize(
    ("tokens", "chunk", "steady_from", "cached"),
    [
        (2 * BLOCK + 2, CAPACITY, 2, 2 * BLOCK),
        (2 * BLOCK + 1, CAPACITY, 2, BLOCK),  # one token would have a kernel of its own
        (2 * BLOCK + 1, CAPACITY, 1, 2 * BLOCK),
        (2 * BLOCK, CAPACITY, 1, BLOCK),  # the last token is always read
        (2 * BLOCK + 8, CAPACITY, 9, BLOCK),
        (2 * BLOCK + 9, CAPACITY, 9, 2 * BLOCK),
        (2 * BLOCK + 1, BLOCK, 9, 2 * BLOCK),  # read in pieces of 32, 32 and 1 without a cache, too
        (2 * BLOCK + 20, 40, 9, 2 * BLOCK),
        (2 * BLOCK + 5, 40, 9, 0),  # the last 5 of 69 would differ from 29, and the last 8 of the first 40
    ],
)
def test_what_is_read_behind_a_cached_beginning_has_the_kernels_that_it_has_without(
    runner, watched, answers, tokens, chunk, steady_from, cached
):
    watched.signature.steady_from = steady_from
    scheduled = scheduler(runner, watched, prefix_cache_bytes=PLENTY, step_tokens=CAPACITY, chunk=chunk)
    request = asks(tokens, 1, 2)
    for answer in answers[:2]:
        watched.taken()
        scheduled.add(request, answer.receive)
        run(scheduled)
    assert answers[1].chunks[-1].usage.cached_tokens == cached
    assert watched.taken()[0][0] == [cached]
    assert answers[0].tokens == answers[1].tokens


def test_requests_that_come_together_share_what_the_first_one_reads(runner, answers):
    scheduled = scheduler(runner, prefix_cache_bytes=PLENTY)
    shared = prompt(2 * BLOCK, 1)
    requests = [Request(shared + prompt(5, seed), Sampling(max_tokens=3, ignore_eos=True)) for seed in (2, 3, 4)]
    for i, request in enumerate(requests):
        scheduled.add(request, answers[i].receive)
    run(scheduled)
    assert [answer.chunks[-1].usage.cached_tokens for answer in answers[:3]] == [0, 2 * BLOCK, 2 * BLOCK]
    assert [answer.tokens for answer in answers[:3]] == [alone(runner, request) for request in requests]


def test_the_next_turn_of_a_conversation_finds_the_answer_too(runner, answers):
    scheduled = scheduler(runner, prefix_cache_bytes=PLENTY)
    first = asks(BLOCK - 3, 1, BLOCK)
    scheduled.add(first, answers[0].receive)
    run(scheduled)
    turn = Request((*first.prompt, *answers[0].tokens, 9, 8, 7), Sampling(max_tokens=5, ignore_eos=True))
    scheduled.add(turn, answers[1].receive)
    run(scheduled)
    assert answers[1].chunks[-1].usage.cached_tokens == BLOCK  # its second block lacks the last token, never read
    longer = Request((*turn.prompt, *answers[1].tokens), Sampling(max_tokens=5, ignore_eos=True))
    scheduled.add(longer, answers[2].receive)
    run(scheduled)
    assert answers[2].chunks[-1].usage.cached_tokens == 2 * BLOCK
    assert [answer.tokens for answer in answers[1:3]] == [alone(runner, turn), alone(runner, longer)]


# Decoders that keep a state -------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # transformers' own, about its model
def test_layers_with_states_are_batched_and_go_without_reuse(tmp_path, answers):
    zoo.write("qwen3-5", tmp_path)
    write_tokenizer(tmp_path)
    model, _ = engine.lower(trace(Checkpoint.open(tmp_path)), targets.load("cpu-avx2"))
    session = probe.open_session(model, probe.InitializerArrays(), 1)
    vocabulary = session.vocabulary
    samplers = Samplers(Tokenizer(WordLevel({"a": 0}, "a")), vocabulary, ())

    def scheduled(slots: int, chunk: int) -> Scheduler[HostCache]:
        speculation = Speculation(PromptLookup(), AlwaysPays())
        cache, options = session.allocate(slots, CAPACITY), EngineOptions(9, chunk, PLENTY)
        return SlotScheduler(session, cache, samplers, options, speculation=speculation, chunk=chunk)

    random = np.random.default_rng(1)
    requests = [
        Request(
            tuple(random.integers(0, vocabulary, length).tolist()),
            Sampling(max_tokens=count, ignore_eos=True),
            detokenize=False,
        )
        for length, count in ((40, 30), (5, 4), (60, 25), (33, 6), (40, 3), (7, 20))
    ]
    together = scheduled(3, 7)
    for i, request in enumerate(requests):
        together.add(request, answers[i].receive)
    run(together)
    for i, request in enumerate(requests):
        single, answer = scheduled(1, CAPACITY), Received()
        single.add(request, answer.receive)
        run(single)
        assert answers[i].tokens == answer.tokens
    stats = together.stats()
    assert stats.notes == (
        "no prefix cache: layers keep a state, which holds a whole text and no part of it",
        "no speculation: layers keep a state, which holds a whole text and no part of it",
    )
    assert (stats.prefix_query_tokens, stats.drafted_tokens) == (0, 0)
    assert 3 in stats.steps
