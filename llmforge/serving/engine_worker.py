"""The engine's process: `engine_process.py` starts this module, and talks to it as `wire.py` says.

Four threads: this one takes messages, the engine's runs steps, one sends what they gave, and one waits for the end of
the processes that this one works for. Nothing here waits for a client.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from llmforge.base import process
from llmforge.base.child_process import MessagePipe, end_with
from llmforge.base.errors import ForgeError, Unavailable
from llmforge.serving.engine import Engine
from llmforge.serving.request import Chunk
from llmforge.serving.sequence import Ticket
from llmforge.serving.wire import Cancel, Close, Item, Items, RequestRefused, StartEngine, Submit, Taken

MANY, GATHER_S = 8, 5e-4  # answers at once, from which on the tokens of a step leave together, and what that takes
POLL_S = 0.05  # between two looks at the figures, while the engine is busy and says nothing
IDLE_S = 1.0  # while it is not: a part of it that ends then has nobody to tell
SWITCH_S = 1e-3  # after which the engine's thread lets another one run, where a step is all Python
END_S = 5.0  # for the end of a process whose connection has ended
SMALL_CONSTRAINT = 4096  # characters; larger ones, which may take long to compile, wait for each other only

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Active:
    """A request between its submission and its end."""

    ticket: Ticket | None = None  # None: the engine has not taken it yet
    cancelled: bool = False


class _EngineWorker:
    """Hands the engine what comes in, and the other process what the engine gives."""

    def __init__(self, engine: Engine, pipe: MessagePipe) -> None:
        self._engine = engine
        self._pipe = pipe
        self._active: dict[int, _Active] = {}
        self._lock = threading.Lock()  # of `_active` and what it holds
        self._given: queue.SimpleQueue[tuple[int, Item] | None] = queue.SimpleQueue()  # None: nothing follows
        self._small, self._large = (ThreadPoolExecutor(1, f"llmforge-compile-{size}") for size in ("small", "large"))
        self._sending = threading.Thread(target=self._send_all, name="llmforge-send")

    def run(self) -> None:
        """Go on until the engine is closed, or fails, or nobody is there who could be told anything."""
        self._pipe.send(self._engine.stats())
        self._sending.start()
        while True:
            try:
                message = self._pipe.receive()
            except EOFError:
                return
            match message:
                case Submit(number, request, _):
                    with self._lock:
                        self._active[number] = _Active()
                    constraint = request.sampling.constraint
                    if constraint is None:
                        self._submit(message)
                    else:
                        compiler = self._small if len(constraint.text) <= SMALL_CONSTRAINT else self._large
                        compiler.submit(self._submit, message)
                case Cancel(number):
                    self._cancel(number)
                case Close(drain, timeout_s):
                    threading.Thread(target=self._close, args=[drain, timeout_s], daemon=True).start()

    def _submit(self, message: Submit) -> None:
        number = message.number
        try:
            ticket = self._engine.submit(message.request, functools.partial(self._give, number), message.submitted)
        except ForgeError as error:
            self._give(number, RequestRefused(error))
            return
        except Exception as error:  # a bug, of which the one who waits for an answer must hear
            logger.exception("a request failed")
            self._give(number, RequestRefused(Unavailable(f"the request failed: {error}")))
            return
        self._given.put((number, Taken()))
        with self._lock:
            active = self._active.get(number)  # None: it has ended already
            if active is None:
                return
            active.ticket = ticket
            cancelled = active.cancelled
        if cancelled:
            self._engine.cancel(ticket)

    def _cancel(self, number: int) -> None:
        with self._lock:
            active = self._active.get(number)
            if active is None:
                return
            active.cancelled = True
            ticket = active.ticket
        if ticket is not None:
            self._engine.cancel(ticket)

    def _give(self, number: int, item: Item) -> None:
        if not isinstance(item, Chunk) or item.finish_reason is not None:
            with self._lock:
                del self._active[number]
        self._given.put((number, item))

    def _close(self, drain: bool, timeout_s: float | None) -> None:
        self._engine.close(drain=drain, timeout_s=timeout_s)
        self._given.put(None)
        self._sending.join()
        os._exit(0)  # not through other threads, of which one may still compile

    def _send_all(self) -> None:
        """Send what requests got, all that is there at once, and the figures when they change."""
        sent, settled, ended = self._engine.stats(), True, False
        while not ended:
            items: list[tuple[int, Item]] = []
            with contextlib.suppress(queue.Empty):
                given = self._given.get(timeout=IDLE_S if settled else POLL_S)
                if sent.running > MANY:
                    # Each message takes the interpreter away from the engine's thread, which is in the midst of a step.
                    time.sleep(GATHER_S)
                while given is not None:
                    items.append(given)
                    given = self._given.get_nowait()
                ended = True
            stats = self._engine.stats()
            settled = not items and stats == sent and not (stats.running or stats.waiting)
            if items or stats != sent:
                self._pipe.send(Items(tuple(items), stats))
                sent = stats
            if (failure := self._engine.failure) is not None and not items:
                self._pipe.send(failure)
                os._exit(1)


def main() -> None:
    """Load the engine and serve the process that started this one, through the socket that is file 0."""
    process.share_heaps()
    pipe = MessagePipe(os.dup(0))
    begin = pipe.receive()
    assert isinstance(begin, StartEngine)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    sys.setswitchinterval(SWITCH_S)
    processes = [os.getppid()] if begin.server is None else [begin.server, os.getppid()]
    watch = threading.Thread(target=end_with, args=[processes, begin.files], name="llmforge-watch", daemon=True)
    watch.start()
    try:
        engine = Engine.load(begin.artifact, begin.options, begin.threads, begin.draft, begin.device)
    except ForgeError as error:
        pipe.send(error)
        sys.exit(error.exit_code)
    _EngineWorker(engine, pipe).run()
    watch.join(END_S)  # which sees the same end, and has more to do
    os._exit(1)


if __name__ == "__main__":
    main()
