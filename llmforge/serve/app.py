"""The HTTP side: a Starlette application over one engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from llmforge.base.errors import ForgeError, Unavailable, UsageError
from llmforge.runtime.serving.interface import Serving
from llmforge.runtime.serving.prompts import PromptEncoder
from llmforge.runtime.serving.request import Chunk, Usage
from llmforge.serve.call_stream import CallStream
from llmforge.serve.metrics import ServerMetrics
from llmforge.serve.protocol import Call, chat_call, encode_messages, text_call
from llmforge.serve.responses import ResponseWriter, error_body, status
from llmforge.serve.token_bytes import TokenBytes

MAX_BODY_BYTES = 16 * 2**20  # far above a context's worth of text
RETRY_AFTER_S = 1  # a queue that is full moves within about this time
CLIENT_LEFT = 499  # nginx's status of a request whose client went away; nobody reads it
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def create_app(engine: Serving, model: str) -> Starlette:
    """Make the application: OpenAI's endpoints over `engine`, whose model is called `model`.

    The engine stays the caller's: the application neither starts nor closes it.
    """
    server = _Server(engine, model)
    routes = [
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/v1/chat/completions", functools.partial(server.complete, chat_call), methods=["POST"]),
        Route("/v1/completions", functools.partial(server.complete, text_call), methods=["POST"]),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/health", server.health),
        Route("/ready", server.health),
        Route("/metrics", server.metrics_text),
    ]
    return Starlette(routes=routes, exception_handlers={ForgeError: _refusal})


class _TooLarge(UsageError):
    """A body is larger than this server reads."""


class _NotJson(UsageError):
    """A body does not say that it is JSON."""


class _Server:
    def __init__(self, engine: Serving, model: str) -> None:
        self._engine = engine
        self._model = model
        self._created = int(time.time())
        self._metrics = ServerMetrics(engine)
        self._token_bytes = TokenBytes(engine.encoder.tokenizer)

    async def complete(
        self, parse: Callable[[Any, PromptEncoder, str], Call], http: HttpRequest
    ) -> Response | EventStream:
        # Templates and tokenizers take their time with long prompts; others' streams go on meanwhile.
        try:
            call = await run_in_threadpool(parse, await _body(http), self._engine.encoder, self._model)
            sequences = CallStream(self._engine, call, self._metrics)
            await sequences.submit()
        except ForgeError as error:
            self._metrics.refused(error)
            raise
        writer = ResponseWriter(call, self._token_bytes)
        if call.stream:
            return EventStream(_events(sequences, writer, call), sequences)
        chunks: list[list[Chunk]] = [[] for _ in call.requests]
        async with _cancelled_on_disconnect(http.receive, sequences):
            async for batch in sequences.batches():
                for index, chunk in batch:
                    chunks[index].append(chunk)
        if sequences.abandoned:
            return Response(status_code=CLIENT_LEFT)
        return JSONResponse(writer.completion(chunks))

    async def models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._description()]})

    async def model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        if name != self._model:
            error = UsageError(f"model {name!r} not found; this server serves {self._model!r}")
            return JSONResponse(error_body(error), 404)
        return JSONResponse(self._description())

    async def tokenize(self, http: HttpRequest) -> Response:
        """Give the token ids of `prompt` (a text) or of `messages` under the chat template, as vLLM does."""
        body, encoder = await _body(http), self._engine.encoder
        if not isinstance(body, dict) or (("prompt" in body) == ("messages" in body)):
            raise UsageError("expected an object with either prompt (a string) or messages")
        if "messages" in body:
            ids = await run_in_threadpool(encode_messages, body["messages"], encoder)
        elif isinstance(body["prompt"], str):
            ids = await run_in_threadpool(encoder.encode, body["prompt"])
        else:
            raise UsageError("prompt: expected a string")
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": encoder.config.max_context})

    async def health(self, http: HttpRequest) -> Response:
        """Say whether the engine lives, and so takes requests."""
        if not self._engine.alive:
            raise Unavailable("the engine has ended")
        return JSONResponse({"status": "ok"})

    async def metrics_text(self, http: HttpRequest) -> Response:
        return Response(self._metrics.exposition(), media_type=PROMETHEUS_TEXT)

    def _description(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "llmforge",
            "max_model_len": self._engine.encoder.config.max_context,
        }


class EventStream:
    """A response of server-sent events that cancels its sequences when the client leaves."""

    def __init__(self, events: AsyncGenerator[bytes, None], sequences: CallStream) -> None:
        self._events = events
        self._sequences = sequences

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, as ASGI wants it."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        async with _cancelled_on_disconnect(receive, self._sequences), contextlib.aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(sequences: CallStream, writer: ResponseWriter, call: Call) -> AsyncGenerator[bytes, None]:
    """Write the events of a stream; an error in its middle is an event, too."""
    usages: dict[int, Usage] = {}
    try:
        async with contextlib.aclosing(sequences.batches()) as batches:
            async for batch in batches:
                usages |= {index: chunk.usage for index, chunk in batch if chunk.usage is not None}
                events = [event for index, chunk in batch if (event := writer.chunk_event(index, chunk)) is not None]
                if events:
                    yield b"".join(map(_event, events))
        if call.include_usage and len(usages) == len(call.requests):
            yield _event(writer.usage_event([usages[index] for index in range(len(call.requests))]))
    except ForgeError as error:
        yield _event(error_body(error))
    yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def _cancelled_on_disconnect(receive: Receive, sequences: CallStream) -> AsyncIterator[None]:
    """Abandon the sequences if the client leaves, and at the end in any case."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        sequences.abandon()

    watch = asyncio.create_task(wait_for_disconnect())
    try:
        yield
    finally:
        sequences.abandon()
        watch.cancel()


async def _body(http: HttpRequest) -> Any:
    """Read a JSON body of bounded size.

    That its content type must say JSON keeps web pages out: a browser lets any page send other types to a server on
    loopback, and asks this server first for JSON.
    """
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise _NotJson(
            "the body's content type must be application/json", hint="curl: -H 'Content-Type: application/json'"
        )
    data = bytearray()
    async for piece in http.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise _TooLarge(f"the body is larger than {MAX_BODY_BYTES:,} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is not JSON: {error}") from error


def _refusal(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ForgeError)
    code = 413 if isinstance(error, _TooLarge) else 415 if isinstance(error, _NotJson) else status(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if isinstance(error, Unavailable) else None
    return JSONResponse(error_body(error), code, headers)
