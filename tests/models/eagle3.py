"""EAGLE-3 heads for tests: a folder as SpecForge writes it, and what a head computes, written out in numpy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from llmforge import passes, targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder as engine
from llmforge.checkpoint import Checkpoint
from llmforge.compile import heads
from llmforge.ir import hidden_states
from llmforge.recipe import Recipe
from llmforge.rewrite.pass_base import Context
from llmforge.runtime.config import SpeculationFacts
from llmforge.serving import EngineOptions, Request, load
from llmforge.serving.drafting import speculation_of
from llmforge.serving.interface import EngineStats
from llmforge.serving.runner import Runner
from llmforge.serving.scheduler import SlotScheduler
from llmforge.serving.speculation import Speculation
from llmforge.trace import trace

from .small_engines import AlwaysPays, Received

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, EPSILON = 256, 8, 4, 32, 512, 1e-6
DRAFT_VOCABULARY, VOCABULARY, TARGET_HIDDEN = 500, 8192, 256
THETA = 10000.0
ROWS, CAPACITY = 3, 256


def settings(**changes: Any) -> dict[str, Any]:
    """Give the configuration of a head for the sample checkpoint."""
    made = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "max_position_embeddings": 2048,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": DRAFT_VOCABULARY,
        "tie_word_embeddings": False,
    }
    return {name: value for name, value in (made | changes).items() if value is not None}


def tensors(seed: int = 0) -> dict[str, NDArray[Any]]:
    """Draw the tensors of a head."""
    random = np.random.default_rng(seed)

    def matrix(n: int, k: int) -> NDArray[np.float32]:
        return (random.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)

    def vector() -> NDArray[np.float32]:
        return (1 + 0.2 * random.standard_normal(HIDDEN)).astype(np.float32)

    ids = np.sort(random.choice(VOCABULARY, DRAFT_VOCABULARY, replace=False))
    return {
        "fc.weight": matrix(HIDDEN, 3 * TARGET_HIDDEN),
        "midlayer.hidden_norm.weight": vector(),
        "midlayer.input_layernorm.weight": vector(),
        "midlayer.post_attention_layernorm.weight": vector(),
        "midlayer.self_attn.q_proj.weight": 2 * matrix(HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": 2 * matrix(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
        "midlayer.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
        "midlayer.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        "norm.weight": vector(),
        "lm_head.weight": matrix(DRAFT_VOCABULARY, HIDDEN),
        "d2t": (ids - np.arange(DRAFT_VOCABULARY)).astype(np.int64),
        "t2d": np.isin(np.arange(VOCABULARY), ids),
    }


def write(folder: Path, held: Mapping[str, NDArray[Any]], config: Mapping[str, Any]) -> Path:
    """Write a head."""
    folder.mkdir(parents=True)
    save_file({name: np.ascontiguousarray(value) for name, value in held.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def compute(
    held: Mapping[str, NDArray[Any]],
    embeddings: NDArray[np.float32],
    hidden: NDArray[np.float32],
    own: NDArray[np.float32],
    *,
    norms_residual: bool = False,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute a head on embeddings [S, hidden] and states: logits [S, draft vocabulary], next states [S, hidden]."""

    def weight(name: str) -> NDArray[np.float64]:
        return held[name].astype(np.float64)

    def norm(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weight(f"{name}.weight")

    def turn(x: NDArray[np.float64]) -> NDArray[np.float64]:  # [S, heads, head_dim]
        half = HEAD_DIM // 2
        angles = np.arange(len(x))[:, None] * THETA ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate(
            [x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1
        )

    count = len(embeddings)
    x = hidden @ weight("fc.weight").T + own
    normed = norm(x, "midlayer.hidden_norm")
    both = np.concatenate([norm(embeddings.astype(np.float64), "midlayer.input_layernorm"), normed], -1)
    q, k, v = (both @ weight(f"midlayer.self_attn.{each}_proj.weight").T for each in "qkv")
    q = turn(q.reshape(count, HEADS, HEAD_DIM))
    k = np.repeat(turn(k.reshape(count, KV_HEADS, HEAD_DIM)), HEADS // KV_HEADS, 1)
    v = np.repeat(v.reshape(count, KV_HEADS, HEAD_DIM), HEADS // KV_HEADS, 1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
    scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v).reshape(count, -1)
    h = (normed if norms_residual else x) + mixed @ weight("midlayer.self_attn.o_proj.weight").T
    z = norm(h, "midlayer.post_attention_layernorm")
    gate = z @ weight("midlayer.mlp.gate_proj.weight").T
    up = z @ weight("midlayer.mlp.up_proj.weight").T
    h = h + (gate / (1 + np.exp(-gate)) * up) @ weight("midlayer.mlp.down_proj.weight").T
    return norm(h, "norm") @ weight("lm_head.weight").T, h


RECIPE = """\
schema: 1
name: heads
checkpoint: {checkpoint}
target: local
engine: {{max_context: 256, max_batch: 3, threads: 1}}
passes: [fuse-norms, pack-qkv, pack-gate-up, flash-attention]
serving: {{speculation: {{method: eagle3, max_tokens: 4, checkpoint: {head}}}}}
"""


def recipe(folder: Path, checkpoint: Path, head: Path) -> Recipe:
    """Write the recipe of a model with a head into `folder`, and load it."""
    file = folder / "heads.yaml"
    file.write_text(RECIPE.format(checkpoint=checkpoint, head=head))
    return Recipe.load(file)


def head_runner(folder: Path, checkpoint: Path, head: Path) -> Runner:
    """Build a checkpoint with a head that drafts for it into `folder`, in fp32, and load both."""
    asked = recipe(folder, checkpoint, head)
    (folder / "head").mkdir()
    built = heads.build(asked, folder / "head")
    opened, target = Checkpoint.open(checkpoint), targets.local()
    model = trace(opened)
    hidden_states.expose(model, built.layers)
    for step in asked.instantiate(passes.ALL):
        assert step.run(model, Context(target))
    lowered, _ = engine.lower(model, target)
    ends = opened.eos_token_ids, opened.bos_token_id
    facts = SpeculationFacts("eagle3", 4)
    engine.build(BuildRequest(lowered, folder / "engine", asked.engine, target, *ends, speculation=facts))
    engine.write_tokenizer(opened, folder / "tokenizer")
    built.copy_into(folder)
    return load(folder)


def drafting(runner: Runner) -> Speculation:
    """Draft by the head, and verify every draft."""
    made = speculation_of(runner, ROWS)
    assert made is not None
    return Speculation(made.proposer, AlwaysPays(), made.max_tokens)


def answered(
    runner: Runner,
    requests: Sequence[Request],
    speculation: Speculation | None,
    *,
    leaves: Sequence[int | None] = (),
    prefix_cache_bytes: int = 0,
) -> tuple[list[Received], EngineStats]:
    """Run requests three at a time; the caller of number n loses interest after `leaves[n]` steps."""
    options = EngineOptions(max_queue=999, step_tokens=64, prefix_cache_bytes=prefix_cache_bytes)
    cache = runner.session.allocate(ROWS, CAPACITY)
    scheduler = SlotScheduler(runner.session, cache, runner.samplers, options, speculation=speculation, chunk=16)
    received = [Received() for _ in requests]
    tickets = [scheduler.add(each, answer.receive) for each, answer in zip(requests, received, strict=True)]
    steps = 0
    while scheduler.step():
        steps += 1
        for ticket, left in zip(tickets, leaves, strict=False):
            if left == steps:
                ticket.cancelled = True
    return received, scheduler.stats()
