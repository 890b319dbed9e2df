"""Opens the engine of an artifact with what runs it: ONNX Runtime on a CPU or a GPU, or TensorRT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmforge.base.errors import InputError, VersionMismatch
from llmforge.runtime.backends import device as devices
from llmforge.runtime.backends.config import DATA_FILE, FILE, MODEL_FILE, RuntimeConfig
from llmforge.runtime.backends.cuda import DeviceSession
from llmforge.runtime.backends.device import CudaDevice
from llmforge.runtime.backends.interface import Backend
from llmforge.runtime.backends.session import Session
from llmforge.runtime.backends.tensorrt import PlanSession
from llmforge.runtime.backends.tensorrt_plan import open_plan


def open_engine(folder: Path, config: RuntimeConfig, threads: int | None = None, device: int = 0) -> Backend[Any]:
    """Open the engine in `folder`, which `config` describes; `device` counts the GPUs, where it runs on one.

    Raises:
        InputError: a file is missing, or they do not belong together.
        VersionMismatch: the engine was built for another version of what runs it, or for another GPU.
        EnvironmentLacks: there is no such GPU here, or what reaches it is not installed.
    """
    # The device first: without one, nothing else that may be wrong here matters.
    gpu = _gpu(config, device) if config.provider != "cpu" else None
    config.check_versions()
    wanted = (MODEL_FILE, DATA_FILE) if config.plan is None else (config.plan.file,)
    for name in wanted:
        if not (folder / name).exists():
            raise InputError(f"{folder / name} is missing")
    opened: Session | DeviceSession | PlanSession
    if gpu is None:
        opened = Session(folder / MODEL_FILE, config.session.resolve(threads))
    elif config.plan is not None:
        opened = PlanSession(open_plan(folder / config.plan.file, config.plan), config, gpu)
    else:
        opened = DeviceSession(
            folder / MODEL_FILE,
            config.session.resolve(threads),
            gpu,
            provider_options=config.provider_options,
            buckets=config.buckets,
            graphs=config.graphs,
        )
    if (opened.vocabulary, set(opened.caches)) != (config.vocabulary, set(config.caches)):
        raise InputError(f"{folder}: {FILE} describes another model than {wanted[0]}: vocabulary or caches differ")
    return opened


def _gpu(config: RuntimeConfig, index: int) -> CudaDevice:
    """Reach the GPU, and hold it against what the engine wants: kernels were chosen, or compiled, for it."""
    gpu = devices.require_cuda(index, extra=config.provider)  # extras are named like providers
    assert config.device is not None
    if gpu.sm != config.device.sm:
        raise VersionMismatch(
            f"the engine was built for GPUs of compute capability {config.device.sm / 10}, and {gpu.name} (device "
            f"{index}) has {gpu.sm / 10}",
            hint="build it for this device, or choose another with CUDA_VISIBLE_DEVICES",
        )
    return gpu
