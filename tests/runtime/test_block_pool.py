"""Blocks of a paged cache: none is lost, none is freed twice, and none is written to that another text reads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmforge.runtime.block_pool import BlockPool, BlockTable, Copy, NoBlocks

SIZE = 4
BLOCKS = 7
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4 * SIZE)  # two words: texts begin alike


class Texts(RuleBasedStateMachine):
    """Texts that write their tokens into blocks, as a decoder does, and read them back through their tables."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.memory: dict[int, list[int | None]] = {block: [None] * SIZE for block in range(BLOCKS + 1)}
        self.texts: dict[BlockTable, list[int]] = {}

    def make(self, copies: list[Copy]) -> None:
        for copy in copies:
            assert copy.target != copy.source
            self.memory[copy.target][: copy.tokens] = self.memory[copy.source][: copy.tokens]

    def write(self, table: BlockTable, tokens: list[int], start: int) -> bool:
        """Write `tokens[start:]`; False: the pool has no room, and nothing has changed."""
        before, available = list(table.blocks), self.pool.available
        try:
            self.make(self.pool.grow(table, start, len(tokens)))
        except NoBlocks:
            assert (table.blocks, self.pool.available) == (before, available)
            return False
        for place in range(start, len(tokens)):
            self.memory[table.blocks[place // SIZE]][place % SIZE] = tokens[place] + 10 * table.adapter
        return True

    @rule(tokens=TOKENS, adapter=st.sampled_from([0, 0, 1]), shares=st.booleans())
    def opens(self, tokens: list[int], adapter: int, shares: bool) -> None:
        most = len(tokens) - 1
        table = self.pool.open(tokens, most // SIZE if shares else 0, adapter)
        start = len(table.blocks) * SIZE
        if shares:
            start += self.pool.borrow(table, tokens, 1, most)
        assert start <= most
        if self.write(table, tokens, start):
            self.texts[table] = list(tokens)
            self.pool.publish(table, tokens[: most if shares else 0])
        else:
            self.pool.close(table)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=TOKENS, publishes=st.booleans())
    def goes_on(self, data: st.DataObject, more: list[int], publishes: bool) -> None:
        table = data.draw(st.sampled_from(list(self.texts)))
        tokens = self.texts[table]
        if self.write(table, [*tokens, *more], len(tokens)):
            tokens += more
        if publishes:
            self.pool.publish(table, tokens)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def forks(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(list(self.texts)))
        self.texts[self.pool.fork(table)] = list(self.texts[table])

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(list(self.texts)))
        del self.texts[table]
        self.pool.close(table)

    @rule(tokens=TOKENS, adapter=st.sampled_from([0, 1]))
    def is_distrusted(self, tokens: list[int], adapter: int) -> None:
        self.pool.forget(tokens, adapter)
        if len(tokens) >= SIZE:
            assert self.pool.find(tokens, adapter) == 0

    @invariant()
    def every_text_reads_what_it_wrote(self) -> None:
        for table, tokens in self.texts.items():
            read = [self.memory[table.blocks[i // SIZE]][i % SIZE] for i in range(len(tokens))]
            assert read == [token + 10 * table.adapter for token in tokens]

    @invariant()
    def every_block_is_held_as_often_as_texts_hold_it(self) -> None:
        held = [block for table in self.texts for block in table.blocks]
        assert self.pool._references == [held.count(block) for block in range(BLOCKS + 1)]
        assert self.pool.used == len(set(held)) <= BLOCKS
        free = [*self.pool._free, *self.pool._idle]
        assert sorted([*free, *set(held)]) == list(range(1, BLOCKS + 1))  # each in one place, none lost, never 0
        assert self.pool.available == len(free)

    @invariant()
    def published_blocks_hold_their_tokens(self) -> None:
        for block, node in self.pool._node_of.items():
            adapter, *tokens = np.frombuffer(node.key, np.int32).tolist()
            assert self.memory[block] == [token + 10 * adapter for token in tokens]


TestTexts = Texts.TestCase
TestTexts.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_texts_that_begin_alike_hold_the_same_blocks_without_copies():
    pool, text = BlockPool(8, SIZE), list(range(11))
    first = pool.open(text)
    assert pool.grow(first, 0, 11) == []
    pool.publish(first, text)
    second = pool.open([*text[:8], 99, 98], 2)
    assert second.blocks == first.blocks[:2]
    assert pool.grow(second, 8, 10) == []
    assert pool.used == 4
    assert second.blocks[2] != first.blocks[2]


def test_a_part_of_a_block_in_common_is_copied_before_it_is_written_to():
    pool, text = BlockPool(8, SIZE), list(range(8))
    first = pool.open(text)
    pool.grow(first, 0, 8)
    pool.publish(first, text)
    second = pool.open([0, 1, 2, 3, 4, 5, 77], 1)
    assert pool.borrow(second, [0, 1, 2, 3, 4, 5, 77], 3, 6) == 0  # two are not worth it
    assert pool.borrow(second, [0, 1, 2, 3, 4, 5, 77], 2, 6) == 2
    assert second.blocks == first.blocks
    [copy] = pool.grow(second, 6, 7)
    assert (copy.source, copy.tokens) == (first.blocks[1], 2)
    assert second.blocks == [first.blocks[0], copy.target]


def test_texts_of_different_adapters_have_no_block_in_common():
    pool, text = BlockPool(8, SIZE), list(range(8))
    first = pool.open(text)
    pool.grow(first, 0, 8)
    pool.publish(first, text)
    assert (pool.find(text), pool.find(text, 1)) == (2, 0)
    second = pool.open(text, adapter=1)
    assert (second.blocks, pool.borrow(second, text, 1, 7)) == ([], 0)


def test_the_least_recently_used_published_block_goes_and_none_before_those_that_follow_it():
    pool = BlockPool(4, SIZE)
    for text in ([1] * 8, [2] * 8):
        table = pool.open(text)
        pool.grow(table, 0, 8)
        pool.publish(table, text)
        pool.close(table)
    pool.close(pool.open([1] * 8))  # used again
    table = pool.open([3] * 4)
    pool.grow(table, 0, 4)
    assert (pool.find([1] * 8), pool.find([2] * 8)) == (2, 1)
    pool.grow(table, 4, 8)
    assert (pool.find([1] * 8), pool.find([2] * 8)) == (2, 0)


def test_what_makes_no_sense_is_refused():
    pool = BlockPool(2, SIZE)
    table = pool.open(())
    pool.grow(table, 0, SIZE)
    pool.publish(table, [1] * SIZE)
    for start, end in ((SIZE - 1, SIZE), (SIZE + 1, SIZE + 2), (SIZE, SIZE - 1)):
        with pytest.raises(ValueError, match="may write"):
            pool.grow(table, start, end)
    with pytest.raises(NoBlocks, match="2 blocks wanted, 1 available"):
        pool.grow(table, SIZE, 3 * SIZE)
    pool.close(table)
    with pytest.raises(ValueError, match="closed before"):
        pool.close(table)
    with pytest.raises(ValueError, match="may write"):
        pool.grow(table, 0, 1)
    with pytest.raises(ValueError, match="a pool of 0 blocks"):
        BlockPool(0, SIZE)


def test_a_block_that_another_text_published_meanwhile_takes_the_place_of_ones_own():
    pool, text = BlockPool(8, SIZE), list(range(9))
    first, second = pool.open(text), pool.open(text)
    for table in (first, second):
        pool.grow(table, 0, 9)
    assert pool.used == 6
    for table in (first, second):
        pool.publish(table, text)
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    assert (pool.used, pool.find(text)) == (4, 2)
    pool.close(first)
    assert (pool.used, pool.available) == (3, 5)


def test_what_is_forgotten_is_found_by_nobody_and_stays_with_the_texts_that_hold_it():
    pool, text = BlockPool(4, SIZE), [1] * 8
    table = pool.open(text)
    pool.grow(table, 0, 8)
    pool.publish(table, text)
    pool.forget(text)
    assert (pool.find(text), pool.cached, pool.used, pool.available) == (0, 0, 2, 2)
    pool.close(table)
    assert (pool.used, pool.available) == (0, 4)
    table = pool.open(text)
    pool.grow(table, 0, 8)
    pool.publish(table, text)
    pool.close(table)
    assert (pool.cached, pool.idle(text, 2)) == (2, 2)
    pool.forget([1] * SIZE)
    assert (pool.cached, pool.find(text), pool.available) == (0, 0, 4)
    pool.forget(text)  # nothing is there
    table = pool.open(())
    pool.grow(table, 0, 4 * SIZE)
    assert sorted(table.blocks) == [1, 2, 3, 4]
