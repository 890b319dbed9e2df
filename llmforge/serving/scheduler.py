"""Continuous batching: requests join and leave a running batch between steps. No threads, no clock of its own.

A slot is one row of the preallocated cache; a sequence keeps it from its first token to its last. One step

1. ends what was cancelled or is past its deadline, and gives free slots to those that wait longest;
2. decodes: one token for every slot whose prompt is read, in one run over the rows `0 … n - 1` of the cache. Sequences
   with a draft of their next tokens (`llmforge.serving.speculation`) run alone instead, and may get several;
3. prefills prompts, oldest first, in chunks, behind what the prefix cache has of them. Where the decoder reads several
   at once (`Decoder.prompt_shapes`), chunks of neighbouring slots run as rows of one step, padded to one of its shapes.

**One step ahead.** Where a device guesses the tokens of a decode step, the next one begins on them before the host has
chosen them, while nothing else is to be done. The host's choice is what counts: a row that was guessed wrong has run
for nothing, and runs again, at the same place, in the step behind. So guesses change no token.

**Neither starves the other.** Every step gives every decoding slot a token, and reads at least one chunk of the oldest
unread prompt; more chunks only as long as the step stays within `step_tokens`. So a step runs at most `step_tokens`
tokens besides those that decode, which bounds the time between two tokens of a sequence; and once its turn has come, a
prompt of `L` tokens is read within `ceil(L / chunk)` steps, whatever decodes beside it.

**Nobody's tokens depend on neighbours.** Chunks end at multiples of `chunk` tokens counted from the start of the text,
wherever they begin and whatever else the step runs; each row takes the adapter of its own sequence, which has random
numbers of its own. What is left are kernels whose sums differ in the last bits with the shape of a step: those for few
tokens and those for many, and, where the decoder pads steps, those for one row and for several. What is read behind a
cached prefix has many tokens where it would have many without (`Scheduler._reusable_tokens`).
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import ForgeError, Unavailable, UsageError
from llmforge.ir.interface import GREEDY, TopLogits
from llmforge.runtime.interface import C, Decoder, DecodeRun, StepInputs
from llmforge.runtime.prefill_shapes import PREFILL_CHUNK
from llmforge.runtime.sampling.sampler import SampledToken, Samplers, guesses, sample_heads
from llmforge.serving import prompt_batching
from llmforge.serving.options import EngineOptions
from llmforge.serving.prefix_cache import BLOCK, PrefixCache
from llmforge.serving.request import Chunk, Receiver, Request, adapter_number, check_tokens
from llmforge.serving.sequence import NoText, OutputText, Sequence
from llmforge.serving.speculation import Speculation
from llmforge.serving.stats import EngineStats

logger = logging.getLogger(__name__)

# Tokens whose keys and values are copied in about the time that one more row costs a decode step: a row of a model of
# 0.6 B takes some 5 ms of one core, in which it copies 15 MB, which are 64 tokens in fp32 (28 layers, 8 heads of 128).
_COPIED_TOKENS_PER_ROW = 64
# A step begins on the guesses of the one before it while they are as good as this, of the last ones, with weights that
# fall by an eighth a token: a wrong guess costs its row a step, and going ahead saves all rows the host's part of one.
_RIGHT, _RIGHT_OF_ONE, _WEIGHT = 15 / 16, 3 / 4, 1 / 8


@dataclass(eq=False)
class Decoding:
    """A decode step that a device runs: slots and their sequences, padded to `size` rows.

    Of those in `wrong`, it runs another token than the one that was chosen: what it gives them is nobody's.
    """

    run: DecodeRun
    rows: list[tuple[int, Sequence]]
    size: int
    wrong: set[Sequence] = field(default_factory=set)


class Scheduler(Generic[C]):
    """Runs sequences in the slots of one cache. One thread may call it at a time; nothing runs between calls.

    Args:
        backend: the decoder.
        cache: a row is a slot; the capacity bounds prompt and output together.
        samplers: make the sampler of each sequence, and know the tokenizer.
        options: of these, `max_queue`, `step_tokens` and `prefix_cache_bytes`.
        speculation: drafts tokens; None: none are drafted.
        chunk: longest piece of a prompt that runs at once, in tokens; never longer than `step_tokens` or the backend's
            `longest_step`.
        clock: seconds, from any origin.
        adapters: names of those that requests choose from; the first is number 1.

    A decoder whose tokens cannot be used again or taken back (`no_reuse_reason`) goes without prefix cache and
    speculation, and `EngineStats.notes` says so.

    Raises:
        UsageError: `prefix_cache_bytes` has no room for one block.
    """

    def __init__(
        self,
        backend: Decoder[C],
        cache: C,
        samplers: Samplers,
        options: EngineOptions,
        *,
        speculation: Speculation | None = None,
        chunk: int = PREFILL_CHUNK,
        clock: Callable[[], float] = time.perf_counter,
        adapters: tuple[str, ...] = (),
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._samplers = samplers
        self._options = options
        self._chunk = min(chunk, options.step_tokens, backend.longest_step or chunk)
        self._clock = clock
        self._adapters = adapters
        reason = backend.signature.no_reuse_reason
        asked = {"prefix cache": options.prefix_cache_bytes, "speculation": speculation}
        without = tuple(f"no {name}: {reason}" for name, value in asked.items() if value and reason)
        self._notes = (*backend.notes, *samplers.notes, *without)
        has_prefix_cache = options.prefix_cache_bytes > 0 and not reason
        self._prefix_cache = self._make_prefix_cache(options.prefix_cache_bytes) if has_prefix_cache else None
        self._speculation = None if reason else speculation
        self._waiting: deque[Sequence] = deque()
        self._slots: list[Sequence | None] = [None] * cache.batch
        self._sequences: dict[Sequence, None] = {}  # those that wait or have a slot, in order of arrival
        self._input_ids = np.zeros((cache.batch, 1), np.int64)
        self._past_lengths = np.zeros(cache.batch, np.int32)
        self._adapter_ids = np.zeros(cache.batch, np.int64)
        self._lengths = np.zeros(cache.batch, np.int32)
        self._temperatures = np.ones(cache.batch, np.float32)
        self._draws = np.zeros((cache.batch, len(GREEDY)), np.float32)
        self._guesses = backend.decodes_ahead and backend.guesses_tokens and not backend.signature.states
        self._ahead: Decoding | None = None  # begun on the guesses of the step before, whose tokens are all taken
        # Where a device gives heads, rows are fetched one at a time, and a prompt's last is all that is read whole.
        rows = 1 if backend.decodes_ahead else cache.batch
        logits = backend.logits_array((rows, 1, backend.vocabulary))
        self._logits = [logits[: n + 1] for n in range(rows)]  # equal steps hand the backend one object
        prompts = 0 if backend.decodes_ahead else max((rows for rows, _ in backend.prompt_shapes), default=0)
        self._prompt_logits = backend.logits_array((prompts, 1, backend.vocabulary))
        most = 0 if self._speculation is None else self._speculation.max_tokens
        verified = backend.logits_array((1, most + 1, backend.vocabulary))
        self._verify_logits = [verified[:, : k + 1] for k in range(most + 1)]  # by drafted tokens
        self._undelivered: list[tuple[Sequence, SampledToken]] = []  # of the decode step before, in order
        self._idle_rows = 0
        self._totals: Counter[str] = Counter()  # of tokens, by the names of `EngineStats`
        self._decode_s = self._verify_s = 0.0
        self._steps: Counter[int] = Counter()
        self._finished: Counter[str] = Counter()

    # Requests

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
            text=self._text_of(request),
            adapter=adapter_number(request.adapter, self._adapters),
            sampler=self._samplers.start(request.sampling, request.prompt),
        )

    def _text_of(self, request: Request) -> OutputText | NoText:
        if not request.detokenize:
            return NoText()
        return OutputText(self._samplers.tokenizer, request.sampling, request.special_tokens)

    def check_room(self, arriving: int = 0) -> None:
        """Return if one more request may be queued besides `arriving` others; any thread may ask.

        Raises:
            Unavailable: the slots are taken and the queue is full.
        """
        max_queue = self._options.max_queue
        if len(self._sequences) + arriving >= self._cache.batch + max_queue:
            raise Unavailable(f"the queue is full: {max_queue} requests are waiting", hint="try again later")

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a sequence; its receiver gets chunks during steps."""
        self._sequences[sequence] = None
        self._waiting.append(sequence)

    def add(self, request: Request, receive: Receiver, submitted: float | None = None) -> Sequence:
        """Prepare and queue a request: raises what `prepare` and `check_room` raise."""
        sequence = self.prepare(request, receive, submitted)
        self.check_room()
        self.enqueue(sequence)
        return sequence

    def cancel_all(self) -> None:
        """Let every sequence end with "cancelled" at the next step, as `cancelled = True` does for one."""
        for sequence in self._sequences:
            sequence.cancelled = True

    def fail(self, error: ForgeError) -> None:
        """Hand `error` to every request that runs or waits, and forget them."""
        self._undelivered.clear()
        self._ahead = None
        for sequence in list(self._sequences):
            self._remove(sequence, "error")
            self._deliver(sequence, error)

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._sequences)

    def _make_prefix_cache(self, wanted: int) -> PrefixCache[C] | None:
        """Make the prefix cache of `wanted` bytes, or of what the device has left, which is then noted."""
        spare = self._backend.spare_bytes
        if spare is None or spare >= wanted:
            return PrefixCache(self._backend, wanted)
        left = f"{spare / 1e9:.2f} GB are left on the device, and {wanted / 1e9:.2f} were asked for"
        try:
            made = PrefixCache(self._backend, spare)
        except UsageError:  # no room for one block
            self._notes += (f"no prefix cache: {left}",)
            return None
        self._notes += (f"a smaller prefix cache: {left}",)
        return made

    def stats(self) -> EngineStats:
        """Sum up what was done and what is going on."""
        running = [sequence for sequence in self._slots if sequence is not None]
        prefix_cache = self._prefix_cache
        return EngineStats(
            **self._totals,
            running=len(running),
            waiting=len(self._waiting),
            slots=self._cache.batch,
            kv_tokens_used=sum(sequence.computed_tokens for sequence in running),
            kv_tokens_capacity=self._cache.batch * self._cache.capacity,
            prefix_tokens_used=0 if prefix_cache is None else len(prefix_cache) * BLOCK,
            prefix_tokens_capacity=0 if prefix_cache is None else prefix_cache.capacity * BLOCK,
            decode_s=self._decode_s,
            verify_s=self._verify_s,
            steps=dict(self._steps),
            finished=dict(self._finished),
            notes=self._notes,
        )

    # Steps

    def step(self) -> bool:
        """Do one step; return whether there was anything to run."""
        self._end_cancelled_and_overdue()
        ran = self._run()
        if self._ahead is not None and not self._sequences:
            self._ahead.run.top_logits()  # nothing runs any more when nobody waits for it
            self._ahead = None
        return ran > 0

    def _run(self) -> int:
        """Give places to those that wait, and run those that have one; return how many tokens ran."""
        self._drop_ahead()
        self._admit()
        self._close_gap()
        decoded = self._decode()
        if self._undelivered and not self._only_decodes():
            self._deliver_tokens()
        return self._prefill(decoded) + decoded

    def _drop_ahead(self) -> None:
        """Forget a step that was begun ahead if nobody waits for any of its tokens."""
        if self._ahead is not None and not self._live(self._ahead):
            self._ahead.run.launched()
            self._ahead = None

    def _only_decodes(self) -> bool:
        """Whether nothing but a decode step of all that run comes next, which tokens may be delivered beside."""
        running = [each for each in self._slots if each is not None]
        return bool(running) and self._speculation is None and all(each.decoding for each in running)

    def _end_cancelled_and_overdue(self) -> None:
        now = self._clock()
        ends = [each for each in self._sequences if each.cancelled or each.is_overdue(now)]
        if ends:
            self._deliver_tokens()
        for sequence in ends:
            if sequence in self._sequences:
                self._finish(sequence, "cancelled" if sequence.cancelled else "timeout")

    def _admit(self) -> None:
        for slot, taken in enumerate(self._slots):
            if taken is None and self._waiting:
                sequence = self._waiting.popleft()
                sequence.slot = slot
                self._slots[slot] = sequence

    def _close_gap(self) -> None:
        """Move the sequence in the last slot to a free one before it, once idle rows have cost more than that would.

        So the two together cost at most twice the less of them, whichever that turns out to be. A row that a device
        still writes to stays where it is.
        """
        gap, last = self._gap()
        sequence = self._slots[last]
        if sequence is None or gap >= last:
            self._idle_rows = 0
        elif self._ahead is None and self._closes(sequence):
            self._cache.copy(gap, 0, self._cache, last, 0, sequence.computed_tokens)
            sequence.slot, self._slots[gap], self._slots[last] = gap, sequence, None
            self._idle_rows = 0

    def _gap(self) -> tuple[int, int]:
        """Give the first free slot and the last that is taken; where none is free before that, the last one twice."""
        last = max((slot for slot, sequence in enumerate(self._slots) if sequence is not None), default=0)
        return (self._slots.index(None) if None in self._slots else last), last

    def _closes(self, sequence: Sequence) -> bool:
        """Whether idle rows have cost more than moving `sequence` would."""
        return self._idle_rows * _COPIED_TOKENS_PER_ROW >= sequence.computed_tokens

    def _decode(self) -> int:
        """Give every slot whose prompt is read its next token, or several; return how many tokens ran for that."""
        decoding = [(slot, each) for slot, each in enumerate(self._slots) if each is not None and each.decoding]
        speculation = self._speculation
        if speculation is None:
            batch, ran = decoding, 0
        else:
            batch, ran = [], 0
            for slot, sequence in decoding:
                start = self._clock()
                draft = speculation.propose(sequence, sequence.tokens, sequence.remaining_tokens - 1, len(decoding))
                if draft:
                    self._verify(slot, sequence, draft, start, speculation)
                    ran += 1 + len(draft)
                else:
                    batch.append((slot, sequence))
        if batch:
            self._decode_batch(batch)
        return ran + len(batch)

    def _decode_batch(self, batch: list[tuple[int, Sequence]]) -> None:
        """Run one token of each sequence of `batch`, which are in the order of their slots."""
        start = self._clock()
        if self._backend.decodes_ahead:
            n, ran = self._decode_ahead(batch)
        else:
            n, ran = self._fill(batch), len(batch)
            logits, view = self._logits[n - 1], self._cache.rows(0, n)
            self._backend.step(
                StepInputs(
                    self._input_ids[:n],
                    self._past_lengths[:n],
                    lengths=self._lengths[:n],
                    adapters=self._adapter_ids[:n],
                ),
                view,
                out=logits,
            )
            for slot, sequence in batch:
                sequence.computed_tokens += 1
                self._store_blocks(sequence, slot)
                self._sample(sequence, logits[slot, 0])
        seconds = self._clock() - start
        self._steps[n] += 1
        self._totals["decode_tokens"] += ran
        self._decode_s += seconds
        if self._speculation is not None:
            self._speculation.payoff.decoded(ran, seconds)

    def _fill(self, batch: list[tuple[int, Sequence]], running: Set[Sequence] = frozenset()) -> int:
        """Fill the inputs of a step of `batch`, behind one that is `running` some of them; return how many rows it has.

        A row that does not decode runs, too, and its logits are not read. What it writes lands behind the tokens that
        it holds, where its next token will overwrite it.
        """
        rows = 1 + batch[-1][0]
        n = min((size for size in self._backend.buckets if rows <= size <= self._cache.batch), default=rows)
        slots = self._slots[:n]
        self._past_lengths[:n] = [0 if each is None else each.computed_tokens + (each in running) for each in slots]
        self._adapter_ids[:n] = [0 if each is None else each.adapter for each in slots]
        self._idle_rows += slots.count(None)
        self._lengths[:n] = self._input_ids[:n] = 0
        decoding = [slot for slot, _ in batch]
        self._lengths[decoding] = 1
        self._input_ids[decoding, 0] = [-1 - slot if each in running else each.tokens[-1] for slot, each in batch]
        return n

    def _begin(self, batch: list[tuple[int, Sequence]], before: Decoding | None = None) -> Decoding:
        """Begin to run one token of each sequence of `batch`; of those that run `before`, the one that is guessed."""
        running = frozenset() if before is None else {each for _, each in before.rows if each not in before.wrong}
        n, slots = self._fill(batch, running), [slot for slot, _ in batch]
        self._temperatures[:n] = 1
        self._temperatures[slots] = temperatures(each for _, each in batch)
        if self._guesses:
            self._draws[:n] = GREEDY
            self._draws[slots] = guesses([each.sampler for _, each in batch], [each in running for _, each in batch])
        run = self._backend.begin_decode(
            StepInputs(
                self._input_ids[:n],
                self._past_lengths[:n],
                lengths=self._lengths[:n],
                adapters=self._adapter_ids[:n],
                temperatures=self._temperatures[:n],
                draws=self._draws[:n],
            ),
            self._cache.rows(0, n),
        )
        return Decoding(run, batch, n)

    def _behind(self, step: Decoding) -> list[tuple[int, Sequence]]:
        """Give what to run behind `step` before its tokens are known; nothing where they had better be.

        A sequence that ends with its token runs no other one. One that `step` runs with a wrong token runs the right
        one.
        """
        gap, last = self._gap()
        moved = self._slots[last]
        if not self._only_decodes() or (gap < last and moved and self._closes(moved)):
            return []
        return self._go_on(step)

    def _go_on(self, step: Decoding) -> list[tuple[int, Sequence]]:
        """Give the rows of `step` that go on behind it, if its guesses promise to be right."""
        live = [(row, each) for row, each in step.rows if each in self._sequences]
        right = [each.guessed_right for _, each in live]
        if not (self._guesses and live) or min(right) < _RIGHT_OF_ONE or sum(right) < _RIGHT * len(right):
            return []
        return [(row, each) for row, each in live if each in step.wrong or each.remaining_tokens > 1]

    def _live(self, step: Decoding) -> list[tuple[int, Sequence]]:
        """Give the rows of a step whose tokens somebody waits for."""
        return [(slot, each) for slot, each in step.rows if each in self._sequences and each not in step.wrong]

    def _decode_ahead(self, batch: list[tuple[int, Sequence]]) -> tuple[int, int]:
        """Run one token of each sequence of `batch` beside the host, which delivers the tokens of the step before.

        If possible, the next step begins before this one's tokens are chosen, with those that the device guesses. A
        guess that was wrong has run for nothing, and so has a sequence that has ended meanwhile: that row's token is
        dropped, and the right one runs in the step behind. Return rows of the step, and how many were not in vain.
        """
        step = self._ahead or self._begin(batch)
        behind = self._behind(step)
        self._ahead = self._begin(behind, step) if behind else None
        if self._ahead is None:
            step.run.launched()  # the thread that does so needs the interpreter, which delivering would keep
        self._deliver_tokens()
        heads, live = step.run.top_logits(), self._live(step)
        for slot, sequence in live:
            sequence.computed_tokens += 1
            self._store_blocks(sequence, slot)
        self._sample_heads(live, step.run, heads, step.run.next_ids() if self._guesses else None)
        return step.size, len(live)

    def _sample_heads(
        self,
        live: list[tuple[int, Sequence]],
        run: DecodeRun,
        heads: TopLogits,
        guessed: NDArray[np.int64] | None = None,
    ) -> None:
        """Sample the next token of each sequence from its row of `run`, all at once; `guessed` is what that guessed.

        First and last tokens are delivered now, others while the next step runs.
        """
        if not live:
            return
        own = [row for row, _ in live]
        heads = heads.of(own)

        def fetch(rows: list[int], blocks: list[int]) -> NDArray[np.float32]:
            return run.blocks([own[row] for row in rows], blocks)

        found = sample_heads([sequence.sampler for _, sequence in live], heads, fetch)
        now = self._clock()
        for place, ((row, sequence), sampled) in enumerate(zip(live, found, strict=True)):
            if sampled is None:
                sampled = self._choose(sequence, run.logits(row), (heads, place))
            if sampled is not None:
                if guessed is not None:
                    self._note_guess(sequence, bool(guessed[row] == sampled.token))
                self._take(sequence, sampled, now)
                first, last = len(sequence.token_times) == 1, sequence.remaining_tokens == 0
                if first or last or sequence.sampler.is_stop(sampled.token):
                    self._hand_over(sequence, sampled)  # who waits for its answer has it, or its place is free, now
                else:
                    self._undelivered.append((sequence, sampled))

    def _note_guess(self, sequence: Sequence, right: bool) -> None:
        """Note whether the device's guess was the token of `sequence`, which may run already."""
        sequence.guessed_right += _WEIGHT * (right - sequence.guessed_right)
        if not right and self._ahead is not None:
            self._ahead.wrong.add(sequence)

    def _deliver_tokens(self) -> None:
        """Deliver the tokens of the last decode step, and end what they end."""
        undelivered, self._undelivered = self._undelivered, []
        for sequence, sampled in undelivered:
            if sequence in self._sequences:
                self._hand_over(sequence, sampled)

    def _verify(self, slot: int, sequence: Sequence, draft: list[int], start: float, speculation: Speculation) -> None:
        """Run the last token of `sequence` and `draft`, and sample tokens for as long as they are those drafted.

        Each token is sampled from its own row of logits, as without a draft; the draft only says whether the row after
        it can be used. So the tokens are those that would come without one, under any sampling: a drafted token stands
        with the probability that the model gives it, as in speculative sampling from a draft that is certain.
        """
        k = len(draft)
        ids = np.array([[sequence.tokens[-1], *draft]], np.int64)
        past_lengths, view = np.array([sequence.computed_tokens], np.int32), self._cache.rows(slot, slot + 1)
        (logits,) = self._backend.step(
            StepInputs(ids, past_lengths, np.arange(k + 1), adapters=np.array([sequence.adapter])),
            view,
            out=self._verify_logits[k],
        )
        sequence.drafted_tokens += k
        self._totals["drafted_tokens"] += k
        tokens = 0
        for row, drafted in zip(logits, [*draft, None], strict=True):
            sequence.computed_tokens += 1
            accepted = self._sample(sequence, row, drafted)
            tokens += 1
            if not accepted:
                break
        self._store_blocks(sequence, slot)
        seconds = self._clock() - start
        self._totals["verified_tokens"] += tokens
        self._verify_s += seconds
        speculation.payoff.verified(sequence, k, tokens, seconds)
        if sequence not in self._sequences:
            speculation.forget(sequence)

    def _prefill(self, spent: int) -> int:
        """Read chunks of prompts, oldest first, until the step's token budget is spent; return how many tokens."""
        read = 0
        unread = [(each.slot, each) for each in self._sequences if each.slot is not None and not each.decoding]
        for slot, sequence in unread:
            while not sequence.decoding and sequence in self._sequences:  # it may have been read beside an older one
                if sequence.started is None:
                    self._start_prefill(sequence, slot)
                end, step_tokens = self._chunk_end(sequence, sequence.computed_tokens), self._options.step_tokens
                tokens = end - sequence.computed_tokens
                if read and spent + read + tokens > step_tokens:
                    return read
                window = self._find_window(slot, step_tokens - (spent + read if read else 0))
                if window is None:
                    read += tokens
                    self._prefill_chunk(sequence, slot, end)
                else:
                    read += window.rows * window.tokens
                    self._prefill_together(window)
        return read

    def _chunk_end(self, sequence: Sequence, start: int) -> int:
        """Say where the chunk of a prompt ends that begins at token `start`."""
        return min(sequence.prompt_tokens, (start // self._chunk + 1) * self._chunk)

    def _find_window(self, slot: int, most: int) -> prompt_batching.PromptWindow | None:
        """Find a step of at most `most` tokens that reads `slot` and its neighbours; None: it is read alone."""
        shapes = self._backend.prompt_shapes
        if not shapes:
            return None
        chunk_of = functools.cache(self._next_chunk)
        return prompt_batching.find(
            slot, chunk_of, shapes, slots=self._cache.batch, capacity=self._cache.capacity, most=most
        )

    def _next_chunk(self, slot: int) -> prompt_batching.PromptChunk | None:
        """Give the next chunk of the prompt in `slot`, if it may be read beside others."""
        sequence = self._slots[slot]
        if sequence is None or sequence.decoding:
            return None
        start = self._cached_tokens(sequence) if sequence.started is None else sequence.computed_tokens
        if start and self._backend.signature.one_row_continuations:
            return None
        block = start + BLOCK
        shared = self._prefix_cache is not None and sequence.prompt_tokens > block
        begins = (sequence.adapter, *sequence.tokens[:block]) if shared else None
        return prompt_batching.PromptChunk(start, self._chunk_end(sequence, start) - start, begins)

    def _start_prefill(self, sequence: Sequence, slot: int) -> None:
        """Take up the prompt of `sequence`, behind what the prefix cache has of it."""
        tokens = sequence.prompt_tokens
        sequence.started = self._clock()
        self._totals["prompt_tokens"] += tokens
        if self._prefix_cache is not None:
            cached = self._cached_tokens(sequence)
            sequence.computed_tokens = sequence.cached_tokens = cached
            self._prefix_cache.load(sequence.tokens[:cached], self._cache, slot, sequence.adapter)
            sequence.stored_blocks = cached // BLOCK
            self._totals["prefix_query_tokens"] += tokens
            self._totals["prefix_hit_tokens"] += cached

    def _cached_tokens(self, sequence: Sequence) -> int:
        """Say how many tokens of a prompt come out of the prefix cache."""
        if self._prefix_cache is None:
            return 0
        found = self._prefix_cache.find(sequence.tokens, sequence.adapter)
        return self._reusable_tokens(found, sequence.prompt_tokens)

    def _reusable_tokens(self, cached: int, tokens: int) -> int:
        """Say how many tokens of a prompt of `tokens` to load, of which the first `cached` are in the prefix cache.

        Up to the last block's end from which the rest of a chunk gives the bits that it gives in the whole chunk: with
        as many tokens as that takes, or as the whole chunk has. The last token is always computed.
        """
        for start in range(min(cached, (tokens - 1) // BLOCK * BLOCK), 0, -BLOCK):
            begin = start // self._chunk * self._chunk
            end = min(begin + self._chunk, tokens)
            if end - start >= min(end - begin, self._backend.signature.steady_from):
                return start
        return 0

    def _prefill_chunk(self, sequence: Sequence, slot: int, end: int) -> None:
        start, logits = sequence.computed_tokens, self._logits[0]
        self._backend.step(
            StepInputs(
                np.array([sequence.tokens[start:end]], np.int64),
                np.array([start], np.int32),
                text_lengths=np.array([sequence.prompt_tokens]),
                adapters=np.array([sequence.adapter]),
            ),
            self._cache.rows(slot, slot + 1),
            out=logits,
        )
        self._end_chunk(sequence, slot, end)
        if end == sequence.prompt_tokens:
            self._sample(sequence, logits[0, 0])

    def _prefill_together(self, window: prompt_batching.PromptWindow) -> None:
        """Read the next chunks of the prompts in `window` as one step."""
        first, rows, tokens = window
        members = [(slot, each) for slot in range(first, first + rows) if (each := self._slots[slot]) is not None]
        ids, lengths = np.zeros((rows, tokens), np.int64), np.zeros(rows, np.int32)
        for row, (slot, sequence) in enumerate(members):
            if sequence.started is None:
                self._start_prefill(sequence, slot)
            start = sequence.computed_tokens
            piece = sequence.tokens[start : self._chunk_end(sequence, start)]
            lengths[row] = len(piece)
            ids[row, : len(piece)] = piece
        past = np.array([sequence.computed_tokens for _, sequence in members], np.int32)
        wanted = (lengths.astype(np.int64) - 1)[:, None]
        view, logits = self._cache.rows(first, first + rows), self._prompt_logits[:rows]
        inputs = StepInputs(
            ids,
            past,
            wanted,
            lengths,
            np.array([sequence.prompt_tokens for _, sequence in members]),
            np.array([sequence.adapter for _, sequence in members]),
            np.array(temperatures(each for _, each in members), np.float32),
        )
        run = None
        if self._backend.decodes_ahead:
            run = self._backend.begin_prompts(inputs, view)
        else:
            self._backend.step(inputs, view, out=logits)
        heads = None if run is None else run.top_logits()
        ended = []
        for row, (slot, sequence) in enumerate(members):
            self._end_chunk(sequence, slot, sequence.computed_tokens + int(lengths[row]))
            if sequence.computed_tokens == sequence.prompt_tokens:
                ended.append((row, sequence))
        if run is not None and heads is not None:
            self._sample_heads(ended, run, heads)
        else:
            for row, sequence in ended:
                self._sample(sequence, logits[row, 0])

    def _end_chunk(self, sequence: Sequence, slot: int, end: int) -> None:
        """Go on behind a chunk that was read up to token `end`."""
        self._totals["prefill_tokens"] += end - sequence.computed_tokens
        sequence.computed_tokens = end
        self._store_blocks(sequence, slot)

    def _store_blocks(self, sequence: Sequence, slot: int) -> None:
        """Give the blocks that `sequence` has completed in `slot` to the prefix cache."""
        computed = sequence.computed_tokens
        if self._prefix_cache is not None and not sequence.failed and computed // BLOCK > sequence.stored_blocks:
            self._prefix_cache.store(sequence.tokens[:computed], self._cache, slot, sequence.adapter)
            sequence.stored_blocks = computed // BLOCK

    # Tokens

    def _sample(self, sequence: Sequence, logits: NDArray[np.float32], drafted: int | None = None) -> bool:
        """Sample the next token of `sequence` from `logits` [V] and deliver it; the last one ends the sequence.

        Return whether the token is `drafted`, and more may follow.
        """
        sampled = self._choose(sequence, logits)
        if sampled is None:
            return False
        self._take(sequence, sampled, self._clock())
        if sampled.token == drafted:
            sequence.accepted_tokens += 1
            self._totals["accepted_tokens"] += 1
        return self._hand_over(sequence, sampled) and sampled.token == drafted

    def _choose(
        self, sequence: Sequence, logits: NDArray[np.float32], head: tuple[TopLogits, int] | None = None
    ) -> SampledToken | None:
        """Sample a token from a whole row, whose head may be known; None: it cannot be, and the sequence has ended."""
        try:
            return sequence.sampler.sample(logits, head)
        except ForgeError as error:
            sequence.failed = True
            self._forget(sequence)  # whatever was wrong with this text, it must not spread to others
            self._remove(sequence, "error")
            self._deliver(sequence, error)
            return None

    def _take(self, sequence: Sequence, sampled: SampledToken, now: float) -> None:
        """Go on from a token."""
        sequence.tokens.append(sampled.token)
        sequence.token_times.append(now)
        self._totals["output_tokens"] += 1

    def _hand_over(self, sequence: Sequence, sampled: SampledToken) -> bool:
        """Deliver a token that was taken; the last one ends the sequence. Return whether more may follow."""
        token, logprob = sampled
        if sequence.sampler.is_stop(token):
            if not sequence.request.detokenize:  # who reads tokens wants this one, too
                self._deliver(sequence, Chunk("", token, logprob=logprob))
            self._finish(sequence, "stop")
        elif not self._deliver(sequence, Chunk(sequence.text.push(token), token, logprob=logprob)):
            self._remove(sequence, "error")
        elif sequence.text.stopped:
            self._finish(sequence, "stop")
        elif sequence.remaining_tokens == 0:
            self._finish(sequence, "length")
        else:
            return True
        return False

    def _finish(self, sequence: Sequence, reason: str) -> None:
        rest = sequence.text.flush()
        if reason == "length" and sequence.text.stopped:  # the text that was held back completes a stop string
            reason = "stop"
        self._remove(sequence, reason)
        self._deliver(sequence, Chunk(rest, None, reason, sequence.usage(self._clock())))

    def _deliver(self, sequence: Sequence, item: Chunk | ForgeError) -> bool:
        """Hand `item` to the receiver of `sequence`; one that raises loses its own sequence and nobody else's."""
        try:
            sequence.receive(item)
        except Exception:
            logger.exception("the receiver of an answer failed; the answer is dropped")
            return False
        return True

    def _remove(self, sequence: Sequence, reason: str) -> None:
        del self._sequences[sequence]
        self._finished[reason] += 1
        if self._speculation is not None:
            self._speculation.forget(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Let go of the place of a sequence that ends, or of its place in the queue."""
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._slots[sequence.slot] = None

    def _forget(self, sequence: Sequence) -> None:
        """Let no other text begin with what was computed for this one."""
        if self._prefix_cache is not None:
            self._prefix_cache.forget(sequence.tokens, sequence.adapter)


def temperatures(sequences: Iterable[Sequence]) -> list[float]:
    """Give what the mass of each sequence's row is summed at."""
    return [sequence.sampler.temperature or 1.0 for sequence in sequences]
