"""Prefix cache: keys and values of texts that were computed before, in blocks, for texts that begin alike.

A block is `BLOCK` tokens that follow the tokens of another block, or begin a text: blocks form a tree, and a path from
the root is the beginning of some text (system prompts, earlier turns of a conversation). Blocks are compared by their
tokens, not by a hash of them, and by the number of the adapter that computed them: none serves a text of another one.
Their keys and values lie in a cache of the decoder, one row a block, of fixed size; they are copied in and out, at a
few percent of what computing them costs.

When all rows are taken, the block that was used least recently goes. Whoever uses a block uses those before it, so
that no block goes before those that follow it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import UsageError
from llmforge.runtime.interface import C, Decoder, RowCopy

# Short enough that little is read again (half a block on average), long enough that copying and looking up cost little.
BLOCK = 32


@dataclass(frozen=True)
class Prefix:
    """What prompts begin with, by its name."""

    name: str
    ids: tuple[int, ...]


@dataclass(eq=False)
class _Block:
    """One block; `row` is its place in the pool, and it stands among its `siblings` under its key."""

    row: int
    key: bytes
    siblings: dict[bytes, _Block] = field(repr=False)
    children: dict[bytes, _Block] = field(default_factory=dict)


class PrefixCache(Generic[C]):
    """Blocks of texts in at most `size_bytes` of memory, of which no page is taken before a block reaches it.

    Raises:
        UsageError: `size_bytes` has no room for one block.
    """

    def __init__(self, backend: Decoder[C], size_bytes: int) -> None:
        self.block_bytes = backend.allocate(1, BLOCK).size_bytes
        self.capacity = size_bytes // self.block_bytes  # blocks
        if self.capacity < 1:
            raise UsageError(
                f"a prefix cache of {size_bytes} bytes; one block of {BLOCK} tokens takes {self.block_bytes}",
                hint="increase it, or use 0 to disable it",
            )
        self._pool = backend.allocate(self.capacity, BLOCK)
        self._free = list(range(self.capacity - 1, -1, -1))
        self._roots: dict[bytes, _Block] = {}
        self._lru: OrderedDict[_Block, None] = OrderedDict()  # the least recently used block first

    def __len__(self) -> int:
        return len(self._lru)

    def find(self, tokens: Sequence[int], adapter: int = 0) -> int:
        """Give the length of the longest prefix of `tokens` that is stored, a multiple of `BLOCK`."""
        return len(self._path(tokens, len(tokens) // BLOCK, adapter)) * BLOCK

    def load(self, tokens: Sequence[int], cache: C, row: int, adapter: int = 0) -> None:
        """Copy `tokens`, whole blocks that are stored, into `row`."""
        path = self._path(tokens, len(tokens) // BLOCK, adapter)
        cache.copy_all(self._pool, [RowCopy(row, i * BLOCK, block.row, 0, BLOCK) for i, block in enumerate(path)])
        self._touch(path)

    def store(self, tokens: Sequence[int], cache: C, row: int, adapter: int = 0) -> None:
        """Store `tokens`, which `row` holds from its first one on, but for the last ones that fill no block.

        A text that is longer than all the memory is stored as far as that reaches.
        """
        added = self._add(tokens, min(len(tokens) // BLOCK, self.capacity), adapter)
        self._pool.copy_all(cache, [RowCopy(block.row, 0, row, i * BLOCK, BLOCK) for i, block in added])

    def read(self, tokens: Sequence[int]) -> dict[str, NDArray[Any]] | None:
        """Copy what is stored of `tokens`: arrays [blocks, …] by names; None: they are on a device."""
        rows = [self._pool.row_arrays(block.row) for block in self._path(tokens, len(tokens) // BLOCK, 0)]
        if not rows or any(row is None for row in rows):
            return None
        found = [row for row in rows if row is not None]
        return {name: np.stack([row[name] for row in found]) for name in found[0]}

    def write(self, tokens: Sequence[int], arrays: Mapping[str, NDArray[Any]]) -> bool:
        """Store `tokens` from what `read` gave; return whether the arrays are those of whole blocks of this cache."""
        like = self._pool.row_arrays(0)
        count = len(tokens) // BLOCK
        if like is None or count > self.capacity or like.keys() != arrays.keys():
            return False
        if any(arrays[name].shape != (count, *a.shape) or arrays[name].dtype != a.dtype for name, a in like.items()):
            return False
        for i, block in self._add(tokens, count, 0):
            for name, array in (self._pool.row_arrays(block.row) or {}).items():
                array[...] = arrays[name][i]
        return True

    def _add(self, tokens: Sequence[int], count: int, adapter: int) -> list[tuple[int, _Block]]:
        """Make room for the first `count` blocks of `tokens`; return those that were not there, by their numbers."""
        path = self._path(tokens, count, adapter)
        self._touch(path)  # so none of them is the oldest: others are, or there is room
        first = len(path)
        for i in range(first, count):
            row_of_pool = self._free.pop() if self._free else self._evict()
            block = _Block(row_of_pool, _key(tokens, i, adapter), path[-1].children if path else self._roots)
            block.siblings[block.key] = block
            self._lru[block] = None
            path.append(block)
        self._touch(path)
        return list(enumerate(path))[first:]

    def forget(self, tokens: Sequence[int], adapter: int = 0) -> None:
        """Drop the first block of `tokens` and all that follow it, in whatever texts."""
        first = self._roots.pop(_key(tokens, 0, adapter), None)
        dropped = [] if first is None else [first]
        for block in dropped:
            dropped += block.children.values()
            del self._lru[block]
            self._free.append(block.row)

    def _path(self, tokens: Sequence[int], count: int, adapter: int) -> list[_Block]:
        """Follow the first `count` blocks of `tokens` as far as they are stored."""
        path: list[_Block] = []
        children = self._roots
        for i in range(count):
            block = children.get(_key(tokens, i, adapter))
            if block is None:
                break
            path.append(block)
            children = block.children
        return path

    def _touch(self, path: Sequence[_Block]) -> None:
        """Make the blocks of `path` the most recently used ones, its first block the very last to go."""
        for block in reversed(path):
            self._lru.move_to_end(block)

    def _evict(self) -> int:
        """Drop the least recently used block; return its row of the pool."""
        oldest, _ = self._lru.popitem(last=False)
        assert not oldest.children
        del oldest.siblings[oldest.key]
        return oldest.row


def _key(tokens: Sequence[int], block: int, adapter: int) -> bytes:
    """Make the key of a block: its tokens, and what computed them, in which a prefix of another adapter differs."""
    if adapter:
        tokens, block = (adapter, *tokens[block * BLOCK : (block + 1) * BLOCK]), 0
        return np.array(tokens, np.int32).tobytes()
    return np.array(tokens[block * BLOCK : (block + 1) * BLOCK], np.int32).tobytes()
