"""Inputs of an artifact, as the commands are told that build it again: a recipe, or what it recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmforge.base.errors import UsageError
from llmforge.cli.parameters import PATH, grouped, options_record

if TYPE_CHECKING:
    from llmforge.recipe import Recipe


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


inputs_options = grouped(  # which make `inputs`, an `Inputs` that nothing has checked
    click.option("--recipe", type=PATH, help="The recipe that the artifact was built from."),
    click.option(
        "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="With --recipe: as for the build. Repeatable."
    ),
    click.option("--checkpoint", type=PATH, help="Without --recipe: the checkpoint's folder."),
    click.option(
        "--text", "texts", type=PATH, multiple=True, help="Without --recipe: a text of the recipe. Repeatable."
    ),
    options_record(Inputs, "inputs"),
)
