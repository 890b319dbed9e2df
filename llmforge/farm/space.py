"""Where a search looks: options of a recipe and their values, and what it is after."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from llmforge import passes
from llmforge.base.errors import RecipeError, UsageError
from llmforge.base.located_yaml import parse
from llmforge.metrics import catalog
from llmforge.quantization import methods
from llmforge.recipe import Recipe
from llmforge.recipe.errors import meant
from llmforge.rewrite import options
from llmforge.rewrite.pass_base import Numerics

Space = Mapping[str, tuple[str, ...]]  # values by the key of a recipe, as JSON
Choice = Mapping[str, str]  # one value of each

_NOT_SEARCHED = {
    "accuracy_level",  # 8 bits run at one level alone, and others are slow
    "routers",
}
_NOT_VALUES = {methods.AUTO, methods.STORED}  # methods that need other options, or a quantized checkpoint
_LIMIT = re.compile(r"\s*([A-Za-z0-9_.]+)\s*(<=|>=)\s*(\S+)\s*")
_SHORT = ("_p50_ms", "_bytes", "_mean", "_ms")  # what may be left out at the end of a metric's name


@dataclass(frozen=True)
class Limit:
    """A constraint: the figure of `metric` is at most, or at least, `value`."""

    metric: str
    at_most: bool
    value: float

    def excess(self, value: float) -> float:
        """By how much a figure is beyond the limit; 0 or less: it keeps it."""
        return value - self.value if self.at_most else self.value - value

    def __str__(self) -> str:
        return f"{self.metric}{'<=' if self.at_most else '>='}{self.value:g}"


def metric_of(name: str) -> str:
    """Find the metric that is meant: `tpot` is the median of TPOT, `size` its bytes.

    Raises:
        UsageError: there is none, or none of which one direction is better.
    """
    known = catalog.limitable()
    for each in (name, *(f"{name}{end}" for end in _SHORT)):
        found = known.get(each) or catalog.find(each)  # of a task, or of a plug-in
        if found is not None and found.better != "neither":
            return each
    raise UsageError(
        f"no metric is called {name!r}; known: {', '.join(known)}", hint=meant(name, list(known)) or "docs/quality.md"
    )


def objective_of(name: str) -> str:
    """Find the metric that is to be as low, or as high, as it can.

    Raises:
        UsageError: as `metric_of`; or it is best at the checkpoint's own figure.
    """
    found = metric_of(name)
    if (ideal := catalog.named(found).ideal) is not None:
        raise UsageError(
            f"--objective {name}: best is {ideal:g}, neither less nor more", hint=f"--subject-to '{found}<=NUMBER'"
        )
    return found


def limit_of(text: str) -> Limit:
    """Read `METRIC<=NUMBER` or `METRIC>=NUMBER`.

    Raises:
        UsageError: it is neither.
    """
    match = _LIMIT.fullmatch(text)
    try:
        value = float(match[3]) if match is not None else float("nan")
    except ValueError:
        value = float("nan")
    if match is None or value != value:
        raise UsageError(f"--subject-to {text!r}: expected METRIC<=NUMBER or METRIC>=NUMBER", hint="kld_mean<=0.02")
    return Limit(metric_of(match[1]), match[2] == "<=", value)


def of_recipe(path: Path, overrides: Sequence[str], given: Sequence[str]) -> tuple[Space, dict[str, str]]:
    """List the options to search, and the values that the recipe has for them.

    By default: of each `quantize-` pass of the recipe the options that are a choice or a switch, with the values that
    the recipe can have, nothing else changed. `given` are `KEY=[VALUE, …]`, which add options or replace values.

    Raises:
        UsageError, RecipeError: there is nothing to search, or what was given is no choice of the recipe.
    """
    recipe = Recipe.load(path, overrides)
    steps = recipe.instantiate(passes.ALL)
    space: dict[str, tuple[str, ...]] = {}
    written: dict[str, str] = {}
    for step in steps:
        if step.numerics is not Numerics.LOSSY or not step.name.startswith("quantize-"):
            continue
        own = options.values(step)
        for name, known in _choices(options.schema(type(step))):
            key, here = f"passes.{step.name}.{name}", _json(own[name])
            kept = [value for value in map(_json, known) if value == here or is_valid(path, overrides, {key: value})]
            if len(kept) > 1:
                space[key], written[key] = tuple(kept), here
    for text in given:
        key, values = _given(text)
        space[key] = values
        written.pop(key, None)
        for value in values:
            if not is_valid(path, overrides, {key: value}):
                Recipe.load(path, (*overrides, *words({key: value}))).instantiate(passes.ALL)  # says what is wrong
        written[key] = _written(recipe, key, values)
        if len(values) < 2:
            del space[key]
    if not space:
        raise UsageError(
            f"{path}: there is nothing to search: no pass quantizes", hint="add --option KEY=[VALUE,VALUE]"
        )
    return space, {key: written[key] for key in space}


def words(choice: Choice) -> tuple[str, ...]:
    """Write a choice as overrides."""
    return tuple(f"{key}={value}" for key, value in choice.items())


def is_valid(path: Path, overrides: Sequence[str], choice: Choice) -> bool:
    """Say whether the recipe can be what a choice makes of it."""
    try:
        Recipe.load(path, (*overrides, *words(choice))).instantiate(passes.ALL)
    except RecipeError:
        return False
    return True


def _choices(schema: Mapping[str, Any]) -> Iterator[tuple[str, list[JsonValue]]]:
    for name, option in schema["properties"].items():
        if name in _NOT_SEARCHED:
            continue
        values = [False, True] if option.get("type") == "boolean" else option.get("enum", [])
        kept = [value for value in values if not (name == "method" and value in _NOT_VALUES)]
        if len(kept) > 1:
            yield name, kept


def _given(text: str) -> tuple[str, tuple[str, ...]]:
    key, equals, values = text.partition("=")
    read = parse(values, Path("--option")).data if values.strip() else None
    if not equals or not isinstance(read, list) or not read:
        raise UsageError(f"--option {text!r}: expected KEY=[VALUE, VALUE]", hint="engine.threads=[2,4]")
    return key.strip(), tuple(map(_json, read))


def _written(recipe: Recipe, key: str, values: Sequence[str]) -> str:
    """Find the recipe's own value of a key, or take the first of `values`."""
    resolved: Any = recipe.resolved(recipe.instantiate(passes.ALL))
    for part in key.split("."):
        if isinstance(resolved, list):  # of passes
            resolved = next((entry[part] for entry in resolved if part in entry), None)
        else:
            resolved = resolved.get(part) if isinstance(resolved, dict) else None
    found = _json(resolved)
    return found if found in values else values[0]


def _json(value: JsonValue) -> str:
    return json.dumps(value, sort_keys=True)
