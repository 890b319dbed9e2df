"""Energy of a GPU, by a driver's library and a CUDA runtime that are made up."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from llmforge.base import extras
from llmforge.base.errors import EnvironmentLacks
from llmforge.measure import energy


class Refused(Exception):
    """What the library raises."""


class Library:
    """Counts in millijoules; knows devices by their bus."""

    NVMLError = Refused

    def __init__(self) -> None:
        self.millijoules = 0
        self.counts = True

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByPciBusId(self, bus: bytes) -> bytes:  # noqa: N802
        return bus

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: bytes) -> int:  # noqa: N802
        if not self.counts or handle != b"0000:3B:00.0":
            raise Refused("Not Supported")
        return self.millijoules


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    runtime = SimpleNamespace(
        cudaDeviceGetPCIBusId=lambda size, index: (0, b"0000:3B:00.0".ljust(size, b"\0")) if index == 1 else (101, b"")
    )
    monkeypatch.setitem(sys.modules, "pynvml", made)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", runtime)  # type: ignore[arg-type]
    return made


def test_joules_of_the_device_that_cuda_numbers_so(library: Library) -> None:
    read = energy.counter(1)
    library.millijoules = 2500
    assert read() == 2.5


def test_what_is_not_counted_is_said(library: Library) -> None:
    library.counts = False
    with pytest.raises(EnvironmentLacks, match="energy: Not Supported"):
        energy.counter(1)
    with pytest.raises(EnvironmentLacks, match="the bus of CUDA device 0 is not known: error 101"):
        energy.counter(0)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(EnvironmentLacks, match="pynvml") as caught:
        energy.counter(0)
    assert caught.value.hint == "pip install 'llmforge[energy]'"
    (bringing,) = [each for each in extras.requirements() if each.module == "pynvml"]
    assert (bringing.extra, bringing.distribution) == ("energy", "nvidia-ml-py")
