"""An engine as its callers see it, in this process (`Engine`) or in one of its own (`EngineProcess`)."""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from llmforge.base.errors import ForgeError, UsageError
from llmforge.runtime.prefill_shapes import PREFILL_CHUNK
from llmforge.serving.prefix_cache import Prefix
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.request import Chunk, Receiver, Request
from llmforge.serving.response_cache import MOST_ANSWERS
from llmforge.serving.sequence import Ticket


@dataclass(frozen=True)
class EngineOptions:
    """How an engine serves.

    `max_queue` requests wait while all slots are taken; one more is refused. `step_tokens` is the token budget of one
    step: every decoding sequence gets its token first, the rest is for prefill; less of it makes tokens come more
    evenly, and prefill slower. `prefix_cache_bytes` bounds the prefix cache (0: there is none). `speculation`
    "prompt-lookup" drafts tokens from the text itself, "draft" by a smaller model, the artifact's own or a second
    artifact, "eagle3" by the artifact's own head; None: as the artifact says. Drafts are verified where that was
    measured to be faster, and outputs stay what they are but for ties within the rounding of a kernel.
    `timeout_s` is the default deadline of a request of their own. `prefixes` are in the prefix cache from the start,
    besides those of the artifact, from files in `prefix_store` where they are there; what is not is computed, and
    written there. `response_cache` is how many greedy answers are kept for requests that are the same
    (`llmforge.serving.response_cache`); 0: none.
    """

    max_queue: int = 128
    step_tokens: int = PREFILL_CHUNK
    prefix_cache_bytes: int = 512 << 20
    speculation: Literal["off", "prompt-lookup", "draft", "eagle3"] | None = None
    timeout_s: float | None = None
    prefixes: tuple[Prefix, ...] = ()
    prefix_store: Path | None = None
    response_cache: int = 0

    def __post_init__(self) -> None:
        if self.max_queue < 0:
            raise UsageError(f"max_queue {self.max_queue}: expected 0 or more")
        if self.step_tokens < 1:
            raise UsageError(f"step_tokens {self.step_tokens}: expected 1 or more")
        if self.prefix_cache_bytes < 0:
            raise UsageError(f"prefix_cache_bytes {self.prefix_cache_bytes}: expected 0 (disabled) or more")
        if not 0 <= self.response_cache <= MOST_ANSWERS:
            raise UsageError(f"response_cache {self.response_cache}: expected 0 (disabled) to {MOST_ANSWERS:,}")
        if self.speculation not in (None, "off", "prompt-lookup", "draft", "eagle3"):
            raise UsageError(f"speculation {self.speculation!r}: expected off, prompt-lookup, draft or eagle3")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(f"timeout_s {self.timeout_s}: expected more than 0")


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Figures of an engine: what it does now, and totals since it started.

    `decode_s` and `decode_tokens` are the time of decode steps and the tokens they gave; `verify_s` and
    `verified_tokens` those of runs that verified drafts, drafting included.
    """

    running: int
    waiting: int
    slots: int
    kv_tokens_used: int  # that running sequences hold in their slots
    kv_tokens_capacity: int
    prefix_tokens_used: int  # that the prefix cache holds
    prefix_tokens_capacity: int
    prompt_tokens: int = 0  # of requests whose prompt was taken up
    prefill_tokens: int = 0  # of them, those that ran through the model
    output_tokens: int = 0
    prefix_query_tokens: int = 0  # of prompts that were looked up
    prefix_hit_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    response_cache_hits: int = 0  # requests whose answer was there
    response_cache_misses: int = 0  # greedy ones whose answer was not
    preemptions: int = 0  # sequences that gave their blocks to older ones, and were read again later
    decode_s: float
    decode_tokens: int = 0
    verify_s: float
    verified_tokens: int = 0
    steps: Mapping[int, int]  # decode steps by the rows that ran
    finished: Mapping[str, int]  # sequences by finish reason; "error" for those that failed
    notes: tuple[str, ...]  # what was asked for and is off, and why

    @property
    def accepted_length(self) -> float | None:
        """Mean tokens of a verification: the drafted ones that stood, and the one after them; None: there was none."""
        runs = self.verified_tokens - self.accepted_tokens
        return self.verified_tokens / runs if runs > 0 else None

    @property
    def speculation_gain(self) -> float | None:
        """How many times faster a token came from verified drafts than from decode steps; None: one has no tokens."""
        if not (self.decode_tokens and self.verified_tokens and self.verify_s):
            return None
        return (self.decode_s / self.decode_tokens) / (self.verify_s / self.verified_tokens)


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
