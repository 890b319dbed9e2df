"""Opens the engine of an artifact with what runs it: the session module of its provider."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmforge.backends import PROVIDERS, of_provider, plugin_of
from llmforge.backends.ranks import session as rank_session
from llmforge.base import plugins
from llmforge.base.errors import EnvironmentLacks, InputError, UsageError, VersionMismatch
from llmforge.native import nccl
from llmforge.runtime.config import DAMAGED, DATA_FILE, FILE, MODEL_FILE, DeviceFacts, RuntimeConfig
from llmforge.runtime.device import cuda as devices
from llmforge.runtime.device.cuda import CudaDevice, how_to_install
from llmforge.runtime.encoder import EncoderSession
from llmforge.runtime.interface import Decoder
from llmforge.runtime.signature import ELEMENTS

GRAPH_BYTES = 128 << 20  # of model.onnx: its weights lie beside it; of the deepest models it has some 10 MB
CONTEXT_STEP = 128  # tokens, in which a smaller context is proposed

logger = logging.getLogger(__name__)


def open_engine(folder: Path, config: RuntimeConfig, threads: int | None = None, device: int = 0) -> Decoder[Any]:
    """Open the engine in `folder`, which `config` describes; `device` counts the GPUs, where it runs on one.

    Raises:
        InputError: a file is missing, or they do not belong together.
        VersionMismatch: the engine was built for another version of what runs it, or for another GPU.
        EnvironmentLacks: there is no such GPU here, or what reaches it is not installed.
    """
    if config.encoder is not None:
        raise UsageError(
            f"{folder.parent} gives {'embeddings' if config.encoder.kind == 'embedder' else 'scores'}, not text",
            hint="`llmforge.load(ARTIFACT)` has `embed` and `score`",
        )
    # The device first: without one, nothing else that may be wrong here matters.
    alone = config.ranks == 1
    gpu = _gpu(config.device, device, extra=config.provider) if config.device is not None and alone else None
    if config.device is not None and not alone:  # each rank looks at its own device
        require_devices(config.ranks, device, config.provider)
    config.check_versions()
    graphs = config.rank_files if not alone else () if config.plan is not None else (MODEL_FILE,)
    wanted = (*graphs, *_data_files(config)) if config.plan is None else graphs or (config.plan.file,)
    if of_provider(config.provider).export_format is not None or (config.plugin and config.onnxruntime is None):
        wanted = (FILE,)  # the files of others are theirs to read
    _require_files(folder, wanted, graphs)
    if gpu is not None:
        _require_memory([folder / name for name in wanted], config, gpu)
    opened: Decoder[Any]
    name = of_provider(config.provider).name
    plugin = None if config.plugin is None else plugin_of(name)
    if config.ranks > 1:
        opened = rank_session.open_engine(folder, config, threads, device)
    else:
        with plugins.blamed(plugin):
            opened = module_of(config).open_engine(folder / wanted[0], config, threads, gpu)
    if (opened.vocabulary, set(opened.signature.caches)) != (config.vocabulary, set(config.caches)):
        raise InputError(f"{folder}: {FILE} does not match {wanted[0]}: vocabulary or caches differ")
    if (opened.signature.block_size is None) != (config.kv_blocks is None):
        raise InputError(f"{folder}: {FILE} does not match {wanted[0]}: one has blocks of a KV cache, one has not")
    if opened.signature.takes_adapters != bool(config.adapters):
        raise InputError(f"{folder}: {FILE} does not match {wanted[0]}: it names {len(config.adapters)} adapters")
    return opened


def open_encoder(folder: Path, config: RuntimeConfig, threads: int | None = None) -> EncoderSession:
    """Open the engine in `folder`, which `config` describes, of an embedder or a reranker.

    Raises:
        InputError: a file is missing, or they do not belong together.
        VersionMismatch: the engine was built for another version of what runs it.
        UsageError: it predicts tokens.
    """
    from llmforge.backends.onnxruntime import encoder  # what serves others need not import it

    if config.encoder is None:
        raise UsageError(
            f"{folder.parent} predicts tokens; it gives no embeddings and no scores", hint="build an encoder's recipe"
        )
    config.check_versions()
    _require_files(folder, (MODEL_FILE, DATA_FILE), (MODEL_FILE,))
    return encoder.open_encoder(folder / MODEL_FILE, config, threads)


def _require_files(folder: Path, wanted: Sequence[str], graphs: Sequence[str]) -> None:
    """Return if the files of an engine are there (InputError: one is not)."""
    for name in wanted:
        file = folder / name
        if not file.is_symlink() and not file.exists():
            raise InputError(f"{file} is missing", hint=DAMAGED)
        if file.is_symlink() or not file.is_file():  # a FIFO would block, a link may lead anywhere
            raise InputError(f"{file}: not a regular file", hint=DAMAGED)
        if name in graphs and file.stat().st_size > GRAPH_BYTES:
            raise InputError(f"{file}: {file.stat().st_size} bytes; a graph has at most {GRAPH_BYTES}", hint=DAMAGED)


def module_of(config: RuntimeConfig) -> Any:
    """Import the module that opens an engine: the one of its provider, or the one for blocks of a pool."""
    provider = PROVIDERS[config.provider]
    paged = None if config.kv_blocks is None else provider.paged
    return importlib.import_module(provider.session if paged is None else paged.session)


def require_devices(ranks: int, first: int = 0, provider: str = "cuda") -> None:
    """Return if this process sees a GPU for each of several ranks, from device `first` on, and NCCL is here.

    Raises:
        EnvironmentLacks: it does not.
    """
    seen = devices.count(provider)  # extras are named like providers
    if first + ranks > seen:
        beginning = f" from device {first} on" if first else ""
        raise EnvironmentLacks(
            f"the engine has {ranks} ranks, which take one GPU each{beginning}; this process sees {seen}",
            hint=f"build with `engine: {{tensor_parallel: {max(1, seen)}}}`, or check CUDA_VISIBLE_DEVICES"
            if seen
            else how_to_install(provider),
        )
    nccl.require()


def reach(config: RuntimeConfig, index: int, file: Path) -> CudaDevice:
    """Reach the GPU of the rank whose graph or plan is `file`, and hold it against what its engine wants.

    Raises what `open_engine` raises of a device.
    """
    assert config.device is not None
    gpu = _gpu(config.device, index, extra=config.provider)
    own = [file] if config.plan is not None else [file, file.with_name(f"{file.name}.data"), file.with_name(DATA_FILE)]
    _require_memory(own, config, gpu)
    return gpu


def _data_files(config: RuntimeConfig) -> tuple[str, ...]:
    """Name the files of initializers beside the graphs."""
    own = tuple(f"{name}.data" for name in config.rank_files) if config.ranks > 1 else ()
    return (DATA_FILE, *own)


def _gpu(facts: DeviceFacts, index: int, extra: str) -> CudaDevice:
    """Reach the GPU, and hold it against what the engine wants: kernels were chosen, or compiled, for it."""
    gpu = CudaDevice(index, extra)  # extras are named like providers
    if gpu.sm != facts.sm:
        fit = [str(at) for at in range(gpu.count) if at != index and CudaDevice(at, extra).sm == facts.sm]
        raise VersionMismatch(
            f"the engine was built for GPUs of compute capability {facts.sm / 10}, but {gpu.name} (device {index}) "
            f"has {gpu.sm / 10}",
            hint=f"of the {gpu.count} devices here, {', '.join(fit)} would do: choose with CUDA_VISIBLE_DEVICES, or in "
            f"Triton with `serving: {{triton: {{gpus: [{', '.join(fit)}]}}}}`"
            if fit
            else "build it for this device, or select another with CUDA_VISIBLE_DEVICES",
        )
    return gpu


def _require_memory(files: Sequence[Path], config: RuntimeConfig, gpu: CudaDevice) -> None:
    """Return if the GPU has room for weights, in `files`, and caches, which is the least that the engine takes.

    A slice of a GPU (MIG), or one that others use, has less than its target says. What the build estimated, kernels and
    captured steps included, is an upper bound: below it, a warning.

    Raises:
        EnvironmentLacks: it has not; says which batch or context would fit.
    """
    assert config.device is not None
    free, total = gpu.memory()
    weights = sum(file.stat().st_size for file in files)
    token = sum(each.kv_heads * each.head_dim * ELEMENTS[each.dtype].size_bytes for each in config.caches)
    least = config.max_batch if config.kv_blocks is None else 1  # a pool takes what is left, and one text at least
    cache = least * config.max_context * token
    if weights + cache > free:
        rows, context = ((free - weights) // (token * each) for each in (config.max_context, least))
        smaller = [f"engine.max_batch: {rows}"] * (rows > 0 and config.kv_blocks is None)
        smaller += [f"engine.max_context: {context // CONTEXT_STEP * CONTEXT_STEP}"] * (context >= CONTEXT_STEP)
        raise EnvironmentLacks(
            f"{gpu.name} (device {gpu.index}) has {free / 1e9:.2f} GB free of {total / 1e9:.2f}; the engine takes "
            f"{weights / 1e9:.2f} GB of weights and {cache / 1e9:.2f} GB of KV cache ({least} rows of "
            f"{config.max_context} tokens)",
            hint=f"free memory on the device, or build with {' or '.join(smaller)}"
            if smaller
            else "free memory on the device, or choose another: its weights alone do not fit",
        )
    if config.device.memory_bytes > free:
        logger.warning(
            "%s has %.2f GB free, and the engine may take up to %.2f GB with captured steps", gpu.name, free / 1e9,
            config.device.memory_bytes / 1e9,
        )  # fmt: skip
