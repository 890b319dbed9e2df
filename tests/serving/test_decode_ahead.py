"""Decode steps that give heads of rows and run beside the host: the texts of whole rows, with little copied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from llmforge.backends.onnxruntime.cuda.session import DeviceSession
from llmforge.backends.onnxruntime.session import Session
from llmforge.ir import interface
from llmforge.ir.interface import HEAD, TopLogits
from llmforge.rewrite.next_ids import feed_back
from llmforge.rewrite.topk_outputs import add_topk_outputs
from llmforge.runtime.config import SessionConfig
from llmforge.runtime.device.cuda import BlockCopy, Buffer
from llmforge.runtime.interface import DecodeRun, StepInputs
from llmforge.serving import EngineOptions, Request, Runner, Sampling
from llmforge.serving.scheduler import Scheduler, SlotScheduler

from ..fakes.host_device import HostDevice
from ..models.decoder_graph import decoder
from ..models.small_engines import VOCABULARY, Received, prompt, small_runner

ONE_THREAD = SessionConfig(threads=1)
SAMPLINGS = (
    Sampling(max_tokens=12),
    Sampling(temperature=1.0, seed=1, max_tokens=9),
    Sampling(temperature=0.3, seed=2, max_tokens=15),
    Sampling(temperature=0.2, top_p=0.9, seed=3, max_tokens=20),
    Sampling(temperature=0.8, top_k=40, min_p=0.01, seed=4, max_tokens=7),
    Sampling(repetition_penalty=1.3, max_tokens=10),
    Sampling(temperature=0.5, seed=5, logprobs=2, max_tokens=6),
    Sampling(temperature=0.7, seed=6, ignore_eos=True, max_tokens=25, stop=("e", "a")),
    Sampling(logit_bias=((7, 3.0),), min_tokens=4, max_tokens=8),
)


class CountingDevice(HostDevice):
    """Counts what is copied from the device, in bytes, and its other calls."""

    def __init__(self) -> None:
        self.copies: list[int] = []
        self.calls: list[str] = []

    def write(self, buffer: Buffer, offset: int, values: np.ndarray) -> None:
        self.calls.append("write")
        super().write(buffer, offset, values)

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        self.calls.append("copy")
        super().copy(copies)

    def read(self, buffer: Buffer, offset: int, values: np.ndarray) -> None:
        self.copies.append(values.nbytes)
        super().read(buffer, offset, values)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Runner:
    return small_runner(tmp_path_factory.mktemp("small"), sample_checkpoint)


@pytest.fixture(scope="module")
def ahead() -> DeviceSession:
    model = decoder(VOCABULARY)
    add_topk_outputs(model)
    feed_back(model)
    return DeviceSession(ir.to_proto(model).SerializeToString(), ONE_THREAD, CountingDevice(), buckets=(1, 2, 4, 8))


def scheduler(session: Any, runner: Runner, slots: int = 4) -> Scheduler[Any]:
    return SlotScheduler(session, session.allocate(slots, 96), runner.samplers, EngineOptions(prefix_cache_bytes=0))


def served(scheduled: Scheduler[Any]) -> list[Received]:
    """Run a request of each kind, of which some join late."""
    answers = [Received() for _ in SAMPLINGS]
    for i, (sampling, received) in enumerate(zip(SAMPLINGS, answers, strict=True)):
        scheduled.add(Request(prompt(5 + 3 * i, seed=i), sampling), received.receive)
        if i % 3 == 2:
            scheduled.step()
    while scheduled.step():
        pass
    return answers


def test_heads_are_those_of_the_logits(ahead: DeviceSession) -> None:
    cache = ahead.allocate(4, 64)
    past, temperatures = np.zeros(4, np.int32), np.array([1, 0.5, 2, 1], np.float32)
    ids = np.array([[3], [5], [9], [11]], np.int64)
    logits = ahead.step(StepInputs(ids, past), cache)[:, 0]
    run = ahead.begin_decode(StepInputs(ids, past, temperatures=temperatures), cache)
    heads = run.top_logits()
    order = np.argsort(-logits, axis=1, kind="stable")[:, :HEAD]
    assert not heads.whole
    np.testing.assert_array_equal(heads.ids, order)
    np.testing.assert_array_equal(heads.logits, np.take_along_axis(logits, order, 1))
    mass = np.exp((logits - logits.max(1, keepdims=True)).astype(np.float64) / temperatures[:, None])
    mass[logits > heads.logits[:, -1:]] = 0
    blocks, size = interface.mass_blocks(VOCABULARY)
    np.testing.assert_allclose(heads.masses, mass.reshape(4, blocks, size).sum(2), rtol=1e-5)
    np.testing.assert_array_equal(run.logits(2), logits[2])
    np.testing.assert_array_equal(run.blocks([3, 0], [7, 0]), [logits[3, 7 * size : 8 * size], logits[0, :size]])


def test_texts_are_those_of_whole_rows(ahead: DeviceSession, runner: Runner) -> None:
    wanted = served(scheduler(runner.session, runner))
    got = served(scheduler(ahead, runner))
    assert [each.tokens for each in got] == [each.tokens for each in wanted]
    assert [each.text for each in got] == [each.text for each in wanted]
    assert [each.reason for each in got] == [each.reason for each in wanted]
    usages = [[each.chunks[-1].usage.output_tokens for each in answers] for answers in (got, wanted)]
    assert usages[0] == usages[1]


def test_a_step_copies_heads_and_what_rows_must_be_whole(ahead: DeviceSession, runner: Runner) -> None:
    device = ahead.device
    assert isinstance(device, CountingDevice)
    head, row, ids = (2 * HEAD + interface.mass_blocks(VOCABULARY)[0]) * 4, VOCABULARY * 4, 256
    scheduled = scheduler(ahead, runner)
    answers = [Received() for _ in range(4)]
    samplings = [Sampling(), Sampling(temperature=0.01), Sampling(temperature=1.0, top_k=20), Sampling(min_tokens=99)]
    for i, received in enumerate(answers):
        scheduled.add(Request(prompt(6, seed=i), samplings[i]), received.receive)
    scheduled.step()
    device.copies.clear()
    device.calls.clear()
    for _ in range(5):
        scheduled.step()
    scheduled.cancel_all()
    scheduled.step()
    # Six steps, of which five began behind another one: whose logits are copied aside, within the device; all inputs at
    # once; one copy of all heads and guesses. The row of `min_tokens` of the five whose tokens were chosen.
    assert sorted(device.calls) == ["copy"] * 5 + ["write"] * 6
    assert sorted(device.copies) == sorted([ids + 4 * head] * 6 + [row] * 5)


class Slow(DecodeRun):
    """Says when it is waited for."""

    def __init__(self, run: DecodeRun, events: list[str]) -> None:
        self._run, self._events = run, events

    def top_logits(self) -> TopLogits:
        self._events.append("wait")
        return self._run.top_logits()

    def next_ids(self) -> np.ndarray:
        return self._run.next_ids()

    def launched(self) -> None:
        self._run.launched()

    def logits(self, row: int) -> np.ndarray:
        return self._run.logits(row)

    def blocks(self, rows: Any, blocks: Any) -> np.ndarray:
        return self._run.blocks(rows, blocks)


def test_tokens_are_delivered_while_the_next_step_runs(
    ahead: DeviceSession, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    begin = DeviceSession.begin_decode

    def watched(*arguments: Any) -> DecodeRun:
        events.append("begin")
        return Slow(begin(*arguments), events)

    monkeypatch.setattr(DeviceSession, "begin_decode", watched)
    scheduled = scheduler(ahead, runner)
    scheduled.add(Request(prompt(4), Sampling(max_tokens=4, ignore_eos=True)), lambda item: events.append("deliver"))
    while scheduled.step():
        pass
    # The first is the prompt's, and the last step's comes at once, with the end behind it.
    assert events == [
        "deliver",
        *["begin", "begin", "wait", "begin", "deliver", "wait", "deliver", "wait"],
        *["deliver"] * 2,
    ]


def test_a_stop_string_drops_the_token_of_the_step_that_ran_beside(ahead: DeviceSession, runner: Runner) -> None:
    plain = Received()
    scheduled = scheduler(ahead, runner)
    scheduled.add(Request(prompt(9), Sampling(max_tokens=30, ignore_eos=True)), plain.receive)
    while scheduled.step():
        pass
    stop = next(chunk.text for chunk in plain.chunks[5:] if chunk.text.strip())
    got, wanted = Received(), Received()
    for session, received in ((ahead, got), (runner.session, wanted)):
        scheduled = scheduler(session, runner)
        scheduled.add(Request(prompt(9), Sampling(max_tokens=30, ignore_eos=True, stop=(stop,))), received.receive)
        while scheduled.step():
            pass
    assert (got.text, got.tokens, got.reason) == (wanted.text, wanted.tokens, "stop")
    assert got.chunks[-1].usage.output_tokens == wanted.chunks[-1].usage.output_tokens


def test_a_cancelled_request_gets_the_token_that_was_sampled(ahead: DeviceSession, runner: Runner) -> None:
    received = Received()
    scheduled = scheduler(ahead, runner)
    ticket = scheduled.add(Request(prompt(9), Sampling(ignore_eos=True)), received.receive)
    for _ in range(4):
        scheduled.step()
    ticket.cancelled = True
    scheduled.step()
    assert received.reason == "cancelled"
    assert len(received.tokens) == received.chunks[-1].usage.output_tokens


@pytest.mark.parametrize("vocabulary", [97, 300])
def test_a_graph_with_heads_computes_what_it_did(vocabulary: int) -> None:
    model = decoder(vocabulary)
    plain = Session(ir.to_proto(model).SerializeToString(), ONE_THREAD)
    add_topk_outputs(model)
    headed = Session(ir.to_proto(model).SerializeToString(), ONE_THREAD)
    assert headed.signature.gives_top_logits
    assert not plain.signature.gives_top_logits
    ids, past = np.array([[1, 2, 3]]), np.zeros(1, np.int32)
    one, other = (each.step(StepInputs(ids, past), each.allocate(1, 8)) for each in (plain, headed))
    np.testing.assert_array_equal(one, other)
    shapes = {value.name: tuple(value.shape) for value in model.graph.outputs}
    assert shapes[interface.TOP_LOGITS][1] == min(HEAD, vocabulary)
