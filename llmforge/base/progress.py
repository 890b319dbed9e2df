"""How long work tells that it goes on: the command line draws it, tests and library users may ignore it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

_BARS: ContextVar[bool] = ContextVar("bars", default=True)


class Progress(Protocol):
    """Receives the stages of a build, in order; every stage ends when the next one begins."""

    def stage(self, title: str) -> None:
        """Begin a stage."""

    def advance(self, done: int, total: int) -> None:
        """Say how much of the current stage is done, in its own units."""


class Silent:
    """Ignores everything."""

    def stage(self, title: str) -> None:
        """Ignore."""

    def advance(self, done: int, total: int) -> None:
        """Ignore."""


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep other libraries from drawing progress bars in the block."""
    token = _BARS.set(False)
    try:
        yield
    finally:
        _BARS.reset(token)


def has_bars() -> bool:
    """Say whether other libraries may draw progress bars."""
    return _BARS.get()
