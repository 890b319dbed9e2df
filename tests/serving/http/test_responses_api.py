"""`/v1/responses` through OpenAI's own client and held to its types: texts, thoughts, calls, streams, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from starlette.testclient import TestClient

from llmforge.base.errors import Unavailable
from llmforge.serving.http.responses_call import read
from llmforge.serving.http.responses_output import ResponsesWriter
from llmforge.serving.request import Chunk

from ...models import thinking_templates, tool_templates
from .test_reasoning import Scripted, serving

pytest.importorskip("llguidance")

WEATHER: Any = {
    "type": "function", "name": "get_weather", "description": "Tells the weather.", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "pattern": "^[a-z]{1,8}$"}},
                   "required": ["city"], "additionalProperties": False},
}  # fmt: skip
CALL = 'So.|<tool_call>\n{"name": "get_weather", "arguments": {"city": "bern"}}\n</tool_call>'
EVENT: Any = pydantic.TypeAdapter(ResponseStreamEvent)
Served = tuple[openai.OpenAI, Scripted, TestClient]


def opened(out: Path, checkpoint: Path, template: str) -> Iterator[Served]:
    with serving(out, checkpoint, template) as (client, scripted):
        yield openai.OpenAI(base_url="http://testserver/v1", api_key="any", http_client=client), scripted, client


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Iterator[Served]:
    yield from opened(tmp_path_factory.mktemp("thinking"), sample_checkpoint, thinking_templates.SWITCHED)


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Iterator[Served]:
    yield from opened(tmp_path_factory.mktemp("calling"), sample_checkpoint, tool_templates.HERMES)


def ask(served: Served, says: str, **options: Any) -> Any:
    """Ask, whole and as a stream, which must add up to the same; return the whole."""
    client, scripted, _ = served
    scripted.says = says
    asked: dict[str, Any] = {"model": "small", "input": "Why?", "temperature": 0, "max_output_tokens": 80, **options}
    whole = client.responses.create(**asked)
    Response.model_validate(whole.model_dump(by_alias=True), strict=False)
    kinds, last = [], None
    for number, event in enumerate(client.responses.create(**asked, stream=True)):
        EVENT.validate_python(event.model_dump(by_alias=True))
        assert event.sequence_number == number
        kinds.append(event.type)
        last = event
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == len(whole.output)
    streamed = last.response  # type: ignore[union-attr]
    assert kinds[-1] == f"response.{whole.status}"
    assert shown(streamed) == shown(whole)
    if whole.status == "completed":  # the client's helper takes no other end
        with client.responses.stream(**asked) as stream:
            assert shown(stream.get_final_response()) == shown(whole)
    return whole


def shown(response: Any) -> list[Any]:
    """What is the same in all answers to one request."""
    own = {"id", "call_id", "parsed_arguments"}
    items = [{name: value for name, value in item.to_dict().items() if name not in own} for item in response.output]
    for item in items:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return [response.status, response.incomplete_details, response.usage.output_tokens, items]


def test_a_text_is_that_of_a_chat(thinking: Served) -> None:
    made = ask(thinking, "", input=[{"role": "user", "content": [{"type": "input_text", "text": "Why?"}]}])
    chat = thinking[0].chat.completions.create(
        model="small", messages=[{"role": "user", "content": "Why?"}], temperature=0, max_tokens=80
    )
    assert made.output_text == chat.choices[0].message.content
    assert made.id.startswith("resp_")
    assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (
        chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens,
    )  # fmt: skip
    assert (made.temperature, made.top_p, made.tool_choice, made.tools) == (0, 1, "auto", [])
    assert made.metadata == {}


def test_thoughts_are_items_of_their_own_and_come_back(thinking: Served) -> None:
    made = ask(
        thinking, "<think>|Let me see.|</think>|Because.", instructions="Be brief.", reasoning={"effort": "high"}
    )
    thought, message = made.output
    assert (thought.type, message.type, made.status) == ("reasoning", "message", "completed")
    assert thought.content[0].text == "Let me see."
    assert made.output_text == "Because."
    assert made.usage.output_tokens_details.reasoning_tokens > 2
    assert made.instructions == "Be brief."
    turn = [{"role": "user", "content": "Why?"}, *made.output, {"role": "developer", "content": "Go on."}]
    ask(thinking, "Ah.", input=turn)
    prompt = thinking[1].prompts[-1]
    assert prompt == "user\nWhy?\nassistant\n<think>\nLet me see.\n</think>\n\nBecause.\nsystem\nGo on.\nassistant\n"
    ask(thinking, "Ah.", reasoning={"effort": "none"})
    assert thinking[1].prompts[-1].endswith("</think>\n\n")


def test_functions_are_called_and_answered(calling: Served) -> None:
    made = ask(calling, CALL, tools=[WEATHER])
    text, call = made.output
    assert (text.content[0].text, made.status) == ("So.", "completed")
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments) == {"city": "bern"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    ask(calling, "Wet.", input=[{"role": "user", "content": "Why?"}, *made.output, result], tools=[WEATHER])
    prompt = calling[1].prompts[-1]
    assert 'So.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "bern"}}\n</tool_call>' in prompt
    assert "rain" in prompt
    named = ask(calling, "", tools=[WEATHER], tool_choice={"type": "function", "name": "get_weather"})
    assert [item.type for item in named.output] == ["function_call"]
    assert json.loads(named.output[0].arguments).keys() == {"city"}


def test_answers_have_the_form_that_is_asked_for(thinking: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "seven", "schema": schema, "strict": True}}
    assert json.loads(ask(thinking, "", text=form).output_text) == {"a": 7}


def test_an_answer_that_is_cut_is_incomplete(thinking: Served) -> None:
    made = ask(thinking, "<think>|Let me see, and see again.|</think>|Because.", max_output_tokens=4)
    assert made.status == "incomplete"
    assert made.incomplete_details.reason == "max_output_tokens"
    assert [(item.type, item.status) for item in made.output] == [("reasoning", "incomplete")]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"input": None}, "input: expected a string, or a list of items"),
        ({"input": []}, "input: expected a string, or a list of items"),
        ({"input": [{"type": "input_image"}]}, "input[0]: expected an object of type message"),
        ({"input": [3]}, "input[0]: expected an object of type message"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]: expected a string, or a list"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: this server does not support it"),
        ({"background": True}, "background: this server does not support it"),
        ({"include": ["message.output_text.logprobs"]}, "include: this server does not support it"),
        ({"truncation": "auto"}, "truncation: this server does not support it"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]: 'web_search' is not supported"),
        ({"tools": 3}, "tools: expected a list"),
        ({"text": {"format": 3}}, "text: expected an object with format"),
        ({"text": {"verbosity": "low"}}, "text: this server does not support verbosity"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort 'much'"),
        ({"reasoning": 3}, "reasoning: expected an object with effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"instructions": 3}, "instructions: expected a string"),
        ({"messages": []}, "messages: unknown parameter"),
        ({"n": 2}, "n: unknown parameter"),
        ({"model": "gpt-6"}, "is not served here"),
    ],
)
def test_what_makes_no_sense_is_refused(thinking: Served, options: dict[str, Any], says: str) -> None:
    _, scripted, client = thinking
    scripted.says = ""
    refused = client.post("/v1/responses", json={"input": "Why?", **options})
    assert refused.status_code == (404 if "model" in options else 400)
    assert says in refused.json()["error"]["message"]


def test_parameters_of_sampling_are_those_of_chats(thinking: Served) -> None:
    _, scripted, client = thinking
    scripted.says = ""
    body = {"temperature": 1.5, "seed": 3, "top_k": 40, "ignore_eos": True}
    first, again = (
        client.post("/v1/responses", json={"input": "Why?", "max_output_tokens": 9, **body}).json() for _ in range(2)
    )
    chat = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 9, **body}
    text = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    assert first["output"][-1]["content"][0]["text"] == again["output"][-1]["content"][0]["text"] == text


def test_an_error_in_the_middle_of_a_stream_is_an_event(thinking: Served) -> None:
    writer = ResponsesWriter(read({"input": "Why?"}, thinking[1].encoder, "small"))
    events = [*writer.begin(), *writer.events(Chunk("Be", 7)), *writer.fail(Unavailable("the engine failed"))]
    assert [event["type"] for event in events[-2:]] == ["response.output_text.delta", "response.failed"]
    for event in events:
        EVENT.validate_python(event)
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "the engine failed"}
    assert events[-1]["response"]["status"] == "failed"
