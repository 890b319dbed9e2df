"""Memory of a device: allocated once, used by address, filled and read in the order of the calls.

`CudaDevice` is a GPU, through the CUDA runtime of the package cuda-bindings.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import EnvironmentLacks, RunFailed


class _Frees:
    """Frees what nobody holds any more, at once, or behind the captures that go on."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection of garbage may begin within a call that holds it
        self._captures = 0
        self._later: list[Callable[[], object]] = []

    def __call__(self, call: Callable[..., object], *arguments: Any) -> None:
        with self._lock:
            if self._captures:
                self._later.append(functools.partial(call, *arguments))
            else:
                call(*arguments)

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """Free nothing within the block."""
        with self._lock:
            self._captures += 1
        try:
            yield
        finally:
            with self._lock:
                self._captures -= 1
                while self._later and not self._captures:
                    self._later.pop()()


_free = _Frees()


@contextlib.contextmanager
def nothing_freed() -> Iterator[None]:
    """Let buffers that nobody holds any more be freed behind the block, and collect no garbage within.

    While a step is captured, CUDA forbids other threads to free memory: the capture would be lost.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with _free.later():
            yield
    finally:
        if collects:
            gc.enable()


def how_to_install(extra: str = "cuda") -> str:
    """Say what a machine lacks that has no GPU, or nothing that reaches it; `extra` brings what runs there."""
    return f"pip install 'llmforge[{extra}]' on a machine with an NVIDIA GPU and its driver"


@dataclass(frozen=True, eq=False)
class Buffer:
    """A piece of a device's memory, for as long as somebody holds this: `size` bytes from `address` on."""

    address: int
    size: int
    memory: NDArray[np.uint8] | None = field(default=None, repr=False)  # what owns the bytes, on a host

    def at(self, offset: int, size: int) -> int:
        """Give the address of `size` bytes from `offset` on.

        Raises:
            ValueError: they reach beyond the buffer.
        """
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ValueError(f"bytes {offset} … {offset + size} of a buffer of {self.size}")
        return self.address + offset


@dataclass(frozen=True)
class MemoryBlock:
    """`height` pieces of `width` bytes; each begins `pitch` bytes after the one before, the first at `offset`."""

    buffer: Buffer
    offset: int
    pitch: int


class BlockCopy(NamedTuple):
    """`height` pieces of `width` bytes, from one block to another."""

    target: MemoryBlock
    source: MemoryBlock
    width: int
    height: int


