"""Opens the engine of an artifact with what runs it: the session module of its provider."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from llmforge.base.backends import PROVIDERS, of_provider
from llmforge.base.errors import InputError, VersionMismatch
from llmforge.runtime.backends.config import DAMAGED, DATA_FILE, FILE, MODEL_FILE, DeviceFacts, RuntimeConfig
from llmforge.runtime.backends.device import CudaDevice
from llmforge.runtime.backends.interface import Backend

_PAGED = "llmforge.runtime.backends.paged"
GRAPH_BYTES = 128 << 20  # of model.onnx: its weights lie beside it; of the deepest models it has some 10 MB


def open_engine(folder: Path, config: RuntimeConfig, threads: int | None = None, device: int = 0) -> Backend[Any]:
    """Open the engine in `folder`, which `config` describes; `device` counts the GPUs, where it runs on one.

    Raises:
        InputError: a file is missing, or they do not belong together.
        VersionMismatch: the engine was built for another version of what runs it, or for another GPU.
        EnvironmentLacks: there is no such GPU here, or what reaches it is not installed.
    """
    # The device first: without one, nothing else that may be wrong here matters.
    gpu = None if config.device is None else _gpu(config.device, device, extra=config.provider)
    config.check_versions()
    wanted = (MODEL_FILE, DATA_FILE) if config.plan is None else (config.plan.file,)
    if of_provider(config.provider).elsewhere is not None:
        wanted = (FILE,)  # the files of others are theirs to read
    for name in wanted:
        file = folder / name
        if not file.is_symlink() and not file.exists():
            raise InputError(f"{file} is missing", hint=DAMAGED)
        if file.is_symlink() or not file.is_file():  # a FIFO would block, a link may lead anywhere
            raise InputError(f"{file}: not a regular file", hint=DAMAGED)
        if name == MODEL_FILE and file.stat().st_size > GRAPH_BYTES:
            raise InputError(f"{file}: {file.stat().st_size} bytes; a graph has at most {GRAPH_BYTES}", hint=DAMAGED)
    opened: Backend[Any] = module_of(config).open_engine(folder / wanted[0], config, threads, gpu)
    if (opened.vocabulary, set(opened.signature.caches)) != (config.vocabulary, set(config.caches)):
        raise InputError(f"{folder}: {FILE} does not match {wanted[0]}: vocabulary or caches differ")
    if (opened.signature.block_size is None) != (config.kv_blocks is None):
        raise InputError(f"{folder}: {FILE} does not match {wanted[0]}: one has blocks of a KV cache, one has not")
    if opened.signature.takes_adapters != bool(config.adapters):
        raise InputError(f"{folder}: {FILE} does not match {wanted[0]}: it names {len(config.adapters)} adapters")
    return opened


def module_of(config: RuntimeConfig) -> Any:
    """Import the module that opens an engine: the one of its provider, or the one for blocks of a pool."""
    return importlib.import_module(PROVIDERS[config.provider].session if config.kv_blocks is None else _PAGED)


def _gpu(facts: DeviceFacts, index: int, extra: str) -> CudaDevice:
    """Reach the GPU, and hold it against what the engine wants: kernels were chosen, or compiled, for it."""
    gpu = CudaDevice(index, extra)  # extras are named like providers
    if gpu.sm != facts.sm:
        raise VersionMismatch(
            f"the engine was built for GPUs of compute capability {facts.sm / 10}, but {gpu.name} (device {index}) "
            f"has {gpu.sm / 10}",
            hint="build it for this device, or select another with CUDA_VISIBLE_DEVICES",
        )
    return gpu
