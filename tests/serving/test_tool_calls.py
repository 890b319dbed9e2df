"""Markups of calls: found from templates, parsed from text that is cut anywhere, and written into histories."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from llmforge.base.errors import UsageError
from llmforge.runtime.sampling.constraints import ConstraintCompiler
from llmforge.serving.chat import ChatTemplate
from llmforge.serving.protocol.tool_calls import CallDelta, CallParser, Piece
from llmforge.serving.protocol.tool_format import ToolFormat
from llmforge.serving.protocol.tool_markups import MARKUPS, Markup, match

from ..models import tool_templates

NAMES = {"get_weather", "add"}
BY_NAME = {markup.name: markup for markup in MARKUPS}
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}

# Answer -> its text and its calls.
A, B = '{"city": "a } \\" {", "n": {"x": [{}]}}', "{}"
OTHER = ' <tool_call>\n{"name": "other", "arguments": {}}'
W = f"get_weather {A}"
ANSWERS: list[tuple[str, str, str, list[str]]] = [
    ("Hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {A}}}\n</tool_call>', "", [W]),
    ("Hermes", f'Let me look.\n\n<tool_call>{{"name":"get_weather","arguments":{A}}}</tool_call>', "Let me look.", [W]),
    (
        "Hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {A}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "add", "arguments": {B}}}\n</tool_call>\n\nDone.\n',
        "Done.", [W, f"add {B}"],
    ),
    ("Hermes", f'<tool_call>\n{{"name": "add", "arguments": {B}}}', "", [f"add {B}"]),
    ("Hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1', "", ['add {"a": 1']),
    ("Hermes", OTHER, OTHER, []),
    ("Hermes", '<tool_call>\n{"name": "ad', '<tool_call>\n{"name": "ad', []),
    ("Hermes", 'a < b <tool <tool_call> " \n ', 'a < b <tool <tool_call> " \n ', []),
    ("Hermes", "  plain ", "  plain ", []),
    ("Hermes", "", "", []),
    (
        "Mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {A}, "id": "Ab1234567"}}, '
        f'{{"name": "add", "arguments": {B}}}]',
        "", [W, f"add {B}"],
    ),
    ("Mistral", f'[TOOL_CALLS][{{"name": "add", "arguments": {B}}}]', "", [f"add {B}"]),
    (
        "Mistral",
        f"Yes.[TOOL_CALLS]get_weather[ARGS]{A}[TOOL_CALLS]add[CALL_ID]Ab1234567[ARGS]{B}",
        "Yes.", [W, f"add {B}"],
    ),
    ("Mistral", f"[TOOL_CALLS]add{B}", "", [f"add {B}"]),
    ("Mistral", "[TOOL_CALLS] none of them [1]", "[TOOL_CALLS] none of them [1]", []),
    (
        "DeepSeek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{A}\n```<｜tool▁call▁end｜>\n"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{B}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "", [W, f"add {B}"],
    ),
    (
        "DeepSeek",
        f"So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{A}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{B}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "So:", [W, f"add {B}"],
    ),
    ("Harmony", f" to=functions.add<|channel|>commentary json<|message|>{B}", "", [f"add {B}"]),
    (
        "Harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{A}<|call|>",
        "I look.", [W],
    ),
    ("Harmony", "<|channel|>final<|message|>Go to=functions of it.", "Go to=functions of it.", []),
    ("Llama 3", f'{{"name": "get_weather", "parameters": {A}}}', "", [W]),
    ("Llama 3", f'\n<|python_tag|>{{"type": "function", "name": "add", "parameters": {B}}}', "", [f"add {B}"]),
    (
        "Llama 3",
        f'{{"name": "get_weather", "parameters": {A}}}; {{"name": "add", "parameters": {B}}}',
        "", [W, f"add {B}"],
    ),
    ("Llama 3", 'Like {"name": "add", "parameters": {}}', 'Like {"name": "add", "parameters": {}}', []),
    ("Llama 3", '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
]  # fmt: skip


def added(pieces: list[Piece]) -> tuple[str, list[str]]:
    """Add pieces up: the text, and each call as its name and arguments."""
    calls: list[str] = []
    for piece in pieces:
        if isinstance(piece, CallDelta):
            if piece.name is not None:
                assert piece.index == len(calls)
                calls.append(piece.name + " ")
            assert piece.index == len(calls) - 1
            calls[-1] += piece.arguments
    return "".join(piece for piece in pieces if isinstance(piece, str)), calls


def parsed(markup: Markup, chunks: list[str], names: Collection[str] = frozenset(NAMES), **options: bool) -> Any:
    parser = CallParser(markup, names, **options)
    return added([piece for chunk in chunks for piece in parser.push(chunk)] + parser.flush())


@pytest.mark.parametrize(("name", "answer", "text", "calls"), ANSWERS)
def test_calls_are_found_however_the_text_is_cut(name: str, answer: str, text: str, calls: list[str]) -> None:
    markup = BY_NAME[name]
    assert parsed(markup, [answer]) == (text, calls)
    for cut in range(len(answer) + 1):
        assert parsed(markup, [answer[:cut], answer[cut:]]) == (text, calls)
    assert parsed(markup, list(answer)) == (text, calls)


_SHARDS = sorted(
    {shard for _, answer, _, _ in ANSWERS for shard in answer.split(" ")} | {" ", "{", "}", '"', "\n", "add"}
)


@pytest.mark.parametrize("markup", MARKUPS, ids=lambda markup: markup.name)
@given(shards=st.lists(st.sampled_from(_SHARDS), max_size=8), seed=st.integers(0, 2**32))
def test_any_text_gives_the_same_in_any_pieces(markup: Markup, shards: list[str], seed: int) -> None:
    text, rng = "".join(shards), random.Random(seed)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(12)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(markup, pieces) == parsed(markup, [text])


def test_text_comes_as_soon_as_it_is_certain() -> None:
    parser = CallParser(BY_NAME["Hermes"], NAMES)
    assert parser.push("Let me ") == ["Let me"]
    assert parser.push("see <to") == [" see"]  # with the white space that was held back
    assert parser.push("ol_call>x") == [" <tool_call>x"]
    assert parser.push('<tool_call>{"name": "add", "arguments": {"a"') == [
        CallDelta(0, name="add"), CallDelta(0, arguments='{"a"'),
    ]  # fmt: skip
    assert parser.push(": 1") == [CallDelta(0, arguments=": 1")]


def test_long_answers_take_linear_time() -> None:
    for markup in MARKUPS:
        for text in ("{" * 50_000, " " * 50_000, "<" * 50_000, "[TOOL_CALLS]" * 5_000, "<|channel|>" * 5_000):
            parser, start = CallParser(markup, NAMES), time.process_time()
            pieces = parser.push(text)
            for character in text[:5_000]:
                pieces += parser.push(character)
            pieces += parser.flush()
            assert time.process_time() - start < 5  # .4 on a quiet machine; quadratic ones take minutes
            assert added(pieces) == (text + text[:5_000], [])


def test_one_call_alone_where_several_are_not_wanted() -> None:
    for name, answer, _, calls in ANSWERS:
        assert parsed(BY_NAME[name], list(answer), parallel=False)[1] == calls[:1]


def test_a_pattern_waits_only_as_long_as_it_can_still_match() -> None:
    assert match("<a> @…b", "<a>  x", 0) == "more"
    assert match("<a> @…b", "<a>" + " " * 65 + "x", 0) is None
    assert match("<a> @…b", "<a>x" + "." * 200, 0) is None
    assert match("<a> @…b", "<a>-", 0) == "more"
    assert match("<a> @…b", "<a>.", 0) is None
    found = match("<a> @…b", "<a> x.b", 0)
    assert found is not None
    assert found != "more"
    assert (found.name_start, found.name_end, found.end) == (4, 5, 7)


def found(source: str) -> ToolFormat | None:
    return ToolFormat.find(ChatTemplate(source, {}, "here"))


@pytest.mark.parametrize("name", tool_templates.TEMPLATES)
def test_the_markup_of_a_template_is_found_and_its_history_rendered(name: str) -> None:
    template = ChatTemplate(tool_templates.TEMPLATES[name], {}, "here")
    format_ = ToolFormat.find(template)
    assert format_ is not None
    assert (format_.markup.name, format_.shows_tools) == (name, True)
    assert (format_.join is not None) == (name in {"Hermes", "Mistral", "DeepSeek"})
    calls = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate([("get_weather", '{"a": "1", "b": [true]}'), ("add", "{}")])
    ]
    calls = calls[: 2 if format_.join is not None else 1]
    user: dict[str, Any] = {"role": "user", "content": "?"}
    history = format_.messages([user, {"role": "assistant", "content": "", "tool_calls": calls}])
    assert history[0] == user
    prompt = template.render([user], tools=[TOOL])
    answer = template.render(history, tools=[TOOL], add_generation_prompt=False).removeprefix(prompt)
    text, made = parsed(format_.markup, list(answer))
    assert [(n, json.loads(a)) for n, _, a in (call.partition(" ") for call in made)] == [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in calls  # type: ignore[index]
    ]
    assert text in {"", "<e>", "</s>", "<｜end▁of▁sentence｜>"}  # what ends the turn


def test_literals_are_those_that_the_template_writes() -> None:
    hermes, mistral, later = map(found, (tool_templates.HERMES, tool_templates.MISTRAL, tool_templates.MISTRAL_ARGS))
    assert hermes is not None
    assert (hermes.begin, hermes.between) == ('<tool_call>\n{"name": "', '", "arguments": ')
    assert (hermes.join, hermes.tail) == ('}\n</tool_call>\n<tool_call>\n{"name": "', "}\n</tool_call>")
    assert mistral is not None
    assert (mistral.begin, mistral.tail) == ('[TOOL_CALLS] [{"name": "', ', "id": "probe0001"}]')
    assert later is not None
    assert (later.begin, later.between, later.tail) == ("[TOOL_CALLS]", "[CALL_ID]probe0001[ARGS]", "")


def test_arguments_are_given_as_the_template_takes_them() -> None:
    mapping, text = found(tool_templates.HERMES), found(tool_templates.HERMES_TEXT)
    assert mapping is not None
    assert text is not None
    assert (mapping.mapping, text.mapping) == (True, False)
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}
    assert mapping.messages([message])[0]["tool_calls"] == [{"function": {"name": "f", "arguments": {}}}]
    assert text.messages([message])[0]["tool_calls"] == [{"function": {"name": "f", "arguments": "{}"}}]
    for wrong in ("{", "[]", 3, "[" * 100_000):
        message["tool_calls"] = [{"function": {"name": "f", "arguments": wrong}}]
        with pytest.raises(UsageError, match=r"messages\[0\].tool_calls\[0\]: arguments must be the JSON of an object"):
            mapping.messages([message])
    for hostile in (3, "x", {"function": 1}, [3], [{}], [{"function": {"name": 1}}], [[]]):
        with pytest.raises(UsageError, match=r"messages\[0\].tool_calls\[0\]: expected"):
            mapping.messages([{**message, "tool_calls": hostile}])


def test_templates_without_calls_that_can_be_read_have_no_format() -> None:
    assert found(tool_templates.UNKNOWN) is None
    assert found(tool_templates.SILENT) is None
    assert found("{{ raise_exception('no') }}") is None
    always = found("{% if not tools %}{{ raise_exception('tools') }}{% endif %}" + tool_templates.HERMES)
    assert always is not None
    assert always.shows_tools
    hidden = found(tool_templates.HIDDEN)
    assert hidden is not None
    assert not hidden.shows_tools


@pytest.mark.parametrize("name", tool_templates.TEMPLATES)
@pytest.mark.parametrize("special", [True, False])
def test_the_grammar_takes_what_the_template_writes(name: str, special: bool, sample_checkpoint: Path) -> None:
    pytest.importorskip("llguidance")
    tokenizer = Tokenizer.from_file(str(sample_checkpoint / "tokenizer.json"))
    markers = re.findall(r"<[^ <>]+>|\[[A-Z_]+\]", " ".join(BY_NAME[name].patterns))
    if special:
        tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in sorted(set(markers))])
    eos = [token for end in ("<|endoftext|>", "<|call|>") if (token := tokenizer.token_to_id(end)) is not None]
    format_ = found(tool_templates.TEMPLATES[name])
    assert format_ is not None
    shown = {tokenizer.id_to_token(token) for token in format_.special_tokens(tokenizer)}
    assert shown == (set(markers) if special else set())
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schemas = {"add": schema, "get_weather": {}}
    constraint = format_.constraint(schemas, parallel=True, tokenizer=tokenizer, eos=eos)
    state = ConstraintCompiler(tokenizer, tokenizer.get_vocab_size(), eos).start(constraint)
    arguments = '{"n": 3}'
    text = f"{format_.begin}add{format_.between}{arguments}"
    if format_.join is not None:
        text += f"{format_.join}get_weather{format_.between}{{}}"
    text = re.sub("probe000[12]", "Zz9999999", text + format_.tail)
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    for token in tokens[: -1 if tokens[-1] in eos else None]:
        assert state.mask()[token] == 0
        state.advance(token)
    assert state.mask()[eos[-1]] == 0
    one = format_.constraint(schemas, parallel=False, tokenizer=tokenizer, eos=eos)
    assert (one == constraint) == (format_.join is None)
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(UsageError, match="nested too deeply"):
        format_.constraint({"add": deep}, parallel=True, tokenizer=tokenizer, eos=eos)
