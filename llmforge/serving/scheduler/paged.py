"""Continuous batching over blocks of one pool: a sequence holds what its text fills, and not a slot of full length.

As over slots, but for where tokens lie and what one step runs:

1. those that wait longest are taken up while there is a row for them and the pool has blocks for all their tokens, and
   one more for each sequence that runs and has a quarter of its last block left, or less. A text begins with the blocks
   that earlier ones published, which no copy is made of; of the block after them, the part in common is copied;
2. each sequence that decodes gets room for its next token. Where the pool is empty, the sequence that was taken up
   last is preempted: its blocks are freed, and it goes back to the head of the queue with all its tokens and the state
   of its random numbers, to be read again like a prompt and to go on with the token that it would have had;
3. one run of the decoder reads the last token of every sequence that decodes and, up to `step_tokens` in all, pieces
   of what is not read yet, oldest first; at least a `chunk` of the oldest. Over int8 blocks, of which a step with a
   prompt copies all its texts in 16 bits, a piece of one prompt runs alone, in turns with those that decode.

Where the decoder gives top logits of rows (`interface.TopLogits`), tokens are sampled from them, and delivered while
the next step runs, whatever it runs.

While all sequences decode, the next step begins on the device's guesses of this one's tokens, if the pool has a place
for each (`run_ahead`).

Where tokens are drafted, a sequence whose draft had better be verified runs it alone, before the others decode, and
nothing runs ahead. Blocks that a wrong draft has filled stay its text's, to be written again.

So the oldest sequence always goes on (the pool holds a text of full length), and a step runs at most `step_tokens`
tokens, or a chunk besides those that decode.

**Nobody's tokens depend on neighbours**, but for kernels whose sums differ in the last bits with the shape of a step.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmforge.backends.onnxruntime.cuda.paged import PagedCache, PagedSession, Piece
from llmforge.runtime.block_pool import BlockTable, NoBlocks
from llmforge.runtime.interface import C, Decoder
from llmforge.runtime.prefill_shapes import PREFILL_CHUNK
from llmforge.runtime.sampling.sampler import Samplers, guesses
from llmforge.serving.heads import DraftHead
from llmforge.serving.interface import EngineOptions
from llmforge.serving.scheduler.base import Scheduler
from llmforge.serving.scheduler.run_ahead import Decoding, temperatures
from llmforge.serving.scheduler.slot_scheduler import SlotScheduler
from llmforge.serving.sequence import Sequence, next_waiting
from llmforge.serving.speculation import Speculation

# Tokens in common that are worth a copy: a copy for each layer costs about what a few tokens of a prompt cost.
LEAST_BORROWED = 8


@dataclass(eq=False)
class PagedStep(Decoding):
    """A step of pieces of texts: `planned`, of which those that are wanted have a row."""

    planned: list[tuple[Sequence, Piece]] = field(default_factory=list)


class PagedScheduler(Scheduler[PagedCache]):
    """Runs sequences in the blocks of one pool; arguments as those of `Scheduler`.

    `prefix_cache_bytes` 0 lets no text begin with another one's blocks; any other number lets the whole pool serve for
    it, of which running sequences take what they need. Heads, which read hidden states, draft nothing.
    """

    def __init__(
        self,
        backend: PagedSession,
        cache: PagedCache,
        samplers: Samplers,
        options: EngineOptions,
        *,
        speculation: Speculation | None = None,
        **others: Any,
    ) -> None:
        super().__init__(backend, cache, samplers, options, **others)
        self._paged = backend
        self._pool = cache.pool
        self._shares = options.prefix_cache_bytes > 0
        self._read_last = False  # whether the last step was a piece of a prompt alone
        if speculation is not None and isinstance(speculation.proposer, DraftHead):
            self._notes += ("no speculation: a step over a paged KV cache gives no hidden states for a head",)
            speculation = None
        self._speculation = speculation
        most = 0 if speculation is None else speculation.max_tokens + 1
        self._verified_logits = backend.logits_array((most, 1, backend.vocabulary))[:, 0]
        self._totals = self._figures.totals
        self._tables: dict[Sequence, BlockTable] = {}  # of those that run, in the order in which they were taken up
        # Where a device gives heads, rows are fetched one at a time.
        self._logits = backend.logits_array((0 if backend.decodes_ahead else cache.batch, 1, backend.vocabulary))

    def _occupancy(self) -> dict[str, int]:
        """Tokens that texts have in common count once."""
        size, pool = self._pool.block_size, self._pool
        return {
            "running": len(self._tables),
            "kv_tokens_used": pool.used * size,
            "kv_tokens_capacity": pool.blocks * size,
            "prefix_tokens_used": pool.cached * size,
            "prefix_tokens_capacity": pool.blocks * size if self._shares else 0,
        }

    @property
    def keeps_prefixes(self) -> bool:
        """Whether prompts begin with blocks of others."""
        return self._shares

    def _run(self) -> int:
        self._admit()
        step, verified = self._ahead.step, 0
        if step is None:
            ran = {} if self._speculation is None else self._verify_drafts(self._speculation)
            verified = sum(ran.values())
            self._make_room()
            planned = list(self._plan(ran))
            if planned:
                self._run_pieces(planned)
        else:
            planned = step.planned
            self._run_ahead(step)
        return sum(len(piece.tokens) for _, piece in planned) + verified

    def _verify_drafts(self, speculation: Speculation) -> dict[Sequence, int]:
        """Verify drafts of sequences that decode, where that pays; return which ran, and how many tokens each."""
        self._delivery.hand_over_all()
        decoding = [each for each in self._tables if each.decoding and len(each.tokens) - each.computed_tokens == 1]
        ran = {}
        for sequence in decoding:
            start, most = self._clock(), sequence.remaining_tokens - 1
            draft = speculation.propose(sequence, sequence.tokens, most, len(decoding))
            if not draft:
                continue
            past, table = sequence.computed_tokens, self._tables[sequence]
            try:
                self._cache.make(self._pool.grow(table, past, past + 1 + len(draft)))
            except NoBlocks:
                continue  # it decodes with the others
            self._verify(sequence, draft, start, speculation)
            ran[sequence] = 1 + len(draft)
        return ran

    def _verify(self, sequence: Sequence, draft: list[int], start: float, speculation: Speculation) -> None:
        """Run the last token of `sequence` and `draft`; see `SlotDecode`, which does the same over slots."""
        table, k = self._tables[sequence], len(draft)
        piece = Piece([sequence.tokens[-1], *draft], sequence.computed_tokens, table, wanted=True)
        logits = self._verified_logits[: 1 + k]
        self._paged.verify(piece, self._cache, logits)
        sequence.drafted_tokens += k
        self._totals["drafted_tokens"] += k
        tokens = 0
        for row, drafted in zip(logits, [*draft, None], strict=True):
            self._advance([(sequence, Piece(sequence.tokens[-1:], sequence.computed_tokens, table, wanted=True))])
            tokens += 1
            if not self._delivery.sample(sequence, row, drafted):
                break
        seconds = self._clock() - start
        self._totals["verified_tokens"] += tokens
        self._figures.verify_s += seconds
        speculation.payoff.verified(sequence, k, tokens, seconds)
        if sequence not in self.sequences:
            speculation.forget(sequence)

    def _admit(self) -> None:
        while self.waiting and len(self._tables) < self._cache.batch:
            sequence = next_waiting(self.waiting, self._tables, self._clock())
            table = self._open(sequence)
            if table is None:
                return
            self.waiting.remove(sequence)
            self._tables[sequence] = table
            if sequence.started is None:
                sequence.started = self._clock()
                sequence.cached_tokens = sequence.computed_tokens
                self._totals["prompt_tokens"] += sequence.prompt_tokens
                if self._shares:
                    self._totals["prefix_query_tokens"] += sequence.prompt_tokens
                    self._totals["prefix_hit_tokens"] += sequence.computed_tokens

    def _open(self, sequence: Sequence) -> BlockTable | None:
        """Give a sequence blocks for all its tokens, and note those that are computed; None: there are not enough."""
        pool, tokens = self._pool, sequence.tokens
        most = len(tokens) - 1  # the last token is always computed
        shared = min(pool.find(tokens, sequence.adapter), most // pool.block_size) if self._shares else 0
        wanted = pool.count(len(tokens) + 1) - shared + pool.idle(tokens, shared, sequence.adapter)
        spare = pool.available - wanted - sum(map(self._ends_soon, self._tables))
        if spare < 0 and self._tables:
            return None
        if self._ahead.step is not None:
            self._ahead.step.run.launched()  # it may write to blocks that a sequence has left
        table = pool.open(tokens, shared, sequence.adapter)
        computed = shared * pool.block_size
        if self._shares and spare > 0:
            computed += pool.borrow(table, tokens, LEAST_BORROWED, most)
        self._cache.make(pool.grow(table, computed, len(tokens)))
        sequence.computed_tokens = computed
        return table

    def _ends_soon(self, sequence: Sequence) -> bool:
        """Whether the last quarter of its last block is all that is left to a sequence that runs."""
        return (len(sequence.tokens) - 1) % self._pool.block_size * 4 >= 3 * self._pool.block_size

    def _make_room(self) -> None:
        """Give each sequence that decodes a place for its next token, and preempt those taken up last for it."""
        for sequence in list(self._tables):
            while sequence in self._tables:
                try:
                    copies = self._pool.grow(self._tables[sequence], sequence.computed_tokens, len(sequence.tokens))
                except NoBlocks:
                    self._preempt(next(reversed(self._tables)))
                else:
                    self._cache.make(copies)
                    break

    def _preempt(self, sequence: Sequence) -> None:
        self._pool.close(self._tables.pop(sequence))
        self.waiting.appendleft(sequence)
        self._totals["preemptions"] += 1

    def _plan(self, ran: Container[Sequence] = ()) -> Iterator[tuple[Sequence, Piece]]:
        """Choose what the next step runs: one token of those that decode and have not `ran`, then pieces of prompts."""
        unread, decoding = [], []
        for sequence, table in self._tables.items():
            past = sequence.computed_tokens
            if sequence in ran:
                continue
            if len(sequence.tokens) - past == 1:
                decoding.append((sequence, Piece(sequence.tokens[past:], past, table, wanted=True)))
            else:
                unread.append((sequence, table))
        if self._paged.reads_prompts_alone and unread:
            self._read_last = not (decoding and self._read_last)
            unread, decoding = (unread[:1], []) if self._read_last else ([], decoding)
        yield from decoding
        room, least = self._step_tokens - len(decoding), self._chunk
        for sequence, table in unread:
            past = sequence.computed_tokens
            count = min(len(sequence.tokens) - past, max(room, least))
            if count < 1:
                return
            room, least = room - count, 0
            tokens = sequence.tokens[past : past + count]
            yield sequence, Piece(tokens, past, table, wanted=past + count == len(sequence.tokens))

    def _run_pieces(self, planned: list[tuple[Sequence, Piece]]) -> None:
        """Run a step whose tokens are all known."""
        if self._paged.decodes_ahead:
            self._run_ahead(self._begin_pieces(planned, [False] * len(planned)))
            return
        start = self._clock()
        wanted = [sequence for sequence, piece in planned if piece.wanted]
        logits = self._logits[: len(wanted), 0]
        self._paged.run([piece for _, piece in planned], self._cache, logits)
        self._advance(planned)
        for row, sequence in enumerate(wanted):
            self._delivery.sample(sequence, logits[row])
        self._count(planned, start)

    def _begin_pieces(self, planned: list[tuple[Sequence, Piece]], guessed: list[bool]) -> PagedStep:
        """Begin a step, of whose tokens some are `guessed` by the step before."""
        wanted = [(sequence, ahead) for (sequence, piece), ahead in zip(planned, guessed, strict=True) if piece.wanted]
        own = [sequence for sequence, _ in wanted]
        of_rows = np.array(temperatures(own), np.float32)
        draws = guesses([each.sampler for each in own], [ahead for _, ahead in wanted]) if self._ahead.guesses else None
        run = self._paged.begin([piece for _, piece in planned], self._cache, of_rows, draws)
        return PagedStep(run, list(enumerate(own)), len(own), planned=planned)

    def _run_ahead(self, step: PagedStep) -> None:
        """Sample the tokens of a step that runs, and deliver those before it meanwhile.

        If possible, the next step begins first: see `SlotDecode`.
        """
        start = self._clock()
        ahead = self._ahead
        ahead.step = self._begin_next(step)
        if ahead.step is None:
            step.run.launched()
        self._delivery.hand_over_all()
        heads = step.run.top_logits()
        self._advance([each for each in step.planned if each[0] not in step.wrong])
        ahead.sample(ahead.live(step), step.run, heads)
        self._count(step.planned, start)

    def _begin_next(self, step: PagedStep) -> PagedStep | None:
        """Begin the step after `step` on what that guesses; None: its tokens had better be known, or no block is free.

        All sequences that run must have a row in it: what is still to be read goes with known tokens.
        """
        rows = [] if self._speculation is not None else self._ahead.continuing_rows(step)
        if not rows or not self._tables.keys() <= {each for _, each in step.rows}:
            return None
        planned = []
        for row, sequence in rows:
            table, known = self._tables[sequence], sequence in step.wrong
            past = len(sequence.tokens) - known  # those before it are computed, or are when `step` is done
            try:
                copies = self._pool.grow(table, past, past + 1)
            except NoBlocks:
                return None
            if copies:
                step.run.launched()
                self._cache.make(copies)
            planned.append((sequence, Piece(sequence.tokens[-1:] if known else [-1 - row], past, table, wanted=True)))
        return self._begin_pieces(planned, [sequence not in step.wrong for _, sequence in rows])

    def _count(self, planned: list[tuple[Sequence, Piece]], start: float) -> None:
        """Count what a step has run, that was begun or looked at when the clock said `start`."""
        decoded = sum(len(piece.tokens) == 1 for _, piece in planned)
        read = sum(len(piece.tokens) for _, piece in planned) - decoded
        self._totals["prefill_tokens"] += read
        if not read:
            self._figures.steps[decoded] += 1
            self._totals["decode_tokens"] += decoded
            seconds = self._clock() - start
            self._figures.decode_s += seconds
            if self._speculation is not None:
                self._speculation.payoff.decoded(decoded, seconds)

    def _advance(self, planned: list[tuple[Sequence, Piece]]) -> None:
        """Count what a step has computed, of those that have not ended since."""
        size = self._pool.block_size
        for sequence, piece in planned:
            if sequence in self.sequences:
                before = sequence.computed_tokens
                sequence.computed_tokens = after = before + len(piece.tokens)
                if self._shares and before // size < after // size:
                    self._pool.publish(piece.table, sequence.tokens[:after])

    def _release(self, sequence: Sequence) -> None:
        table = self._tables.pop(sequence, None)
        if self._speculation is not None:
            self._speculation.forget(sequence)
        if table is None:
            self.waiting.remove(sequence)
        else:
            self._pool.close(table)

    def _forget(self, sequence: Sequence) -> None:
        self._pool.forget(sequence.tokens, sequence.adapter)


def scheduler_of(
    backend: Decoder[C],
    cache: C,
    samplers: Samplers,
    options: EngineOptions,
    *,
    speculation: Speculation | None = None,
    chunk: int = PREFILL_CHUNK,
    adapters: tuple[str, ...] = (),
) -> Scheduler[Any]:
    """Make the scheduler that plans `cache`: its rows as slots, or its blocks."""
    more: dict[str, Any] = {"speculation": speculation, "chunk": chunk, "adapters": adapters}
    if isinstance(backend, PagedSession) and isinstance(cache, PagedCache):
        return PagedScheduler(backend, cache, samplers, options, **more)
    return SlotScheduler(backend, cache, samplers, options, **more)
