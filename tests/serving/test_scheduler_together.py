"""Many requests at once, on the trained sample checkpoint in fp32: each gets what it gets alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmforge.backends.onnxruntime.cuda.session import DeviceSession
from llmforge.checkpoint.documents import read_documents
from llmforge.runtime.config import Capture, GraphPlan
from llmforge.serving import Constraint, EngineOptions, Request, Runner, Sampling
from llmforge.serving.interface import EngineStats
from llmforge.serving.prefix_cache import BLOCK
from llmforge.serving.scheduler import Scheduler, SlotScheduler
from llmforge.serving.sequence import Sequence as Generated
from llmforge.serving.speculation import PromptLookup, Speculation

from ..fakes.host_device import HostDevice
from ..fakes.recorder import Recorder
from ..models.small_engines import AlwaysPays, Received, sample_runner

pytestmark = pytest.mark.xdist_group("scheduler_together")  # its fixtures take seconds: they are made once

REQUESTS = 200
CHUNK = 64
CACHE_BLOCKS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sample")


@pytest.fixture(scope="module")
def runner(folder, sample_checkpoint) -> Runner:
    return sample_runner(folder, sample_checkpoint)


@pytest.fixture(scope="module")
def texts(runner, data) -> list[list[int]]:
    encoded = [runner.encode(document.text) for document in read_documents(data / "evaluation.jsonl")]
    return [ids for ids in encoded if len(ids) > 300]


@dataclass
class Client:
    """One request, when it comes (in steps), after how many chunks its caller loses interest, and whom it follows.

    A prompt that goes on from an earlier turn begins with that one's prompt and what has come of its answer.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    arrives: int
    leaves: int | None
    earlier: Client | None
    received: Received = field(default_factory=Received)
    ticket: Generated | None = None

    @property
    def request(self) -> Request:
        return self.ticket.request

    def arrive(self, scheduler: Scheduler) -> None:
        turn = () if self.earlier is None else (*self.earlier.request.prompt, *self.earlier.received.tokens)
        self.ticket = scheduler.add(Request(turn + self.prompt, self.sampling), self.received.receive)


def clients(texts: Sequence[Sequence[int]], random: np.random.Generator) -> list[Client]:
    systems = [tuple(text[: int(random.integers(40, 180))]) for text in texts[:6]]
    made: list[Client] = []
    arrives = 0
    for i in range(REQUESTS):
        text = texts[int(random.integers(len(texts)))]
        start, length = int(random.integers(0, 150)), int(random.integers(1, 70))
        own = tuple(text[start : start + length])
        prompt = systems[int(random.integers(6))] + own if random.random() < 0.7 else own
        earlier = made[int(random.integers(i))] if i > 20 and random.random() < 0.25 else None
        sampled = {"temperature": 0.8, "top_p": 0.95, "seed": i} if random.random() < 0.3 else {}
        if i % 7 == 3:
            sampled |= {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "min_tokens": 1, "logprobs": 2}
        if i % 19 == 5:
            sampled |= {"constraint": Constraint("regex", "[a-z ]{5,200}")}
        stop = ("the",) if random.random() < 0.15 else ()
        ignore_eos = bool(random.random() < 0.5) and "constraint" not in sampled
        sampling = Sampling(max_tokens=int(random.integers(1, 32)), stop=stop, ignore_eos=ignore_eos, **sampled)
        arrives += int(random.choice([0, 0, 0, 1, 2, 9]))
        leaves = int(random.integers(0, 12)) if random.random() < 0.15 else None
        made.append(Client(own[:20] if earlier else prompt, sampling, arrives, leaves, earlier))
    return made


