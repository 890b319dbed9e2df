"""What the values of parameters are where a markup writes strings as they are: told by the schemas of tools."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

STRING = frozenset({"string"})
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}
_MOST_REFERENCES = 16  # one after another, before a schema says what it is


def property_of(name: str, schema: Mapping[str, Any]) -> Any:
    """Give the schema of a parameter, or {} where the schema of the arguments has none."""
    properties = schema.get("properties")
    return properties.get(name, {}) if isinstance(properties, Mapping) else {}


def types_of(name: str, schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Give the types of JSON that a parameter may have by the schema of the arguments; None: it does not say."""
    return schema_types(property_of(name, schema), schema)


def schema_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """Give the types that a schema allows; references are to `root`. None: it does not say."""
    if not isinstance(schema, Mapping) or depth > _MOST_REFERENCES:
        return None
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(each for each in given if isinstance(each, str))
    if "const" in schema:
        return frozenset({kind_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(kind_of(each) for each in schema["enum"])
    if isinstance(schema.get("$ref"), str):
        return schema_types(resolved(schema["$ref"], root), root, depth + 1)
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            found = [schema_types(each, root, depth + 1) for each in schema[word]]
            return None if None in found else frozenset[str]().union(*(each for each in found if each is not None))
    return None


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """Follow a reference ("#/$defs/NAME") into the schema of the arguments; None where it leads nowhere."""
    found: Any = root if reference.startswith("#") else None
    for part in filter(None, reference.removeprefix("#").split("/")):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def kind_of(value: Any) -> str:
    """Name the type of a value as JSON Schema does."""
    return _TYPES.get(type(value), "object")


def argument(text: str, types: frozenset[str] | None) -> Any:
    """Read a value: JSON, or what templates make of Python's values ("True"); text where it is neither, or may be."""
    if types == STRING:
        return text
    for value in _readings(text):
        kind = kind_of(value)
        if types is None:
            return text if kind == "string" else value
        if kind in types or (kind == "integer" and "number" in types):
            return value
        if kind == "number" and "integer" in types and value == value // 1:
            return int(value)
    if types is not None and "string" in types:
        return text
    return next((value for value in _readings(text)), text)


def _readings(text: str) -> Iterator[Any]:
    """Read a text as JSON, else as a literal of Python."""
    for read in (_json, ast.literal_eval):
        try:
            value = read(text.strip())
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        yield json.loads(json.dumps(value))


def _json(text: str) -> Any:
    return json.loads(text)
