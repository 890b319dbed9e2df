"""The engine that serves: one thread runs a scheduler, and callers of any thread hand requests to it."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmforge.errors import ForgeError, Unavailable, UsageError
from llmforge.runtime.request import Chunk, Receiver, Request
from llmforge.runtime.runner import Runner, load
from llmforge.runtime.scheduler import EngineStats, Scheduler, Ticket, queue_full

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineOptions:
    """How an engine serves.

    `max_queue` requests wait while all slots are taken; one more is refused. `step_tokens` is the budget of one step:
    every running answer gets its token first, the rest reads prompts. `timeout_s` is the deadline of requests that
    have none.
    """

    max_queue: int = 128
    step_tokens: int = 512
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.max_queue < 0:
            raise UsageError(f"max_queue {self.max_queue}: wanted 0 or more")
        if self.step_tokens < 1:
            raise UsageError(f"step_tokens {self.step_tokens}: wanted 1 or more")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(f"timeout_s {self.timeout_s}: wanted more than 0")


@dataclass(frozen=True)
class _Arrival:
    """A request that the thread has not seen yet."""

    ticket: Ticket
    request: Request
    receive: Receiver
    submitted: float


class Engine:
    """Answers up to `runner.config.max_batch` requests at once, in slots of its own. Any thread may call any method.

    Receivers are called by the engine's thread, which holds no lock then: they may call back, and must not wait.
    """

    def __init__(self, runner: Runner, options: EngineOptions | None = None) -> None:
        self.runner = runner
        self.options = options or EngineOptions()
        config = runner.config
        self._scheduler = Scheduler(
            runner.session,
            runner.session.allocate(config.max_batch, config.max_context),
            config,
            runner.tokenizer,
            max_queue=self.options.max_queue,
            step_tokens=self.options.step_tokens,
        )
        self._wake = threading.Condition()
        # Guarded by `_wake`: what callers hand to the thread, and what it tells them.
        self._arrivals: deque[_Arrival] = deque()
        self._cancels: list[Ticket] = []
        self._closing = False
        self._abandon = False
        self._failure: ForgeError | None = None
        self._stats = self._scheduler.stats()
        self._thread = threading.Thread(target=self._loop, name="llmforge-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, artifact: Path, options: EngineOptions | None = None, threads: int | None = None) -> Engine:
        """Load an artifact and serve it; raises what `runtime.load` raises."""
        return cls(load(artifact, threads), options)

    def submit(self, request: Request, receive: Receiver) -> Ticket:
        """Take on a request; `receive` gets its chunks, the last one with a finish reason, or one error.

        Raises:
            UsageError: the request makes no sense.
            Unavailable: the queue is full, or the engine is closing or has failed.
        """
        self._scheduler.check(request)
        if request.timeout_s is None:
            request = dataclasses.replace(request, timeout_s=self.options.timeout_s)
        ticket = Ticket()
        with self._wake:
            if self._failure is not None:
                raise Unavailable(self._failure.message, hint=self._failure.hint)
            if self._closing:
                raise Unavailable("the engine is shutting down")
            if self._scheduler.places <= len(self._arrivals):
                raise queue_full(self.options.max_queue)
            self._arrivals.append(_Arrival(ticket, request, receive, time.perf_counter()))
            self._wake.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Let an answer end with "cancelled" and its slot be free at the next step; one that has ended stays so."""
        with self._wake:
            self._cancels.append(ticket)
            self._wake.notify()

    def stream(self, request: Request) -> Iterator[Chunk]:
        """Answer a request, chunk by chunk; it is submitted by this call, and closing the iterator cancels it.

        Raises:
            UsageError, Unavailable: as `submit` does, now. Errors of the answer are raised by the iterator.
        """
        chunks: queue.SimpleQueue[Chunk | ForgeError] = queue.SimpleQueue()
        return self._received(self.submit(request, chunks.put), chunks)

    def _received(self, ticket: Ticket, chunks: queue.SimpleQueue[Chunk | ForgeError]) -> Iterator[Chunk]:
        try:
            while True:
                item = chunks.get()
                if isinstance(item, ForgeError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self.cancel(ticket)

    def stats(self) -> EngineStats:
        """Give the figures of the last step, with what has arrived since among those that wait."""
        with self._wake:
            return dataclasses.replace(self._stats, waiting=self._stats.waiting + len(self._arrivals))

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs: not after `close`, nor after it failed."""
        return self._thread.is_alive() and self._failure is None

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Take no more requests and end the thread; may be called again.

        With `drain` what runs and waits is answered first, for at most `timeout_s` seconds; what is left then, or
        everything without `drain`, ends with "cancelled".
        """
        with self._wake:
            self._closing = True
            self._abandon = self._abandon or not drain
            self._wake.notify()
        self._thread.join(timeout_s if drain else None)
        if self._thread.is_alive():
            with self._wake:
                self._abandon = True
                self._wake.notify()
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(drain=False)

    def _loop(self) -> None:
        try:
            while self._take():
                self._scheduler.step()
                stats = self._scheduler.stats()
                with self._wake:
                    self._stats = stats
        except Exception as error:  # whatever it is, those who wait for an answer must hear of it
            logger.exception("the engine failed")
            self._die(error)

    def _take(self) -> bool:
        """Wait for work and hand what callers left to the scheduler; return False when nothing is left to do."""
        with self._wake:
            while not (self._arrivals or self._scheduler.busy or self._closing):
                self._cancels.clear()  # of answers that have ended
                self._wake.wait()
            for arrival in self._arrivals:
                self._scheduler.add(
                    arrival.request, arrival.receive, ticket=arrival.ticket, submitted=arrival.submitted
                )
            self._arrivals.clear()
            for ticket in self._cancels:
                self._scheduler.cancel(ticket)
            self._cancels.clear()
            if self._abandon:
                self._scheduler.cancel_all()
            return self._scheduler.busy or not self._closing

    def _die(self, cause: Exception) -> None:
        failure = Unavailable(f"the engine failed: {cause}", hint="start it again; its log has the details")
        with self._wake:
            self._failure = failure
            orphans = list(self._arrivals)
            self._arrivals.clear()
        self._scheduler.fail(failure)
        for arrival in orphans:
            arrival.receive(failure)
