"""Requests and answers of the server as an OpenAPI document (https://spec.openapis.org/oas/v3.1.1): `openapi.json`.

What the tables say that requests are read by is added to it: which fields are ignored, or may ask for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from starlette.routing import Route

from llmforge import __version__
from llmforge.serving.http import completion_call
from llmforge.serving.http.responses import STATUSES


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Describe an application by its routes, each of which the file has."""
    made: dict[str, Any] = json.loads(resources.files(__package__).joinpath("openapi.json").read_text(encoding="utf-8"))
    made["info"]["version"] = __version__
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refusals = {status: {"description": meaning, "content": error} for status, meaning in STATUSES.items()}
    made["paths"] = {route.path_format: made["paths"][route.path_format] for route in routes}
    for route in routes:
        for operation in made["paths"][route.path_format].values():
            operation["responses"] |= refusals
    schemas = made["components"]["schemas"]
    common = {name: {"enum": list(values)} if values else False for name, values in completion_call.HARMLESS.items()}
    common |= {name: {} for name in completion_call.IGNORED} | schemas.pop("Parameters")
    for name in ("ChatRequest", "CompletionRequest"):
        own = schemas[name]["properties"]
        optional = {field: {"anyOf": [schema, {"type": "null"}]} for field, schema in (common | own).items()}
        schemas[name]["properties"] = optional | {field: own[field] for field in schemas[name]["required"]}
    return made
