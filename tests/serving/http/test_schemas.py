"""Answers held to JSON schemas, each checked by jsonschema; what cannot be held to is refused, not loosened."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from llmforge import serving as runtime
from llmforge.serving import Engine

from ...samples.small_artifact import publish_small
from .test_serve import client_of, serving

pytest.importorskip("llguidance")
jsonschema: Any = pytest.importorskip("jsonschema", reason="the extra dev")

ASK: Any = [{"role": "user", "content": "What is it like?"}]
BOOLEAN, NULL, COUNT = {"type": "boolean"}, {"type": "null"}, {"type": "integer", "minimum": -5, "maximum": 90}
WORD = {"type": "string", "pattern": "^[a-z ]{1,8}$"}


def string(**more: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": 40, **more}


def number(kind: str = "number", **more: Any) -> dict[str, Any]:
    return {"type": kind, **more}


def array(items: Any, fewest: int = 0, most: int = 3, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": fewest, "maxItems": most, **more}


def closed(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    properties = {**required, **(optional or {})}
    return {
        "type": "object", "properties": properties, "required": list(required), "additionalProperties": False, **more,
    }  # fmt: skip


SCHEMAS: dict[str, dict[str, Any]] = {
    "boolean": BOOLEAN,
    "null": NULL,
    "several types": {"type": ["integer", "null", "boolean"], "minimum": 3, "maximum": 7},
    "enum of texts": {"enum": ["red", "gr\"ee\\n", "bl\nue", "gelb ß", "🙂"]},
    "enum of all kinds": {"enum": [1, 2.5, None, True, "x", [1, "a"], {"a": {"b": []}}]},
    "enum that bounds cut": {"enum": [1, 5, 9, "abc"], "minimum": 4, "maxLength": 2},
    "const": {"const": {"a": [1, 2, {"b": None}]}},
    "integer within bounds": COUNT,
    "integer beyond bounds": number("integer", exclusiveMinimum=-3, exclusiveMaximum=3),
    "integer within fractions": number("integer", minimum=0.5, maximum=3.5),
    "multiples": number("integer", multipleOf=7, minimum=-50, maximum=50),
    "number within bounds": number(minimum=-0.5, maximum=0.25),
    "number beyond bounds": number(exclusiveMinimum=0, exclusiveMaximum=1),
    "quarters": number(multipleOf=0.25, minimum=-2, maximum=2),
    "multiples of two": {"allOf": [number("integer", multipleOf=4), {"multipleOf": 6, "minimum": 0, "maximum": 100}]},
    "length": string(minLength=2, maxLength=4),
    "pattern": WORD,
    "pattern anywhere": string(pattern="ab", maxLength=9),
    "pattern of either end": string(pattern="^a|b$", maxLength=5),
    "pattern and length": string(pattern="^[A-Z]+-[0-9]+$", minLength=5, maxLength=9),
    "date": string(format="date"),
    "time": string(format="time"),
    "date and time": string(format="date-time"),
    "29 February": string(format="date", pattern="^[0-9]{2}0[0-9]-02-29$"),
    "duration": string(format="duration"),
    "mail": string(format="email"),
    "host": string(format="hostname"),
    "IPv4": string(format="ipv4"),
    "IPv6": string(format="ipv6"),
    "URI": string(format="uri"),
    "UUID": string(format="uuid"),
    "int64 of OpenAPI": number("integer", format="int64", minimum=0, maximum=9, default=3, description="A number."),
    "array": array(COUNT, 1),
    "array of arrays": array(array(BOOLEAN, 2, 2), 2, 2),
    "tuple": {"type": "array", "prefixItems": [BOOLEAN, NULL], "items": COUNT, "minItems": 2, "maxItems": 4},
    "short tuple": {"type": "array", "prefixItems": [BOOLEAN, NULL], "items": False},
    "object": closed({"name": WORD, "age": COUNT}),
    "object of optional properties": closed({"a": BOOLEAN}, {"b": COUNT, "c": NULL}),
    "odd names": closed({"a\"b\\\n": BOOLEAN, "größe": NULL, "$ref": COUNT, "format": BOOLEAN}),
    "nested objects": closed({"a": closed({"b": closed({"c": closed({"d": WORD})})})}),
    "names by pattern": {"type": "object", "patternProperties": {"^x[0-9]$": COUNT}, "additionalProperties": False,
                         "maxProperties": 2},
    "a name beside a required one": {"type": "object", "required": ["z"], "properties": {"z": BOOLEAN},
                                     "patternProperties": {"^[ab]$": COUNT}, "additionalProperties": False,
                                     "maxProperties": 2, "minProperties": 2},
    "either": {"anyOf": [BOOLEAN, COUNT, closed({"a": WORD})]},
    "one of kinds": {"oneOf": [closed({"kind": {"const": "a"}, "v": COUNT}), closed({"kind": {"const": "b"}})]},
    "all of": {"allOf": [{"type": "object", "properties": {"a": COUNT}, "required": ["a"]},
                         {"properties": {"b": BOOLEAN}, "required": ["b"]}], "maxProperties": 2},
    "bounds in branches": closed({"a": number("integer")}, anyOf=[
        {"properties": {"a": {"minimum": 5, "maximum": 99}}}, {"properties": {"a": {"maximum": -5, "minimum": -99}}}]),
    "definitions": closed({"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
                          **{"$defs": {"leaf": {"anyOf": [BOOLEAN, WORD]}}}),
    "a reference beside bounds": {"$ref": "#/definitions/n", "minimum": 3, "maximum": 8,
                                  "definitions": {"n": {"type": "integer"}}},
    "a reference to a property": closed({"a": COUNT, "b": {"$ref": "#/properties/a"}}),
    "list that holds itself": {"$ref": "#/$defs/node", "$defs": {
        "node": closed({"value": BOOLEAN, "next": {"anyOf": [NULL, {"$ref": "#/$defs/node"}]}})}},
    "tree of arrays": array({"$ref": "#"}, 0, 1),
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "uniqueItems": (array(COUNT, uniqueItems=True), "uniqueItems"),
    "not": (closed({"a": {"type": "integer", "not": {"const": 3}}}), "not"),
    "if": ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
    "oneOf that overlaps": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    "contains": ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    "unknown format": ({"type": "string", "format": "made-up"}, "made-up"),
    "look-ahead": ({"type": "string", "pattern": "^(?=a)b"}, "look-ahead"),
    "patterns that overlap": ({"type": "object", "patternProperties": {"^a": NULL, "b$": COUNT}}, "not disjoint"),
    "remote reference": ({"$ref": "https://example.com/x.json"}, "example.com"),
    "unknown type": ({"type": "strin"}, "strin"),
    "nothing matches": ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum (3)"),
    # Names that come twice count twice to llguidance.
    "fewest properties": (
        {"type": "object", "patternProperties": {"^[ab]$": BOOLEAN}, "additionalProperties": False, "minProperties": 2},
        "minProperties 2 is not supported",
    ),
    # llguidance's switch for leaving out what it cannot check.
    "lenient": ({"type": "object", "x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
    "lenient inside": (closed({"a": {"x-guidance": {"coerce_one_of": True}}}), "x-guidance"),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Iterator[openai.OpenAI]:
    small = publish_small(tmp_path_factory.mktemp("schemas"), sample_checkpoint, eos=(0,), context=2048)
    with Engine(runtime.load(small.path)) as engine, serving(engine) as address, client_of(address) as client:
        yield client


def ask(client: openai.OpenAI, schema: dict[str, Any], seed: int = 0) -> Any:
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    return client.chat.completions.create(
        model="small", messages=ASK, response_format=form, temperature=1, seed=seed, max_tokens=1500
    )


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_answers_are_valid(client: openai.OpenAI, name: str, seed: int) -> None:
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator
    validator.check_schema(schema)
    (choice,) = ask(client, schema, seed).choices
    assert choice.finish_reason == "stop"
    validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(choice.message.content))


def test_there_are_50_schemas() -> None:
    assert len({json.dumps(schema) for schema in SCHEMAS.values()}) >= 50


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_to_is_refused(client: openai.OpenAI, name: str) -> None:
    schema, says = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, schema)
    assert says in raised.value.message
    function = {"name": "f", "parameters": closed({"x": schema})}
    with pytest.raises(openai.BadRequestError) as raised:  # as a tool's arguments, too: here no template has calls
        client.chat.completions.create(
            model="small", messages=ASK, tool_choice="required", tools=[{"type": "function", "function": function}]
        )
