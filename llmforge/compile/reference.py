"""The checkpoint that quality is measured against: that of the recipe, or what it was before it was quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmforge.base.errors import CheckpointError
from llmforge.checkpoint import CONFIG, Checkpoint, read_settings
from llmforge.checkpoint.adapters import AdapterSource
from llmforge.recipe import QualitySpec, Recipe

_ALIKE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")


def of(spec: QualitySpec, checkpoint: Checkpoint) -> Checkpoint:
    """Open what `spec` names, with the adapters that are merged into it, or return the `checkpoint` of the recipe.

    Raises:
        CheckpointError, UnsupportedError: see `Checkpoint.open`.
    """
    return checkpoint if spec.reference is None else Checkpoint.open(spec.reference, checkpoint.opened_from[1])


def with_adapter(spec: QualitySpec, checkpoint: Checkpoint, adapter: AdapterSource) -> Checkpoint:
    """Open what quality is measured against with one more adapter merged, which requests choose.

    Raises:
        CheckpointError, UnsupportedError: see `Checkpoint.open`.
    """
    path, merged, _ = checkpoint.opened_from
    return Checkpoint.open(spec.reference or path, (*merged, adapter))


def described(original: Checkpoint) -> str:
    """Say what it is, with its digest."""
    return f"the reference {original.path.name}, {original.digest}"


def check(recipe: Recipe) -> None:
    """Return if the reference of a recipe can be one: a model of the same sizes, which is not quantized.

    Raises:
        CheckpointError: it is not.
    """
    spec = recipe.validation.quality
    if spec is None or spec.reference is None:
        return
    ours, theirs = (read_settings(folder.absolute()) for folder in (recipe.checkpoint, spec.reference))
    where = spec.reference / CONFIG
    if theirs.get("quantization_config") is not None:
        raise CheckpointError(
            f"{where}: the reference is quantized, too",
            hint="name the checkpoint before it was quantized in `validation.quality.reference`",
        )
    for name in _ALIKE:
        if _text(ours).get(name) != _text(theirs).get(name):
            raise CheckpointError(
                f"{where}: {name} is {_text(theirs).get(name)!r}, and {_text(ours).get(name)!r} in the checkpoint that "
                "is measured against it",
                hint="name the checkpoint that was quantized in `validation.quality.reference`",
            )


def _text(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a configuration says of the language model."""
    inside = settings.get("text_config")
    return inside if isinstance(inside, dict) else settings
