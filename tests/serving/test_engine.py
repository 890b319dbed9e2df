"""The engine's thread: requests of many threads, cancellation, shutting down, and what happens when it fails."""

from __future__ import annotations

import gc
import threading
import time

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from llmforge.base.errors import ForgeError, InputError, Unavailable, UnsupportedError, UsageError
from llmforge.runtime.signature import Signature
from llmforge.serving import Chunk, Engine, EngineOptions, Request, Runner, Sampling

from ..models.small_engines import Received, prompt, small_runner

TEN = Sampling(max_tokens=10, ignore_eos=True)
ENDLESS = Sampling(ignore_eos=True)


@pytest.fixture(scope="module")
def runner(tmp_path_factory, sample_checkpoint) -> Runner:
    return small_runner(tmp_path_factory.mktemp("engine"), sample_checkpoint)


def alone(runner: Runner, ids: tuple[int, ...], sampling: Sampling) -> str:
    return "".join(chunk.text for chunk in runner.generate(ids, sampling))


class Held(Received):
    """Holds the engine's thread from the first chunk on, until it may go: what a receiver must not do."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = threading.Event(), threading.Event()

    def receive(self, item: Chunk | ForgeError) -> None:
        super().receive(item)
        self.reached.set()
        assert self.go.wait(60)


def test_requests_of_many_threads_get_what_they_get_alone(runner):
    requests = [Request(prompt(5 + i, seed=i), TEN) for i in range(12)]
    texts: dict[int, str] = {}

    with Engine(runner) as engine:

        def client(i: int) -> None:
            texts[i] = "".join(chunk.text for chunk in engine.stream(requests[i]))

        held = Held()  # until all have come: on busy cores the first would be gone before the last thread starts
        engine.submit(Request(prompt(4, seed=99), TEN), held.receive)
        assert held.reached.wait(60)
        threads = [threading.Thread(target=client, args=(i,)) for i in range(len(requests))]
        for thread in threads:
            thread.start()
        while engine.stats().waiting < len(requests):
            time.sleep(0.01)
        held.go.set()
        for thread in threads:
            thread.join()
        stats = engine.stats()
    assert [texts[i] for i in range(12)] == [alone(runner, request.prompt, TEN) for request in requests]
    assert (stats.running, stats.waiting, stats.kv_tokens_used) == (0, 0, 0)
    assert (stats.output_tokens, stats.finished) == (130, {"length": 13})
    assert max(stats.steps) == 3


def test_a_full_engine_refuses_and_a_closed_stream_makes_room(runner):
    with Engine(runner, EngineOptions(max_queue=1)) as engine:
        held = Held()
        engine.submit(Request(prompt(4, seed=1), ENDLESS), held.receive)
        assert held.reached.wait(60)
        streams = [engine.stream(Request(prompt(4, seed=i), ENDLESS)) for i in range(3)]
        assert engine.stats().waiting == 3
        with pytest.raises(Unavailable, match="the queue is full: 1 requests are waiting"):
            engine.stream(Request(prompt(4), TEN))
        streams[0].close()
        del streams[0]
        streams.pop()  # nobody will read it
        gc.collect()
        held.go.set()
        assert list(streams.pop())[-1].finish_reason == "length"
        assert held.wait().reason == "length"
        while engine.stats().running:
            time.sleep(0.01)
        assert engine.stats().finished == {"length": 2, "cancelled": 2}
        assert "".join(chunk.text for chunk in engine.stream(Request(prompt(4), TEN))) == alone(runner, prompt(4), TEN)


def test_what_is_cancelled_while_the_engine_is_busy_ends_in_the_next_step(runner):
    with Engine(runner) as engine:
        held, other = Held(), Received()
        engine.submit(Request(prompt(4, seed=1), ENDLESS), held.receive)
        assert held.reached.wait(60)
        ticket = engine.submit(Request(prompt(4, seed=2), ENDLESS), other.receive)
        engine.cancel(ticket)
        engine.cancel(ticket)
        held.go.set()
        assert other.wait().reason == "cancelled"
        assert other.tokens == []
        engine.cancel(ticket)
        assert held.wait().reason == "length"


def test_a_reader_that_stops_reading_holds_up_nobody(runner):
    with Engine(runner) as engine:
        slow = engine.stream(Request(prompt(4, seed=1), TEN))
        next(slow)
        for seed in range(2, 8):
            text = "".join(chunk.text for chunk in engine.stream(Request(prompt(4, seed=seed), TEN)))
            assert text == alone(runner, prompt(4, seed=seed), TEN)
        assert len([chunk for chunk in slow if chunk.token_id is not None]) == 9


def test_a_receiver_may_call_the_engine(runner):
    with Engine(runner) as engine:
        first, second = Received(), Received()
        tickets = []

        def receive(item: Chunk | ForgeError) -> None:
            first.receive(item)
            if len(first.tokens) == 3 and not first.ended:
                engine.cancel(tickets[0])
                engine.submit(Request(prompt(4, seed=2), TEN), second.receive)
                assert engine.stats().slots == 3

        tickets.append(engine.submit(Request(prompt(4, seed=1), ENDLESS), receive))
        assert first.wait().reason == "cancelled"
        assert second.wait().text == alone(runner, prompt(4, seed=2), TEN)


def test_a_deadline_of_the_engine_holds_for_requests_without_one(runner):
    with Engine(runner, EngineOptions(timeout_s=1e-6)) as engine:
        answers = [Received(), Received()]
        engine.submit(Request(prompt(4), ENDLESS), answers[0].receive)
        engine.submit(Request(prompt(4), TEN, timeout_s=60), answers[1].receive)
        assert [answer.wait().reason for answer in answers] == ["timeout", "length"]


@pytest.mark.parametrize("speculation", ["prompt-lookup", "draft"])
def test_an_engine_speculates_and_says_what_it_gained(runner, speculation):
    draft = runner if speculation == "draft" else None
    options = EngineOptions(speculation=speculation)
    requests = [Request(prompt(6, seed=i) * 3, Sampling(max_tokens=60, ignore_eos=True)) for i in range(4)]
    with Engine(runner, options, draft) as engine:
        answers = [Received() for _ in requests]
        for request, answer in zip(requests, answers, strict=True):
            engine.submit(request, answer.receive)
        texts = [answer.wait().text for answer in answers]
    stats = engine.stats()  # behind the last step, which the last answer left before it ended
    assert texts == [alone(runner, request.prompt, request.sampling) for request in requests]
    assert stats.verified_tokens + stats.decode_tokens == 4 * 59
    assert stats.decode_s > 0
    if draft is not None:
        assert stats.drafted_tokens > 0
        assert stats.accepted_tokens == stats.drafted_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_queue": -1}, "max_queue -1: expected 0 or more"),
        ({"step_tokens": 0}, "step_tokens 0: expected 1 or more"),
        ({"prefix_cache_bytes": -1}, r"prefix_cache_bytes -1: expected 0 \(disabled\) or more"),
        ({"speculation": "magic"}, "speculation 'magic': expected off, prompt-lookup, draft or eagle3"),
        ({"timeout_s": 0.0}, "timeout_s 0.0: expected more than 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        EngineOptions(**options)


def test_artifacts_and_options_must_belong_together(runner, monkeypatch):
    with pytest.raises(UsageError, match="speculation is 'draft' and there is no draft artifact"):
        Engine(runner, EngineOptions(speculation="draft"))
    with pytest.raises(UsageError, match="speculation is 'off' and there is a draft artifact"):
        Engine(runner, draft=runner)
    with pytest.raises(UsageError, match="a prefix cache of 5 bytes"):
        Engine(runner, EngineOptions(prefix_cache_bytes=5))
    words = Runner(runner.session, runner.config, Tokenizer(WordLevel({"a": 0}, "a")), None)
    with pytest.raises(InputError, match="the draft artifact has a different vocabulary"):
        Engine(runner, EngineOptions(speculation="draft"), words)
    monkeypatch.setattr(Signature, "no_reuse_reason", "it has moods")
    with pytest.raises(UnsupportedError, match="the draft artifact cannot discard draft tokens: it has moods"):
        Engine(runner, EngineOptions(speculation="draft"), runner)
    with Engine(runner) as engine:
        assert engine.stats().notes == ("no prefix cache: it has moods",)


def test_closing_drains_or_cancels(runner):
    engine = Engine(runner)
    answers = [Received() for _ in range(5)]
    for i, answer in enumerate(answers):
        engine.submit(Request(prompt(4, seed=i), TEN), answer.receive)
    engine.close()
    assert [answer.reason for answer in answers] == ["length"] * 5
    assert not engine.alive
    with pytest.raises(Unavailable, match="shutting down"):
        engine.submit(Request(prompt(4), TEN), Received().receive)

    engine = Engine(runner)
    answers = [Received() for _ in range(5)]
    for i, answer in enumerate(answers):
        engine.submit(Request(prompt(4, seed=i), ENDLESS), answer.receive)
    engine.close(drain=False)
    assert [answer.reason for answer in answers] == ["cancelled"] * 5
    engine.close()


def test_a_bad_request_is_refused_by_the_call(runner):
    with Engine(runner) as engine:
        with pytest.raises(UsageError, match="the prompt is empty"):
            engine.submit(Request(()), Received().receive)
        assert engine.stats().waiting == 0
        assert engine.alive


def test_when_the_engine_fails_everybody_hears_of_it(runner, monkeypatch, caplog):
    engine = Engine(runner)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runner.session, "step", broken)
    answers = [Received() for _ in range(2)]
    for i, answer in enumerate(answers):
        try:
            engine.submit(Request(prompt(4, seed=i), TEN), answer.receive)
        except Unavailable as error:
            answer.receive(error)
    for answer in answers:
        assert "the engine failed: out of memory" in str(answer.wait().error)
    assert not engine.alive
    with pytest.raises(Unavailable, match="the engine failed: out of memory"):
        engine.submit(Request(prompt(4), TEN), Received().receive)
    assert "the engine failed" in caplog.text
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    engine.close()
