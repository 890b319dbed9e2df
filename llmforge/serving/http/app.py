"""The HTTP side: a Starlette application over one engine."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from llmforge.base.errors import ForgeError, UsageError
from llmforge.serving.http import bodies, openapi, responses_call
from llmforge.serving.http.access import ServerState
from llmforge.serving.http.body_reader import BodyReader
from llmforge.serving.http.call_stream import CallStream
from llmforge.serving.http.completion_call import CompletionCall, adapter_of, chat_call, served, text_call
from llmforge.serving.http.limits import Client
from llmforge.serving.http.metrics import ServerMetrics
from llmforge.serving.http.refusals import CLIENT_LEFT, HANDLERS, check_draining, watched
from llmforge.serving.http.responses import ResponseWriter, error_body, status
from llmforge.serving.http.responses_call import ResponsesCall
from llmforge.serving.http.responses_output import ResponsesWriter
from llmforge.serving.http.status import StatusEndpoints
from llmforge.serving.http.telemetry import RequestSpan
from llmforge.serving.interface import Serving
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.protocol import reasoning, tools
from llmforge.serving.protocol.client_json import JsonLimits
from llmforge.serving.protocol.messages import encode_messages
from llmforge.serving.request import Chunk, Usage
from llmforge.serving.token_bytes import TokenBytes

T = TypeVar("T")


def create_app(engine: Serving, model: str, state: ServerState | None = None) -> Starlette:
    """Make the application: OpenAI's endpoints over `engine`, its model called `model`, or `model:ADAPTER`.

    The engine stays the caller's: the application neither starts nor closes it. Once `state` is draining, calls are
    refused with 503.
    """
    server = _Endpoints(engine, model, state or ServerState())
    routes = [
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/v1/chat/completions", functools.partial(server.complete, chat_call), methods=["POST"]),
        Route("/v1/completions", functools.partial(server.complete, text_call), methods=["POST"]),
        Route("/v1/responses", server.respond, methods=["POST"]),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/detokenize", server.detokenize, methods=["POST"]),
        Route("/health", server.health),
        Route("/ready", server.ready),
        Route("/metrics", server.metrics_text),
        Route("/openapi.json", server.openapi),
    ]
    server.document = openapi.document(routes)
    return Starlette(routes=routes, exception_handlers=HANDLERS)


class _Endpoints(StatusEndpoints):
    def __init__(self, engine: Serving, model: str, state: ServerState) -> None:
        self._engine = engine
        self._model = model
        self._created = int(time.time())
        self._metrics = ServerMetrics(engine, state)
        super().__init__(engine, state, self._metrics)
        self._token_bytes = TokenBytes(engine.encoder.tokenizer)
        self._bodies = BodyReader(JsonLimits.of(engine.encoder))

    async def complete(
        self, parse: Callable[[Any, PromptEncoder, str], CompletionCall], http: HttpRequest
    ) -> Response | EventStream:
        def read(body: Any) -> tuple[CompletionCall, None]:
            return parse(body, self._engine.encoder, self._model), None

        call, sequences, _, span = await self._begin(http, read)
        writer = ResponseWriter(call, self._token_bytes)
        if span is not None:
            span.reasons = writer.finish_reasons
        if call.stream:
            return EventStream(_events(sequences, writer, call, span), sequences)
        chunks = await self._collect(http, sequences)
        return Response(status_code=CLIENT_LEFT) if chunks is None else JSONResponse(writer.completion(chunks))

    async def respond(self, http: HttpRequest) -> Response | EventStream:
        """Answer a call of the Responses API."""

        def read(body: Any) -> tuple[CompletionCall, ResponsesCall]:
            asked = responses_call.read(body, self._engine.encoder, self._model)
            return asked.call, asked

        call, sequences, asked, span = await self._begin(http, read)
        writer = ResponsesWriter(asked)
        if span is not None:
            span.reasons = writer.finish_reasons
        if call.stream:
            return EventStream(_response_events(sequences, writer, span), sequences)
        chunks = await self._collect(http, sequences)
        return Response(status_code=CLIENT_LEFT) if chunks is None else JSONResponse(writer.response(chunks[0]))

    async def _collect(self, http: HttpRequest, sequences: CallStream) -> list[list[Chunk]] | None:
        """Wait for all chunks of all choices; None: the client left."""
        chunks: list[list[Chunk]] = [[] for _ in range(sequences.choices)]
        async with _cancelled_on_disconnect(http.receive, sequences):
            async for batch in sequences.batches():
                for index, chunk in batch:
                    chunks[index].append(chunk)
        return None if sequences.abandoned else chunks

    async def _begin(
        self, http: HttpRequest, parse: Callable[[Any], tuple[CompletionCall, T]]
    ) -> tuple[CompletionCall, CallStream, T, RequestSpan | None]:
        """Read a call, and hand it to the engine.

        Raises:
            ForgeError: it makes no sense, or there is no room for it.
        """
        known = http.scope.get("state", {})
        span: RequestSpan | None = known.get("span")
        client: Client | None = known.get("client")
        try:
            check_draining(self._state)
            with contextlib.ExitStack() as refused:
                if client is not None:
                    client.begin()
                    refused.callback(client.end)
                data = await bodies.read(http, self._bodies.limits)
                call, more = await self._bodies.work(data, parse)
                if span is not None:
                    span.call(call)
                recorder = self._state.recorder
                recording = None if recorder is None else recorder.begin(call)
                sequences = CallStream(self._engine, call, self._metrics, span, client, recording)
                refused.pop_all()
            await sequences.submit()
        except ForgeError as error:
            self._metrics.refused(error)
            raise
        return call, sequences, more, span

    async def models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": list(map(self._description, self._served()))})

    async def model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        adapter_of(name, self._model, self._engine.encoder.config.adapters)
        return JSONResponse(self._description(name))

    async def tokenize(self, http: HttpRequest) -> Response:
        """Give the token ids of `prompt` (a text) or of `messages` under the chat template, as vLLM does."""
        encoder = self._engine.encoder

        def encode(body: Any) -> list[int]:
            if not isinstance(body, dict) or (("prompt" in body) == ("messages" in body)):
                raise UsageError("expected an object with either prompt (a string) or messages")
            if "messages" in body:
                use = tools.read(body, encoder)
                variables = reasoning.variables(body, encoder.template)
                return encode_messages(body["messages"], encoder, () if use is None else use.tools, variables)
            if not isinstance(body["prompt"], str):
                raise UsageError("prompt: expected a string")
            return encoder.encode(body["prompt"])

        ids = await self._bodies.work(await bodies.read(http, self._bodies.limits), encode)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": encoder.config.max_context})

    async def detokenize(self, http: HttpRequest) -> Response:
        """Give the text of `tokens`, as vLLM does."""
        encoder = self._engine.encoder

        def decode(body: Any) -> str:
            ids = body.get("tokens") if isinstance(body, dict) else None
            if not isinstance(ids, list) or not all(
                type(each) is int and 0 <= each < encoder.config.vocabulary for each in ids
            ):
                raise UsageError(f"tokens: expected a list of token ids below {encoder.config.vocabulary:,}")
            (text,) = encoder.tokenizer.decode_batch([ids], skip_special_tokens=False)
            return str(text)

        text = await self._bodies.work(await bodies.read(http, self._bodies.limits), decode)
        return JSONResponse({"prompt": text})

    def _served(self) -> tuple[str, ...]:
        return served(self._model, self._engine.encoder.config.adapters)

    def _description(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "llmforge",
            "max_model_len": self._engine.encoder.config.max_context,
            **({} if name == self._model else {"parent": self._model}),  # of an adapter, as vLLM says it
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


async def _events(
    sequences: CallStream, writer: ResponseWriter, call: CompletionCall, span: RequestSpan | None
) -> AsyncGenerator[bytes, None]:
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
        if span is not None:
            span.failed(str(status(error)))
        yield _event(error_body(error))
    yield b"data: [DONE]\n\n"


async def _response_events(
    sequences: CallStream, writer: ResponsesWriter, span: RequestSpan | None
) -> AsyncGenerator[bytes, None]:
    """Write the events of a stream of the Responses API."""
    yield b"".join(map(_named_event, writer.begin()))
    try:
        async with contextlib.aclosing(sequences.batches()) as batches:
            async for batch in batches:
                if events := [event for _, chunk in batch for event in writer.events(chunk)]:
                    yield b"".join(map(_named_event, events))
    except ForgeError as error:
        if span is not None:
            span.failed(str(status(error)))
        yield b"".join(map(_named_event, writer.fail(error)))


def _named_event(value: dict[str, Any]) -> bytes:
    return b"event: " + str(value["type"]).encode() + b"\n" + _event(value)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def _cancelled_on_disconnect(receive: Receive, sequences: CallStream) -> AsyncIterator[None]:
    """Abandon the sequences if the client leaves, and at the end in any case."""
    async with watched(receive, sequences.abandon):
        try:
            yield
        finally:
            sequences.abandon()
