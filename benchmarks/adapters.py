"""What adapters that are kept apart cost: time of a decode step and of a prefill, with and without them.

    python benchmarks/adapters.py [--hidden 1024] [--layers 8] [--rank 16] [--adapters 3] [--steps 60]

One model of random weights, built three times: plain, int4 with the CPU kernels of llmforge, and each of these with
adapters of every linear layer. Steps of all variants take turns; printed are medians in ms, and by how much more a step
takes than without adapters.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from llmforge import targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder as engine
from llmforge.backends.onnxruntime.session import Session
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.adapters import Adapter, AdapterSource
from llmforge.passes.add_adapters import AddAdapters
from llmforge.passes.cpu_kernels import CpuKernels
from llmforge.passes.flash_attention import FlashAttention
from llmforge.passes.fuse_norms import FuseNorms
from llmforge.passes.pack_gate_up import PackGateUp
from llmforge.passes.pack_qkv import PackQkv
from llmforge.passes.quantize_weights import QuantizeWeights
from llmforge.recipe import EngineSpec
from llmforge.rewrite import options
from llmforge.rewrite.pass_base import Context, Pass
from llmforge.runtime.config import RuntimeConfig
from llmforge.runtime.interface import StepInputs
from llmforge.trace import trace
from tests.models.adapters import write_adapter
from tests.models.checkpoints import write_checkpoint

BATCH, CONTEXT, PAST, PROMPT = 8, 512, 64, 128
LOOSE = {"budget": {"kld_mean": 100.0}}


def build(checkpoint: Checkpoint, folder: Path, steps: Sequence[Pass], adapters: Sequence[Adapter]) -> Session:
    target = targets.local()
    model = trace(checkpoint)
    for step in steps:
        step.run(model, Context(target, adapters=adapters))
    lowered, _ = engine.lower(model, target)
    spec = EngineSpec(max_context=CONTEXT, max_batch=BATCH, threads=1)
    engine.build(BuildRequest(lowered, folder, spec, target, (0,), 0))
    config = RuntimeConfig.read(folder / "runtime.json")
    print(f"{folder.name}: {(folder / 'model.onnx.data').stat().st_size / 1e6:.0f} MB", file=sys.stderr)
    return Session(folder / "model.onnx", config.session.resolve(1), own_kernels=config.kernels is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (("hidden", 1024), ("layers", 8), ("rank", 16), ("adapters", 3), ("steps", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        sizes = {"hidden_size": asked.hidden, "intermediate_size": 3 * asked.hidden, "num_hidden_layers": asked.layers}
        heads = {"num_attention_heads": asked.hidden // 64, "num_key_value_heads": asked.hidden // 128, "head_dim": 64}
        more: dict[str, Any] = {"max_position_embeddings": CONTEXT, "tie_word_embeddings": False, "vocab_size": 8192}
        write_checkpoint(folder / "model", dtype="bfloat16", **sizes, **heads, **more)
        checkpoint = Checkpoint.open(folder / "model")
        adapters = [
            Adapter.open(AdapterSource(f"a{seed}", write_adapter(folder / f"a{seed}", folder / "model", seed=seed,
                                                                 rank=asked.rank)))
            for seed in range(asked.adapters)
        ]  # fmt: skip
        fused: list[Pass] = [FuseNorms(), PackQkv(), PackGateUp(), FlashAttention()]
        quantized = [
            options.make(QuantizeWeights, {"bits": 4, "method": "rtn", "block_size": 32, **LOOSE}),
            options.make(CpuKernels, LOOSE),
        ]
        sessions = {
            "fp32": (build(checkpoint, folder / "fp32", fused, []), None),
            "fp32+": (build(checkpoint, folder / "fp32+", [*fused, AddAdapters()], adapters), adapters),
            "int4": (build(checkpoint, folder / "int4", [*fused, *quantized], []), None),
            "int4+": (build(checkpoint, folder / "int4+", [*fused, AddAdapters(), *quantized], adapters), adapters),
        }
        for batch, tokens in ((1, 1), (4, 1), (8, 1), (1, PROMPT)):
            kinds = {}
            for name, (session, own) in sessions.items():
                ids = {"": np.zeros(batch, np.int64)}
                if own is not None:
                    ids = {" none": ids[""], " one": np.ones(batch, np.int64)}
                    ids[" mixed"] = np.arange(batch) % (len(own) + 1)
                kinds |= {f"{name}{which}": (session, session.allocate(batch, CONTEXT), x) for which, x in ids.items()}
            times: dict[str, list[float]] = {name: [] for name in kinds}
            past = np.full(batch, PAST if tokens == 1 else 0, np.int32)
            steps = asked.steps if tokens == 1 else max(3, asked.steps // 10)
            for turn in range(steps + 2):
                for name, (session, cache, chosen) in kinds.items():
                    began = time.perf_counter()
                    session.step(StepInputs(np.full((batch, tokens), 5, np.int64), past, adapters=chosen), cache)
                    if turn > 1:
                        times[name].append((time.perf_counter() - began) * 1e3)
            found = {name: statistics.median(each) for name, each in times.items()}
            least = {name: min(each) for name, each in times.items()}
            print(f"{batch} rows of {tokens} tokens")
            for name, ms in found.items():
                base = name.partition("+")[0]
                print(f"  {name:12} {ms:8.2f} ms, least {least[name]:8.2f}  {100 * (ms / found[base] - 1):+6.1f} %  "
                      f"{100 * (least[name] / least[base] - 1):+6.1f} %")  # fmt: skip


if __name__ == "__main__":
    main()
