"""What serves an artifact, in this process (`Engine`) or in one of its own (`EngineProcess`)."""

from __future__ import annotations

from typing import Protocol

from llmforge.serving.options import EngineOptions
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.request import Receiver, Request
from llmforge.serving.sequence import Ticket
from llmforge.serving.stats import EngineStats


class Serving(Protocol):
    """Runs requests of any thread; see `Engine` for what each method does and raises."""

    options: EngineOptions

    @property
    def encoder(self) -> PromptEncoder:
        """What prompts are read by."""

    @property
    def alive(self) -> bool:
        """Whether requests are taken, and run."""

    def submit(self, request: Request, receive: Receiver) -> Ticket:
        """Take on a request."""

    def cancel(self, ticket: Ticket) -> None:
        """Let a request end."""

    def stats(self) -> EngineStats:
        """Give the figures after a recent step."""

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Take no more requests, and end."""
