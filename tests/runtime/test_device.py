"""Device memory: addresses, copies and bounds, on the host; and what a machine without a GPU says."""

from __future__ import annotations

import builtins
import gc
import importlib
import subprocess
import sys
import threading

import numpy as np
import pytest

from llmforge.base.errors import EnvironmentLacks, RunFailed
from llmforge.runtime.device.cuda import BlockCopy, CudaDevice, MemoryBlock, count, nothing_freed

from ..fakes.fake_cuda import FREE, fake_cuda
from ..fakes.host_device import HostDevice

DEVICE = HostDevice()


def test_memory_is_zeros_at_an_aligned_address():
    buffer = DEVICE.allocate(1000)
    assert buffer.address % 256 == 0
    assert buffer.size == 1000
    values = np.ones(250, np.float32)
    DEVICE.read(buffer, 0, values)
    assert not values.any()


def test_what_is_written_is_read_and_nothing_else_changes():
    buffer = DEVICE.allocate(64)
    DEVICE.write(buffer, 8, np.arange(4, dtype=np.int64).reshape(2, 2))
    got = DEVICE.host((8,), "int64")
    DEVICE.read(buffer, 0, got)
    assert got.tolist() == [0, 0, 1, 2, 3, 0, 0, 0]


def test_pieces_are_copied_from_one_pitch_to_another():
    source, target = DEVICE.allocate(6 * 4), DEVICE.allocate(5 * 3)
    DEVICE.write(source, 0, np.arange(24, dtype=np.uint8))
    DEVICE.copy([BlockCopy(MemoryBlock(target, 1, 5), MemoryBlock(source, 2, 6), width=2, height=3)])
    got = np.empty((3, 5), np.uint8)
    DEVICE.read(target, 0, got)
    assert got.tolist() == [[0, 2, 3, 0, 0], [0, 8, 9, 0, 0], [0, 14, 15, 0, 0]]


def test_pieces_of_one_buffer_may_be_copied_within_it():
    buffer = DEVICE.allocate(8)
    DEVICE.write(buffer, 0, np.arange(8, dtype=np.uint8))
    DEVICE.copy([BlockCopy(MemoryBlock(buffer, 2, 8), MemoryBlock(buffer, 0, 8), width=4, height=1)])
    got = np.empty(8, np.uint8)
    DEVICE.read(buffer, 0, got)
    assert got.tolist() == [0, 1, 0, 1, 2, 3, 6, 7]


@pytest.mark.parametrize(
    "beyond",
    [
        lambda buffer: DEVICE.write(buffer, 9, np.zeros(1, np.int64)),
        lambda buffer: DEVICE.read(buffer, -1, np.zeros(1, np.uint8)),
        lambda buffer: DEVICE.copy(
            [BlockCopy(MemoryBlock(buffer, 0, 8), MemoryBlock(buffer, 0, 4), width=5, height=3)]
        ),
        lambda buffer: DEVICE.copy(
            [BlockCopy(MemoryBlock(buffer, 0, 4), MemoryBlock(buffer, 0, 8), width=5, height=3)]
        ),
    ],
)
def test_what_reaches_beyond_a_buffer_is_refused(beyond):
    with pytest.raises(ValueError, match="of a buffer of 16"):
        beyond(DEVICE.allocate(16))


def test_an_array_that_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match="expected a C-contiguous one"):
        DEVICE.write(DEVICE.allocate(16), 0, np.zeros((2, 4), np.uint8)[:, ::2])


def has_cuda() -> bool:
    try:
        CudaDevice()
    except EnvironmentLacks:
        return False
    return True


@pytest.mark.skipif(has_cuda(), reason="there is a CUDA device")
def test_a_machine_without_a_device_says_so_in_one_line():
    with pytest.raises(EnvironmentLacks, match="no CUDA device found") as caught:
        CudaDevice()
    assert caught.value.exit_code == 8
    assert "\n" not in caught.value.message
    assert "llmforge[cuda]" in caught.value.hint


def test_without_cuda_bindings_the_package_is_named(monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest, **named):
        if name.startswith("cuda"):
            raise ImportError("No module named 'cuda'")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(
        EnvironmentLacks, match="cuda-bindings, needed to use a CUDA device, cannot be imported: No module named"
    ):
        CudaDevice()


def test_nothing_of_cuda_is_imported_with_the_runtime():
    code = "import sys, llmforge.runtime, llmforge.runtime.device.cuda; print([m for m in sys.modules if m == 'cuda'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The same copies as above, through the calls that a GPU gets: tests/fakes/fake_cuda.py checks their arguments.


def test_a_cuda_device_says_what_it_is(monkeypatch):
    fake_cuda(monkeypatch, sm=120)
    device = CudaDevice(1)
    assert (device.kind, device.index, device.name, device.sm) == ("cuda", 1, "Fake GPU", 120)
    assert device.memory() == (FREE, FREE)
    with pytest.raises(EnvironmentLacks, match="no CUDA device 2; this process sees 2"):
        CudaDevice(2)


