"""Calls of tools in a model's text: the markups of checkpoints, and a parser of text that arrives in pieces."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

MOST_SPACE = 64  # characters of white space where a pattern has some
MOST_BETWEEN = 128  # characters that "…" stands for

_NAME = re.compile(r"[A-Za-z0-9_-]{0,64}")  # of a function, as OpenAI's API allows it
_ELEMENT = re.compile(" |@|…|[^ @…]+")


@dataclass(frozen=True)
class Markup:
    r"""How models write calls.

    In patterns a space stands for any white space or none, "@" for the name of a function, and "…" for anything up to
    what follows it; everything else for itself. What begins a call ends with the brace that begins its arguments.

    Args:
        name: of a family of models that writes it.
        heads: begin a call.
        tails: end one, after its arguments; the first that matches, longer ones before shorter ones.
        further: begin one more, right after the arguments of another.
        dropped: are no text, wherever they stand.
        leads: calls stand at the beginning of an answer, or nowhere: nothing but JSON marks them.
    """

    name: str
    heads: tuple[str, ...]
    tails: tuple[str, ...]
    further: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    leads: bool = False

    @property
    def patterns(self) -> tuple[str, ...]:
        """All of its patterns."""
        return (*self.heads, *self.tails, *self.further, *self.dropped)


# As the checkpoints' templates and model cards have them: NousResearch/Hermes-3, Qwen/Qwen3; mistralai/Mistral-7B-v0.3
# and Mistral-Small-3.2; deepseek-ai/DeepSeek-R1 and V3.1; openai/gpt-oss (cookbook: "OpenAI Harmony Response Format");
# meta-llama/Llama-3.1 and 3.2.
MARKUPS = (
    Markup("Hermes", ('<tool_call> { "name" : "@" , "arguments" : {',), (" } </tool_call>",)),
    Markup(
        "Mistral",
        heads=(
            '[TOOL_CALLS] [ { "name" : "@" , "arguments" : {',
            "[TOOL_CALLS] @[CALL_ID]…[ARGS] {",
            "[TOOL_CALLS] @[ARGS] {",
            "[TOOL_CALLS] @ {",
        ),
        tails=(' , "id" : "…" } ]', " } ]"),
        further=(
            ' , "id" : "…" } , { "name" : "@" , "arguments" : {',
            ' } , { "name" : "@" , "arguments" : {',
        ),
    ),
    Markup(
        "DeepSeek",
        heads=(
            "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜>function<｜tool▁sep｜>@ ```json {",
            "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜>@<｜tool▁sep｜> {",
        ),
        tails=(
            " ``` <｜tool▁call▁end｜> <｜tool▁calls▁end｜>",
            " <｜tool▁call▁end｜> <｜tool▁calls▁end｜>",
        ),
        further=(
            " ``` <｜tool▁call▁end｜> <｜tool▁call▁begin｜>function<｜tool▁sep｜>@ ```json {",
            " <｜tool▁call▁end｜> <｜tool▁call▁begin｜>@<｜tool▁sep｜> {",
        ),
    ),
    Markup(
        "Harmony",
        heads=(
            "<|start|>assistant to=functions.@…<|message|> {",
            "<|start|>assistant<|channel|>commentary to=functions.@…<|message|> {",
            "<|channel|>commentary to=functions.@…<|message|> {",
            "to=functions.@…<|message|> {",
        ),
        tails=("<|call|>",),
        dropped=("<|start|>assistant", "<|channel|>…<|message|>", "<|end|>"),
    ),
    Markup(
        "Llama 3",
        heads=(
            '<|python_tag|> { "name" : "@" , "parameters" : {',
            '<|python_tag|> { "type" : "function" , "name" : "@" , "parameters" : {',
            '{ "name" : "@" , "parameters" : {',
            '{ "type" : "function" , "name" : "@" , "parameters" : {',
        ),
        tails=(" }",),
        further=(' } ; { "name" : "@" , "parameters" : {',),
        leads=True,
    ),
)


@dataclass(frozen=True)
class Match:
    """Where a pattern and the name in it stand in a text."""

    end: int
    name_start: int
    name_end: int


def match(pattern: str, text: str, at: int) -> Match | Literal["more"] | None:
    """Match a pattern of `Markup` at one place of a text; "more" where the text ends too early to tell."""
    name_start = name_end = at
    elements = _elements(pattern)
    for element, following in zip(elements, (*elements[1:], ""), strict=True):
        if element == " ":
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
        elif element == "…":
            limit = at + MOST_BETWEEN + len(following)
            found = text.find(following, at, limit)
            if found < 0:
                return "more" if len(text) < limit else None
            at = found
        else:
            part = text[at : at + len(element)]
            if part != element:
                return "more" if len(part) < len(element) and element.startswith(part) else None
            at += len(element)
    return Match(at, name_start, name_end)


@functools.cache
def _elements(pattern: str) -> tuple[str, ...]:
    return tuple(_ELEMENT.findall(pattern))


@dataclass(frozen=True)
class CallDelta:
    """A piece of call number `index`: its name, which comes first and once, or some of its arguments (JSON)."""

    index: int
    name: str | None = None
    arguments: str = ""


Piece = str | CallDelta  # str: of the text outside of calls


class CallParser:
    """Finds calls in an answer that arrives in pieces; however it is cut, what comes out adds up to the same.

    A call is one where all that begins it stands there, with one of `names`; everything else is text. White space
    around calls belongs to neither. With `parallel` false nothing after the first call is read.
    """

    def __init__(self, markup: Markup, names: Collection[str], *, parallel: bool = True) -> None:
        self._markup = markup
        self._names = names
        self._parallel = parallel
        self._starts = re.compile("|".join(re.escape(p[0]) for p in sorted({*markup.heads, *markup.dropped})))
        self._state: Callable[[list[Piece], bool], bool] = self._in_text
        self._pending = ""  # not looked at, or not decided
        self._space: list[str] = []  # after the text that came out
        self._said = self._said_since_call = False  # any text; and after the latest call
        self._depth, self._quoted, self._escaped = 0, False, False
        self.calls = 0  # that have begun

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain now."""
        return self._run(text, final=False)

    def flush(self) -> list[Piece]:
        """Return what was held back, after the last piece of text."""
        return self._run("", final=True)

    def _run(self, text: str, *, final: bool) -> list[Piece]:
        self._pending += text
        pieces: list[Piece] = []
        while self._state(pieces, final):
            pass
        return pieces

    # States: each takes what it can of what is pending, and says whether the next one may go on.

    def _in_text(self, pieces: list[Piece], final: bool) -> bool:
        text = self._pending
        first = -1 if self._said else len(text) - len(text.lstrip())  # where the answer begins
        for start in self._starts.finditer(text):
            at = start.start()
            for pattern in self._markup.heads if at <= first or not self._markup.leads else ():
                found = match(pattern, text, at)
                if found == "more" and not final:
                    return self._wait(pieces, text, at)
                if isinstance(found, Match) and text[found.name_start : found.name_end] in self._names:
                    self._say(pieces, text[:at])
                    return self._begin(pieces, found)
            for pattern in self._markup.dropped:
                found = match(pattern, text, at)
                if found == "more" and not final:
                    return self._wait(pieces, text, at)
                if isinstance(found, Match):
                    self._say(pieces, text[:at])
                    self._pending = text[found.end :]
                    return True
        self._wait(pieces, text, len(text))
        if final and not self.calls and self._space:
            pieces.append("".join(self._space))
        return False

    def _in_arguments(self, pieces: list[Piece], final: bool) -> bool:
        end = self._arguments_end()
        if end:
            pieces.append(CallDelta(self.calls - 1, arguments=self._pending[:end]))
        self._pending = self._pending[end:]
        if self._depth:
            return False
        self._state = self._after_arguments if self._parallel else self._at_end
        return True

    def _after_arguments(self, pieces: list[Piece], final: bool) -> bool:
        text = self._pending
        for pattern in self._markup.further:
            found = match(pattern, text, 0)
            if found == "more" and not final:
                return False
            if isinstance(found, Match) and text[found.name_start : found.name_end] in self._names:
                return self._begin(pieces, found)
        self._state = self._in_text
        for pattern in self._markup.tails:
            found = match(pattern, text, 0)
            if found == "more":  # in the end: end of sequence stands for the rest
                self._pending = "" if final else text
                self._state = self._in_text if final else self._after_arguments
                return False
            if isinstance(found, Match):
                self._pending = text[found.end :]
                break
        return True

    def _at_end(self, pieces: list[Piece], final: bool) -> bool:
        self._pending = ""
        return False

    def _wait(self, pieces: list[Piece], text: str, at: int) -> bool:
        """Say what stands before `at`; the rest waits for more."""
        self._say(pieces, text[:at])
        self._pending = text[at:]
        return False

    def _say(self, pieces: list[Piece], text: str) -> None:
        """Give out text, less the white space that a call may follow or came before."""
        said = text.rstrip()
        if said:
            whole = "".join((*self._space, said))
            pieces.append(whole.lstrip() if self.calls and not self._said_since_call else whole)
            self._said = self._said_since_call = True
            self._space.clear()
        if len(said) < len(text):
            self._space.append(text[len(said) :])

    def _begin(self, pieces: list[Piece], head: Match) -> bool:
        pieces.append(CallDelta(self.calls, name=self._pending[head.name_start : head.name_end]))
        self.calls += 1
        self._pending = self._pending[head.end - 1 :]
        self._space.clear()
        self._said_since_call = False
        self._depth, self._quoted, self._escaped = 0, False, False
        self._state = self._in_arguments
        return True

    def _arguments_end(self) -> int:
        """Count the characters of what is pending that are the arguments'; `_depth` is 0 where they are complete."""
        for i, character in enumerate(self._pending):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character == "{":
                self._depth += 1
            elif character == "}":
                self._depth -= 1
                if not self._depth:
                    return i + 1
        return len(self._pending)
