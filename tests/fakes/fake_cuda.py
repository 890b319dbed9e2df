"""The functions of cuda.bindings.runtime that llmforge calls, over the memory of this process.

Types and constants are the real module's, and a call with another number of arguments than the real function takes
fails. A recording keeps what was sent to the stream, runs none of it, and repeats it when it is launched.
"""

# ruff: noqa: N802, N815  (the names are CUDA's)
from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from llmforge.runtime.device import cuda as device

FREE = 1 << 30
PAGE = 4096


class FakeCuda:
    """Stands where `device._bindings()` gives the module."""

    def __init__(self, sm: int = 89) -> None:
        self.real = pytest.importorskip("cuda.bindings.runtime")
        self.sm = sm
        self.memory: dict[int, Any] = {}
        self.recording: list[Callable[[], None]] | None = None
        self.launches = self.streams = 0
        self.copies = 0
        self.fetched: list[int] = []  # bytes of copies to the host
        self.waits = 0  # for the stream, or a point in its work
        self.batches = 0  # of copies within the device

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.real, name)
        fake = getattr(type(self), f"_{name}", None)
        if fake is None:
            assert not name.startswith("cuda") or not callable(real) or isinstance(real, type), f"{name} is not faked"
            return real
        taken = re.fullmatch(r"\w+\((.*?)\)(?: ->.*)?", real.__doc__.strip().splitlines()[0])[1]
        names = [each for each in taken.split(",") if each.strip()]
        least = sum("=" not in each for each in names)

        def call(*args: Any) -> tuple[Any, ...]:
            assert least <= len(args) <= len(names), f"{name}({taken}) called with {len(args)} arguments"
            status_and_values = fake(self, *args)
            if isinstance(status_and_values, tuple):
                return status_and_values
            return (self.real.cudaError_t.cudaSuccess, *(() if status_and_values is None else [status_and_values]))

        return call

    def send(self, work: Callable[[], None]) -> None:
        """Do `work` now, or record it."""
        if self.recording is None:
            work()
        else:
            self.recording.append(work)

    def _cudaGetDeviceCount(self) -> int:
        return 2

    def _cudaSetDevice(self, index: int) -> None:
        assert 0 <= index < 2

    def _cudaGetLastError(self) -> None:
        return None

    def _cudaDeviceGetAttribute(self, attribute: Any, index: int) -> int:
        major = attribute == self.real.cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor
        return self.sm // 10 if major else self.sm % 10

    def _cudaGetDeviceProperties(self, index: int) -> Any:
        return SimpleNamespace(name=b"Fake GPU\0\0")

    def _cudaStreamCreateWithFlags(self, flags: int) -> int:
        assert flags == self.real.cudaStreamNonBlocking
        self.streams += 1
        return 76 + self.streams

    def _cudaStreamSynchronize(self, stream: int) -> None:
        assert self.recording is None, "waiting for a stream that records fails in CUDA"
        self.waits += 1

    def _cudaEventCreateWithFlags(self, flags: int) -> int:
        assert flags == self.real.cudaEventDisableTiming
        return 5

    def _cudaEventRecord(self, event: int, stream: int) -> None:
        assert (event, stream) == (5, 77)

    def _cudaEventSynchronize(self, event: int) -> None:
        self.waits += 1
        assert event == 5
        assert self.recording is None, "waiting for a stream that records fails in CUDA"

    def _cudaEventDestroy(self, event: int) -> None:
        assert event == 5

    def _cudaMemGetInfo(self) -> tuple[Any, ...]:
        used = sum(ctypes.sizeof(each) for each in self.memory.values())
        return self.real.cudaError_t.cudaSuccess, FREE - used, FREE

    def _cudaMalloc(self, size: int) -> Any:
        assert self.recording is None, "allocating while a stream records fails in CUDA"
        if size > FREE:
            return self.real.cudaError_t.cudaErrorMemoryAllocation, None
        room = ctypes.create_string_buffer(b"\xee" * (size + 256), size + 256)  # not zeros, as on a device
        address = (ctypes.addressof(room) + 255) // 256 * 256
        self.memory[address] = room
        return address

    def _cudaFree(self, address: int) -> None:
        del self.memory[address]

    def _cudaHostAlloc(self, size: int, flags: int) -> int:
        room = ctypes.create_string_buffer(size + PAGE)
        address = -(-ctypes.addressof(room) // PAGE) * PAGE
        self.memory[address] = room
        return address

    _cudaFreeHost = _cudaFree

    def _cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        self.send(lambda: ctypes.memset(address, value, size) and None)

    def _cudaMemcpyAsync(self, target: int, source: int, size: int, kind: Any, stream: int) -> None:
        self.copies += 1
        if kind == self.real.cudaMemcpyKind.cudaMemcpyDeviceToHost:
            self.fetched.append(size)
        self.send(lambda: ctypes.memmove(target, source, size) and None)

    def _cudaMemcpyBatchAsync(
        self,
        targets: list[int],
        sources: list[int],
        sizes: list[int],
        count: int,
        attributes: list[Any],
        firsts: list[int],
        kinds: int,
        stream: int,
    ) -> None:
        assert len(targets) == len(sources) == len(sizes) == count > 0
        assert (len(attributes), firsts, kinds) == (1, [0], 1)
        assert attributes[0].srcAccessOrder == self.real.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        self.batches += 1

        def copy() -> None:
            for target, source, size in reversed(list(zip(targets, sources, sizes, strict=True))):  # in any order
                ctypes.memmove(target, source, size)

        self.send(copy)

    def _cudaStreamBeginCapture(self, stream: int, mode: Any) -> None:
        assert self.recording is None
        self.recording = []

    def _cudaStreamEndCapture(self, stream: int) -> list[Callable[[], None]]:
        recorded, self.recording = self.recording, None
        assert recorded is not None
        return recorded

    def _cudaGraphInstantiate(self, graph: list[Callable[[], None]], flags: int) -> list[Callable[[], None]]:
        return graph

    def _cudaGraphDestroy(self, graph: Any) -> None:
        return None

    _cudaGraphExecDestroy = _cudaGraphDestroy

    def _cudaGraphLaunch(self, graph: list[Callable[[], None]], stream: int) -> None:
        self.launches += 1
        for work in graph:
            work()


def fake_cuda(monkeypatch: pytest.MonkeyPatch, sm: int = 89) -> FakeCuda:
    """Let `CudaDevice` find a GPU of the host's memory."""
    fake = FakeCuda(sm)
    monkeypatch.setattr(device, "_bindings", lambda install: fake)
    return fake