def serve(everybody: Sequence[Client], runner: Runner, backend: Any, speculation: Speculation | None) -> EngineStats:
    """Let all come and go as they want, at `backend`; return what was counted."""
    block_bytes = backend.allocate(1, BLOCK).size_bytes
    cache = backend.allocate(8, runner.config.max_context)
    options = EngineOptions(REQUESTS, step_tokens=2 * CHUNK, prefix_cache_bytes=CACHE_BLOCKS * block_bytes)
    scheduler = SlotScheduler(backend, cache, runner.samplers, options, speculation=speculation, chunk=CHUNK)
    step = 0
    while scheduler.busy or any(client.ticket is None for client in everybody):
        for client in everybody:
            if client.ticket is None and client.arrives <= step:
                client.arrive(scheduler)
            if client.ticket is not None and client.leaves is not None:
                client.ticket.cancelled = len(client.received.chunks) >= client.leaves
        scheduler.step()
        step += 1
        assert scheduler.stats().prefix_tokens_used <= CACHE_BLOCKS * BLOCK
    return scheduler.stats()


@pytest.mark.parametrize("requests", [32, pytest.param(REQUESTS, marks=pytest.mark.thorough)])
def test_many_requests_get_the_text_that_each_gets_alone(runner, texts, requests):
    everybody = clients(texts, np.random.default_rng(7))[:requests]
    stats = serve(everybody, runner, runner.session, Speculation(PromptLookup(), AlwaysPays()))
    compared = 0
    for client in everybody:
        alone = "".join(chunk.text for chunk in runner.generate(client.request.prompt, client.request.sampling))
        if client.received.reason == "cancelled":
            assert alone.startswith(client.received.text)
        else:
            assert client.received.text == alone
            compared += 1
    assert compared > 0.8 * requests
    assert stats.finished["cancelled"] > requests / 20
    assert (stats.running, stats.waiting, stats.kv_tokens_used) == (0, 0, 0)
    assert sum(stats.finished.values()) == requests
    assert stats.prefix_hit_tokens > 15 * requests
    assert stats.accepted_tokens > requests / 4
    assert len(stats.steps) > 4
    assert stats.prefill_tokens + stats.prefix_hit_tokens <= stats.prompt_tokens


CAPTURES = [Capture(i + 1, b, n) for i, (n, b) in enumerate([(1024, 8), (1024, 4), (256, 8), (256, 4), (256, 2)])]


@pytest.fixture
def recorder(runner, folder) -> Recorder:
    """What stands for ONNX Runtime in `recorder.session`, which drives a GPU, here over the host's memory."""
    options = {"buckets": (2, 4, 8), "graphs": GraphPlan("require", tuple(CAPTURES))}
    model = folder / "engine" / "model.onnx"
    session = DeviceSession(model, runner.config.session.resolve(), HostDevice(), **options)
    session._session = made = Recorder(session._session)
    made.session = session
    return made


def test_over_device_memory_everybody_gets_the_bits_of_the_session_of_the_cpu(runner, recorder, texts):
    """Buckets padded, decode steps replayed, behind blocks of the prefix cache."""
    given: list[list[list[tuple[Any, ...]]]] = []
    for backend in (runner.session, recorder.session):
        everybody = clients(texts, np.random.default_rng(3))[:100]
        serve(everybody, runner, backend, speculation=None)
        answers = [client.received.chunks for client in everybody]
        given.append([[(c.text, c.token_id, c.finish_reason, c.logprob) for c in chunks] for chunks in answers])
    assert given[0] == given[1]
    assert sum(chunk[3] is not None for answer in given[0] for chunk in answer) > 50  # their probabilities, too
    assert {CAPTURES[number - 1].batch for number in recorder.replays} == {2, 4, 8}


def test_prompts_that_are_answered_together_take_the_rows_of_their_bucket(runner, recorder, texts):
    over = Runner(recorder.session, runner.config, runner.tokenizer, None)
    prompts, samplings = [text[:20] for text in texts[:3]], [Sampling(max_tokens=5, ignore_eos=True)] * 3
    list(over.generate_batch(prompts[:1], samplings[:1]))  # the first use allocates and records
    recorder.replays.clear()
    got, wanted = ([step.token_ids for step in each.generate_batch(prompts, samplings)] for each in (over, runner))
    assert got == wanted
    assert {CAPTURES[number - 1].batch for number in recorder.replays} == {4}
