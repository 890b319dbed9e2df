"""The tensors that a model of a configuration has in a GGUF file, and their shapes, as torch has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from llmforge.base.errors import CheckpointError
from llmforge.base.wording import quoted
from llmforge.checkpoint.gguf.header import Header
from llmforge.checkpoint.safetensors_file import DAMAGED

Shape = tuple[int, ...]
_ATTENTION, _MLP = ("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")
_WITH_BIASES = ("attn_q", "attn_k", "attn_v")  # of Qwen 2, whose configuration does not say so


def require_whole(header: Header, parts: Iterable[str], made: Mapping[str, Any]) -> None:
    """Return if a file has every tensor of a model of configuration `made`, each of its shape.

    `parts` are the tensors of a layer, without experts. Tensors beside those are left alone.

    Raises:
        CheckpointError: one is missing, or has another shape.
    """
    for name, shape in _expected(list(parts), made):
        found = header.tensors.get(name)
        if found is None:
            raise CheckpointError(
                f"{header.file}: lacks the tensor {quoted(name)}, which a {made['model_type']} model of "
                f"{made['num_hidden_layers']} layers has",
                hint=DAMAGED,
            )
        if found.shape != shape:
            raise CheckpointError(
                f"{header.file}: tensor {quoted(name)} has shape {list(found.shape)}; the file's own keys make it "
                f"{list(shape)}",
                hint=DAMAGED,
            )


def _expected(parts: list[str], made: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    shapes = _of_layer(made)
    if "num_experts" in made:
        parts = [*parts, "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"]
    biases: tuple[str, ...] = (
        _WITH_BIASES if made["model_type"] == "qwen2" else _ATTENTION if made.get("attention_bias") else ()
    )
    biases += _MLP if made.get("mlp_bias") else ()
    yield "token_embd.weight", (made["vocab_size"], made["hidden_size"])
    yield "output_norm.weight", (made["hidden_size"],)
    if not made["tie_word_embeddings"]:
        yield "output.weight", (made["vocab_size"], made["hidden_size"])
    for layer in range(made["num_hidden_layers"]):
        for part in parts:
            yield f"blk.{layer}.{part}.weight", shapes[part]
        for part in biases:
            yield f"blk.{layer}.{part}.bias", shapes[part][:1]


def _of_layer(made: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, width = made["hidden_size"], made["head_dim"]
    queries, keys = made["num_attention_heads"] * width, made["num_key_value_heads"] * width
    inner, experts = made.get("moe_intermediate_size", made.get("intermediate_size", 0)), made.get("num_experts", 0)
    shapes: dict[str, Shape] = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate_inp": (experts, hidden),
    }
    for name, shape in {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}.items():
        shapes |= {name: shape, f"{name}_exps": (experts, *shape)}
    norms = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    return {**shapes, **dict.fromkeys(norms, (hidden,)), **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (width,))}
