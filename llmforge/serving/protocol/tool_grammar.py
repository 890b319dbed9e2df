"""Grammars (llguidance's Lark) of the arguments of calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmforge.base.errors import UsageError
from llmforge.runtime.sampling.constraints import WHITE_SPACE
from llmforge.serving.protocol.tool_values import resolved, schema_types

MOST_PARAMETERS = 32  # that a schema does not name
_HELD = frozenset({"pattern", "format", "minLength", "maxLength"})  # what a string may be held to in JSON alone


@dataclass(frozen=True)
class ParameterGrammar:
    """How parameters are written, as Lark.

    Args:
        before: stands before a name,
        between: between it and a value,
        after: after a value that is JSON.
        ends: the regular expression of what ends a text; empty where a special token does,
        further: and what stands after it, or begins with that token.
    """

    before: str
    between: str
    after: str
    ends: str
    further: str


def arguments(rule: str, schema: Mapping[str, Any], parameter: ParameterGrammar | None) -> list[str]:
    """Write the rules of arguments that match `schema`, which is one that `exact` has written; the first is `rule`.

    With `parameter`, arguments are written one by one, else as JSON.

    Raises:
        UsageError: strings as they are cannot be held to the schema.
    """
    if parameter is None:
        return [f"{rule}: {_json({'type': 'object', **schema})}"]
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    rules, parts = list[str](), list[str]()
    for i, (name, each) in enumerate(properties.items()):
        parts.append(f"{rule}p{i}" if name in required else f"{rule}p{i}?")
        rules.append(f"{rule}p{i}: {parameter.before} {json.dumps(name)} {parameter.between} {rule}v{i}")
        rules += _value(f"{rule}v{i}", name, each, schema, parameter)
    if not properties and schema.get("additionalProperties") is not False:
        parts.append(f"{rule}any{{0,{MOST_PARAMETERS}}}")
        rules.append(f'{rule}any: {parameter.before} /[^<>\\n="]{{1,64}}/ {parameter.between} {rule}text')
        rules += _text(f"{rule}text", parameter)
    return [f"{rule}: {' '.join(parts) or _EMPTY}", *rules]


_EMPTY = '""'


def _value(rule: str, name: str, schema: Any, root: Mapping[str, Any], parameter: ParameterGrammar) -> list[str]:
    """Write the rules of one value and what ends it: text where it may be a string, else JSON."""
    types = schema_types(schema, root)
    meant = schema
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        meant = resolved(schema["$ref"], root)
    if types is not None and "string" not in types:
        definitions = {word: root[word] for word in ("$defs", "definitions") if word in root}
        return [f"{rule}: {_json({**schema, **definitions})} {parameter.after}"]
    if isinstance(meant, Mapping):
        if held := sorted(_HELD & meant.keys()):
            raise UsageError(
                f"tools: {held[0]} of the parameter {name[:64]!r} is not supported: this checkpoint writes strings as "
                "they are, not as JSON",
                hint="leave it out, or set strict: false",
            )
        given = [meant["const"]] if "const" in meant else meant.get("enum")
        if isinstance(given, list) and given:
            texts = [each if isinstance(each, str) else json.dumps(each) for each in given]
            return [f"{rule}: ({' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}) {parameter.after}"]
    return _text(rule, parameter)


def _text(rule: str, parameter: ParameterGrammar) -> list[str]:
    """Write the rule of any text and what ends it, where that first stands."""
    kind = "[lazy]" if parameter.ends else ""
    return [f"{rule}: {rule}s {parameter.further}".rstrip(), f"{rule}s{kind}: /(?s:.*){parameter.ends}/"]


def _json(schema: Mapping[str, Any]) -> str:
    spaced = {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    return f"%json {json.dumps(spaced, ensure_ascii=False)}"
