"""Deployment devices: one YAML file each, here or in a package from outside (llmforge.base.plugins), and their loader.

A figure (memory, bandwidth, a rate) never stands alone: it carries its source, and whether somebody verified it.
"""

from __future__ import annotations

import enum
import itertools
import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llmforge.backends import BACKENDS, BUILT_IN, BackendName
from llmforge.backends.record import Kind, Provider, Support
from llmforge.base import extras, located_yaml
from llmforge.base.errors import EnvironmentLacks, UnsupportedError, UsageError
from llmforge.base.plugins import Plugin, Seam
from llmforge.targets.achieved import Assumption, Share, defaults

FOLDER = Path(__file__).resolve().parent
LOCAL = "local"
_WRITTEN = "write one with `llmforge doctor --measure --write FILE.yaml`"

SPARSE_SINCE_SM = 80  # NVIDIA A100 Tensor Core GPU Architecture, 2020: "2:4 sparsity", twice the dense rate
WORTH = 0.05  # of time, for what costs quality; less is within what a plan can tell
Rate = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4", "fp4"]
Library = Literal["onnxruntime", "llmforge"]  # whose kernels compute quantized layers on a CPU
BlockDtype = Literal["int4", "int8"]  # of weights that those kernels read


class Isa(enum.Enum):
    """Instruction sets that ONNX Runtime's CPU kernels (MLAS) tell apart, weakest first; each includes those before."""

    GENERIC = "generic"
    AVX2 = "avx2"
    AVX512 = "avx512"
    AVX512_VNNI = "avx512-vnni"
    AMX = "amx"

    def includes(self, other: Isa) -> bool:
        """Say whether a machine with this instruction set runs code for `other`."""
        order = list(Isa)
        return order.index(self) >= order.index(other)


# What MLAS asks of CPUID before it selects a set of kernels (onnxruntime/core/mlas/lib/platform.cpp), in the names of
# /proc/cpuinfo. Each row counts on top of the rows above it.
_FLAGS: dict[Isa, frozenset[str]] = {
    Isa.AVX2: frozenset({"avx2", "fma"}),
    Isa.AVX512: frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    Isa.AVX512_VNNI: frozenset({"avx512_vnni"}),
    Isa.AMX: frozenset({"amx_tile", "amx_int8"}),
}


class SourcedFigure(BaseModel):
    """A number about a device and where it comes from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float = Field(gt=0)
    source: str = Field(min_length=1, description="document, page or measurement the figure comes from")
    verified: bool = Field(description="checked in the primary source, or measured by this project")


class QuantizedLayers(BaseModel):
    """What one library's kernels reach on a CPU with weights in blocks, of one dtype, and activations in int8."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rate: SourcedFigure  # of a prompt's rows, TOP/s
    read_gbs: SourcedFigure  # 10**9 bytes of weights a second, where a step has one row


@dataclass(frozen=True)
class Speedup:
    """How much faster matrices are multiplied in one dtype than in another, as a plan reckons, and why."""

    times: float
    words: str

    def __str__(self) -> str:
        return self.words


class DevicePrice(SourcedFigure):
    """What an hour of one device costs; prices move, so the day of the source stands beside it."""

    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")]


