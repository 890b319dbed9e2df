"""How large everything is: on a GPU, in one short lease of one, and in a dry run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LLAMA = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
# Of the config.json of Llama-3.1-8B and of Llama-3.2-1B.
LLAMA_8B = {
    **_LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LLAMA_1B = {
    **_LLAMA,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "head_dim": 64,
    "tie_word_embeddings": True,
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
EVERY = "*"  # all models of tests/models/zoo.py


@dataclass(frozen=True)
class Model:
    """One shape whose speed is measured, and in which precisions."""

    config: Mapping[str, Any]
    precisions: tuple[str, ...]


@dataclass(frozen=True)
class Scale:
    """Sizes of one run. `tolerances` bound the largest difference of logits, whose standard deviation is about 0.6."""

    dry: bool
    models: Mapping[str, Model]
    parity: Mapping[str, tuple[str, ...]]  # precision → models of the zoo
    tolerances: Mapping[str, float]
    batches: tuple[int, ...]
    prompts: tuple[int, ...]  # tokens of the prompts whose TTFT is measured
    context: int  # tokens of each row before decoding is timed
    tokens: int  # decode steps that are timed
    rounds: int
    copy_bytes: int
    attention: bool = True  # whether the kernels of attention are asked for, shape by shape
    contexts: tuple[int, ...] = ()  # tokens of a row, behind which decode steps are timed, too

    @property
    def max_context(self) -> int:
        """Capacity of the engines: room for what is timed, in multiples of 128."""
        return (
            -(
                -max(
                    self.context + 2 * self.tokens,
                    max(self.prompts) + 1,
                    *(each + self.tokens for each in self.contexts),
                )
                // 128
            )
            * 128
        )

    @property
    def plain(self) -> str:
        """The precision of engines that are no matter of precision."""
        return "fp32" if self.dry else "fp16"

    def subjects(self, model: str) -> tuple[str, ...]:
        """Whose speed is measured, in the order of each round."""
        ours = (f"llmforge-{precision}" for precision in self.models[model].precisions)
        return ("torch-eager", *ours, "torch-compile", "vllm")


SOME = ("llama", "mistral-window", "qwen3-moe")
GPU = Scale(
    dry=False,
    models={
        "1b": Model(LLAMA_1B, ("bf16", "int8", "int4")),
        "8b": Model(LLAMA_8B, ("bf16", "int8", "int4")),
    },
    parity={"fp16": (EVERY,), **dict.fromkeys(("bf16", "int8", "int4", "int8-kv"), SOME)},
    # fp16 rounds to 5e-4: two layers of it on logits of 0.6, with room for other orders of sums; bf16 to 4e-3. A cache
    # in int8 may round a number the other way.
    tolerances={"fp32": 1e-4, "fp16": 0.02, "bf16": 0.15, "int8": 0.02, "int4": 0.02, "int8-kv": 0.06},
    batches=(1, 8, 64),
    prompts=(512, 2048),
    context=256,
    tokens=64,
    rounds=3,
    copy_bytes=1 << 30,
)
# What settles most in 40 minutes: one round, and of the large model what people serve.
LEASE = dataclasses.replace(
    GPU,
    models={"1b": GPU.models["1b"], "8b": Model(LLAMA_8B, ("bf16", "int4"))},
    parity=dict.fromkeys(("fp16", "bf16", "int8", "int4", "int8-kv"), SOME),
    rounds=1,
    attention=False,
)
DRY = Scale(
    dry=True,
    models={"tiny": Model(TINY, ("fp32", "int8", "int4"))},
    parity={"fp32": SOME, **dict.fromkeys(("int8", "int4", "int8-kv"), SOME[:1])},
    tolerances={"fp32": 1e-4, "int8": 1e-4, "int4": 1e-4, "int8-kv": 0.06},
    batches=(1, 2),
    prompts=(8, 16),
    context=8,
    tokens=4,
    rounds=2,
    copy_bytes=1 << 20,
)

# What is carried to a machine for half an hour: few shapes, and more rows.
CARRIED = dataclasses.replace(
    LEASE,
    models={"8b": Model(LLAMA_8B, ("bf16", "int4"))},
    parity={"fp16": ("llama", "qwen3-moe"), **dict.fromkeys(("bf16", "int8", "int4", "int8-kv"), ("llama",))},
    batches=(1, 64, 256),
    context=300,
    tokens=32,
    contexts=(2048, 8000),
)
CARRIED_DRY = dataclasses.replace(
    DRY,
    models={"tiny": Model(TINY, ("fp32", "int4"))},
    parity=dict.fromkeys(("fp32", "int8", "int4", "int8-kv"), ("llama",)),
    rounds=1,
    attention=False,
    contexts=(32, 96),
)
