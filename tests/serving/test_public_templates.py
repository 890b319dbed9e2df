"""Templates of public checkpoints: their calls are found by probing, rendered, and read back however they are cut."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import jinja2
import pytest
from tokenizers import AddedToken, Tokenizer

from llmforge.base.errors import UsageError
from llmforge.runtime.sampling.constraints import ConstraintCompiler
from llmforge.serving.chat import ChatTemplate
from llmforge.serving.protocol.tool_calls import CallDelta, CallParser
from llmforge.serving.protocol.tool_format import ToolFormat
from llmforge.serving.protocol.tool_values import argument

FOLDER = Path(__file__).parent.parent / "data" / "chat_templates"
MARKUP_OF = {
    "ByteDance-Seed-OSS": "Seed",
    "GLM-4.6": "GLM",
    "GLM-4.7-Flash": "GLM",
    "MiniMax-M2": "MiniMax",
    "Mistral-Small-3.2-24B-Instruct-2506": "Mistral",
    "Qwen-Qwen3-0.6B": "Hermes",
    "Qwen3-Coder": "Qwen XML",
    "Qwen3.5-4B": "Qwen XML",
    "StepFun3.5-Flash": "Qwen XML",
    "deepseek-ai-DeepSeek-V3.1": "DeepSeek",
    "ibm-granite-granite-4.0": "Hermes",
    "moonshotai-Kimi-K2": "Kimi",
    "openai-gpt-oss-120b": "Harmony",
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "mode": {"enum": ["append", "replace"]},
        "lines": {"type": "integer"},
        "force": {"type": "boolean"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
    },
    "required": ["path", "mode", "lines", "force"],
    "$defs": {"tag": {"type": "object", "properties": {"name": {"type": "string"}}}},
}
SCHEMAS: dict[str, dict[str, Any]] = {"write_file": SCHEMA, "ls": {"type": "object", "properties": {}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ARGUMENTS = {
    "path": "12",
    "text": 'def f():\n\treturn "</x> {1}" \n',
    "mode": "append",
    "lines": 3,
    "force": True,
    "tags": [{"name": 'a "b" é'}],
}
CALLS = [("write_file", ARGUMENTS), ("ls", {})]


def history(calls: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    given = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": given}]


def read(format_: ToolFormat, chunks: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Give the text, and the calls, by names and arguments as they came."""
    parser = CallParser(format_.markup, set(SCHEMAS), schemas=SCHEMAS)
    text, calls = "", list[tuple[str, str]]()
    for piece in [piece for chunk in chunks for piece in parser.push(chunk)] + parser.flush():
        if not isinstance(piece, CallDelta):
            text += piece
        elif piece.name is not None:
            calls.append((piece.name, piece.arguments))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return text, calls


def template(name: str) -> ChatTemplate:
    return ChatTemplate((FOLDER / f"{name}.jinja").read_text("utf-8"), {"bos_token": "<s>", "eos_token": "</s>"}, name)


def test_every_template_has_its_markup() -> None:
    assert {path.stem for path in FOLDER.glob("*.jinja")} == set(MARKUP_OF)


@pytest.mark.parametrize("name", MARKUP_OF)
def test_a_history_is_rendered_and_read_back_at_every_cut(name: str) -> None:
    made = template(name)
    format_ = ToolFormat.find(made)
    assert format_ is not None
    assert format_.markup.name == MARKUP_OF[name]
    calls = CALLS if format_.join is not None else CALLS[:1]
    messages = format_.messages(history(calls))
    prompt = made.render(messages[:1], tools=TOOLS, add_generation_prompt=False)
    answer = made.render(messages, tools=TOOLS, add_generation_prompt=False).removeprefix(prompt)
    whole = read(format_, [answer])
    assert [(name, json.loads(arguments)) for name, arguments in whole[1]] == calls
    for cut in range(len(answer) + 1):
        assert read(format_, [answer[:cut], answer[cut:]]) == whole
        assert read(format_, list(answer[:cut])) == read(format_, [answer[:cut]])  # an answer that ends there


@pytest.mark.parametrize("name", MARKUP_OF)
def test_renderings_are_those_of_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template  # slow to import

    made = template(name)
    format_ = ToolFormat.find(made)
    assert format_ is not None
    messages = [
        {"role": "system", "content": "Be brief."},
        *format_.messages(history(CALLS[:1])),
        {"role": "tool", "tool_call_id": "call00000", "name": "write_file", "content": "ok"},
        {"role": "assistant", "content": "Done.", "reasoning": "It was easy."},
        {"role": "user", "content": "Thanks."},
    ]
    try:
        rendered, _ = render_jinja_template(
            [[dict(each) for each in messages]], tools=[dict(each) for each in TOOLS], chat_template=made.source,
            add_generation_prompt=True, **cast(dict[str, Any], made.special_tokens),
        )  # fmt: skip
    except jinja2.TemplateError as error:
        pytest.fail(f"the test's own conversation is refused: {error}")
    assert made.render(messages, tools=TOOLS) == rendered[0]


