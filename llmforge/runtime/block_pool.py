"""The blocks of a paged cache and the texts that hold them: a free list, reference counts, shared blocks.

Pure bookkeeping, without memory: a block is a number from 1 on, room for `block_size` tokens in every layer. Number 0
is nobody's: rows of padding write there.

A block of tokens that are computed may be published: it follows another published block, or begins a text, and texts
that begin alike then hold the same block, with a reference each. They are compared by their tokens and by the adapter
that computed them, not by a hash. A published block that no text holds any more stays as long as there is room, and
goes when it is the least recently used one. Who holds a block holds those before it, so none goes before those that
follow.

A text only writes to blocks of which it alone holds a reference and that are not published: before it writes into
another one, which a fork or a part of a block in common gives it, it gets a copy of it (`Copy`), which the caller
makes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

# Blocks that follow the same one and are looked through for one that begins as a text goes on.
_LOOKED_THROUGH = 32


class NoBlocks(Exception):  # no error of a user: the scheduler makes room
    """The pool has fewer blocks than are wanted; nothing was changed."""


class Copy(NamedTuple):
    """What a block must be filled with before it is written to: the first `tokens` of another one."""

    target: int
    source: int
    tokens: int


@dataclass(eq=False)
class _Published:
    """A block whose tokens are known; `children` follow it in other texts or the same one."""

    block: int
    key: bytes
    parent: _Published | None = field(repr=False)
    children: dict[bytes, _Published] = field(default_factory=dict, repr=False)


@dataclass(eq=False)
class BlockTable:
    """The blocks of one text, in order; the first `published` of them are in the tree, the last one of these `leaf`."""

    adapter: int = 0
    blocks: list[int] = field(default_factory=list)
    published: int = 0
    leaf: _Published | None = field(default=None, repr=False)
    closed: bool = False


class BlockPool:
    """`blocks` blocks of `block_size` tokens."""

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {blocks} blocks of {block_size} tokens")
        self.blocks = blocks
        self.block_size = block_size
        self._free = list(range(blocks, 0, -1))
        self._references = [0] * (blocks + 1)
        self._roots: dict[bytes, _Published] = {}
        self._node_of: dict[int, _Published] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, without references; the next to go first

    @property
    def available(self) -> int:
        """Blocks that a text could get: free ones, and published ones that no text holds."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that texts hold."""
        return self.blocks - self.available

    @property
    def cached(self) -> int:
        """Published blocks, held or not."""
        return len(self._node_of)

    def count(self, tokens: int) -> int:
        """Count the blocks that so many tokens take."""
        return -(-tokens // self.block_size)

    def find(self, tokens: Sequence[int], adapter: int = 0) -> int:
        """Count the published blocks that `tokens` begin with."""
        return len(self._path(tokens, adapter))

    def idle(self, tokens: Sequence[int], blocks: int, adapter: int = 0) -> int:
        """Count those of the first `blocks` published ones of `tokens` that no text holds."""
        return sum(node.block in self._idle for node in self._path(tokens, adapter)[:blocks])

    def open(self, tokens: Sequence[int], blocks: int | None = None, adapter: int = 0) -> BlockTable:
        """Begin a text that holds the published blocks that `tokens` begin with, at most `blocks` of them."""
        path = self._path(tokens, adapter)[:blocks]
        for node in path:
            self._hold(node.block)
        return BlockTable(adapter, [node.block for node in path], len(path), path[-1] if path else None)

    def borrow(self, table: BlockTable, tokens: Sequence[int], least: int, most: int) -> int:
        """Let a text, which holds published blocks alone, share the beginning of one more; count tokens in common.

        `tokens` are those of the whole text; at most `most` of them are taken, all blocks together, and fewer than
        `least` of the block are not worth it. It is copied before it is written to (`grow`).
        """
        start = len(table.blocks) * self.block_size
        wanted = _numbers(tokens[start : min(start + self.block_size, most)])
        children = self._roots if table.leaf is None else table.leaf.children
        found, common = None, least - 1
        for node in list(children.values())[-_LOOKED_THROUGH:]:
            adapter, held = _read(node.key)
            if adapter == table.adapter and len(wanted):
                same = wanted == held[: len(wanted)]
                length = len(wanted) if same.all() else int(same.argmin())
                if length > common:
                    found, common = node, length
        if found is None:
            return 0
        self._hold(found.block)
        table.blocks.append(found.block)
        return common

    def fork(self, table: BlockTable) -> BlockTable:
        """Begin another text that holds all blocks of `table`, the partially filled one, too."""
        for block in table.blocks:
            self._hold(block)
        return BlockTable(table.adapter, list(table.blocks), table.published, table.leaf)

    def grow(self, table: BlockTable, start: int, end: int) -> list[Copy]:
        """Let a text write its tokens `start` … `end - 1`: give it blocks, and copies of those that it has in common.

        Raises:
            NoBlocks: there are not as many.
        """
        first, last = table.published * self.block_size, len(table.blocks) * self.block_size
        if table.closed or not first <= start <= min(end, last):
            raise ValueError(f"tokens {start} … {end} of a text that may write {first} … {last}, and behind that")
        if start < end <= min(last, (start // self.block_size + 1) * self.block_size):  # a step of decoding, mostly
            block = table.blocks[start // self.block_size]
            if self._references[block] == 1 and block not in self._node_of:
                return []
        written = range(start // self.block_size, min(self.count(end), len(table.blocks)))
        shared = [i for i in written if self._references[table.blocks[i]] > 1 or table.blocks[i] in self._node_of]
        new = max(0, self.count(end) - len(table.blocks))
        if len(shared) + new > self.available:
            raise NoBlocks(f"{len(shared) + new} blocks wanted, {self.available} available")
        copies = []
        for i in shared:
            block, source = self._take(), table.blocks[i]
            copies.append(Copy(block, source, max(0, start - i * self.block_size)))
            table.blocks[i] = block
            self._release(source)
        table.blocks += [self._take() for _ in range(new)]
        return [copy for copy in copies if copy.tokens]

    def publish(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Let others have the blocks of a text that `tokens`, which it has computed, fill.

        A block that was published by another text meanwhile takes the place of this one's own, which is freed.
        """
        for i in range(table.published, min(len(tokens) // self.block_size, len(table.blocks))):
            key = self._key(tokens, i, table.adapter)
            siblings = self._roots if table.leaf is None else table.leaf.children
            own, node = table.blocks[i], siblings.get(key)
            if node is None:
                if own in self._node_of:  # of another text, whose beginning it is: not this one's to publish
                    break
                node = siblings[key] = self._node_of[own] = _Published(own, key, table.leaf)
            elif node.block != own:
                self._hold(node.block)
                table.blocks[i] = node.block
                self._release(own)
            table.leaf, table.published = node, i + 1

    def close(self, table: BlockTable) -> None:
        """Let go of all blocks of a text, which ends."""
        if table.closed:
            raise ValueError("this text was closed before")
        table.closed = True
        for block in reversed(table.blocks):  # so that the first is the last to go
            self._release(block)
        table.blocks.clear()

    def forget(self, tokens: Sequence[int], adapter: int = 0) -> None:
        """Publish no longer the first block of `tokens`, and all that follow it in whatever texts.

        Texts that hold them keep them.
        """
        first = self._roots.pop(self._key(tokens, 0, adapter), None)
        dropped = [] if first is None else [first]
        for node in dropped:
            dropped += node.children.values()
            node.children.clear()
            node.parent = None
            del self._node_of[node.block]
            if node.block in self._idle:
                del self._idle[node.block]
                self._free.append(node.block)

    def _path(self, tokens: Sequence[int], adapter: int) -> list[_Published]:
        path: list[_Published] = []
        children = self._roots
        for i in range(len(tokens) // self.block_size):
            node = children.get(self._key(tokens, i, adapter))
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def _key(self, tokens: Sequence[int], block: int, adapter: int) -> bytes:
        own = tokens[block * self.block_size : (block + 1) * self.block_size]
        return _numbers([adapter, *own]).tobytes()

    def _take(self) -> int:
        """Give a block that nobody holds to one text, the least recently used published one if none is free."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            node = self._node_of.pop(block)
            assert not node.children, "a block goes before one that follows it"
            del (self._roots if node.parent is None else node.parent.children)[node.key]
        self._references[block] = 1
        return block

    def _hold(self, block: int) -> None:
        self._idle.pop(block, None)
        self._references[block] += 1

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        assert self._references[block] >= 0, "a block was freed twice"
        if self._references[block] == 0:
            if block in self._node_of:
                self._idle[block] = None
            else:
                self._free.append(block)


def _numbers(tokens: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


def _read(key: bytes) -> tuple[int, np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """Read the adapter and the tokens of a key."""
    numbers = np.frombuffer(key, np.int32)
    return int(numbers[0]), numbers[1:]
