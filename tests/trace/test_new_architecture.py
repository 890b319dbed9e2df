"""What docs/new-architecture.md says: an architecture that differs in names alone costs no code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx_ir as ir
import pytest

from llmforge import passes
from llmforge.checkpoint import Checkpoint
from llmforge.ir import dialect
from llmforge.trace import trace
from llmforge.verification.trace_verifier import verify_trace

from ..models import edited_llama, graphs, zoo

TOLERANCE = 1e-5
# What transformers' source of Llama calls its parts, and what another author might.
OTHER_NAMES = {
    r"\bDroverRMSNorm\b": "DroverLeveller",
    r"\bDroverAttention\b": "DroverMixer",
    r"\bDroverDecoderLayer\b": "DroverStage",
    r"\bself_attn\b": "mixer",
    r"\bmlp\b": "feed",
    r"\b([qkvo])_proj\b": r"to_\1",
    r"\bgate_proj\b": "valve",
    r"\bup_proj\b": "widen",
    r"\bdown_proj\b": "narrow",
    r"\binput_layernorm\b": "level_before",
    r"\bpost_attention_layernorm\b": "level_between",
    r"\bembed_tokens\b": "dictionary",
    r'base_model_prefix = "model"': 'base_model_prefix = "model"\n    _input_embed_layer = "dictionary"',
    r"\blayers\b(?!_)": "stages",
    r"\bapply_rotary_pos_emb\b": "apply_rotary_to_heads",
}


def renamed(source: str) -> str:
    """Rename what the source calls its parts."""
    for pattern, name in OTHER_NAMES.items():
        source = re.sub(pattern, name, source)
    return source


@pytest.fixture
def drover(tmp_path: Path) -> Iterator[ModuleType]:
    """Llama of which no part is called what transformers calls it."""
    with edited_llama.registered(tmp_path, renamed) as modeling:
        yield modeling


def operators(model: ir.Model) -> Counter[str]:
    return Counter(f"{node.domain}::{node.op_type}" for node in model.graph)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_llama_under_other_names_is_traced_like_llama(drover: Any, tmp_path: Path) -> None:
    config = drover.DroverConfig(**{**zoo.BASE, "rope_parameters": zoo.LLAMA3})
    zoo.save(config, tmp_path / "drover")
    zoo.write("llama", tmp_path / "llama", rope_parameters=zoo.LLAMA3)
    checkpoint = Checkpoint.open(tmp_path / "drover")
    names = " ".join(checkpoint.tensors)
    assert "stages.1.mixer.to_q.weight" in names
    assert not re.search(r"layers|self_attn|_proj|layernorm", names)
    model = trace(checkpoint)
    like = trace(Checkpoint.open(tmp_path / "llama"))
    assert operators(model) == operators(like)
    assert verify_trace(checkpoint, model).layers == 2
    expected = zoo.reference(tmp_path / "drover")
    for schedule in zoo.SCHEDULES.values():
        assert zoo.largest_difference(dialect.expand(model), expected, schedule) <= TOLERANCE
    for kind in (passes.FuseNorms, passes.PackQkv, passes.PackGateUp, passes.FlashAttention):
        assert kind().run(model, graphs.CPU)
        assert kind().run(like, graphs.CPU)
    assert operators(model) == operators(like)
    assert operators(model)["com.microsoft::GroupQueryAttention"] == 2
