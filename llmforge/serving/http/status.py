"""What every server says of itself: whether it lives and is ready, its metrics, its OpenAPI document."""

from __future__ import annotations

from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llmforge.base.errors import Unavailable
from llmforge.serving.http.access import ServerState
from llmforge.serving.http.metrics import PROMETHEUS_TEXT, CallMetrics
from llmforge.serving.http.refusals import check_draining


class _Stats(Protocol):
    @property
    def waiting(self) -> int: ...


class _Options(Protocol):
    @property
    def max_queue(self) -> int: ...


class QueuedEngine(Protocol):
    """An engine in which requests wait."""

    @property
    def alive(self) -> bool:
        """Whether requests are taken, and run."""
        ...

    @property
    def options(self) -> _Options:
        """How many may wait."""
        ...

    def stats(self) -> _Stats:
        """Say how many do."""
        ...


class StatusEndpoints:
    """Endpoints that say how a server is."""

    def __init__(self, engine: QueuedEngine, state: ServerState, metrics: CallMetrics) -> None:
        self._queue, self._state, self._exposed = engine, state, metrics
        self.document: dict[str, Any] = {}

    async def health(self, http: Request) -> Response:
        """Say whether the engine lives: a server that is not healthy wants to be started anew."""
        if not self._queue.alive:
            raise Unavailable("the engine has ended")
        return JSONResponse({"status": "ok"})

    async def ready(self, http: Request) -> Response:
        """Say whether the next request is likely to be taken: one that is not ready wants to be left alone."""
        check_draining(self._state)
        most = self._queue.options.max_queue
        if most and self._queue.stats().waiting >= most:
            raise Unavailable(f"the queue is full: {most} requests are waiting")
        return await self.health(http)

    async def metrics_text(self, http: Request) -> Response:
        """Give all figures in Prometheus' text format."""
        return Response(self._exposed.exposition(), media_type=PROMETHEUS_TEXT)

    async def openapi(self, http: Request) -> Response:
        """Give the OpenAPI document."""
        return JSONResponse(self.document)
