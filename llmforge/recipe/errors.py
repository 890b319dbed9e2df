"""Errors of recipes, in the words of somebody who writes recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from llmforge.base.errors import RecipeError
from llmforge.base.located_yaml import Location, Source, dotted, nearest
from llmforge.base.wording import shown

NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"  # of an artifact or an adapter in a recipe
_LISTED = 16  # keys that a message names
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
    details = error.errors()
    unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
    misspelled = {(*parent, nearest(str(key), properties(schema, parent) or [])) for *parent, key in unknown}
    for detail in details:
        inner = tuple(part for part in detail["loc"] if part != "[key]")
        if detail["type"] == "missing" and inner in misspelled:
            continue  # one slip, one problem: it is there under the wrong name
        location = (*prefix, *inner)
        key = dotted(tuple(part for i, part in enumerate(location) if not (i == 1 and location[0] == "passes")))
        what, hint = _words(detail, inner, schema)
        problems.append(Problem(source.where(location), key or "recipe", what, hint))
    return problems


def properties(schema: Mapping[str, Any], location: Sequence[str | int]) -> list[str] | None:
    """List the keys that a JSON Schema allows at `location`; None where it does not say."""
    node = _resolve(schema, schema)
    for part in location:
        inner = node.get("properties", {}).get(part, node.get("additionalProperties"))
        if not isinstance(inner, Mapping):
            return None
        node = _resolve(inner, schema)
    return list(node["properties"]) if "properties" in node else None


def _resolve(node: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow `$ref`, and `anyOf` to its alternative that is an object."""
    while "$ref" in node:
        node = root["$defs"][node["$ref"].removeprefix("#/$defs/")]
    for choice in node.get("anyOf", ()):
        resolved = _resolve(choice, root)
        if "properties" in resolved:
            return resolved
    return node


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
    if kind == "string_pattern_mismatch" and detail["ctx"]["pattern"] == NAME:
        allowed = "at most 64 of a-z, 0-9, '.', '_' and '-', a letter or digit first"
        return f"{shown(got)}; allowed are {allowed}", None
    message = detail["msg"].removeprefix("Input ").replace("should ", "must ", 1)
    return f"{message}, not {shown(got)}", None