@pytest.mark.parametrize("name", MARKUP_OF)
@pytest.mark.parametrize("special", [True, False])
def test_the_grammar_takes_calls_and_nothing_invalid(name: str, special: bool, sample_checkpoint: Path) -> None:
    pytest.importorskip("llguidance")
    format_ = ToolFormat.find(template(name))
    assert format_ is not None
    tokenizer = Tokenizer.from_file(str(sample_checkpoint / "tokenizer.json"))
    if special:
        markers = re.findall(r"<[^ <>=§@]+>|\[[A-Z_]+\]", " ".join(format_.markup.patterns))
        tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in sorted(set(markers))])
    eos = [token for end in ("<|endoftext|>", "<|call|>") if (token := tokenizer.token_to_id(end)) is not None]
    constraint = format_.constraint(SCHEMAS, parallel=True, tokenizer=tokenizer, eos=eos)
    compiler = ConstraintCompiler(tokenizer, tokenizer.get_vocab_size(), eos)

    def taken(arguments: dict[str, Any]) -> bool:
        text = f"{format_.begin}write_file{format_.between}{format_._written(arguments)}"
        if format_.join is not None:
            text += f"{format_.join}ls{format_.between}{format_._written({})}"
        text = re.sub("probe000[12]", "Zz9999999", text + format_.tail)
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        state = compiler.start(constraint)
        for token in tokens[: -1 if tokens[-1] in eos else None]:
            mask = state.mask()
            if mask is not None and mask[token] != 0:
                return False
            state.advance(token)
        mask = state.mask()
        return mask is None or bool(mask[eos[-1]] == 0)

    assert taken(ARGUMENTS)
    assert taken({**ARGUMENTS, "text": ""})
    assert taken({name: value for name, value in ARGUMENTS.items() if name not in {"text", "tags"}})
    assert not taken({**ARGUMENTS, "mode": "delete"})
    assert not taken({**ARGUMENTS, "lines": "many"})
    assert not taken({**ARGUMENTS, "tags": [{"name": 3}]})
    assert not taken({name: value for name, value in ARGUMENTS.items() if name != "force"})


def test_strings_that_cannot_be_held_to_are_refused(sample_checkpoint: Path) -> None:
    format_ = ToolFormat.find(template("Qwen3-Coder"))
    assert format_ is not None
    tokenizer = Tokenizer.from_file(str(sample_checkpoint / "tokenizer.json"))
    schema = {"type": "object", "properties": {"x": {"type": "string", "minLength": 3}}}
    with pytest.raises(UsageError, match="minLength of the parameter 'x' is not supported"):
        format_.constraint({"f": schema}, parallel=True, tokenizer=tokenizer, eos=[0])


def test_ids_name_functions_where_the_template_writes_calls_by_them() -> None:
    source = template("moonshotai-Kimi-K2").source
    own = "'functions.' + func_name + ':' + loop.index0|string"
    assert own in source  # this template makes ids; later ones of the same checkpoints take the call's
    format_ = ToolFormat.find(ChatTemplate(source.replace(own, "tool_call['id']"), {}, "here"))
    assert format_ is not None
    assert format_.naming_ids
    result = {"role": "tool", "tool_call_id": "call00001", "content": "ok"}
    messages = format_.messages([*history(CALLS), result, *history(CALLS[1:])[1:]])
    assert [call["id"] for message in messages for call in message.get("tool_calls", ())] == [
        "functions.write_file:0", "functions.ls:1", "functions.ls:2",
    ]  # fmt: skip
    assert messages[2]["tool_call_id"] == "functions.ls:1"


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("3", {"string"}, "3"), ("3", {"integer"}, 3), ("3.0", {"integer"}, 3), ("3", {"number"}, 3), ("3", None, 3),
        ("True", {"boolean"}, True), ("None", {"null", "string"}, None), ("null", {"null", "string"}, None),
        ("{'a': [1]}", {"object"}, {"a": [1]}), ('{"a": 1}', {"string", "object"}, {"a": 1}), ("x", {"integer"}, "x"),
        ("NaN", {"number"}, "NaN"), ("x y", None, "x y"), ('"x"', None, '"x"'),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ("9" * 10_000, {"integer"}, "9" * 10_000), ("__import__('os')", None, "__import__('os')"),
    ],
)  # fmt: skip
def test_values_are_what_the_schema_says(text: str, types: set[str] | None, value: Any) -> None:
    assert argument(text, None if types is None else frozenset(types)) == value
