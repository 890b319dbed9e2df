"""Calls of tools in a model's text that arrives in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from llmforge.serving.protocol.pieces import PieceParser
from llmforge.serving.protocol.tool_markups import MOST_SPACE, Markup, Match, ParameterMarkup, match
from llmforge.serving.protocol.tool_values import STRING, argument, types_of


@dataclass(frozen=True)
class CallDelta:
    """A piece of call number `index`: its name, which comes first and once, or some of its arguments (JSON)."""

    index: int
    name: str | None = None
    arguments: str = ""


Piece = str | CallDelta  # str: of the text outside of calls


class CallParser(PieceParser[Piece]):
    """Finds calls in an answer that arrives in pieces; however it is cut, what comes out adds up to the same.

    A call is one where all that begins it stands there, with one of `names`; everything else is text. White space
    around calls belongs to neither. With `parallel` false nothing after the first call is read. Where arguments are no
    JSON, they come out as JSON: what a value is follows from `schemas`, those of functions' arguments.
    """

    def __init__(
        self,
        markup: Markup,
        names: Collection[str],
        *,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        parallel: bool = True,
    ) -> None:
        super().__init__()
        self._markup = markup
        self._names = names
        self._schemas = schemas or {}
        self._parallel = parallel
        self._starts = re.compile("|".join(re.escape(p[0]) for p in sorted({*markup.heads, *markup.dropped})))
        self._state = self._in_text
        self._space: list[str] = []  # after the text that came out
        self._said = self._said_since_call = False  # any text; and after the latest call
        self._depth, self._quoted, self._escaped = 0, False, False
        self._schema: Mapping[str, Any] = {}  # of the arguments of the call
        self._types: frozenset[str] | None = None  # of the value of a parameter
        self._arguments = 0  # of the call, that have begun
        self._begun, self._searched = (
            False,
            0,
        )  # of the value: whether any came, and what was looked through for its end
        self.calls = 0  # that have begun

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
        return not self._depth and self._end_arguments()

    def _between_parameters(self, pieces: list[Piece], final: bool) -> bool:
        text = self._pending.lstrip()
        found = match(self._parameters.begin, text, 0)
        if isinstance(found, Match):
            name = text[found.name_start : found.name_end]
            self._types = types_of(name, self._schema)
            pieces.append(self._delta(f"{', ' if self._arguments else '{'}{json.dumps(name, ensure_ascii=False)}: "))
            self._arguments += 1
            self._pending, self._searched, self._begun = text[found.end :], 0, False
            self._state = self._in_value
            return True
        if found == "more" or any(match(end, text, 0) == "more" for end in self._ends):
            self._pending = "" if final else text  # what was cut off is not complete
            return False
        self._pending = text
        pieces.append(self._delta("}" if self._arguments else "{}"))
        return self._end_arguments()

    def _in_value(self, pieces: list[Piece], final: bool) -> bool:
        text, mark = self._pending, self._parameters.end
        if not self._begun:
            if not text and not final:
                return False
            text = text.removeprefix("\n") if self._parameters.lines else text
            self._begun = True
            if self._types == STRING:
                pieces.append(self._delta('"'))
        end = text.find(mark, self._searched)
        while end >= 0:
            follows = self._follows(text, end + len(mark), final=final)
            if follows is None:
                self._searched = end
                return self._hold(pieces, text, end, final=final)
            if follows:
                return self._end_value(pieces, text, end)
            end = text.find(mark, end + 1)
        self._searched = max(len(text) - len(mark) + 1, 0)
        return self._hold(pieces, text, self._searched, final=final)

    def _hold(self, pieces: list[Piece], text: str, end: int, *, final: bool) -> bool:
        """Give out what of a string is certain, up to `end` at most; the rest of its text waits."""
        if self._types == STRING:
            said = len(text) if final else max(end - self._parameters.lines, 0)
            pieces += [self._delta(_escaped(text[:said]))] if said else []
            text, self._searched = text[said:], max(self._searched - said, 0)
        self._pending = "" if final else text
        return False

    def _end_value(self, pieces: list[Piece], text: str, end: int) -> bool:
        value = text[:end].removesuffix("\n") if self._parameters.lines else text[:end]
        if self._types == STRING:
            pieces.append(self._delta(_escaped(value) + '"'))
        else:
            pieces.append(self._delta(json.dumps(argument(value, self._types), ensure_ascii=False)))
        self._pending = text[end + len(self._parameters.end) :]
        self._state = self._between_parameters
        return True

    def _follows(self, text: str, at: int, *, final: bool) -> bool | None:
        """Say if a value ends before `at`, as a parameter or the end of the call follows; None: more will tell."""
        space = text[at : at + MOST_SPACE + 1]
        start = at + len(space) - len(space.lstrip())
        if start == len(text):
            return True if final else None
        found = [match(pattern, text, start) for pattern in (self._parameters.begin, *self._ends)]
        if any(isinstance(each, Match) for each in found):
            return True
        return None if "more" in found and not final else "more" in found

    @property
    def _parameters(self) -> ParameterMarkup:
        assert self._markup.parameters is not None
        return self._markup.parameters

    @property
    def _ends(self) -> tuple[str, ...]:
        """Give what may follow the last parameter."""
        return (*self._markup.tails, *self._markup.further)

    def _delta(self, arguments: str) -> CallDelta:
        return CallDelta(self.calls - 1, arguments=arguments)

    def _end_arguments(self) -> bool:
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
        name = self._pending[head.name_start : head.name_end]
        pieces.append(CallDelta(self.calls, name=name))
        self.calls += 1
        self._pending = self._pending[head.end :]
        self._space.clear()
        self._said_since_call = False
        self._depth, self._quoted, self._escaped = 0, False, False
        self._schema, self._arguments = self._schemas.get(name, {}), 0
        self._state = self._in_arguments if self._markup.parameters is None else self._between_parameters
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


def _escaped(text: str) -> str:
    """Write text as JSON has it between its quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
