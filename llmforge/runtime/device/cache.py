"""Keys and values in a device's memory: rows of a preallocated buffer for every cache input of a graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llmforge.runtime.device.cuda import BlockCopy, Buffer, Device, MemoryBlock
from llmforge.runtime.interface import RowCopy, Rows
from llmforge.runtime.signature import ELEMENTS, Signature


@dataclass(frozen=True)
class CacheTensor:
    """The memory of one cache [batch, kv_heads, capacity, head_dim] or state [batch, …].

    `dims` are those after the batch. A row is `heads` heads, each of `capacity` tokens of `token_bytes`; a state is
    one head of one token.
    """

    buffer: Buffer = field(repr=False)
    onnx: int  # the type of its elements, as ONNX numbers them
    dims: tuple[int, ...]
    heads: int
    token_bytes: int
    is_state: bool

    @property
    def row_bytes(self) -> int:
        """Size of one row."""
        return self.heads * self.tokens * self.token_bytes

    @property
    def tokens(self) -> int:
        """Tokens of a head; one of a state."""
        return 1 if self.is_state else self.dims[1]


@dataclass(frozen=True, eq=False)
class CacheMemory:
    """The tensors of one cache by the names of the graph's inputs; all its views have this object in common."""

    device: Device = field(repr=False)
    tensors: Mapping[str, CacheTensor]


@dataclass(frozen=True, eq=False)
class DeviceCache(Rows):
    """Rows `start` … `start + batch - 1` of a memory.

    A view of the first rows has the address of the whole with another shape. A row whose past is empty may hold
    anything: no graph reads it.
    """

    memory: CacheMemory
    start: int = 0

    def address(self, name: str) -> int:
        """Give where the rows of the cache `name` begin."""
        tensor = self.memory.tensors[name]
        return tensor.buffer.at(self.start * tensor.row_bytes, self.batch * tensor.row_bytes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Give the shape of the cache `name`."""
        return (self.batch, *self.memory.tensors[name].dims)

    def _view(self, start: int, stop: int) -> DeviceCache:
        return DeviceCache(stop - start, self.capacity, self.memory, self.start + start)

    def copy(self, row: int, start: int, source: DeviceCache, source_row: int, source_start: int, tokens: int) -> None:
        """Copy `tokens` tokens, and states as a whole, from token `source_start` of a row of `source` to `start`."""
        self.copy_all(source, [RowCopy(row, start, source_row, source_start, tokens)])

    def copy_all(self, source: DeviceCache, copies: Sequence[RowCopy]) -> None:
        """Make copies of rows of `source` in one call of the device."""
        for each in copies:
            self._check(each.row, each.start, each.tokens)
            source._check(each.source_row, each.source_start, each.tokens)
        self.memory.device.copy([piece for each in copies for piece in self._pieces(source, each)])

    def _pieces(self, source: DeviceCache, copy: RowCopy) -> Iterator[BlockCopy]:
        """Give what one copy is in each tensor."""
        for name, tensor in self.memory.tensors.items():
            count = 1 if tensor.is_state else copy.tokens
            if count:
                into = self._block(tensor, copy.row, 0 if tensor.is_state else copy.start)
                start = 0 if tensor.is_state else copy.source_start
                out = source._block(source.memory.tensors[name], copy.source_row, start)
                yield BlockCopy(into, out, width=count * tensor.token_bytes, height=tensor.heads)

    @property
    def size_bytes(self) -> int:
        """Size of all rows."""
        return sum(self.batch * tensor.row_bytes for tensor in self.memory.tensors.values())

    def _check(self, row: int, start: int, tokens: int) -> None:
        if not 0 <= row < self.batch or start < 0 or tokens < 0 or start + tokens > self.capacity:
            raise ValueError(
                f"tokens {start} … {start + tokens} of row {row}, of a cache of {self.batch} rows of "
                f"{self.capacity} tokens"
            )

    def _block(self, tensor: CacheTensor, row: int, token: int) -> MemoryBlock:
        """Give where token `token` of every head of a row lies."""
        offset = (self.start + row) * tensor.row_bytes + token * tensor.token_bytes
        return MemoryBlock(tensor.buffer, offset, tensor.tokens * tensor.token_bytes)


def allocate(device: Device, signature: Signature, batch: int, capacity: int) -> DeviceCache:
    """Reserve caches of zeros for `batch` sequences of at most `capacity` tokens.

    Raises:
        EnvironmentLacks: the device has no room for them.
    """
    if batch < 1 or capacity < 1:
        raise ValueError(f"a cache of {batch} rows of {capacity} tokens")
    tensors = {}
    for cache in signature.caches:
        element = ELEMENTS[cache.dtype]
        dims, token_bytes = (cache.kv_heads, capacity, cache.head_dim), cache.head_dim * element.size_bytes
        buffer = device.allocate(batch * cache.kv_heads * capacity * token_bytes)
        tensors[cache.name] = CacheTensor(buffer, element.onnx, dims, cache.kv_heads, token_bytes, is_state=False)
    for state in signature.states:
        element = ELEMENTS[state.dtype]
        size = math.prod(state.dims) * element.size_bytes
        buffer = device.allocate(batch * size)
        tensors[state.name] = CacheTensor(buffer, element.onnx, state.dims, 1, size, is_state=True)
    return DeviceCache(batch, capacity, CacheMemory(device, tensors))
