"""Tools of `llmforge serve`: OpenAI's client asks, an engine with random weights answers, held to calls or texts."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest

from llmforge import serving as runtime
from llmforge.runtime.sampling.sampler import TokenSampler
from llmforge.serving import Constraint, Engine, Receiver, Request
from llmforge.serving import http as serve
from llmforge.serving.http.server import make_server

from ...models import tool_templates
from ...samples.small_artifact import publish_small

pytest.importorskip("llguidance")

ASK: Any = [{"role": "user", "content": "What is it like?"}]
SPECIAL = "[TOOL_CALLS]"  # that one of the checkpoint's special tokens is renamed to


def function(name: str, properties: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False, **more,
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


WORD = {"type": "string", "pattern": "^[a-z ]{1,8}$"}
COUNT = {"type": "integer", "minimum": -5, "maximum": 90}
WEATHER = function("get_weather", {"city": WORD, "unit": {"enum": ["C", "F"]}})
TOOLS = [
    WEATHER,
    {"type": "function", "function": {"name": "ping"}},  # no arguments
    function("add", {"a": COUNT, "b": COUNT}),
    function("switch-2", {"on": {"type": "boolean"}}),
    function("nothing", {"x": {"type": "null"}}),
    function("pick", {"color": {"type": "string", "enum": ["red", "gr\"ee\\n", "bl\nue", "gelb ß"]}}),
    function("constant", {"v": {"const": 7}}),
    function("list_up", {"names": {"type": "array", "items": WORD, "minItems": 1, "maxItems": 3}}),
    function("move", {"to": {"type": "object", "properties": {"x": COUNT, "y": COUNT}, "required": ["x", "y"],
                             "additionalProperties": False}}),
    function("either", {"v": {"anyOf": [{"type": "boolean"}, COUNT]}}),
    function("maybe", {"v": {"type": ["integer", "null"], "minimum": 0, "maximum": 9}}),
    function("optional", {"a": {"type": "boolean"}, "b": COUNT}, required=["a"]),
    function("tree", {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
             **{"$defs": {"leaf": {"type": "boolean"}}}),
    function("day", {"on": {"type": "string", "pattern": "^20[0-9]{2}-0[1-9]-1[0-9]$"}}),
    function("braces", {"text": {"type": "string", "enum": ["}", "{", '"}', "}\n</tool_call>", "]"]}}),
    function("matrix", {"m": {"type": "array", "minItems": 2, "maxItems": 2,
                              "items": {"type": "array", "items": COUNT, "minItems": 2, "maxItems": 2}}}),
    function("price", {"v": {"type": "number", "minimum": 0, "maximum": 9, "multipleOf": 0.5}}),
    function("A" * 64, {"v": {"type": "boolean"}}),
    function("umlaut", {"größe": {"type": "boolean"}}),
    function("deep", {"a": {"type": "object", "additionalProperties": False, "required": ["b"], "properties": {
        "b": {"type": "object", "additionalProperties": False, "required": ["c"], "properties": {"c": WORD}}}}}),
]  # fmt: skip


class Scripted:
    """An engine that says a text, where the next request has no form of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.says: str | None = None  # a rule of a grammar
        self.asked: list[Request] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request, receive: Receiver) -> Any:
        self.asked.append(request)
        if self.says is not None:
            form = Constraint("grammar", f"start: {self.says}")
            request = replace(request, sampling=replace(request.sampling, constraint=form))
        return self._engine.submit(request, receive)


