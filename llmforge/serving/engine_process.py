"""An engine in a process of its own: what serves takes nothing of the interpreter that runs the steps."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmforge.base import interpreter
from llmforge.base.child_process import END_S, ChildProcess
from llmforge.base.errors import EnvironmentLacks, ForgeError, Unavailable
from llmforge.serving import wire
from llmforge.serving.chat import ChatTemplate
from llmforge.serving.interface import EngineOptions, EngineStats, Serving
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.request import Receiver, Request
from llmforge.serving.saved_prefixes import read_prefixes
from llmforge.serving.sequence import Ticket

_WORKER = "llmforge.serving.engine_worker"

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Pending(Ticket):
    """A request that the process has."""

    number: int
    receive: Receiver
    decided: threading.Event = field(default_factory=threading.Event)
    refusal: ForgeError | None = None


class EngineProcess(Serving):
    """Serves an artifact as `Engine` does, from a process that this one starts. Any thread may call any method.

    Receivers are called by a thread of this process: they may call back, and must not wait.

    Args:
        artifact: its folder.
        options: how to serve; None: the defaults.
        threads: of a step; None: the artifact's own number.
        draft: the artifact that drafts tokens, with `speculation` "draft"; None: its own, if it has one.
        device: which GPU an engine for one gets.
        server: the id of the process that this one works for: when it ends, so does this one, by a signal.
        files: what `server` removes when it ends; should it be killed, they are removed all the same.
        template: for chats, in place of the artifact's own.
        prefixes: a file of what prompts begin with (`saved_prefixes.read_prefixes`), in place of the options'.

    Raises:
        EnvironmentLacks: no process can be started, or it ended while it loaded.
        ForgeError: what `Engine.load` raises.
    """

    def __init__(
        self,
        artifact: Path,
        options: EngineOptions | None = None,
        threads: int | None = None,
        draft: Path | None = None,
        device: int = 0,
        server: int | None = None,
        files: tuple[Path, ...] = (),
        template: ChatTemplate | None = None,
        prefixes: Path | None = None,
    ) -> None:
        self._encoder = PromptEncoder.read(artifact, template)
        self.options = options or EngineOptions()
        if prefixes is not None:
            self.options = options = replace(self.options, prefixes=read_prefixes(prefixes, self._encoder))
        command = interpreter.command(_WORKER, "running the engine")
        self._process = ChildProcess(command, "the engine's process cannot be started")
        self._pipe = self._process.pipe()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._closing = False
        self._failure: ForgeError | None = None
        begin = wire.StartEngine(artifact.resolve(), options, threads, draft and draft.resolve(), device, server, files)
        self._pipe.send(begin)
        try:
            first = self._pipe.receive()
        except EOFError:
            raise EnvironmentLacks(f"the engine did not load: {self._process.why_ended()}") from None
        if isinstance(first, ForgeError):
            self._process.kill()
            raise first
        assert isinstance(first, EngineStats)
        self._stats = first
        receiving = threading.Thread(target=self._receive, name="llmforge-receive", daemon=True)
        receiving.start()
        self._receiving = receiving

    @property
    def encoder(self) -> PromptEncoder:
        """The artifact's tokenizer and chat template."""
        return self._encoder

    @property
    def process_id(self) -> int:
        """The id of the engine's process."""
        return self._process.id

    def submit(self, request: Request, receive: Receiver) -> Ticket:
        """Take on a request, as `Engine.submit` does; waits for the process to say that it has."""
        pending = self._begin(request, receive)
        pending.decided.wait()
        if pending.refusal is not None:
            raise pending.refusal
        return pending

    def cancel(self, ticket: Ticket) -> None:
        """Let a sequence end with "cancelled" and its slot be free soon; one that has ended stays so."""
        assert isinstance(ticket, _Pending)
        with self._lock:
            known = ticket.number in self._pending and not ticket.cancelled
            ticket.cancelled = True
        if known:
            self._pipe.send(wire.Cancel(ticket.number))

    def stats(self) -> EngineStats:
        """Give the latest figures that the process has sent, which takes some hundredths of a second."""
        return self._stats

    @property
    def alive(self) -> bool:
        """Whether the engine runs: not after `close`, nor after it failed."""
        return self._failure is None and not self._closing and self._process.alive

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Take no more requests and end the process, as `Engine.close` does; may be called again."""
        with self._lock:
            first, self._closing = not self._closing, True
        if first or not drain:
            self._pipe.send(wire.Close(drain, timeout_s))
        wait_s = None if drain and timeout_s is None else END_S + (timeout_s or 0) * drain
        if not self._process.wait(wait_s):
            logger.error("the engine's process did not end and is killed")
        self._process.kill()
        self._receiving.join()

    def _begin(self, request: Request, receive: Receiver) -> _Pending:
        pending = _Pending(next(self._numbers), receive)
        with self._lock:
            if self._failure is not None:
                raise Unavailable(self._failure.message, hint=self._failure.hint)
            if self._closing:
                raise Unavailable("the engine is shutting down")
            self._pending[pending.number] = pending
        self._pipe.send(wire.Submit(pending.number, request, time.perf_counter()))
        return pending

    def _receive(self) -> None:
        """Hand out what comes, until the process ends."""
        failure: ForgeError | None = None
        with contextlib.suppress(EOFError):
            while failure is None:
                message = self._pipe.receive()
                if isinstance(message, ForgeError):
                    failure = message
                else:
                    assert isinstance(message, wire.Items)
                    self._stats = message.stats
                    for number, item in message.items:
                        self._hand_out(number, item)
        if failure is None and not self._closing:
            failure = Unavailable(
                f"the engine failed: {self._process.why_ended()}", hint="restart it; see its log for details"
            )
        with self._lock:
            self._failure = failure
            left = list(self._pending.values())
            self._pending.clear()
        for pending in left:
            self._end(pending, failure or Unavailable("the engine was closed"))

    def _hand_out(self, number: int, item: wire.Item) -> None:
        with self._lock:
            if isinstance(item, wire.Taken) and number not in self._pending:
                return  # it was answered before the process said that it was taken
            pending = self._pending[number]
            if isinstance(item, ForgeError | wire.RequestRefused) or getattr(item, "finish_reason", None) is not None:
                del self._pending[number]
        if isinstance(item, wire.RequestRefused):
            self._end(pending, item.error)
        elif isinstance(item, wire.Taken):
            pending.decided.set()
        else:
            pending.decided.set()
            pending.receive(item)

    @staticmethod
    def _end(pending: _Pending, error: ForgeError) -> None:
        """Tell whoever waits for a request that it ended with an error."""
        if pending.decided.is_set():
            pending.receive(error)
        else:
            pending.refusal = error
            pending.decided.set()
