"""Prove a release of transformers on this machine: that what llmforge reaches into is there, and that graphs are right.

1. Every hook (`llmforge.trace.hooks.table`) is there and takes what it is given.
2. A tiny checkpoint with random weights of each type of `TYPES`, which between them have every mechanism that a model
   can bring, is traced, and its graph held against transformers as a build does (docs/verification.md).

What passed is written down (`llmforge.checkpoint.versions.record_of`), and holds for these versions and this code.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmforge.base import whole_file
from llmforge.base.errors import ForgeError, VerificationError
from llmforge.base.progress import Progress
from llmforge.checkpoint import versions

_BASE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 264,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_RECURRENT = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 48,
}
# Type → entries of its configuration beside `_BASE`.
TYPES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {},  # biases
    "qwen3": {},  # norms of queries and keys
    "mistral": {"sliding_window": 7},
    "gemma3_text": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},  # two rotary tables
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},  # learned positions, [K, N] weights
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {  # sinks, windows, experts with biases, YaRN
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "deepseek_v3": {  # latent attention, groups of experts
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "qwen3_next": {**_EXPERTS, **_RECURRENT},  # linear attention
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8, "expand": 2},
}


@dataclass(frozen=True)
class ReleaseProof:
    """What was found of the installed release."""

    version: str
    known: bool  # llmforge's own tests were run with it
    hooks: int
    changed: tuple[str, ...]  # hooks whose source no proven release has
    types: Mapping[str, str]  # type → what its proof found
    record: Path  # written


def prove(progress: Progress, types: Mapping[str, Mapping[str, Any]] = TYPES) -> ReleaseProof:
    """Prove the installed release, and write that down.

    Raises:
        VersionMismatch: another package is of another version than llmforge requires.
        VerificationError: a hook is lost, or a graph is wrong.
        UnsupportedError: a type is refused that llmforge compiles.
    """
    version = versions.installed("transformers")
    with versions.on_trial(version):
        versions.check()
        progress.stage("Check hooks")
        from llmforge.trace.hooks import table  # imports torch

        if lost := [why for hook in table.HOOKS if (why := table.lost(hook)) is not None]:
            raise VerificationError(
                f"transformers {version} cannot be used: {'; '.join(lost)}",
                hint=f"pip install 'transformers=={versions.PROVEN[-1]}'",
            )
        digests, found = table.digests(), {}
        for number, (name, entries) in enumerate(types.items()):
            progress.stage(f"Prove {name}")
            progress.advance(number, len(types))
            with tempfile.TemporaryDirectory(prefix="llmforge-release-") as folder:
                try:
                    found[name] = _prove_type(name, entries, Path(folder))
                except ForgeError as error:
                    error.message = f"transformers {version}, {name}: {error.message}"
                    raise
    changed = tuple(table.changed(digests, table.releases()))
    record = versions.record_of(version)
    content = {"proof": versions.proof_of(version), "hooks": digests, "changed": changed, "types": found}
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    whole_file.write(record, lambda file: file.write_text(text, encoding="utf-8"))
    return ReleaseProof(version, version in versions.PROVEN, len(table.HOOKS), changed, found, record)


def _prove_type(name: str, entries: Mapping[str, Any], folder: Path) -> str:
    """Trace a tiny checkpoint, hold its graph against transformers, and say what was found."""
    from llmforge.checkpoint import Checkpoint
    from llmforge.doctor import tiny
    from llmforge.trace import trace
    from llmforge.verification.trace_verifier import verify_trace

    tiny.write(name, {**_BASE, **entries}, folder)
    checkpoint = Checkpoint.open(folder)
    return verify_trace(checkpoint, trace(checkpoint)).note()
