"""Tiny checkpoints of dense architectures beyond the Llama family, beside those of `zoo`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from . import zoo

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "short_factor": [1.0 + 0.05 * n for n in range(8)],
    "long_factor": [2.0 + 0.5 * n for n in range(8)],
    "original_max_position_embeddings": 16,
}

ZOO: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("GPT2Config", {}),
    "gpt2-scaled": ("GPT2Config", {"scale_attn_by_inverse_layer_idx": True}),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 48}),
    "opt-after": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64, "do_layer_norm_before": False}),
    "gpt-bigcode": ("GPTBigCodeConfig", {}),
    "gpt-bigcode-mha": ("GPTBigCodeConfig", {"multi_query": False}),
    "gpt-neo": ("GPTNeoConfig", {"attention_types": [[["global", "local"], 1]], "window_size": 7}),
    "biogpt": ("BioGptConfig", {}),
    "xglm": ("XGLMConfig", {"ffn_dim": 96, "d_model": 64, "attention_heads": 4, "num_layers": 2}),
    "falcon": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    "falcon-7b": ("FalconConfig", {"alibi": False}),
    "bloom": ("BloomConfig", {}),
    "mpt": ("MptConfig", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
    "cohere": ("CohereConfig", {"use_qk_norm": True}),
    "cohere2": ("Cohere2Config", {"sliding_window": 7, "num_hidden_layers": 4}),
    "phi": ("PhiConfig", {"partial_rotary_factor": 0.5}),
    "phi-qk-norm": ("PhiConfig", {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "phi3": ("Phi3Config", {"sliding_window": 7}),
    "phi3-partial": ("Phi3Config", {"partial_rotary_factor": 0.5}),
    "stablelm": ("StableLmConfig", {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "stablelm-qk": (
        "StableLmConfig",
        {"partial_rotary_factor": 0.25, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 7}),
    "olmo": ("OlmoConfig", {"clip_qkv": 0.5}),
    "olmo2": ("Olmo2Config", {}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.05,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "nemotron": ("NemotronConfig", {"partial_rotary_factor": 0.5}),
    "persimmon": ("PersimmonConfig", {"partial_rotary_factor": 0.5}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "helium": ("HeliumConfig", {"head_dim": 16}),
    "exaone4": ("Exaone4Config", {"sliding_window": 7, "sliding_window_pattern": 2}),
    "gpt-neox-japanese": ("GPTNeoXJapaneseConfig", {"intermediate_multiple_size": 2}),
    "phi3-longrope": ("Phi3Config", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 16}),
}


def write(name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
    """Write the checkpoint `name` with `changes` to its configuration into `folder`, as `zoo.write` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "ZOO", ZOO)
        zoo.write(name, folder, dtype, **changes)
