"""Batches sequences across requests: one thread runs the encoder, and meanwhile what comes waits for the next batch."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import ForgeError, Unavailable, UsageError
from llmforge.serving.encoder_runner import BATCH_TOKENS, EncoderInput, EncoderRunner

Outcome = Future[NDArray[np.float32]]


@dataclass(frozen=True)
class EncoderOptions:
    """How an encoder serves.

    `max_queue` requests wait while others run; one more is refused. `batch_tokens` bounds what one run reads, padding
    included. `timeout_s` is the time that a request may take.
    """

    max_queue: int = 128
    batch_tokens: int = BATCH_TOKENS
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.max_queue < 0:
            raise UsageError(f"max_queue {self.max_queue}: expected 0 or more")
        if self.batch_tokens < 1:
            raise UsageError(f"batch_tokens {self.batch_tokens}: expected 1 or more")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(f"timeout_s {self.timeout_s}: expected more than 0")


@dataclass(frozen=True)
class EncoderStats:
    """Figures of an encoder that serves: what it does now, and totals since it started."""

    running: int  # requests of which a sequence runs or ran
    waiting: int
    prompt_tokens: int  # that ran
    sequences: int
    batches: Mapping[int, int]  # runs, by how many sequences


@dataclass(eq=False)
class _Job:
    """A request: its sequences, the longest first, and what they gave so far."""

    inputs: Sequence[EncoderInput]
    outcome: Outcome
    order: list[int] = field(init=False)
    begun: int = 0  # sequences of `order` that ran or run
    rows: dict[int, NDArray[np.float32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = sorted(range(len(self.inputs)), key=lambda index: -len(self.inputs[index]))


class EncoderEngine:
    """Runs sequences of any thread's requests in batches, until it is closed.

    Requests that wait give one sequence each in turn, so that a long list holds nobody up.
    """

    def __init__(self, runner: EncoderRunner, options: EncoderOptions | None = None) -> None:
        self.runner = runner
        self.options = options or EncoderOptions()
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()  # that have sequences which did not begin
        self._unfinished: set[_Job] = set()
        self._closing = False
        self._batches: Counter[int] = Counter()
        self._tokens = self._sequences = 0
        self._thread = threading.Thread(target=self._run, name="llmforge-encoder", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are taken, and run."""
        return self._thread.is_alive() and not self._closing

    def submit(self, inputs: Sequence[EncoderInput]) -> Outcome:
        """Take on a request; its outcome is fp32 [inputs, dimensions or labels]. Cancelling it ends the request.

        Raises:
            Unavailable: the queue is full, or the engine has ended.
            UsageError: there are no sequences.
        """
        if not inputs:
            raise UsageError("no texts")
        job = _Job(inputs, Future())
        with self._changed:
            if not self.alive:
                raise Unavailable("the engine has ended")
            self._drop_cancelled()
            waiting = sum(each.begun == 0 for each in self._unfinished)
            if self._unfinished and waiting >= self.options.max_queue:
                raise Unavailable(f"the queue is full: {waiting} requests are waiting")
            self._unfinished.add(job)
            self._jobs.append(job)
            self._changed.notify_all()
        return job.outcome

    def stats(self) -> EncoderStats:
        """Give the figures after the last batch."""
        with self._changed:
            self._drop_cancelled()
            waiting = sum(job.begun == 0 for job in self._unfinished)
            running = len(self._unfinished) - waiting
            return EncoderStats(running, waiting, self._tokens, self._sequences, dict(self._batches))

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Take no more requests, finish those that there are, or refuse them, and end."""
        with self._changed:
            self._closing = True
            if not drain:
                self._fail(self._unfinished, Unavailable("the engine has ended"))
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(drain=False)

    def _run(self) -> None:
        """Run batches until the engine is closed, or a run fails as none may."""
        try:
            while batch := self._wait():
                try:
                    made = self.runner.run_together([job.inputs[index] for job, index in batch])
                except ForgeError as error:
                    with self._changed:
                        self._fail({job for job, _ in batch}, error)
                else:
                    self._finish(batch, made)
        finally:
            with self._changed:
                self._closing = True
                self._fail(self._unfinished, Unavailable("the engine has ended"))

    def _wait(self) -> list[tuple[_Job, int]]:
        """Wait for sequences, and take those of the next batch; none: the engine is closed, and has done its work."""
        with self._changed:
            self._changed.wait_for(lambda: self._drop_cancelled() or self._closing)
            batch: list[tuple[_Job, int]] = []
            longest = 0
            while self._jobs:
                job = self._jobs[0]
                index = job.order[job.begun]
                longest = max(longest, len(job.inputs[index]))
                if batch and longest * (len(batch) + 1) > self.options.batch_tokens:
                    break
                batch.append((job, index))
                job.begun += 1
                self._jobs.popleft()
                if job.begun < len(job.order):
                    self._jobs.append(job)
            return batch

    def _drop_cancelled(self) -> bool:
        """Forget requests whose outcome nobody waits for; say whether there is something to run."""
        if any(job.outcome.cancelled() for job in self._unfinished):
            self._unfinished = {job for job in self._unfinished if not job.outcome.cancelled()}
            self._jobs = deque(job for job in self._jobs if job in self._unfinished)
        return bool(self._jobs)

    def _finish(self, batch: Sequence[tuple[_Job, int]], made: NDArray[np.float32]) -> None:
        """Hand out the rows of a batch."""
        with self._changed:
            self._batches[len(batch)] += 1
            self._sequences += len(batch)
            self._tokens += sum(len(job.inputs[index]) for job, index in batch)
            done = []
            for (job, index), row in zip(batch, made, strict=True):
                job.rows[index] = row
                if len(job.rows) == len(job.inputs) and job in self._unfinished:
                    self._unfinished.discard(job)
                    done.append(job)
        for job in done:
            if job.outcome.set_running_or_notify_cancel():
                job.outcome.set_result(np.stack([job.rows[index] for index in range(len(job.inputs))]))

    def _fail(self, jobs: set[_Job], error: ForgeError) -> None:
        """End requests with an error; the lock is held."""
        for job in [each for each in jobs if each in self._unfinished]:
            self._unfinished.discard(job)
            if job.outcome.set_running_or_notify_cancel():
                job.outcome.set_exception(error)
        self._jobs = deque(job for job in self._jobs if job in self._unfinished)
