"""Shapes of well-known architectures from their config.json, without transformers.

What a configuration leaves unsaid, and what no table here knows, is not guessed: `Unsaid` is raised, and the frontend
builds the model from the configuration instead (`llmforge.planning.config`). Tests hold every family here against the
parameters of the model that transformers builds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmforge.planning.shape import AttentionShape, LayerSizes, Shape, runs

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class Unsaid(Exception):
    """The configuration leaves open what a family's shape depends on, or there is no such family."""


@dataclass(frozen=True)
class Traits:
    """How a family differs from Llama, in parameters."""

    qkv_bias: bool | str = False  # True, False, or the key that says so (absent: no)
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    head_norms: bool = False  # a norm of each query and key head
    norms: int = 2  # a layer
    tied: bool = False  # where the configuration does not say
    wide_heads: bool = False  # head_dim is not hidden / heads unless it is said
    sinks: bool = False  # attention has one learned logit a head
    windows: Callable[[Config, int], int | None] | None = None  # window of a layer by its index
    experts: Callable[[Config, int], ExpertsShape | None] | None = None  # experts of a layer by its index


@dataclass(frozen=True)
class ExpertsShape:
    """Routed experts of one layer, and what every token passes besides."""

    count: int
    chosen: int
    width: int
    bias: bool = False  # of gate, up and down, and of the router
    shared_width: int = 0
    shared_gate: bool = False


@dataclass(frozen=True)
class Config:
    """The text part of a config.json; a key that is asked for and absent is `Unsaid`."""

    data: Mapping[str, Any]

    def size(self, key: str, otherwise: int | None = None) -> int:
        """Read a positive integer."""
        value = self.data.get(key, otherwise)
        if type(value) is not int or value < 1:
            raise Unsaid(key)
        return value

    def flag(self, key: bool | str, otherwise: bool = False) -> bool:
        """Read a switch, unless it is one already."""
        if isinstance(key, bool):
            return key
        value = self.data.get(key, otherwise)
        if not isinstance(value, bool):
            raise Unsaid(key)
        return value

    def optional(self, key: str) -> int | None:
        """Read a positive integer that may be null; absent is `Unsaid`."""
        if key not in self.data:
            raise Unsaid(key)
        return None if self.data[key] is None else self.size(key)


def shape(name: str, data: Mapping[str, Any]) -> Shape:
    """Read the shape of a decoder from its configuration.

    Raises:
        Unsaid: no family knows the architecture, or the configuration leaves something open.
    """
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise Unsaid(f"model_type {kind!r}")
    config, traits = Config(data), _FAMILIES[kind]
    hidden, vocabulary = config.size("hidden_size"), config.size("vocab_size")
    dtype = data.get("dtype", data.get("torch_dtype"))
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise Unsaid("dtype")
    tied = config.flag("tie_word_embeddings", traits.tied)
    attend = _latent if kind in _LATENT else _grouped
    depth = config.size("num_hidden_layers")
    layers = [_layer(config, traits, index, *attend(config, traits, index)) for index in range(depth)]
    return Shape(
        name=name,
        architecture=kind,
        layers=runs(layers),
        hidden=hidden,
        vocabulary=vocabulary,
        context=config.size("max_position_embeddings"),
        embedding=vocabulary * hidden,
        head=0 if tied else vocabulary * hidden,
        vectors=hidden,  # the last norm
        tied=tied,
        dtype=_DTYPES[dtype],
    )


def _layer(
    config: Config, traits: Traits, index: int, attention: AttentionShape, matrices: int, vectors: int
) -> LayerSizes:
    """Add the MLP or the experts, and the norms, to the parameters of attention."""
    hidden = config.size("hidden_size")
    vectors += traits.norms * hidden
    wide = attention.heads * attention.key_dim + attention.kv_elements()
    experts = traits.experts(config, index) if traits.experts is not None else None
    if experts is None:
        width = config.size("intermediate_size")
        bias = 2 * width + hidden if config.flag(traits.mlp_bias) else 0
        return LayerSizes(matrices + 3 * hidden * width, vectors + bias, max(wide, 2 * width), attention=attention)
    router = hidden * experts.count
    shared = 3 * hidden * experts.shared_width + (hidden if experts.shared_gate else 0)
    return LayerSizes(
        matrices=matrices + router + shared,
        vectors=vectors + (experts.count if experts.bias else 0),
        width=max(wide, 2 * experts.width * experts.chosen, 2 * experts.shared_width),
        expert=3 * hidden * experts.width + (2 * experts.width + hidden if experts.bias else 0),
        experts=experts.count,
        chosen=experts.chosen,
        attention=attention,
    )


