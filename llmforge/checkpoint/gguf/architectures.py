"""Architectures of GGUF: the configuration of each and its tensors by the names of transformers.

Only what is listed here is taken: a key of an architecture that is not known may change what the model computes, and
so may a tensor. Sources: `convert_hf_to_gguf.py` and `gguf-py/gguf/tensor_mapping.py` of llama.cpp; transformers'
`integrations/ggml.py`, against which a test holds the keys.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.base.wording import quoted, shown
from llmforge.checkpoint.gguf.blocks import dequantize
from llmforge.checkpoint.gguf.header import Header
from llmforge.checkpoint.gguf.shapes import require_whole
from llmforge.checkpoint.safetensors_file import DAMAGED, open_regular

_HINT = "take the model's original checkpoint"
_LAYER = re.compile(r"^blk\.(\d{1,5})\.(.+)$")
# Tensors of every decoder here; those of a layer stand behind `blk.N.`, and become parts of `model.layers.N.`.
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_GEMMA = {
    **_ATTENTION,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
# Keys behind the architecture's name: sizes that every decoder here states.
_SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
}
_READ = {
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "feed_forward_length", "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "vocab_size",
}  # fmt: skip
_WITHOUT_EFFECT = {"rope.scaling.finetuned", "tensor_data_layout", "attention.causal"}
_FREQUENCIES = "rope_freqs.weight"  # by which a table of rotary frequencies is divided
_DEFAULT_THETA = 10000.0
# (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings) of Llama 3.1 and 3.2
_LLAMA3 = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))


@dataclass(frozen=True)
class ParameterTarget:
    """The parameter that a tensor of a file becomes, or of stacked experts the one of each."""

    name: str  # with `{}` where an expert's number stands
    stacked: bool = False
    heads: int | None = None  # rows are to be put back in the order of halves, head by head
    minus_one: bool = False  # the file holds 1 + weight


@dataclass(frozen=True)
class GgufArchitecture:
    """One architecture of GGUF."""

    model_type: str
    model_class: str
    parts: Mapping[str, str]  # of a layer
    keys: frozenset[str] = frozenset()  # read beside those of every decoder
    extra: Callable[[Metadata, dict[str, Any]], dict[str, Any]] = field(default=lambda metadata, settings: {})
    interleaved: bool = False  # llama.cpp turns neighbours, transformers halves: rows of q and k are in another order
    zero_centred: bool = False  # norms hold weights that are added to 1


class Metadata:
    """The keys of a file that stand behind its architecture's name."""

    def __init__(self, header: Header) -> None:
        self.header, self._prefix = header, f"{header.architecture}."

    def names(self) -> list[str]:
        """List them, without that name."""
        return [key.removeprefix(self._prefix) for key in self.header.metadata if key.startswith(self._prefix)]

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number that is more than 0.

        Raises:
            CheckpointError: there is none, and no default.
            UnsupportedError: layers differ in it.
        """
        value = self.header.metadata.get(self._prefix + name, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if isinstance(value, list):
            raise UnsupportedError(
                f"{self.header.file}: {quoted(self._prefix + name)} differs from layer to layer", hint=_HINT
            )
        if type(value) is not int or value < 1:
            raise self._wrong(name, value, "a whole number from 1 on")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number.

        Raises:
            CheckpointError: there is none, and no default.
        """
        value = self.header.metadata.get(self._prefix + name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise self._wrong(name, value, "a finite number")
        return float(value)

    def get(self, name: str) -> Any:
        """Return a value unchanged, None where there is none."""
        return self.header.metadata.get(self._prefix + name)

    def _wrong(self, name: str, value: Any, wanted: str) -> CheckpointError:
        what = "is missing" if value is None else f"is {shown(value)}"
        return CheckpointError(
            f"{self.header.file}: {quoted(self._prefix + name)} {what}; {wanted} is expected", hint=DAMAGED
        )


def settings(header: Header) -> dict[str, Any]:
    """Return what stands in the config.json of the same model.

    Raises:
        UnsupportedError: the architecture is not taken, or is configured in a way that is not.
        CheckpointError: a key or a tensor is missing, or makes no sense.
    """
    architecture, metadata = _architecture(header), Metadata(header)
    known = {*_SIZES, *_READ, *_WITHOUT_EFFECT, *architecture.keys}
    none = {name for name in metadata.names() if name.startswith("expert_") and metadata.get(name) == 0}
    if unknown := sorted(set(metadata.names()) - known - none):
        raise UnsupportedError(
            f"{header.file}: {quoted(f'{header.architecture}.{unknown[0]}')} is not known, and may change what the "
            "model computes",
            hint=_HINT,
        )
    made: dict[str, Any] = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        **{name: metadata.integer(key) for key, name in _SIZES.items()},
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": _vocabulary(header),
        "torch_dtype": "float32",
        "quantization_config": {"quant_method": "gguf", "type": _type(header)},
    }
    if made["num_hidden_layers"] > len(header.tensors):
        raise CheckpointError(
            f"{header.file}: states {made['num_hidden_layers']} layers, and holds {len(header.tensors)} tensors",
            hint=DAMAGED,
        )
    if "ffn_gate" in architecture.parts or metadata.get("feed_forward_length") is not None:
        made["intermediate_size"] = metadata.integer("feed_forward_length")
    made["num_key_value_heads"] = metadata.integer("attention.head_count_kv", made["num_attention_heads"])
    made["head_dim"] = _head_dim(metadata, made)
    made["rope_parameters"] = _rope(metadata, made["head_dim"])
    for token, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        identity = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(identity) is int:
            made[f"{token}_token_id"] = identity
    made |= architecture.extra(metadata, made)
    require_whole(header, architecture.parts, made)
    return made