class Interconnect(BaseModel):
    """How devices of one kind reach each other."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["nvlink", "pcie"]
    gbs: SourcedFigure  # 10**9 bytes a second of one device, in one direction
    domain: Annotated[int, Field(ge=1)]  # devices that reach each other so


@dataclass(frozen=True)
class GpuFacts:
    """What every GPU target has."""

    sm: str  # compute capability without the dot, "89"
    memory_gb: SourcedFigure
    bandwidth_gbs: SourcedFigure
    multiprocessors: int  # 0: not known


class Target(BaseModel):
    """Immutable facts of a deployment device.

    A CPU target is an instruction set: memory and rates depend on the machine, and are in the file of a machine alone,
    which `llmforge doctor --measure --write` makes. A GPU target is one device; `rates` are dense (no sparsity), in
    TFLOP/s for floating point and TOP/s for integers. `memory_gb` is what the data sheet says; drivers show up to 7 %
    more, because its GB are 2**30 bytes. `achieved` replaces shares of `targets.achieved`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str
    like: str | None = None  # in the file of a machine: the target here that engines for it are built for
    kind: Kind
    isa: Isa | None = None
    sm: Annotated[str, Field(pattern=r"^\d{2,3}$")] | None = None  # compute capability without the dot, "89"
    memory_gb: SourcedFigure | None = None  # 10**9 bytes
    bandwidth_gbs: SourcedFigure | None = None  # 10**9 bytes a second
    multiprocessors: SourcedFigure | None = None  # of a GPU
    rates: dict[Rate, SourcedFigure] = Field(default_factory=dict)
    kernels: dict[Library, dict[BlockDtype, QuantizedLayers]] = Field(
        default_factory=dict
    )  # of a CPU that was measured
    cores: Annotated[int, Field(ge=1)] | None = None  # physical, of a CPU
    interconnect: Interconnect | None = None
    host_gbs: SourcedFigure | None = (
        None  # as `gbs` of interconnect, between a device and its host's memory; None: that, if PCIe
    )
    accelerator: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")] | None = None  # what Ray calls such a GPU
    tdp_w: SourcedFigure | None = None
    usd_per_hour: DevicePrice | None = None
    achieved: dict[Share, SourcedFigure] = Field(default_factory=dict)
    engines: tuple[BackendName, ...] = Field(min_length=1)
    throughput_engines: tuple[
        BackendName, ...
    ] = ()  # of which `init` proposes the first for throughput; (): of `engines`
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _kind_has_its_facts(self) -> Self:
        if self.kind == "cpu" and (self.isa is None or self.sm is not None):
            raise ValueError("a CPU target has `isa` and no `sm`")
        if self.kind == "gpu" and (self.sm is None or self.isa is not None):
            raise ValueError("a GPU target has `sm` and no `isa`")
        if self.kind == "gpu" and (self.memory_gb is None or self.bandwidth_gbs is None or not self.rates):
            raise ValueError("a GPU target has `memory_gb`, `bandwidth_gbs` and `rates`")
        for backend in self.engines:
            if (reason := BACKENDS[backend].unsupported(self.sm)) is not None:
                raise ValueError(f"`engines` cannot hold {backend}: {reason}")
        return self

    @property
    def catalog_name(self) -> str:
        """The name of a target in this folder, by which artifacts know it everywhere."""
        return self.like or self.name

    def support(self, backend: BackendName) -> Support:
        """Return the dtypes that an engine of `backend` takes here.

        Raises:
            UnsupportedError: there is no such engine for this target; says why.
        """
        return self.require_engine(backend).support(self.sm)

    def share(self, name: Share) -> Assumption:
        """Return how much of a ceiling is reached, or a fixed time: this file's figure, else the default."""
        own = self.achieved.get(name)
        return defaults(self.sm)[name] if own is None else Assumption(own.value, own.source)

    def speedup(self, dtype: Rate) -> Speedup | None:
        """Say how much faster matrices are multiplied in `dtype` than in the best of wider ones; None: not known."""
        wide: tuple[Rate, ...] = ("fp16", "bf16") if self.kind == "gpu" else ("fp32",)
        reached = {
            each: self.rates[each].value * self.share(matrix_share_of(each)).value
            for each in (dtype, *wide)
            if each in self.rates
        }
        best = max((each for each in wide if each in reached), key=lambda each: reached[each], default=None)
        if best is None or dtype not in reached:
            return None
        times = reached[dtype] / reached[best]
        figures = [
            f"{each} {reached[each]:.3g} of {self.rates[each].value:g} T/s ({self.rates[each].source})"
            for each in (dtype, best)
        ]
        return Speedup(times, f"products in {dtype} take {1 / times:.2f} of the time of {best}: {'; '.join(figures)}")

    def sparse_speedup(self) -> Speedup:
        """Say how much faster matrices of 2:4 sparsity are multiplied than dense ones, at best, and why."""
        if self.kind == "cpu":
            return Speedup(1.0, "2:4 takes 1.00 of the time of dense products: no CPU kernel skips zeros")
        rate = self.rates.get("fp16") or next(iter(self.rates.values()))
        if int(self.sm or 0) < SPARSE_SINCE_SM:
            words = f"2:4 takes 1.00 of the time of dense products: SM{self.sm} has {rate.value:g} TFLOP/s for both"
            return Speedup(1.0, f"{words}; sparse tensor cores begin with SM{SPARSE_SINCE_SM}")
        if not any(BACKENDS[engine].sparse for engine in self.engines):
            return Speedup(1.0, f"2:4 takes 1.00 of the time of dense products: {', '.join(self.engines)} knows none")
        return Speedup(2.0, f"2:4 takes 0.50 of the time of dense products at best: {2 * rate.value:g} TFLOP/s")

    def require_engine(self, backend: BackendName) -> Provider:
        """Return what runs engines of `backend` on this device.

        Raises:
            UnsupportedError: nothing does.
        """
        record = BACKENDS[backend]
        provider = record.on(self.kind)
        listed = backend in self.engines or record.export_format is not None
        if backend not in BUILT_IN:  # no file here can list it: its record says what it runs on
            listed = record.unsupported(self.sm) is None
        if provider is None or not listed:
            reason = record.unsupported(self.sm) or "its file does not list it"
            raise UnsupportedError(
                f"target {self.name} ({self.title}) cannot load engines of {backend}: {reason}; its engines: "
                f"{', '.join(self.engines)}",
                hint=f"set `engine: {{backend: {self.engines[0]}}}`, or choose another target",
            )
        return provider

    def require_gpu(self) -> GpuFacts:
        """Return the facts that every GPU has.

        Raises:
            UnsupportedError: this is a CPU.
        """
        if self.sm is None or self.memory_gb is None or self.bandwidth_gbs is None:
            raise UnsupportedError(f"target {self.name} is a {self.kind}; this engine runs on GPUs")
        processors = 0 if self.multiprocessors is None else int(self.multiprocessors.value)
        return GpuFacts(self.sm, self.memory_gb, self.bandwidth_gbs, processors)

    def require_here(self) -> None:
        """Return if this machine runs what is built for a CPU target; of GPUs nothing is asked here.

        Raises:
            EnvironmentLacks: it does not, or onnxruntime is not installed.
        """
        if self.isa is None:
            return
        onnxruntime_providers("cpu")
        here = detect()
        if not here.includes(self.isa):
            raise EnvironmentLacks(
                f"target {self.name} needs the instruction set {self.isa.value}; this machine has {here.value}, so "
                "an engine could be written here but not validated",
                hint=f"build on a machine that has it, or set `target: {LOCAL}`",
            )


