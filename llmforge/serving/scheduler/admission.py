"""Requests from their submission to the place that they wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from llmforge.base.errors import Unavailable, UsageError
from llmforge.runtime.interface import Rows
from llmforge.runtime.sampling.sampler import Samplers
from llmforge.serving.request import Receiver, Request, adapter_number, check_tokens
from llmforge.serving.sequence import NoText, OutputText, Sequence


class RequestQueue:
    """Takes on requests: `sequences` are those that wait or run, in order of arrival, and `waiting` those that wait.

    Args:
        samplers: make the sampler of each sequence, and know the tokenizer.
        vocabulary: of the model.
        cache: has a row for each sequence that runs; its capacity bounds prompt and output together.
        max_queue: requests that wait while all rows are taken.
        clock: seconds, from any origin.
        adapters: names of those that requests choose from; the first is number 1.
    """

    def __init__(
        self,
        samplers: Samplers,
        vocabulary: int,
        cache: Rows,
        max_queue: int,
        clock: Callable[[], float],
        adapters: tuple[str, ...],
    ) -> None:
        self._samplers = samplers
        self._vocabulary = vocabulary
        self._rows, self._capacity = cache.batch, cache.capacity
        self._max_queue = max_queue
        self._clock = clock
        self._adapters = adapters
        self.waiting: deque[Sequence] = deque()
        self.sequences: dict[Sequence, None] = {}

    def prepare(self, request: Request, receive: Receiver, submitted: float | None = None) -> Sequence:
        """Make what `enqueue` takes; any thread may do it. `submitted`: when, by the clock; None: now.

        Raises:
            UsageError: the prompt is empty, too long or has unknown tokens; stop strings without detokenization; or an
                adapter that is not there.
            UsageError, UnsupportedError, EnvironmentLacks: as `Samplers.start` does.
        """
        check_tokens(request.prompt, self._capacity - 1, self._vocabulary)
        if request.sampling.stop and not request.detokenize:
            raise UsageError("stop strings are not supported for a batch of token ids")
        room = self._capacity - len(request.prompt)
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
            Unavailable: the rows are taken and the queue is full.
        """
        if len(self.sequences) + arriving >= self._rows + self._max_queue:
            raise Unavailable(f"the queue is full: {self._max_queue} requests are waiting", hint="try again later")

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
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self.sequences)

    def cancelled_and_overdue(self) -> list[Sequence]:
        """List the sequences that were cancelled, or are past their deadlines."""
        now = self._clock()
        return [each for each in self.sequences if each.cancelled or each.is_overdue(now)]