def _grouped(config: Config, traits: Traits, index: int) -> tuple[AttentionShape, int, int]:
    """Return grouped-query attention, and the parameters of its matrices and vectors."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    written = config.data.get("head_dim")
    if written is None and (traits.wide_heads or hidden % heads):
        raise Unsaid("head_dim")
    dim = hidden // heads if written is None else config.size("head_dim")
    queries, keys = heads * dim, kv_heads * dim
    vectors = (queries + 2 * keys if config.flag(traits.qkv_bias) else 0) + (
        hidden if config.flag(traits.output_bias) else 0
    )
    vectors += (2 * dim if traits.head_norms else 0) + (heads if traits.sinks else 0)
    window = traits.windows(config, index) if traits.windows is not None else None
    attention = AttentionShape(heads, kv_heads, dim, dim, window)
    return attention, hidden * (2 * queries + 2 * keys), vectors


def _latent(config: Config, traits: Traits, index: int) -> tuple[AttentionShape, int, int]:
    """Return multi-head latent attention (DeepSeek-V2, section 2.1); its latents are cached where that is less."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    latent, rope = config.size("kv_lora_rank"), config.size("qk_rope_head_dim")
    nope, value = config.size("qk_nope_head_dim"), config.size("v_head_dim")
    ranked = config.optional("q_lora_rank")
    if config.flag("attention_bias"):
        raise Unsaid("attention_bias")
    queries = heads * (nope + rope)
    into = hidden * queries if ranked is None else hidden * ranked + ranked * queries
    matrices = into + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    vectors = latent + (ranked or 0)
    expanded = AttentionShape(heads, heads, nope + rope, value)
    if latent + rope < expanded.kv_elements():
        return AttentionShape(heads, 1, latent + rope, latent, latent=latent + rope), matrices, vectors
    return expanded, matrices, vectors


def _everywhere(config: Config, index: int) -> int | None:
    return config.optional("sliding_window")


def _if_said(config: Config, index: int) -> int | None:
    return config.optional("sliding_window") if "sliding_window" in config.data else None


def _by_type(config: Config, index: int) -> int | None:
    """Find the window of a layer in `layer_types`; they must be there."""
    types = config.data.get("layer_types")
    if not isinstance(types, list) or len(types) != config.size("num_hidden_layers"):
        raise Unsaid("layer_types")
    if types[index] not in ("sliding_attention", "full_attention"):
        raise Unsaid(f"layer type {types[index]!r}")
    return config.size("sliding_window") if types[index] == "sliding_attention" else None


def _qwen2_windows(config: Config, index: int) -> int | None:
    if not config.flag("use_sliding_window"):
        return None
    if "layer_types" in config.data:
        return _by_type(config, index)
    return None if index < config.size("max_window_layers") else config.size("sliding_window")


def _alternating(config: Config, index: int) -> int | None:
    """Gemma 2: windows in every other layer, the first of them."""
    if "layer_types" in config.data:
        return _by_type(config, index)
    return config.size("sliding_window") if index % 2 == 0 else None


def _gemma3_windows(config: Config, index: int) -> int | None:
    if "layer_types" in config.data:
        return _by_type(config, index)
    return config.size("sliding_window") if (index + 1) % config.size("sliding_window_pattern") else None


def _mixtral(config: Config, index: int) -> ExpertsShape:
    return ExpertsShape(
        config.size("num_local_experts"), config.size("num_experts_per_tok"), config.size("intermediate_size")
    )


def _gpt_oss(config: Config, index: int) -> ExpertsShape:
    return replace(_mixtral(config, index), bias=True)


def _qwen_moe(config: Config, index: int) -> ExpertsShape | None:
    """Experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""
    dense = config.data.get("mlp_only_layers")
    if not isinstance(dense, list):
        raise Unsaid("mlp_only_layers")
    if index in dense or (index + 1) % config.size("decoder_sparse_step"):
        return None
    shared = config.data["model_type"] == "qwen2_moe"
    return ExpertsShape(
        config.size("num_experts" if "num_experts" in config.data else "num_local_experts"),
        config.size("num_experts_per_tok"),
        config.size("moe_intermediate_size"),
        shared_width=config.size("shared_expert_intermediate_size") if shared else 0,
        shared_gate=shared,
    )


def _deepseek(config: Config, index: int) -> ExpertsShape | None:
    """Dense layers first, then experts and shared ones, which are one wider MLP."""
    first = config.data.get("first_k_dense_replace")
    if type(first) is not int:
        raise Unsaid("first_k_dense_replace")
    if index < first:
        return None
    width = config.size("moe_intermediate_size")
    return ExpertsShape(
        config.size("n_routed_experts"),
        config.size("num_experts_per_tok"),
        width,
        shared_width=width * config.size("n_shared_experts"),
    )


_LATENT = frozenset({"deepseek_v2", "deepseek_v3"})
_FAMILIES: Mapping[str, Traits] = {
    "llama": Traits(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Traits(windows=_everywhere),
    "phi3": Traits(windows=_everywhere),
    "mixtral": Traits(windows=_if_said, experts=_mixtral),
    "qwen2": Traits(qkv_bias=True, windows=_qwen2_windows),
    "qwen2_moe": Traits(qkv_bias=True, windows=_qwen2_windows, experts=_qwen_moe),
    "qwen3": Traits("attention_bias", "attention_bias", head_norms=True, wide_heads=True, windows=_qwen2_windows),
    "qwen3_moe": Traits(
        "attention_bias", "attention_bias", head_norms=True, wide_heads=True, windows=_qwen2_windows, experts=_qwen_moe
    ),
    "smollm3": Traits("attention_bias", "attention_bias", "mlp_bias", tied=True, windows=_qwen2_windows),
    "gemma2": Traits("attention_bias", "attention_bias", norms=4, tied=True, wide_heads=True, windows=_alternating),
    "gemma3_text": Traits(
        "attention_bias",
        "attention_bias",
        head_norms=True,
        norms=4,
        tied=True,
        wide_heads=True,
        windows=_gemma3_windows,
    ),
    "gpt_oss": Traits(True, True, wide_heads=True, sinks=True, windows=_by_type, experts=_gpt_oss),
    "deepseek_v2": Traits(experts=_deepseek),
    "deepseek_v3": Traits(experts=_deepseek),
}
