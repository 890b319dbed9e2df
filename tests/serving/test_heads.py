"""EAGLE-3 heads that draft: nothing is lost by them, whatever comes and goes; what they follow, and what is kept."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmforge.base.errors import InputError, UsageError
from llmforge.checkpoint.documents import read_documents
from llmforge.runtime.interface import StepInputs
from llmforge.serving import EngineOptions, Request, Runner, Sampling
from llmforge.serving.drafting import speculation_of
from llmforge.serving.engine import Engine
from llmforge.serving.heads import DraftHead
from llmforge.serving.interface import EngineStats

from ..models.eagle3 import ROWS, answered, drafting, head_runner
from ..models.small_engines import Received

DATA = Path(__file__).parents[1] / "data"
HEAD = DATA / "eagle3-docs-llama-7m"


@pytest.fixture(scope="module")
def runner(tmp_path_factory, sample_checkpoint) -> Runner:
    return head_runner(tmp_path_factory.mktemp("heads"), sample_checkpoint, HEAD)


def prompts(runner: Runner, count: int, tokens: int = 24) -> list[tuple[int, ...]]:
    """Cut prompts out of text that the head was not trained on."""
    texts = [each.text for each in read_documents(DATA / "evaluation.jsonl")]
    ids = [runner.encode(text) for text in texts]
    made = [tuple(each[at : at + tokens]) for each in ids for at in range(0, len(each) - tokens, 2 * tokens)]
    assert len(made) >= count
    return made[:count]


def require_same(runner: Runner, requests: Sequence[Request]) -> EngineStats:
    """Answer with and without drafts; every answer must be the same, token for token."""
    plain, _ = answered(runner, requests, None)
    drafted, stats = answered(runner, requests, drafting(runner))
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    assert stats.drafted_tokens > 0
    return stats


def asks(prompt: Sequence[int], **sampling: float) -> Request:
    return Request(tuple(prompt), Sampling(max_tokens=24, ignore_eos=True, **sampling))


def test_greedy_answers_are_the_same_and_come_in_fewer_steps(runner):
    stats = require_same(runner, [asks(each) for each in prompts(runner, 5)])
    assert stats.accepted_length is not None
    assert stats.accepted_length > 1.5, "the head was trained for this"


@pytest.mark.thorough
def test_greedy_answers_to_200_prompts_are_the_same(runner):
    assert require_same(runner, [asks(each) for each in prompts(runner, 200)]).accepted_length > 1.5


def test_sampled_answers_are_the_same(runner):
    requests = [
        asks(each, temperature=1.0, seed=seed, top_p=[1.0, 0.9][seed % 2])
        for seed, each in enumerate(prompts(runner, 4))
    ]
    assert require_same(runner, requests).accepted_tokens > 0


@pytest.mark.thorough
def test_answers_are_distributed_as_the_model_says(runner):
    """Chi-squared at temperature 1, of the second and third tokens of 1,500 answers that begin with likely ones."""

    def chances(ids: Sequence[int]) -> np.ndarray:
        logits = runner.logits(ids)[-1].astype(np.float64)
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    prompt = max(prompts(runner, 40), key=lambda each: chances(each).max())
    requests = [Request(prompt, Sampling(max_tokens=3, temperature=1.0, seed=seed)) for seed in range(1500)]
    answers, speculation, accepted = [], drafting(runner), 0
    for at in range(0, len(requests), 300):
        received, stats = answered(runner, requests[at : at + 300], speculation, prefix_cache_bytes=1 << 24)
        answers += [each.tokens for each in received]
        accepted += stats.accepted_tokens
    assert accepted > 0
    begin: list[int] = []
    for place in (1, 2):
        begin.append(int(chances((*prompt, *begin)).argmax()))
        found = [each[place] for each in answers if len(each) > place and each[:place] == begin]
        assert len(found) > 100, "a likely beginning"
        expected = chances((*prompt, *begin)) * len(found)
        counts, likely = np.bincount(found, minlength=len(expected)), expected >= 5
        observed = np.append(counts[likely], counts[~likely].sum())
        wanted = np.append(expected[likely], expected[~likely].sum())
        chi_squared, freedom = float(np.sum((observed - wanted) ** 2 / wanted)), len(wanted) - 1
        assert freedom > 1
        assert chi_squared < freedom + 4 * np.sqrt(2 * freedom)


def test_streams_that_close_leave_nothing_behind(runner):
    """Callers leave at random moments; the others' answers stay, and every row of the head is free again."""
    generator = random.Random(0)
    requests = [asks(each) for each in prompts(runner, 8)]
    leaves = [generator.randint(1, 30) if generator.random() < 0.5 else None for _ in requests]
    plain, _ = answered(runner, requests, None)
    speculation = drafting(runner)
    received, _ = answered(runner, requests, speculation, leaves=leaves)
    for one, other, left in zip(received, plain, leaves, strict=True):
        assert one.tokens == other.tokens[: len(one.tokens)]
        assert one.reason == "length" or left is not None
    assert {each.reason for each in received} == {"length", "cancelled"}
    head = speculation.proposer
    assert isinstance(head, DraftHead)
    assert not head._texts
    assert sorted(head._free) == list(range(ROWS))


