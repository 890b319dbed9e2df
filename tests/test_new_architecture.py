"""What docs/new-architecture.md says: an architecture that differs in names alone costs no code."""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx_ir as ir
import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmforge import dialect, passes
from llmforge.checkpoint import Checkpoint
from llmforge.trace import trace
from llmforge.verify_trace import verify_trace

from . import graphs, zoo

TOLERANCE = 1e-5
# What transformers' source of Llama calls its parts, and what another author might.
OTHER_NAMES = {
    r"\bLlama(?=[A-Z])": "Drover",  # before what follows, which meets Drover
    r"\bllama\b": "drover",
    r"configuration_llama": "configuration_drover",
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
    """Rename what the source calls its parts; its imports of transformers become absolute."""
    source = re.sub(r"^from \.\.\.(\w*)", lambda m: f"from transformers{'.' * bool(m[1])}{m[1]}", source, flags=re.M)
    for pattern, name in OTHER_NAMES.items():
        source = re.sub(pattern, name, source)
    return source


@pytest.fixture
def drover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package with Llama under other names, registered with transformers as any library may do it."""
    package = tmp_path / "drover_models"
    package.mkdir()
    llama = Path(transformers.models.llama.__file__).parent
    (package / "__init__.py").write_text("")
    for kind in ("configuration", "modeling"):
        (package / f"{kind}_drover.py").write_text(renamed((llama / f"{kind}_llama.py").read_text()))
    monkeypatch.syspath_prepend(str(tmp_path))
    configuration = importlib.import_module("drover_models.configuration_drover")
    modeling = importlib.import_module("drover_models.modeling_drover")
    transformers.AutoConfig.register("drover", configuration.DroverConfig)
    transformers.AutoModelForCausalLM.register(configuration.DroverConfig, modeling.DroverForCausalLM)
    yield modeling
    CONFIG_MAPPING._extra_content.pop("drover")
    transformers.AutoModelForCausalLM._model_mapping._extra_content.pop(configuration.DroverConfig)
    for name in [name for name in sys.modules if name.startswith("drover_models")]:
        del sys.modules[name]


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
