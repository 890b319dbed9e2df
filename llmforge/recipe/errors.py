"""Errors of recipes, in the words of somebody who writes recipes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llmforge.base.errors import RecipeError
from llmforge.base.located_yaml import Location, Source, dotted, nearest
from llmforge.base.wording import shown

NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"  # of an artifact or an adapter in a recipe
_LISTED = 16  # keys that a message names
_MAPPINGS = "model_type", "dataclass_type", "dict_type"  # pydantic's errors of what should be a mapping
_LISTS = "tuple_type", "list_type"
_NOT_BUILT = "pipeline_parallel", "kv_offload", "disaggregated_prefill"  # of an engine, in words of the field


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: its place, its key, what is allowed there, and perhaps what to do."""

    where: str  # file:line:column
    key: str  # dotted
    what: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.key}: {self.what}"


def collect(problems: Sequence[Problem]) -> RecipeError:
    """Make one error of all that is wrong."""
    if len(problems) == 1:
        return RecipeError(str(problems[0]), hint=problems[0].hint)
    lines = [f"{problem} ({problem.hint})" if problem.hint else str(problem) for problem in problems]
    return RecipeError("\n".join([f"{len(problems)} problems:", *lines]))


def meant(word: str, known: Sequence[str]) -> str | None:
    """Hint at the known name that `word` is nearest to, or at who answers for a way of serving that is not built."""
    if word in _NOT_BUILT:
        return "it is not supported; the notes of `llmforge plan` say what it would bring on a GPU"
    close = nearest(word, known)
    return f"did you mean {close!r}?" if close not in (None, word) else None


def describe(error: ValidationError, source: Source, schema: Mapping[str, Any], prefix: Location = ()) -> list[Problem]:
    """Say what pydantic found in the data at `prefix`, whose JSON Schema is `schema`."""
    problems = []
    details = [(detail, _split(detail["loc"], schema)[0]) for detail in _told(error.errors(), schema)]
    unknown = [location for detail, location in details if detail["type"] == "extra_forbidden"]
    misspelled = {(*parent, nearest(str(key), properties(schema, parent) or [])) for *parent, key in unknown}
    for detail, inner in details:
        if detail["type"] == "missing" and inner in misspelled:
            continue  # one slip, one problem: it is there under the wrong name
        location = (*prefix, *inner)
        key = dotted(tuple(part for i, part in enumerate(location) if not (i == 1 and location[0] == "passes")))
        what, hint = _words(detail, inner, schema)
        problems.append(Problem(source.where(location), key or "recipe", what, hint))
    return problems


def _told(details: Sequence[ErrorDetails], schema: Mapping[str, Any]) -> list[ErrorDetails]:
    """Leave out what pydantic says besides: of a union all branches, and of a list its length without the bad items.

    The branch that is told is the first that takes the kind of value that was given, else the first that is no mapping.
    """
    misfits = {
        detail["loc"]: 2 if detail["type"] in _MAPPINGS else 1
        for detail in details
        if detail["type"] == "literal_error" or detail["type"].endswith("_type")
    }
    branches: dict[Location, list[Location]] = {}  # by the union
    for detail in details:
        for branch in _split(detail["loc"], schema)[1]:
            branches.setdefault(branch[:-1], []).append(branch)
    chosen = {min(each, key=lambda branch: misfits.get(branch, 0)) for each in branches.values()}
    told = [detail for detail in details if chosen.issuperset(_split(detail["loc"], schema)[1])]
    inside = {detail["loc"][:depth] for detail in told for depth in range(len(detail["loc"]))}
    return [each for each in told if not (each["type"] == "too_short" and each["input"] and each["loc"] in inside)]


def _split(loc: Location, schema: Mapping[str, Any]) -> tuple[Location, list[Location]]:
    """Split where pydantic found an error into the place in the data and the branches of unions on the way there."""
    location: Location = ()
    branches = []
    node: Mapping[str, Any] | None = schema
    at_union = False
    for depth, part in enumerate(loc):
        if part == "[key]":
            continue
        if at_union and isinstance(part, str):
            branches.append(loc[: depth + 1])
            at_union = False
            continue
        location = (*location, part)
        node = None if node is None else _inner(node, part, schema)
        at_union = node is not None and len(_alternatives(node, schema)) > 1
    return location, branches


