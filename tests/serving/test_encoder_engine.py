"""Batches across requests: who waits, who is refused, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmforge.base.errors import Unavailable, UsageError
from llmforge.serving.encoder_engine import EncoderEngine, EncoderOptions
from llmforge.serving.encoder_runner import EncoderRunner

from ..fakes.fake_encoder import FakeEncoder, fake_embedder, word_tokenizer

TEXTS = ["the file", "a model runs in the server", "token", "gate of the build"]


class Held(FakeEncoder):
    """Runs when it is let."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.entered, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def encode(
        self, sequences: Sequence[NDArray[np.int64]], token_types: Sequence[NDArray[np.int64]] | None = None
    ) -> NDArray[np.float32]:
        self.entered.release()
        assert self.go.acquire(timeout=30)
        return super().encode(sequences, token_types)


def held() -> tuple[Held, EncoderRunner]:
    session = Held()
    return session, EncoderRunner(session, word_tokenizer())


def test_requests_that_come_meanwhile_run_together() -> None:
    session, runner = held()
    with EncoderEngine(runner) as engine:
        first = engine.submit(runner.texts(TEXTS[:1]))
        assert session.entered.acquire(timeout=30)
        others = [engine.submit(runner.texts([text])) for text in TEXTS[1:]]
        assert (engine.stats().running, engine.stats().waiting) == (1, 3)
        session.go.release(2)
        made = [each.result(30) for each in (first, *others)]
        stats = engine.stats()
    assert [len(batch) for batch in session.batches] == [1, 3]
    assert (stats.running, stats.waiting, stats.sequences, stats.batches) == (0, 0, 4, {1: 1, 3: 1})
    assert stats.prompt_tokens == sum(map(sum, session.batches))
    np.testing.assert_array_equal(np.concatenate(made), fake_embedder().embed(TEXTS))


def test_a_long_list_holds_nobody_up() -> None:
    session, runner = held()
    with EncoderEngine(runner, EncoderOptions(batch_tokens=16)) as engine:
        long = engine.submit(runner.texts(["the file lies in the cache"] * 20))
        assert session.entered.acquire(timeout=30)
        short = engine.submit(runner.texts(["token"]))
        session.go.release(2)
        assert short.result(30).shape == (1, 8)
        assert not long.done()
        session.go.release(100)
        assert long.result(30).shape == (20, 8)
    assert all(len(batch) * max(batch) <= 16 for batch in session.batches)


def test_a_full_queue_refuses() -> None:
    session, runner = held()
    with EncoderEngine(runner, EncoderOptions(max_queue=1)) as engine:
        running = engine.submit(runner.texts(["token"]))
        assert session.entered.acquire(timeout=30)
        waiting = engine.submit(runner.texts(["token"]))
        with pytest.raises(Unavailable, match="the queue is full: 1 requests are waiting"):
            engine.submit(runner.texts(["token"]))
        assert waiting.cancel()  # which makes room
        last = engine.submit(runner.texts(["file"]))
        session.go.release(10)
        running.result(30)
        last.result(30)
    assert session.batches == [[3], [3]]


def test_an_error_of_a_batch_is_that_of_its_requests() -> None:
    session = FakeEncoder()
    session.error = UsageError("too much")
    runner = EncoderRunner(session, word_tokenizer())
    with EncoderEngine(runner) as engine:
        with pytest.raises(UsageError, match="too much"):
            engine.submit(runner.texts(["token"])).result(30)
        session.error = None
        assert engine.submit(runner.texts(["token"])).result(30).shape == (1, 8)
        with pytest.raises(UsageError, match="no texts"):
            engine.submit([])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_dies_says_so_to_all() -> None:
    session = FakeEncoder()
    session.error = MemoryError()
    runner = EncoderRunner(session, word_tokenizer())
    with EncoderEngine(runner) as engine:
        with pytest.raises(Unavailable, match="the engine has ended"):
            engine.submit(runner.texts(["token"])).result(30)
        with pytest.raises(Unavailable, match="the engine has ended"):
            engine.submit(runner.texts(["token"]))
        assert not engine.alive


@pytest.mark.parametrize("drain", [False, True])
def test_closing_ends_or_finishes_what_waits(drain: bool) -> None:
    session, runner = held()
    engine = EncoderEngine(runner)
    outcomes = [engine.submit(runner.texts(["token"]))]
    assert session.entered.acquire(timeout=30)
    outcomes.append(engine.submit(runner.texts(["file"])))
    closing = threading.Thread(target=engine.close, kwargs={"drain": drain})
    closing.start()
    while engine.alive:
        time.sleep(0.001)
    session.go.release(10)
    closing.join(30)
    if drain:
        assert [outcome.result(30).shape for outcome in outcomes] == [(1, 8)] * 2
    else:
        for outcome in outcomes:
            with pytest.raises(Unavailable, match="the engine has ended"):
                outcome.result(30)


@pytest.mark.parametrize("wrong", [{"max_queue": -1}, {"batch_tokens": 0}, {"timeout_s": 0.0}])
def test_options_are_bounded(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=f"{name} .*: expected"):
        EncoderOptions(**wrong)
