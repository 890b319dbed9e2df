"""Slots: the rows of a cache and their sequences, and what the prefix cache has of their texts."""

from __future__ import annotations

from collections import deque
from typing import Generic

from llmforge.base.errors import UsageError
from llmforge.runtime.interface import C, Decoder
from llmforge.serving.prefix_cache import BLOCK, PrefixCache
from llmforge.serving.sequence import Sequence, next_waiting

# Tokens whose keys and values are copied in about the time that one more row costs a decode step: a row of a model of
# 0.6 B takes some 5 ms of one core, in which it copies 15 MB, which are 64 tokens in fp32 (28 layers, 8 heads of 128).
_COPIED_TOKENS_PER_ROW = 64


class Slots(Generic[C]):
    """Gives rows of `cache` to sequences; `taken` has the sequence of each row.

    Args:
        backend: the decoder.
        cache: a row is a slot.
        chunk: where chunks of prompts end: at its multiples.
        prefix_cache_bytes: 0: there is no prefix cache.

    Raises:
        UsageError: `prefix_cache_bytes` has no room for one block.
    """

    def __init__(self, backend: Decoder[C], cache: C, chunk: int, prefix_cache_bytes: int) -> None:
        self.cache = cache
        self.taken: list[Sequence | None] = [None] * cache.batch
        self.idle_rows = 0  # that decode steps ran since a sequence was moved
        self.notes: tuple[str, ...] = ()
        self._chunk = chunk
        self._steady_from = backend.signature.steady_from
        self.prefix_cache = self._make_prefix_cache(backend, prefix_cache_bytes) if prefix_cache_bytes else None

    def _make_prefix_cache(self, backend: Decoder[C], wanted: int) -> PrefixCache[C] | None:
        """Make the prefix cache of `wanted` bytes, or of what the device has left, which is then noted."""
        spare = backend.spare_bytes
        if spare is None or spare >= wanted:
            return PrefixCache(backend, wanted)
        left = f"{spare / 1e9:.2f} GB are left on the device, and {wanted / 1e9:.2f} were asked for"
        try:
            made = PrefixCache(backend, spare)
        except UsageError:  # no room for one block
            self.notes += (f"no prefix cache: {left}",)
            return None
        self.notes += (f"a smaller prefix cache: {left}",)
        return made

    def occupancy(self) -> dict[str, int]:
        """Count what runs and what is held, by the names of `EngineStats`."""
        running = [sequence for sequence in self.taken if sequence is not None]
        prefix_cache = self.prefix_cache
        return {
            "running": len(running),
            "kv_tokens_used": sum(sequence.computed_tokens for sequence in running),
            "kv_tokens_capacity": self.cache.batch * self.cache.capacity,
            "prefix_tokens_used": 0 if prefix_cache is None else len(prefix_cache) * BLOCK,
            "prefix_tokens_capacity": 0 if prefix_cache is None else prefix_cache.capacity * BLOCK,
        }

    def admit(self, waiting: deque[Sequence], now: float) -> None:
        """Give free slots to those that wait, by priority and clients in turns."""
        for slot, taken in enumerate(self.taken):
            if taken is None and waiting:
                sequence = next_waiting(waiting, filter(None, self.taken), now)
                waiting.remove(sequence)
                sequence.slot = slot
                self.taken[slot] = sequence

    def compact_slots(self, *, written: bool) -> None:
        """Move the sequence in the last slot to a free one before it, once idle rows have cost more than that would.

        So the two together cost at most twice the less of them, whichever that turns out to be. A row that a device
        still writes to (`written`) stays where it is.
        """
        gap, last = self._gap()
        sequence = self.taken[last]
        if sequence is None or gap >= last:
            self.idle_rows = 0
        elif not written and self._pays(sequence):
            self.cache.copy(gap, 0, self.cache, last, 0, sequence.computed_tokens)
            sequence.slot, self.taken[gap], self.taken[last] = gap, sequence, None
            self.idle_rows = 0

    @property
    def is_due(self) -> bool:
        """Whether `compact_slots` would move a sequence."""
        gap, last = self._gap()
        sequence = self.taken[last]
        return gap < last and sequence is not None and self._pays(sequence)

    def _gap(self) -> tuple[int, int]:
        """Give the first free slot and the last that is taken; where none is free before that, the last one twice."""
        last = max((slot for slot, sequence in enumerate(self.taken) if sequence is not None), default=0)
        return (self.taken.index(None) if None in self.taken else last), last

    def _pays(self, sequence: Sequence) -> bool:
        """Whether idle rows have cost more than moving `sequence` would."""
        return self.idle_rows * _COPIED_TOKENS_PER_ROW >= sequence.computed_tokens

    def store_blocks(self, sequence: Sequence, slot: int) -> None:
        """Give the blocks that `sequence` has completed in `slot` to the prefix cache."""
        computed = sequence.computed_tokens
        if self.prefix_cache is not None and not sequence.failed and computed // BLOCK > sequence.stored_blocks:
            self.prefix_cache.store(sequence.tokens[:computed], self.cache, slot, sequence.adapter)
            sequence.stored_blocks = computed // BLOCK

    def cached_tokens(self, sequence: Sequence) -> int:
        """Say how many tokens of a prompt come out of the prefix cache."""
        if self.prefix_cache is None:
            return 0
        found = self.prefix_cache.find(sequence.tokens, sequence.adapter)
        return self.reusable_tokens(found, sequence.prompt_tokens)

    def reusable_tokens(self, cached: int, tokens: int) -> int:
        """Say how many tokens of a prompt of `tokens` to load, of which the first `cached` are in the prefix cache.

        Up to the last block's end from which the rest of a chunk gives the bits that it gives in the whole chunk: with
        as many tokens as that takes, or as the whole chunk has. The last token is always computed.
        """
        for start in range(min(cached, (tokens - 1) // BLOCK * BLOCK), 0, -BLOCK):
            begin = start // self._chunk * self._chunk
            end = min(begin + self._chunk, tokens)
            if end - start >= min(end - begin, self._steady_from):
                return start
        return 0

    def load_prefix(self, sequence: Sequence, slot: int) -> None:
        """Copy what the prefix cache has of a prompt to its slot."""
        if self.prefix_cache is not None:
            cached = self.cached_tokens(sequence)
            sequence.computed_tokens = sequence.cached_tokens = cached
            self.prefix_cache.load(sequence.tokens[:cached], self.cache, slot, sequence.adapter)
            sequence.stored_blocks = cached // BLOCK

    def forget(self, sequence: Sequence) -> None:
        """Let no other text begin with what was computed for this one."""
        if self.prefix_cache is not None:
            self.prefix_cache.forget(sequence.tokens, sequence.adapter)
