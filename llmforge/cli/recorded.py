"""What an artifact was built from, as the commands are told that build from it again: a recipe, or what it recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmforge.base.errors import UsageError
from llmforge.cli.parameters import PATH

if TYPE_CHECKING:
    from llmforge.recipe import Recipe

_OPTIONS = (
    click.option("--recipe", type=PATH, help="The recipe that the artifact was built from."),
    click.option(
        "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="With --recipe: as for the build. Repeatable."
    ),
    click.option("--checkpoint", type=PATH, help="Without --recipe: the checkpoint's folder."),
    click.option(
        "--text", "texts", type=PATH, multiple=True, help="Without --recipe: a text of the recipe. Repeatable."
    ),
)


@dataclass(frozen=True)
class Inputs:
    """Where the inputs of an artifact lie: its recipe, or its checkpoint and texts."""

    recipe: Path | None
    overrides: tuple[str, ...]
    checkpoint: Path | None
    texts: tuple[Path, ...]

    def check(self) -> None:
        """Return if they are the one or the other.

        Raises:
            UsageError: they are neither, or both.
        """
        if (self.recipe is None) == (self.checkpoint is None):
            raise UsageError("give either --recipe or --checkpoint with the texts")
        if self.recipe is None and self.overrides:
            raise UsageError("--set requires --recipe")
        if self.recipe is not None and self.texts:
            raise UsageError("--text cannot be used with --recipe")

    def load(self, artifact: Path, scratch: Path) -> Recipe:
        """Read the recipe, or write the one that `artifact` recorded into the folder `scratch` and read that."""
        from llmforge.diagnosis import reproducing
        from llmforge.recipe import Recipe

        if self.recipe is not None:
            return Recipe.load(self.recipe, self.overrides)
        assert self.checkpoint is not None
        return reproducing.recorded(artifact, self.checkpoint, self.texts, scratch)


def inputs_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that make `inputs`, an `Inputs` that nothing has checked, of `command`."""

    @functools.wraps(command)
    def run(
        recipe: Path | None, overrides: tuple[str, ...], checkpoint: Path | None, texts: tuple[Path, ...], **others: Any
    ) -> None:
        command(inputs=Inputs(recipe, overrides, checkpoint, texts), **others)

    made: Callable[..., None] = run
    for option in reversed(_OPTIONS):
        made = option(made)
    return made
