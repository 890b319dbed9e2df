"""Packages and devices of this machine, and what they allow: a checklist, each line with what to do about it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from llmforge import native, targets
from llmforge.backends import BACKENDS, PROVIDERS
from llmforge.backends.record import dotted
from llmforge.base import extras
from llmforge.base.errors import EnvironmentLacks
from llmforge.checkpoint import versions
from llmforge.measure.gpus import Gpu
from llmforge.measure.machine import Machine
from llmforge.native import nccl

State = Literal["yes", "no", "optional"]
_TIGHT = 10_000_000_000  # bytes of disk below which a build of a few billion parameters will not end
_PACKAGES = (
    "torch", "transformers", "onnx", "onnx-ir", "onnxscript", *(each.package for each in PROVIDERS.values()), "numpy",
    "tokenizers", "safetensors", "cuda-bindings", "llguidance", "starlette", "uvicorn", "prometheus-client",
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One line: what it is about, whether it is there, what was found, and what to do."""

    name: str
    state: State
    found: str
    hint: str | None = None


_NO_GPU = Check("run on CUDA", "optional", "no NVIDIA GPU found", "GPU engines need a machine with one")


def packages() -> dict[str, str]:
    """Return the versions of the packages that llmforge uses and that are installed."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def checklist(machine: Machine, gpus: Sequence[Gpu], folder: Path) -> list[Check]:
    """Go through what builds and runs need; `folder` is where artifacts would be written."""
    return [
        _processor(machine),
        _disk(folder),
        _frontend(),
        *_runtimes(gpus),
        _kernels(),
        _nccl(gpus),
        *_extras(),
        *_compilers(gpus),
    ]


def _processor(machine: Machine) -> Check:
    try:
        isa = targets.local().name
    except EnvironmentLacks as error:
        return Check("CPU", "no", machine.cpu, error.hint)
    cores = f"{machine.cores} cores, {machine.usable_cpus} usable CPUs, {machine.memory_bytes / 1e9:.1f} GB"
    return Check("CPU", "yes", f"{machine.cpu}: target {isa}, {cores}")


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    found = f"{free / 1e9:.0f} GB free in {folder.name or folder}"
    if free < _TIGHT:
        return Check("disk", "no", found, "a build needs space for the artifact; see `llmforge plan RECIPE`")
    return Check("disk", "yes", found)


def _frontend() -> Check:
    if missing := extras.missing("build"):
        found = f"{', '.join(missing)} missing: needed by build, trace, diff-graph, passes, schema"
        return Check("build", "optional", found, extras.hint("build"))
    try:
        versions.check()
    except EnvironmentLacks as error:
        return Check("build", "no", error.message, error.hint)
    pins = ", ".join(f"{name} {version}" for name, version in versions.pins().items())
    return Check("build", "yes", f"can trace and quantize checkpoints ({pins})")


def _runtimes(gpus: Sequence[Gpu]) -> Iterator[Check]:
    try:
        providers = targets.onnxruntime_providers("cpu")
    except EnvironmentLacks as error:
        yield Check("run on the CPU", "no", f"{error.message}; needed by run, serve, bench, triton", error.hint)
        if gpus:
            yield Check("run on CUDA", "no", error.message, "pip install 'llmforge[cuda]'")
        else:
            yield _NO_GPU
        return
    import onnxruntime

    yield Check("run on the CPU", "yes", f"onnxruntime {onnxruntime.__version__}")
    if not gpus:
        yield _NO_GPU
    elif "CUDAExecutionProvider" not in providers:
        hint = "pip uninstall onnxruntime, then pip install 'llmforge[cuda]'"
        yield Check("run on CUDA", "no", "this onnxruntime has no CUDA provider", hint)
    else:
        for gpu in gpus:
            if BACKENDS["onnxruntime"].unsupported(gpu.sm) is None:
                yield Check("run on CUDA", "yes", f"{gpu.title}: onnxruntime {onnxruntime.__version__}")
            else:
                yield Check("run on CUDA", "no", f"{gpu.title}: the wheel has no code for SM {gpu.sm}", "use TensorRT")


def _kernels() -> Check:
    if native.library() is None:
        hint = "install a C compiler (gcc or clang), then install llmforge again"
        found = "not compiled: no C compiler was found at installation"
        return Check("CPU kernels", "optional", found, hint)
    return Check("CPU kernels", "yes", f"compiled, using {native.instruction_set()}")


def _nccl(gpus: Sequence[Gpu]) -> Check:
    """Look for what ranks on GPUs meet through; several GPUs are no use to one engine without it."""
    what = "an engine over several GPUs (`engine: {tensor_parallel: N}`)"
    if (version := nccl.version()) is None:
        state: State = "no" if len(gpus) > 1 else "optional"
        return Check("NCCL", state, f"{nccl.LIBRARY} not found: needed for {what}", nccl.INSTALL)
    return Check("NCCL", "yes", f"{version}, for {what}")


def _extras() -> Iterator[Check]:
    for extra, what in (
        ("serve", "llmforge serve"),
        ("constraints", "answers constrained by a JSON schema, a regular expression or a grammar"),
    ):
        if missing := extras.missing(extra):
            yield Check(extra, "optional", f"{', '.join(missing)} missing: needed for {what}", extras.hint(extra))
        else:
            yield Check(extra, "yes", what)


def _compilers(gpus: Sequence[Gpu]) -> Iterator[Check]:
    """Go through the backends that compile plans; those that need no GPU come first."""
    compilers = [(each, provider) for each in BACKENDS.values() if each.compiled for provider in each.providers]
    for backend, provider in sorted(compilers, key=lambda each: each[1].needs_device is not None):
        what = "plans" if provider.needs_device is None else "engines"
        if importlib.util.find_spec(backend.module) is None:
            where = f" (from {provider.index})" if provider.index else ""
            yield Check(backend.title, "optional", f"cannot build {what}", provider.install + where)
        elif provider.needs_device is None:
            known = ", ".join(map(dotted, provider.capabilities or ()))
            yield Check(backend.title, "yes", f"can build {what} for SM {known}, with or without a GPU")
        elif not gpus:
            yield Check(backend.title, "no", "installed, but needs the target GPU to build an engine")
        else:
            yield Check(backend.title, "yes", f"can build {what} for {', '.join(gpu.title for gpu in gpus)}")


def settings() -> dict[str, str]:
    """Return the variables that decide how many threads libraries take, and the system."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES")
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        **{name: value for name in names if (value := os.environ.get(name)) is not None},
    }