def target(header: Header, name: str, made: Mapping[str, Any]) -> ParameterTarget | None:
    """Return what a tensor becomes in the model of configuration `made`; None: `settings` has taken it up.

    Raises:
        UnsupportedError: it has no place there.
    """
    architecture = _architecture(header)
    stem, _, leaf = name.rpartition(".")
    if name == _FREQUENCIES:
        return None
    if leaf in ("weight", "bias"):
        if stem in _OUTER:
            norm = architecture.zero_centred and stem == "output_norm"
            return ParameterTarget(f"{_OUTER[stem]}.{leaf}", minus_one=norm)
        match = _LAYER.match(stem)
        if match is not None and int(match[1]) < made["num_hidden_layers"]:
            layer, part = f"model.layers.{match[1]}", match[2]
            if part in architecture.parts:
                heads = {"attn_q": made["num_attention_heads"], "attn_k": made["num_key_value_heads"]}.get(part)
                return ParameterTarget(
                    f"{layer}.{architecture.parts[part]}.{leaf}",
                    heads=heads if architecture.interleaved else None,
                    minus_one=architecture.zero_centred and part.endswith("norm"),
                )
            if part in _EXPERTS and "num_experts" in made and leaf == "weight":
                return ParameterTarget(f"{layer}.mlp.experts.{{}}.{_EXPERTS[part]}.weight", stacked=True)
    raise UnsupportedError(
        f"{header.file}: tensor {quoted(name)} has no place in a {architecture.model_type} model", hint=_HINT
    )


def _architecture(header: Header) -> GgufArchitecture:
    found = ARCHITECTURES.get(header.architecture)
    if found is None:
        raise UnsupportedError(
            f"{header.file}: architecture {quoted(header.architecture)} is not read from GGUF; read are "
            f"{', '.join(ARCHITECTURES)}",
            hint=_HINT,
        )
    return found


def _type(header: Header) -> str:
    """Name the type in which most numbers are, of quantized ones where there are any."""
    counts = Counter[str]()
    quantized = any(tensor.kind.quantized for tensor in header.tensors.values())
    for tensor in header.tensors.values():
        if tensor.kind.quantized or not quantized:
            counts[tensor.kind.name] += prod(tensor.shape)
    return counts.most_common(1)[0][0]


def _vocabulary(header: Header) -> int:
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise CheckpointError(f"{header.file}: has no matrix 'token_embd.weight'", hint=DAMAGED)
    return table.shape[0]


