"""A checkpoint that comes quantized: what a recipe does with its codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmforge.checkpoint import CONFIG, quantized
from llmforge.quantization import methods
from llmforge.quantization.grid import Grid
from llmforge.recipe import Recipe
from llmforge.recipe.errors import collect
from llmforge.rewrite import declared
from llmforge.rewrite.pass_base import Pass


def described(settings: Mapping[str, Any], folder: Path) -> str | None:
    """Say how the weights of a checkpoint are stored: "AWQ, int4 in groups of 128"; None: not as codes.

    Raises:
        UnsupportedError: in a way that is not taken.
        CheckpointError: what it says of that makes no sense.
    """
    layout, config = quantized.layout_of(settings, folder / CONFIG), quantized.settings_of(settings)
    if layout is None or layout.is_plain(config):
        return None
    return f"{layout.name}, {layout.check(config, folder / CONFIG)}"


def grid_of(settings: Mapping[str, Any], folder: Path) -> Grid | None:
    """Guess the grid on which its codes lie; None: there are none, or no format here holds them.

    Raises:
        UnsupportedError, CheckpointError: as `described`.
    """
    layout = quantized.layout_of(settings, folder / CONFIG)
    return None if layout is None else layout.grid(quantized.settings_of(settings))


def note(settings: Mapping[str, Any], folder: Path, steps: Sequence[Pass]) -> str | None:
    """Say what passes do with the codes of a checkpoint; None: it has none.

    Raises:
        UnsupportedError, CheckpointError: as `described`.
    """
    stored = described(settings, folder)
    if stored is None:
        return None
    choosing = [step.name for step in steps if step.chooses_codes()]
    if choosing:
        return f"the checkpoint is quantized ({stored}); {choosing[0]} chooses other codes, as `requantize` allows"
    if any(step.takes_stored for step in steps):
        return f"the checkpoint is quantized ({stored}); its codes are taken as they are"
    return f"the checkpoint is quantized ({stored}); its weights are dequantized, unless {_keeping()} takes its codes"


def refuse_requantizing(recipe: Recipe, steps: Sequence[Pass], settings: Mapping[str, Any]) -> None:
    """Return if no pass of a recipe chooses codes for weights that have codes already, or the recipe wants that.

    Raises:
        RecipeError: one does.
        UnsupportedError, CheckpointError: as `described`.
    """
    stored = described(settings, recipe.checkpoint.absolute())
    if stored is None or recipe.requantize:
        return
    problems = [
        spec.problem(
            f"the pass chooses codes for weights that come quantized: {recipe.checkpoint} is {stored}",
            f"take its codes with {_keeping()}, start from the unquantized checkpoint, or set `requantize: true`",
        )
        for spec, step in zip(recipe.passes, steps, strict=True)
        if step.chooses_codes()
    ]
    if problems:
        raise collect(problems)


def _keeping() -> str:
    """Name the passes that keep codes."""
    first, *others = (step.name for step in declared.DECLARED if step.writes_codes is not None)
    return f"`{first}: {{method: {methods.STORED}}}` ({' and '.join(others)} have it, too)"