def test_prompts_out_of_the_prefix_cache_are_drafted_for(runner):
    """What the decoder was spared, the head has not read: it begins behind it."""
    whole = prompts(runner, 1, 100)[0]
    requests = [asks((*whole[:80], *whole[at : at + 8])) for at in range(4)]
    plain, _ = answered(runner, requests, None)
    cached, stats = answered(runner, requests, drafting(runner), prefix_cache_bytes=1 << 24)
    assert stats.prefix_hit_tokens > 0
    assert stats.accepted_tokens > 0
    assert [each.tokens for each in cached] == [each.tokens for each in plain]


def test_a_served_engine_drafts_as_its_artifact_says(runner):
    requests = [asks(each) for each in prompts(runner, 4)]
    with Engine(runner, EngineOptions(speculation="off")) as engine:
        plain = [submitted(engine, each).wait().tokens for each in requests]
    with Engine(runner) as engine:
        received = [submitted(engine, each) for each in requests]
        assert [each.wait().tokens for each in received] == plain
    chunks = list(runner.generate(requests[0].prompt, requests[0].sampling))
    assert [each.token_id for each in chunks if each.token_id is not None] == plain[0]


def submitted(engine: Engine, request: Request) -> Received:
    received = Received()
    engine.submit(request, received.receive)
    return received


def test_an_engine_gives_what_enters_the_layers_that_its_head_reads(runner, sample_checkpoint):
    """Against transformers, of which the graph with this output was held to nothing else."""
    [text] = prompts(runner, 1, 40)
    session, cache = runner.session, runner.session.allocate(1, 64)
    made = []
    for past, count in ((0, 30), (30, 9), (39, 1)):
        session.step(StepInputs(np.array([text[past : past + count]]), np.array([past], np.int32)), cache)
        assert session.hidden_states is not None
        made.append(session.hidden_states[0].copy())
    model = AutoModelForCausalLM.from_pretrained(sample_checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        found = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    expected = np.concatenate([found[layer][0].numpy() for layer in (2, 3, 5)], -1)
    assert np.abs(np.concatenate(made) - expected).max() < 1e-4 * expected.std()


def test_a_head_drafts_what_it_gives_of_the_whole_text(runner):
    """Read in pieces, after drafts that were wrong and beside other texts, it drafts what it does for a fresh text."""
    [text, other] = prompts(runner, 2, 40)
    session = runner.session
    assert session.signature.gives_hidden is not None

    def states(ids: Sequence[int]) -> np.ndarray:
        session.step(StepInputs(np.array([ids], np.int64), np.zeros(1, np.int32)), session.allocate(1, 64))
        assert session.hidden_states is not None
        return session.hidden_states[0].copy()

    found = states(text)
    head = speculation_of(runner, ROWS).proposer
    assert isinstance(head, DraftHead)
    head.observe("other", other, 0, states(other)[:-1])
    head.observe("text", text[:11], 0, found[:10])
    head.propose("text", text[:11], 4)
    head.observe("text", text[:12], 10, found[10:11])
    assert len(head.propose("other", other, 4)) == 4
    head.propose("text", text[:12], 3)
    head.observe("text", text, 11, found[11:-1])
    fresh = speculation_of(runner, ROWS).proposer
    fresh.observe("text", text, 0, found[:-1])
    drafted = head.propose("text", text, 4)
    assert drafted == fresh.propose("text", text, 4)
    assert len(drafted) == 4
    assert head.propose("text", text, 4) == [], "nothing is known of what was not computed"
    assert head.propose("unknown", text, 4) == []
    head.observe("text", text, 0, found[:-1])  # read again from the beginning, as after a preemption
    assert head.propose("text", text, 4) == drafted
    head.observe("third", text, 0, found[:-1])
    head.observe("fourth", text, 0, found[:-1])
    assert head.propose("fourth", text, 4) == [], "it follows three texts"


def test_who_has_no_head_or_another_ones_is_told(runner, monkeypatch):
    with pytest.raises(UsageError, match="speculation is 'draft' and there is no draft artifact"):
        speculation_of(runner, 1, "draft")
    monkeypatch.setitem(runner.session.signature.hidden_widths, "hidden_states", 512)
    with pytest.raises(InputError, match="the head reads 768 hidden states of a token and predicts 8192 tokens; the"):
        speculation_of(runner, 1)
