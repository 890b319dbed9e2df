"""Prefill over slots: chunks of prompts, oldest first, within the token budget of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import numpy as np

from llmforge.runtime.interface import C, Decoder, StepInputs
from llmforge.serving.prefix_cache import BLOCK
from llmforge.serving.scheduler.delivery import Delivery, StepFigures
from llmforge.serving.scheduler.run_ahead import RunAhead, temperatures
from llmforge.serving.scheduler.slots import Slots
from llmforge.serving.sequence import Sequence
from llmforge.serving.speculation import Speculation


class PromptChunk(NamedTuple):
    """The next chunk of a prompt that may be read together with others."""

    start: int  # its first token's place in the text
    tokens: int
    begins: tuple[int, ...] | None  # what a text must begin with for this one to find it, and more, in the prefix cache


class PromptWindow(NamedTuple):
    """Neighbouring slots whose chunks are rows of one step, padded to `tokens` each."""

    first: int
    rows: int
    tokens: int


def find(
    slot: int,
    chunk_of: Callable[[int], PromptChunk | None],
    shapes: Iterable[tuple[int, int]],
    *,
    slots: int,
    capacity: int,
    most: int,
) -> PromptWindow | None:
    """Find the step that reads `slot` and most of its neighbours; None: it is read alone.

    Chunks of which one would find another's tokens in the prefix cache do not run together.

    Args:
        slot: of the prompt whose turn it is.
        chunk_of: the chunk of each slot; None: it has none to read, or none that is read with others.
        shapes: rows and tokens of each.
        slots: of the cache.
        capacity: of a slot, in tokens; padding must have room.
        most: tokens of the step, padding included.
    """

    def fits(at: int, tokens: int) -> bool:
        chunk = chunk_of(at)
        return chunk is not None and chunk.tokens <= tokens and chunk.start + tokens <= capacity

    for rows, tokens in sorted(shapes, key=lambda shape: (-shape[0], shape[1])):
        if rows * tokens > most or not fits(slot, tokens):
            continue
        for first in range(max(0, slot - rows + 1), min(slot, slots - rows) + 1):
            window = range(first, first + rows)
            if all(fits(at, tokens) for at in window) and not _repeat(map(chunk_of, window)):
                return PromptWindow(first, rows, tokens)
    return None


def _repeat(chunks: Iterable[PromptChunk | None]) -> bool:
    begins = [chunk.begins for chunk in chunks if chunk is not None and chunk.begins is not None]
    return len(set(begins)) < len(begins)


@dataclass(eq=False)
class SlotPrefill(Generic[C]):
    """Reads the prompts of `sequences` that have a slot: at least a `chunk` a step, more within `step_tokens`."""

    backend: Decoder[C]
    slots: Slots[C]
    ahead: RunAhead[Any]
    delivery: Delivery
    figures: StepFigures
    sequences: Collection[Sequence]
    chunk: int
    step_tokens: int
    speculation: Speculation | None = None  # which is told what the decoder computed

    def __post_init__(self) -> None:
        backend = self.backend
        shapes = () if backend.decodes_ahead else backend.prompt_shapes
        self._logits = backend.logits_array((max((rows for rows, _ in shapes), default=1), 1, backend.vocabulary))
        self._one_row = self._logits[:1]

    def run(self, spent: int) -> int:
        """Read chunks of prompts until the step's token budget is gone, `spent` included; return how many tokens."""
        read = 0
        unread = [(each.slot, each) for each in self.sequences if each.slot is not None and not each.decoding]
        for slot, sequence in unread:
            while not sequence.decoding and sequence in self.sequences:  # it may have been read with an older one
                if sequence.started is None:
                    self._start(sequence, slot)
                end = self._chunk_end(sequence, sequence.computed_tokens)
                tokens = end - sequence.computed_tokens
                if read and spent + read + tokens > self.step_tokens:
                    return read
                window = self._find_window(slot, self.step_tokens - (spent + read if read else 0))
                if window is None:
                    read += tokens
                    self._read(sequence, slot, end)
                else:
                    read += window.rows * window.tokens
                    self._read_window(window)
        return read

    def _chunk_end(self, sequence: Sequence, start: int) -> int:
        """Say where the chunk of a prompt ends that begins at token `start`."""
        return min(sequence.prompt_tokens, (start // self.chunk + 1) * self.chunk)

    def _find_window(self, slot: int, most: int) -> PromptWindow | None:
        """Find a step of at most `most` tokens that reads `slot` and its neighbours; None: it is read alone."""
        shapes = self.backend.prompt_shapes
        if not shapes:
            return None
        chunk_of, cache = functools.cache(self._next_chunk), self.slots.cache
        return find(slot, chunk_of, shapes, slots=cache.batch, capacity=cache.capacity, most=most)

    def _next_chunk(self, slot: int) -> PromptChunk | None:
        """Give the next chunk of the prompt in `slot`, if it may be read together with others."""
        sequence, slots = self.slots.taken[slot], self.slots
        if sequence is None or sequence.decoding:
            return None
        start = slots.cached_tokens(sequence) if sequence.started is None else sequence.computed_tokens
        if start and self.backend.signature.one_row_continuations:
            return None
        block = start + BLOCK
        shared = slots.prefix_cache is not None and sequence.prompt_tokens > block
        begins = (sequence.adapter, *sequence.tokens[:block]) if shared else None
        return PromptChunk(start, self._chunk_end(sequence, start) - start, begins)

    def _start(self, sequence: Sequence, slot: int) -> None:
        """Take up the prompt of `sequence`, after what the prefix cache has of it."""
        tokens = sequence.prompt_tokens
        sequence.started = self.delivery.clock()
        self.figures.totals["prompt_tokens"] += tokens
        if self.slots.prefix_cache is not None:
            self.slots.load_prefix(sequence, slot)
            self.figures.totals["prefix_query_tokens"] += tokens
            self.figures.totals["prefix_hit_tokens"] += sequence.cached_tokens

    def _read(self, sequence: Sequence, slot: int, end: int) -> None:
        """Read a prompt up to token `end`."""
        start = sequence.computed_tokens
        self.backend.step(
            StepInputs(
                np.array([sequence.tokens[start:end]], np.int64),
                np.array([start], np.int32),
                text_lengths=np.array([sequence.prompt_tokens]),
                adapters=np.array([sequence.adapter]),
            ),
            self.slots.cache.rows(slot, slot + 1),
            out=self._one_row,
        )
        if self.speculation is not None:
            self.speculation.observe(sequence, sequence.tokens, start, self.backend, 0)
        self._end_chunk(sequence, slot, end)
        if end == sequence.prompt_tokens:
            self.delivery.sample(sequence, self._one_row[0, 0])

    def _read_window(self, window: PromptWindow) -> None:
        """Read the next chunks of the prompts in `window` as one step."""
        first, rows, tokens = window
        taken = enumerate(self.slots.taken[first : first + rows], first)
        members = [(slot, each) for slot, each in taken if each is not None]
        ids, lengths = np.zeros((rows, tokens), np.int64), np.zeros(rows, np.int32)
        for row, (slot, sequence) in enumerate(members):
            if sequence.started is None:
                self._start(sequence, slot)
            start = sequence.computed_tokens
            piece = sequence.tokens[start : self._chunk_end(sequence, start)]
            lengths[row] = len(piece)
            ids[row, : len(piece)] = piece
        inputs = StepInputs(
            ids,
            np.array([sequence.computed_tokens for _, sequence in members], np.int32),
            (lengths.astype(np.int64) - 1)[:, None],
            lengths,
            np.array([sequence.prompt_tokens for _, sequence in members]),
            np.array([sequence.adapter for _, sequence in members]),
            np.array(temperatures(each for _, each in members), np.float32),
        )
        view, logits = self.slots.cache.rows(first, first + rows), self._logits[:rows]
        run = None
        if self.backend.decodes_ahead:
            run = self.backend.begin_prompts(inputs, view)
        else:
            self.backend.step(inputs, view, out=logits)
        heads = None if run is None else run.top_logits()
        ended = []
        for row, (slot, sequence) in enumerate(members):
            self._end_chunk(sequence, slot, sequence.computed_tokens + int(lengths[row]))
            if sequence.computed_tokens == sequence.prompt_tokens:
                ended.append((row, sequence))
        if run is not None and heads is not None:
            self.ahead.sample(ended, run, heads, ahead=False)
        else:
            for row, sequence in ended:
                self.delivery.sample(sequence, logits[row, 0])

    def _end_chunk(self, sequence: Sequence, slot: int, end: int) -> None:
        """Go on after a chunk that was read up to token `end`."""
        self.figures.totals["prefill_tokens"] += end - sequence.computed_tokens
        sequence.computed_tokens = end
        self.slots.store_blocks(sequence, slot)
