"""How large everything is: on a GPU, and in a dry run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Llama-3.1-8B's config.json.
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 8192,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True)
class Scale:
    """Sizes of one run. `tolerance` bounds the largest difference of logits, whose standard deviation is about 0.6."""

    dry: bool
    shape: Mapping[str, Any]
    precisions: tuple[str, ...]
    parity_precision: str
    tolerance: float
    batches: tuple[int, ...]
    context: int  # tokens of each row before decoding is timed
    tokens: int  # decode steps that are timed
    rounds: int
    copy_bytes: int

    @property
    def max_context(self) -> int:
        """Capacity of the 8B engines: room for what is timed, in multiples of 128."""
        return -(-(self.context + 2 * self.tokens) // 128) * 128

    @property
    def subjects(self) -> tuple[str, ...]:
        """Whose speed is measured, in the order of each round."""
        return ("torch-eager", *(f"llmforge-{precision}" for precision in self.precisions), "torch-compile")


GPU = Scale(
    dry=False,
    shape=LLAMA_8B,
    precisions=("bf16", "int8", "int4"),
    parity_precision="fp16",
    tolerance=0.02,  # fp16 rounds to 5e-4; two layers of it on logits of 0.6, with room for bf16's accumulations
    batches=(1, 8, 64),
    context=256,
    tokens=64,
    rounds=3,
    copy_bytes=1 << 30,
)
DRY = Scale(
    dry=True,
    shape=TINY,
    precisions=("fp32", "int8", "int4"),
    parity_precision="fp32",
    tolerance=1e-4,
    batches=(1, 2),
    context=8,
    tokens=3,
    rounds=2,
    copy_bytes=1 << 20,
)
