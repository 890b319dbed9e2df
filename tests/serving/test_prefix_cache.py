"""Kept prefixes: what is found, what is copied, what goes when memory is full."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from llmforge.backends.onnxruntime.cuda.session import DeviceSession
from llmforge.backends.onnxruntime.session import HostCache, Session
from llmforge.base.errors import UsageError
from llmforge.runtime.config import SessionConfig
from llmforge.runtime.interface import StepInputs
from llmforge.serving.prefix_cache import BLOCK, PrefixCache

from ..fakes.host_device import HostDevice
from ..models.decoder_graph import decoder

CAPACITY = 8 * BLOCK


@pytest.fixture(scope="module")
def session() -> Session:
    return Session(ir.to_proto(decoder()).SerializeToString(), SessionConfig(threads=1))


def filled(session: Session, seed: int) -> HostCache:
    """A cache of one row with random keys and values."""
    cache, random = session.allocate(1, CAPACITY), np.random.default_rng(seed)
    for buffer in cache.buffers.values():
        buffer[...] = random.standard_normal(buffer.shape)
    return cache


def text(seed: int, blocks: int, begins: list[int] | None = None) -> list[int]:
    begins = begins or []
    return begins + np.random.default_rng(seed).integers(0, 97, blocks * BLOCK - len(begins)).tolist()


def loaded(kept: PrefixCache[HostCache], tokens: list[int], target: HostCache, row: int = 0) -> int:
    """Load what is kept of `tokens` into `row`; return its length."""
    found = kept.find(tokens)
    kept.load(tokens[:found], target, row)
    return found


def prefixes(session: Session, blocks: int) -> PrefixCache[HostCache]:
    return PrefixCache(session, blocks * session.allocate(1, BLOCK).size_bytes)


def test_whole_blocks_come_back_bit_for_bit_into_any_row(session):
    kept = prefixes(session, 8)
    tokens, source, target = text(1, 3), filled(session, 1), session.allocate(3, CAPACITY)
    kept.store([*tokens, 4, 5, 6], source, 0)
    assert len(kept) == 3
    assert loaded(kept, [*tokens, 9, 9], target, row=1) == 3 * BLOCK
    for name, buffer in target.buffers.items():
        np.testing.assert_array_equal(buffer[1, :, : 3 * BLOCK], source.buffers[name][0, :, : 3 * BLOCK])
        assert not buffer[1, :, 3 * BLOCK :].any()
        assert not buffer[[0, 2]].any()


def test_only_what_the_text_shares_from_its_beginning_is_found(session):
    kept, cache = prefixes(session, 8), filled(session, 1)
    tokens = text(1, 4)
    kept.store(tokens, cache, 0)
    target = session.allocate(1, CAPACITY)
    other = [*tokens[: 2 * BLOCK + 5], tokens[2 * BLOCK + 5] + 1, *tokens[2 * BLOCK + 6 :]]
    assert loaded(kept, other, target) == 2 * BLOCK
    assert loaded(kept, tokens[BLOCK:], target) == 0  # the same tokens elsewhere have other keys
    assert loaded(kept, tokens[:-1], target) == 3 * BLOCK
    assert loaded(kept, tokens[: BLOCK - 1], target) == 0


def test_texts_share_the_blocks_that_they_begin_with(session):
    kept, target = prefixes(session, 8), session.allocate(1, CAPACITY)
    first = text(1, 3)
    second = text(2, 4, begins=first[: 2 * BLOCK])
    one, two = filled(session, 1), filled(session, 2)
    kept.store(first, one, 0)
    kept.store(second, two, 0)
    assert len(kept) == 3 + 2
    assert loaded(kept, second, target) == 4 * BLOCK
    name = "past_key_values.1.value"
    np.testing.assert_array_equal(target.buffers[name][0, :, :64], one.buffers[name][0, :, :64])
    np.testing.assert_array_equal(target.buffers[name][0, :, 64:128], two.buffers[name][0, :, 64:128])


def test_the_least_recently_used_goes_first_and_ends_before_beginnings(session):
    kept, cache, target = prefixes(session, 6), filled(session, 1), session.allocate(1, CAPACITY)
    old, used, new = text(1, 3), text(2, 3), text(3, 2)
    kept.store(old, cache, 0)
    kept.store(used, cache, 0)
    assert loaded(kept, old, target) == 3 * BLOCK  # now `used` is the older one
    kept.store(new, cache, 0)
    assert len(kept) == 6
    assert loaded(kept, new, target) == 2 * BLOCK
    assert loaded(kept, old, target) == 3 * BLOCK
    assert loaded(kept, used, target) == BLOCK


def test_a_text_longer_than_the_memory_keeps_its_beginning(session):
    kept, cache, target = prefixes(session, 3), filled(session, 1), session.allocate(1, CAPACITY)
    kept.store(text(1, 2), cache, 0)
    long = text(2, 7)
    kept.store(long, cache, 0)
    kept.store(long, cache, 0)
    assert len(kept) == 3
    assert loaded(kept, long, target) == 3 * BLOCK
    assert loaded(kept, text(1, 2), target) == 0


def test_a_beginning_is_forgotten_with_all_that_follows_it(session):
    kept, cache, target = prefixes(session, 8), filled(session, 1), session.allocate(1, CAPACITY)
    first, other = text(1, 3), text(3, 2)
    second = text(2, 4, begins=first[: 2 * BLOCK])
    for tokens in (first, second, other):
        kept.store(tokens, cache, 0)
    kept.forget(first)
    assert len(kept) == 2
    assert loaded(kept, second, target) == 0
    assert loaded(kept, other, target) == 2 * BLOCK
    kept.forget(text(9, 1))
    kept.store(text(4, 6), cache, 0)  # all room is there again
    assert len(kept) == 8


def test_no_block_is_lost_or_found_wrongly_in_a_long_random_life(session):
    kept, random = prefixes(session, 10), np.random.default_rng(0)
    beginnings = [text(seed, 2) for seed in range(4)]
    marker = "past_key_values.0.key"
    target = session.allocate(1, CAPACITY)
    found = 0
    for _ in range(300):
        begins = beginnings[random.integers(4)]
        tokens = begins + random.integers(0, 3, 1).repeat(int(random.integers(0, 4 * BLOCK))).tolist()
        cache = session.allocate(1, CAPACITY)
        # Each slot holds what tells its text up to there apart: sums of tokens, weighted by place.
        sums = np.cumsum(np.array(tokens) * (1 + np.arange(len(tokens)) % 7))
        cache.buffers[marker][0, :, : len(tokens)] = sums[None, :, None]
        got = loaded(kept, tokens, target)
        np.testing.assert_array_equal(target.buffers[marker][0, 0, :got, 0], sums[:got])
        kept.store(tokens, cache, 0)
        found += got
        assert len(kept) <= 10
        assert len({block.row for block in kept._lru}) + len(kept._free) == 10
    assert found > 300 * BLOCK


def test_memory_without_room_for_a_block_is_refused(session):
    with pytest.raises(UsageError, match="a prefix cache of 100 bytes; one block of 32 tokens takes 16384"):
        PrefixCache(session, 100)


def test_blocks_in_a_devices_memory_are_copied_in_one_call(monkeypatch):
    device, calls = HostDevice(), []
    over = DeviceSession(ir.to_proto(decoder()).SerializeToString(), SessionConfig(threads=1), device)
    kept = PrefixCache(over, 8 * over.allocate(1, BLOCK).size_bytes)
    cache, tokens = over.allocate(2, CAPACITY), text(1, 5)
    wanted = over.step(StepInputs(np.array([tokens]), np.zeros(1, np.int32)), cache.rows(0, 1))
    copy = device.copy
    monkeypatch.setattr(device, "copy", lambda copies: calls.append(len(copies)) or copy(copies))
    kept.store(tokens, cache, 0)
    kept.load(tokens[: 4 * BLOCK], cache, 1)
    assert calls == [5 * 4, 4 * 4]  # blocks, and keys and values of two layers: one call each
    past = np.array([4 * BLOCK], np.int32)
    got = over.step(StepInputs(np.array([tokens[4 * BLOCK :]]), past), cache.rows(1, 2))
    np.testing.assert_allclose(got, wanted, atol=1e-4)
