"""Messages between an engine's process and the one that serves from it (`base.child_process.MessagePipe`).

The engine's first one are its figures (`EngineStats`), once it is loaded. A `ForgeError` says that it did not load, or
failed: nothing follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmforge.base.errors import ForgeError
from llmforge.serving.interface import EngineOptions, EngineStats
from llmforge.serving.request import Chunk, Request


@dataclass(frozen=True)
class StartEngine:
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
class RequestRefused:
    """A request was not taken on: what `Engine.submit` raised."""

    error: ForgeError


Item = Taken | RequestRefused | Chunk | ForgeError


@dataclass(frozen=True)
class Items:
    """What became of requests since the last time, in order, by their numbers; and the engine's figures."""

    items: tuple[tuple[int, Item], ...]
    stats: EngineStats
