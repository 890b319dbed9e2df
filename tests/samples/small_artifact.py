"""A small published artifact: random weights, and the sample checkpoint's tokenizer and chat template."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from llmforge import targets
from llmforge.artifact import Artifact, staging
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder as engine
from llmforge.checkpoint.adapters import Adapter, AdapterSource
from llmforge.ir.graph import set_sources, static
from llmforge.passes.add_adapters import AddAdapters
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Context

from ..models.adapters import PREFIX, write_adapter
from ..models.decoder_graph import decoder
from . import stored

VOCABULARY = 8192
EOS = 5
SLOTS = 4
CONTEXT = 256


def publish_small(
    out: Path,
    checkpoint: Path,
    *,
    eos: tuple[int, ...] = (EOS,),
    context: int = CONTEXT,
    adapters: Sequence[str] = (),
    finish: Callable[[Path], None] | None = None,
) -> Artifact:
    """Publish the decoder of tests/models/decoder_graph.py as the artifact `small`: 4 slots, 256 tokens of context.

    `adapters` are names; each has random matrices of its own. `finish` adds to the folder before it is sealed.
    """
    with staging(out, "small") as folder:
        graph = decoder(VOCABULARY, context)
        if adapters:
            add_adapters(graph, out, checkpoint, adapters)
        model, _ = engine.lower(graph, targets.local())
        spec = EngineSpec(max_context=context, max_batch=SLOTS, threads=1)
        engine.build(BuildRequest(model, folder / "engine", spec, targets.local(), eos, 0))
        (folder / "tokenizer").mkdir()
        for name in ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json"):
            shutil.copy(checkpoint / name, folder / "tokenizer" / name)
        if finish is not None:
            finish(folder)
        return stored.publish(folder, recipe={"name": "small"}, target="local", latency=None)


def add_adapters(model: ir.Model, out: Path, checkpoint: Path, names: Sequence[str]) -> None:
    """Add adapters of the packed projections to the decoder of tests/models/decoder_graph.py."""
    opened = []
    for seed, name in enumerate(names):
        rng, more = np.random.default_rng(seed), {}
        for layer in range(2):
            value = model.graph.initializers[f"qkv.{layer}"]
            set_sources(value, [f"qkv.{layer}.weight"])
            k, n = static(value)
            more[f"{PREFIX}qkv.{layer}.lora_A.weight"] = rng.standard_normal((4, k)).astype(np.float32)
            more[f"{PREFIX}qkv.{layer}.lora_B.weight"] = rng.standard_normal((n, 4)).astype(np.float32)
        folder = write_adapter(out / f".adapter-{name}", checkpoint, targets=(), more=more)
        opened.append(Adapter.open(AdapterSource(name, folder)))
    assert AddAdapters().run(model, Context(targets.local(), adapters=opened))