@contextlib.contextmanager
def serving(out: Path, checkpoint: Path, template: str) -> Iterator[tuple[openai.OpenAI, Scripted]]:
    """Serve a small artifact whose chat template is `template`, and one of whose special tokens is `SPECIAL`."""
    folder = out / "checkpoint"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = (folder / "tokenizer.json").read_text()
    assert "<|im_start|>" in tokenizer
    (folder / "tokenizer.json").write_text(tokenizer.replace("<|im_start|>", SPECIAL))
    artifact = publish_small(out / "artifacts", folder, context=1024)
    listening = socket.create_server(("127.0.0.1", 0))
    with Engine(runtime.load(artifact.path)) as engine:
        scripted = Scripted(engine)
        server = make_server(serve.create_app(scripted, "small"), serve.Address(grace_s=5))  # type: ignore[arg-type]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
            yield client, scripted
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Iterator[Any]:
    with serving(tmp_path_factory.mktemp("hermes"), sample_checkpoint, tool_templates.HERMES) as served:
        yield served


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Iterator[Any]:
    with serving(tmp_path_factory.mktemp("mistral"), sample_checkpoint, tool_templates.MISTRAL) as served:
        yield served


@pytest.fixture(params=["hermes", "mistral"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[openai.OpenAI, Scripted]]:
    client, scripted = request.getfixturevalue(request.param)
    scripted.says = None
    scripted.asked.clear()
    yield client, scripted
    scripted.says = None


def ask(client: openai.OpenAI, **options: Any) -> Any:
    asked = {"messages": ASK, "tools": [WEATHER], "temperature": 0, "max_tokens": 300, **options}
    return client.chat.completions.create(model="small", **asked)


def streamed(client: openai.OpenAI, **options: Any) -> tuple[str, list[list[str]], str]:
    """Add up a stream: text, calls as [id, name, arguments], and why it ended."""
    content, calls, reason = "", [], ""
    for event in ask(client, stream=True, **options):
        (choice,) = event.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert (call.index, call.type) == (len(calls), "function")
                calls.append([call.id, call.function.name, ""])
            assert call.index == len(calls) - 1
            calls[-1][2] += call.function.arguments
        reason = choice.finish_reason or reason
    return content, calls, reason


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool["function"]["name"][:12])
def test_a_function_that_must_be_called_is_called_by_its_schema(served: Any, tool: dict[str, Any]) -> None:
    client, _ = served
    name, schema = tool["function"]["name"], tool["function"].get("parameters", {"additionalProperties": False})
    named = {"type": "function", "function": {"name": name}}
    made = ask(client, tools=[WEATHER, tool][tool is WEATHER :], tool_choice=named, temperature=1, seed=len(name))
    (choice,) = made.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", name)
    assert re.fullmatch("[A-Za-z0-9]{9}", call.id)
    jsonschema.Draft202012Validator(schema).validate(json.loads(call.function.arguments))


