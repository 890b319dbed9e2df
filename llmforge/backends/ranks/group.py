"""Memory that a driver and its ranks share, and the ways in which they wait for one another (native/collectives.inc).

It has no name (memfd_create): it is gone with the last process that has it, however that ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import struct
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge import native
from llmforge.base.errors import EnvironmentLacks, UsageError

_LENGTH = struct.Struct("<Q")
CAME, TIMEOUT, BROKEN = 1, 0, -1  # what waiting ends with
DRIVER = -1  # in place of a rank


@cache
def _library() -> ctypes.CDLL:
    """Load what ranks wait with.

    Raises:
        EnvironmentLacks: the kernels are not compiled, or the system is no Linux.
    """
    if not hasattr(os, "memfd_create") or not hasattr(ctypes.CDLL(str(native.require())), "llmforge_group_bytes"):
        raise EnvironmentLacks(
            "tensor_parallel: ranks on a CPU meet in shared memory of Linux (memfd, futex), and this system has none",
            hint="set engine.tensor_parallel to 1",
        )
    group, number = ctypes.c_void_p, ctypes.c_int64
    signatures: dict[str, tuple[list[Any], Any]] = {
        "group_bytes": ([number], number),
        "group_init": ([group, number], None),
        "group_join": ([group, number, number, number], None),
        "group_break": ([group, number], None),
        "group_broken_by": ([group], number),
        "group_command": ([group], number),
        "group_await": ([group, number, number], ctypes.c_int),
        "group_answer": ([group, number, number], None),
        "group_answers": ([group, number, number], ctypes.c_int),
        "group_progress": ([group, number], number),
        "group_answered": ([group, number], number),
    }
    library = native.functions(signatures, ctypes.CDLL)
    assert library is not None
    return library


def require() -> None:
    """Return if ranks can run here; raises what `RankGroup` does."""
    _library()


class SharedMemory:
    """Anonymous memory of `size` bytes that other processes map by its `descriptor`; None: it is made.

    Pages are taken as they are written.
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.size, self.descriptor = size, os.memfd_create("llmforge") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, size)
        self.map = mmap.mmap(self.descriptor, size)

    def write(self, at: int, message: Any, room: int) -> None:
        """Leave a message, pickled, from byte `at` on.

        Raises:
            UsageError: it has more than `room` bytes.
        """
        packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if len(packed) > room:
            raise UsageError(f"a step of {len(packed)} bytes of inputs; ranks take at most {room}")
        self.map[at : at + _LENGTH.size + len(packed)] = _LENGTH.pack(len(packed)) + packed

    def read(self, at: int = 0) -> Any:
        """Read the message that was left last from byte `at` on."""
        start = at + _LENGTH.size
        [length] = _LENGTH.unpack(self.map[at:start])
        return pickle.loads(self.map[start : start + length])


class RankGroup:
    """Ranks that meet in shared memory; the driver's view of it, or a rank's.

    Commands, pickled, lie after what the collectives need: one at a time, of at most `room` bytes.

    Raises:
        EnvironmentLacks: the kernels are not compiled, or the system is no Linux.
    """

    def __init__(self, ranks: int, room: int, descriptor: int | None = None) -> None:
        self._library = _library()
        self.ranks, self.room = ranks, room
        self._at = self._library.llmforge_group_bytes(ranks)
        self._memory = SharedMemory(self._at + _LENGTH.size + room, descriptor)
        self._first = ctypes.c_char.from_buffer(self._memory.map)  # keeps the mapping where it is
        self._address = ctypes.addressof(self._first)
        if descriptor is None:
            self._library.llmforge_group_init(self._address, ranks)

    @property
    def descriptor(self) -> int:
        """What a rank maps."""
        return self._memory.descriptor

    def join(self, rank: int, spins: int, limit_s: float) -> None:
        """Be `rank`: the collectives of this process meet here, and wait for at most `limit_s` for the others."""
        self._library.llmforge_group_join(self._address, rank, spins, int(limit_s * 1000))

    def break_up(self, rank: int = DRIVER) -> None:
        """Let nobody wait for anybody here any more; `rank` says who found why."""
        self._library.llmforge_group_break(self._address, rank)

    @property
    def broken_by(self) -> int | None:
        """The rank that broke the group first, or `DRIVER`; None: nobody."""
        by = int(self._library.llmforge_group_broken_by(self._address))
        return None if by < DRIVER else by

    def command(self, message: Any) -> int:
        """Give all ranks a command and return its number.

        Raises:
            UsageError: it does not fit.
        """
        self._memory.write(self._at, message, self.room)
        return int(self._library.llmforge_group_command(self._address))

    def read(self) -> Any:
        """Read the command that was given last."""
        return self._memory.read(self._at)

    def wait(self, seen: int, wait_s: float) -> int:
        """Wait for a command after number `seen`."""
        return int(self._library.llmforge_group_await(self._address, seen, int(wait_s * 1000)))

    def answer(self, rank: int, number: int) -> None:
        """Say that `rank` has done command `number`."""
        self._library.llmforge_group_answer(self._address, rank, number)

    def answers(self, number: int, wait_s: float) -> int:
        """Wait until all ranks have done command `number`."""
        return int(self._library.llmforge_group_answers(self._address, number, int(wait_s * 1000)))

    def answered(self, rank: int) -> int:
        """Return the number of the last command that `rank` has done."""
        return int(self._library.llmforge_group_answered(self._address, rank))

    def progress(self) -> tuple[int, ...]:
        """Count, for every rank, the meetings that it came to and its answers: who moves on lives."""
        return tuple(int(self._library.llmforge_group_progress(self._address, rank)) for rank in range(self.ranks))


class Reply(SharedMemory):
    """Where the first rank writes what it is asked, and the driver reads it."""

    def answer(self, answer: Any) -> None:
        """Leave an answer, which fits."""
        self.write(0, answer, self.size - _LENGTH.size)


class Logits(SharedMemory):
    """Where the first rank writes logits and the driver reads them. It grows with the largest step."""

    def __init__(self, size: int = mmap.PAGESIZE, descriptor: int | None = None) -> None:
        super().__init__(size, descriptor)
        self._arrays: dict[tuple[int, ...], NDArray[np.float32]] = {}

    def array(self, shape: tuple[int, ...], *, grow: bool) -> NDArray[np.float32]:
        """Give the memory as an array; equal shapes give one object. The driver makes it `grow`, before the rank."""
        size = int(np.prod(shape)) * 4
        if size > self.size:
            if grow:
                os.ftruncate(self.descriptor, size)
            self.size, self.map = size, mmap.mmap(self.descriptor, size)
            self._arrays.clear()
        if shape not in self._arrays:
            self._arrays[shape] = np.frombuffer(self.map, np.float32, size // 4).reshape(shape)
        return self._arrays[shape]
