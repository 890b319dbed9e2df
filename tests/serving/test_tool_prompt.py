"""The default tool prompt: what it adds to templates that know no tools, and that it changes nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmforge.base.errors import UsageError
from llmforge.serving.chat import ChatTemplate
from llmforge.serving.protocol import tool_prompt
from llmforge.serving.protocol.tool_calls import CallDelta, CallParser
from llmforge.serving.protocol.tool_format import ToolFormat

from ..models.tool_templates import HERMES, HIDDEN, LLAMA, SILENT, UNKNOWN

# Llama 2's and Gemma's ways: no message of the system, and turns that alternate.
STRICT = (
    "\n{%- for m in messages %}\n"
    "{%- if m.role not in ('user', 'assistant') %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
DEAF = "{% for m in messages %}{{ m.role }}{% endfor %}"
ASK = {"role": "user", "content": "Is it cold?"}
SYSTEM = {"role": "system", "content": "Be short."}
TOOL = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object"}}}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}


ROUND: list[dict[str, Any]] = [
    ASK,
    {"role": "assistant", "content": "", "tool_calls": [call({"city": "Köln"}), call('{"city": "Bonn"}')]},
    {"role": "tool", "content": "3 °C", "tool_call_id": "call00001"},
    {"role": "tool", "content": "4 °C", "tool_call_id": "call00001"},
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {}, "chat.jinja")


@pytest.mark.parametrize("source", [SILENT, HIDDEN, UNKNOWN, STRICT])
def test_tools_are_shown_and_calls_read_back(source: str) -> None:
    made = tool_prompt.added(template(source))
    found = ToolFormat.find(made)
    assert found is not None
    assert (found.markup.name, found.shows_tools) == ("Hermes", True)
    prompt = made.render([ASK], tools=[TOOL])
    assert prompt.count(json.dumps(TOOL)) == 1
    text = made.render(found.messages(ROUND), tools=[TOOL])
    assert text.startswith(prompt)
    parser = CallParser(found.markup, {"weather"})
    pieces = [piece for piece in parser.push(text[len(prompt) :]) if isinstance(piece, CallDelta)]
    assert [piece.arguments for piece in pieces if not piece.name] == ['{"city": "Köln"}', '{"city": "Bonn"}']
    assert "<tool_response>\n3 °C\n</tool_response>\n<tool_response>\n4 °C\n</tool_response>" in text


def test_tools_stand_in_the_system_message_or_where_there_is_none_in_the_users() -> None:
    said = tool_prompt.added(template(SILENT)).render([SYSTEM, ASK], tools=[TOOL])
    assert said.startswith("<s>system\nBe short.\n\n# Tools\n\n")
    assert said.count("<s>system") == 1
    said = tool_prompt.added(template(SILENT)).render([ASK], tools=[TOOL])
    assert said.startswith("<s>system\n# Tools\n\n")
    said = tool_prompt.added(template(STRICT)).render([ASK], tools=[TOOL])
    assert said.startswith("<user># Tools\n\n")
    assert said.endswith("</tool_call>\n\nIs it cold?\n<assistant>")


@pytest.mark.parametrize(
    "source", [SILENT, HIDDEN, UNKNOWN, STRICT, " \n" + SILENT, "  {% if 1 %}\nx{% endif %}" + STRICT]
)
@pytest.mark.parametrize("start", [[], [SYSTEM]])
def test_without_tools_nothing_changes(source: str, start: list[dict[str, Any]]) -> None:
    if start and STRICT in source:
        start = []
    own = template(source)
    for messages in ([ASK], [ASK, {"role": "assistant", "content": "No."}, ASK]):
        conversation = [*start, *messages]
        assert tool_prompt.added(own).render(conversation) == own.render(conversation)


@pytest.mark.parametrize("source", [HERMES, LLAMA])
def test_a_template_that_knows_tools_stays_as_it_is(source: str) -> None:
    own = template(source)
    assert tool_prompt.added(own) is own


def test_a_template_that_shows_no_text_is_refused() -> None:
    with pytest.raises(UsageError, match=r"chat\.jinja: the default tool prompt cannot be added"):
        tool_prompt.added(template(DEAF))


def test_transformers_renders_the_same() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    made = tool_prompt.added(template(STRICT))
    wanted, _ = render_jinja_template([ROUND], tools=[TOOL], chat_template=made.source, add_generation_prompt=True)
    assert made.render(ROUND, tools=[TOOL]) == wanted[0]


def test_a_template_is_chosen(tmp_path: Path) -> None:
    assert tool_prompt.chosen(tmp_path, None, tool_prompt=False) is None
    with pytest.raises(UsageError, match="no chat template") as raised:
        tool_prompt.chosen(tmp_path, None, tool_prompt=True)
    assert raised.value.hint == "--chat-template FILE"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (tmp_path / "chat_template.jinja").write_text("own{{ eos_token }}")
    (tmp_path / "other.jinja").write_text("other{{ eos_token }}")
    own = tool_prompt.chosen(tmp_path, None, tool_prompt=False)
    other = tool_prompt.chosen(tmp_path, tmp_path / "other.jinja", tool_prompt=False)
    assert own is not None
    assert other is not None
    assert (own.render([]), other.render([])) == ("own<end>", "other<end>")