def names() -> list[str]:
    """List the names that `load` knows besides `local`."""
    return sorted({*built_in(), *SEAM.names()})


def built_in() -> list[str]:
    """List the names of the files in this folder."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def plugin_of(name: str) -> Plugin | None:
    """Find the plug-in that brings the target `name`, of `names`; None: its file lies in this folder.

    Raises:
        PluginError: several bring it, or it is written for another interface.
    """
    return SEAM.plugin(name, {*built_in(), LOCAL})


def _of_plugin(plugin: Plugin, package: Any) -> Target:
    """Read the file NAME.yaml that lies in a package."""
    folders = getattr(package, "__path__", None)
    if folders is None:
        raise ValueError(f"it is a {type(package).__name__}, not a package with the file {plugin.name}.yaml")
    path = next((file for folder in folders if (file := Path(folder, f"{plugin.name}.yaml")).is_file()), None)
    if path is None:
        raise ValueError(f"its package has no file {plugin.name}.yaml")
    found = read(path)
    if found.name != plugin.name or found.like is not None:
        raise ValueError(f"{path.name}: a target of a plug-in is called as its file, and has no `like`")
    return found


SEAM = Seam("targets", _of_plugin)


def load(name: str) -> Target:
    """Read a target by its name, in whatever case; `local` is the CPU of this machine.

    Raises:
        UsageError: no such target, or several are meant.
        EnvironmentLacks: `local`, and this machine does not tell its instruction set.
        PluginError: a plug-in brings it, and fails.
    """
    found = meant(name)
    of_plugin = SEAM.find(found, {*built_in(), LOCAL})
    if of_plugin is not None:
        return of_plugin
    return local() if found == LOCAL else read(FOLDER / f"{found}.yaml")


def meant(name: str) -> str:
    """Return the target that `name` is, in whatever case: `local` or one of `names`.

    Raises:
        UsageError: no such target, or several are meant.
    """
    wanted, known = name.lower(), names()
    if wanted == LOCAL or wanted in known:
        return wanted
    variants = [each for each in known if each.startswith(f"{wanted}-")] if wanted else []
    if variants:
        raise UsageError(
            f"{name!r} is ambiguous: {', '.join(variants)}",
            hint="see `llmforge targets NAME`",
        )
    close = located_yaml.nearest(wanted, [*known, LOCAL])
    raise UsageError(
        f"no target is named {name!r}; known: {LOCAL}, {', '.join(known)}",
        hint=f"did you mean {close!r}?" if close else "see `llmforge targets`",
    )


def is_file(text: str) -> bool:
    """Say whether `text` names the file of a target, and not a target."""
    return text.endswith((".yaml", ".yml"))


def find(text: str) -> Target:
    """Read the target that `text` names, or that is described in the YAML file at that path.

    Raises:
        UsageError: no such target, or the file does not describe one.
        EnvironmentLacks: as `load`.
    """
    return read(Path(text)) if is_file(text) else load(text)


def read(path: Path) -> Target:
    """Read the target that the YAML file `path` describes; its name is the file's.

    Raises:
        UsageError: the file does not describe a target.
    """
    content = located_yaml.read(path).data
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected a mapping with `title`, `kind`, `engines`, …", hint=_WRITTEN)
    if content.get("like") is not None:
        content = {**content, "like": _like(path, str(content["like"]))}
    try:
        return Target.model_validate({"name": path.stem, **content})
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, each['loc'])) or 'all of it'}: {each['msg']}" for each in error.errors())
        raise UsageError(
            f"{path}: not a target: {'; '.join(wrong)}",
            hint="this is a recipe; use `llmforge plan RECIPE`" if "checkpoint" in content else _WRITTEN,
        ) from None


def _like(path: Path, name: str) -> str:
    """Return the target in this folder that `name`, of the file `path`, is."""
    try:
        found = meant(name)
    except UsageError as error:
        raise UsageError(f"{path}: like: {error.message}", hint=error.hint) from None
    if found == LOCAL:
        raise UsageError(
            f"{path}: `like` is {name!r}; expected one of {', '.join(names())}",
            hint=f"`llmforge targets {LOCAL}` shows that of this machine",
        )
    return found


def matrix_share_of(dtype: str) -> Share:
    """Name the share that counts for products in `dtype`."""
    return "matrix_8" if dtype in ("fp8", "int8") else "matrix_4" if dtype in ("fp4", "int4") else "matrix_16"


def local() -> Target:
    """Find the CPU target of this machine.

    Raises:
        EnvironmentLacks: the operating system does not tell the instruction set.
    """
    return load(f"cpu-{detect().value}")


def detect() -> Isa:
    """Find the strongest instruction set of this machine that ONNX Runtime's kernels know.

    Raises:
        EnvironmentLacks: an x86 machine whose operating system has no /proc/cpuinfo.
    """
    machine = platform.machine().lower()
    if machine not in {"x86_64", "amd64", "i386", "i686"}:
        return Isa.GENERIC
    flags = cpu_flags()
    if not flags:
        raise EnvironmentLacks(
            f"cannot tell the instruction set of this {machine} machine under {platform.system() or 'this system'}: "
            "there is no /proc/cpuinfo that lists it",
            hint=f"name the target instead of `{LOCAL}`: {', '.join(f'cpu-{isa.value}' for isa in Isa)}",
        )
    return classify(flags)


def classify(flags: Collection[str]) -> Isa:
    """Find the strongest instruction set among the `flags` of an x86 CPU, named as in /proc/cpuinfo."""
    return [Isa.GENERIC, *itertools.takewhile(lambda isa: _FLAGS[isa].issubset(flags), _FLAGS)][-1]


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Read the x86 feature flags of the first CPU; empty where the system does not list them."""
    if not path.is_file():
        return frozenset()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def onnxruntime_providers(extra: str) -> list[str]:
    """List the execution providers of the installed onnxruntime.

    Raises:
        EnvironmentLacks: onnxruntime is not installed, or not as a whole.
    """
    if (lack := extras.trouble(extras.RUNTIME, extra)) is not None:
        raise lack
    import onnxruntime

    providers: list[str] = onnxruntime.get_available_providers()
    return providers