class Opening:
    """Makes sequences begin with a text, whatever the model says; then the model goes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
        self.tokens: list[int] = []
        self._tokenizer = tokenizer
        sample = TokenSampler.sample

        def opened(sampler: TokenSampler, logits: Any, head: Any = None) -> Any:
            if (at := sampler._generated) < len(self.tokens):
                logits, head = np.full_like(logits, -100), None
                logits[self.tokens[at]] = 100
            return sample(sampler, logits, head)

        monkeypatch.setattr(TokenSampler, "sample", opened)

    def says(self, text: str) -> None:
        """Say `text`, whose special token is one."""
        self.tokens = self._tokenizer.encode(text, add_special_tokens=False).ids


OPENINGS = {"hermes": 'So:\n<tool_call>\n{"name": "', "mistral": 'So:[TOOL_CALLS] [{"name": "'}


@pytest.mark.parametrize("name", OPENINGS)
def test_a_call_that_a_model_begins_of_itself_keeps_to_the_schema_of_a_strict_tool(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, scripted = request.getfixturevalue(name)
    scripted.says = None
    opening = Opening(monkeypatch, scripted.encoder.tokenizer)
    opening.says(OPENINGS[name])
    seen = set()
    for i, tool in enumerate(TOOLS):
        strict = {"type": "function", "function": {**tool["function"], "strict": True}}
        options = {"tools": [strict], "temperature": 1.2, "seed": i, "max_tokens": 400}
        (choice,) = ask(client, **options).choices
        assert choice.message.content is not None
        assert choice.message.content.startswith("So:")  # and the model may go on behind its call as it likes
        call = choice.message.tool_calls[0]
        schema = tool["function"].get("parameters", {"additionalProperties": False})
        assert call.function.name == tool["function"]["name"]
        jsonschema.Draft202012Validator(schema).validate(json.loads(call.function.arguments))
        seen.add(call.function.name)
    assert len(seen) == len(TOOLS)
    # Without `strict` the model writes what it likes, as with OpenAI: a random one writes no arguments.
    (choice,) = ask(client, tools=TOOLS[2:5], temperature=1.2, seed=1, max_tokens=200).choices
    assert not choice.message.tool_calls
    assert choice.message.content.startswith("So:")


def test_of_tools_some_of_which_are_strict_the_others_get_any_object(hermes: Any, monkeypatch: Any) -> None:
    client, scripted = hermes
    opening = Opening(monkeypatch, scripted.encoder.tokenizer)
    strict = {"type": "function", "function": {**TOOLS[2]["function"], "strict": True}}
    names = set()
    for seed in range(6):
        opening.says(OPENINGS["hermes"])
        (choice,) = ask(client, tools=[strict, TOOLS[3]], temperature=1, seed=seed, max_tokens=400).choices
        for call in choice.message.tool_calls or ():
            names.add(call.function.name)
            if choice.finish_reason != "length" or call is not choice.message.tool_calls[-1]:
                arguments = json.loads(call.function.arguments)
                assert isinstance(arguments, dict)
                if call.function.name == "add":
                    jsonschema.Draft202012Validator(TOOLS[2]["function"]["parameters"]).validate(arguments)
    assert names == {"add", "switch-2"}


def test_free_text_is_what_it_is_without_strict_tools(served: Any) -> None:
    client, _ = served
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    for seed in range(3):
        said = [
            ask(client, tools=[each], temperature=1, seed=seed, max_tokens=60).choices[0].message.content
            for each in (strict, WEATHER)
        ]
        assert said[0] == said[1]


def test_one_of_the_tools_must_be_called_in_a_stream_as_in_one_answer(served: Any) -> None:
    client, _ = served
    options = {"tools": TOOLS[2:5], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.5}
    for seed in range(4):
        (choice,) = ask(client, seed=seed, **options).choices
        (call,) = choice.message.tool_calls
        assert call.function.name in {"add", "switch-2", "nothing"}
        content, ((_, name, arguments),), reason = streamed(client, seed=seed, **options)
        assert (content, name, arguments) == ("", call.function.name, call.function.arguments)
        assert reason == choice.finish_reason == "tool_calls"


SAID = {
    "hermes": (
        'So:\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "}"}}\n</tool_call>'
    ),
    "mistral": (
        'So:[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln"}}, '
        '{"name": "get_weather", "arguments": {"city": "}"}, "id": "Ab1234567"}]'
    ),
}


def rule(text: str) -> str:
    """Write a text as a rule that allows nothing else; the special token is the second of the vocabulary."""
    return " ".join("<[1]>" if part == SPECIAL else json.dumps(part) for part in re.split(r"(\[TOOL_CALLS\])", text))


@pytest.mark.parametrize("name", SAID)
def test_calls_are_found_beside_text(name: str, request: pytest.FixtureRequest) -> None:
    client, scripted = request.getfixturevalue(name)
    scripted.says = rule(SAID[name])
    (choice,) = ask(client).choices
    arguments = ['{"city": "Köln"}', '{"city": "}"}']
    assert [call.function.arguments for call in choice.message.tool_calls] == arguments
    assert (choice.message.content, choice.finish_reason) == ("So:", "tool_calls")
    content, calls, reason = streamed(client)
    assert (content, [call[2] for call in calls], reason) == ("So:", arguments, "tool_calls")
    assert len({call[0] for call in calls}) == 2
    (choice,) = ask(client, parallel_tool_calls=False).choices
    assert [call.function.arguments for call in choice.message.tool_calls] == arguments[:1]
    (choice,) = ask(client, max_tokens=40).choices  # the end of the second call is lacking
    assert choice.finish_reason == "length"
    for options in ({"tool_choice": "none"}, {"tools": []}):  # then nothing is looked for
        (choice,) = ask(client, **options).choices
        assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
        assert choice.message.content == SAID[name].replace(SPECIAL, "")
    scripted.says = None


def test_what_only_begins_like_a_call_is_text(hermes: Any) -> None:
    client, scripted = hermes
    for text in (
        '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_w',
        "a <b>",
    ):
        scripted.says = rule(text)
        (choice,) = ask(client).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
        assert streamed(client) == (text, [], "stop")
    scripted.says = None


def test_a_conversation_goes_on_behind_a_call(served: Any) -> None:
    client, scripted = served
    message = ask(client, tool_choice="required", parallel_tool_calls=False).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    made = ask(client, messages=[*ASK, message, result], max_tokens=1)
    assert made.choices[0].finish_reason == "length"
    prompt = scripted.encoder.tokenizer.decode(list(scripted.asked[-1].prompt), skip_special_tokens=False)
    assert json.dumps(json.loads(call.function.arguments)) in prompt  # an object, not the JSON of its JSON
    assert '"name": "get_weather"' in prompt
    assert '"description": "Does get_weather."' in prompt


@pytest.mark.parametrize(
    ("options", "parameter", "says"),
    [
        ({"tools": {}}, "tools", "expected a list of at most 128 functions"),
        ({"tools": [WEATHER] * 129}, "tools", "at most 128"),
        ({"tools": [WEATHER] * 2}, "tools", "same name"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0]: expected"),
        ({"tools": [function("a b", {})]}, "tools", "tools[0].function.name: expected 1 to 64 letters"),
        ({"tools": [function("a", {}, type="array")]}, "tools", "JSON schema of an object"),
        ({"tools": [function("a", {"x": {"type": "string", "pattern": "a" * 70_000}})]}, "tools", "at most 65,536"),
        ({"tools": [function("a", {"x": {"type": "string", "pattern": "("}})]}, "tools", "tools: "),
        ({"tools": [{"type": "function", "function": {"name": "a", "description": 3}}]}, "tools", "expected a string"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "tools", "true or false"),
        ({"tool_choice": "sometimes"}, "tool_choice", "none, auto, required or"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "there is no tool 'x'"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "has no `tools`"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"response_format": {"type": "json_object"}}, "tools", "a form of answers"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [3]}]}, "messages", "[0].tool_calls[0]"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": {"a": 1}}]}, "messages", "[0].tool_calls[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages",
            "arguments must be the JSON of an object",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(hermes: Any, options: Any, parameter: str, says: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(hermes[0], **{"tool_choice": "required", **options})
    assert raised.value.param == parameter
    assert says in raised.value.message


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (tool_templates.UNKNOWN, "cannot be read from answers"),
        (tool_templates.SILENT, "cannot be read from answers"),
        (tool_templates.HIDDEN, "are not shown to the model"),
    ],
)
def test_a_template_that_cannot_have_tools_refuses_them(
    tmp_path: Path, sample_checkpoint: Path, template: str, says: str
) -> None:
    with serving(tmp_path, sample_checkpoint, template) as (client, _):
        with pytest.raises(openai.BadRequestError) as raised:
            ask(client)
        assert raised.value.param == "tools"
        assert says in raised.value.message
        assert ask(client, tool_choice="none", max_tokens=1).choices  # which asks for nothing


def test_the_example_of_the_documents_runs(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    _, example = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(example, {"client": served[0], "model": "small", "messages": ASK})
    assert capsys.readouterr().out.startswith("get_weather {")
