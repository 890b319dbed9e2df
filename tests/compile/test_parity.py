"""The shipped engine against transformers on the sample checkpoint, before any quantization."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder as engine
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.documents import read_documents
from llmforge.passes.flash_attention import FlashAttention
from llmforge.passes.fuse_norms import FuseNorms
from llmforge.passes.pack_gate_up import PackGateUp
from llmforge.passes.pack_qkv import PackQkv
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Context
from llmforge.serving import Runner, Sampling, load
from llmforge.trace import trace

pytestmark = pytest.mark.xdist_group("parity")  # its fixtures take seconds: they are made once

PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 20, 40, 64
TARGET = targets.local()


@pytest.fixture(scope="module")
def checkpoint(sample_checkpoint) -> Checkpoint:
    return Checkpoint.open(sample_checkpoint)


@pytest.fixture(scope="module")
def traced(checkpoint) -> ir.Model:
    return trace(checkpoint)


def build(model: ir.Model, checkpoint: Checkpoint, folder: Path) -> Runner:
    lowered, _ = engine.lower(model, TARGET)
    spec = EngineSpec(max_context=1024, max_batch=4, threads=2)
    ends = checkpoint.eos_token_ids, checkpoint.bos_token_id
    engine.build(BuildRequest(lowered, folder / "engine", spec, TARGET, *ends))
    engine.write_tokenizer(checkpoint, folder / "tokenizer")
    return load(folder)


@pytest.fixture(scope="module")
def as_traced(traced, checkpoint, tmp_path_factory) -> Runner:
    return build(traced, checkpoint, tmp_path_factory.mktemp("as-traced"))


@pytest.fixture(scope="module")
def fused(traced, checkpoint, tmp_path_factory) -> Runner:
    model = traced.clone()
    for step in (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention()):
        assert step.run(model, Context(TARGET))
    return build(model, checkpoint, tmp_path_factory.mktemp("fused"))


@pytest.fixture(scope="module")
def baseline(checkpoint):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(data, fused) -> list[list[int]]:
    documents = read_documents(data / "evaluation.jsonl")
    texts = [fused.encode(document.text) for document in documents]
    return [ids[:PROMPT_TOKENS] for ids in texts if len(ids) >= PROMPT_TOKENS][:PROMPTS]


@pytest.fixture(scope="module")
def wanted(baseline, prompts) -> list[list[int]]:
    """Greedy continuations by transformers, whatever it thinks of the end-of-sequence token."""
    import torch

    with torch.inference_mode():
        answers = baseline.generate(
            torch.tensor(prompts), max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return answers[:, PROMPT_TOKENS:].tolist()


GREEDY = Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True)


@pytest.mark.thorough
@pytest.mark.parametrize("runner", [pytest.param("as_traced", marks=pytest.mark.slow), "fused"])
def test_greedy_continuations_are_those_of_transformers(runner, prompts, wanted, request):
    engine_runner: Runner = request.getfixturevalue(runner)
    assert len(prompts) == PROMPTS
    got = [
        [chunk.token_id for chunk in engine_runner.generate(prompt, GREEDY) if chunk.token_id is not None]
        for prompt in prompts
    ]
    assert got == wanted
    assert len({tuple(answer) for answer in wanted}) == PROMPTS
    assert {len(answer) for answer in wanted} == {OUTPUT_TOKENS}


@pytest.mark.parametrize("runner", ["as_traced", "fused"])
def test_a_ragged_batch_continues_as_transformers_does(runner, prompts, wanted, request):
    engine_runner: Runner = request.getfixturevalue(runner)
    cut = [0, 9, 17, 30]  # so many tokens of each answer are given as part of its prompt
    given = [prompts[b] + wanted[b][:n] for b, n in enumerate(cut)]
    samplings = [Sampling(max_tokens=OUTPUT_TOKENS - n, ignore_eos=True) for n in cut]
    steps = list(engine_runner.generate_batch(given, samplings))
    for b, n in enumerate(cut):
        assert [step.token_ids[b] for step in steps if step.token_ids[b] is not None] == wanted[b][n:]


@pytest.mark.parametrize("runner", ["as_traced", "fused"])
def test_logits_are_those_of_transformers(runner, data, baseline, request):
    import torch

    engine_runner: Runner = request.getfixturevalue(runner)
    document = next(d for d in read_documents(data / "evaluation.jsonl") if len(engine_runner.encode(d.text)) > 600)
    ids = engine_runner.encode(document.text)[:600]  # more than one chunk
    with torch.inference_mode():
        expected = baseline(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(engine_runner.logits(ids), expected, atol=1e-4)
    assert np.ptp(expected) > 10
