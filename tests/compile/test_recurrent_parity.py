"""Served state space models, hybrids, and others that people deploy, against transformers' greedy text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from llmforge import targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder as engine
from llmforge.checkpoint import Checkpoint
from llmforge.passes import FlashAttention, FuseNorms, PackGateUp, PackQkv
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Context
from llmforge.serving import Sampling, load
from llmforge.trace import trace

from ..models import zoo
from ..sweep import shrink

TARGET = targets.local()
OUTPUT_TOKENS = 24
PROMPTS = (5, 21, 33)  # tokens; chunks of the models are 8


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "bamba",
        "llama4_text",
        *(pytest.param(name, marks=[pytest.mark.slow]) for name in ("jamba", "kimi-linear", "dbrx", "minimax")),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
def test_served_text_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    if name in zoo.ZOO:
        zoo.write(name, tmp_path / "checkpoint")
    else:
        shrink.write(name, tmp_path / "checkpoint")
    checkpoint = Checkpoint.open(tmp_path / "checkpoint")
    model = trace(checkpoint)
    for step in (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention()):
        step.run(model, Context(TARGET))
    lowered, _ = engine.lower(model, TARGET)
    spec = EngineSpec(max_context=128, max_batch=len(PROMPTS), threads=1)
    engine.build(BuildRequest(lowered, tmp_path / "engine", spec, TARGET, *(checkpoint.eos_token_ids, None)))
    engine.write_tokenizer(checkpoint, tmp_path / "tokenizer")
    runner = load(tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, zoo.VOCABULARY, count).tolist() for count in PROMPTS]
    reference = zoo.reference(tmp_path / "checkpoint")
    wanted = []
    for prompt in prompts:  # all tokens at once for each: transformers' own caches of states are not trusted
        text = list(prompt)
        with torch.no_grad():
            for _ in range(OUTPUT_TOKENS):
                text.append(int(reference(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        wanted.append(text[len(prompt) :])
    greedy = Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    alone = [
        [chunk.token_id for chunk in runner.generate(prompt, greedy) if chunk.token_id is not None]
        for prompt in prompts
    ]
    assert alone == wanted
    steps = list(runner.generate_batch(prompts, [greedy] * len(prompts)))
    assert [[step.token_ids[b] for step in steps if step.token_ids[b] is not None] for b in range(3)] == wanted