class Device(Protocol):
    """What a backend needs of a device. Calls take effect in their order; `read` and `synchronize` wait for them."""

    kind: str  # the device's name in ONNX Runtime: cuda or cpu
    index: int  # among the machine's devices of its kind
    name: str  # of the product

    @property
    def stream(self) -> int | None:
        """Handle of the stream that calls go to, for others to send their work to; None: every call is done at once."""

    @property
    def sm(self) -> int | None:
        """Compute capability, ten times major plus minor; None: no GPU."""

    def memory(self) -> tuple[int, int]:
        """Count the bytes that are free, and all."""

    def allocate(self, size: int) -> Buffer:
        """Reserve `size` bytes of zeros, at an address that is a multiple of 256.

        Raises:
            EnvironmentLacks: the device has no room for them.
        """

    def host(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Make an array on the host that `write` and `read` copy fastest, in page-locked memory; its values are any."""

    def write(self, buffer: Buffer, offset: int, values: NDArray[Any]) -> None:
        """Copy a C-contiguous array to the device; it must stay as it is until `synchronize`."""

    def read(self, buffer: Buffer, offset: int, values: NDArray[Any]) -> None:
        """Fill a C-contiguous array from the device."""

    def fetch(self, buffer: Buffer, offset: int, values: NDArray[Any]) -> None:
        """Begin to fill a C-contiguous array of `host` from the device, which what is recorded later waits for."""

    def read_beside(self, buffer: Buffer, offset: int, values: NDArray[Any]) -> None:
        """Fill a C-contiguous array with what is known to be in the buffer, and wait for nothing that runs."""

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy within the device, in one call: in any order, so none may write what another one reads."""

    def event(self) -> Any:
        """Make an event, which `record` and `wait` take."""

    def record(self, event: Any) -> None:
        """Let an event stand for all that was asked for up to now."""

    def wait(self, event: Any) -> None:
        """Wait for what an event stands for; nothing where it was never recorded."""

    def synchronize(self) -> None:
        """Wait for all that was asked for."""


class CudaDevice:
    """One GPU, by its number among those that this process sees.

    Calls go to a stream of its own, which ONNX Runtime and TensorRT take, too, so that what is written here comes
    before what they run; only `read_beside` has another one.

    `extra` is the one of this package that brings what is to run there, for hints.

    Raises:
        EnvironmentLacks: there is no such device, or no way to reach it.
    """

    kind = "cuda"

    def __init__(self, index: int = 0, extra: str = "cuda") -> None:
        install = how_to_install(extra)
        self._cuda = cuda = _bindings(install)
        status, count = cuda.cudaGetDeviceCount()
        if status != cuda.cudaError_t.cudaSuccess or count < 1:
            raise EnvironmentLacks(f"no CUDA device found ({status.name})", hint=install)
        if not 0 <= index < count:
            raise EnvironmentLacks(
                f"no CUDA device {index}; this process sees {count}",
                hint="devices count from 0; check CUDA_VISIBLE_DEVICES",
            )
        self.index, self.count = index, int(count)  # of the devices that this process sees
        self._select()
        attribute = cuda.cudaDeviceAttr
        major, minor = (
            self._call(cuda.cudaDeviceGetAttribute(each, index), "its compute capability")
            for each in (attribute.cudaDevAttrComputeCapabilityMajor, attribute.cudaDevAttrComputeCapabilityMinor)
        )
        self.sm: int = 10 * major + minor
        self.name: str = self._call(cuda.cudaGetDeviceProperties(index), "its properties").name.decode().rstrip("\0")
        # Not ordered after the default stream, which other libraries of the process may use.
        self._stream, self._beside = (
            self._call(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking), "a stream") for _ in range(2)
        )

    @property
    def stream(self) -> int:
        """The stream's handle."""
        return int(self._stream)

    def memory(self) -> tuple[int, int]:
        """Count the bytes that are free, and all."""
        self._select()
        free, total = self._call(self._cuda.cudaMemGetInfo(), "its memory")
        return int(free), int(total)

    def allocate(self, size: int) -> Buffer:
        """Reserve zeros; they are freed when nobody holds the buffer any more."""
        self._select()
        status, address = self._cuda.cudaMalloc(size)
        if status == self._cuda.cudaError_t.cudaErrorMemoryAllocation:
            self._cuda.cudaGetLastError()  # the next call would report it again
            free, total = self.memory()
            raise EnvironmentLacks(
                f"{self.name} has no memory for {size} more bytes: {free} of {total} are free",
                hint="free device memory, or build with a smaller engine.max_batch or engine.max_context",
            )
        self._call((status, address), f"{size} bytes")
        buffer = Buffer(int(address), size)
        finalizer = weakref.finalize(buffer, _free, _free_memory, self._cuda, self.index, int(address))
        finalizer.atexit = False  # the process's end frees
        self._call(self._cuda.cudaMemsetAsync(buffer.address, 0, size, self._stream), "zeros")
        self.synchronize()
        return buffer

    def host(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Make an array in page-locked memory, which the device reads and writes by itself."""
        self._select()
        size = math.prod(shape) * np.dtype(dtype).itemsize
        address = int(self._call(self._cuda.cudaHostAlloc(max(size, 1), 0), f"{size} page-locked bytes"))
        memory = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(memory, _free, self._cuda.cudaFreeHost, address).atexit = False
        return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)

    def write(self, buffer: Buffer, offset: int, values: NDArray[Any]) -> None:
        """Copy an array to the device; it must stay as it is until `synchronize`."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._move(buffer.at(offset, values.nbytes), _address(values), values.nbytes, kind)

    def read(self, buffer: Buffer, offset: int, values: NDArray[Any]) -> None:
        """Fill an array from the device."""
        self.fetch(buffer, offset, values)
        self.synchronize()

    def fetch(self, buffer: Buffer, offset: int, values: NDArray[Any]) -> None:
        """Begin to fill an array from the device."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._move(_address(values), buffer.at(offset, values.nbytes), values.nbytes, kind)

    def read_beside(self, buffer: Buffer, offset: int, values: NDArray[Any]) -> None:
        """Fill an array from the device, while the stream runs on."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        place = buffer.at(offset, values.nbytes)
        self._select()
        self._call(self._cuda.cudaMemcpyAsync(_address(values), place, values.nbytes, kind, self._beside), "a copy")
        self._call(self._cuda.cudaStreamSynchronize(self._beside), "a copy")

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy pieces within the device."""
        targets: list[int] = []
        sources: list[int] = []
        sizes: list[int] = []
        for target, source, width, height in copies:
            for places, block in ((targets, target), (sources, source)):
                first = block.buffer.at(block.offset, block.pitch * (height - 1) + width)
                places += range(first, first + block.pitch * height, block.pitch)
            sizes += [width] * height
        if not sizes:
            return
        self._select()
        attributes = self._cuda.cudaMemcpyAttributes()
        attributes.srcAccessOrder = self._cuda.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        batch = (targets, sources, sizes, len(sizes), [attributes], [0], 1)
        self._call(self._cuda.cudaMemcpyBatchAsync(*batch, self._stream), "copies")

    def event(self) -> CudaEvent:
        """Make an event."""
        self._select()
        made = self._cuda.cudaEventCreateWithFlags(self._cuda.cudaEventDisableTiming)
        event = CudaEvent(self._call(made, "an event"))
        weakref.finalize(event, self._cuda.cudaEventDestroy, event.handle).atexit = False
        return event

    def record(self, event: CudaEvent) -> None:
        """Let an event stand for what was sent to the stream up to now."""
        self._select()
        self._call(self._cuda.cudaEventRecord(event.handle, self._stream), "an event")

    def wait(self, event: CudaEvent) -> None:
        """Wait for what an event stands for."""
        self._call(self._cuda.cudaEventSynchronize(event.handle), "its stream")

    def synchronize(self) -> None:
        """Wait for the stream."""
        self._select()
        self._call(self._cuda.cudaStreamSynchronize(self._stream), "its stream")

    def capture(self, run: Callable[[], None]) -> CudaGraph:
        """Capture what `run` sends to `stream`, which runs nothing of it yet."""
        self._select()
        cuda = self._cuda
        self.synchronize()
        # Of this thread alone: what other threads do meanwhile does not spoil it.
        mode = cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        with nothing_freed():
            self._call(cuda.cudaStreamBeginCapture(self._stream, mode), "a recording")
            try:
                run()
            finally:
                ended = cuda.cudaStreamEndCapture(self._stream)
        captured = self._call(ended, "a recording")
        executable = self._call(cuda.cudaGraphInstantiate(captured, 0), "a recording")
        self._call(cuda.cudaGraphDestroy(captured), "a recording")
        graph = CudaGraph(executable)
        weakref.finalize(graph, cuda.cudaGraphExecDestroy, executable).atexit = False
        return graph

    def replay(self, graph: CudaGraph) -> None:
        """Run a captured graph, on the addresses that it was made with."""
        self._select()
        self._call(self._cuda.cudaGraphLaunch(graph.executable, self._stream), "a recording")

    def _move(self, target: int, source: int, size: int, kind: Any) -> None:
        self._select()
        self._call(self._cuda.cudaMemcpyAsync(target, source, size, kind, self._stream), "a copy")

    def _select(self) -> None:
        """Make this the device of the calling thread: CUDA keeps one for each."""
        self._call(self._cuda.cudaSetDevice(self.index), "the device")

    def _call(self, returned: tuple[Any, ...], what: str) -> Any:
        """Take the value out of what a function of CUDA returned: its status first."""
        status, *values = returned
        if status != self._cuda.cudaError_t.cudaSuccess:
            raise RunFailed(f"CUDA device {self.index}: {what}: {status.name}")
        return values[0] if len(values) == 1 else values


def count(extra: str = "cuda") -> int:
    """Count the GPUs that this process sees, and take none of their memory; `extra` as of `CudaDevice`.

    Raises:
        EnvironmentLacks: there is no way to reach one.
    """
    cuda = _bindings(how_to_install(extra))
    status, found = cuda.cudaGetDeviceCount()
    return int(found) if status == cuda.cudaError_t.cudaSuccess else 0


@dataclass(frozen=True, eq=False)
class CudaGraph:
    """Captured work."""

    executable: Any


@dataclass(frozen=True, eq=False)
class CudaEvent:
    """A point in the work of a stream."""

    handle: Any


def _bindings(install: str) -> Any:
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:  # the package is not there, or the library that it loads
        raise EnvironmentLacks(
            f"cuda-bindings, needed to use a CUDA device, cannot be imported: {error}", hint=install
        ) from error


def _free_memory(cuda: Any, index: int, address: int) -> None:
    cuda.cudaSetDevice(index)
    cuda.cudaFree(address)


def _address(values: NDArray[Any]) -> int:
    if not values.flags.c_contiguous:
        raise ValueError(f"an array of strides {values.strides}; expected a C-contiguous one")
    return int(values.ctypes.data)
