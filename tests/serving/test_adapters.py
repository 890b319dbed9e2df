"""Adapters that are kept apart: 60 mixed requests through one scheduler, each as if its adapter were there alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder as engine
from llmforge.base.errors import UsageError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.adapters import Adapter, AdapterSource
from llmforge.passes.add_adapters import AddAdapters
from llmforge.passes.flash_attention import FlashAttention
from llmforge.passes.fuse_norms import FuseNorms
from llmforge.passes.pack_gate_up import PackGateUp
from llmforge.passes.pack_qkv import PackQkv
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Context
from llmforge.serving import Sampling, load
from llmforge.serving.interface import EngineOptions
from llmforge.serving.prefix_cache import BLOCK
from llmforge.serving.request import Request
from llmforge.serving.runner import Runner
from llmforge.serving.scheduler import Scheduler, SlotScheduler
from llmforge.serving.speculation import PromptLookup, Speculation
from llmforge.trace import trace
from llmforge.verification import adapter_proof

from ..models.adapters import ATTENTION, write_adapter
from ..models.small_engines import AlwaysPays, Received

NAMES = ("formal", "short", "sql")
SLOTS, CONTEXT = 4, 512


def built(model: ir.Model, checkpoint: Checkpoint, folder: Path) -> Runner:
    target = targets.local()
    lowered, _ = engine.lower(model, target)
    spec = EngineSpec(max_context=CONTEXT, max_batch=SLOTS, threads=1)
    ends = checkpoint.eos_token_ids, checkpoint.bos_token_id
    engine.build(BuildRequest(lowered, folder / "engine", spec, target, *ends))
    engine.write_tokenizer(checkpoint, folder / "tokenizer")
    return load(folder)


@pytest.fixture(scope="module")
def model(sample_checkpoint: Path) -> ir.Model:
    made = trace(Checkpoint.open(sample_checkpoint))
    for step in (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention()):
        assert step.run(made, Context(targets.local()))
    return made


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> list[Adapter]:
    """One of everything, one of attention alone, and one of another rank; large enough that texts differ."""
    folder = tmp_path_factory.mktemp("adapters")
    kinds: list[dict[str, Any]] = [{}, {"targets": ATTENTION[:3], "size": 1.0}, {"rank": 9, "settings": {"r": 9}}]
    return [
        Adapter.open(
            AdapterSource(name, write_adapter(folder / name, sample_checkpoint, seed=seed, **{"size": 0.7, **kind}))
        )
        for seed, (name, kind) in enumerate(zip(NAMES, kinds, strict=True))
    ]


@pytest.fixture(scope="module")
def runner(
    tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path, model: ir.Model, adapters: list[Adapter]
) -> Runner:
    own = model.clone()
    assert AddAdapters().run(own, Context(targets.local(), adapters=adapters))
    return built(own, Checkpoint.open(sample_checkpoint), tmp_path_factory.mktemp("apart"))


def scheduler(runner: Runner, *, slots: int = SLOTS, prefixes: int = 64 << 20, **options: Any) -> Scheduler[Any]:
    served = EngineOptions(max_queue=100, step_tokens=64, prefix_cache_bytes=prefixes)
    cache = runner.session.allocate(slots, CONTEXT)
    adapters = runner.config.adapters
    return SlotScheduler(runner.session, cache, runner.samplers, served, chunk=64, adapters=adapters, **options)


def answer(runner: Runner, request: Request) -> list[int]:
    """The answer alone: one slot, no prefix cache."""
    received, single = Received(), scheduler(runner, slots=1, prefixes=0)
    single.add(request, received.receive)
    while single.step():
        pass
    return received.tokens


def requests(runner: Runner) -> list[Request]:
    """60 requests of all adapters and of none, that share prefixes with one another."""
    rng = random.Random(7)
    shared = [rng.choices(range(20, 8000), k=2 * BLOCK + 3) for _ in range(2)]
    made = []
    for number in range(60):
        prompt = [*shared[rng.randrange(2)], *rng.choices(range(20, 8000), k=rng.randint(1, 40))]
        if number % 5 == 0:
            prompt = prompt[-20:]
        sampled = Sampling(max_tokens=rng.randint(3, 12), ignore_eos=True, seed=number, temperature=0.7 * (number % 2))
        made.append(Request(tuple(prompt), sampled, adapter=(*NAMES, "")[rng.randrange(4)]))
    return made


@pytest.mark.parametrize("speculation", [False, True])
def test_mixed_requests_are_answered_as_alone(runner: Runner, *, speculation: bool) -> None:
    asked = requests(runner)
    asked = asked[:20] if speculation else asked
    drafts = {"speculation": Speculation(PromptLookup(), AlwaysPays())} if speculation else {}
    scheduled = scheduler(runner, **drafts)
    rng, waiting, received = random.Random(3), list(enumerate(asked)), [Received() for _ in asked]
    cancelled: dict[int, Any] = {}
    while waiting or scheduled.busy:
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 2, 5]))):  # they join at any time
            number, request = waiting.pop(0)
            ticket = scheduled.add(request, received[number].receive)
            if number % 9 == 4:
                cancelled[number] = ticket
        for number, ticket in cancelled.items():  # and leave
            ticket.cancelled = ticket.cancelled or len(received[number].tokens) > 1
        scheduled.step()
    texts: dict[str, list[list[int]]] = {}
    for number, (request, got) in enumerate(zip(asked, received, strict=True)):
        expected = answer(runner, request)
        if number in cancelled:
            expected = expected[: len(got.tokens)]
        assert got.tokens == expected, (number, request.adapter)
        texts.setdefault(request.adapter, []).append(got.tokens)
    assert set(texts) == {*NAMES, ""}
    stats = scheduled.stats()
    assert stats.prefix_hit_tokens > 0
    assert stats.finished["cancelled"] > 0


def test_a_prefix_of_one_adapter_serves_no_other(runner: Runner) -> None:
    """Read the same prompt with each adapter in turn: what is cached is found by the same adapter alone."""
    scheduled = scheduler(runner)
    prompt = tuple(random.Random(1).choices(range(20, 8000), k=3 * BLOCK + 5))
    answers = {}
    for name in (*NAMES, "", *NAMES, ""):
        received, request = Received(), Request(prompt, Sampling(max_tokens=6, ignore_eos=True), adapter=name)
        scheduled.add(request, received.receive)
        hits = scheduled.stats().prefix_hit_tokens
        while scheduled.step():
            pass
        found = scheduled.stats().prefix_hit_tokens - hits
        assert (found > 0) == (name in answers)
        assert received.tokens == answers.setdefault(name, answer(runner, request))
    assert len({tuple(each) for each in answers.values()}) == 4


@pytest.mark.thorough
def test_texts_are_those_of_merged_builds(
    runner: Runner, model: ir.Model, adapters: list[Adapter], sample_checkpoint: Path, tmp_path: Path
) -> None:
    checkpoint, prompt = Checkpoint.open(sample_checkpoint), tuple(range(100, 130))
    for adapter in adapters[:2]:
        merged = built(adapter_proof.merged(model, adapter), checkpoint, tmp_path / adapter.name)
        request = Request(prompt, Sampling(max_tokens=24, ignore_eos=True))
        assert answer(runner, Request(prompt, request.sampling, adapter=adapter.name)) == answer(merged, request)
        ours, theirs = runner.logits(prompt, adapter=adapter.name), merged.logits(prompt)
        assert np.abs(ours - theirs).max() < 1e-4 * theirs.std()
    assert answer(runner, Request(prompt, request.sampling)) != answer(merged, request)


def test_an_unknown_adapter_is_refused(runner: Runner, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no adapter 'poetry': the adapters are formal, short, sql"):
        scheduler(runner).add(Request((5,), adapter="poetry"), Received().receive)
    with pytest.raises(UsageError, match="no adapter 'poetry'"):
        next(runner.generate([5, 6], adapter="poetry"))
    assert runner.config.adapters == NAMES
