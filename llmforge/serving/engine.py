"""The engine that serves: one thread runs a scheduler, and callers of any thread hand requests to it."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from pathlib import Path
from typing import Any

from llmforge.base.errors import Unavailable
from llmforge.serving import saved_prefixes
from llmforge.serving.drafting import speculation_of
from llmforge.serving.interface import EngineOptions, EngineStats, Serving
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.request import Receiver, Request
from llmforge.serving.response_cache import ResponseCache
from llmforge.serving.runner import Runner, load
from llmforge.serving.saved_prefixes import PrefixStore, ShippedPrefixes
from llmforge.serving.scheduler import Scheduler, scheduler_of
from llmforge.serving.sequence import Sequence, Ticket

_NO_PREFIXES = ShippedPrefixes(())

logger = logging.getLogger(__name__)


class Engine(Serving):
    """Runs up to `runner.config.max_batch` requests at once, in slots of its own. Any thread may call any method.

    Receivers are called by the engine's thread, which holds no lock then: they may call back, and must not wait.

    Args:
        runner: the artifact.
        options: how to serve; None: the defaults.
        draft: the artifact that drafts tokens, with `speculation` "draft"; None: the runner's own, if it has one.
        store: where prefixes are kept; None: nowhere.
        shipped: the prefixes that the artifact was built with, which are in the cache from the start, too.

    Raises:
        OSError: a prefix cannot be written.
        UsageError: there is no draft, or nothing that it is for; or the prefix cache has no room for one block.
        InputError: `draft` has another vocabulary.
        UnsupportedError: `draft` cannot take tokens back.
    """

    def __init__(
        self,
        runner: Runner,
        options: EngineOptions | None = None,
        draft: Runner | None = None,
        store: PrefixStore | None = None,
        shipped: ShippedPrefixes = _NO_PREFIXES,
    ) -> None:
        self.runner = runner
        self.options = options = options or EngineOptions()
        self._scheduler: Scheduler[Any] = scheduler_of(
            runner.session,
            runner.session.allocate(runner.config.max_batch, runner.config.max_context),
            runner.samplers,
            options,
            speculation=speculation_of(runner, runner.config.max_batch, options.speculation, draft),
            adapters=runner.config.adapters,
        )
        saved_prefixes.fill(self._scheduler, shipped.prefixes, store, shipped.store)
        saved_prefixes.fill(self._scheduler, options.prefixes, store)
        self._responses = ResponseCache(options.response_cache) if options.response_cache else None
        self._wake = threading.Condition()
        # Guarded by `_wake`: what callers hand to the thread, and what it tells them.
        self._arrivals: list[Sequence] = []
        self._closing = False
        self._abandoned = False
        self._lost = False
        self._failure: Unavailable | None = None
        self._stats = self._scheduler.stats()
        self._thread = threading.Thread(target=self._loop, name="llmforge-engine", daemon=True)
        self._thread.start()
        runner.session.when_ended(self._lose)

    @classmethod
    def load(
        cls,
        artifact: Path,
        options: EngineOptions | None = None,
        threads: int | None = None,
        draft: Path | None = None,
        device: int = 0,
    ) -> Engine:
        """Load an artifact, and one that drafts for it, and serve; raises what `load` and `Engine` raise."""
        folder = None if options is None else options.prefix_store
        return cls(
            load(artifact, threads, device),
            options,
            None if draft is None else load(draft, threads, device),
            None if folder is None else PrefixStore(folder, artifact),
            ShippedPrefixes.read(artifact),
        )

    def submit(self, request: Request, receive: Receiver, submitted: float | None = None) -> Ticket:
        """Take on a request; `receive` gets its chunks, the last one with a finish reason, or one error.

        `submitted` says when it came, by `time.perf_counter`; None: now.

        Raises:
            UsageError: the request makes no sense.
            Unavailable: the queue is full, or the engine is closing or has failed.
        """
        if request.timeout_s is None:
            request = dataclasses.replace(request, timeout_s=self.options.timeout_s)
        submitted = time.perf_counter() if submitted is None else submitted
        if self._responses is not None and self._responses.serves(request):
            with self._wake:
                self._check_open()
            if (answer := self._responses.find(request, submitted)) is not None:
                for chunk in answer:
                    receive(chunk)
                return Ticket()
            receive = self._responses.recording(request, receive)
        sequence = self._scheduler.prepare(request, receive, submitted)
        with self._wake:
            self._check_open()
            self._scheduler.check_room(len(self._arrivals))
            self._arrivals.append(sequence)
            self._wake.notify()
        return sequence

    def _check_open(self) -> None:
        """Refuse requests of an engine that has failed, or is closing; `_wake` is held."""
        if self._failure is not None:
            raise Unavailable(self._failure.message, hint=self._failure.hint)
        if self._closing:
            raise Unavailable("the engine is shutting down")

    def cancel(self, ticket: Ticket) -> None:
        """Let a sequence end with "cancelled" and its slot be free at the next step; one that has ended stays so."""
        ticket.cancelled = True  # the thread looks at it in every step

    def stats(self) -> EngineStats:
        """Give the figures after the last step, with what has arrived since among those that wait."""
        with self._wake:
            found = dataclasses.replace(self._stats, waiting=self._stats.waiting + len(self._arrivals))
        if self._responses is None:
            return found
        return dataclasses.replace(
            found, response_cache_hits=self._responses.hits, response_cache_misses=self._responses.misses
        )

    @property
    def encoder(self) -> PromptEncoder:
        """The artifact's tokenizer and chat template."""
        return self.runner

    @property
    def failure(self) -> Unavailable | None:
        """What the engine ended with, if it failed."""
        return self._failure

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs: not after `close`, nor after it failed."""
        return self._failure is None and self._thread.is_alive()

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Take no more requests and end the thread; may be called again.

        With `drain` what runs and waits is finished first, for at most `timeout_s` seconds; what remains then, or
        everything without `drain`, ends with "cancelled".
        """
        with self._wake:
            self._closing = True
            self._abandoned = self._abandoned or not drain
            self._wake.notify()
        self._thread.join(timeout_s if drain else None)
        if self._thread.is_alive():
            with self._wake:
                self._abandoned = True
            self._thread.join()

    def _loop(self) -> None:
        try:
            while self._take():
                self._scheduler.step()
                stats = self._scheduler.stats()
                with self._wake:
                    self._stats = stats
        except Exception as error:  # whatever it is, those who wait for a sequence must hear of it
            logger.exception("the engine failed")
            self._fail(error)

    def _take(self) -> bool:
        """Wait for work and hand arrivals to the scheduler; return False when nothing is left to do."""
        with self._wake:
            while not (self._arrivals or self._scheduler.busy or self._closing or self._lost):
                self._wake.wait()
            if self._lost:
                self.runner.session.check_alive()
            for sequence in self._arrivals:
                self._scheduler.enqueue(sequence)
            self._arrivals.clear()
            if self._abandoned:
                self._scheduler.cancel_all()
            return self._scheduler.busy or not self._closing

    def _lose(self) -> None:
        """Have the thread look at the session, of which a part has ended."""
        with self._wake:
            self._lost = True
            self._wake.notify()

    def _fail(self, cause: Exception) -> None:
        failure = Unavailable(f"the engine failed: {cause}", hint="restart it; see its log for details")
        with self._wake:
            self._failure = failure
            for sequence in self._arrivals:
                self._scheduler.enqueue(sequence)
            self._arrivals.clear()
        self._scheduler.fail(failure)
        with self._wake:
            self._stats = self._scheduler.stats()
