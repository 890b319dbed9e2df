"""Energy that a GPU takes, where its driver's library (NVML) counts it. Unverified: run on no GPU by this project."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from llmforge.base import extras
from llmforge.base.errors import EnvironmentLacks


def counter(index: int) -> Callable[[], float]:
    """Return what reads the joules that CUDA device `index` has taken since its driver was loaded.

    Raises:
        EnvironmentLacks: a package is missing, or the driver or the device counts none (before Volta).
    """
    try:
        nvml = importlib.import_module("pynvml")
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise EnvironmentLacks(f"energy: {error}", hint=extras.hint("energy")) from error
    # NVML counts devices in its own order, and knows nothing of CUDA_VISIBLE_DEVICES: the bus tells which one it is.
    code, bus = runtime.cudaDeviceGetPCIBusId(32, index)
    if int(code) != 0:
        raise EnvironmentLacks(f"energy: the bus of CUDA device {index} is not known: error {int(code)}")
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByPciBusId(bus.split(b"\0")[0])
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError as error:
        raise EnvironmentLacks(f"energy: {error}") from error
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3  # mJ
