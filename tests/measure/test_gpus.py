"""NVIDIA GPUs of a machine, faked as what their drivers print, and the measurements of one."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmforge import targets
from llmforge.base.errors import EnvironmentLacks
from llmforge.measure import gpus
from llmforge.measure.gpus import Gpu

H200 = Gpu(0, "NVIDIA H200", "90", 143771 << 20)


def test_the_driver_is_read() -> None:
    found = gpus.parse(
        "NVIDIA H200, 9.0, 143771\nNVIDIA GeForce RTX 4090, 8.9, 24564\n[Unknown Error], [N/A], [N/A]\n\n"
    )
    assert found == [H200, Gpu(1, "NVIDIA GeForce RTX 4090", "89", 24564 << 20)]
    assert gpus.parse("No devices were found\n") == []


@pytest.mark.parametrize(
    ("title", "sm", "mib", "target"),
    [
        ("NVIDIA H200", "90", 143771, "h200"),
        ("NVIDIA H100 80GB HBM3", "90", 81559, "h100-sxm"),
        ("NVIDIA H100 PCIe", "90", 81559, "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "80", 81920, "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "80", 40960, "a100-40"),
        ("NVIDIA A10G", "86", 23028, "a10g"),
        ("Tesla T4", "75", 15360, "t4"),
        ("NVIDIA L4", "89", 23034, "l4"),
        ("NVIDIA L40S", "89", 46068, "l40s"),
        ("NVIDIA GeForce RTX 4090", "89", 24564, "rtx-4090"),
        ("NVIDIA GeForce RTX 5090", "120", 32607, "rtx-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "120", 97887, "rtx-pro-6000"),
        ("NVIDIA B200", "100", 183359, "b200"),
        ("NVIDIA GB200", "100", 189471, "gb200"),
        ("NVIDIA GeForce RTX 3090", "86", 24576, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "89", 16376, None),
    ],
)
def test_a_device_is_known_by_its_name_and_memory(title: str, sm: str, mib: int, target: str | None) -> None:
    assert Gpu(0, title, sm, mib << 20).target == target


def test_a_driver_that_fails_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    script.chmod(0o755)
    monkeypatch.setattr(gpus.shutil, "which", lambda name: str(script))
    assert gpus.find() == []
    script.write_text("#!/bin/sh\necho 'NVIDIA L4, 8.9, 23034'\n")
    assert [gpu.target for gpu in gpus.find()] == ["l4"]


class FakeRuntime:
    """The CUDA runtime as cuda.bindings gives it: an error code, then results; a copy takes a millisecond."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDeviceToDevice=3)  # noqa: N815

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.copied: list[int] = []
        self.freed: list[int] = []

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            if name == self.failing:
                return (2,)
            if name == "cudaMemcpyAsync":
                self.copied.append(arguments[2])
            if name == "cudaFree":
                self.freed.append(arguments[0])
            properties = SimpleNamespace(major=9, minor=0, name=b"NVIDIA H200", totalGlobalMem=143771 << 20)
            results = {
                "cudaMalloc": (4096,),
                "cudaEventCreate": ("event",),
                "cudaEventElapsedTime": (20.0,),
                "cudaGetDeviceCount": (1,),
                "cudaGetDeviceProperties": (properties,),
            }
            return (0, *results.get(name, ()))

        return call


def test_a_copy_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(gpus, "_runtime", lambda: runtime)
    assert gpus.copy_bandwidth(H200) == pytest.approx(2 * 20 * (1 << 30) / 0.02)
    assert len(runtime.copied) == 21  # one warms up
    assert len(runtime.freed) == 2


def test_memory_is_freed_where_cuda_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(failing="cudaMemcpyAsync")
    monkeypatch.setattr(gpus, "_runtime", lambda: runtime)
    with pytest.raises(EnvironmentLacks, match="CUDA call cudaMemcpyAsync failed on NVIDIA H200: error 2"):
        gpus.copy_bandwidth(H200)
    assert len(runtime.freed) == 2


def test_the_runtime_finds_devices_where_there_is_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus.shutil, "which", lambda name: None)
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(gpus, "_runtime", FakeRuntime)
    assert gpus.find() == [H200]
    monkeypatch.setattr(gpus, "_runtime", lambda: FakeRuntime(failing="cudaGetDeviceCount"))
    assert gpus.find() == []


def test_a_command_that_fails_or_hangs_finds_nothing_and_the_first_device_is_the_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes: list[Any] = [OSError("gone"), subprocess.TimeoutExpired("nvidia-smi", 1.0)]
    outcomes += [SimpleNamespace(stdout="NVIDIA H200, 9.0, 143771\n", returncode=code) for code in (9, 0)]

    def run(*_: Any, **__: Any) -> Any:
        made = outcomes.pop(0)
        if isinstance(made, Exception):
            raise made
        return made

    monkeypatch.setattr(gpus.shutil, "which", lambda name: "/bin/nvidia-smi")
    monkeypatch.setattr(gpus.subprocess, "run", run)
    for _ in range(3):
        with pytest.raises(EnvironmentLacks, match="no NVIDIA GPU was found"):
            gpus.first()
    assert gpus.first() == H200


def test_no_bindings_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(EnvironmentLacks) as caught:
        gpus.copy_bandwidth(H200)
    assert caught.value.hint == "pip install 'llmforge[cuda]'"


def test_products_on_a_gpu_need_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentLacks, match="no CUDA execution provider"):
        gpus.matrix_rates(H200, lambda dtype, options: 1.0)
    monkeypatch.setattr(targets, "onnxruntime_providers", lambda extra: ["CUDAExecutionProvider"])
    assert gpus.matrix_rates(H200, lambda dtype, options: 0.001) == {
        "fp16": 2 * 8192**3 / 0.001,
        "bf16": 2 * 8192**3 / 0.001,
    }
    turing = Gpu(1, "Tesla T4", "75", 16 << 30)
    assert list(gpus.matrix_rates(turing, lambda dtype, options: 1.0)) == ["fp16"]