def test_a_cuda_device_writes_reads_and_copies(monkeypatch):
    cuda = fake_cuda(monkeypatch)
    device = CudaDevice()
    source, target = device.allocate(6 * 4), device.allocate(5 * 3)
    assert source.address % 256 == 0
    values = device.host((24,), "uint8")
    values[:] = np.arange(24)
    device.write(source, 0, values)
    device.copy([BlockCopy(MemoryBlock(target, 1, 5), MemoryBlock(source, 2, 6), width=2, height=3)])
    device.copy([])
    assert cuda.batches == 1
    got = device.host((3, 5), "uint8")
    device.read(target, 0, got)
    assert got.tolist() == [[0, 2, 3, 0, 0], [0, 8, 9, 0, 0], [0, 14, 15, 0, 0]]
    with pytest.raises(ValueError, match="of a buffer of 24"):
        device.write(source, 1, values)
    del source, target, values, got
    gc.collect()
    assert cuda.memory == {}


def test_what_is_there_is_read_beside_the_stream(monkeypatch):
    cuda, streams = fake_cuda(monkeypatch), []
    copy = type(cuda)._cudaMemcpyAsync
    monkeypatch.setattr(type(cuda), "_cudaMemcpyAsync", lambda self, *a: streams.append(a[-1]) or copy(self, *a))
    device = CudaDevice()
    buffer, event = device.allocate(8), device.event()
    values, got = device.host((1,), "int64"), device.host((1,), "int64")
    values[0] = 9
    device.write(buffer, 0, values)
    device.fetch(buffer, 0, got)
    device.record(event)
    device.wait(event)
    device.read_beside(buffer, 0, got)
    assert got[0] == 9
    assert streams == [device.stream, device.stream, device.stream + 1]


def test_a_cuda_device_without_room_says_how_much_there_is(monkeypatch):
    fake_cuda(monkeypatch)
    with pytest.raises(EnvironmentLacks, match=f"no memory for {FREE + 1} more bytes: {FREE} of {FREE} are free"):
        CudaDevice().allocate(FREE + 1)


def test_a_recording_runs_when_it_is_replayed(monkeypatch):
    cuda = fake_cuda(monkeypatch)
    device = CudaDevice()
    target, values = device.allocate(8), device.host((1,), "int64")
    graph = device.capture(lambda: device.write(target, 0, values))
    for value in (5, 6):
        values[0] = value
        device.replay(graph)
        got = device.host((1,), "int64")
        device.read(target, 0, got)
        assert got[0] == value
    assert cuda.launches == 2


def test_nothing_is_freed_while_a_step_is_captured(monkeypatch):
    """A free on any thread would end the capture: garbage waits, and so does what is dropped."""
    cuda = fake_cuda(monkeypatch)
    device = CudaDevice()
    buffers, held = [device.allocate(8) for _ in range(3)], []

    def run():
        held.append((gc.isenabled(), len(cuda.memory)))
        dropping = threading.Thread(target=buffers.clear)
        dropping.start()
        dropping.join()
        held.append(len(cuda.memory))

    device.capture(run)
    assert held == [(False, 3), 3]
    assert (gc.isenabled(), cuda.memory) == (True, {})
    with nothing_freed():  # as ONNX Runtime captures
        buffers.append(device.allocate(8))
        buffers.clear()
        assert len(cuda.memory) == 1
        with nothing_freed():
            pass
        assert len(cuda.memory) == 1
    assert cuda.memory == {}


def test_pieces_may_end_where_a_buffer_of_a_device_does_and_no_byte_later(monkeypatch):
    fake_cuda(monkeypatch)
    device = CudaDevice()
    large, exact, short = device.allocate(64), device.allocate(8 + 4), device.allocate(8 + 3)
    for target, source in ((large, exact), (exact, large)):
        device.copy([BlockCopy(MemoryBlock(target, 0, 8), MemoryBlock(source, 0, 8), width=4, height=2)])
    for target, source in ((large, short), (short, large)):
        with pytest.raises(ValueError, match="of a buffer of 11"):
            device.copy([BlockCopy(MemoryBlock(target, 0, 8), MemoryBlock(source, 0, 8), width=4, height=2)])


def test_devices_are_counted(monkeypatch):
    fake = fake_cuda(monkeypatch)
    assert count() == 2
    monkeypatch.setattr(type(fake), "_cudaGetDeviceCount", lambda _: (fake.real.cudaError_t.cudaErrorNoDevice, 2))
    assert count() == 0


def test_an_error_of_cuda_names_the_call(monkeypatch):
    fake = fake_cuda(monkeypatch)
    device = CudaDevice()
    failed = (fake.real.cudaError_t.cudaErrorIllegalAddress, None)
    monkeypatch.setattr(type(fake), "_cudaStreamSynchronize", lambda *_: failed)
    with pytest.raises(RunFailed, match="CUDA device 0: its stream: cudaErrorIllegalAddress"):
        device.synchronize()
