"""The engine's thread: requests of many threads, cancellation, shutting down, and what happens when it fails."""

from __future__ import annotations

import threading

import pytest

from llmforge.errors import Unavailable, UsageError
from llmforge.runtime import Request, Runner, Sampling
from llmforge.runtime.engine import Engine, EngineOptions

from .engines import Received, prompt, small_runner

TEN = Sampling(max_tokens=10, ignore_eos=True)
ENDLESS = Sampling(ignore_eos=True)


@pytest.fixture(scope="module")
def runner(tmp_path_factory, sample_checkpoint) -> Runner:
    return small_runner(tmp_path_factory.mktemp("engine"), sample_checkpoint)


def alone(runner: Runner, ids: tuple[int, ...], sampling: Sampling) -> str:
    return "".join(chunk.text for chunk in runner.generate(ids, sampling))


def test_requests_of_many_threads_get_what_they_get_alone(runner):
    requests = [Request(prompt(5 + i, seed=i), TEN) for i in range(12)]
    texts: dict[int, str] = {}

    with Engine(runner) as engine:

        def client(i: int) -> None:
            texts[i] = "".join(chunk.text for chunk in engine.stream(requests[i]))

        threads = [threading.Thread(target=client, args=(i,)) for i in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = engine.stats()
    assert [texts[i] for i in range(12)] == [alone(runner, request.prompt, TEN) for request in requests]
    assert (stats.running, stats.waiting, stats.kv_tokens_used) == (0, 0, 0)
    assert (stats.output_tokens, stats.finished) == (120, {"length": 12})
    assert max(stats.steps) == 3


def test_a_closed_stream_gives_its_slot_back(runner):
    with Engine(runner, EngineOptions(max_queue=0)) as engine:
        streams = [engine.stream(Request(prompt(4, seed=i), ENDLESS)) for i in range(3)]
        for stream in streams:
            next(stream)
        with pytest.raises(Unavailable, match="the queue is full: 0 requests wait"):
            engine.stream(Request(prompt(4), TEN))
        streams[1].close()
        for _ in range(100):
            try:
                chunks = list(engine.stream(Request(prompt(4), TEN)))
                break
            except Unavailable:
                next(streams[0], None)
        assert "".join(chunk.text for chunk in chunks) == alone(runner, prompt(4), TEN)


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
    engine.close()
