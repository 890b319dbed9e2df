"""What an engine's process and the one that serves from it say to each other: pickles over a pair of sockets.

Both ends are the same code, started by each other: nothing that a stranger wrote is ever unpickled.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from llmforge.base.errors import ForgeError
from llmforge.serving.options import EngineOptions
from llmforge.serving.request import Chunk, Request
from llmforge.serving.stats import EngineStats


@dataclass(frozen=True)
class Begin:
    """The first message to the engine's process: what `Engine.load` gets.

    `server` is the process id of a server around the one that serves, if there is one: when it ends, both end, and
    `files`, which it would have removed, are removed.
    """

    artifact: Path
    options: EngineOptions | None
    threads: int | None
    draft: Path | None
    device: int
    server: int | None
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Ready:
    """The engine is loaded."""

    stats: EngineStats


@dataclass(frozen=True)
class Submit:
    """Take on a request, under a number that was never used before.

    `submitted` is when it came, by `time.perf_counter`: a clock that all processes of a system share.
    """

    number: int
    request: Request
    submitted: float


@dataclass(frozen=True)
class Cancel:
    """Let a request end."""

    number: int


@dataclass(frozen=True)
class Close:
    """Take no more requests, and end: `Engine.close`."""

    drain: bool
    timeout_s: float | None


@dataclass(frozen=True)
class Taken:
    """A request was taken on."""


@dataclass(frozen=True)
class Refused:
    """A request was not taken on: what `Engine.submit` raised."""

    error: ForgeError


Item = Taken | Refused | Chunk | ForgeError


@dataclass(frozen=True)
class Items:
    """What became of requests since the last time, in order, by their numbers; and the engine's figures."""

    items: tuple[tuple[int, Item], ...]
    stats: EngineStats


@dataclass(frozen=True)
class Failed:
    """The engine did not load, or failed; nothing follows."""

    error: ForgeError


class Sender:
    """Sends messages of several threads, one after the other; where nobody receives any more, they are dropped."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Send one message."""
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:  # the other end learns of it, or has ended
            pass
