"""Responses of OpenAI's Responses API, whole and as events of a stream. No HTTP here."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from llmforge.base.errors import ForgeError
from llmforge.serving.http.responses import error_body
from llmforge.serving.http.responses_call import ResponsesCall
from llmforge.serving.protocol.answer import AnswerPiece, AnswerReader, new_call_id
from llmforge.serving.protocol.reasoning import Thought
from llmforge.serving.protocol.tool_calls import CallDelta
from llmforge.serving.request import Chunk, Usage

_Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponsesWriter:
    """Writes the response to one call, and its events; what a stream adds up to is the whole."""

    def __init__(self, asked: ResponsesCall) -> None:
        call = asked.call
        self._asked = asked
        self._reader = AnswerReader(call.parser and call.parser(), call.reasoning and call.reasoning())
        self._items: list[dict[str, Any]] = []  # the last one may be open
        self._open = False
        self._usage: Usage | None = None
        self._count = 0  # of events
        self.finish_reasons: dict[int, str] = {}  # as a chat's are

    def begin(self) -> Iterator[dict[str, Any]]:
        """Write the events before the first token."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def events(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """Write the events of one chunk; the last one ends the stream."""
        pieces, reason = self._reader.read(chunk.text, chunk.finish_reason, tokens=chunk.token_id is not None)
        for piece in pieces:
            yield from self._add(piece)
        if reason is None:
            return
        self.finish_reasons[0] = reason
        self._usage = chunk.usage
        status: _Status = "incomplete" if reason == "length" else "completed"
        yield from self._close(status)
        yield self._event(f"response.{status}", response=self._response(status))

    def fail(self, error: ForgeError) -> Iterator[dict[str, Any]]:
        """Write the event of an error in the middle of a stream."""
        body = error_body(error)["error"]
        told = {"code": "server_error", "message": body["message"]}
        yield self._event("response.failed", response={**self._response("failed"), "error": told})

    def response(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Write the whole response."""
        written: dict[str, Any] = {}
        for chunk in chunks:
            for event in self.events(chunk):
                written = event.get("response", written)
        return written

    # Items --------------------------------------------------------------------------------------------------------

    def _add(self, piece: AnswerPiece) -> Iterator[dict[str, Any]]:
        if isinstance(piece, CallDelta):
            yield from self._add_call(piece)
            return
        thought = isinstance(piece, Thought)
        text = piece.text if isinstance(piece, Thought) else piece
        kind, part_type = ("reasoning", "reasoning_text") if thought else ("message", "output_text")
        if not self._open or self._items[-1]["type"] != kind:
            yield from self._close("completed")
            own: dict[str, Any] = {"summary": []} if thought else {"role": "assistant"}
            yield self._open_item({"type": kind, "id": _id("rs" if thought else "msg"), **own, "content": []})
            part = {"type": part_type, "text": ""} if thought else {"type": part_type, "text": "", **_bare()}
            yield self._of_part("response.content_part.added", part=dict(part))
            self._items[-1]["content"] = [part]
        self._items[-1]["content"][0]["text"] += text
        more: dict[str, Any] = {} if thought else {"logprobs": []}
        yield self._of_part(f"response.{part_type}.delta", delta=text, **more)

    def _add_call(self, piece: CallDelta) -> Iterator[dict[str, Any]]:
        if piece.name is not None:
            yield from self._close("completed")
            call = {"type": "function_call", "id": _id("fc"), "call_id": new_call_id(), "name": piece.name}
            yield self._open_item({**call, "arguments": ""})
        if piece.arguments:
            self._items[-1]["arguments"] += piece.arguments
            yield self._of_item("response.function_call_arguments.delta", delta=piece.arguments)

    def _open_item(self, item: dict[str, Any]) -> dict[str, Any]:
        self._items.append({**item, "status": "in_progress"})
        self._open = True
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(self._items[-1]))

    def _close(self, status: _Status) -> Iterator[dict[str, Any]]:
        """End the item that is open."""
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._of_item("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            [part] = item["content"]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            yield self._of_part(f"response.{part['type']}.done", text=part["text"], **more)
            yield self._of_part("response.content_part.done", part=dict(part))
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=dict(item))

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _of_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._of_item(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}

    def _response(self, status: _Status) -> dict[str, Any]:
        """Write the response as far as it has come."""
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._asked.id,
            "object": "response",
            "created_at": self._asked.call.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": cut,
            "output": [] if status == "in_progress" else [dict(item) for item in self._items],
            **self._asked.echoed,
            "usage": None if self._usage is None else self._counted(self._usage),
        }

    def _counted(self, usage: Usage) -> Mapping[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        }


def _bare() -> dict[str, Any]:
    return {"annotations": [], "logprobs": []}


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(24)}"
