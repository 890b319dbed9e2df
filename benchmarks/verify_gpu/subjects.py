"""Engines for the device that is verified, and what stands beside them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from llmforge import passes, targets
from llmforge.backends import engines
from llmforge.backends.onnxruntime.builder import write_tokenizer
from llmforge.backends.onnxruntime.session import Session
from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph
from llmforge.ir.operators import canonical
from llmforge.measure import footprint
from llmforge.parallel.split import split
from llmforge.passes.flash_attention import FlashAttention
from llmforge.passes.fuse_experts import FuseExperts
from llmforge.passes.fuse_norms import FuseNorms
from llmforge.passes.pack_gate_up import PackGateUp
from llmforge.passes.pack_qkv import PackQkv
from llmforge.quantization.statistics import KvRange, Statistics
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Budget, Context, Pass
from llmforge.runtime.config import FILE, MODEL_FILE, RuntimeConfig
from llmforge.trace import trace

SAMPLE = Path("tests/data/docs-llama-7m")
ANY_COST = Budget(kld_mean=1e9)  # weights are random: what precision costs is measured on real ones
FACTS = "facts.json"
KV_PEAK = 8.0


def steps(precision: str, backend: str) -> list[Pass]:
    """Choose the passes that make a graph compute in `precision`; codes of weights and caches with fp16 activations."""
    if backend != "onnxruntime":  # which takes the canonical graph as it is
        return []
    made: list[Pass] = [FuseNorms(), PackQkv(), PackGateUp(), FlashAttention()]
    if precision in ("int8", "int4"):
        bits = int(precision.removeprefix("int"))
        options = {"block_size": 32, "symmetric": True, "method": "rtn", "embedding_bits": 16}
        made.append(passes.QuantizeWeights(budget=ANY_COST, bits=bits, **options))
    if precision == "int8-kv":
        made.append(passes.QuantizeKvCache(budget=ANY_COST))
    made.append(FuseExperts())
    return made


def _ranges(model: ir.Model) -> Statistics:
    """Say of every cache that its values lie within `KV_PEAK`: weights are random, and so are keys and values."""
    layers = {
        layer: KvRange(
            *(np.full(graph.static(each)[1::2], KV_PEAK, np.float32) for each in (of.past_key, of.past_value))
        )
        for layer, of in enumerate(canonical.Attention.all(model))
    }
    return Statistics(0, 0, {}, layers)


@dataclasses.dataclass(frozen=True)
class Lowered:
    """What an engine is built of, and what is known of it before."""

    request: engines.BuildRequest
    opened: Checkpoint
    facts: Mapping[str, Any]


def lowered(
    checkpoint: Path,
    folder: Path,
    precision: str,
    chosen: targets.Target,
    *,
    max_batch: int,
    max_context: int,
    backend: str = "onnxruntime",
    ranks: int = 1,
    kv_cache: str | None = None,
) -> Lowered:
    """Lower `checkpoint` to an engine in `folder`, or to one of several ranks."""
    opened = Checkpoint.open(checkpoint)
    model = trace(opened)
    made = steps(precision, backend)
    if chosen.kind == "gpu" and precision != "fp32":
        dtype = "bf16" if precision == "bf16" else "fp16"
        made.append(passes.LowerPrecision(budget=ANY_COST, dtype=dtype))
    ranges = _ranges(model) if precision == "int8-kv" else None
    for step in made:
        step.run(model, Context(chosen) if ranges is None else Context(chosen, statistics=ranges))
    # What cannot be recorded is part of the evidence, and keeps nothing from being measured.
    sizes = {"max_context": max_context, "max_batch": max_batch, "tensor_parallel": ranks}
    spec = EngineSpec(backend=backend, cuda_graphs="allow", kv_cache=kv_cache, **sizes)
    builder = engines.for_target(spec.backend, chosen)
    graphs = [model] if ranks == 1 else split(model, ranks).ranks
    lowerings = [builder.lower(each, chosen, spec) for each in graphs]
    first, changes = lowerings[0]
    ends = opened.eos_token_ids, opened.bos_token_id
    several = [each for each, _ in lowerings] if ranks > 1 else []
    request = engines.BuildRequest(first, folder / "engine", spec, chosen, *ends, ranks=several)
    read = footprint.count(model)
    facts = {
        "weight_bytes_per_token": read.weights,
        "kv_bytes_per_token": read.kv,
        "notes": list(changes.notes),
        "slower": [f"{each.node}: {each.reason}" for each in changes.skipped],
    }
    return Lowered(request, opened, facts)


def build(checkpoint: Path, folder: Path, precision: str, chosen: targets.Target, **options: Any) -> dict[str, Any]:
    """Write the engine of `checkpoint` into `folder`, anew, or that of several ranks; return what is known of it.

    `options` are those of `lowered`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    made = lowered(checkpoint, folder, precision, chosen, **options)
    engine = engines.for_target(made.request.spec.backend, chosen).build(made.request)
    write_tokenizer(made.opened, folder / "tokenizer")
    facts = {
        "nodes": engine.nodes,
        "size_bytes": engine.size_bytes,
        **made.facts,
        "notes": [*made.facts["notes"], *engine.notes],
    }
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    return facts


def reference(checkpoint: Path, folder: Path, precision: str = "fp32") -> Session:
    """Open the checkpoint on this machine's CPU, which computes in fp32, with the codes that `precision` has."""
    codes = precision if precision.startswith("int") else "fp32"
    build(checkpoint, folder, codes, targets.local(), max_batch=1, max_context=128)
    config = RuntimeConfig.read(folder / "engine" / FILE)
    return Session(folder / "engine" / MODEL_FILE, dataclasses.replace(config.session.resolve(), optimize=False))


def shape_checkpoint(shape: Mapping[str, Any], folder: Path) -> None:
    """Write a Llama of random weights of a `shape`, bf16, with the sample's tokenizer, unless it is there."""
    if (folder / "config.json").exists():
        return
    import torch
    import transformers

    config = transformers.LlamaConfig(**shape, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    partial = folder.with_name(f"{folder.name}.partial")
    model.save_pretrained(partial)
    for path in SAMPLE.glob("*token*.json"):
        shutil.copy(path, partial / path.name)
    partial.rename(folder)
