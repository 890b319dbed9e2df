"""Prompts that wait together are read in one step where a device's steps are padded, and get what each gets alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from llmforge.backends.onnxruntime.cuda.session import DeviceSession
from llmforge.backends.onnxruntime.session import Session
from llmforge.ir import logits_rows
from llmforge.rewrite.topk_outputs import add_topk_outputs
from llmforge.runtime.config import SessionConfig
from llmforge.runtime.interface import StepInputs
from llmforge.runtime.prefill_shapes import together
from llmforge.serving import EngineOptions, Request, Runner, Sampling
from llmforge.serving.prefix_cache import BLOCK
from llmforge.serving.scheduler import Scheduler, SlotScheduler
from llmforge.serving.scheduler.prefill import PromptChunk, PromptWindow, find

from ..fakes.host_device import HostDevice
from ..models.decoder_graph import decoder
from ..models.small_engines import VOCABULARY, Received, prompt, small_runner

ONE_THREAD = SessionConfig(threads=1)
SHAPES, SLOTS, CAPACITY = (16, 32, 64), 4, 96


class Watched(DeviceSession):
    """Notes past lengths and shape of every step of several tokens."""

    steps: list[tuple[list[int], tuple[int, ...]]]

    def step(self, inputs: StepInputs, cache: Any, out: Any = None) -> Any:
        self._note(inputs)
        return super().step(inputs, cache, out)

    def begin_prompts(self, inputs: StepInputs, cache: Any) -> Any:
        self._note(inputs)
        return super().begin_prompts(inputs, cache)

    def _note(self, inputs: StepInputs) -> None:
        if inputs.ids.shape[1] > 1:
            self.steps.append((inputs.past_lengths.tolist(), inputs.ids.shape))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Runner:
    return small_runner(tmp_path_factory.mktemp("small"), sample_checkpoint)


@pytest.fixture(scope="module", params=[True, False], ids=["heads", "whole rows"])
def opened(request: pytest.FixtureRequest) -> Watched:
    model = decoder(VOCABULARY)
    logits_rows.choose_by_row(model)
    if request.param:
        add_topk_outputs(model)
    Watched.steps = []
    return Watched(ir.to_proto(model).SerializeToString(), ONE_THREAD, HostDevice(), buckets=(1, 2, 4), shapes=SHAPES)


@pytest.fixture
def session(opened: Watched) -> Iterator[Watched]:
    opened.steps.clear()
    yield opened
    opened.steps.clear()


def scheduler(session: Any, runner: Runner, **options: Any) -> Scheduler[Any]:
    cache = session.allocate(SLOTS, CAPACITY)
    given = {"prefix_cache_bytes": 0, "step_tokens": 64, **options}
    made = SlotScheduler(session, cache, runner.samplers, EngineOptions(**given), chunk=64)
    if isinstance(session, Watched):
        session.steps.clear()
    return made


def answered(scheduled: Scheduler[Any], requests: list[Request]) -> list[list[int]]:
    answers = [Received() for _ in requests]
    for request, received in zip(requests, answers, strict=True):
        scheduled.add(request, received.receive)
    while scheduled.step():
        pass
    return [each.tokens for each in answers]


def asks(length: int, text: int, **sampling: Any) -> Request:
    return Request(prompt(length, seed=text), Sampling(**{"max_tokens": 4, **sampling}))


def test_the_shapes_are_few_and_no_longer_than_those_of_one_prompt() -> None:
    assert together() == ((2, 64), (2, 128), (4, 64), (4, 128), (8, 64))
    assert together(SHAPES) == ((2, 16), (4, 16))
    assert together(()) == ()


def test_each_row_gets_the_logits_of_its_own_token(session: Watched) -> None:
    reference = Session(ir.to_proto(decoder(VOCABULARY)).SerializeToString(), ONE_THREAD)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (4, 16))
    lengths = np.array([3, 16, 9, 1])
    caches = [each.allocate(4, CAPACITY) for each in (session, reference)]
    past = np.zeros(4, np.int32)
    got = session.step(StepInputs(ids, past, (lengths - 1)[:, None], lengths=lengths), caches[0])
    negative = session.step(StepInputs(ids, past, (lengths - 17)[:, None], lengths=lengths), caches[0])
    wanted = reference.step(StepInputs(ids, past, np.arange(16)), caches[1])
    np.testing.assert_allclose(got[:, 0], wanted[np.arange(4), lengths - 1], atol=1e-4)
    np.testing.assert_array_equal(negative, got)
    with pytest.raises(ValueError, match="choose none for themselves"):
        reference.step(StepInputs(ids, past, (lengths - 1)[:, None]), caches[1])
    with pytest.raises(ValueError, match="choose none for themselves"):
        session.step(StepInputs(ids, past, (lengths[:2] - 1)[:, None]), caches[0])


def test_prompts_that_wait_together_are_read_in_one_step(session: Watched, runner: Runner) -> None:
    requests = [asks(3, 0), asks(16, 1, temperature=0.8, seed=7), asks(11, 2), asks(1, 3, temperature=1.0, seed=8)]
    wanted = answered(scheduler(runner.session, runner), requests)
    scheduled = scheduler(session, runner)
    assert answered(scheduled, requests) == wanted
    assert session.steps == [([0] * 4, (4, 16))]
    assert scheduled.stats().prefill_tokens == 31


def test_those_that_do_not_fit_are_read_alone(session: Watched, runner: Runner) -> None:
    requests = [asks(17, 0), asks(5, 1), asks(6, 2), asks(70, 3)]
    wanted = answered(scheduler(runner.session, runner), requests)
    assert answered(scheduler(session, runner), requests) == wanted
    assert [shape for _, shape in session.steps] == [(1, 17), (2, 16), (1, 64), (1, 6)]  # the last prompt in chunks


def test_a_step_stays_within_its_tokens_and_reads_the_oldest_first(session: Watched, runner: Runner) -> None:
    requests = [asks(30, 0, max_tokens=1), *(asks(9, i, max_tokens=1) for i in range(1, 4))]
    scheduled = scheduler(session, runner, step_tokens=64)
    answers = [Received() for _ in requests]
    for request, received in zip(requests, answers, strict=True):
        scheduled.add(request, received.receive)
    scheduled.step()
    # 30 tokens of the first; then two neighbours, and the last, who is alone by then.
    assert [shape for _, shape in session.steps] == [(1, 30), (2, 16)]
    assert [each.ended for each in answers] == [True, True, True, False]
    scheduled.step()
    assert answers[3].ended


def test_a_prompt_behind_a_cached_prefix_is_read_alone_by_attention_that_takes_one_row(
    session: Watched, runner: Runner
) -> None:
    """GroupQueryAttention; and prompts that begin alike are read one after the other, out of the prefix cache."""
    alike = prompt(BLOCK + 5, seed=1)
    own = [(*alike[: BLOCK + 2], 100 + i, 200 + i) for i in range(3)]
    requests = [Request(each, Sampling(max_tokens=2)) for each in own]
    wanted = answered(scheduler(runner.session, runner), requests)
    scheduled = scheduler(session, runner, prefix_cache_bytes=1 << 24)
    assert answered(scheduled, requests) == wanted
    assert [past for past, _ in session.steps] == [[0], [BLOCK], [BLOCK]]
    assert scheduled.stats().prefix_hit_tokens == 2 * BLOCK


@pytest.mark.parametrize("prefix_cache_bytes", [0, 1 << 24])
def test_requests_that_come_and_go_get_the_tokens_that_each_gets_alone(
    session: Watched, runner: Runner, prefix_cache_bytes: int
) -> None:
    random = np.random.default_rng(2)
    made = []
    for i in range(40):
        sampling = {"temperature": 0.7, "seed": i} if i % 3 else {}
        length, most = int(random.integers(1, 33 if i % 4 else 9)), int(random.integers(1, 6))
        made.append((asks(length if i % 8 else 40, i, max_tokens=most, **sampling), Received()))
    scheduled, waiting = scheduler(session, runner, prefix_cache_bytes=prefix_cache_bytes), list(made)
    while scheduled.busy or waiting:
        for request, received in waiting[: int(random.integers(0, 6))]:
            scheduled.add(request, received.receive)
            waiting.pop(0)
        scheduled.step()
    wanted = [answered(scheduler(runner.session, runner), [request])[0] for request, _ in made]
    assert [received.tokens for _, received in made] == wanted
    assert {shape for _, shape in session.steps} >= {(2, 16), (4, 16)}


def test_heads_of_prompts_are_those_of_the_tokens_that_each_row_chose(session: Watched) -> None:
    ids, lengths = np.random.default_rng(3).integers(0, VOCABULARY, (2, 16)), np.array([4, 11])
    cache, past, rows = session.allocate(4, CAPACITY).rows(1, 3), np.zeros(2, np.int32), (lengths - 1)[:, None]
    logits = session.step(StepInputs(ids, past, rows), cache)[:, 0]
    if not session.decodes_ahead:
        with pytest.raises(ValueError, match="top logits of one token"):
            session.begin_prompts(StepInputs(ids, past, rows, temperatures=np.ones(2, np.float32)), cache)
        return
    run = session.begin_prompts(
        StepInputs(ids, past, rows, lengths=lengths, temperatures=np.ones(2, np.float32)), cache
    )
    heads = run.top_logits()
    np.testing.assert_array_equal(heads.logits, -np.sort(-logits, axis=1)[:, : heads.logits.shape[1]])
    np.testing.assert_array_equal(run.logits(1), logits[1])
    for wrong in ({"ids": ids[:, :15]}, {"rows": np.arange(2)}):
        given = {"ids": ids, "rows": rows, **wrong}
        with pytest.raises(ValueError, match="top logits of one token"):
            session.begin_prompts(
                StepInputs(given["ids"], past, given["rows"], temperatures=np.ones(2, np.float32)), cache
            )


def test_a_window_holds_most_neighbours_of_one_shape() -> None:
    shapes = ((2, 8), (2, 16), (4, 8), (4, 16))

    def found(
        slot: int, *tokens: int | None, start: int = 0, most: int = 64, begins: tuple[int, ...] | None = None
    ) -> PromptWindow | None:
        chunks = [None if each is None else PromptChunk(start, each, begins) for each in tokens]
        return find(slot, chunks.__getitem__, shapes, slots=len(chunks), capacity=100, most=most)

    assert found(1, 8, 3, 1, 8) == PromptWindow(0, 4, 8)
    assert found(1, 8, 3, 9, 8) == PromptWindow(0, 4, 16)
    assert found(1, 8, 3, 9, 8, most=63) == PromptWindow(0, 2, 8)
    assert found(2, 8, 3, 9, 8, most=63) == PromptWindow(1, 2, 16)
    assert found(2, 8, 3, 9, 8, most=31) is None
    assert found(4, 17, None, 2, 3, 4, 5, 6, None) == PromptWindow(2, 4, 8)
    assert found(4, 17, None, 2, 3, 4, None) == PromptWindow(3, 2, 8)
    assert found(0, 17, 1) is None
    assert found(0, 5) is None
    assert found(0, 5, 5, start=92) == PromptWindow(0, 2, 8)
    assert found(0, 5, 5, start=93) is None
    assert found(0, 5, 5, begins=(0, 1, 2)) is None
