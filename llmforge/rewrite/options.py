"""The options of a pass are the fields of its class: their names, their JSON Schema, and how they are checked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails

from llmforge.rewrite.pass_base import Pass


def names(cls: type[Pass]) -> list[str]:
    """List the options of a pass, in the order of its fields."""
    return [field.name for field in dataclasses.fields(cast(Any, cls))]  # Pass itself is no dataclass, each subclass is


def schema(cls: type[Pass]) -> dict[str, Any]:
    """Make the JSON Schema of the options of a pass; it allows no others."""
    return {**TypeAdapter(cls).json_schema(), "additionalProperties": False}


def make(cls: type[Pass], options: Mapping[str, Any]) -> Pass:
    """Make a pass from options in plain data; no type is coerced, no option is ignored.

    Raises:
        ValidationError: an option does not exist, is missing, or has the wrong type or range.
    """
    problems = [
        InitErrorDetails(type="extra_forbidden", loc=(name,), input=value)
        for name, value in options.items()
        if name not in names(cls)
    ]
    try:
        # As JSON, so that a list may become a tuple and a string a path while all else stays strict.
        instance = TypeAdapter(cls).validate_json(json.dumps(options), strict=True)
        if not problems:
            return instance
    except ValidationError as error:
        problems += cast(list[InitErrorDetails], error.errors())  # with more fields, which are not read
    raise ValidationError.from_exception_data(cls.name, problems)


def values(instance: Pass) -> dict[str, Any]:
    """Write the options of a pass in plain data, defaults included."""
    plain: dict[str, Any] = TypeAdapter(type(instance)).dump_python(instance, mode="json")
    return plain
