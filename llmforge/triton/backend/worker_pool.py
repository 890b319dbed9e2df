"""Workers that read requests, each one after the other, so that what takes long holds up nothing but its like.

Triton hands over requests in one thread, and the next one when `execute` returns. A chat template is a stranger's code,
which may take seconds (`llmforge.serving.chat`); long texts take as long to tokenize, and constraints may have
to be compiled.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from llmforge.base.errors import QueueFull


class QueueWorker:
    """Calls what it is given, one after the other, in its own thread until `close`.

    At most `most` wait; `died` is called once if the thread ends on its own.
    """

    def __init__(self, name: str, most: int, died: Callable[[], None]) -> None:
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(most + 1)  # one place to say that it ends
        self._name, self._most, self._died = name, most, died
        self._thread = threading.Thread(target=self._run, name=f"llmforge-{name}", daemon=True)
        self._thread.start()

    def put(self, read: Callable[[], None]) -> None:
        """Take on a request; `read` reads it and hands it to the engine, and raises nothing.

        Raises:
            QueueFull: too many wait.
        """
        if self._waiting.qsize() >= self._most:
            raise QueueFull(
                f"the queue is full: {self._most} requests of kind {self._name!r} are waiting", hint="try again later"
            )
        try:
            self._waiting.put_nowait(read)
        except queue.Full:  # two came at once
            raise QueueFull("the queue is full", hint="try again later") from None

    def close(self) -> None:
        """Read what waits, and end the thread."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        closing = False
        try:
            while (read := self._waiting.get()) is not None:
                read()
            closing = True
        finally:
            if not closing:  # a bug: nobody would read what still comes
                self._died()
