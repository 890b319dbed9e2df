"""Merged adapters beside peft's `merge_and_unload`: `pip install --no-deps peft accelerate psutil`, apart from this.

pytest -m slow -s tests/checkpoint/test_peft.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.adapters import AdapterSource
from llmforge.trace.export import skeleton

from ..models.checkpoints import write_tokenizer

peft = pytest.importorskip("peft", reason="peft is not installed: pip install --no-deps peft accelerate psutil")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

IDS = torch.tensor([[5, 40, 77, 130, 9, 200, 3, 3, 111, 64, 31, 7]])
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: Mapping[str, Mapping[str, Any]] = {
    "lora": {"target_modules": LINEAR},
    "rslora": {"target_modules": LINEAR, "use_rslora": True},
    "patterns": {
        "target_modules": LINEAR,
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 16},
        "alpha_pattern": {"k_proj": 40, r"layers\.0\.self_attn\.v_proj": 3},
    },
    "dora": {"target_modules": LINEAR, "use_dora": True},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "biases": {"target_modules": ["q_proj", "up_proj"], "bias": "all"},
    "lora-bias": {"target_modules": ["q_proj", "up_proj"], "lora_bias": True},
    "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"]},
    "gpt2-dora": {"target_modules": ["c_attn", "c_proj"], "use_dora": True},
}


def base(folder: Path, case: str) -> Any:
    torch.manual_seed(0)
    if case.startswith("gpt2"):
        config: Any = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=264, n_positions=128)
    else:
        config = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=264, max_position_embeddings=128, tie_word_embeddings=False,
            attention_bias=True, mlp_bias=True,
        )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def trained(model: Any, folder: Path, seed: int, **settings: Any) -> None:
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **settings))
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            one = "magnitude" in name
            parameter.data = torch.rand_like(parameter) + 0.5 if one else 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(folder, safe_serialization=True)


def logits(model: Any) -> Any:
    with torch.inference_mode():
        return model.eval()(input_ids=IDS).logits.numpy()


@pytest.mark.parametrize("case", CASES)
def test_merged_logits_are_those_of_peft(tmp_path: Path, case: str) -> None:
    folder, adapter = tmp_path / "base", tmp_path / "adapter"
    plain = logits(base(folder, case))
    trained(base(folder, case), adapter, 1, **CASES[case])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = logits(peft.PeftModel.from_pretrained(model, adapter).merge_and_unload())
    ours = logits(skeleton.load(Checkpoint.open(folder, [AdapterSource("a", adapter)])))
    away = float(np.abs(ours - theirs).max())
    print(f"{case}: {away:.2g} from peft, {np.abs(plain - theirs).max():.2g} from the base")
    assert np.abs(plain - theirs).max() > 0.1
    assert away < 1e-5


def test_several_are_merged_as_peft_does(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    base(folder, "lora")
    for seed in (1, 2):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        trained(model, tmp_path / f"a{seed}", seed, target_modules=LINEAR)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "a1", adapter_name="a1")
    adapted.load_adapter(tmp_path / "a2", adapter_name="a2")
    adapted.add_weighted_adapter(["a1", "a2"], [0.75, 0.5], "both", combination_type="cat")
    adapted.set_adapter("both")
    theirs = logits(adapted.merge_and_unload())
    sources = [AdapterSource("a1", tmp_path / "a1", 0.75), AdapterSource("a2", tmp_path / "a2", 0.5)]
    ours = logits(skeleton.load(Checkpoint.open(folder, sources)))
    print(f"two: {np.abs(ours - theirs).max():.2g}")
    assert np.abs(ours - theirs).max() < 1e-5
