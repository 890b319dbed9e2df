"""The memory of this process behind the interface of a device: what plans addresses for a GPU runs without one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.runtime.device.cuda import BlockCopy, Buffer, MemoryBlock, _address


class HostDevice:
    """The memory of this process as a device: no GPU, the same addresses and copies."""

    kind = "cpu"
    index = 0
    name = "host memory"
    sm = None
    stream = None

    def memory(self) -> tuple[int, int]:
        """Give 0 of 0: it is nobody's own."""
        return 0, 0

    def allocate(self, size: int) -> Buffer:
        """Reserve zeros, whose pages are taken when they are first written."""
        room = np.zeros(size + 256, np.uint8)
        memory = room[-room.ctypes.data % 256 :][:size]
        return Buffer(memory.ctypes.data, size, memory)

    def host(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Make an array."""
        return np.empty(shape, dtype)

    def write(self, buffer: Buffer, offset: int, values: NDArray[Any]) -> None:
        """Copy an array into a buffer, now."""
        _bytes(buffer, offset, values.nbytes)[:] = _flat(values)

    def read(self, buffer: Buffer, offset: int, values: NDArray[Any]) -> None:
        """Fill an array from a buffer."""
        _flat(values)[:] = _bytes(buffer, offset, values.nbytes)

    def fetch(self, buffer: Buffer, offset: int, values: NDArray[Any]) -> None:
        """Fill an array from a buffer, now."""
        self.read(buffer, offset, values)

    def read_beside(self, buffer: Buffer, offset: int, values: NDArray[Any]) -> None:
        """Fill an array from a buffer."""
        self.read(buffer, offset, values)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy pieces between buffers, now."""
        for target, source, width, height in copies:
            _pieces(target, width, height)[:] = _pieces(source, width, height).copy()

    def event(self) -> None:
        """Make nothing."""

    def record(self, event: None) -> None:
        """Return: everything is done when its call returns."""

    def wait(self, event: None) -> None:
        """Return."""

    def synchronize(self) -> None:
        """Return: everything is done when its call returns."""


def _flat(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Give the bytes of an array, as a view of it."""
    _address(values)
    return values.reshape(-1).view(np.uint8)


def _bytes(buffer: Buffer, offset: int, size: int) -> NDArray[np.uint8]:
    """Give bytes of the host's memory, as a view of it."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(buffer.at(offset, size)))


def _pieces(block: MemoryBlock, width: int, height: int) -> NDArray[np.uint8]:
    """Give the pieces of a block [height, width], as a view."""
    whole = _bytes(block.buffer, block.offset, block.pitch * (height - 1) + width)
    return np.lib.stride_tricks.as_strided(whole, (height, width), (block.pitch, 1))
