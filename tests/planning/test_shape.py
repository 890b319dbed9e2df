"""Shapes from configurations: exact against the parameters of the models that transformers builds."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llmforge.base.errors import CheckpointError, NotADecoder, UnsupportedError
from llmforge.planning import config, families
from llmforge.planning.families import Unsaid
from llmforge.planning.shape import Shape
from llmforge.trace.export.shape_summary import summarize

from ..models.shapes import LLAMA, PARAMETERS, PUBLIC
from ..models.zoo import BASE, LATENT, ZOO

EXPERTS = {**LATENT, "first_k_dense_replace": 1, "moe_intermediate_size": 48, "n_routed_experts": 8, "n_group": 2,
           "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 2}  # fmt: skip
# Beside the zoo: what its entries leave out.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2-experts": ("DeepseekV2Config", {**EXPERTS, "topk_method": "greedy"}),
    "deepseek-v3-experts": ("DeepseekV3Config", EXPERTS),
    "phi3": ("Phi3Config", {"sliding_window": 7}),
    "qwen3-biases-windows": (
        "Qwen3Config",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen2-moe-sparse": ("Qwen2MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                                            "shared_expert_intermediate_size": 96, "decoder_sparse_step": 2}),
}  # fmt: skip
ALL = {**ZOO, **MORE}
KNOWN = sorted(name for name, (kind, _) in ALL.items() if not kind.startswith(
    ("Glm", "GPTNeoX", "MiniCPM3", "Youtu", "Qwen3_5", "Qwen3Next", "Lfm2", "OlmoHybrid", "Phimoe", "GraniteMoe",
     "Gemma3n", "Bamba", "Jamba", "Nemotron", "KimiLinear")
))  # fmt: skip
WITH_A_STATE = {"qwen3-5", "lfm2", "olmo-hybrid", "qwen3-next", "bamba", "jamba", "nemotron-h", "kimi-linear"}


def configuration(name: str) -> Any:
    kind, own = ALL[name]
    return getattr(transformers, kind)(**{**BASE, **own})


def written(made: Any) -> dict[str, Any]:
    return {**made.to_dict(), "dtype": "float32"}


def parameters(made: Any) -> int:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    return sum(parameter.numel() for parameter in model.parameters())


def caches(shape: Shape) -> Iterator[tuple[int, int, int] | None]:
    for count, layer in shape.layers:
        found = layer.attention
        yield from [None if found is None else (found.kv_heads, found.key_dim, found.value_dim)] * count


@pytest.mark.parametrize("name", KNOWN)
def test_families_agree_with_transformers_and_with_the_frontend(name: str) -> None:
    made = configuration(name)
    shape = families.shape(name, written(made))
    assert shape.parameters == parameters(made)
    assert shape.tied is made.tie_word_embeddings
    found = summarize(made, shape.depth, BASE["max_position_embeddings"])
    cached = [sum(heads * dim for heads, dim in layer.caches.values()) for layer in found.layers]
    assert [attention.kv_elements() for count, attention in shape.attentions() for _ in range(count)] == cached
    if not any(attention.latent for _, attention in shape.attentions()):
        assert list(caches(shape)) == [(*layer.caches["key"], layer.caches["value"][1]) for layer in found.layers]
    flat = [layer for count, layer in shape.layers for _ in range(count)]
    for mine, theirs in zip(flat, found.layers, strict=True):
        assert (mine.matrices, mine.vectors) == (theirs.matrices, theirs.vectors)
        assert (mine.expert, mine.experts, mine.chosen) == (theirs.expert, theirs.experts, theirs.chosen)


@pytest.mark.parametrize("name", sorted(set(ZOO) - set(KNOWN)))
def test_what_no_family_knows_is_read_off_its_model(name: str, tmp_path: Path) -> None:
    made = configuration(name)
    with pytest.raises(Unsaid):
        families.shape(name, written(made))
    shape = config.of_model(name, made, tmp_path)
    assert shape.parameters == parameters(made)
    assert shape.depth == made.num_hidden_layers
    assert any(True for _ in shape.attentions())
    assert (shape.state_elements() > 0) is (name in WITH_A_STATE)


def test_recurrent_layers_have_a_state_and_no_cache(tmp_path: Path) -> None:
    shape = config.of_model("x", configuration("qwen3-5"), tmp_path)
    recurrent, attending = (layer for _, layer in shape.layers)
    assert recurrent.attention is None
    assert recurrent.state == 3 * 80 + 4 * 8 * 12
    assert attending.state == 0
    assert attending.attention is not None


def test_modules_of_two_layers_are_counted_once(tmp_path: Path) -> None:
    made = transformers.LongcatFlashConfig(
        vocab_size=64, hidden_size=32, ffn_hidden_size=48, num_layers=2, num_attention_heads=2, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, head_dim=8, expert_ffn_hidden_size=16,
        n_routed_experts=4, zero_expert_num=2, moe_topk=2,
    )  # fmt: skip
    shape = config.of_model("x", made, tmp_path)
    assert shape.depth == made.num_hidden_layers == 4
    assert shape.parameters == parameters(made)
    assert [attention.latent for count, attention in shape.attentions() for _ in range(count)] == [24] * 4


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_have_their_parameters(name: str) -> None:
    assert families.shape(name, PUBLIC[name]).parameters == PARAMETERS[name]


def test_active_parameters_are_those_of_the_chosen_experts() -> None:
    mixtral = families.shape("m", PUBLIC["mixtral-8x7b"])
    assert mixtral.active_parameters == 12_879_925_248  # "12.9B" (Jiang et al. 2024, Mixtral of Experts)
    qwen = families.shape("q", PUBLIC["qwen3-30b-a3b"])
    assert qwen.active_parameters == pytest.approx(3.35e9, rel=0.01)  # "3.3B" (model card)
    dense = families.shape("d", LLAMA)
    assert dense.active_parameters == dense.parameters


def test_windows_stand_where_the_configuration_puts_them() -> None:
    def windows(**changes: Any) -> list[int | None]:
        base = {**BASE, **changes, "dtype": "float32", "use_sliding_window": True, "sliding_window": 7}
        shape = families.shape("w", base)
        return [attention.window for count, attention in shape.attentions() for _ in range(count)]

    assert windows(model_type="mistral") == [7, 7]
    assert windows(model_type="qwen2", max_window_layers=1) == [None, 7]
    assert windows(model_type="gemma2", head_dim=16, num_hidden_layers=3) == [7, None, 7]
    gemma3 = {"model_type": "gemma3_text", "head_dim": 16, "num_hidden_layers": 4, "sliding_window_pattern": 2}
    assert windows(**gemma3) == [7, None, 7, None]
    assert windows(model_type="qwen2", layer_types=["full_attention", "sliding_attention"]) == [None, 7]


def test_latent_attention_caches_its_latents_unless_keys_and_values_are_smaller() -> None:
    made = configuration("deepseek-v3")
    attention = next(each for _, each in families.shape("d", written(made)).attentions())
    assert (attention.heads, attention.kv_heads, attention.key_dim, attention.value_dim) == (4, 1, 24 + 8, 24)
    assert attention.latent == attention.kv_elements() == attention.kv_elements(ranks=2) == 24 + 8
    wide = families.shape("d", {**written(made), "kv_lora_rank": 200})  # keys and values: 4 heads of 24 + 12
    assert [(each.latent, each.kv_elements()) for _, each in wide.attentions()] == [(None, 4 * (24 + 12))]
    for caught in (made, configuration("minicpm3")):
        built = config.of_model("d", caught, Path("d"))
        assert {(each.latent, each.key_dim, each.value_dim) for _, each in built.attentions()} == {(32, 32, 24)}


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "unheard-of"},
        {"hidden_size": None},
        {"num_hidden_layers": "32"},
        {"torch_dtype": "float64"},
        {"attention_bias": "yes"},
        {"model_type": "mistral"},  # says nothing of its window
        {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64, "layer_types": 3},
    ],
)
def test_nothing_is_guessed(change: dict[str, Any]) -> None:
    with pytest.raises(Unsaid):
        families.shape("x", {**LLAMA, **change})


def test_a_folder_with_config_json_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    shape = config.read(tmp_path)
    assert shape == config.read(tmp_path / "config.json")
    assert shape.name == tmp_path.name
    assert shape.parameters == PARAMETERS["llama-2-7b"]


def test_a_folder_of_another_architecture_goes_through_the_frontend(tmp_path: Path) -> None:
    made = configuration("glm")
    made.save_pretrained(tmp_path)
    shape = config.read(tmp_path)
    assert shape.architecture == "glm"
    assert shape.parameters == parameters(made)


def test_bad_folders_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        config.read(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        config.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        config.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": {"quant_method": "none"}}))
    with pytest.raises(UnsupportedError, match="already quantized"):
        config.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "auto_map": {"AutoModel": "code.py"}}))
    with pytest.raises(CheckpointError, match="auto_map"):
        config.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises((NotADecoder, CheckpointError, UnsupportedError)):
        config.read(tmp_path)
