"""Read the shape of a decoder from a checkpoint's folder, of which config.json is enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.checkpoint import CONFIG, CONTEXTS, folder_of, hub, load_config, read_settings
from llmforge.planning import families
from llmforge.planning.families import Unsaid
from llmforge.planning.shape import AttentionShape, LayerSizes, Shape, runs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from llmforge.trace.export.shape_summary import LayerShape


CACHED = ("key", "value", "latent")  # parts of a cache that have a slot a token


def read(path: Path) -> Shape:
    """Read the shape of the checkpoint in folder `path`; `path` may also be its config.json, or a GGUF file.

    Raises:
        CheckpointError: there is no usable configuration.
        UnsupportedError: transformers does not know the architecture, or the frontend cannot build it.
    """
    folder = folder_of((path.parent if path.name == CONFIG else path).absolute())
    settings = read_settings(folder)
    try:
        return families.shape(hub.title(folder), settings)
    except Unsaid:
        return of_model(hub.title(folder), load_config(folder, settings), folder)


def of_model(name: str, config: PretrainedConfig, folder: Path) -> Shape:
    """Build the model of `config` without weights, which `folder` holds, and read its shape off it.

    Raises:
        CheckpointError: sizes are missing.
        UnsupportedError: the frontend cannot build it, or tell its layers.
    """
    from llmforge.trace.export.shape_summary import summarize

    text = config.get_text_config()

    def size(key: str) -> int:
        value = getattr(text, key, None)
        if type(value) is not int or value < 1:
            raise CheckpointError(
                f"{folder / CONFIG}: {key} must be a positive integer, is {value!r}",
                hint="the file is damaged; fetch it again",
            )
        return value

    contexts = (getattr(text, key, None) for key in CONTEXTS)
    context = next((each for each in contexts if type(each) is int and each > 0), None)
    depth, hidden, vocabulary = size("num_hidden_layers"), size("hidden_size"), size("vocab_size")
    try:
        found = summarize(config, depth, context)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{folder / CONFIG}: cannot plan {config.model_type}: {error.message}", hint=error.hint
        ) from error
    window = _windows(text)
    heads = size("num_attention_heads")
    rank = getattr(text, "kv_lora_rank", None)
    layers = [_layer(layer, heads, window(index), rank) for index, layer in enumerate(found.layers)]
    return Shape(
        name=name,
        architecture=str(config.model_type),
        layers=runs(layers),
        hidden=hidden,
        vocabulary=vocabulary,
        context=context,
        embedding=found.tables,
        head=found.head,
        vectors=found.vectors + found.matrices,
        tied=found.head == 0,
        dtype={"float16": "fp16", "float32": "fp32"}.get(str(text.dtype).removeprefix("torch."), "bf16"),
    )


def _layer(found: LayerShape, heads: int, window: int | None, rank: int | None) -> LayerSizes:
    keys, values, latents = (found.caches.get(part) for part in ("key", "value", "latent"))
    attention = None
    if latents is not None:
        _, width = latents
        attention = AttentionShape(heads, 1, width, rank or width, window, latent=width)
    elif keys is not None and values is not None:
        attention = AttentionShape(max(heads, keys[0]), keys[0], keys[1], values[1], window)
    return LayerSizes(
        matrices=found.matrices,
        vectors=found.vectors,
        width=found.width,
        expert=found.expert,
        experts=found.experts,
        chosen=found.chosen,
        attention=attention,
        state=sum(math.prod(shape) for part, shape in found.caches.items() if part not in CACHED),
    )


def _windows(text: Any) -> Callable[[int], int | None]:
    """Find the window of each layer, where the configuration names one."""
    window, types = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    if type(window) is not int or window < 1 or getattr(text, "use_sliding_window", True) is False:
        return lambda index: None
    if types is None:
        return lambda index: window
    return lambda index: window if "sliding" in types[index] or "local" in types[index] else None
