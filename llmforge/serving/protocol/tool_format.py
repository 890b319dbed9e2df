"""How a checkpoint's chat template shows tools and writes calls: found by rendering probes, never by its name."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from llmforge.base.errors import InputError, UsageError
from llmforge.runtime.sampling.constraints import Constraint, exact
from llmforge.serving.chat import ChatTemplate
from llmforge.serving.protocol import tool_grammar
from llmforge.serving.protocol.tool_calls import CallDelta, CallParser
from llmforge.serving.protocol.tool_grammar import ParameterGrammar
from llmforge.serving.protocol.tool_markups import MARKUPS, MOST_SPACE, Markup, Match, match
from llmforge.serving.protocol.tool_values import argument

MOST_CALLS = 16  # of one constrained answer: a model that likes calls would never end

# What no template writes of its own. The id has the form that Mistral's templates insist on.
_NAME = "probed_function"
_ARGUMENTS = {"probed": ['one "1"', 2, {"é": True}]}
_IDS = ("probe0001", "probe0002")
_NAMING_IDS = (f"functions.{_NAME}:0", f"functions.{_NAME}:1")
_ID = "[A-Za-z0-9]{9}"
_TOOL = {
    "type": "function",
    "function": {
        "name": "probed_tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
_USER = {"role": "user", "content": "Ask the tool."}


@dataclass(frozen=True)
class ToolFormat:
    """What a template does with tools and calls.

    Args:
        markup: what calls are parsed by.
        shows_tools: whether tools reach the prompt.
        mapping: whether the template wants arguments as an object, and not as the JSON of one.
        content: of a message of calls without text: what the template wants there.
        begin: what it writes before the name of the first call,
        between: between a name and its arguments,
        join: between arguments and the name of a further call (None: there is none),
        tail: after the last arguments.
        parameter: what it writes before the name of a parameter, between that and the value, and after the value, where
            arguments are no JSON.
        naming_ids: whether it writes a call by its id, which has to be "functions.NAME:NUMBER".
    """

    markup: Markup
    shows_tools: bool
    mapping: bool
    content: str | None
    begin: str
    between: str
    join: str | None
    tail: str
    parameter: tuple[str, str, str] | None = None
    naming_ids: bool = False

    @classmethod
    def find(cls, template: ChatTemplate) -> ToolFormat | None:
        """Find the format of a template; None where no known markup gives back the call that was rendered.

        Raises:
            EnvironmentLacks: no process can be started to render.
        """
        plain, prompt = _rendered(template, [_USER], tools=()), _rendered(template, [_USER])
        for ids, mapping, content in itertools.product((_IDS, _NAMING_IDS), (True, False), ("", None)):
            calls = [_call(_NAME, id_, _ARGUMENTS if mapping else json.dumps(_ARGUMENTS)) for id_ in ids]
            answers = [{"role": "assistant", "content": content, "tool_calls": calls[:n]} for n in (1, 2)]
            text, two = (_rendered(template, [_USER, each], add_generation_prompt=False) for each in answers)
            for markup in MARKUPS:
                if ids == _IDS or markup.ids_name_functions:
                    found = cls._of(markup, text, two, prompt, plain != prompt, mapping, content)
                    if found is not None:
                        return replace(found, naming_ids=ids == _NAMING_IDS)
        return None

    @classmethod
    def _of(
        cls, markup: Markup, text: str, two: str, prompt: str, shows_tools: bool, mapping: bool, content: str | None
    ) -> ToolFormat | None:
        """Take a format from the renderings of one call and of two, if `markup` parses the one."""
        calls = _calls(markup, text)
        if len(calls) != 1:
            return None
        (call,) = calls
        start = max(call.start, len(prompt)) if text.startswith(prompt) else call.start
        tails = [found.end for tail in markup.tails if isinstance(found := match(tail, text, call.end), Match)]
        several = _calls(markup, two)
        made = cls(
            markup, shows_tools, mapping, content,
            begin=text[start : call.name_start],
            between=text[call.name_end : call.arguments],
            join=two[several[0].end : several[1].name_start] if len(several) == 2 else None,
            tail=text[call.end : tails[0]] if tails else "",
            parameter=call.parameter,
        )  # fmt: skip
        return made if made._reads_what_it_writes() else None

    def _reads_what_it_writes(self) -> bool:
        parser = CallParser(self.markup, {_NAME})
        written = f"{self.begin}{_NAME}{self.between}{self._written(_ARGUMENTS)}{self.tail}"
        first, *others = parser.push(written) + parser.flush() or [""]
        if first != CallDelta(0, name=_NAME) or not all(isinstance(each, CallDelta) for each in others):
            return False
        return "".join(each.arguments for each in others if isinstance(each, CallDelta)) == json.dumps(
            _ARGUMENTS, ensure_ascii=False
        )

    def _written(self, arguments: Mapping[str, Any]) -> str:
        """Write arguments as the template does."""
        if self.parameter is None:
            return json.dumps(arguments, ensure_ascii=False)
        before, between, after = self.parameter
        values = {
            name: each if isinstance(each, str) else json.dumps(each, ensure_ascii=False)
            for name, each in arguments.items()
        }
        return "".join(f"{before}{name}{between}{value}{after}" for name, value in values.items())

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Write the calls in a conversation as the template wants them; they come in OpenAI's shape.

        Raises:
            UsageError: a call has no function, or its arguments are not the JSON of an object.
        """
        written = [
            self._message(message, f"messages[{i}]") if message.get("tool_calls") else message
            for i, message in enumerate(messages)
        ]
        return _with_naming_ids(written) if self.naming_ids else written

    def _message(self, message: Mapping[str, Any], where: str) -> dict[str, Any]:
        given, calls = message["tool_calls"], []
        for i, call in enumerate(given if isinstance(given, list) else [given]):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise UsageError(f'{where}.tool_calls[{i}]: expected {{"function": {{"name": …, "arguments": …}}}}')
            arguments = _arguments(function.get("arguments"), f"{where}.tool_calls[{i}]")
            written = arguments if self.mapping else json.dumps(arguments, ensure_ascii=False)
            calls.append({**call, "function": {"name": function["name"], "arguments": written}})
        return {**message, "content": message.get("content") or self.content, "tool_calls": calls}

    def special_tokens(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Give the special tokens that calls are written with: those that must stay in the text."""
        written = (*self.markup.patterns, self.begin, self.between, self.join or "", self.tail)
        return frozenset(
            token
            for token, added in tokenizer.get_added_tokens_decoder().items()
            if added.special and any(added.content in text for text in written)
        )

    def constraint(
        self,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        parallel: bool,
        tokenizer: Tokenizer,
        eos: Sequence[int],
        required: bool = True,
    ) -> Constraint:
        """Want one call or several, of functions by their names and the JSON schemas of their arguments.

        An answer must begin with them where they are `required`; else they are held to it from where one begins, up to
        the name of a function as the template writes it.

        Raises:
            UsageError: the schemas are too large, nested too deeply, or hold what cannot be held to.
        """
        added = {
            token: each.content
            for token, each in tokenizer.get_added_tokens_decoder().items()
            if each.special or re.fullmatch("<.*>", each.content)  # no text, to llguidance
        }
        ends = [self.tail.find(added[token]) for token in eos if token in added and added[token] in self.tail]
        tail = self.tail[: min(ends, default=None)]
        between, further = _lark(self.between, added), ""
        if parallel and self.join is not None:
            further = f" ({_lark(self.join, added)} call){{0,{MOST_CALLS - 1}}}"
        begin = _lark(self.begin, added) if required else ""
        rules = [f"start: {begin} call{further} {_lark(tail, added)}".rstrip()]
        rules.append(f"call: {' | '.join(f'{json.dumps(name)} {between} a{i}' for i, name in enumerate(schemas))}")
        parameter = None if self.parameter is None else _parameter_grammar(self.parameter, added)
        for i, schema in enumerate(schemas.values()):
            try:
                rules += tool_grammar.arguments(f"a{i}", exact(schema, "tools"), parameter)
            except RecursionError as error:
                raise UsageError("tools: a schema is nested too deeply") from error
        return Constraint("tools", "\n".join(rules) + "\n", trigger=None if required else self._opening())

    def _opening(self) -> str:
        """Give the regular expression of what stands before the name of a first call, in any white space."""
        parts = (re.escape(part) for part in re.split(r"\s+", self.begin.strip()))
        space = rf"\s{{0,{MOST_SPACE}}}"
        opening = space.join(parts)
        return rf"\A{space}{opening}" if self.markup.leads else opening


@dataclass(frozen=True)
class _Rendered:
    """Where a call stands in a rendering: `end` is that of its arguments, `parameter` as in `ToolFormat`."""

    start: int
    name_start: int
    name_end: int
    arguments: int
    end: int
    parameter: tuple[str, str, str] | None = None


def _calls(markup: Markup, text: str) -> list[_Rendered]:
    """Find the calls of the probe in a rendering."""
    calls: list[_Rendered] = []
    at = 0
    while at < len(text):
        for pattern in (*markup.further, *markup.heads) if calls else markup.heads:
            found = match(pattern, text, at)
            if isinstance(found, Match) and text[found.name_start : found.name_end] == _NAME:
                made = _arguments_at(markup, text, found.end)
                if made is not None:
                    arguments, end, parameter = made
                    calls.append(_Rendered(at, found.name_start, found.name_end, arguments, end, parameter))
                    at = end
                    break
        else:
            at += 1
    return calls


def _arguments_at(markup: Markup, text: str, at: int) -> tuple[int, int, tuple[str, str, str] | None] | None:
    """Find where the probe's arguments begin and end, and how their one parameter is written; None: they are others."""
    if markup.parameters is None:
        try:
            value, end = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            return None
        return (at, end, None) if value == _ARGUMENTS else None
    begin = _after_space(text, at)
    found = match(markup.parameters.begin, text, begin)
    if not isinstance(found, Match):
        return None
    end = text.find(markup.parameters.end, found.end)
    ((name, value),) = _ARGUMENTS.items()
    if end < 0 or text[found.name_start : found.name_end] != name or argument(text[found.end : end], None) != value:
        return None
    last = len(text[:end].rstrip())
    after = _after_space(text, end + len(markup.parameters.end))
    before = text[begin : found.name_start], text[found.name_end : _after_space(text, found.end)]
    return begin, after, (*before, text[last:after])


def _after_space(text: str, at: int) -> int:
    """Say where white space at a place of a text ends."""
    return len(text) - len(text[at:].lstrip())


def _with_naming_ids(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Give calls, and the results that name them, ids that say the function and count the conversation's calls."""
    known: dict[str, str] = {}
    written: list[Mapping[str, Any]] = []
    number = 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            id_ = f"functions.{call['function']['name']}:{number}"
            known[str(call.get("id"))] = id_
            calls.append({**call, "id": id_})
            number += 1
        made = {**message, "tool_calls": calls} if calls else message
        result = known.get(str(message.get("tool_call_id")))
        written.append(made if result is None else {**made, "tool_call_id": result})
    return written


def _rendered(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (_TOOL,),
    add_generation_prompt: bool = True,
) -> str:
    """Render a conversation; nothing where the template refuses it."""
    try:
        return template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
    except InputError:
        return ""


def _call(name: str, id_: str, arguments: Any) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(value: Any, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(value or "{}") if isinstance(value, str | None) else value
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise UsageError(f"{where}: arguments must be the JSON of an object")
    return arguments


def _parameter_grammar(parameter: tuple[str, str, str], added: Mapping[int, str]) -> ParameterGrammar:
    before, between, after = (_lark(part, added) for part in parameter)
    special = [parameter[2].find(content) for content in added.values() if content in parameter[2]]
    if special:  # text has no such token, and may have the white space before it
        return ParameterGrammar(before, between, after, "", _lark(parameter[2][min(special) :], added))
    return ParameterGrammar(before, between, after, _regex(parameter[2]), "")


def _regex(text: str) -> str:
    """Write a text as a regular expression in Lark does."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n").replace(r"\ ", " ")


def _lark(text: str, added: Mapping[int, str]) -> str:
    """Write a text as llguidance's grammars do: special tokens by their numbers, ids of calls as any id."""
    tokens = {content: f"<[{token}]>" for token, content in added.items()}
    special = "|".join(re.escape(each) for each in sorted((*tokens, *_IDS), key=len, reverse=True))
    parts = re.split(f"({special})", text)
    written = {**tokens, **dict.fromkeys(_IDS, f"/{_ID}/")}
    return " ".join(written.get(part) or json.dumps(part) for part in parts if part)
