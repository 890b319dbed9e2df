"""The scheduler, whatever its cache: requests are taken on, and each step runs some of their tokens."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic

from llmforge.base.errors import ForgeError
from llmforge.runtime.interface import C, Decoder
from llmforge.runtime.prefill_shapes import PREFILL_CHUNK
from llmforge.runtime.sampling.sampler import Samplers
from llmforge.serving.options import EngineOptions
from llmforge.serving.scheduler.admission import RequestQueue
from llmforge.serving.scheduler.delivery import Delivery, StepFigures
from llmforge.serving.scheduler.run_ahead import RunAhead
from llmforge.serving.sequence import Sequence
from llmforge.serving.stats import EngineStats


class Scheduler(RequestQueue, ABC, Generic[C]):
    """Runs sequences over one cache. One thread may call it at a time; nothing runs between calls.

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
        super().__init__(samplers, backend.vocabulary, cache, options.max_queue, clock, adapters)
        self._backend = backend
        self._cache = cache
        self._step_tokens = options.step_tokens
        self._chunk = min(chunk, options.step_tokens, backend.longest_step or chunk)
        self._notes = (*backend.notes, *samplers.notes)
        self._figures = StepFigures()
        self._delivery = Delivery(self.sequences, self._figures, clock, self._release, self._forget)
        self._ahead: RunAhead[Any] = RunAhead(backend, self.sequences, self._delivery)

    def step(self) -> bool:
        """Do one step; return whether there was anything to run."""
        ends = self.cancelled_and_overdue()
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
