"""Time a model with latent attention that caches latents beside one that caches keys and values.

    python benchmarks/latents.py [--threads N] [--rounds N] [--passes int4] [--case CONTEXT,TOKENS,BATCH …]

The model has random weights and the sizes of DeepSeek-V2-Lite's attention: 16 heads, latents of 512 channels, keys of
128 and 64 with rotary embedding, values of 128; 4 layers of 1024 features, each with a dense MLP of 2816. Forms take
turns, step by step; a time is the median, and the fastest is beside it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers

from llmforge import targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder as engine
from llmforge.backends.onnxruntime.session import Session
from llmforge.checkpoint import Checkpoint
from llmforge.passes import CpuKernels, FuseNorms, PackGateUp, PackQkv, QuantizeWeights
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Budget, Context, Pass
from llmforge.runtime.config import DATA_FILE, FILE, MODEL_FILE, RuntimeConfig
from llmforge.runtime.interface import StepInputs
from llmforge.trace import trace
from llmforge.trace.hooks.attention import AttentionHook

CASES = ("32,1,1", "2048,1,1", "2048,1,4", "0,512,1", "1536,512,1")
LONGEST, PIECE = 4096, 512
SAMPLE = Path(__file__).parents[1] / "tests" / "data" / "docs-llama-7m"  # of which the tokenizer is taken
BUDGET = Budget(kld_mean=5)
FUSED: tuple[Pass, ...] = (FuseNorms(), PackQkv(), PackGateUp())
INT4: tuple[Pass, ...] = (QuantizeWeights(BUDGET, method="rtn", block_size=32),)


def write(folder: Path) -> None:
    """Write the checkpoint."""
    config = transformers.DeepseekV3Config(
        vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, first_k_dense_replace=4, max_position_embeddings=LONGEST, bos_token_id=0, eos_token_id=0,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "original_max_position_embeddings": 1024},
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    shutil.copy(SAMPLE / "tokenizer.json", folder)


def build(checkpoint: Path, folder: Path, *, latents: bool, passes: tuple[Pass, ...]) -> Path:
    """Build an engine of the checkpoint that caches latents, or keys and values."""
    target = targets.local()
    with mock.patch.object(AttentionHook, "latent", latents):
        model = trace(Checkpoint.open(checkpoint))
    for step in passes:
        step.run(model, Context(target))
    lowered, _ = engine.lower(model, target)
    engine.build(BuildRequest(lowered, folder, EngineSpec(max_context=LONGEST, max_batch=4), target, [0], 0))
    return folder


def stepper(session: Session, context: int, tokens: int, batch: int) -> Callable[[], float]:
    """Make what runs one step of `tokens` behind `context` in `batch` rows, and times it, in ms."""
    cache, rng = session.allocate(batch, context + tokens), np.random.default_rng(0)
    for start in range(0, context, PIECE):
        piece = rng.integers(0, session.vocabulary, (batch, min(PIECE, context - start)), np.int64)
        session.step(StepInputs(piece, np.full(batch, start, np.int32)), cache)
    ids, past = rng.integers(0, session.vocabulary, (batch, tokens), np.int64), np.full(batch, context, np.int32)
    out = np.empty((batch, 1, session.vocabulary), np.float32)

    def step() -> float:
        began = time.perf_counter()
        session.step(StepInputs(ids, past), cache, out=out)
        return (time.perf_counter() - began) * 1e3

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--passes", choices=("fp32", "int4"), default="fp32")
    parser.add_argument("--case", action="append", metavar="CONTEXT,TOKENS,BATCH", help=f"default: {' '.join(CASES)}")
    parser.add_argument("--engines", type=Path, help="where engines are kept, and found by the next run")
    args = parser.parse_args()
    quantized = INT4 if args.passes == "int4" else ()
    kernels = (CpuKernels(BUDGET),)
    forms = {
        "keys and values": (False, (*FUSED, *quantized, *(kernels if quantized else ()))),
        "latents, standard operators": (True, (*FUSED, *quantized)),
        "latents, CPU kernels": (True, (*FUSED, *quantized, *kernels)),
    }
    with tempfile.TemporaryDirectory() as kept:
        folder = args.engines or Path(kept)
        folders = {name: folder / f"{args.passes} {name}" for name in forms}
        if not (folder / "checkpoint").exists():
            write(folder / "checkpoint")
        for name, (latents, passes) in forms.items():
            if not (folders[name] / FILE).exists():
                build(folder / "checkpoint", folders[name], latents=latents, passes=passes)
        sessions = {}
        for name, each in folders.items():
            config = RuntimeConfig.read(each / FILE)
            token = sum(cache.kv_heads * cache.head_dim * np.dtype(cache.dtype).itemsize for cache in config.caches)
            size = (each / DATA_FILE).stat().st_size
            print(f"{name}: {token:,} bytes of cache a token, {size / 1e6:.1f} MB of weights")
            sessions[name] = Session(each / MODEL_FILE, config.session.resolve(args.threads))
        for text in args.case or CASES:
            context, tokens, batch = (int(part) for part in text.split(","))
            steps = {name: stepper(session, context, tokens, batch) for name, session in sessions.items()}
            times: dict[str, list[float]] = {name: [] for name in steps}
            for turn in range(2 + (args.rounds if tokens == 1 else max(3, args.rounds // 5))):
                for name, step in steps.items():
                    taken = step()
                    if turn >= 2:
                        times[name].append(taken)
            print(f"\ncontext {context}, tokens {tokens}, batch {batch}: ms a step, median and least")
            for name, each in times.items():
                print(f"  {name:28} {statistics.median(each):9.2f} {min(each):9.2f}")


if __name__ == "__main__":
    main()
