"""NCCL, which ranks on GPUs meet through: found, loaded, and told to the operators of llmforge's library.

The first rank makes an id, the process that drives the ranks hands it to the others, and all of them then join one
communicator (NVIDIA, NCCL documentation, "Creating a communicator"). A process is one rank, on one device. What was
sent to a device is not waited for in vain where a rank ends: the driver kills the others, and with a process its work
on the device ends. *Unverified* on GPUs; tests/fakes/fake_nccl.c stands in for the library.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llmforge import native
from llmforge.base.errors import EnvironmentLacks, RunFailed

LIBRARY = "libnccl.so.2"
INSTALL = "pip install nvidia-nccl-cu13, or NVIDIA's package libnccl2"
ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES of nccl.h
CUDA_PROVIDER = "CUDAExecutionProvider"


class _UniqueId(ctypes.Structure):
    """ncclUniqueId, which functions take by value."""

    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


@dataclass(frozen=True)
class Communicator:
    """What a rank meets the others through: an ncclComm_t, by its address."""

    address: int
    rank: int
    ranks: int

    @property
    def capsule(self) -> Any:
        """Give the address as the capsule that TensorRT's bindings take."""
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(self.address, None, None)


_joined: list[Communicator] = []


def joined() -> Communicator | None:
    """Return the communicator that this process is a rank of; None: it is none."""
    return _joined[0] if _joined else None


@cache
def find() -> ctypes.CDLL | None:
    """Load the library: that of pip's packages nvidia-nccl-cu12 and -cu13, else the system's; None: there is none.

    Its names are open to all: TensorRT asks the system for the library again, and gets this one.
    """
    for path in (*_packaged(), LIBRARY):
        try:
            return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    return None


def _packaged() -> Iterator[Path]:
    """List where pip's packages put it: both into nvidia/nccl."""
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nccl")
    for folder in (spec and spec.submodule_search_locations) or ():
        yield Path(folder) / "lib" / LIBRARY


def version() -> str | None:
    """Read the library's version, "2.28.3"; None: there is none here."""
    if (library := find()) is None:
        return None
    number = ctypes.c_int()
    _check(library, library.ncclGetVersion(ctypes.byref(number)), "its version")
    major, rest = divmod(number.value, 10_000)  # nccl.h: since 2.9, 10000 · major + 100 · minor + patch
    return f"{major}.{rest // 100}.{rest % 100}"


def require() -> ctypes.CDLL:
    """Load the library.

    Raises:
        EnvironmentLacks: it is not here.
    """
    if (library := find()) is None:
        raise EnvironmentLacks(f"ranks on GPUs meet through NCCL, and {LIBRARY} is not found", hint=INSTALL)
    return library


def make_id() -> bytes:
    """Make what names a new communicator; the process that does must live as long as ranks join.

    Raises:
        EnvironmentLacks: NCCL is not here.
        RunFailed: it finds no way to be reached by the others.
    """
    library, made = require(), _UniqueId()
    _check(library, library.ncclGetUniqueId(ctypes.byref(made)), "an id")
    return ctypes.string_at(ctypes.byref(made), ID_BYTES)


def join(unique_id: bytes, rank: int, ranks: int, provider: str = CUDA_PROVIDER) -> Communicator:
    """Be `rank` of the communicator that `unique_id` names, on the device of the calling thread; wait for the others.

    The operators of `llmforge.cuda` then meet through it, in the memory of ONNX Runtime's `provider`. A process joins
    once, before it opens a session.

    Raises:
        EnvironmentLacks: NCCL, or llmforge's library, is not here.
        RunFailed: NCCL refuses.
    """
    assert not _joined, "a process is one rank"
    library, own = require(), ctypes.CDLL(str(native.require()))
    name, made = _UniqueId.from_buffer_copy(unique_id), ctypes.c_void_p()
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int]
    _check(library, library.ncclCommInitRank(ctypes.byref(made), ranks, name, rank), f"rank {rank} of {ranks}")
    assert made.value is not None
    functions = (library.ncclAllReduce, library.ncclAllGather, library.ncclGetErrorString)
    addresses = [ctypes.cast(function, ctypes.c_void_p) for function in functions]
    own.llmforge_nccl_join(made, ctypes.c_int64(ranks), *addresses, provider.encode())
    _joined.append(Communicator(made.value, rank, ranks))
    return _joined[0]


def _check(library: ctypes.CDLL, result: int, what: str) -> None:
    if result == 0:
        return
    describe = library.ncclGetErrorString
    describe.restype = ctypes.c_char_p
    raise RunFailed(
        f"NCCL: {what}: {describe(result).decode(errors='replace')}",
        hint="set NCCL_DEBUG=WARN to see what it tells of it",
    )
