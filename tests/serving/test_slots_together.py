"""Requests that come and go over a cache of 4 bits, on the trained sample: each gets what it gets alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmforge import native, targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder as engine
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.documents import read_documents
from llmforge.passes.flash_attention import FlashAttention
from llmforge.passes.pack_qkv import PackQkv
from llmforge.passes.quantize_kv_cache import QuantizeKvCache
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.serving import EngineOptions, Request, Runner, Sampling, load
from llmforge.serving.prefix_cache import BLOCK
from llmforge.serving.scheduler import SlotScheduler
from llmforge.serving.speculation import PromptLookup, Speculation
from llmforge.trace import trace

from ..models.small_engines import AlwaysPays, Received

pytestmark = pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not compiled here")

REQUESTS, CHUNK = 24, 64


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Runner:
    """The sample with keys of 8 bits and values of 4, turned, all with scales of tokens."""
    folder, opened, target = tmp_path_factory.mktemp("slots"), Checkpoint.open(sample_checkpoint), targets.local()
    model = trace(opened)
    slots = QuantizeKvCache(Budget(kld_mean=1.0), value_bits=4, granularity="per_token", rotation="hadamard")
    for step in (PackQkv(), FlashAttention(), slots):
        assert step.run(model, Context(target))
    lowered, _ = engine.lower(model, target)
    spec = EngineSpec(max_context=256, max_batch=4, threads=1)
    engine.build(BuildRequest(lowered, folder / "engine", spec, target, opened.eos_token_ids, opened.bos_token_id))
    engine.write_tokenizer(opened, folder / "tokenizer")
    return load(folder)


def test_a_slot_of_the_cache_is_as_large_as_its_format_says(runner: Runner) -> None:
    cache = runner.session.allocate(1, 10)
    assert cache.size_bytes == 10 * 6 * 4 * ((32 + 2) + (16 + 4))  # layers, heads of keys and values
    assert {buffer.dtype.name for buffer in cache.buffers.values()} == {"uint8"}


def test_requests_that_share_slots_get_the_text_that_each_gets_alone(runner: Runner, data: Path) -> None:
    random = np.random.default_rng(5)
    texts = [runner.encode(document.text) for document in read_documents(data / "evaluation.jsonl")]
    shared = [tuple(text[: 40 + 30 * i]) for i, text in enumerate(texts[:4])]
    made = []
    for i in range(REQUESTS):
        own = tuple(texts[int(random.integers(len(texts)))][: int(random.integers(1, 40))])
        prompt = shared[int(random.integers(4))] + own if i % 4 else own
        made.append((Request(prompt, Sampling(max_tokens=int(random.integers(1, 24)))), Received()))
    block_bytes = runner.session.allocate(1, BLOCK).size_bytes
    cache = runner.session.allocate(4, runner.config.max_context)
    options = EngineOptions(REQUESTS, step_tokens=2 * CHUNK, prefix_cache_bytes=30 * block_bytes)
    speculation = Speculation(PromptLookup(), AlwaysPays())
    scheduler = SlotScheduler(runner.session, cache, runner.samplers, options, speculation=speculation, chunk=CHUNK)
    waiting, left, step = list(made), [], 0
    while scheduler.busy or waiting:
        for request, received in waiting[: int(random.integers(0, 3))]:
            ticket = scheduler.add(request, received.receive)
            if random.random() < 0.15:
                left.append((ticket, received))
            waiting.pop(0)
        for ticket, received in left:
            ticket.cancelled = len(received.chunks) >= 3
        scheduler.step()
        step += 1
    stats = scheduler.stats()
    assert stats.prefix_hit_tokens > 300
    assert stats.accepted_tokens > 10
    assert stats.finished["cancelled"] > 0
    for request, received in made:
        alone = "".join(chunk.text for chunk in runner.generate(request.prompt, request.sampling))
        assert alone.startswith(received.text) if received.reason == "cancelled" else received.text == alone
