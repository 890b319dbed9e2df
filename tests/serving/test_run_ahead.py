"""Decode steps that begin before the tokens of the step before are known: the texts of each request alone, always."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from llmforge.backends.onnxruntime.cuda import session as cuda
from llmforge.backends.onnxruntime.cuda.session import DeviceSession
from llmforge.base.errors import RunFailed
from llmforge.ir.interface import HEAD
from llmforge.rewrite.next_ids import feed_back
from llmforge.rewrite.topk_outputs import add_topk_outputs
from llmforge.runtime.config import SessionConfig
from llmforge.runtime.device.top_logits import FetchedTopLogits, TopLogitsBuffers
from llmforge.runtime.interface import StepInputs
from llmforge.runtime.sampling import distribution, distribution_numpy
from llmforge.runtime.sampling.sampler import TokenSampler, guesses, sample_top_logits
from llmforge.serving import Engine, EngineOptions, Request, Runner, Sampling
from llmforge.serving.scheduler import Scheduler, SlotScheduler, run_ahead
from llmforge.serving.scheduler.run_ahead import RunAhead

from ..fakes.host_device import HostDevice
from ..models.decoder_graph import decoder
from ..models.small_engines import VOCABULARY, Received, prompt, small_runner
from .test_decode_ahead import SAMPLINGS, scheduler

REQUESTS, SLOTS = 54, 5
EXACT = [  # what the device guesses as the host decides
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=3.0),  # most tokens lie behind the head
    Sampling(temperature=1.0, top_p=0.5),
    Sampling(temperature=1.0, top_k=40, min_p=0.05),
    Sampling(temperature=1.0, min_p=0.5),
]


def session_of(vocabulary: int, buckets: tuple[int, ...]) -> DeviceSession:
    model = decoder(vocabulary)
    add_topk_outputs(model)
    feed_back(model)
    return DeviceSession(
        ir.to_proto(model).SerializeToString(), SessionConfig(threads=1), HostDevice(), buckets=buckets
    )


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Runner:
    return small_runner(tmp_path_factory.mktemp("small"), sample_checkpoint)


@pytest.fixture(scope="module")
def session() -> DeviceSession:
    return session_of(VOCABULARY, (1, 2, SLOTS))


@pytest.mark.parametrize("vocabulary", [1511, 200])  # a prime, whose last block is short; less than a head
@pytest.mark.parametrize("sampling", EXACT)
def test_the_device_guesses_what_the_host_decides(vocabulary: int, sampling: Sampling) -> None:
    rows = 64
    session, random = session_of(vocabulary, (rows,)), np.random.default_rng(0)
    samplers = [TokenSampler(dataclasses.replace(sampling, seed=seed), (), ()) for seed in range(rows)]
    temperatures = np.array([each.temperature or 1 for each in samplers], np.float32)
    cache, past, right = session.allocate(rows, 16), np.zeros(rows, np.int32), 0
    for _ in range(4):
        draws = guesses(samplers, [0] * rows)
        ids = random.integers(0, vocabulary, (rows, 1))
        run = session.begin_decode(StepInputs(ids, past, temperatures=temperatures, draws=draws), cache)
        heads = run.top_logits()
        found = sample_top_logits(samplers, heads, run.blocks)
        tokens = [
            (each.sample(run.logits(row)) if sampled is None else sampled).token
            for row, (each, sampled) in enumerate(zip(samplers, found, strict=True))
        ]
        right += int((run.next_ids() == tokens).sum())
    assert right >= 4 * rows - 2  # a sum may end in another last bit


def test_the_second_number_is_the_one_that_a_block_is_drawn_with() -> None:
    uniforms = np.random.default_rng(0).random(100)
    wanted = [next(distribution_numpy.further(each)) for each in uniforms.tolist()]
    assert distribution.second_numbers(uniforms).tolist() == wanted


def test_a_negative_id_takes_the_guess_of_the_step_before(session: DeviceSession) -> None:
    ids, past, ones = np.array([[3], [9]]), np.zeros(2, np.int32), np.ones(2, np.float32)
    cache = session.allocate(2, 16)
    before = session.begin_decode(StepInputs(ids, past, temperatures=ones), cache)
    behind = session.begin_decode(StepInputs(np.array([[-2], [7]]), past + 1, temperatures=ones), cache)
    heads = before.top_logits()
    guess = before.next_ids().tolist()
    assert guess == heads.ids[:, 0].tolist()
    kept = [before.logits(row).copy() for row in range(2)]  # which the step behind has written over
    got = behind.top_logits().logits.copy()
    once = session.allocate(2, 16)
    for row, logits in enumerate(session.step(StepInputs(ids, past), once)[:, 0]):
        np.testing.assert_array_equal(kept[row], logits)
    wanted = session.step(StepInputs(np.array([guess[1:], [7]]), past + 1), once)[:, 0]
    np.testing.assert_array_equal(got, -np.sort(-wanted, axis=1)[:, :HEAD])


def test_a_guess_that_no_step_made_is_refused(session: DeviceSession) -> None:
    cache, ones, past = session.allocate(2, 16), np.ones(2, np.float32), np.zeros(2, np.int32)
    session.begin_decode(StepInputs(np.array([[3]]), past[:1], temperatures=ones[:1]), cache.rows(0, 1)).top_logits()
    with pytest.raises(ValueError, match="the guess of row 1, of a step before of 1"):
        session.begin_decode(StepInputs(np.array([[-1], [-2]]), past, temperatures=ones), cache)
    session.step(StepInputs(np.array([[3], [4]]), past), cache)
    with pytest.raises(ValueError, match="the guess of row 0, of a step before of 0"):
        session.begin_decode(StepInputs(np.array([[-1]]), past[:1], temperatures=ones[:1]), cache.rows(0, 1))


class Guesses:
    """Makes guesses wrong at random, on the device: what the host is told of, and the next step runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
        self.right = self.wrong = 0
        random, fetch, judge = np.random.default_rng(0), TopLogitsBuffers.fetch, RunAhead.note_guess

        def fetch_wrong(buffers: TopLogitsBuffers, rows: int) -> FetchedTopLogits:
            ids = np.empty(rows, np.int64)
            buffers._device.read(buffers._buffer, 0, ids)
            changed = random.random(rows) < wrong
            ids[changed] = random.integers(0, VOCABULARY, int(changed.sum()))
            buffers._device.write(buffers._buffer, 0, ids)
            return fetch(buffers, rows)

        def count(scheduled: RunAhead[Any], sequence: Any, right: bool) -> None:
            self.right, self.wrong = self.right + right, self.wrong + (not right)
            judge(scheduled, sequence, right)

        monkeypatch.setattr(TopLogitsBuffers, "fetch", fetch_wrong)
        monkeypatch.setattr(RunAhead, "note_guess", count)
        monkeypatch.setattr(run_ahead, "RIGHT", 0.0)  # goes ahead all the same
        monkeypatch.setattr(run_ahead, "RIGHT_OF_ONE", 0.0)


