"""Prompts of every length reach a device in a few shapes, and get what they get unpadded."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from llmforge.backends.onnxruntime.cuda import captured
from llmforge.backends.onnxruntime.cuda import session as cuda
from llmforge.backends.onnxruntime.cuda.session import DeviceSession
from llmforge.backends.onnxruntime.session import Session
from llmforge.base.errors import RunFailed
from llmforge.runtime.config import SessionConfig
from llmforge.runtime.interface import StepInputs
from llmforge.runtime.prefill_shapes import SHAPES, pieces, together
from llmforge.runtime.sampling.sampler import TokenSampler
from llmforge.runtime.signature import Argument
from llmforge.serving import EngineOptions, Request, Sampling
from llmforge.serving.scheduler import Scheduler, SlotScheduler

from ..fakes.host_device import HostDevice
from ..models.decoder_graph import decoder

ONE_THREAD = SessionConfig(threads=1)
VOCABULARY = 97


class Graph:
    """Stands for ONNX Runtime's session: notes the shape of each run's tokens, and computes nothing.

    `rows`: the shape of `logits_rows`.
    """

    def __init__(self, rows: Sequence[str] = ("rows",)) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self._rows = rows

    def get_inputs(self) -> list[Argument]:
        return [
            Argument("input_ids", "tensor(int64)", ["batch", "sequence"]),
            Argument("seqlens_k", "tensor(int32)", ["batch"]),
            Argument("total_sequence_length", "tensor(int32)", []),
            Argument("past_key_values.0.key", "tensor(float16)", ["batch", 1, "capacity", 2]),
        ]

    def get_overridable_initializers(self) -> list[Argument]:
        return [Argument("logits_rows", "tensor(int64)", self._rows)]

    def get_outputs(self) -> list[Argument]:
        logits = Argument("logits", "tensor(float)", ["batch", "rows", VOCABULARY])
        return [logits, Argument("present.0.key", "tensor(float16)", ["batch", 1, "capacity", 2])]

    def io_binding(self) -> Any:
        bound: dict[str, Any] = {}
        binding = types.SimpleNamespace(bound=bound, bind_output=lambda *_: None)
        binding.bind_input = lambda name, kind, index, onnx, shape, address: bound.__setitem__(name, shape)
        return binding

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        self.shapes.append(tuple(binding.bound["input_ids"]))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """What sessions open: such graphs; of the model "by row", each row chooses its own tokens."""
    graphs: list[Graph] = []

    def open_on(device: object, model: bytes, *_: object, **__: object) -> Graph:
        graphs.append(Graph(("batch", "rows") if model == b"by row" else ("rows",)))
        return graphs[-1]

    monkeypatch.setattr(cuda, "open_on", open_on)
    return graphs


@pytest.mark.parametrize("prompts", [400, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", [b"", b"by row"])
def test_prompts_of_random_lengths_reach_the_session_in_the_stated_shapes(
    prompts: int, model: bytes, opened: list[Graph]
) -> None:
    session, capacity = DeviceSession(model, ONE_THREAD, HostDevice(), shapes=SHAPES, buckets=(8,)), 1100
    samplers = types.SimpleNamespace(start=lambda sampling, prompt: _sampler(), tokenizer=None, notes=())
    options = EngineOptions(max_queue=16, prefix_cache_bytes=0, step_tokens=4096 if model == b"" else 512)
    scheduler: Scheduler[Any] = SlotScheduler(session, session.allocate(8, capacity), samplers, options)  # type: ignore[arg-type]
    [graph] = opened
    assert set(graph.shapes) == {*((1, shape) for shape in SHAPES), *session.prompt_shapes}  # all run at load
    assert session.prompt_shapes == (() if model == b"" else together())
    graph.shapes.clear()
    random = np.random.default_rng(0)
    asked = 0
    for i in range(prompts):
        length = int(random.integers(1, capacity if i % 50 < 20 else 80))
        scheduler.add(Request((1,) * length, Sampling(max_tokens=1), detokenize=False), lambda item: None)
        asked += length
        while (scheduler.busy and random.random() < 0.1) or len(scheduler.sequences) > 14:
            before = len(graph.shapes)
            scheduler.step()
            ran = [rows * tokens for rows, tokens in graph.shapes[before:]]
            assert sum(ran) <= 2 * options.step_tokens  # padding included
    while scheduler.step():
        pass
    assert len(opened) == 1
    assert set(graph.shapes) == {(1, 1), *((1, shape) for shape in SHAPES), *session.prompt_shapes}
    assert sum(rows * tokens for rows, tokens in graph.shapes) < 1.5 * asked
    if model:
        assert len(graph.shapes) < prompts  # in less than a run each


def _sampler() -> TokenSampler:
    return TokenSampler(Sampling(max_tokens=1), (), ())


@pytest.mark.parametrize("room", [1, 40, 63, 64, 65, 300, 511, 512, 1100])
def test_pieces_cover_every_token_once_and_stay_within_the_room(room: int) -> None:
    for tokens in range(1, room + 1):
        found = pieces(tokens, room)
        assert [piece.start for piece in found] == np.cumsum([0, *(piece.tokens for piece in found[:-1])]).tolist()
        assert sum(piece.tokens for piece in found) == tokens
        assert all(piece.padded in (1, *SHAPES) and piece.tokens <= piece.padded for piece in found)
        assert max(piece.start + piece.padded for piece in found) <= room
        if tokens <= SHAPES[-1] and 2 * max(64, tokens) <= room:
            assert len(found) == 1


def test_tokens_without_room_are_refused() -> None:
    with pytest.raises(ValueError, match="5 tokens, and room for 4"):
        pieces(5, 4)


@pytest.mark.parametrize("int8_cache", [False, True])
def test_a_padded_step_computes_what_the_step_alone_does(*, int8_cache: bool) -> None:
    model = ir.to_proto(decoder(int8_cache=int8_cache)).SerializeToString()
    plain = Session(model, ONE_THREAD)
    padded = DeviceSession(model, ONE_THREAD, HostDevice(), shapes=(8, 16, 32))
    caches = [each.allocate(2, 50) for each in (plain, padded)]
    random, past = np.random.default_rng(1), np.zeros(1, np.int32)
    for count, rows in (
        (5, None),
        (1, None),
        (17, np.arange(17)),
        (3, np.array([0, -1])),
        (1, None),
        (20, None),
        (3, None),
    ):
        ids = random.integers(0, VOCABULARY, (1, count))
        wanted, got = (
            each.step(StepInputs(ids, past, rows), cache.rows(1, 2))
            for each, cache in zip((plain, padded), caches, strict=True)
        )
        np.testing.assert_allclose(got, wanted, atol=2e-5)
        past = past + np.int32(count)
    assert past[0] == 50  # to the last place of the cache


def test_a_shape_that_fails_opens_the_graph_again_without_cudnn(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_on(device: Any, model: Any, config: Any, options: Any, *_: object, **__: object) -> Graph:
        """Open what fails at attention of 128 tokens, unless only flash attention may run."""
        graph, flash_alone = Graph(), options.get("sdpa_kernel") == "1"
        run = graph.run_with_iobinding

        def fails(binding: Any, given: Any) -> None:
            if tuple(binding.bound["input_ids"])[1] == 128 and not flash_alone:
                raise RuntimeError("cuDNN: no plan")
            run(binding, given)

        graph.run_with_iobinding = fails  # type: ignore[method-assign]
        still.append(sum(each() is not None for each in graphs))
        graphs.append(weakref.ref(graph))
        return graph

    graphs: list[weakref.ref[Graph]] = []
    still: list[int] = []  # sessions that there were when one was opened
    monkeypatch.setattr(cuda, "open_on", open_on)
    device = HostDevice()
    session = DeviceSession(b"", ONE_THREAD, device, shapes=SHAPES)
    with pytest.raises(RunFailed, match="no plan"):  # a CPU has no other kernels
        session.allocate(2, 600)
    device.kind, device.sm = "cuda", 90
    monkeypatch.setattr(captured, "read_on_host", lambda *_: set())
    del session
    gc.collect()
    still.clear()
    session = DeviceSession(b"", ONE_THREAD, device, shapes=SHAPES)
    session.allocate(2, 600)
    assert [note for note in session.notes if "without cuDNN" in note and "no plan" in note]
    [opened] = [graph for each in graphs if (graph := each()) is not None]
    assert {shape[1] for shape in opened.shapes} == set(SHAPES)
    assert still == [0, 0]  # the weights of one are gone before those of the other come
    assert "without cuDNN" in caplog.text
