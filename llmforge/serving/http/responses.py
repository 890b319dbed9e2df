"""OpenAI's responses: whole completions, chunks of a stream, and errors. No HTTP here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from llmforge.base.errors import EnvironmentLacks, ForgeError, Unavailable, UnsupportedError, UsageError
from llmforge.runtime.sampling.sampler import TokenLogprob
from llmforge.serving.http import encoder_calls
from llmforge.serving.http.bodies import NotJson, TooSlow
from llmforge.serving.http.completion_call import PARAMETERS, CompletionCall, UnknownModel
from llmforge.serving.http.limits import RateLimited
from llmforge.serving.protocol.answer import (
    AnswerPiece,
    AnswerReader,
    call_deltas,
    text_of,
    thoughts_of,
    whole_calls,
)
from llmforge.serving.protocol.client_json import TooLarge
from llmforge.serving.request import Chunk, Usage
from llmforge.serving.token_bytes import TokenBytes

_WORD = re.compile("[a-z_]+[12]?")


# Statuses of errors, and what they mean.
STATUSES = {
    "400": "The request makes no sense; the message says what, and what is allowed.",
    "401": "No API key, or a wrong one.",
    "403": "A web page of another site.",
    "404": "Another model, or no such path.",
    "405": "No such method.",
    "408": "The request did not arrive in time.",
    "413": "A body over the limits.",
    "415": "A body that is compressed, or does not say that it is JSON.",
    "421": "Another host name than this server's.",
    "429": "The key has asked for all that it may for now; Retry-After says when it may again.",
    "503": "The queue is full, or the server is shutting down.",
    "504": "Not complete within the time limit.",
}


# Errors of requests; the last ones: what this server cannot do, whoever asks again.
_REFUSED = {TooLarge: 413, NotJson: 415, TooSlow: 408, UsageError: 400, UnsupportedError: 400, EnvironmentLacks: 400}


class RequestTimeout(ForgeError):
    """A request was not complete by its deadline."""


def status(error: ForgeError) -> int:
    """Give the HTTP status of an error."""
    return _kind(error)[0]


def error_body(error: ForgeError) -> dict[str, Any]:
    """Write an error as OpenAI does."""
    _, kind, code = _kind(error)
    message = error.message if error.hint is None else f"{error.message} ({error.hint})"
    return {"error": {"message": message, "type": kind, "param": _parameter(error), "code": code}}


def _parameter(error: ForgeError) -> str | None:
    """Name the parameter that an error is about, which its message begins with."""
    if isinstance(error, UnknownModel):
        return "model"
    first = _WORD.match(error.message) if isinstance(error, UsageError) else None
    return first[0] if first and first[0] in PARAMETERS | encoder_calls.PARAMETERS else None


def _kind(error: ForgeError) -> tuple[int, str, str | None]:
    """Give the HTTP status of an error, and what OpenAI calls its type and code."""
    if isinstance(error, UnknownModel):
        return 404, "invalid_request_error", "model_not_found"
    if isinstance(error, RateLimited):
        return 429, error.limit, "rate_limit_exceeded"
    if isinstance(error, Unavailable):
        return 503, "server_overloaded", "unavailable"
    if isinstance(error, RequestTimeout):
        return 504, "timeout", "timeout"
    found = next((code for kind, code in _REFUSED.items() if isinstance(error, kind)), None)
    return (500, "server_error", None) if found is None else (found, "invalid_request_error", None)


class ResponseWriter:
    """Writes the responses to one call; `token_bytes` names the tokens of log probabilities."""

    def __init__(self, call: CompletionCall, token_bytes: TokenBytes) -> None:
        self._call = call
        self._bytes = token_bytes
        self.finish_reasons: dict[int, str] = {}  # of the choices that have ended, as clients are told them
        self._started: set[int] = set()
        self._readers: dict[int, AnswerReader] = {}  # of the choices
        self._offsets: dict[int, int] = {}  # of the text of each choice, in characters, where tokens are named

    def chunk_event(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        """Write one chunk of choice `index` as an event of a stream; None where it says nothing."""
        logprobs = self._logprobs(index, [chunk])
        pieces, reason = self._pieces(index, [chunk])
        if not (pieces or reason or logprobs):
            return None
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": reason}
        if self._call.kind == "text":
            choice["text"] = chunk.text
        else:
            delta = _delta(pieces)
            choice["delta"] = delta if index in self._started else {"role": "assistant", "content": "", **delta}
            self._started.add(index)
        response = self._response([choice], chunk=True)
        return {**response, "usage": None} if self._call.include_usage else response

    def usage_event(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """Write the event of token counts that ends a stream."""
        return {**self._response([], chunk=True), "usage": self._usage(usages)}

    def completion(self, outputs: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        """Write the response to a call that is not streamed, from the chunks of each choice."""
        choices = []
        for index, chunks in enumerate(outputs):
            pieces, reason = self._pieces(index, chunks)
            choice = {"index": index, "logprobs": self._logprobs(index, chunks), "finish_reason": reason}
            if self._call.kind == "text":
                choice["text"] = "".join(chunk.text for chunk in chunks)
            else:
                choice["message"] = {"role": "assistant", "refusal": None, **_message(pieces)}
            choices.append(choice)
        usages = [chunk.usage for chunks in outputs for chunk in chunks if chunk.usage is not None]
        return {**self._response(choices), "usage": self._usage(usages)}

    def _pieces(self, index: int, chunks: Sequence[Chunk]) -> tuple[list[AnswerPiece], str | None]:
        """Find thoughts and calls in the next chunks of a choice; say why it ended, where it does."""
        call = self._call
        if index not in self._readers:
            self._readers[index] = AnswerReader(call.parser and call.parser(), call.reasoning and call.reasoning())
        found, reason = list[AnswerPiece](), None
        for chunk in chunks:
            pieces, reason = self._readers[index].read(
                chunk.text, chunk.finish_reason, tokens=chunk.token_id is not None
            )
            found += pieces
        if reason is not None:
            self.finish_reasons[index] = reason
        return found, reason

    def _response(self, choices: list[dict[str, Any]], *, chunk: bool = False) -> dict[str, Any]:
        call = self._call
        kind = "text_completion"
        if call.kind == "chat":
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": call.id, "object": kind, "created": call.created, "model": call.model, "choices": choices}

    def _usage(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """Count tokens: those of a prompt once, however many choices it has."""
        prompts = usages[:: self._call.n]
        prompt, output = sum(each.prompt_tokens for each in prompts), sum(each.output_tokens for each in usages)
        thought = [each.reasoning_tokens for each in self._readers.values() if each.reasoning_tokens is not None]
        details = {"completion_tokens_details": {"reasoning_tokens": sum(thought)}} if thought else {}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in prompts)},
            **details,
        }

    def _logprobs(self, index: int, chunks: Sequence[Chunk]) -> dict[str, Any] | None:
        if not self._call.logprobs:
            return None
        known = [chunk.logprob for chunk in chunks if chunk.logprob is not None]
        if not known:
            return None
        if self._call.kind == "text":
            return self._text_logprobs(index, known)
        named = self._named
        content = [{**named(t.token_id, t.logprob), "top_logprobs": [named(*each) for each in t.top]} for t in known]
        return {"content": content, "refusal": None}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._bytes.of(token_id)
        return {"token": _text(data), "logprob": logprob, "bytes": list(data)}

    def _text_logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        names = [_text(self._bytes.of(token.token_id)) for token in tokens]
        offsets = []
        for name in names:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(name)
        return {
            "tokens": names,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{_text(self._bytes.of(id_)): value for id_, value in token.top} for token in tokens],
            "text_offset": offsets,
        }


def _delta(pieces: Sequence[AnswerPiece]) -> dict[str, Any]:
    """Write pieces of an answer as a change of its message."""
    delta: dict[str, Any] = {}
    if thoughts := thoughts_of(pieces):
        delta["reasoning_content"] = thoughts
    if content := text_of(pieces):
        delta["content"] = content
    if calls := call_deltas(pieces):
        delta["tool_calls"] = calls
    return delta


def _message(pieces: Sequence[AnswerPiece]) -> dict[str, Any]:
    """Write all pieces of an answer as a message."""
    message = _delta(pieces)
    if "tool_calls" in message:
        return {"content": None, **message, "tool_calls": whole_calls(message["tool_calls"])}
    return {"content": "", **message}


def _text(data: bytes) -> str:
    """Name a token by its text; bytes that are no UTF-8 by themselves show as U+FFFD."""
    return data.decode("utf-8", "replace")
