"""Requests and answers of the server as an OpenAPI document (https://spec.openapis.org/oas/v3.1.1).

The fields of requests come from the tables that requests are read by, and the paths from the application's routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.routing import Route

from llmforge import __version__
from llmforge.runtime.sampling import parameters
from llmforge.serving.http import completion_call
from llmforge.serving.http.responses import STATUSES
from llmforge.serving.protocol import tools

Schema = Mapping[str, Any] | bool

_TEXT, _COUNT = {"type": "string"}, {"type": "integer"}
_IDS = {"type": "array", "items": _COUNT, "minItems": 1}
_OBJECT = {"type": "object"}


def _object(properties: Mapping[str, Schema], required: Sequence[str] | None = None) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties if required is None else required)
    }  # fmt: skip


def _array(items: Schema) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_CALL = _object({"id": _TEXT, "type": {"const": "function"}, "function": _object({"name": _TEXT, "arguments": _TEXT})})
_FUNCTION = _object(
    {"name": _TEXT, "description": _TEXT, "parameters": _OBJECT, "strict": {"type": "boolean"}}, ["name"]
)
_MESSAGE = _object(
    {
        "role": _TEXT,
        "content": {"anyOf": [_TEXT, _array(_object({"type": {"const": "text"}, "text": _TEXT})), {"type": "null"}]},
        "tool_calls": _nullable(_array(_OBJECT)),
    },
    ["role"],
)
_PROMPT = {"anyOf": [_TEXT, _IDS, {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}, "minItems": 1}]}
_TOOLS: Mapping[str, Schema] = {
    "tools": {
        "type": "array",
        "items": _object({"type": {"const": "function"}, "function": _FUNCTION}),
        "maxItems": tools.MOST_TOOLS,
    },
    "tool_choice": {
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            _object({"type": {"const": "function"}, "function": _object({"name": _TEXT})}),
        ]
    },
    "parallel_tool_calls": {"type": "boolean"},
}
_OWN: Mapping[str, Schema] = {
    "model": _TEXT,
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "prompt": _PROMPT,
    "stream": {"type": "boolean"},
    "stream_options": _object({"include_usage": {"type": "boolean"}, "include_obfuscation": {"type": "boolean"}}, []),
}


def _request(prompt: str, other: str, reads: Mapping[str, Schema]) -> dict[str, Any]:
    """Describe the body of a call whose prompt is the field `prompt`, and which has no field `other`."""
    fields: dict[str, Schema] = {name: {} for name in completion_call.IGNORED}
    fields |= {name: {"enum": list(values)} if values else False for name, values in completion_call.HARMLESS.items()}
    fields |= {**parameters.schemas(), **{name: _OWN[name] for name in completion_call.OWN if name != other}, **reads}
    properties = {name: _nullable(schema) for name, schema in sorted(fields.items())}
    return {**_object(properties | {prompt: _OWN[prompt]}, [prompt]), "additionalProperties": False}


_CHOICE = {"index": _COUNT, "finish_reason": _nullable(_TEXT), "logprobs": _nullable(_OBJECT)}
_USAGE = _object(
    {
        **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _COUNT),
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
    }
)


def _response(kind: str, choice: Mapping[str, Schema], *, chunk: bool = False) -> dict[str, Any]:
    fields: dict[str, Schema] = {
        "id": _TEXT,
        "object": {"const": kind},
        "created": _COUNT,
        "model": _TEXT,
        "choices": _array(_object({**_CHOICE, **choice})),
        "usage": _nullable(_USAGE) if chunk else _USAGE,
    }
    return _object(fields, [name for name in fields if not (chunk and name == "usage")])


_SCHEMAS: Mapping[str, Schema] = {
    "ChatRequest": _request("messages", "prompt", _TOOLS),
    "CompletionRequest": _request("prompt", "messages", {}),
    "ChatCompletion": _response(
        "chat.completion",
        {
            "message": _object(
                {
                    "role": {"const": "assistant"},
                    "content": _nullable(_TEXT),
                    "refusal": {"type": "null"},
                    "tool_calls": _array(_CALL),
                },
                ["role", "content"],
            )
        },
    ),
    "ChatCompletionChunk": _response(
        "chat.completion.chunk",
        {"delta": _object({"role": _TEXT, "content": _TEXT, "tool_calls": _array(_OBJECT)}, [])},
        chunk=True,
    ),
    "Completion": _response("text_completion", {"text": _TEXT}),
    "CompletionChunk": _response("text_completion", {"text": _TEXT}, chunk=True),
    "Model": _object(
        {
            "id": _TEXT,
            "object": {"const": "model"},
            "created": _COUNT,
            "owned_by": _TEXT,
            "max_model_len": _COUNT,
            "parent": _TEXT,  # of a model with an adapter
        },
        ["id", "object", "created", "owned_by", "max_model_len"],
    ),
    "Models": _object({"object": {"const": "list"}, "data": _array({"$ref": "#/components/schemas/Model"})}),
    "TokenizeRequest": {
        **_object({"prompt": _TEXT, "messages": _OWN["messages"], **_TOOLS}, []),
        "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    },
    "Tokens": _object({"tokens": _array(_COUNT), "count": _COUNT, "max_model_len": _COUNT}),
    "DetokenizeRequest": _object({"tokens": _array(_COUNT)}),
    "Text": _object({"prompt": _TEXT}),
    "Status": _object({"status": {"const": "ok"}}),
    "Error": _object(
        {"error": _object({"message": _TEXT, "type": _TEXT, "param": _nullable(_TEXT), "code": _nullable(_TEXT)})}
    ),
    "Document": _OBJECT,
}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": _reference(name)}}


def _operation(
    summary: str, answer: str | None, request: str | None = None, chunk: str | None = None
) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": _TEXT}} if answer is None else _json(answer)
    if chunk is not None:
        content["text/event-stream"] = {"schema": _reference(chunk)}
    made: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "The answer; with `stream`, events.", "content": content}},
    }
    made["responses"] |= {
        status: {"description": meaning, "content": _json("Error")} for status, meaning in STATUSES.items()
    }
    if chunk is None:
        made["responses"]["200"]["description"] = "The answer."
    if request is not None:
        made["requestBody"] = {"required": True, "content": _json(request)}
    return made


# Path, as the application's routes have it -> its operation.
_OPERATIONS: Mapping[str, Mapping[str, Any]] = {
    "/v1/models": _operation("The model, and those with an adapter", "Models"),
    "/v1/models/{name:path}": _operation("A model, by its name", "Model"),
    "/v1/chat/completions": _operation(
        "Go on with a conversation", "ChatCompletion", "ChatRequest", "ChatCompletionChunk"
    ),
    "/v1/completions": _operation("Go on with a text", "Completion", "CompletionRequest", "CompletionChunk"),
    "/tokenize": _operation("Token ids of a text or a conversation", "Tokens", "TokenizeRequest"),
    "/detokenize": _operation("The text of token ids", "Text", "DetokenizeRequest"),
    "/health": _operation("Whether the engine lives", "Status"),
    "/ready": _operation("Whether the next request is likely to be taken", "Status"),
    "/metrics": _operation("Figures for Prometheus", None),
    "/openapi.json": _operation("This document", "Document"),
}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Describe an application by its routes."""
    paths: dict[str, Any] = {}
    for route in routes:
        operation = dict(_OPERATIONS[route.path])
        if names := sorted(route.param_convertors):
            operation["parameters"] = [
                {"name": each, "in": "path", "required": True, "schema": _TEXT} for each in names
            ]
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(route.path_format, {})[method.lower()] = operation
    return {
        "openapi": "3.1.1",
        "info": {"title": "llmforge serve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # as the server was started
    }
