"""The sequences of one call, from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from starlette.concurrency import run_in_threadpool

from llmforge.base.errors import ForgeError, Unavailable
from llmforge.serving.http.completion_call import CompletionCall
from llmforge.serving.http.limits import Client
from llmforge.serving.http.metrics import ServerMetrics
from llmforge.serving.http.recording import CallRecording
from llmforge.serving.http.responses import RequestTimeout
from llmforge.serving.http.telemetry import RequestSpan
from llmforge.serving.interface import Serving
from llmforge.serving.request import Chunk
from llmforge.serving.sequence import Ticket

# What the engine handed over for a choice, and when, in seconds.
_Item = tuple[int, Chunk | ForgeError, float]


class CallStream:
    """Submits the requests of a call and yields their chunks as they come, each with the index of its choice.

    What a slow reader has not taken yet waits here: at most the tokens that its sequences may have. The engine never
    waits for anybody.
    """

    def __init__(
        self,
        engine: Serving,
        call: CompletionCall,
        metrics: ServerMetrics,
        span: RequestSpan | None = None,
        client: Client | None = None,
        recording: CallRecording | None = None,
    ) -> None:
        self._engine = engine
        self._n = call.n
        self._client = client  # whose call it is, that has begun
        self._requests = call.requests
        if client is not None:
            self._requests = tuple(replace(request, client=client.name) for request in call.requests)
        self._metrics = metrics
        self._span = span
        self._recording = recording
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[_Item | None] = asyncio.Queue()  # None: look whether anybody reads on
        self._tickets: list[Ticket] = []
        self._unfinished = set(range(len(call.requests)))
        self.abandoned = False
        self._submitted = 0.0
        self._last_token_s: dict[int, float] = {}  # when the last token of each choice was sampled

    @property
    def choices(self) -> int:
        """How many there are, of all prompts."""
        return len(self._requests)

    async def submit(self) -> None:
        """Hand all requests to the engine, or none; in a thread, for a constraint may take long to compile.

        Raises:
            UsageError: a request makes no sense.
            Unavailable: the engine takes no more.
        """
        self._submitted = time.perf_counter()
        try:
            await run_in_threadpool(self._submit)
        except BaseException:  # a cancelled task, too, leaves nothing that runs
            self.abandon()
            raise
        if self._client is not None:
            self._client.use(sum(len(request.prompt) for request in self._requests[:: self._n]), "prompt tokens")

    def _submit(self) -> None:
        for index, request in enumerate(self._requests):
            receive = functools.partial(self._receive, index, time.perf_counter())
            self._tickets.append(self._engine.submit(request, receive))

    def abandon(self) -> None:
        """Cancel what has not ended: nobody reads on. May be called again."""
        if not self._unfinished:
            return
        self.abandoned = True
        for index, ticket in enumerate(self._tickets):
            if index in self._unfinished:
                self._engine.cancel(ticket)
                self._metrics.ended("cancelled", time.perf_counter() - self._submitted)
        self._unfinished.clear()
        self._end()
        self._items.put_nowait(None)

    async def batches(self) -> AsyncGenerator[list[tuple[int, Chunk]], None]:
        """Yield the chunks that have come since the last time, until all sequences have ended or are abandoned.

        Raises:
            ForgeError: a sequence failed, or was cut short by a deadline or the server's end; the others are cancelled.
        """
        try:
            while self._unfinished and not self.abandoned:
                items = [await self._items.get()]
                while not self._items.empty():
                    items.append(self._items.get_nowait())
                if not self.abandoned:
                    yield [self._chunk(*item) for item in items if item is not None]
        finally:
            self.abandon()

    def _chunk(self, index: int, chunk: Chunk | ForgeError, time_s: float) -> tuple[int, Chunk]:
        """Count an item, and raise it if it is an error."""
        if isinstance(chunk, ForgeError):
            self._finish(index)
            self._metrics.failed()
            raise chunk
        if chunk.token_id is not None:
            if self._client is not None:
                self._client.use(1, "output tokens")
            first = index not in self._last_token_s
            self._metrics.token(time_s - self._last_token_s.get(index, self._submitted), first)
            self._last_token_s[index] = time_s
        if chunk.finish_reason is not None:
            self._finish(index)
            self._metrics.ended(chunk.finish_reason, time_s - self._submitted)
        if self._recording is not None:
            self._recording.chunk(index, chunk)
        if chunk.finish_reason == "timeout":
            raise RequestTimeout("the answer was not complete by its deadline", hint="request fewer tokens")
        if chunk.finish_reason == "cancelled":
            raise Unavailable("the server is shutting down")
        return index, chunk

    def _finish(self, index: int) -> None:
        self._unfinished.discard(index)
        if not self._unfinished:
            self._end()

    def _end(self) -> None:
        """Say, once, that the call is done."""
        client, self._client = self._client, None
        if client is not None:
            client.end()

    def _receive(self, index: int, submitted_s: float, item: Chunk | ForgeError) -> None:
        """Take an item in the engine's thread."""
        time_s = time.perf_counter()
        if self._span is not None and isinstance(item, Chunk) and item.finish_reason and item.usage:
            self._span.answered(index, submitted_s, time_s, item.finish_reason, item.usage)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended, nobody reads
            self._loop.call_soon_threadsafe(self._items.put_nowait, (index, item, time_s))
