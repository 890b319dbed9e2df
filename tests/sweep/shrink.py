"""Tiny configurations and checkpoints of every causal language model in transformers, by kind of field.

A configuration starts from its class's defaults. Each field that states a size gets a small one (`SIZES`), so that a
type that only differs in names needs no entry anywhere; `overrides` holds what the general rules cannot know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..models.checkpoints import write_tokenizer
from .overrides import LARGER, OVERRIDES, SMALL_QUERY_NORMS
from .shapes import Shape

TINY_SHAPE = Shape()
VOCABULARY = 320
POSITIONS = 128
WINDOW = 7  # shorter than every prompt, no multiple of anything
ORIGINAL_POSITIONS = 16  # of scaled rotary embedding: shorter than the long prompt
INDEXED = 72  # tokens that an indexer chooses: more than any text of the sweep has, and fewer than `POSITIONS`
LAYERS = 3
GAIN = 0.6  # standard deviation of a matrix's outputs for inputs of one
NOISE = 0.1  # added to norms, biases and sinks
SPREAD = 0.6  # standard deviation of logits

# field → size; a field counts where its default is a positive integer
SIZES: Mapping[str, int] = {
    name: size
    for size, names in (
        (VOCABULARY, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
        (
            POSITIONS,
            "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions "
            "model_max_length",
        ),
        (ORIGINAL_POSITIONS, "original_max_position_embeddings floor_scale log_scaling_n_floor"),
        (
            WINDOW,
            "sliding_window sliding_window_size local_attention attention_window_size window_size "
            "keep_window_size local_attention_window_len mem_len",
        ),
        (
            8,
            "attention_chunk_size mamba_chunk_size chunk_size block_size time_step_rank mamba_dt_rank "
            "qk_rope_head_dim qk_nope_head_dim rel_extent d_rel hidden_size_per_layer_input laurel_rank rotary_dim "
            "gated_norm_rank mamba_n_heads mamba_num_heads hc_lowrank",
        ),
        (
            64,
            "hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim dim_model_base "
            "lru_width input_embedding_size output_embedding_size ngram_vocab_size_base ple_embed_dim "
            "router_hidden_size",
        ),
        (
            96,
            "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim dim_ff dff d_inner ffn_hidden_size "
            "feed_forward_size dense_intermediate_size intermediate_size_mlp n_inner shared_intermediate_size "
            "prefix_dense_intermediate_size",
        ),
        (128, "mamba_d_ssm"),
        (
            48,
            "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
            "expert_ffn_hidden_size moe_shared_expert_intermediate_size",
        ),
        (
            4,
            "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
            "decoder_attention_heads swa_num_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
            "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads linear_num_heads",
        ),
        (
            2,
            "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_query_groups "
            "n_groups num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts "
            "linear_num_key_heads",
        ),
        (
            16,
            "head_dim d_head dim_head kv_channels swa_head_dim attention_head_size linear_key_head_dim "
            "linear_head_dim kv_lora_rank o_lora_rank mamba_d_state state_size ssm_state_size index_head_dim "
            "v_head_dim linear_value_head_dim index_n_heads mamba_d_head mamba_head_dim",
        ),
        (24, "q_lora_rank"),
        (INDEXED, "index_topk"),
        (
            LAYERS,
            "num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers encoder_layers "
            "num_encoder_layers num_decoder_layers encoder_layers depth",
        ),
    )
    for name in names.split()
}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "decoder_layers")
INDEX_LISTS = ("moe_layers", "full_attn_idxs", "mlp_only_layers")  # numbers of layers, not one entry a layer
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def types() -> list[str]:
    """Name every type that transformers maps to a causal language model."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config(model_type: str, shape: Shape = TINY_SHAPE, *, changes: Mapping[str, Any] | None = None) -> PretrainedConfig:
    """Make the configuration of `model_type` in `shape`; `changes` are further entries of it."""
    own = shape.changes({**OVERRIDES.get(model_type, {}), **(changes or {})})
    return shrunk(CONFIG_MAPPING[model_type], own | LARGER.get(model_type, {}).get(shape.name, {}), shape)


def shrunk(kind: type[PretrainedConfig], changes: Mapping[str, Any], shape: Shape = TINY_SHAPE) -> PretrainedConfig:
    """Make a small configuration of class `kind`; `changes` are entries of it, mappings those of one nested in it."""
    declared = {field.name: field.default for field in dataclasses.fields(kind)}
    default = vars(kind())
    nested = {name: value for name, value in default.items() if isinstance(value, PretrainedConfig)}
    flat = {name: value for name, value in changes.items() if name not in nested}
    own: dict[str, Any] = {name: SIZES[name] for name in declared if name in SIZES and _positive(declared[name])}
    own |= _attention(declared) | _experts(declared)
    own = {name: shape.scaled(name, value) for name, value in own.items()}
    if "kv_lora_rank" in declared and "num_key_value_heads" in own:  # every head has keys of its own
        own["num_key_value_heads"] = own["num_attention_heads"]
    own |= _per_layer(default, declared, flat, shape)
    own |= {name: SPECIAL_IDS.get(name, 3) for name in declared if name.endswith("_token_id") and default.get(name)}
    if default.get("rope_parameters"):
        own["rope_parameters"] = _rope(default["rope_parameters"], shape.scaled("head_dim", SIZES["head_dim"]))
    for name, value in nested.items():
        own[name] = shrunk(type(value), changes.get(name, {}), shape)
    return kind(**{**own, **flat})


SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _positive(value: object) -> bool:
    return type(value) is int and value > 0


def _per_layer(
    default: Mapping[str, Any], declared: Mapping[str, Any], changes: Mapping[str, Any], shape: Shape
) -> dict[str, Any]:
    """Keep so many layers that every kind of layer that the default configuration has occurs, in order."""
    counts = [name for name in LAYER_COUNTS if _positive(declared.get(name))]
    if not counts:
        return {}
    lists = {
        name: value
        for name, value in default.items()
        if name in declared and name not in changes and name not in INDEX_LISTS
        if isinstance(value, list) and len(value) == declared[counts[0]]
    }
    layers = range(declared[counts[0]])
    first: dict[tuple[str, ...], int] = {}
    for layer in layers:
        first.setdefault(tuple(str(value[layer]) for value in lists.values()), layer)
    spare = [layer for layer in layers if layer not in first.values()]
    kept = sorted([*first.values(), *spare[: max(0, LAYERS - len(first))]])
    return {
        **dict.fromkeys(counts, len(kept) * shape.layers),
        **{name: [value[layer] for layer in kept] * shape.layers for name, value in lists.items()},
    }


def _attention(declared: Mapping[str, Any]) -> dict[str, Any]:
    """Choose head sizes that keep what the defaults have: latent attention, heads wider than the hidden size."""
    own: dict[str, Any] = {}
    head = declared.get("head_dim")
    if "kv_lora_rank" in declared:  # latent attention: every head has keys of its own
        own["num_key_value_heads"] = SIZES["num_attention_heads"]
        if _positive(head) and head == declared.get("qk_rope_head_dim"):
            own["head_dim"] = SIZES["qk_rope_head_dim"]
        if _positive(declared.get("qk_head_dim")):
            own["qk_head_dim"] = SIZES["qk_rope_head_dim"] + SIZES["qk_nope_head_dim"]
    else:
        own["num_key_value_heads"] = SIZES["num_key_value_heads"]
        heads, hidden = declared.get("num_attention_heads"), declared.get("hidden_size")
        if _positive(head) and _positive(heads) and _positive(hidden) and heads * head != hidden:
            own["head_dim"] = 2 * SIZES["head_dim"]
    if "use_sliding_window" in declared and "max_window_layers" in declared:
        own |= {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "layer_types": None}
    return {name: value for name, value in own.items() if name in declared}


def _experts(declared: Mapping[str, Any]) -> dict[str, Any]:
    """Take twice the experts where they come in groups."""
    groups = next((name for name in ("n_group", "num_expert_group") if _positive(declared.get(name))), None)
    if groups is None or declared[groups] < 2:
        return {}
    return {groups: 2, "topk_group": 1, **{name: 8 for name in EXPERT_COUNTS if _positive(declared.get(name))}}


def _rope(parameters: Any, head_dim: int) -> Any:
    """Shrink rotary parameters, of the model or of each kind of layer."""
    if not isinstance(parameters, Mapping):
        return parameters
    result = {}
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            result[name] = _rope(value, head_dim)
        elif name in SIZES and _positive(value):
            result[name] = SIZES[name]
        elif name == "mrope_section":
            result[name] = _sections(value, head_dim)
        else:
            result[name] = value
    return result


def _sections(sections: Sequence[int], head_dim: int) -> list[int]:
    """Share half of a small head among axes of positions as `sections` share half of a large one."""
    half = head_dim // 2
    first = max(1, round(half * sections[0] / sum(sections)))
    second = max(1, round(half * sections[1] / sum(sections)))
    return [first, second, half - first - second]


def build(settings: PretrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """Make the model of `settings` in fp32: random weights, norms, biases and sinks that are not trivial.

    Its head is scaled until logits have a standard deviation of about `SPREAD`.
    """
    torch.manual_seed(seed)  # what the constructors draw
    settings = deepcopy(settings)  # some models change theirs
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        settings, dtype=torch.float32, attn_implementation="eager"
    )
    draw(model.eval(), seed=seed)
    with torch.no_grad():
        _scale_head(model)
    return model


def draw(model: PreTrainedModel, *, seed: int = 0) -> None:
    """Give a model random weights, norms, biases and sinks that are not trivial."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * GAIN / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(noise * NOISE)
            if model.config.model_type in SMALL_QUERY_NORMS and "q_norm" in name:
                parameter.mul_(0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("bias") and buffer.is_floating_point():  # of routers
                buffer.add_(torch.randn(buffer.shape, generator=generator) * NOISE)


def _scale_head(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None:
        return
    for _ in range(4):
        spread = float(model(torch.arange(3, 35)[None], use_cache=False).logits.std())
        if not 0.0 < spread < float("inf") or 0.8 < spread / SPREAD < 1.25:
            return
        weight.mul_(SPREAD / spread)
        if getattr(head, "bias", None) is not None:
            head.bias.mul_(SPREAD / spread)


def write(model_type: str, folder: Path, shape: Shape = TINY_SHAPE, *, seed: int = 0) -> None:
    """Write a checkpoint of `model_type` in `shape` into `folder`, as transformers saves it, with a byte tokenizer."""
    settings = config(model_type, shape)
    model = build(settings, seed=seed)
    model.save_pretrained(folder)
    settings.architectures = [type(model).__name__]
    settings.save_pretrained(folder)  # as its owner publishes it: some models write themselves down as decoders
    write_tokenizer(folder)