def properties(schema: Mapping[str, Any], location: Sequence[str | int]) -> list[str] | None:
    """List the keys that a JSON Schema allows at `location`; None where it does not say."""
    node = _at(schema, location)
    choices = () if node is None else _alternatives(node, schema)
    return next((list(choice["properties"]) for choice in choices if "properties" in choice), None)


def allows(schema: Mapping[str, Any], location: Sequence[str | int]) -> bool:
    """Tell whether a JSON Schema has something at `location`; a mapping may allow any name."""
    return _at(schema, location) is not None


def _at(schema: Mapping[str, Any], location: Sequence[str | int]) -> Mapping[str, Any] | None:
    node: Mapping[str, Any] | None = schema
    for part in location:
        node = None if node is None else _inner(node, part, schema)
    return node


def _inner(node: Mapping[str, Any], part: str | int, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Find the schema of a key or an item; None: there is none."""
    for choice in _alternatives(node, root):
        if isinstance(part, int):
            inner = choice.get("items")
        else:
            is_open = "properties" not in choice  # of any name; another one than the pattern's is refused later
            named = choice.get("patternProperties", {}).items()
            found = (each for pattern, each in named if is_open or re.search(pattern, part))
            inner = choice.get("properties", {}).get(part) or next(found, choice.get("additionalProperties"))
        if isinstance(inner, Mapping):
            return inner
    return None


def _alternatives(node: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Follow `$ref` and `anyOf` to all that may stand there besides null."""
    while "$ref" in node:
        node = root["$defs"][node["$ref"].removeprefix("#/$defs/")]
    if "anyOf" in node:
        return [each for choice in node["anyOf"] for each in _alternatives(choice, root)]
    return [] if node.get("type") == "null" else [node]


def _listed(keys: Sequence[str]) -> str:
    """Name keys; of many, the first ones, so that a message has room for what else is wrong."""
    more = len(keys) - _LISTED
    return ", ".join(keys) if more <= 0 else f"{', '.join(keys[:_LISTED])} and {more} more"


def _words(detail: Mapping[str, Any], location: Location, schema: Mapping[str, Any]) -> tuple[str, str | None]:
    """Turn one pydantic error into what is wrong and a hint."""
    kind, got = detail["type"], detail["input"]
    if kind == "missing":
        inside = properties(schema, location)
        return "required key is missing" + (f"; its keys: {_listed(inside)}" if inside else ""), None
    if kind == "extra_forbidden":
        known = properties(schema, location[:-1]) or []
        return f"unknown key; allowed: {_listed(known) or 'none'}", meant(str(location[-1]), known)
    if kind == "value_error":
        return str(detail["ctx"]["error"]), None
    if kind == "literal_error":
        allowed = str(detail["ctx"]["expected"])
        words = [word.strip("' ") for word in allowed.replace(" or ", ", ").split(",")]
        if len(words) > _LISTED:
            allowed = _listed([f"'{word}'" for word in words])
        return f"must be {allowed}, not {shown(got)}", meant(got, words) if isinstance(got, str) else None
    if kind in _MAPPINGS:
        keys = properties(schema, location)
        return f"must be a mapping{f' with the keys {_listed(keys)}' if keys else ''}, not {shown(got)}", None
    if kind in _LISTS:
        return f"must be a list, not {shown(got)}", None
    if kind == "too_short":
        least, given = detail["ctx"]["min_length"], detail["ctx"]["actual_length"]
        return f"must have at least {least} item{'s' if least > 1 else ''}, not {given}", None
    if kind == "string_pattern_mismatch" and detail["ctx"]["pattern"] == NAME:
        allowed = "at most 64 of a-z, 0-9, '.', '_' and '-', a letter or digit first"
        return f"{shown(got)}; allowed are {allowed}", None
    message = detail["msg"].removeprefix("Input ").replace("should ", "must ", 1)
    return f"{message}, not {shown(got)}", None
