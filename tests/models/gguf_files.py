"""Write GGUF files: right ones of checkpoints, with the names and orders of llama.cpp, and wrong ones by hand."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  numpy reads bf16 by it
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from llmforge.checkpoint.gguf import blocks

F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8
UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
PACKING = {UINT32: "I", FLOAT32: "f", BOOL: "?", 5: "i", 10: "Q"}

Tensor = tuple[str, Sequence[int], int, bytes]  # name, shape, type, bytes

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
GEMMA_NAMES = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def text(value: str | bytes) -> bytes:
    """A string of GGUF."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(kind: int, content: Any) -> bytes:
    """A value with its type; an array is (type of its elements, elements)."""
    if kind == STRING:
        return struct.pack("<I", kind) + text(content)
    if kind == ARRAY:
        inner, items = content
        data = b"".join(text(item) if inner == STRING else struct.pack("<" + PACKING[inner], item) for item in items)
        return struct.pack("<IIQ", kind, inner, len(items)) + data
    return struct.pack("<I" + PACKING[kind], kind, content)


def tensor_info(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """What the header says of a tensor; `shape` as torch has it."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def gguf(
    metadata: Mapping[str, bytes],
    tensors: Sequence[Tensor],
    *,
    alignment: int = 32,
    version: int = 3,
) -> bytes:
    """A file of values (see `value`) and tensors: name, shape, type, bytes."""
    infos, data = b"", b""
    for name, shape, kind, content in tensors:
        infos += tensor_info(name, shape, kind, len(data))
        data += content + bytes(-len(content) % alignment)
    keys = b"".join(text(key) + packed for key, packed in metadata.items())
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)) + keys + infos
    return header + bytes(-len(header) % alignment) + data


def encode(weights: NDArray[Any], kind: int) -> bytes:
    """Store numbers as F32, F16, Q4_0, Q4_1 or Q8_0, as `gguf.quants.quantize` does."""
    numbers = weights.astype(np.float32)
    if kind in (F32, F16):
        return numbers.astype(np.float16 if kind == F16 else np.float32).tobytes()
    blocks = numbers.reshape(-1, 32)
    if kind == Q8_0:
        scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
        codes = np.rint(blocks / np.where(scale == 0, 1, scale.astype(np.float32))).astype(np.int8)
        return np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], 1).tobytes()
    if kind == Q4_1:
        low = blocks.min(1, keepdims=True)
        step = (blocks.max(1, keepdims=True) - low) / 15
        codes = np.clip((blocks - low) / np.where(step == 0, 1, step) + 0.5, 0, 15).astype(np.uint8)
        halves = [part.astype(np.float16).view(np.uint8) for part in (step, low)]
        return np.concatenate([*halves, codes[:, :16] | (codes[:, 16:] << 4)], 1).tobytes()
    assert kind == Q4_0
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    scale = (extreme / -8).astype(np.float16)
    steps = blocks / np.where(scale == 0, 1, scale.astype(np.float32))
    codes = np.clip(np.rint(steps) + 8, 0, 15).astype(np.uint8)
    return np.concatenate([scale.view(np.uint8), codes[:, :16] | (codes[:, 16:] << 4)], 1).tobytes()


def drawn(kind: int, shape: Sequence[int], seed: int = 0) -> bytes:
    """Blocks of any quantized type with random codes, and scales and minima about as a model has them."""
    block = blocks.TYPES[kind]
    made = np.random.default_rng([kind, seed, *shape]).integers(
        0, 256, (math.prod(shape) // block.elements, block.size_bytes), np.uint8
    )
    places = {
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q6_K": (208,),
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
        "Q4_1": (0, 2),
        "Q5_1": (0, 2),
    }
    for i, at in enumerate(places.get(block.name, (0,))):
        size = (0.004 if block.elements == 32 else 0.0003) * (-6.0 if i and block.elements == 32 else 1.0)
        halves = (size * np.random.default_rng([seed, at]).uniform(0.5, 1.5, len(made))).astype(np.float16)
        made[:, at : at + 2] = halves[:, None].view(np.uint8)
    return made.tobytes()


def permuted(weights: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of q and k as llama.cpp has them for Llama (`permute` of its convert_hf_to_gguf.py)."""
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def metadata_of(settings: Mapping[str, Any], architecture: str) -> dict[str, bytes]:
    """The keys that llama.cpp's converter writes of a configuration."""
    rope = settings.get("rope_parameters") or {"rope_theta": settings.get("rope_theta", 10000.0)}
    rope = rope.get("full_attention", rope)
    head_dim = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    of_architecture = {
        "context_length": value(UINT32, settings["max_position_embeddings"]),
        "embedding_length": value(UINT32, settings["hidden_size"]),
        "block_count": value(UINT32, settings["num_hidden_layers"]),
        "feed_forward_length": value(UINT32, settings["intermediate_size"]),
        "attention.head_count": value(UINT32, settings["num_attention_heads"]),
        "attention.head_count_kv": value(UINT32, settings["num_key_value_heads"]),
        "attention.layer_norm_rms_epsilon": value(FLOAT32, settings["rms_norm_eps"]),
        "attention.key_length": value(UINT32, head_dim),
        "attention.value_length": value(UINT32, head_dim),
        "rope.freq_base": value(FLOAT32, rope["rope_theta"]),
        "rope.dimension_count": value(UINT32, head_dim),
    }
    experts = settings.get("num_experts", settings.get("num_local_experts"))
    if experts is not None:
        of_architecture |= {
            "expert_count": value(UINT32, experts),
            "expert_used_count": value(UINT32, settings["num_experts_per_tok"]),
            "expert_feed_forward_length": value(UINT32, settings["moe_intermediate_size"]),
        }
    if architecture.startswith("gemma"):
        of_architecture["attention.sliding_window"] = value(UINT32, settings["sliding_window"])
    if architecture == "gemma2":
        of_architecture |= {
            key: value(FLOAT32, settings[key]) for key in ("attn_logit_softcapping", "final_logit_softcapping")
        }
    return {
        "general.architecture": value(STRING, architecture),
        "general.name": value(STRING, "tiny"),
        **{f"{architecture}.{key}": packed for key, packed in of_architecture.items()},
    }


def vocabulary_of(folder: Path, rows: int) -> dict[str, bytes]:
    """The keys of a byte-level tokenizer; what is missing up to `rows` is padded, as the converter does."""
    settings = json.loads((folder / "tokenizer.json").read_text())
    tokens = {number: token for token, number in settings["model"]["vocab"].items()}
    special = {added["id"] for added in settings["added_tokens"]}
    tokens |= {added["id"]: added["content"] for added in settings["added_tokens"]}
    names = [tokens.get(number, f"[PAD{number}]") for number in range(rows)]
    kinds = [3 if number in special else 1 if number in tokens else 5 for number in range(rows)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in settings["model"]["merges"]]
    return {
        "tokenizer.ggml.model": value(STRING, "gpt2"),
        "tokenizer.ggml.pre": value(STRING, "gpt-2"),
        "tokenizer.ggml.tokens": value(ARRAY, (STRING, names)),
        "tokenizer.ggml.token_type": value(ARRAY, (5, kinds)),
        "tokenizer.ggml.merges": value(ARRAY, (STRING, merges)),
        "tokenizer.ggml.bos_token_id": value(UINT32, 0),
        "tokenizer.ggml.eos_token_id": value(UINT32, 0),
    }


def write(
    folder: Path,
    file: Path,
    *,
    architecture: str = "llama",
    kind: int = F32,
    drop: Sequence[str] = (),
    change: Callable[[list[Tensor]], list[Tensor]] = list,
    **more: bytes,
) -> dict[str, NDArray[Any]]:
    """Write the checkpoint in `folder` as a GGUF file, matrices of whole blocks as `kind`.

    `more` are further keys, or others; `drop` are keys to leave out; `change` changes tensors.

    Returns the parameters of the checkpoint by their names there.
    """
    settings = json.loads((folder / "config.json").read_text())
    parameters: dict[str, NDArray[Any]] = {}
    for each in sorted(folder.glob("*.safetensors")):
        parameters |= load_file(each)
    names = GEMMA_NAMES if architecture.startswith("gemma") else NAMES
    stacks: dict[str, list[NDArray[Any]]] = {}
    found: list[tuple[str, NDArray[Any]]] = []
    for name, stored in parameters.items():
        stem, _, leaf = name.rpartition(".")
        weights = stored.astype(np.float32)
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = settings["num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"]
            weights = permuted(weights, heads)
        if architecture.startswith("gemma") and stem.endswith("norm"):
            weights = weights + 1
        if stem in OUTER:
            found.append((f"{OUTER[stem]}.{leaf}", weights))
            continue
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        if part.startswith("mlp.experts."):
            _, _, expert, projection = part.split(".")
            stack = stacks.setdefault(f"blk.{layer}.ffn_{projection.removesuffix('_proj')}_exps.weight", [])
            assert len(stack) == int(expert)
            stack.append(weights)
        else:
            found.append((f"blk.{layer}.{names[part]}.{leaf}", weights))
    found += [(name, np.stack(stack)) for name, stack in stacks.items()]
    tensors: list[Tensor] = []
    for name, weights in found:
        own = kind if weights.ndim > 1 and weights.shape[-1] % 32 == 0 else F32
        tensors.append((name, weights.shape, own, encode(weights, own)))
    metadata = {**metadata_of(settings, architecture), **vocabulary_of(folder, settings["vocab_size"]), **more}
    file.write_bytes(gguf({key: packed for key, packed in metadata.items() if key not in drop}, change(tensors)))
    return parameters
