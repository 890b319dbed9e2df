"""Markups that checkpoints write calls of tools in: patterns, and how they match text."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

MOST_SPACE = 64  # characters of white space where a pattern has some
MOST_BETWEEN = 128  # characters that "…" and "§" stand for

_NAME = re.compile(r"[A-Za-z0-9_-]{0,64}")  # of a function, as OpenAI's API allows it
_PARAMETER = re.compile(r"[^<>\n]+")  # the name of one
_ELEMENT = re.compile(r" |@|…|§|\^|[^ @…§^]+")


@dataclass(frozen=True)
class ParameterMarkup:
    """How arguments are written one by one, with names, in place of JSON: strings as they are, the rest in JSON.

    Args:
        begin: a pattern up to a value; "§" in it is the name of the parameter.
        end: what follows a value.
        lines: a value stands in lines of its own: a line break on either side is not the value's.
    """

    begin: str
    end: str
    lines: bool = False


@dataclass(frozen=True)
class Markup:
    r"""How models write calls.

    In patterns a space stands for any white space or none, "@" for the name of a function, "§" for that of a parameter,
    and "…" for anything up to what follows it; what follows "^" must stand there, and is no part of the match;
    everything else stands for itself. What begins a call ends where its arguments begin.

    Args:
        name: of a family of models that writes it.
        heads: begin a call.
        tails: end one, after its arguments; the first that matches, longer ones before shorter ones.
        further: begin one more, right after the arguments of another.
        dropped: are no text, wherever they stand.
        leads: calls stand at the beginning of an answer, or nowhere: nothing but JSON marks them.
        parameters: how arguments are written where they are no JSON object.
        ids_name_functions: a template may write a call by its id alone, which has to be "functions.NAME:NUMBER".
    """

    name: str
    heads: tuple[str, ...]
    tails: tuple[str, ...]
    further: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    leads: bool = False
    parameters: ParameterMarkup | None = None
    ids_name_functions: bool = False

    @property
    def patterns(self) -> tuple[str, ...]:
        """All of its patterns."""
        parameters = () if self.parameters is None else (self.parameters.begin, self.parameters.end)
        return (*self.heads, *self.tails, *self.further, *self.dropped, *parameters)


# As the checkpoints' templates and model cards have them: NousResearch/Hermes-3, Qwen/Qwen3; mistralai/Mistral-7B-v0.3
# and Mistral-Small-3.2; deepseek-ai/DeepSeek-R1 and V3.1; openai/gpt-oss (cookbook: "OpenAI Harmony Response Format");
# meta-llama/Llama-3.1 and 3.2; moonshotai/Kimi-K2-Instruct and K2-Thinking; nvidia/Nemotron-Nano-9B-v2 and Apriel;
# CohereLabs/c4ai-command-r7b; Qwen/Qwen3-Coder, Qwen3.5, nvidia/Nemotron-3-Nano and stepfun-ai/Step-3.5-Flash;
# ByteDance-Seed/Seed-OSS; zai-org/GLM-4.6 and 4.7; MiniMaxAI/MiniMax-M2.
MARKUPS = (
    Markup("Hermes", ('<tool_call> { "name" : "@" , "arguments" : ^{',), (" } </tool_call>",)),
    Markup(
        "Mistral",
        heads=(
            '[TOOL_CALLS] [ { "name" : "@" , "arguments" : ^{',
            "[TOOL_CALLS] @[CALL_ID]…[ARGS] ^{",
            "[TOOL_CALLS] @[ARGS] ^{",
            "[TOOL_CALLS] @ ^{",
        ),
        tails=(' , "id" : "…" } ]', " } ]"),
        further=(
            ' , "id" : "…" } , { "name" : "@" , "arguments" : ^{',
            ' } , { "name" : "@" , "arguments" : ^{',
        ),
    ),
    Markup(
        "DeepSeek",
        heads=(
            "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜>function<｜tool▁sep｜>@ ```json ^{",
            "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜>@<｜tool▁sep｜> ^{",
        ),
        tails=(
            " ``` <｜tool▁call▁end｜> <｜tool▁calls▁end｜>",
            " <｜tool▁call▁end｜> <｜tool▁calls▁end｜>",
        ),
        further=(
            " ``` <｜tool▁call▁end｜> <｜tool▁call▁begin｜>function<｜tool▁sep｜>@ ```json ^{",
            " <｜tool▁call▁end｜> <｜tool▁call▁begin｜>@<｜tool▁sep｜> ^{",
        ),
    ),
    Markup(
        "Harmony",
        heads=(
            "<|start|>assistant to=functions.@…<|message|> ^{",
            "<|start|>assistant<|channel|>commentary to=functions.@…<|message|> ^{",
            "<|channel|>commentary to=functions.@…<|message|> ^{",
            "to=functions.@…<|message|> ^{",
        ),
        tails=("<|call|>",),
        dropped=("<|start|>assistant", "<|channel|>…<|message|>", "<|end|>"),
    ),
    Markup(
        "Llama 3",
        heads=(
            '<|python_tag|> { "name" : "@" , "parameters" : ^{',
            '<|python_tag|> { "type" : "function" , "name" : "@" , "parameters" : ^{',
            '{ "name" : "@" , "parameters" : ^{',
            '{ "type" : "function" , "name" : "@" , "parameters" : ^{',
        ),
        tails=(" }",),
        further=(' } ; { "name" : "@" , "parameters" : ^{',),
        leads=True,
    ),
    Markup(
        "Kimi",
        heads=("<|tool_calls_section_begin|> <|tool_call_begin|> functions.@:…<|tool_call_argument_begin|> ^{",),
        tails=(" <|tool_call_end|> <|tool_calls_section_end|>",),
        further=(" <|tool_call_end|> <|tool_call_begin|> functions.@:…<|tool_call_argument_begin|> ^{",),
        ids_name_functions=True,
    ),
    Markup(
        "Nemotron",
        heads=('<TOOLCALL> [ { "name" : "@" , "arguments" : ^{', '<tool_calls> [ { "name" : "@" , "arguments" : ^{'),
        tails=(" } ] </TOOLCALL>", " } ] </tool_calls>"),
        further=(' } , { "name" : "@" , "arguments" : ^{',),
    ),
    Markup(
        "Command R",
        heads=('<|START_ACTION|> [ { "tool_call_id" : "…" , "tool_name" : "@" , "parameters" : ^{',),
        tails=(" } ] <|END_ACTION|>",),
        further=(' } , { "tool_call_id" : "…" , "tool_name" : "@" , "parameters" : ^{',),
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    Markup(
        "Qwen XML",
        heads=("<tool_call> <function=@>",),
        tails=(" </function> </tool_call>",),
        parameters=ParameterMarkup("<parameter=§>", "</parameter>", lines=True),
    ),
    Markup(
        "Seed",
        heads=("<seed:tool_call> <function=@>",),
        tails=(" </function> </seed:tool_call>",),
        parameters=ParameterMarkup("<parameter=§>", "</parameter>"),
    ),
    Markup(
        "GLM",
        heads=("<tool_call> @ ^<arg_key>", "<tool_call> @ ^</tool_call>"),
        tails=(" </tool_call>",),
        parameters=ParameterMarkup("<arg_key>§</arg_key> <arg_value>", "</arg_value>"),
    ),
    Markup(
        "MiniMax",
        heads=('<minimax:tool_call> <invoke name="@">',),
        tails=(" </invoke> </minimax:tool_call>",),
        further=(' </invoke> <invoke name="@">',),
        parameters=ParameterMarkup('<parameter name="§">', "</parameter>"),
    ),
)


@dataclass(frozen=True)
class Match:
    """Where a pattern, and the name in it, stand in a text."""

    end: int
    name_start: int
    name_end: int


def match(pattern: str, text: str, at: int) -> Match | Literal["more"] | None:
    """Match a pattern of `Markup` at one place of a text; "more" where the text ends too early to tell."""
    name_start = name_end = at
    end: int | None = None
    elements = _elements(pattern)
    for element, following in zip(elements, (*elements[1:], ""), strict=True):
        if element == "^":
            end = at
        elif element == " ":
            limit = at + MOST_SPACE
            while at < min(limit, len(text)) and text[at].isspace():
                at += 1
        elif element == "@":
            name = _NAME.match(text, at)
            assert name is not None
            if name.end() == len(text):
                return "more"
            if name.end() == at:
                return None
            name_start, name_end = name.span()
            at = name_end
        elif element in "…§":
            limit = at + MOST_BETWEEN + len(following)
            found = text.find(following, at, limit)
            if found < 0:
                return "more" if len(text) < limit else None
            if element == "§":
                if not _PARAMETER.fullmatch(text, at, found):
                    return None
                name_start, name_end = at, found
            at = found
        else:
            part = text[at : at + len(element)]
            if part != element:
                return "more" if len(part) < len(element) and element.startswith(part) else None
            at += len(element)
    return Match(at if end is None else end, name_start, name_end)


@functools.cache
def _elements(pattern: str) -> tuple[str, ...]:
    return tuple(_ELEMENT.findall(pattern))
