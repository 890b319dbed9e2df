"""Keys and values in a device's memory: rows of a preallocated buffer for every cache input of a graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmforge.runtime.backends.device import Block, Buffer, Device
from llmforge.runtime.backends.signature import ELEMENTS, Signature


@dataclass(frozen=True)
class Part:
    """The buffer of one cache [batch, kv_heads, capacity, head_dim] or state [batch, …].

    `dims` are those behind the batch. A row is `pieces` pieces, each of `capacity` slots of `slot_bytes`; a state is
    one piece of one slot.
    """

    buffer: Buffer = field(repr=False)
    onnx: int  # the type of its elements, as ONNX numbers them
    dims: tuple[int, ...]
    pieces: int
    slot_bytes: int
    is_state: bool

    @property
    def row_bytes(self) -> int:
        """Size of one row."""
        return self.pieces * self.slots * self.slot_bytes

    @property
    def slots(self) -> int:
        """Slots of a piece: one a token, or one in all."""
        return 1 if self.is_state else self.dims[1]


@dataclass(frozen=True, eq=False)
class Memory:
    """The buffers of one cache by the names of the graph's inputs; all its views have this object in common."""

    device: Device = field(repr=False)
    parts: Mapping[str, Part]


@dataclass(frozen=True, eq=False)
class DeviceCache:
    """Rows `start` … `start + batch - 1` of a memory (`llmforge.runtime.backends.interface.Rows`).

    A view of the first rows has the address of the whole with another shape. A row whose past is empty may hold
    anything: no graph reads it.
    """

    memory: Memory
    start: int
    batch: int
    capacity: int
    _views: dict[tuple[int, int], DeviceCache] = field(default_factory=dict, repr=False)

    def address(self, name: str) -> int:
        """Give where the rows of the cache `name` begin."""
        part = self.memory.parts[name]
        return part.buffer.at(self.start * part.row_bytes, self.batch * part.row_bytes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Give the shape of the cache `name`."""
        return (self.batch, *self.memory.parts[name].dims)

    def rows(self, start: int, stop: int) -> DeviceCache:
        """Give rows `start` … `stop - 1` as a cache that shares this one's memory; equal calls give one object."""
        if (start, stop) == (0, self.batch):
            return self
        if not 0 <= start < stop <= self.batch:
            raise ValueError(f"rows {start}:{stop} of a cache of {self.batch} rows")
        if (start, stop) not in self._views:
            self._views[start, stop] = DeviceCache(self.memory, self.start + start, stop - start, self.capacity)
        return self._views[start, stop]

    def copy(self, row: int, start: int, source: DeviceCache, source_row: int, source_start: int, tokens: int) -> None:
        """Copy `tokens` tokens, and states as a whole, from slot `source_start` of a row of `source` to `start`."""
        self._check(row, start, tokens)
        source._check(source_row, source_start, tokens)
        for name, part in self.memory.parts.items():
            other = source.memory.parts[name]
            count = 1 if part.is_state else tokens
            if count:
                into = self._block(part, row, 0 if part.is_state else start)
                out = source._block(other, source_row, 0 if part.is_state else source_start)
                self.memory.device.copy(into, out, width=count * part.slot_bytes, height=part.pieces)

    @property
    def size_bytes(self) -> int:
        """Size of all rows."""
        return sum(self.batch * part.row_bytes for part in self.memory.parts.values())

    def _check(self, row: int, start: int, tokens: int) -> None:
        if not 0 <= row < self.batch or start < 0 or tokens < 0 or start + tokens > self.capacity:
            raise ValueError(
                f"tokens {start} … {start + tokens} of row {row}, of a cache of {self.batch} rows of "
                f"{self.capacity} tokens"
            )

    def _block(self, part: Part, row: int, slot: int) -> Block:
        """Give where slot `slot` of every piece of a row lies."""
        offset = (self.start + row) * part.row_bytes + slot * part.slot_bytes
        return Block(part.buffer, offset, part.slots * part.slot_bytes)


def allocate(device: Device, signature: Signature, batch: int, capacity: int) -> DeviceCache:
    """Reserve caches of zeros for `batch` sequences of at most `capacity` tokens.

    Raises:
        EnvironmentLacks: the device has no room for them.
    """
    if batch < 1 or capacity < 1:
        raise ValueError(f"a cache of {batch} rows of {capacity} tokens")
    parts = {}
    for cache in signature.caches:
        element = ELEMENTS[cache.dtype]
        dims, slot = (cache.kv_heads, capacity, cache.head_dim), cache.head_dim * element.size_bytes
        buffer = device.allocate(batch * cache.kv_heads * capacity * slot)
        parts[cache.name] = Part(buffer, element.onnx, dims, cache.kv_heads, slot, is_state=False)
    for state in signature.states:
        element = ELEMENTS[state.dtype]
        size = math.prod(state.dims) * element.size_bytes
        parts[state.name] = Part(device.allocate(batch * size), element.onnx, state.dims, 1, size, is_state=True)
    return DeviceCache(Memory(device, parts), 0, batch, capacity)
