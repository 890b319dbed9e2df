"""Tiny checkpoints of real architectures with random weights, and how a graph is compared with transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
import transformers
from numpy.typing import NDArray

from llmforge.ir import interface
from llmforge.runtime.interface import StepInputs, feeds

from .checkpoints import write_tokenizer

VOCABULARY = 264
BASE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 2,  # every layer's MLP is dense
}

RECURRENT = {
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}

MAMBA2 = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}
JAMBA = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 0,
    "num_experts": 4,
    "mamba_d_state": 4,
    "mamba_dt_rank": 6,
}

# name → configuration class of transformers, and what differs from BASE
ZOO: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-mha-biases": ("LlamaConfig", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads-llama3-rope": ("LlamaConfig", {"head_dim": 24, "rope_parameters": LLAMA3}),
    "llama-yarn-rope": ("LlamaConfig", {"rope_parameters": YARN}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-mixed-windows": (
        "Qwen2Config",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "num_key_value_heads": 1}),
    "mistral-window": ("MistralConfig", {"sliding_window": 7, "head_dim": 16}),
    # structures beyond the Llama family that the same mechanism takes
    "gemma2": (  # x̂·(1 + w), soft caps, alternating windows, a scale of its own
        "Gemma2Config",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (  # two rotary tables
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma3n": (  # layers that read keys and values of others, sparse activations, embeddings of each layer
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "intermediate_size": [96] * 4,
            "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
        },
    ),
    "glm": ("GlmConfig", {"head_dim": 16}),  # interleaved rotary embedding of half a head
    "gpt-neox": ("GPTNeoXConfig", {"rotary_pct": 0.25}),  # LayerNorm, packed QKV
    # latent attention: what is cached is not what attention reads, values are of another width than keys
    "deepseek-v2": ("DeepseekV2Config", {**LATENT, "topk_method": "greedy"}),  # rotary embedding in complex numbers
    "deepseek-v3": ("DeepseekV3Config", {**LATENT, "rope_parameters": {**YARN, "mscale_all_dim": 0.7}}),
    "minicpm3": ("MiniCPM3Config", {**LATENT}),
    "youtu": ("YoutuConfig", {**LATENT, "rope_interleave": True, "q_lora_rank": None}),
    "qwen3-5": ("Qwen3_5TextConfig", RECURRENT),  # gated delta rule behind a causal convolution, gated norms
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),  # convolutions alone
    "olmo-hybrid": ("OlmoHybridConfig", RECURRENT),
    # state spaces: Mamba-2 beside attention, Mamba, layers that cache nothing
    "bamba": ("BambaConfig", {**MAMBA2, "attn_layer_indices": [1]}),
    "jamba": ("JambaConfig", JAMBA),
    "nemotron-h": (
        "NemotronHConfig",
        {
            **MAMBA2,
            **EXPERTS,
            "mamba_head_dim": 16,
            "mamba_num_heads": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
            "num_hidden_layers": 4,
            "head_dim": 16,
        },
    ),
    "kimi-linear": (  # the delta rule with a decay for each channel of the keys, beside latent attention
        "KimiLinearConfig",
        {
            **LATENT,
            "q_lora_rank": None,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "qwen3-next": ("Qwen3NextConfig", {**RECURRENT, "mlp_only_layers": [0, 1]}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),  # layers without positions
    # experts
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**EXPERTS, "num_experts": 8, "head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "gpt-oss": (  # sinks, alternating windows, YaRN; interleaved gates with limits, biases, matrices [K, N]
        "GptOssConfig",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    ),
    "qwen2-moe": ("Qwen2MoeConfig", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 96}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.5}),
    "glm4-moe": (  # groups of experts, a correction of the router's bias that is no parameter, shared experts
        "Glm4MoeConfig",
        {
            **EXPERTS,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "head_dim": 16,
            "use_qk_norm": True,
        },
    ),
}


def write(name: str, folder: Path, dtype: torch.dtype = torch.float32, *, seed: int = 1, **changes: Any) -> None:
    """Write the checkpoint `name` with `changes` to its configuration into `folder`; `seed` draws its weights.

    Weights are scaled so that logits have a standard deviation of about 0.6; norms and biases are not trivial.
    """
    kind, own = ZOO[name]
    save(getattr(transformers, kind)(**{**BASE, **own, **changes}), folder, dtype, seed)


def save(config: Any, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 1) -> None:
    """Write a checkpoint of `config` with such weights, and a tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # vectors keep what their constructor drew (sinks of attention)
        model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * 0.6 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(noise * 0.1)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder)


def reference(folder: Path) -> Any:
    """Load a checkpoint with transformers: fp32, eager attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@dataclass(frozen=True)
class Schedule:
    """Steps of a batch: the prompt lengths of its rows, then how many tokens every row gets in each further step."""

    prompts: Sequence[int]
    further: Sequence[int] = (1, 1, 1, 1, 1, 3)


SCHEDULES: Mapping[str, Schedule] = {
    "one": Schedule((12,)),
    "two": Schedule((12, 12)),
    "ragged": Schedule((9, 12, 5)),
}


def largest_difference(model: ir.Model, expected: Any, schedule: Schedule, *, capacity: int = 40) -> float:
    """Run `model`, standard ONNX, over `schedule` and compare every valid row's logits with transformers' own.

    The reference runs each row of the batch alone and whole, without a cache.
    """
    session = standard_session(model)
    names = [value.name for value in session.get_inputs()]
    rng = np.random.default_rng(0)
    total = sum(schedule.further)
    texts = [rng.integers(3, VOCABULARY, prompt + total) for prompt in schedule.prompts]
    with torch.no_grad():
        wanted = [expected(torch.from_numpy(text[None])).logits[0].numpy() for text in texts]
    batch = len(texts)
    cache: dict[str, NDArray[np.generic]] = {  # slots that no token was written to must not matter
        value.name: np.full(
            (batch, *value.shape[1:])
            if interface.is_state(value.name)
            else (batch, value.shape[1], capacity, value.shape[3]),
            7.0,
            np.float32,
        )
        for value in session.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    past, worst = np.zeros(batch, np.int32), 0.0
    for step in (schedule.prompts, *((count,) * batch for count in schedule.further)):
        ids = np.zeros((batch, max(step)), np.int64)
        for row, count in enumerate(step):
            ids[row, :count] = texts[row][past[row] : past[row] + count]
        fed = feeds(
            names, StepInputs(ids, past, np.arange(max(step)), np.array(step), np.array([len(text) for text in texts]))
        )
        logits, *presents = session.run(None, {**fed, **cache})
        cache = dict(zip(cache, presents, strict=True))
        for row, count in enumerate(step):
            difference = np.abs(logits[row, :count] - wanted[row][past[row] : past[row] + count])
            worst = max(worst, float(difference.max()))
        past = past + np.array(step, np.int32)
    return worst


def standard_session(model: ir.Model) -> ort.InferenceSession:
    """Load a standard ONNX model whose weights are lazy, without ONNX Runtime's own graph optimizations."""
    loaded = model.clone()
    for name, value in loaded.graph.initializers.items():
        assert value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy(), name=name)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # errors: TensorScatter warns whenever past and present are not one buffer
    return ort.InferenceSession(ir.to_proto(loaded).SerializeToString(), options, ["CPUExecutionProvider"])
