"""Requests whose prompt a chat template writes: a thread of their own reads them, so that nothing else waits for one.

A template is a stranger's code, which may take seconds (`llmforge.runtime.serving.chat`). Triton hands over requests in
one thread, and the next one when `execute` returns.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from llmforge.base.errors import Unavailable


class Chats:
    """Calls what it is given, one after the other, in its own thread until `close`.

    At most `most` wait; `died` is called once if the thread ends on its own.
    """

    def __init__(self, most: int, died: Callable[[], None]) -> None:
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(most + 1)  # one place to say that it ends
        self._most, self._died = most, died
        self._thread = threading.Thread(target=self._run, name="llmforge-chats", daemon=True)
        self._thread.start()

    def put(self, read: Callable[[], None]) -> None:
        """Take on a request; `read` reads it and hands it to the engine, and raises nothing.

        Raises:
            Unavailable: too many wait.
        """
        if self._waiting.qsize() >= self._most:  # Triton calls from one thread
            raise Unavailable(f"the queue is full: {self._most} chats are waiting", hint="try again later")
        self._waiting.put_nowait(read)

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
