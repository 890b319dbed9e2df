"""DeepSeek-V3's latent attention, served: latents are cached, and logits and texts are those of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from llmforge import targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder as engine
from llmforge.checkpoint import Checkpoint
from llmforge.ir.operators import cpu
from llmforge.passes import CpuKernels, FuseNorms, PackGateUp
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.runtime.interface import StepInputs
from llmforge.serving import EngineOptions, Request, Runner, Sampling, load
from llmforge.serving.prefix_cache import BLOCK
from llmforge.serving.scheduler import SlotScheduler
from llmforge.trace import trace
from llmforge.verification.trace_verifier import verify_trace

from ..models import zoo
from ..models.small_engines import Received

# Fixtures take seconds: they are made once.
pytestmark = [pytest.mark.xdist_group("latents"), pytest.mark.thorough]

RANK, ROTARY, LAYERS, HEADS = 32, 16, 3, 4
SIZES = {
    "num_hidden_layers": LAYERS,
    "kv_lora_rank": RANK,
    "qk_rope_head_dim": ROTARY,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "max_position_embeddings": 256,
    # angles and scores that grow with the context (YaRN): mscale is another number in each of three places
    "rope_parameters": {**zoo.YARN, "mscale": 0.9, "mscale_all_dim": 0.7},
    "first_k_dense_replace": 1,  # then experts, in groups, and shared ones
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
CONTEXT, CHUNK = 192, 40
FORMS = ("standard operators", "CPU kernels")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    zoo.write("deepseek-v3", folder, **SIZES)
    return folder


@pytest.fixture(scope="module")
def original(checkpoint: Path) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    model.set_experts_implementation("eager")
    return model.eval()


@pytest.fixture(scope="module")
def runners(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Runner]:
    """The model as a recipe would build it, in fp32."""
    opened, target = Checkpoint.open(checkpoint), targets.local()
    made = {}
    for form in FORMS:
        model, folder = trace(opened), tmp_path_factory.mktemp("artifact")
        for step in (FuseNorms(), PackGateUp()):
            step.run(model, Context(target))
        if form == "CPU kernels":
            changes = CpuKernels(Budget(kld_mean=1e-9), latents="fp32").run(model, Context(target))
            assert sum("LatentAttention" in each.what for each in changes.rewritten) == LAYERS
            assert len(cpu.CpuLatentAttention.all(model)) == LAYERS
        lowered, _ = engine.lower(model, target)
        spec = EngineSpec(max_context=CONTEXT, max_batch=4, threads=1)
        engine.build(BuildRequest(lowered, folder / "engine", spec, target, opened.eos_token_ids, opened.bos_token_id))
        engine.write_tokenizer(opened, folder / "tokenizer")
        made[form] = load(folder)
    return made


@pytest.fixture(params=FORMS)
def runner(request: pytest.FixtureRequest, runners: Mapping[str, Runner]) -> Runner:
    return runners[request.param]


def logits_of(model: transformers.PreTrainedModel, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    with torch.inference_mode():
        return model(torch.from_numpy(ids)[None]).logits[0].numpy()  # type: ignore[no-any-return]


def random_text(length: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(3, zoo.VOCABULARY, length)


def test_the_trace_is_proven(checkpoint: Path) -> None:
    opened = Checkpoint.open(checkpoint)
    proof = verify_trace(opened, trace(opened))
    assert proof.layers == LAYERS
    assert proof.max_abs_difference < 1e-5


def test_a_token_takes_a_latent_and_one_rotary_key_a_layer(runner: Runner) -> None:
    config = runner.config
    assert [(cache.name, cache.kv_heads, cache.head_dim, cache.dtype) for cache in config.caches] == [
        (f"past_key_values.{layer}.latent", 1, RANK + ROTARY, "float32") for layer in range(LAYERS)
    ]
    token = runner.session.allocate(1, 2).size_bytes - runner.session.allocate(1, 1).size_bytes
    assert token == (RANK + ROTARY) * 4 * LAYERS
    expanded = HEADS * (32 + ROTARY + 48) * 4 * LAYERS
    assert token * 8 == expanded


@pytest.mark.parametrize(
    "pieces",
    [(90,), (90, *[1] * 8), (40, 40, 10), (5, 70, 3, 12, 1, 1), (1, 89)],
    ids=["prefill", "decode", "chunked prefill", "pieces of all sizes", "a prompt behind its first token"],
)
def test_logits_of_one_row(pieces: tuple[int, ...], runner: Runner, original: transformers.PreTrainedModel) -> None:
    ids = random_text(sum(pieces), 1)
    wanted, cache, start = logits_of(original, ids), runner.session.allocate(1, CONTEXT), 0
    for count in pieces:
        rows = np.arange(count)
        got = runner.session.step(
            StepInputs(ids[None, start : start + count], np.array([start], np.int32), rows), cache
        )
        np.testing.assert_allclose(got[0], wanted[start : start + count], atol=1e-5)
        start += count


def test_logits_of_ragged_batches(runner: Runner, original: transformers.PreTrainedModel) -> None:
    texts = [random_text(length + 6, length) for length in (130, 7, 64)]
    wanted = [logits_of(original, ids) for ids in texts]
    prompts = [len(ids) - 6 for ids in texts]
    cache = runner.session.allocate(3, CONTEXT)
    for buffer in cache.buffers.values():
        buffer[...] = 5.0  # what an earlier text left there
    padded = np.zeros((3, max(prompts)), np.int64)
    for row, ids in enumerate(texts):
        padded[row, : prompts[row]] = ids[: prompts[row]]
    past = np.zeros(3, np.int32)
    got = runner.session.step(StepInputs(padded, past, np.arange(padded.shape[1])), cache)
    for row, count in enumerate(prompts):
        np.testing.assert_allclose(got[row, :count], wanted[row][:count], atol=1e-5)
    past += np.array(prompts, np.int32)
    for count in (2, 1, 3):
        ids = np.stack([text[at : at + count] for text, at in zip(texts, past, strict=True)])
        got = runner.session.step(StepInputs(ids, past, np.arange(count)), cache)
        for row, at in enumerate(past):
            np.testing.assert_allclose(got[row], wanted[row][at : at + count], atol=1e-5)
        past += count


def test_served_texts_behind_shared_prefixes(
    runner: Runner, original: transformers.PreTrainedModel, checkpoint: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    shared = tuple(random_text(3 * BLOCK, 5).tolist())
    prompts = [
        *(shared + tuple(random_text(length, length).tolist()) for length in (5, 33, 1, 60)),
        *(tuple(random_text(length, length).tolist()) for length in (3, 71)),
    ]
    block = runner.session.allocate(1, BLOCK).size_bytes
    options = EngineOptions(step_tokens=2 * CHUNK, prefix_cache_bytes=20 * block)
    cache = runner.session.allocate(4, CONTEXT)
    for buffer in cache.buffers.values():
        buffer[...] = 5.0
    scheduler = SlotScheduler(runner.session, cache, runner.samplers, options, chunk=CHUNK)
    answers = [Received() for _ in prompts]
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        scheduler.add(Request(prompt, Sampling(max_tokens=12, ignore_eos=True)), answer.receive)
        for _ in range(number % 3):
            scheduler.step()
    while scheduler.step():
        pass
    assert scheduler.stats().prefix_hit_tokens >= 2 * BLOCK
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            wanted = original.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12, do_sample=False
            )
        tokens = wanted[0, len(prompt) :].tolist()
        assert answer.tokens == tokens
        assert answer.text == tokenizer.decode(tokens, skip_special_tokens=True)
