"""Adapters of which a model chooses one by the language of a text: a trace has that of its configuration."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn


def settle(model: nn.Module) -> None:
    """Let each layer of `model` compute with the adapter of the default language, where it would choose one (X-MOD).

    Nothing else tells a language; without a default the model refuses to run.
    """
    config: Any = getattr(model, "config", None)
    language = getattr(config, "default_language", None)
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lang_adapter")]
    for module in layers:
        adapters = getattr(module, "adapter_modules", None)
        if isinstance(adapters, nn.ModuleDict) and isinstance(language, str) and language in adapters:
            module.lang_adapter = functools.partial(_adapted, module, adapters[language])


def _adapted(layer: Any, adapter: nn.Module, lang_ids: Tensor, hidden_states: Tensor) -> Tensor:
    """Compute what `XmodOutput.lang_adapter` does where all texts are of one language."""
    x = hidden_states
    if layer.adapter_layer_norm is not None:
        x = layer.adapter_layer_norm(x)
    elif layer.adapter_reuse_layer_norm:
        x = layer.LayerNorm(x)
    adapted: Tensor = adapter(x)
    return adapted + (x if layer.ln_before_adapter else hidden_states)
