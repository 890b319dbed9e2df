"""The first stage: hold a recipe against its target, its data and this machine, before anything is computed."""

from __future__ import annotations

from pathlib import Path

from llmforge import passes, targets
from llmforge.backends import BACKENDS, plugin_of
from llmforge.base import plugins
from llmforge.base.errors import UnsupportedError
from llmforge.compile import prefixes, preflight
from llmforge.compile.preflight import CheckedRecipe
from llmforge.recipe import Recipe
from llmforge.targets import Target


def check_recipe(recipe: Recipe, out: Path) -> CheckedRecipe:
    """Check what can be known to be wrong before torch is imported; the artifact is to be published in `out`.

    Raises:
        ForgeError: see `llmforge.compile.preflight`, `Recipe.instantiate` and `check_host`.
    """
    steps, target = recipe.instantiate(passes.ALL), targets.find(recipe.target)
    preflight.check(recipe)
    preflight.check_source(recipe, steps)
    prefixes.check(recipe)
    notes = *preflight.check_room(recipe, out), *preflight.check_revision(recipe, out)
    check_host(recipe, target)  # last: it imports what builds engines
    return CheckedRecipe(recipe, steps, target, out, notes)


def check_host(recipe: Recipe, target: Target) -> None:
    """Refuse what no engine is built for, and what this machine does not build unless that is deferred."""
    from llmforge.backends import engines

    builder = engines.for_target(recipe.engine.backend, target)
    plugin = plugin_of(recipe.engine.backend)
    if plugin is not None and recipe.engine.deferred:
        raise UnsupportedError(
            f"{plugin}: an engine of a plug-in cannot be deferred",
            hint="remove `deferred` from the recipe, and --defer",
        )
    if not recipe.engine.deferred:
        with plugins.blamed(plugin):
            builder.require_host(target, recipe.engine)
    elif target.kind == "cpu" or BACKENDS[recipe.engine.backend].export_format is not None:
        raise UnsupportedError(
            f"{recipe.engine.backend}: the engine is written here; it cannot be deferred"
            if target.kind != "cpu"
            else f"target {target.name} is a CPU; its engine cannot be deferred",
            hint="remove `deferred` from the recipe, and --defer",
        )
