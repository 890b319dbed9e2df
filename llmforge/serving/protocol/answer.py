"""Answers as they come: thoughts, text and calls of tools in their chunks, and why they end, as clients are told."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.protocol.harmony import HarmonyChannels, HarmonyParser
from llmforge.serving.protocol.reasoning import Reasoning, ReasoningParser, Thought
from llmforge.serving.protocol.tool_calls import CallDelta, CallParser, Piece

_ID_CHARACTERS = string.ascii_letters + string.digits


AnswerPiece = Thought | Piece  # str: text outside of thoughts and calls


def reasoning_of(encoder: PromptEncoder) -> Reasoning | HarmonyChannels | None:
    """Find how a checkpoint writes what it thinks; None: nothing says that it does."""
    return HarmonyChannels.find(encoder) or Reasoning.find(encoder)


class AnswerReader:
    """Reads the text of one answer: `reasoning` takes thoughts out of it, `parser` finds calls in the rest.

    None: there are none, or none are looked for.
    """

    def __init__(self, parser: CallParser | None, reasoning: ReasoningParser | HarmonyParser | None = None) -> None:
        self._parser = parser
        self._reasoning = reasoning
        self.reasoning_tokens: int | None = None if reasoning is None else 0  # of thoughts and their tags

    def read(self, text: str, reason: str | None, tokens: int = 0) -> tuple[list[AnswerPiece], str | None]:
        """Say what the next text, of so many `tokens`, holds, and why the answer ended.

        `reason` is the engine's, None while the answer goes on.
        """
        parser, pieces = self._parser, list[AnswerPiece]()
        for piece in self._parts(text, tokens, final=reason is not None):
            pieces += [piece] if parser is None or isinstance(piece, Thought) else parser.push(piece)
        if parser is None:
            return pieces, reason
        if reason is not None:
            pieces += parser.flush()
        return pieces, "tool_calls" if reason == "stop" and parser.calls else reason

    def _parts(self, text: str, tokens: int, *, final: bool) -> Sequence[Thought | str]:
        """Divide text into thoughts and the rest, and count what was thought."""
        if self._reasoning is None or self.reasoning_tokens is None:
            return [text] if text else []
        thinking = self._reasoning.thinking
        parts = self._reasoning.push(text)
        if thinking or self._reasoning.thinking:
            self.reasoning_tokens += tokens
        return [*parts, *self._reasoning.flush()] if final else parts


def text_of(pieces: Sequence[AnswerPiece]) -> str:
    """Add up the text outside of thoughts and calls."""
    return "".join(piece for piece in pieces if isinstance(piece, str))


def thoughts_of(pieces: Sequence[AnswerPiece]) -> str:
    """Add up the thoughts."""
    return "".join(piece.text for piece in pieces if isinstance(piece, Thought))


def call_deltas(pieces: Sequence[AnswerPiece]) -> list[dict[str, Any]]:
    """Write the calls of pieces as OpenAI's streams do; a call begins with its id, which is a new one."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if isinstance(piece, CallDelta):
            call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
            if piece.name is not None:
                call |= {"id": new_call_id(), "type": "function"}
                call["function"] = {"name": piece.name, "arguments": ""}
            call["function"]["arguments"] += piece.arguments
    return list(calls.values())


def whole_calls(deltas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Write calls that are complete as OpenAI's messages do."""
    return [{name: value for name, value in call.items() if name != "index"} for call in deltas]


def new_call_id() -> str:
    """Make the id of a call: 9 letters and digits, all that Mistral's templates take."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))
