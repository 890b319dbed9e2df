"""The scheduler, whatever its cache: requests are taken on, and each step runs some of their tokens."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Generic

from llmforge.base.errors import ForgeError, QueueFull, UsageError
from llmforge.runtime.interface import C, Decoder
from llmforge.runtime.prefill_shapes import PREFILL_CHUNK
from llmforge.runtime.sampling.sampler import Samplers
from llmforge.serving.interface import EngineOptions, EngineStats
from llmforge.serving.prefix_cache import PrefixCache
from llmforge.serving.request import Receiver, Request, adapter_number, check_tokens
from llmforge.serving.scheduler.delivery import Delivery, StepFigures
from llmforge.serving.scheduler.run_ahead import RunAhead
from llmforge.serving.sequence import NoText, OutputText, Sequence


class Scheduler(ABC, Generic[C]):
    """Runs sequences over one cache. One thread may call it at a time; nothing runs between calls.

    `sequences` are those that wait or run, in order of arrival, and `waiting` those that wait for a row of the cache.

    Args:
        backend: the decoder.
        cache: of the tokens of all sequences.
        samplers: make the sampler of each sequence, and know the tokenizer.
        options: of these, `max_queue`, `step_tokens` and `prefix_cache_bytes`.
        chunk: longest piece of a prompt that runs at once, in tokens; never longer than `step_tokens` or the backend's
            `longest_step`.
        clock: seconds, from any origin.
        adapters: names of those that requests choose from; the first is number 1.
    """

    def __init__(
        self,
        backend: Decoder[C],
        cache: C,
        samplers: Samplers,
        options: EngineOptions,
        *,
        chunk: int = PREFILL_CHUNK,
        clock: Callable[[], float] = time.perf_counter,
        adapters: tuple[str, ...] = (),
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._samplers = samplers
        self._max_queue = options.max_queue
        self._clock = clock
        self._adapters = adapters
        self.waiting: deque[Sequence] = deque()
        self.sequences: dict[Sequence, None] = {}
        self._step_tokens = options.step_tokens
        self._chunk = min(chunk, options.step_tokens, backend.longest_step or chunk)
        self._notes = (*backend.notes, *samplers.notes)
        self._figures = StepFigures()
        self._delivery = Delivery(self.sequences, self._figures, clock, self._release, self._forget)
        self._ahead: RunAhead[Any] = RunAhead(backend, self.sequences, self._delivery)

    def prepare(self, request: Request, receive: Receiver, submitted: float | None = None) -> Sequence:
        """Make what `enqueue` takes; any thread may do it. `submitted`: when, by the clock; None: now.

        Raises:
            UsageError: the prompt is empty, too long or has unknown tokens; stop strings without detokenization; or an
                adapter that is not there.
            UsageError, UnsupportedError, EnvironmentLacks: as `Samplers.start` does.
        """
        check_tokens(request.prompt, self._cache.capacity - 1, self._backend.vocabulary)
        if request.sampling.stop and not request.detokenize:
            raise UsageError("stop strings are not supported for a batch of token ids")
        room = self._cache.capacity - len(request.prompt)
        return Sequence(
            request,
            receive,
            submitted=self._clock() if submitted is None else submitted,
            max_tokens=min(request.sampling.max_tokens or room, room),
            text=OutputText(self._samplers.tokenizer, request.sampling, request.special_tokens)
            if request.detokenize
            else NoText(),
            adapter=adapter_number(request.adapter, self._adapters),
            sampler=self._samplers.start(request.sampling, request.prompt),
        )

    def check_room(self, arriving: int = 0) -> None:
        """Return if one more request may be queued besides `arriving` others; any thread may ask.

        Raises:
            QueueFull: the rows are taken and the queue is full.
        """
        if len(self.sequences) + arriving >= self._cache.batch + self._max_queue:
            raise QueueFull(f"the queue is full: {self._max_queue} requests are waiting", hint="try again later")

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a sequence; its receiver gets chunks during steps."""
        self.sequences[sequence] = None
        self.waiting.append(sequence)

    def add(self, request: Request, receive: Receiver, submitted: float | None = None) -> Sequence:
        """Prepare and queue a request: raises what `prepare` and `check_room` raise."""
        sequence = self.prepare(request, receive, submitted)
        self.check_room()
        self.enqueue(sequence)
        return sequence

    def cancel_all(self) -> None:
        """Let every sequence end with "cancelled" at the next step, as `cancelled = True` does for one."""
        for sequence in self.sequences:
            sequence.cancelled = True

    @property
    def prefix_cache(self) -> PrefixCache[C] | None:
        """What prompts may begin with, where it is apart from the cache of running sequences."""
        return None

    @property
    def keeps_prefixes(self) -> bool:
        """Whether prompts begin with what was computed for others."""
        return self.prefix_cache is not None

    def note(self, text: str) -> None:
        """Add to what `EngineStats.notes` says."""
        self._notes += (text,)

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self.sequences)

    def step(self) -> bool:
        """Do one step; return whether there was anything to run."""
        now = self._clock()
        ends = [each for each in self.sequences if each.cancelled or each.is_overdue(now)]
        if ends:
            self._delivery.hand_over_all()
        for sequence in ends:
            if sequence in self.sequences:
                self._delivery.finish(sequence, "cancelled" if sequence.cancelled else "timeout")
        self._ahead.drop_unwanted()
        ran = self._run()
        self._ahead.end_unwanted()
        return ran > 0

    def fail(self, error: ForgeError) -> None:
        """Hand `error` to every request that runs or waits, and forget them."""
        self._ahead.step = None
        self._delivery.fail(error)

    def stats(self) -> EngineStats:
        """Sum up what was done and what is going on."""
        figures = self._figures
        return EngineStats(
            **figures.totals,
            **self._occupancy(),
            waiting=len(self.waiting),
            slots=self._cache.batch,
            decode_s=figures.decode_s,
            verify_s=figures.verify_s,
            steps=dict(figures.steps),
            finished=dict(figures.finished),
            notes=self._notes,
        )

    @abstractmethod
    def _run(self) -> int:
        """Give places to those that wait, and run those that have one; return how many tokens ran."""

    @abstractmethod
    def _occupancy(self) -> dict[str, int]:
        """Count the sequences that run, and the tokens that are held and those that could be, as `EngineStats` does."""

    @abstractmethod
    def _release(self, sequence: Sequence) -> None:
        """Free the place of a sequence that ends, or its place in the queue."""

    @abstractmethod
    def _forget(self, sequence: Sequence) -> None:
        """Let no other text begin with what was computed for this one."""
