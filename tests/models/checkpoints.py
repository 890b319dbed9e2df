"""Write tiny Llama checkpoints: real in form, random in content, a fraction of a megabyte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 264,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": [0, 2],
}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name the parameters of a Llama and give their shapes, [out, in] as checkpoints store them."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    result: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        result |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = (vocabulary, hidden)
    return result


def weights(config: Mapping[str, Any], dtype: str = "float32", seed: int = 0) -> dict[str, NDArray[Any]]:
    """Draw the parameters: norms near 1, matrices with standard deviation 1/√in."""
    generator = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes(config).items():
        drawn = generator.standard_normal(shape)
        made[name] = (1 + drawn / 10 if len(shape) == 1 else drawn / shape[-1] ** 0.5).astype(DTYPES[dtype])
    return made


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer without merges: 3 special tokens, then one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIALS[0], "eos_token": SPECIALS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_checkpoint(
    folder: Path, *, dtype: str = "float32", shards: int = 1, seed: int = 0, **changes: Any
) -> dict[str, NDArray[Any]]:
    """Write a checkpoint into `folder` and return its parameters; `changes` are entries of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    parameters = weights(config, dtype, seed)
    if shards == 1:
        save_file(parameters, folder / "model.safetensors")
        return parameters
    weight_map = {}
    for shard, names in enumerate(np.array_split(sorted(parameters), shards), start=1):
        file = f"model-{shard:05}-of-{shards:05}.safetensors"
        save_file({str(name): parameters[name] for name in names}, folder / file)
        weight_map |= {str(name): file for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return parameters


def safetensors_bytes(header: object, data: bytes = b"") -> bytes:
    """Make a safetensors file of any header (an object, or its raw bytes) and data, right or wrong."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data
