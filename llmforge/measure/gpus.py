"""NVIDIA GPUs of this machine: found through nvidia-smi or cuda.bindings, and measured.

Nothing here was run on a GPU by this project yet: detection and measurements are complete and unverified.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmforge import targets
from llmforge.backends.record import Dtype, has_arithmetic
from llmforge.base.errors import EnvironmentLacks

_QUERY = "name,compute_cap,memory.total"
_TIMEOUT_S = 20  # a driver that hangs does not keep anybody waiting
COPY_BYTES = 1 << 30
COPIES = 20
PRODUCT = 8192  # rows and columns; smaller products do not fill the large devices


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU as its driver describes it."""

    index: int
    title: str
    sm: str  # "89"
    memory_bytes: int

    @property
    def target(self) -> str | None:
        """Name the target that it is, if one is known: the longest whose words are all in its name."""
        words = set(self.title.lower().replace("-", " ").split())
        alike = (name for name in targets.built_in() if set(name.split("-")) - {"40", "80", "sxm"} <= words)
        known = [targets.load(name) for name in alike]
        near = [each.name for each in known if each.sm == self.sm and self._has_memory_of(each)]
        return max(near, key=len, default=None)

    def _has_memory_of(self, target: targets.Target) -> bool:
        """Compare with what the data sheet says; drivers show up to 10 % more or less."""
        return bool(np.isclose(target.require_gpu().memory_gb.value * 1e9, self.memory_bytes, rtol=0.1))


def find() -> list[Gpu]:
    """List the NVIDIA GPUs of this machine; none where there is no driver."""
    command = shutil.which("nvidia-smi")
    if command is not None:
        return _listed(command)
    return _bound() if importlib.util.find_spec("cuda") is not None else []


def first() -> Gpu:
    """Return the GPU that engines run on where nobody chose another.

    Raises:
        EnvironmentLacks: there is none, or the driver does not describe it.
    """
    found = find()
    if not found:
        raise EnvironmentLacks("no NVIDIA GPU was found by nvidia-smi or cuda.bindings")
    return found[0]


def parse(listing: str) -> list[Gpu]:
    """Read what `nvidia-smi --query-gpu=name,compute_cap,memory.total --format=csv,noheader,nounits` prints.

    Memory is in MiB. Lines of another form are left out, such as a device that fell off the bus.
    """
    found = []
    for index, line in enumerate(listing.splitlines()):
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and parts[1].replace(".", "", 1).isdigit() and parts[2].isdigit():
            found.append(Gpu(index, parts[0], parts[1].replace(".", ""), int(parts[2]) << 20))
    return found


def _listed(command: str) -> list[Gpu]:
    try:
        done = subprocess.run(
            [command, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse(done.stdout) if done.returncode == 0 else []


def _bound() -> list[Gpu]:
    """Ask the CUDA runtime; containers often have it without nvidia-smi."""
    try:
        runtime = _runtime()
    except EnvironmentLacks:
        return []
    error, *counted = runtime.cudaGetDeviceCount()
    found = []
    for index in range(counted[0] if int(error) == 0 else 0):
        error, *facts = runtime.cudaGetDeviceProperties(index)
        if int(error) == 0:
            device = facts[0]
            found.append(Gpu(index, device.name.decode(), f"{device.major}{device.minor}", int(device.totalGlobalMem)))
    return found


def _runtime() -> Any:
    """Return the bindings of the CUDA runtime, which is of no type that is known here.

    Raises:
        EnvironmentLacks: there is no such package, or no library that it could bind.
    """
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise EnvironmentLacks(
            f"cuda.bindings cannot be imported: {error}", hint="pip install 'llmforge[cuda]'"
        ) from error


def copy_bandwidth(gpu: Gpu) -> float:
    """Copy 1 GiB on the device, again and again: bytes read and written in a second.

    Raises:
        EnvironmentLacks: cuda-bindings is missing, or CUDA refuses.
    """
    runtime = _runtime()

    def call(name: str, *arguments: Any) -> Any:
        code, *results = getattr(runtime, name)(*arguments)
        if int(code) != 0:
            raise EnvironmentLacks(f"CUDA call {name} failed on {gpu.title}: error {int(code)}")
        return results[0] if len(results) == 1 else results

    call("cudaSetDevice", gpu.index)
    source, goal = call("cudaMalloc", COPY_BYTES), call("cudaMalloc", COPY_BYTES)
    began, ended = call("cudaEventCreate"), call("cudaEventCreate")
    kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    try:
        call("cudaMemcpyAsync", goal, source, COPY_BYTES, kind, 0)  # warms up
        call("cudaEventRecord", began, 0)
        for _ in range(COPIES):
            call("cudaMemcpyAsync", goal, source, COPY_BYTES, kind, 0)
        call("cudaEventRecord", ended, 0)
        call("cudaEventSynchronize", ended)
        milliseconds = float(call("cudaEventElapsedTime", began, ended))
    finally:
        call("cudaFree", source)
        call("cudaFree", goal)
    return 2 * COPIES * COPY_BYTES / (milliseconds / 1e3)


def matrix_rates(gpu: Gpu, product: Callable[[str, Mapping[str, Any]], float]) -> dict[str, float]:
    """Measure products of large matrices by ONNX Runtime's CUDA provider: operations a second by dtype.

    `product` times one of `PRODUCT` rows and columns in a dtype, with options of the provider.

    Raises:
        EnvironmentLacks: this onnxruntime has no CUDA provider.
    """
    if "CUDAExecutionProvider" not in targets.onnxruntime_providers("cuda"):
        raise EnvironmentLacks("this onnxruntime has no CUDA execution provider", hint="pip install 'llmforge[cuda]'")
    dtypes: tuple[Dtype, ...] = ("fp16", "bf16")
    computed = [dtype for dtype in dtypes if has_arithmetic(dtype, gpu.sm)]
    return {dtype: 2 * PRODUCT**3 / product(dtype, {"device_id": gpu.index}) for dtype in computed}
