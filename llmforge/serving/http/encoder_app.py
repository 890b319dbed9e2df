"""The HTTP side of embedders and rerankers: a Starlette application over one engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmforge.base.errors import ForgeError, UsageError
from llmforge.serving.encoder_engine import EncoderEngine
from llmforge.serving.encoder_runner import EncoderRunner
from llmforge.serving.http import bodies, openapi
from llmforge.serving.http.access import ServerState
from llmforge.serving.http.body_reader import BodyReader
from llmforge.serving.http.completion_call import adapter_of
from llmforge.serving.http.encoder_calls import MOST_TOKENS, EncoderCall, embedding_call, rerank_call, score_call
from llmforge.serving.http.encoder_metrics import EncoderMetrics
from llmforge.serving.http.limits import Client
from llmforge.serving.http.refusals import CLIENT_LEFT, HANDLERS, check_draining, watched
from llmforge.serving.http.responses import RequestTimeout
from llmforge.serving.http.status import StatusEndpoints
from llmforge.serving.http.telemetry import RequestSpan
from llmforge.serving.protocol.client_json import LEAST_VALUES, MOST_BYTES, JsonLimits

Parse = Callable[[Any, EncoderRunner, str], EncoderCall]


def create_encoder_app(engine: EncoderEngine, model: str, state: ServerState | None = None) -> Starlette:
    """Make the application of `engine`, its model called `model`: an embedder's endpoints, or a reranker's.

    The engine stays the caller's: the application does not close it. Once `state` is draining, calls are refused with
    503.
    """
    server = _EncoderEndpoints(engine, model, state or ServerState())
    calls: dict[str, Parse] = {"/v1/embeddings": embedding_call}
    if engine.runner.config.kind == "reranker":  # Cohere's clients ask for the second path
        calls = {"/v1/rerank": rerank_call, "/v2/rerank": rerank_call, "/v1/score": score_call}
    routes = [
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        *(Route(path, functools.partial(server.answer, parse), methods=["POST"]) for path, parse in calls.items()),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/health", server.health),
        Route("/ready", server.ready),
        Route("/metrics", server.metrics_text),
        Route("/openapi.json", server.openapi),
    ]
    server.document = openapi.document(routes)
    return Starlette(routes=routes, exception_handlers=HANDLERS)


class _EncoderEndpoints(StatusEndpoints):
    def __init__(self, engine: EncoderEngine, model: str, state: ServerState) -> None:
        self._engine = engine
        self._model = model
        self._created = int(time.time())
        self._metrics = EncoderMetrics(engine, state)
        super().__init__(engine, state, self._metrics)
        self._bodies = BodyReader(JsonLimits(MOST_BYTES, LEAST_VALUES + MOST_TOKENS))

    async def answer(self, parse: Parse, http: Request) -> Response:
        """Answer a call: embeddings, results by relevance, or scores."""
        known = http.scope.get("state", {})
        span: RequestSpan | None = known.get("span")
        client: Client | None = known.get("client")
        began = time.perf_counter()
        with contextlib.ExitStack() as ending:
            try:
                check_draining(self._state)
                if client is not None:
                    client.begin()
                    ending.callback(client.end)
                data = await bodies.read(http, self._bodies.limits)
                call = await self._bodies.work(data, lambda body: parse(body, self._engine.runner, self._model))
                if client is not None:
                    client.use(call.tokens, "prompt tokens")
                if span is not None:
                    span.encoded(call.operation, call.model, call.tokens)
                outcome = asyncio.wrap_future(self._engine.submit(call.inputs))
            except ForgeError as error:
                self._metrics.refused(error)
                raise
            made = await self._wait(http, outcome)
            if made is None:
                return Response(status_code=CLIENT_LEFT)
            response = JSONResponse(await asyncio.to_thread(call.answer, made))
            self._metrics.ended(time.perf_counter() - began)
            return response

    async def _wait(self, http: Request, outcome: asyncio.Future[NDArray[np.float32]]) -> NDArray[np.float32] | None:
        """Wait for what the engine makes; None: the client left.

        Raises:
            ForgeError: the run failed, or took too long.
        """
        limit_s = self._engine.options.timeout_s
        try:
            async with watched(http.receive, outcome.cancel):
                await asyncio.wait([outcome], timeout=limit_s)
            if outcome.cancelled():
                return None
            if not outcome.done():
                raise RequestTimeout(f"not complete within {limit_s:g} s")
            return outcome.result()
        except ForgeError:
            self._metrics.failed()
            raise
        finally:
            outcome.cancel()

    async def models(self, http: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description()]})

    async def model(self, http: Request) -> Response:
        adapter_of(http.path_params["name"], self._model, ())
        return JSONResponse(self._description())

    async def tokenize(self, http: Request) -> Response:
        """Give the token ids of `prompt`, a text, with the tokens that the model has around it."""

        def encode(body: Any) -> list[int]:
            if not isinstance(body, dict) or not isinstance(body.get("prompt"), str):
                raise UsageError("expected an object with prompt (a string)")
            return self._engine.runner.token_ids(body["prompt"])

        ids = await self._bodies.work(await bodies.read(http, self._bodies.limits), encode)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self._engine.runner.config.max_tokens})

    def _description(self) -> dict[str, Any]:
        config = self._engine.runner.config
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "llmforge",
            "max_model_len": config.max_tokens,
            **({"dimensions": config.dimensions} if config.kind == "embedder" else {}),
        }
