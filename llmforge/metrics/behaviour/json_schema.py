"""Hold JSON to a schema: the keywords of JSON Schema that tools and answers use; others are refused, not skipped.

https://json-schema.org/draft/2020-12/json-schema-validation. Numbers count as integers where they have no fraction,
true and false are no numbers, and `pattern` is searched for, by Python's `re`. Chats are judged by installations that
serve, too (`judge` against an artifact), which have no library for that; tests hold this to `jsonschema`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from llmforge.base.wording import shown

MOST_DEPTH = 32  # of schemas inside of one another

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),),
}  # fmt: skip
_SAID = frozenset({"title", "description", "default", "examples", "format", "$schema", "strict"})  # which hold nothing
_OF_ONE = frozenset({"items", "additionalProperties"})  # a schema each
_OF_MANY = frozenset({"anyOf", "oneOf", "allOf"})
_PLAIN = frozenset(
    {
        "type", "enum", "const", "required", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
        "multipleOf", "minLength", "maxLength", "pattern", "minItems", "maxItems", "uniqueItems",
    }
)  # fmt: skip


def unknown(schema: Any, depth: int = 0) -> str | None:
    """Say what of a schema is not understood; None: nothing."""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
        return "it is no object, or deeper than 32"
    for key, value in schema.items():
        inner: list[Any] = []
        if key == "properties" and isinstance(value, Mapping):
            inner = list(value.values())
        elif key in _OF_ONE:
            inner = [value]
        elif key in _OF_MANY and isinstance(value, list):
            inner = value
        elif key not in _SAID | _PLAIN:
            return f"the keyword {shown(key)}"
        for each in inner:
            if (why := unknown(each, depth + 1)) is not None:
                return why
    types = schema.get("type", [])
    for each in [types] if isinstance(types, str) else types:
        if each not in (*_TYPES, "number", "integer"):
            return f"the type {shown(each)}"
    return None


def valid(value: Any, schema: Any) -> bool:
    """Say whether `value`, as `json.loads` gives it, is what `schema` asks for."""
    if isinstance(schema, bool):
        return schema
    return all(_holds(value, schema))


def read(text: str) -> Any:
    """Read JSON of an answer, which may stand in a fence of Markdown.

    Raises:
        ValueError: it is none; NaN, Infinity and numbers beyond doubles are none.
    """
    fenced = re.fullmatch(r"```(?:json)?\s*\n(.*?)\n?```", text.strip(), re.DOTALL)
    try:
        found = json.loads(fenced[1] if fenced else text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def same(a: Any, b: Any) -> bool:
    """Say whether two values are equal as JSON has it: 1 is 1.0, and true is no 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def _holds(value: Any, schema: Mapping[str, Any]) -> Iterator[bool]:
    types = schema.get("type")
    if types is not None:
        yield any(_is(value, each) for each in ([types] if isinstance(types, str) else types))
    if "enum" in schema:
        yield any(same(value, each) for each in schema["enum"])
    if "const" in schema:
        yield same(value, schema["const"])
    yield all(valid(value, each) for each in schema.get("allOf", ()))
    if "anyOf" in schema:
        yield any(valid(value, each) for each in schema["anyOf"])
    if "oneOf" in schema:
        yield sum(valid(value, each) for each in schema["oneOf"]) == 1
    if isinstance(value, dict):
        yield from _object(value, schema)
    elif isinstance(value, list):
        yield schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        yield not schema.get("uniqueItems") or not any(same(a, b) for i, a in enumerate(value) for b in value[:i])
        yield all(valid(each, schema.get("items", True)) for each in value)
    elif isinstance(value, str):
        yield schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        yield "pattern" not in schema or re.search(schema["pattern"], value) is not None
    elif _is(value, "number"):
        yield schema.get("minimum", value) <= value <= schema.get("maximum", value)
        yield "exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"]
        yield "exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"]
        yield "multipleOf" not in schema or value / schema["multipleOf"] % 1 == 0


def _object(value: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[bool]:
    known = schema.get("properties", {})
    yield all(name in value for name in schema.get("required", ()))
    yield all(valid(each, known.get(name, schema.get("additionalProperties", True))) for name, each in value.items())


def _is(value: Any, kind: str) -> bool:
    if kind in ("number", "integer"):
        whole = kind == "number" or isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return isinstance(value, int | float) and not isinstance(value, bool) and whole
    return isinstance(value, _TYPES[kind])
