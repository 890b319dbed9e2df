"""The JSON Schema of a recipe, for editors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from llmforge import targets
from llmforge.recipe.recipe import Recipe
from llmforge.rewrite import options
from llmforge.rewrite.pass_base import Pass


def json_schema(registry: Sequence[type[Pass]], of_plugins: Sequence[str] = ()) -> dict[str, Any]:
    """Make the JSON Schema of a recipe, for editors; it includes the options of each pass.

    `of_plugins` are the methods of plug-ins that it is to list, with their options.
    """
    whole = Recipe.model_json_schema(by_alias=True)
    definitions = whole["$defs"]
    definitions.pop("PassSpec")
    definitions.pop("JsonValue", None)
    entries: list[dict[str, Any]] = []
    for cls in registry:
        own = options.schema(cls)
        for method in of_plugins:
            if (more := cls.taking({"method": method})) is not cls:
                _add(own, options.schema(more))
        title = inspect.getdoc(cls) or cls.name
        short = title.splitlines()[0]
        definitions |= {**own.pop("$defs", {}), cls.name: {**own, "description": title}}
        if not own.get("required"):
            entries.append({"const": cls.name, "description": short})
        entries.append(
            {
                "type": "object",
                "description": short,
                "properties": {cls.name: {"$ref": f"#/$defs/{cls.name}"}},
                "required": [cls.name],
                "additionalProperties": False,
            }
        )
    whole["properties"]["passes"]["items"] = {"anyOf": entries}
    whole["properties"]["target"]["examples"] = [targets.LOCAL, *targets.names()]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole, "title": "llmforge recipe"}


def _add(schema: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Add the methods and the options of `other` to the schema of the same pass."""
    own, more = schema["properties"], other["properties"]
    methods_ = [*own["method"]["enum"], *(name for name in more["method"]["enum"] if name not in own["method"]["enum"])]
    schema["properties"] = {**more, **own, "method": {**own["method"], "enum": methods_}}
