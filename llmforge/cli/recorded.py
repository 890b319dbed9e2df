"""Inputs of an artifact: its own recipe, as far as they are known here, or what the command line says."""

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
    """Where the inputs of an artifact lie: its recipe, or checkpoint and texts; default: where the build found them."""

    recipe: Path | None
    overrides: tuple[str, ...]
    checkpoint: Path | None
    texts: tuple[Path, ...]

    def check(self) -> None:
        """Return if they are not both.

        Raises:
            UsageError: they are, or an option has no meaning without another.
        """
        if self.recipe is not None and self.checkpoint is not None:
            raise UsageError("--checkpoint cannot be used with --recipe")
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
        return reproducing.recorded(artifact, self.checkpoint, self.texts, scratch)


def recipe_of(artifact: Path, given: Path | None) -> Recipe:
    """Load the recipe that is `given`, or else the artifact's own, with inputs from where its build found them.

    Raises:
        UsageError: an input is not known here.
    """
    from tempfile import TemporaryDirectory

    from llmforge.diagnosis import reproducing
    from llmforge.recipe import Recipe

    if given is not None:
        return Recipe.load(given)
    scratch = click.get_current_context().with_resource(TemporaryDirectory())
    try:
        return reproducing.recorded(artifact, None, (), Path(scratch))
    except UsageError as error:
        raise UsageError(error.message, hint="give the recipe with --recipe") from error


inputs_options = grouped(  # which make `inputs`, an `Inputs` that nothing has checked
    click.option(
        "--recipe", type=PATH, help="The recipe that the artifact was built from. Default: its own, which it has."
    ),
    click.option(
        "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="With a recipe: as for the build. Repeatable."
    ),
    click.option("--checkpoint", type=PATH, help="The checkpoint's folder. Default: where it was built from."),
    click.option(
        "--text", "texts", type=PATH, multiple=True, help="A text of the recipe. Default: where it was. Repeatable."
    ),
    options_record(Inputs, "inputs"),
)
