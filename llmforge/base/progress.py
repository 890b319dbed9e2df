"""How long work tells that it goes on: the command line draws it, tests and library users may ignore it."""

from __future__ import annotations

from typing import Protocol


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
