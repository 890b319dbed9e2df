"""A small published artifact: random weights, and the sample checkpoint's tokenizer and chat template."""

from __future__ import annotations

import shutil
from pathlib import Path

from llmforge import targets
from llmforge.artifact import Artifact, staging
from llmforge.engines import BuildRequest
from llmforge.engines import onnxruntime as engine
from llmforge.recipe import EngineSpec

from . import stored
from .decoder_graph import decoder

VOCABULARY = 8192
EOS = 5
SLOTS = 4
CONTEXT = 256


def publish_small(out: Path, checkpoint: Path, *, eos: tuple[int, ...] = (EOS,), context: int = CONTEXT) -> Artifact:
    """Publish the decoder of tests/decoder_graph.py as the artifact `small`, of 4 slots and 256 tokens of context."""
    with staging(out, "small") as folder:
        model, _ = engine.lower(decoder(VOCABULARY, context), targets.local())
        spec = EngineSpec(max_context=context, max_batch=SLOTS, threads=1)
        engine.build(BuildRequest(model, folder / "engine", spec, targets.local(), eos, 0))
        (folder / "tokenizer").mkdir()
        for name in ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json"):
            shutil.copy(checkpoint / name, folder / "tokenizer" / name)
        return stored.publish(folder, recipe={"name": "small"}, target="local", latency=None)
