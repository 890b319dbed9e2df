"""An engine in a process of its own: what serves takes nothing of the interpreter that runs the steps."""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
import socket
import subprocess
import threading
import time
import weakref
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from llmforge.base import interpreter
from llmforge.base.errors import EnvironmentLacks, ForgeError, Unavailable
from llmforge.serving import wire
from llmforge.serving.engine import Stream
from llmforge.serving.options import EngineOptions
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.request import Receiver, Request
from llmforge.serving.sequence import Ticket
from llmforge.serving.stats import EngineStats

END_S = 10.0  # for a process that was told to end, after what it may finish
_WORKER = "llmforge.serving.engine_worker"

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Pending(Ticket):
    """A request that the process has."""

    number: int
    receive: Receiver
    decided: threading.Event = field(default_factory=threading.Event)
    refusal: ForgeError | None = None


class EngineProcess:
    """Serves an artifact as `Engine` does, from a process that this one starts. Any thread may call any method.

    Receivers are called by a thread of this process: they may call back, and must not wait.

    Args:
        artifact: its folder.
        options: how to serve; None: the defaults.
        threads: of a step; None: the artifact's own number.
        draft: the artifact that drafts tokens, with `speculation` "draft-model".
        device: which GPU an engine for one gets.
        server: the id of the process that this one works for: when it ends, so does this one, by a signal.
        files: what `server` removes when it ends; should it be killed, they are removed all the same.

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
    ) -> None:
        self.options = options or EngineOptions()
        self._encoder = PromptEncoder.read(artifact)
        ours, others = socket.socketpair()
        with others:
            try:
                self._process: subprocess.Popen[bytes] = subprocess.Popen(
                    interpreter.command(_WORKER, "running the engine"),
                    stdin=others.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for this process, which ends the other one
                )
            except OSError as error:
                ours.close()
                raise EnvironmentLacks(f"the engine's process cannot be started: {error.strerror}") from error
        self._connection = Connection(ours.detach())
        self._kill = weakref.finalize(self, _kill, self._process)
        self._sender = wire.Sender(self._connection)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._closing = False
        self._failure: ForgeError | None = None
        begin = wire.Begin(artifact.resolve(), options, threads, draft and draft.resolve(), device, server, files)
        self._sender.send(begin)
        try:
            first = self._connection.recv()
        except (EOFError, OSError):
            raise EnvironmentLacks(f"the engine did not load: {self._why_ended()}") from None
        if isinstance(first, wire.Failed):
            self._kill()
            raise first.error
        assert isinstance(first, wire.Ready)
        self._stats = first.stats
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
        return self._process.pid

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
            self._sender.send(wire.Cancel(ticket.number))

    def stream(self, request: Request) -> Stream:
        """Run a request, chunk by chunk, as `Engine.stream` does."""
        return Stream(self, request)

    def stats(self) -> EngineStats:
        """Give the latest figures that the process has sent, which takes some hundredths of a second."""
        return self._stats

    @property
    def alive(self) -> bool:
        """Whether the engine runs: not after `close`, nor after it failed."""
        return self._failure is None and not self._closing and self._process.poll() is None

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Take no more requests and end the process, as `Engine.close` does; may be called again."""
        with self._lock:
            first, self._closing = not self._closing, True
        if first or not drain:
            self._sender.send(wire.Close(drain, timeout_s))
        wait_s = None if drain and timeout_s is None else END_S + (timeout_s or 0) * drain
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            logger.error("the engine's process did not end and is killed")
        self._kill()
        self._receiving.join()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(drain=False)

    def _begin(self, request: Request, receive: Receiver) -> _Pending:
        pending = _Pending(next(self._numbers), receive)
        with self._lock:
            if self._failure is not None:
                raise Unavailable(self._failure.message, hint=self._failure.hint)
            if self._closing:
                raise Unavailable("the engine is shutting down")
            self._pending[pending.number] = pending
        self._sender.send(wire.Submit(pending.number, request, time.perf_counter()))
        return pending

    def _receive(self) -> None:
        """Hand out what comes, until the process ends."""
        failure: ForgeError | None = None
        with contextlib.suppress(EOFError, OSError):
            while failure is None:
                message = self._connection.recv()
                if isinstance(message, wire.Failed):
                    failure = message.error
                else:
                    assert isinstance(message, wire.Items)
                    self._stats = message.stats
                    for number, item in message.items:
                        self._hand_out(number, item)
        if failure is None and not self._closing:
            failure = Unavailable(f"the engine failed: {self._why_ended()}", hint="restart it; see its log for details")
        with self._lock:
            self._failure = failure
            left = list(self._pending.values())
            self._pending.clear()
        for pending in left:
            self._end(pending, failure or Unavailable("the engine was closed"))

    def _hand_out(self, number: int, item: wire.Item) -> None:
        with self._lock:
            pending = self._pending[number]
            if isinstance(item, ForgeError | wire.Refused) or getattr(item, "finish_reason", None) is not None:
                del self._pending[number]
        if isinstance(item, wire.Refused):
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

    def _why_ended(self) -> str:
        """Say how the process ended, which nobody asked it to."""
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._kill()
            return "its process went silent"
        if code == -signal.SIGKILL:
            return "its process was killed (SIGKILL): by the system, perhaps, for want of memory"
        name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"its process ended with {name}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process, if it has not ended."""
    if process.poll() is None:
        process.kill()
    process.wait()
