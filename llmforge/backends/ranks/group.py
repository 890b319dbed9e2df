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
    library = ctypes.CDLL(str(native.require()))
    if not hasattr(os, "memfd_create") or not hasattr(library, "llmforge_group_bytes"):
        raise EnvironmentLacks(
            "tensor_parallel: ranks on a CPU meet in shared memory of Linux (memfd, futex), and this system has none",
            hint="set engine.tensor_parallel to 1",
        )
    group, number = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("bytes", number, [number]),
        ("init", None, [group, number]),
        ("join", None, [group, number, number, number]),
        ("break", None, [group, number]),
        ("broken_by", number, [group]),
        ("command", number, [group]),
        ("await", ctypes.c_int, [group, number, number]),
        ("answer", None, [group, number, number]),
        ("answers", ctypes.c_int, [group, number, number]),
        ("progress", number, [group, number]),
        ("answered", number, [group, number]),
    ):
        function = getattr(library, f"llmforge_group_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def require() -> None:
    """Return if ranks can run here; raises what `RankGroup` does."""
    _library()


class SharedMemory:
    """Anonymous memory that other processes map by its descriptor."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        self.map = mmap.mmap(descriptor, size)

    @classmethod
    def new(cls, name: str, size: int) -> SharedMemory:
        """Make some; pages are taken as they are written. `name` is for /proc alone."""
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, size)
        return cls(descriptor, size)


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
        size = self._at + _LENGTH.size + room
        fresh = descriptor is None
        self._memory = (
            SharedMemory.new("llmforge-ranks", size) if descriptor is None else SharedMemory(descriptor, size)
        )
        self._first = ctypes.c_char.from_buffer(self._memory.map)  # keeps the mapping where it is
        self._address = ctypes.addressof(self._first)
        if fresh:
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
        packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if len(packed) > self.room:
            raise UsageError(f"a step of {len(packed)} bytes of inputs; ranks take at most {self.room}")
        start = self._at + _LENGTH.size
        self._memory.map[self._at : start] = _LENGTH.pack(len(packed))
        self._memory.map[start : start + len(packed)] = packed
        return int(self._library.llmforge_group_command(self._address))

    def read(self) -> Any:
        """Read the command that was given last."""
        start = self._at + _LENGTH.size
        [length] = _LENGTH.unpack(self._memory.map[self._at : start])
        return pickle.loads(self._memory.map[start : start + length])

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


class Reply:
    """Where the first rank writes what it is asked, pickled, and the driver reads it: at most `room` bytes.

    Pages are taken as they are written.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    @classmethod
    def new(cls, room: int) -> Reply:
        """Make it."""
        return cls(SharedMemory.new("llmforge-reply", _LENGTH.size + room))

    @property
    def descriptor(self) -> int:
        """What a rank maps."""
        return self._memory.descriptor

    def write(self, answer: Any) -> None:
        """Leave an answer; it must fit."""
        packed = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        self._memory.map[: _LENGTH.size] = _LENGTH.pack(len(packed))
        self._memory.map[_LENGTH.size : _LENGTH.size + len(packed)] = packed

    def read(self) -> Any:
        """Read the last answer."""
        [length] = _LENGTH.unpack(self._memory.map[: _LENGTH.size])
        return pickle.loads(self._memory.map[_LENGTH.size : _LENGTH.size + length])


class Logits:
    """Where the first rank writes logits and the driver reads them. It grows with the largest step."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._arrays: dict[tuple[int, ...], NDArray[np.float32]] = {}

    @classmethod
    def new(cls) -> Logits:
        """Make it, a page large."""
        return cls(SharedMemory.new("llmforge-logits", mmap.PAGESIZE))

    @property
    def descriptor(self) -> int:
        """What a rank maps."""
        return self._memory.descriptor

    def array(self, shape: tuple[int, ...], *, grow: bool) -> NDArray[np.float32]:
        """Give the memory as an array; equal shapes give one object. The driver makes it `grow`, before the rank."""
        size = int(np.prod(shape)) * 4
        if size > self._memory.size:
            if grow:
                os.ftruncate(self._memory.descriptor, size)
            self._memory = SharedMemory(self._memory.descriptor, size)
            self._arrays.clear()
        if shape not in self._arrays:
            self._arrays[shape] = np.frombuffer(self._memory.map, np.float32, size // 4).reshape(shape)
        return self._arrays[shape]