def requests() -> Iterator[Request]:
    """Make requests of all kinds, of which some begin alike."""
    random = np.random.default_rng(7)
    for i in range(REQUESTS):
        sampling = dataclasses.replace(SAMPLINGS[i % len(SAMPLINGS)], max_tokens=int(random.integers(1, 24)))
        if i % 7 == 3:
            sampling = dataclasses.replace(sampling, stop=(str(random.choice(list("aeiou"))),))
        yield Request(prompt(64, seed=int(random.integers(3)))[: int(random.integers(1, 64))], sampling)


@pytest.fixture(scope="module")
def alone(runner: Runner) -> list[Received]:
    """The texts of `requests`, each alone, from whole rows."""
    answers = []
    for request in requests():
        scheduled = scheduler(runner.session, runner, 1)
        answers.append(Received())
        scheduled.add(request, answers[-1].receive)
        while scheduled.step():
            pass
    return answers


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_texts_are_those_of_each_alone_whatever_the_device_guesses(
    wrong: float, session: DeviceSession, runner: Runner, alone: list[Received], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests join, leave, stop, are cancelled and run out of time, in slots that others leave, behind prefixes."""
    device, random, clock = Guesses(monkeypatch, wrong), np.random.default_rng(1), itertools.count()
    options, cache = EngineOptions(prefix_cache_bytes=1 << 20), session.allocate(SLOTS, 96)
    scheduled: Scheduler[Any] = SlotScheduler(
        session, cache, runner.samplers, options, clock=lambda: float(next(clock)), chunk=32
    )
    answers, waiting, tickets = [Received() for _ in alone], list(enumerate(requests())), []
    steps = ahead = 0
    while scheduled.busy or waiting:
        while waiting and random.random() < 0.4:
            number, request = waiting.pop(0)
            kind = random.random()
            if kind < 0.15:
                request = dataclasses.replace(request, timeout_s=float(random.integers(20, 200)))
            ticket = scheduled.add(request, answers[number].receive)
            if kind > 0.85:
                tickets.append((steps + int(random.integers(1, 30)), ticket))
        for at, ticket in tickets:
            ticket.cancelled |= at <= steps
        scheduled.step()
        steps, ahead = steps + 1, ahead + (scheduled._ahead.step is not None)
    assert scheduled._ahead.step is None
    assert ahead > steps / 3
    assert device.right > 0 or wrong == 1
    assert device.wrong > device.right * wrong / 2
    cut = 0
    for got, wanted in zip(answers, alone, strict=True):
        assert got.error is None
        if got.reason in ("cancelled", "timeout"):
            cut += 1
            assert got.tokens == wanted.tokens[: len(got.tokens)]
        else:
            assert (got.tokens, got.text, got.reason) == (wanted.tokens, wanted.text, wanted.reason)
        assert got.chunks[-1].usage.output_tokens >= len(got.tokens)
    assert 3 < cut < REQUESTS / 2
    assert scheduled.stats().prefix_hit_tokens > 0


def test_a_row_whose_guesses_are_wrong_is_waited_for(
    session: DeviceSession, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Guesses(monkeypatch, 1.0)
    monkeypatch.setattr(run_ahead, "RIGHT", 15 / 16)
    scheduled, received = scheduler(session, runner), Received()
    scheduled.add(Request(prompt(5), Sampling(max_tokens=40, ignore_eos=True)), received.receive)
    ran = 0
    while scheduled.step():
        ran += scheduled._ahead.step is not None
    assert len(received.tokens) == 40
    assert ran <= 2
    assert device.wrong == 39


@pytest.mark.parametrize("at", range(4))
def test_a_step_that_fails_ends_all_requests(
    at: int, session: DeviceSession, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is: the one that is waited for, the one behind it, or one that nobody waits for any more."""
    runs, run_bound, armed = itertools.count(), cuda.run_bound, threading.Event()

    def fail(*arguments: Any) -> None:
        if armed.is_set() and next(runs) >= at:
            raise RunFailed("the device is gone")
        run_bound(*arguments)

    monkeypatch.setattr(cuda, "run_bound", fail)
    other = Runner(session, runner.config, runner.tokenizer, None)
    answers = [Received() for _ in range(4)]
    with Engine(other, EngineOptions(prefix_cache_bytes=0)) as engine:
        for i, received in enumerate(answers):
            engine.submit(Request(prompt(5, i), Sampling(ignore_eos=True)), received.receive)
        armed.set()
        for received in answers:
            assert received.wait().error is not None
            assert "the device is gone" in str(received.error)
        assert not engine.alive


def test_an_engine_that_closes_leaves_no_step_under_way(session: DeviceSession, runner: Runner) -> None:
    other, received = Runner(session, runner.config, runner.tokenizer, None), Received()
    engine = Engine(other, EngineOptions(prefix_cache_bytes=0))
    engine.submit(Request(prompt(5), Sampling(max_tokens=80, ignore_eos=True)), received.receive)
    while len(received.chunks) < 5:
        pass
    engine.close(drain=False)
    assert received.wait().reason == "cancelled"
    assert engine._scheduler._ahead.step is None
