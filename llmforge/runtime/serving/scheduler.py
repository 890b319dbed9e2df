"""Continuous batching: requests join and leave a running batch between steps. No threads, no clock of its own.

A slot is one row of the preallocated cache; an answer keeps it from its first token to its last. One step

1. ends what was cancelled or is past its deadline, and gives free slots to those that wait longest;
2. decodes: one token for every slot whose prompt is read, in one run over the rows `0 … n - 1` of the cache. Answers
   with guesses at their next tokens (`llmforge.runtime.serving.speculation`) run alone instead, and may get several;
3. reads prompts, oldest first, in pieces, behind what the prefix cache has of them.

**Neither starves the other.** Every step gives every decoding slot a token, and reads at least one piece of the oldest
unread prompt; more pieces only as long as the step stays within `step_tokens`. So a step runs at most `step_tokens`
tokens besides those that decode, which bounds the time between two tokens of an answer; and once its turn has come, a
prompt of `L` tokens is read within `ceil(L / chunk)` steps, whatever decodes beside it.

**Nobody's tokens depend on neighbours.** Pieces end at multiples of `chunk` tokens counted from the start of the text,
wherever they begin and whatever else the step runs, and each answer draws from a random stream of its own. What is left
are kernels whose sums differ in the last bits with the shape of a step: those for few tokens and those for many. What
is read behind a cached prefix has many tokens where it would have many without (`Scheduler._resume`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Generic

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from llmforge.base.errors import ForgeError, Unavailable, UsageError
from llmforge.runtime.backends.config import RuntimeConfig
from llmforge.runtime.backends.interface import Backend, C
from llmforge.runtime.sampling.sampler import Choosers
from llmforge.runtime.serving.prefix_cache import BLOCK, PrefixCache
from llmforge.runtime.serving.request import Chunk, Receiver, Request, check_tokens
from llmforge.runtime.serving.sequence import Answer, NoText, StoppedText
from llmforge.runtime.serving.speculation import Speculation
from llmforge.runtime.serving.stats import EngineStats

logger = logging.getLogger(__name__)

# Tokens of a prompt that run at once. It bounds the memory of activations and of the attention scores.
PREFILL_CHUNK = 512
# Tokens whose keys and values are copied in about the time that one more row costs a decode step: a row of a model of
# 0.6 B takes some 5 ms of one core, in which it copies 15 MB, which are 64 tokens in fp32 (28 layers, 8 heads of 128).
_TOKENS_A_ROW = 64


class Scheduler(Generic[C]):
    """Answers requests in the slots of one cache. One thread may call it at a time; nothing runs between calls.

    Args:
        backend: the decoder.
        cache: a row is a slot; the capacity bounds prompt and answer together.
        config: vocabulary and end-of-sequence tokens.
        tokenizer: makes the text of chunks; None: chunks have no text, one of them the end-of-sequence token, and stop
            strings are refused.
        choosers: start the choice of tokens of each answer.
        max_queue: requests that may wait while all slots are taken.
        step_tokens: budget of one step, in tokens.
        chunk: longest piece of a prompt that runs at once, in tokens; never longer than `step_tokens` or the backend's
            `longest_step`.
        prefix_cache_bytes: memory for what was read and written, to serve later requests; 0: nothing is kept.
        speculation: guesses tokens; None: none are guessed.
        clock: seconds, from any origin.

    A decoder whose tokens cannot be used again or taken back (`Backend.reuse_obstacle`) goes without prefix cache and
    speculation, and `EngineStats.notes` says so.

    Raises:
        UsageError: `prefix_cache_bytes` has no room for one block.
    """

    def __init__(
        self,
        backend: Backend[C],
        cache: C,
        config: RuntimeConfig,
        tokenizer: Tokenizer | None,
        choosers: Choosers,
        *,
        max_queue: int,
        step_tokens: int,
        chunk: int = PREFILL_CHUNK,
        prefix_cache_bytes: int = 0,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._config = config
        self._tokenizer = tokenizer
        self._choosers = choosers
        self._max_queue = max_queue
        self._step_tokens = step_tokens
        self._chunk = min(chunk, step_tokens, backend.longest_step or chunk)
        self._clock = clock
        obstacle = backend.reuse_obstacle
        asked = {"prefix cache": prefix_cache_bytes, "speculation": speculation}
        without = tuple(f"no {name}: {obstacle}" for name, value in asked.items() if value and obstacle)
        self._notes = (*backend.notes, *without)
        keeps = prefix_cache_bytes > 0 and not obstacle
        self._prefixes = PrefixCache(backend, prefix_cache_bytes) if keeps else None
        self._speculation = None if obstacle else speculation
        self._waiting: deque[Answer] = deque()
        self._slots: list[Answer | None] = [None] * cache.batch
        self._answers: dict[Answer, None] = {}  # those that wait or have a slot, in order of arrival
        self._tokens = np.zeros((cache.batch, 1), np.int64)
        self._past = np.zeros(cache.batch, np.int32)
        self._real = np.zeros(cache.batch, np.int32)
        logits = backend.logits_array((cache.batch, 1, backend.vocabulary))
        self._logits = [logits[: n + 1] for n in range(cache.batch)]  # equal steps hand the backend one object
        most = 0 if self._speculation is None else self._speculation.most
        judged = backend.logits_array((1, most + 1, backend.vocabulary))
        self._judged = [judged[:, : k + 1] for k in range(most + 1)]  # by guesses
        self._idle_rows = 0
        self._totals: Counter[str] = Counter()
        self._decode_s = self._judge_s = 0.0
        self._steps: Counter[int] = Counter()
        self._finished: Counter[str] = Counter()

    # Requests

    def prepare(self, request: Request, receive: Receiver, submitted: float | None = None) -> Answer:
        """Make what `enqueue` takes; any thread may do it. `submitted`: when, by the clock; None: now.

        Raises:
            UsageError: the prompt is empty, too long or has unknown tokens; or stop strings, and there is no tokenizer.
            UsageError, UnsupportedError, EnvironmentLacks: as `Choosers.start` does.
        """
        check_tokens(request.prompt, self._cache.capacity - 1, self._config.vocabulary)
        if self._tokenizer is None and request.sampling.stop:
            raise UsageError("a batch of token ids has no text that stop strings could be found in")
        room = self._cache.capacity - len(request.prompt)
        return Answer(
            request,
            receive,
            submitted=self._clock() if submitted is None else submitted,
            limit=min(request.sampling.max_tokens or room, room),
            text=NoText() if self._tokenizer is None else StoppedText(self._tokenizer, request.sampling),
            chooser=self._choosers.start(request.sampling, request.prompt),
        )

    def check_room(self, arriving: int = 0) -> None:
        """Return if one more request may be queued besides `arriving` others; any thread may ask.

        Raises:
            Unavailable: the slots are taken and the queue is full.
        """
        if len(self._answers) + arriving >= self._cache.batch + self._max_queue:
            raise Unavailable(f"the queue is full: {self._max_queue} requests wait", hint="try again later")

    def enqueue(self, answer: Answer) -> None:
        """Queue an answer; its receiver gets chunks during steps."""
        self._answers[answer] = None
        self._waiting.append(answer)

    def add(self, request: Request, receive: Receiver, submitted: float | None = None) -> Answer:
        """Prepare and queue a request: raises what `prepare` and `check_room` raise."""
        answer = self.prepare(request, receive, submitted)
        self.check_room()
        self.enqueue(answer)
        return answer

    def cancel_all(self) -> None:
        """Let every answer end with "cancelled" at the next step, as `cancelled = True` does for one."""
        for answer in self._answers:
            answer.cancelled = True

    def fail(self, error: ForgeError) -> None:
        """Hand `error` to every request that runs or waits, and forget them."""
        for answer in list(self._answers):
            self._drop(answer, "error")
            self._hand(answer, error)

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._answers)

    def stats(self) -> EngineStats:
        """Sum up what was done and what is going on."""
        running = [answer for answer in self._slots if answer is not None]
        totals, kept = self._totals, self._prefixes
        return EngineStats(
            running=len(running),
            waiting=len(self._waiting),
            slots=self._cache.batch,
            kv_tokens_used=sum(answer.held for answer in running),
            kv_tokens_capacity=self._cache.batch * self._cache.capacity,
            prefix_tokens_used=0 if kept is None else len(kept) * BLOCK,
            prefix_tokens_capacity=0 if kept is None else kept.capacity * BLOCK,
            prompt_tokens=totals["prompt"],
            prefill_tokens=totals["prefill"],
            output_tokens=totals["output"],
            prefix_query_tokens=totals["query"],
            prefix_hit_tokens=totals["hit"],
            drafted_tokens=totals["drafted"],
            accepted_tokens=totals["accepted"],
            decode_s=self._decode_s,
            decode_tokens=totals["decode"],
            judge_s=self._judge_s,
            judge_tokens=totals["judge"],
            steps=dict(self._steps),
            finished=dict(self._finished),
            notes=self._notes,
        )

    # Steps

    def step(self) -> bool:
        """Do one step; return whether there was anything to run."""
        self._end_the_overdue()
        self._admit()
        self._close_gap()
        decoded = self._decode()
        return self._read(decoded) + decoded > 0

    def _end_the_overdue(self) -> None:
        now = self._clock()
        for answer in list(self._answers):
            if answer.cancelled:
                self._finish(answer, "cancelled")
            elif answer.overdue(now):
                self._finish(answer, "timeout")

    def _admit(self) -> None:
        for slot, taken in enumerate(self._slots):
            if taken is None and self._waiting:
                answer = self._waiting.popleft()
                answer.slot = slot
                self._slots[slot] = answer

    def _close_gap(self) -> None:
        """Move the answer in the last slot to a free one in front of it, once free rows have cost more than that would.

        So the two together cost at most twice the less of them, whichever that turns out to be.
        """
        last = max((slot for slot, answer in enumerate(self._slots) if answer is not None), default=0)
        gap, answer = self._slots.index(None) if None in self._slots else last, self._slots[last]
        if answer is None or gap >= last:
            self._idle_rows = 0
        elif self._idle_rows * _TOKENS_A_ROW >= answer.held:
            self._cache.copy(gap, 0, self._cache, last, 0, answer.held)
            answer.slot, self._slots[gap], self._slots[last] = gap, answer, None
            self._idle_rows = 0

    def _decode(self) -> int:
        """Give every slot whose prompt is read its next token, or several; return how many tokens ran for that."""
        decoding = [answer for answer in self._slots if answer is not None and answer.decoding]
        together, ran = [], 0
        for answer in decoding:
            start = self._clock()
            guesses = self._guess(answer, len(decoding))
            if guesses:
                self._judge(answer, guesses, start)
                ran += 1 + len(guesses)
            else:
                together.append(answer)
        if together:
            self._decode_together(together)
        return ran + len(together)

    def _decode_together(self, answers: Sequence[Answer]) -> None:
        """Run one token of each of `answers`, which are in the order of their slots."""
        start = self._clock()
        n = self._bucket(1 + max(answer.slot for answer in answers if answer.slot is not None))
        for row, taken in enumerate(self._slots[:n]):
            # A row that does not decode runs, too, and its logits are not read. What it writes lands behind the tokens
            # that it holds, where its next token will overwrite it.
            self._past[row] = 0 if taken is None else taken.held
            self._idle_rows += taken is None
        self._real[:n] = self._tokens[:n] = 0
        for answer in answers:
            self._real[answer.slot], self._tokens[answer.slot] = 1, answer.context[-1]
        logits, view = self._logits[n - 1], self._cache.rows(0, n)
        self._backend.step(self._tokens[:n], self._past[:n], view, out=logits, lengths=self._real[:n])
        for answer in answers:
            slot = answer.slot
            assert slot is not None
            answer.held += 1
            self._keep(answer, slot)
            self._choose(answer, logits[slot, 0])
        seconds = self._clock() - start
        self._steps[n] += 1
        self._totals["decode"] += len(answers)
        self._decode_s += seconds
        if self._speculation is not None:
            self._speculation.payoff.decoded(len(answers), seconds)

    def _bucket(self, rows: int) -> int:
        buckets = self._backend.buckets or ()
        return min((size for size in buckets if rows <= size <= self._cache.batch), default=rows)

    def _guess(self, answer: Answer, rows: int) -> list[int]:
        if self._speculation is None:
            return []
        return self._speculation.propose(answer, answer.context, answer.left - 1, rows)

    def _judge(self, answer: Answer, guesses: Sequence[int], start: float) -> None:
        """Run the last token of `answer` and `guesses`, and take tokens for as long as they are those guessed."""
        slot, k = answer.slot, len(guesses)
        assert slot is not None
        assert self._speculation is not None
        ids, past = np.array([[answer.context[-1], *guesses]], np.int64), np.array([answer.held], np.int32)
        view = self._cache.rows(slot, slot + 1)
        (logits,) = self._backend.step(ids, past, view, np.arange(k + 1), out=self._judged[k])
        answer.drafted += k
        self._totals["drafted"] += k
        tokens = 0
        for row, guess in zip(logits, [*guesses, None], strict=True):
            answer.held += 1
            right = self._choose(answer, row, guess)
            tokens += 1
            if not right:
                break
        self._keep(answer, slot)
        seconds = self._clock() - start
        self._totals["judge"] += tokens
        self._judge_s += seconds
        self._speculation.payoff.judged(answer, k, tokens, seconds)
        if answer not in self._answers:
            self._speculation.forget(answer)

    def _read(self, spent: int) -> int:
        """Read pieces of prompts, oldest first, until the step's budget is spent; return how many tokens."""
        read = 0
        for answer in [a for a in self._answers if a.slot is not None and not a.decoding]:
            if answer.started is None:
                self._begin(answer)
            while not answer.decoding and answer in self._answers:
                end = min(answer.prompt_tokens, (answer.held // self._chunk + 1) * self._chunk)
                if read and spent + read + end - answer.held > self._step_tokens:
                    return read
                read += end - answer.held
                self._read_piece(answer, end)
        return read

    def _begin(self, answer: Answer) -> None:
        """Take up the prompt of `answer`, behind what the prefix cache has of it."""
        slot, tokens = answer.slot, answer.prompt_tokens
        assert slot is not None
        answer.started = self._clock()
        self._totals["prompt"] += tokens
        if self._prefixes is not None:
            answer.held = answer.cached = self._resume(self._prefixes.find(answer.context), tokens)
            self._prefixes.load(answer.context[: answer.cached], self._cache, slot)
            answer.kept = answer.cached // BLOCK
            self._totals["query"] += tokens
            self._totals["hit"] += answer.cached

    def _resume(self, kept: int, tokens: int) -> int:
        """Say where the reading of a prompt of `tokens` begins, of which the first `kept` are in the prefix cache.

        At the last block's end from which the rest of a piece gives the bits that it gives in the whole piece: with as
        many tokens as that takes, or as the whole piece has. The last token is always read.
        """
        for start in range(min(kept, (tokens - 1) // BLOCK * BLOCK), 0, -BLOCK):
            begin = start // self._chunk * self._chunk
            end = min(begin + self._chunk, tokens)
            if end - start >= min(end - begin, self._backend.steady_from):
                return start
        return 0

    def _read_piece(self, answer: Answer, end: int) -> None:
        slot, start, logits = answer.slot, answer.held, self._logits[0]
        assert slot is not None
        self._backend.step(
            np.array([answer.context[start:end]], np.int64),
            np.array([start], np.int32),
            self._cache.rows(slot, slot + 1),
            out=logits,
            text_lengths=np.array([answer.prompt_tokens]),
        )
        self._totals["prefill"] += end - start
        answer.held = end
        self._keep(answer, slot)
        if end == answer.prompt_tokens:
            self._choose(answer, logits[0, 0])

    def _keep(self, answer: Answer, slot: int) -> None:
        """Give the blocks that `answer` has completed in `slot` to the prefix cache."""
        if self._prefixes is not None and not answer.failed and answer.held // BLOCK > answer.kept:
            self._prefixes.store(answer.context[: answer.held], self._cache, slot)
            answer.kept = answer.held // BLOCK

    # Answers

    def _choose(self, answer: Answer, logits: NDArray[np.float32], guess: int | None = None) -> bool:
        """Choose the next token of `answer` from `logits` [V] and hand it over; the last one ends the answer.

        Return whether the token is `guess`, and more may follow.
        """
        try:
            token, logprob = answer.chooser.choose(logits)
        except ForgeError as error:
            answer.failed = True
            if self._prefixes is not None:  # whatever was wrong with this text, it must not spread to others
                self._prefixes.forget(answer.context)
            self._drop(answer, "error")
            self._hand(answer, error)
            return False
        answer.context.append(token)
        answer.times.append(self._clock())
        self._totals["output"] += 1
        if token == guess:
            answer.accepted += 1
            self._totals["accepted"] += 1
        if answer.chooser.ends(token):
            if self._tokenizer is None:  # who reads tokens wants this one, too
                self._hand(answer, Chunk("", token, logprob=logprob))
            self._finish(answer, "stop")
        elif not self._hand(answer, Chunk(answer.text.push(token), token, logprob=logprob)):
            self._drop(answer, "error")
        elif answer.text.stopped:
            self._finish(answer, "stop")
        elif answer.left == 0:
            self._finish(answer, "length")
        else:
            return token == guess
        return False

    def _finish(self, answer: Answer, reason: str) -> None:
        rest = answer.text.flush()
        if reason == "length" and answer.text.stopped:  # the text that was held back completes a stop string
            reason = "stop"
        self._drop(answer, reason)
        self._hand(answer, Chunk(rest, None, reason, answer.usage(self._clock())))

    def _hand(self, answer: Answer, item: Chunk | ForgeError) -> bool:
        """Hand `item` to the receiver of `answer`; a receiver that raises loses its own answer and nobody else's."""
        try:
            answer.receive(item)
        except Exception:
            logger.exception("the receiver of an answer failed; the answer is dropped")
            return False
        return True

    def _drop(self, answer: Answer, reason: str) -> None:
        del self._answers[answer]
        self._finished[reason] += 1
        if self._speculation is not None:
            self._speculation.forget(answer)
        if answer.slot is None:
            self._waiting.remove(answer)
        else:
            self._slots[answer.slot] = None
