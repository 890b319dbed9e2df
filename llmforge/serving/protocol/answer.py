"""Answers as they come: the text and the calls of tools in their chunks, and why they end, as clients are told."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from llmforge.serving.protocol.tool_calls import CallDelta, CallParser, Piece

_ID_CHARACTERS = string.ascii_letters + string.digits


class AnswerReader:
    """Reads the text of one answer, in which `parser` finds calls; None: none are looked for."""

    def __init__(self, parser: CallParser | None) -> None:
        self._parser = parser

    def read(self, text: str, reason: str | None) -> tuple[list[Piece], str | None]:
        """Say what the next text holds, and why the answer ended; `reason` is the engine's, None while it goes on."""
        parser = self._parser
        if parser is None:
            return [text] if text else [], reason
        pieces = parser.push(text)
        if reason is not None:
            pieces += parser.flush()
        return pieces, "tool_calls" if reason == "stop" and parser.calls else reason


def text_of(pieces: Sequence[Piece]) -> str:
    """Add up the text outside of calls."""
    return "".join(piece for piece in pieces if isinstance(piece, str))


def call_deltas(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Write the calls of pieces as OpenAI's streams do; a call begins with its id, which is a new one."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if isinstance(piece, CallDelta):
            call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
            if piece.name is not None:
                call |= {"id": _call_id(), "type": "function"}
                call["function"] = {"name": piece.name, "arguments": ""}
            call["function"]["arguments"] += piece.arguments
    return list(calls.values())


def whole_calls(deltas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Write calls that are complete as OpenAI's messages do."""
    return [{name: value for name, value in call.items() if name != "index"} for call in deltas]


def _call_id() -> str:
    """Make the id of a call: 9 letters and digits, all that Mistral's templates take."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))
