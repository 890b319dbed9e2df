"""`--set KEY.KEY=VALUE`: change a recipe from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmforge.base.errors import RecipeError, UsageError
from llmforge.base.located_yaml import Location, Plain, Source, parse
from llmforge.metrics import catalog
from llmforge.recipe import errors
from llmforge.recipe.gates import GateSpec

_LONGEST = 120  # characters of an override in a message
_DEEPEST = 8  # keys inside keys; recipes have four


def apply(overrides: Sequence[str], source: Source, schema: Mapping[str, Any]) -> None:
    """Write each override into the data of `source`, in order; `schema` says which keys exist outside of `passes`.

    `passes.NAME.OPTION` sets an option of the one pass of that name. Values are YAML.

    Raises:
        UsageError: an override has no `=`, or names a key or a pass that does not exist.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise UsageError(f"--set {_told(override)}: expected KEY.KEY=VALUE", hint="--set engine.max_context=512")
        value = _value(override, text)
        path = _path(key.strip(), value)
        if len(path) > _DEEPEST:
            raise UsageError(f"--set {_told(override)}: {len(path)} keys deep; no recipe has more than {_DEEPEST}")
        if path[0] == "passes" and len(path) > 1:
            _set_option(source, path, value, override)
        else:
            _require_known(path, schema, override)
            _assign(source, source.mapping, path, value, override, outer=())


def _path(key: str, value: Plain) -> tuple[str, ...]:
    """Split a key at its dots; those in the name of a metric stay: `gates.task.arc_easy.acc.min`."""
    first, *rest = key.split(".")
    if first != "gates" or len(rest) < 2:
        return (first, *rest)
    whole, metric, limit = ".".join(rest), ".".join(rest[:-1]), rest[-1]
    if not isinstance(value, Mapping) and (limit in GateSpec.model_fields or catalog.find(metric) is not None):
        return first, metric, limit
    return first, whole


def _told(override: str) -> str:
    """Shorten an override for a message."""
    return override if len(override) <= _LONGEST else f"{override[:_LONGEST]}..."


def _value(override: str, text: str) -> Plain:
    """Read the right-hand side as YAML; nothing at all is null."""
    if not text.strip():
        return None
    try:
        return parse(text, Path("value")).data
    except RecipeError as error:
        raise UsageError(f"--set {_told(override)}: {error.message}") from None


def _require_known(path: Sequence[str], schema: Mapping[str, Any], override: str) -> None:
    for depth, part in enumerate(path):
        if errors.allows(schema, path[: depth + 1]):
            continue
        known = errors.properties(schema, path[:depth])
        raise UsageError(
            f"--set {_told(override)}: no key {'.'.join(path[: depth + 1])!r}; "
            + (f"known: {', '.join(known)}" if known else f"{'.'.join(path[:depth])!r} has no keys"),
            hint=errors.meant(part, known or ()),
        )


def _set_option(source: Source, path: Sequence[str], value: Plain, override: str) -> None:
    """Set an option of a pass, whose entry may be a bare name."""
    entries = source.mapping.get("passes")
    entries = entries if isinstance(entries, list) else []
    names = [next(iter(entry), "") if isinstance(entry, dict) else str(entry) for entry in entries]
    _, name, *option = path
    if name not in names or not option:
        raise UsageError(
            f"--set {_told(override)}: "
            + (f"the recipe has no pass {name!r}; " if option else "gives no option; ")
            + f"its passes: {', '.join(names) or 'none'}",
            hint=errors.meant(name, names) if option else f"--set passes.{name}.OPTION=VALUE",
        )
    if names.count(name) > 1:
        times = f"the recipe has pass {name!r} {names.count(name)} times"
        raise UsageError(f"--set {_told(override)}: {times}; edit the recipe")
    index = names.index(name)
    entry = entries[index]
    if not isinstance(entry, dict) or entry[name] is None:
        entry = entries[index] = {name: {}}
    _assign(source, entry, (name, *option), value, override, outer=("passes", index))


def _assign(
    source: Source, data: dict[str, Any], path: Sequence[str], value: Plain, override: str, outer: Location
) -> None:
    """Put `value` at `path` below `data`, which stands at `outer`; sections on the way are made where absent."""
    where = source.where(outer)
    for part in path[:-1]:
        if data.get(part) is None:
            data[part] = {}
        data = data[part]
        if not isinstance(data, dict):
            raise UsageError(f"--set {_told(override)}: {part!r} is not a section in the recipe ({where})")
    data[path[-1]] = value
    location = (*outer, *path)
    for place in [known for known in source.places if known[: len(location)] == location]:
        del source.places[place]
    source.places[location] = f"--set {_told(override)}"
