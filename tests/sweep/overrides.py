"""What the general rules of `shrink` cannot know: entries of the tiny configuration of single types, each with why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Kinds of layers of hybrids whose default configuration has one kind only, or derives them from long periods.
MAMBA_ATTENTION = ["linear_attention", "full_attention", "linear_attention"]
CONV_ATTENTION = ["conv", "full_attention", "conv"]
NO_HEAD_DIM = {"head_dim": 16}  # the model reads a field whose default is null
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA3N = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "intermediate_size": [96] * 4,
    "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
}
QWEN4_EXP = {  # its sparse attention is described by fields whose defaults are null
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,  # rotary embedding must fit in
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
DOTS3 = {  # sizes of its sliding layers, which it takes apart
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 16,
}
LLAMA4 = {"interleave_moe_layer_step": 2}  # dense layers and experts, both
BLT = {"hidden_size_global": 64, "cross_attn_k": 2}

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_config": BLT,
        "decoder_config": BLT,
        "encoder_hash_byte_group_vocab": 64,
        "vocab_size": 260,
    },
    "cohere_compass_text": {
        "rope_parameters": {
            "sliding_attention": {**ROPE, "mrope_section": [3, 3, 2]},
            "full_attention": {**ROPE, "mrope_section": [3, 3, 2]},
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 1.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "o_groups": 2,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note": {
        "text_config": DOTS3,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": DOTS3,
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma3": {"image_token_index": 200},  # within its vocabulary, as in checkpoints
    "gemma3n_text": GEMMA3N,
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"num_hidden_layers": 3, "layer_types": MAMBA_ATTENTION},
    "hunyuan_v1_dense": NO_HEAD_DIM,
    "hunyuan_v1_moe": {**NO_HEAD_DIM, "num_experts": 4, "moe_topk": 2},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 3,
        "expert_layer_offset": 0,
    },
    "laguna": {"num_hidden_layers": 3, "num_attention_heads_per_layer": [4, 8, 4]},
    "lfm2": {"num_hidden_layers": 3, "layer_types": CONV_ATTENTION, "block_multiple_of": 16},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": CONV_ATTENTION, "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},
    "llama4": {"text_config": LLAMA4},
    "llama4_text": LLAMA4,
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 2},  # so that blocks are left out
    "ministral": NO_HEAD_DIM,
    "qwen4_exp": {"text_config": QWEN4_EXP},
    "qwen4_exp_text": QWEN4_EXP,
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "lsh", "local"]},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zaya": {"num_experts_per_tok": 1},
}

# Entries of single types in larger shapes, of which the rules of `shapes` make something that is no model.
LARGER: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "gpt_neo": {"deep": {"attention_types": [[["global", "local"], 4]]}},
}

# Types whose attention has no 1/√d: without smaller norms of queries, rounding alone moves logits by more than 1e-5.
SMALL_QUERY_NORMS = ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
