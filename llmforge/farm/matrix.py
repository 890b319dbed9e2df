"""A matrix: models × targets × variants of one recipe, each a set of overrides, as YAML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationError

from llmforge import passes
from llmforge.artifact.sealed import is_name
from llmforge.base import folders
from llmforge.base.errors import RecipeError, UsageError
from llmforge.base.located_yaml import read
from llmforge.farm import checkpoints
from llmforge.recipe import Recipe
from llmforge.recipe.errors import NAME, collect, describe
from llmforge.recipe.section import RecipePath, Section

MOST_BUILDS = 1000
_CHECKPOINT = "checkpoint"
_RECIPE = "recipe"  # the one key of an entry that is no key of a recipe


Name = Annotated[str, Field(pattern=NAME)]
Overrides = dict[str, JsonValue]


class Exclusion(Section):
    """Builds to leave out: those that have all of these names."""

    model: str | None = None
    target: str | None = None
    variant: str | None = None

    def leaves_out(self, model: str, target: str, variant: str) -> bool:
        """Say if it is about this build."""
        pairs = ((self.model, model), (self.target, target), (self.variant, variant))
        return all(wanted in (None, here) for wanted, here in pairs)


class Matrix(Section):
    """Models, targets and variants by name; each name maps recipe keys to values, as `--set` does.

    Of one key, the variant's value counts before the target's, and that before the model's. `recipe` in an entry
    replaces the recipe of the matrix. A target with nothing beside its name is the target of that name.
    """

    schema_version: Literal[1] = Field(alias="schema", description="version of this format")
    name: Name = Field(description="name of the matrix, and of its page")
    recipe: RecipePath | None = Field(
        default=None, description="recipe that all builds start from; relative to the file"
    )
    models: dict[Name, Overrides | None] = Field(min_length=1, description="overrides of each model")
    targets: dict[Name, Overrides | None] = Field(min_length=1, description="overrides of each target")
    variants: dict[Name, Overrides | None] = Field(min_length=1, description="overrides of each variant")
    exclude: tuple[Exclusion, ...] = Field(default=(), description="combinations to leave out")

    @classmethod
    def load(cls, path: Path) -> Matrix:
        """Read the file at `path`.

        Raises:
            RecipeError: it does not validate; the message names file, line, column and key of each problem.
        """
        source = read(path)
        if not isinstance(source.data, dict):
            raise RecipeError(
                f"{source.where(())}: expected a mapping with `schema`, `name`, `models`, `targets` and `variants`"
            )
        try:
            return cls.model_validate_json(json.dumps(source.data), context=folders.followed(path).parent)
        except ValidationError as error:
            raise collect(describe(error, source, cls.model_json_schema())) from None


@dataclass(frozen=True)
class Build:
    """One build of a matrix."""

    model: str
    target: str
    variant: str
    recipe: Path
    overrides: tuple[str, ...]  # `KEY=VALUE`, the artifact's name among them
    url: str | None = None  # of its checkpoint, where that is to be fetched

    @property
    def title(self) -> str:
        """Name it for people."""
        return f"{self.model}/{self.target}/{self.variant}"

    def load(self) -> Recipe:
        """Read its recipe, with its overrides.

        Raises:
            RecipeError, UsageError: see `Recipe.load` and `Recipe.instantiate`.
        """
        loaded = Recipe.load(self.recipe, self.overrides)
        loaded.instantiate(passes.ALL)
        return loaded


def expand(matrix: Matrix, path: Path, overrides: Sequence[str] = ()) -> list[Build]:
    """List the builds of the matrix that was read from `path`; `overrides` are those of the command line, which win.

    Neighbours are of different models: what builds of one model have in common is computed by the first of them.

    Raises:
        UsageError: no recipe is named, names are too long together, an exclusion is of no build, or nothing is left.
    """
    made = list(_combinations(matrix, path, overrides))
    for excluded in matrix.exclude:
        if not any(excluded.leaves_out(build.model, build.target, build.variant) for build in made):
            raise UsageError(f"{path}: exclude: {excluded.model_dump(exclude_none=True)}: there is no such build")
    left = [
        each
        for each in made
        if not any(excluded.leaves_out(each.model, each.target, each.variant) for excluded in matrix.exclude)
    ]
    if not left:
        raise UsageError(f"{path}: `exclude` leaves no build")
    if len(left) > MOST_BUILDS:
        raise UsageError(f"{path}: {len(left)} builds; at most {MOST_BUILDS} are allowed")
    return left


def _combinations(matrix: Matrix, path: Path, overrides: Sequence[str]) -> Iterator[Build]:
    for variant, of_variant in matrix.variants.items():
        for target, of_target in matrix.targets.items():
            for model, of_model in matrix.models.items():
                default: Overrides = {"target": target}
                entries = [of_model or {}, default if of_target is None else of_target, of_variant or {}]
                values: dict[str, Any] = {key: value for entry in entries for key, value in entry.items()}
                recipe = values.pop(_RECIPE, None)
                where = f"{path}: {model}/{target}/{variant}"
                if recipe is None and matrix.recipe is None:
                    raise UsageError(f"{where}: no recipe", hint="add `recipe: FILE.yaml`, relative to the matrix")
                if recipe is not None and not isinstance(recipe, str):
                    raise UsageError(f"{where}: recipe must be a path")
                file = matrix.recipe if recipe is None else folders.followed(folders.followed(path).parent / recipe)
                assert file is not None
                url = _resolve(values)
                named = (*_named(values, where, model, target, variant), *overrides)
                yield Build(model, target, variant, file, named, url)


def _resolve(values: dict[str, Any]) -> str | None:
    """Put a path, or a name on the Hub, in the place of the URL of a checkpoint; return a URL that is to be fetched."""
    written = values.get(_CHECKPOINT)
    if not isinstance(written, str) or "://" not in written:
        return None
    if (named := checkpoints.on_hub(written)) is not None:
        values[_CHECKPOINT], revision = named
        if revision is not None:
            values.setdefault("revision", revision)
        return None
    values[_CHECKPOINT] = str(checkpoints.place_of(written))
    return written


def _named(values: Mapping[str, Any], where: str, *parts: str) -> Iterator[str]:
    """Write overrides, and give the artifact a name where they do not."""
    name = "-".join(parts)
    if "name" not in values:
        if not is_name(name) or len(name) > 64:
            raise UsageError(f"{where}: {name!r} is too long for a name", hint="use shorter names, or set `name`")
        yield f"name={name}"
    for key, value in values.items():
        yield f"{key}={json.dumps(value, ensure_ascii=False)}"
