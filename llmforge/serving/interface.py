"""An engine as its callers see it, in this process (`Engine`) or in one of its own (`EngineProcess`)."""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Self

from llmforge.base.errors import ForgeError
from llmforge.serving.options import EngineOptions
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.request import Chunk, Receiver, Request
from llmforge.serving.sequence import Ticket
from llmforge.serving.stats import EngineStats


class Serving(ABC):
    """Runs requests of any thread; see `Engine` for what each method does and raises."""

    options: EngineOptions

    @property
    @abstractmethod
    def encoder(self) -> PromptEncoder:
        """The artifact's tokenizer and chat template."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether requests are taken, and run."""

    @abstractmethod
    def submit(self, request: Request, receive: Receiver) -> Ticket:
        """Take on a request."""

    @abstractmethod
    def cancel(self, ticket: Ticket) -> None:
        """Let a request end."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Give the figures after a recent step."""

    @abstractmethod
    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Take no more requests, and end."""

    def stream(self, request: Request) -> Stream:
        """Run a request, chunk by chunk; it is submitted by this call, and closing the iterator cancels it.

        Raises:
            UsageError, Unavailable: as `submit` does, now. Errors of the sequence are raised by the iterator.
        """
        return Stream(self, request)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(drain=False)


class Stream(Iterator[Chunk]):
    """The chunks of one sequence, as they come. It is cancelled when this is closed, or nobody holds this any more."""

    def __init__(self, engine: Serving, request: Request) -> None:
        self._engine = engine
        self._chunks: queue.SimpleQueue[Chunk | ForgeError] = queue.SimpleQueue()
        self._ended = False
        self.ticket = engine.submit(request, self._chunks.put)

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        item = self._chunks.get()
        if isinstance(item, ForgeError):
            self._ended = True
            raise item
        self._ended = item.finish_reason is not None
        return item

    def close(self) -> None:
        """Cancel the sequence, if it has not ended; nothing more comes."""
        self._ended = True
        self._engine.cancel(self.ticket)

    def __del__(self) -> None:
        if hasattr(self, "ticket"):  # else it was refused
            self.close()
