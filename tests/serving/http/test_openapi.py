"""The OpenAPI document: valid, of all routes and fields, and true of what is asked and answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from llmforge import serving as runtime
from llmforge.serving import Engine
from llmforge.serving import http as serve
from llmforge.serving.http import completion_call, openapi

from ...samples.small_artifact import publish_small
from .test_serve import get, post, serving

jsonschema: Any = pytest.importorskip("jsonschema", reason="the extra dev")

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Well"}], "max_tokens": 3}
TEXT: dict[str, Any] = {"prompt": "Well", "max_tokens": 3}
CALLS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
# A value of each field that a call may have, besides the one that is its prompt.
VALUES: dict[str, Any] = {
    "audio": None, "best_of": 1, "chat_template_kwargs": {},
    "echo": False, "frequency_penalty": 0.5, "function_call": "none", "functions": [],
    "guided_choice": ["a"], "guided_grammar": 'start: "a"', "guided_json": {"type": "boolean"},
    "guided_json_object": True, "guided_regex": "a", "ignore_eos": True, "include_stop_str_in_output": True,
    "logit_bias": {"7": 1.5}, "logprobs": True, "max_completion_tokens": 3, "max_tokens": 3, "metadata": {"a": "b"},
    "min_p": 0.1, "min_tokens": 1, "modalities": ["text"], "model": "small", "n": 2, "parallel_tool_calls": True,
    "prediction": None, "priority": 1, "presence_penalty": 0.5,
    "prompt_cache_key": "a", "random_seed": 3, "reasoning_effort": None,
    "repetition_penalty": 1.1,
    "response_format": {"type": "text"}, "safety_identifier": "a", "seed": 3, "service_tier": "auto", "stop": ["a"],
    "stop_token_ids": [9], "stop_words": "a", "thinking_token_budget": None,
    "store": False, "stream": False, "stream_options": {}, "suffix": "",
    "structured_outputs": {"regex": "a"}, "temperature": 0.5, "tool_choice": "none", "tools": [], "top_k": 3,
    "top_logprobs": None, "top_p": 0.9, "user": "a", "verbosity": "medium", "web_search_options": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Iterator[Engine]:
    small = publish_small(tmp_path_factory.mktemp("openapi"), sample_checkpoint)
    with Engine(runtime.load(small.path)) as running:
        yield running


@pytest.fixture(scope="module")
def address(engine: Engine) -> Iterator[str]:
    with serving(engine) as address:
        yield address


@pytest.fixture(scope="module")
def document(address: str) -> Any:
    return json.loads(get(address, "/openapi.json")[1])


def check(document: Any, name: str, value: Any) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


def test_the_document_is_valid(document: Any) -> None:
    validator: Any = pytest.importorskip("openapi_spec_validator", reason="the extra dev")
    validator.validate(document)


def test_it_has_every_route(document: Any, engine: Engine) -> None:
    routes = [route for route in serve.create_app(engine, "small").routes if isinstance(route, Route)]
    assert len(routes) > 9
    for route in routes:
        methods = {method.lower() for method in (route.methods or set()) - {"HEAD"}}
        assert document["paths"][route.path_format].keys() == methods
    with pytest.raises(KeyError):  # one that nobody described
        openapi.document([Route("/other", lambda http: None)])


def test_it_has_every_field(document: Any) -> None:
    fields = completion_call.PARAMETERS | completion_call.IGNORED
    chat, text = (document["components"]["schemas"][f"{kind}Request"] for kind in ("Chat", "Completion"))
    assert chat["properties"].keys() == fields - {"prompt"}
    assert text["properties"].keys() == fields - {"messages"}
    assert VALUES.keys() == fields - {"prompt", "messages"}


@pytest.mark.parametrize(("path", "name"), [("/v1/chat/completions", "Chat"), ("/v1/completions", "Completion")])
def test_it_says_what_is_taken(document: Any, address: str, path: str, name: str) -> None:
    for field, value in VALUES.items():
        body = {**CALLS[path], field: 3 if (name, field) == ("Completion", "logprobs") else value}
        check(document, f"{name}Request", body)
        assert post(address, path, body)[0] == 200, field
    for wrong in ({"other": 3}, {"temperature": []}, {"stop": 3}, {"echo": True}, {"stream": 3}, {"logit_bias": []}):
        with pytest.raises(jsonschema.ValidationError):
            check(document, f"{name}Request", {**CALLS[path], **wrong})
        assert post(address, path, {**CALLS[path], **wrong})[0] == 400, wrong


def test_it_says_what_is_answered(document: Any, address: str) -> None:
    schemas = document["components"]["schemas"]
    for path, body in CALLS.items():
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        names = {kind: each["schema"]["$ref"].rpartition("/")[2] for kind, each in content.items()}
        check(document, names["application/json"], json.loads(post(address, path, body)[2]))
        streamed = post(address, path, {**body, "stream": True, "stream_options": {"include_usage": True}})[2]
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith(b"data: {")]
        assert len(events) > 1
        for event in events:
            check(document, names["text/event-stream"], event)
        check(document, "Error", json.loads(post(address, path, {})[2]))
    assert schemas.keys() >= {"Model", "Models"}
    check(document, "Models", json.loads(get(address, "/v1/models")[1]))
    check(document, "Model", json.loads(get(address, "/v1/models/small")[1]))
    check(document, "Tokens", json.loads(post(address, "/tokenize", {"prompt": "Well"})[2]))
    check(document, "Text", json.loads(post(address, "/detokenize", {"tokens": [9]})[2]))
    check(document, "Status", json.loads(get(address, "/health")[1]))
