"""Continuous batching: requests join and leave a running batch between steps. No threads, no clock of its own.

A slot is one row of the preallocated cache; an answer keeps its slot from its first token to its last. One step

1. ends what was cancelled, or is past its deadline, and gives free slots to those that wait longest;
2. decodes: one token for every slot whose prompt is read, all in one run over the rows `0 … n - 1` of the cache;
3. reads prompts, oldest first, in pieces.

**Neither starves the other.** Every step gives every decoding slot its token, and reads at least one piece of the
oldest unread prompt; more pieces only as long as the step stays within `step_tokens`. So a step runs at most
`slots + max(step_tokens, chunk)` tokens, which bounds the time between two tokens of an answer, and a prompt of `L`
tokens is read `ceil(L / chunk)` steps after its turn comes, whatever decodes beside it.

**Nobody's tokens depend on neighbours.** Pieces end at multiples of `chunk` tokens counted from the start of the text,
wherever they begin and whatever the step's budget is, and each answer draws from a random stream of its own.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from llmforge.errors import ForgeError, InputError, Unavailable, UsageError
from llmforge.runtime.config import RuntimeConfig
from llmforge.runtime.detokenize import Detokenizer, StopStrings
from llmforge.runtime.request import Chunk, Receiver, Request, Usage
from llmforge.runtime.sampling import Sampler
from llmforge.runtime.session import Cache, Session

logger = logging.getLogger(__name__)

# Tokens of a prompt that run at once. It bounds the memory of activations and of the attention scores.
PREFILL_CHUNK = 512


class Ticket:
    """Stands for one request, from the moment it is taken on."""


@dataclass(frozen=True)
class EngineStats:
    """Figures of an engine: what it does now, and totals since it started."""

    running: int
    waiting: int
    slots: int
    kv_tokens_used: int  # tokens that running answers hold in the cache
    kv_tokens_capacity: int
    prompt_tokens: int  # of requests whose prompt was taken up
    output_tokens: int
    prefill_tokens: int  # that ran through the model; prompt tokens less those found in the prefix cache
    prefix_query_tokens: int
    prefix_hit_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    steps: Mapping[int, int]  # decode steps by their number of rows
    finished: Mapping[str, int]  # answers by finish reason; "error" for those that failed


class Scheduler:
    """Answers requests in the slots of one cache. One thread may call it at a time; nothing runs between calls.

    Args:
        session: the decoder.
        cache: a row is a slot; the capacity bounds prompt and answer together.
        config: vocabulary and end-of-sequence tokens.
        tokenizer: makes the text of chunks; None: chunks have no text, one of them the end-of-sequence token, and stop
            strings are refused.
        max_queue: requests that may wait for a slot.
        step_tokens: budget of one step, in tokens.
        chunk: longest piece of a prompt that runs at once, in tokens.
        clock: seconds, from any origin.
    """

    def __init__(
        self,
        session: Session,
        cache: Cache,
        config: RuntimeConfig,
        tokenizer: Tokenizer | None,
        *,
        max_queue: int,
        step_tokens: int,
        chunk: int = PREFILL_CHUNK,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._session = session
        self._cache = cache
        self._config = config
        self._tokenizer = tokenizer
        self._max_queue = max_queue
        self._step_tokens = step_tokens
        self._chunk = min(chunk, step_tokens)
        self._clock = clock
        self._waiting: deque[_Answer] = deque()
        self._slots: list[_Answer | None] = [None] * cache.batch
        self._answers: dict[Ticket, _Answer] = {}
        self._tokens = np.zeros((cache.batch, 1), np.int64)
        self._past = np.zeros(cache.batch, np.int32)
        self._real = np.zeros(cache.batch, np.int32)
        logits = np.empty((cache.batch, 1, session.vocabulary), np.float32)
        self._logits = [logits[: n + 1] for n in range(cache.batch)]  # equal calls hand the session one object
        self._totals: Counter[str] = Counter()
        self._steps: Counter[int] = Counter()
        self._finished: Counter[str] = Counter()

    def check(self, request: Request) -> None:
        """Return if `request` can be answered.

        Raises:
            UsageError: the prompt is empty, too long or has unknown tokens; or stop strings, and there is no tokenizer.
        """
        check_tokens(request.prompt, self._cache.capacity - 1, self._config)
        if self._tokenizer is None and request.sampling.stop:
            raise UsageError("a batch of token ids has no text that stop strings could be found in")

    @property
    def places(self) -> int:
        """Requests that may still be added: free slots and free places of the queue."""
        return self._cache.batch + self._max_queue - len(self._answers)

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._answers)

    def add(
        self, request: Request, receive: Receiver, *, ticket: Ticket | None = None, submitted: float | None = None
    ) -> Ticket:
        """Queue a request; `receive` gets its chunks during steps. `submitted`: when, by the clock; None: now.

        Raises:
            UsageError: the request makes no sense.
            Unavailable: the queue is full.
        """
        self.check(request)
        if self.places == 0:
            raise queue_full(self._max_queue)
        ticket = ticket or Ticket()
        room = self._cache.capacity - len(request.prompt)
        answer = _Answer(
            ticket,
            request,
            receive,
            submitted=self._clock() if submitted is None else submitted,
            limit=min(request.sampling.max_tokens or room, room),
            text=_NoText() if self._tokenizer is None else _Text(self._tokenizer, request.sampling.stop),
        )
        self._answers[ticket] = answer
        self._waiting.append(answer)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Let the answer end with "cancelled" at the next step; nothing happens where it has ended."""
        if ticket in self._answers:
            self._answers[ticket].cancelled = True

    def cancel_all(self) -> None:
        """Let every answer end with "cancelled" at the next step."""
        for answer in self._answers.values():
            answer.cancelled = True

    def fail(self, error: ForgeError) -> None:
        """Hand `error` to every request that runs or waits, and forget them."""
        for answer in list(self._answers.values()):
            self._drop(answer, "error")
            self._hand(answer, error)

    def step(self) -> bool:
        """Do one step; return whether there was anything to run."""
        self._end_the_overdue()
        self._admit()
        decoded = self._decode()
        return self._read(decoded) + decoded > 0

    def stats(self) -> EngineStats:
        """Sum up what was done and what is going on."""
        running = [answer for answer in self._slots if answer is not None]
        return EngineStats(
            running=len(running),
            waiting=len(self._waiting),
            slots=self._cache.batch,
            kv_tokens_used=sum(answer.held for answer in running),
            kv_tokens_capacity=self._cache.batch * self._cache.capacity,
            prompt_tokens=self._totals["prompt"],
            output_tokens=self._totals["output"],
            prefill_tokens=self._totals["prefill"],
            prefix_query_tokens=self._totals["prefix query"],
            prefix_hit_tokens=self._totals["prefix hit"],
            drafted_tokens=self._totals["drafted"],
            accepted_tokens=self._totals["accepted"],
            steps=dict(self._steps),
            finished=dict(self._finished),
        )

    def _end_the_overdue(self) -> None:
        now = self._clock()
        for answer in list(self._answers.values()):
            if answer.cancelled:
                self._finish(answer, "cancelled")
            elif answer.deadline is not None and now >= answer.deadline:
                self._finish(answer, "timeout")

    def _admit(self) -> None:
        for slot, taken in enumerate(self._slots):
            if taken is None and self._waiting:
                answer = self._waiting.popleft()
                answer.slot = slot
                self._slots[slot] = answer

    def _decode(self) -> int:
        """Give every slot whose prompt is read its next token; return how many."""
        rows = [slot for slot, answer in enumerate(self._slots) if answer is not None and answer.decoding]
        if not rows:
            return 0
        n = rows[-1] + 1
        for slot, answer in enumerate(self._slots[:n]):
            # A row between others that does not decode runs, too, and its answer is not read. What it writes lands
            # behind the tokens that it holds, where its next token will overwrite it.
            self._past[slot] = 0 if answer is None else answer.held
            self._real[slot] = answer is not None and answer.decoding
            self._tokens[slot] = answer.tokens[-1] if answer is not None and answer.decoding else 0
        logits = self._logits[n - 1]
        view = self._cache.rows(0, n)
        self._session.step(self._tokens[:n], self._past[:n], view, out=logits, lengths=self._real[:n])
        self._steps[n] += 1
        for slot in rows:
            answer = self._slots[slot]
            assert answer is not None
            answer.held += 1
            self._choose(answer, logits[slot])
        return len(rows)

    def _read(self, spent: int) -> int:
        """Read pieces of prompts, oldest first, until the step's budget is spent; return how many tokens."""
        read = 0
        unread = (answer for answer in self._answers.values() if answer.slot is not None and not answer.decoding)
        for answer in list(unread):
            while not answer.ended and not answer.decoding:
                end = min(len(answer.request.prompt), (answer.held // self._chunk + 1) * self._chunk)
                if read and spent + read + end - answer.held > self._step_tokens:
                    return read
                read += end - answer.held
                self._read_piece(answer, end)
        return read

    def _read_piece(self, answer: _Answer, end: int) -> None:
        slot, prompt, start = answer.slot, answer.request.prompt, answer.held
        assert slot is not None
        if answer.started is None:
            answer.started = self._clock()
            self._totals["prompt"] += len(prompt)
        logits = self._logits[0]
        self._session.step(
            np.array([prompt[start:end]], np.int64),
            np.array([start], np.int32),
            self._cache.rows(slot, slot + 1),
            out=logits,
            text_lengths=np.array([len(prompt)]),
        )
        self._totals["prefill"] += end - start
        answer.held = end
        if end == len(prompt):
            self._choose(answer, logits[0])

    def _choose(self, answer: _Answer, logits: NDArray[np.float32]) -> None:
        """Choose the next token of `answer` from `logits` [1, V] and hand it over; the last one ends the answer."""
        try:
            (token,) = answer.sampler.choose(logits, [0])
        except InputError as error:
            self._drop(answer, "error")
            self._hand(answer, error)
            return
        answer.tokens.append(token)
        answer.times.append(self._clock())
        self._totals["output"] += 1
        if token in self._config.eos_token_ids and not answer.request.sampling.ignore_eos:
            if self._tokenizer is None:  # who reads tokens wants this one, too
                self._hand(answer, Chunk("", token))
            self._finish(answer, "stop")
            return
        if not self._hand(answer, Chunk(answer.text.push(token), token)):
            self._drop(answer, "error")
        elif answer.text.stopped:
            self._finish(answer, "stop")
        elif len(answer.tokens) == answer.limit:
            self._finish(answer, "length")

    def _finish(self, answer: _Answer, reason: str) -> None:
        self._drop(answer, reason)
        self._hand(answer, Chunk(answer.text.flush(), None, reason, answer.usage(self._clock())))

    def _hand(self, answer: _Answer, item: Chunk | ForgeError) -> bool:
        """Hand `item` to the receiver of `answer`; a receiver that raises loses its own answer and nobody else's."""
        try:
            answer.receive(item)
        except Exception:
            logger.exception("the receiver of an answer failed; the answer is dropped")
            return False
        return True

    def _drop(self, answer: _Answer, reason: str) -> None:
        del self._answers[answer.ticket]
        answer.ended = True
        self._finished[reason] += 1
        if answer.slot is None:
            self._waiting.remove(answer)
        else:
            self._slots[answer.slot] = None


class _NoText:
    """Stands for the text of an answer that nobody reads as text."""

    stopped = False

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class _Text(_NoText):
    """The text of one answer, up to its first stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._detokenizer, self._stops = Detokenizer(tokenizer), StopStrings(stop)

    def push(self, token: int) -> str:
        text = self._stops.push(self._detokenizer.push(token))
        self.stopped = self._stops.found
        return text

    def flush(self) -> str:
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()


@dataclass(eq=False)
class _Answer:
    """A request on its way. It waits until it has a slot, reads until it has a token, decodes until it has ended."""

    ticket: Ticket
    request: Request
    receive: Receiver
    submitted: float
    limit: int  # tokens that may be chosen
    text: _NoText
    slot: int | None = None
    held: int = 0  # tokens in the cache
    tokens: list[int] = field(default_factory=list)  # chosen; the last one is not in the cache yet
    times: list[float] = field(default_factory=list)  # when each was chosen
    started: float | None = None  # when its prompt was first read
    cancelled: bool = False
    ended: bool = False

    def __post_init__(self) -> None:
        self.sampler = Sampler([self.request.sampling])

    @property
    def decoding(self) -> bool:
        return bool(self.tokens)

    @property
    def deadline(self) -> float | None:
        timeout_s = self.request.timeout_s
        return None if timeout_s is None else self.submitted + timeout_s

    def usage(self, now: float) -> Usage:
        times = self.times
        return Usage(
            prompt_tokens=len(self.request.prompt),
            output_tokens=len(times),
            ttft_ms=(times[0] - self.submitted) * 1e3 if times else None,
            tpot_ms=(times[-1] - times[0]) / (len(times) - 1) * 1e3 if len(times) > 1 else None,
            queue_ms=((now if self.started is None else self.started) - self.submitted) * 1e3,
        )


def queue_full(max_queue: int) -> Unavailable:
    """Make the error of a queue without a place."""
    return Unavailable(f"the queue is full: {max_queue} requests wait", hint="try again later")


def check_tokens(ids: Sequence[int], longest: int, config: RuntimeConfig) -> None:
    """Return if an artifact can read `ids`, of which it takes at most `longest`.

    Raises:
        UsageError: there are none, too many, or ids that the vocabulary has not.
    """
    if len(ids) == 0:
        raise UsageError("the prompt is empty", hint="give at least one token")
    if len(ids) > longest:
        raise UsageError(
            f"{len(ids)} tokens; this artifact takes at most {longest} (max_context {config.max_context})",
            hint="shorten the prompt, or build with a larger engine.max_context",
        )
    if min(ids) < 0 or max(ids) >= config.vocabulary:
        wrong = next(token for token in ids if not 0 <= token < config.vocabulary)
        raise UsageError(f"token id {wrong}; the vocabulary has {config.vocabulary}")