def _head_dim(metadata: Metadata, made: Mapping[str, Any]) -> int:
    width = metadata.integer("attention.key_length", max(1, made["hidden_size"] // made["num_attention_heads"]))
    values, turned = metadata.integer("attention.value_length", width), metadata.integer("rope.dimension_count", width)
    if values != width or turned != width:
        raise UnsupportedError(
            f"{metadata.header.file}: keys of {width} channels, of which {turned} turn with the position, and values "
            f"of {values}; all three must be equal",
            hint=_HINT,
        )
    return width


def _rope(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters`.

    The divisors of frequencies that llama.cpp computes for Llama 3.1 and 3.2 are told from others by computing them.
    """
    theta, kind = metadata.number("rope.freq_base", _DEFAULT_THETA), metadata.get("rope.scaling.type")
    made: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind in ("linear", "yarn"):
        made |= {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
        if kind == "yarn":
            made["original_max_position_embeddings"] = metadata.integer("rope.scaling.original_context_length")
    elif kind not in (None, "none"):
        raise UnsupportedError(
            f"{metadata.header.file}: rope.scaling.type {shown(kind)} is not taken; taken are none, linear, yarn",
            hint=_HINT,
        )
    divisors = _divisors(metadata.header, head_dim)
    if divisors is None or bool((divisors == 1).all()):
        return made
    for factor, low, high, original in _LLAMA3 if kind in (None, "none") else ():
        if np.allclose(_llama3_divisors(head_dim, theta, factor, low, high, original), divisors, rtol=1e-4):
            return made | {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedError(
        f"{metadata.header.file}: {quoted(_FREQUENCIES)} divides rotary frequencies otherwise than Llama 3 does",
        hint=_HINT,
    )


def _divisors(header: Header, head_dim: int) -> np.ndarray[Any, Any] | None:
    info = header.tensors.get(_FREQUENCIES)
    if info is None:
        return None
    if info.kind.name != "F32" or info.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{header.file}: tensor {quoted(_FREQUENCIES)} is no fp32 [{head_dim // 2}]", hint=DAMAGED
        )
    with open_regular(header.file) as stream:
        stream.seek(info.offset)
        data = stream.read(info.size_bytes)
    return dequantize(np.frombuffer(data, np.uint8), info.kind, info.shape)


def _llama3_divisors(
    head_dim: int, theta: float, factor: float, low: float, high: float, original: int
) -> np.ndarray[Any, Any]:
    """Compute by what each frequency is divided, [head_dim / 2] (transformers' `_compute_llama3_parameters`)."""
    frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    wavelengths = 2 * np.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelengths < original / high, 1.0, np.where(wavelengths > original / low, factor, between))


def _biases(metadata: Metadata, made: dict[str, Any]) -> dict[str, Any]:
    tensors = metadata.header.tensors
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}


def _qwen3(metadata: Metadata, made: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in metadata.header.tensors}


def _qwen3_moe(metadata: Metadata, made: dict[str, Any]) -> dict[str, Any]:
    return {
        **_qwen3(metadata, made),
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # as llama.cpp computes this architecture
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(metadata: Metadata, made: dict[str, Any], layers_of_27b: int) -> dict[str, Any]:
    """What all Gemmas say; the largest of each generation scales by another width (llama.cpp's `f_attention_scale`)."""
    largest = made["num_hidden_layers"] == layers_of_27b
    return {
        "sliding_window": metadata.integer("attention.sliding_window"),
        "query_pre_attn_scalar": made["hidden_size"] // made["num_attention_heads"] if largest else made["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
    }


def _gemma2(metadata: Metadata, made: dict[str, Any]) -> dict[str, Any]:
    return _gemma(metadata, made, 46) | {
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.number("final_logit_softcapping"),
    }


def _gemma3(metadata: Metadata, made: dict[str, Any]) -> dict[str, Any]:
    local = metadata.number("rope.freq_base_swa", _DEFAULT_THETA)
    pattern = metadata.integer("attention.sliding_window_pattern", 6)
    layers = range(1, made["num_hidden_layers"] + 1)
    return _gemma(metadata, made, 62) | {
        "layer_types": ["full_attention" if layer % pattern == 0 else "sliding_attention" for layer in layers],
        "rope_parameters": {
            "full_attention": made["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "final_logit_softcapping": None,
    }


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", "LlamaForCausalLM", _LLAMA, extra=_biases, interleaved=True),
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM", _LLAMA),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM", {**_LLAMA, **_QK_NORMS}, extra=_qwen3),
    "qwen3moe": GgufArchitecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_ATTENTION, **_QK_NORMS, "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate"},
        keys=frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"}),
        extra=_qwen3_moe,
    ),
    "gemma2": GgufArchitecture(
        "gemma2",
        "Gemma2ForCausalLM",
        _GEMMA,
        keys=frozenset({"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}),
        extra=_gemma2,
        zero_centred=True,
    ),
    "gemma3": GgufArchitecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**_GEMMA, **_QK_NORMS},
        keys=frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"}),
        extra=_gemma3,
        zero_centred=True,
    ),
}
