"""What builds and runs engines: one record a backend, which all that tells backends apart reads.

A *backend* is what `engine: {backend: …}` of a recipe names. A *provider* is what of it runs on one kind of target, and
the name of that in `engine/runtime.json` and of the extra of this package that brings it. A new backend is a record
here, the modules that the record names, and an entry in `engines` of the targets that run it.

The records are data, with modules by their names: a serving environment reads them, which has no build tools.

A backend of a plug-in (llmforge.base.plugins) is such a record, too, and found by its name like those here; its
providers are called as it is, or begin with its name and a hyphen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from llmforge.base.plugins import Plugin, Seam

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

Kind = Literal["cpu", "gpu"]  # of a target
Dtype = Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4", "fp4"]
Role = Literal["compute", "weights", "kv"]
_ANY: tuple[Role, ...] = ("compute", "weights", "kv")

# Stands in an engine's folder until the engine is built (llmforge.backends.pending).
PENDING_FILE = "pending.json"
# Tokens of a prompt that run at once. It bounds the memory of activations and of the attention scores.
PREFILL_CHUNK = 512


def paged_block_tokens(head_dim: int, *, int8: bool = False) -> int:
    """Give the fewest tokens of a block that attention reads in place (onnxruntime 1.31, paged_attention.cc).

    FlashAttention reads blocks of the activations' dtype; of `int8`, XQA reads multiples of 128 tokens.
    """
    tokens = 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
    return max(tokens, 128) if int8 else tokens


PAGED_SM = 80  # FlashAttention, which reads blocks where they lie, begins with Ampere
PAGED_HEAD_DIM = 256  # and takes heads of up to so many channels


INT8_SLOTS = "over int8 blocks each step with prompts copies all its texts in 16 bits first"


def slots_reason(provider: str, sm: str | None, ranks: int) -> str | None:
    """Say why a KV cache lies in slots and not in blocks, on compute capability `sm`, "89", if no recipe says where.

    None: it lies in blocks, if the graph can read them.
    """
    if provider != "cuda":
        return "only ONNX Runtime's CUDA provider has attention over blocks"
    if int(sm or 0) < PAGED_SM:
        return f"FlashAttention, which reads blocks in place, needs SM {dotted(str(PAGED_SM))}"
    if ranks > 1:
        return "ranks of one model have slots alone"
    return None


# Compute capability from which on devices have arithmetic in a dtype: Ampere, Ada, Blackwell.
ARITHMETIC: Mapping[Dtype, int] = {"bf16": 80, "fp8": 89, "fp4": 100}
INT4_TENSORRT = 80  # TensorRT-RTX 1.7 refuses int4 weights on SM 7.5
TENSORRT_HEAD_DIMS = range(16, 257, 8)  # channels of a head that a fused attention kernel exists for


def has_arithmetic(dtype: Dtype, sm: str) -> bool:
    """Say whether devices of compute capability `sm`, "89", compute in `dtype`."""
    return int(sm) >= ARITHMETIC.get(dtype, 0)


def dotted(sm: str) -> str:
    """Write the compute capability "89" as NVIDIA does: 8.9."""
    return f"{sm[:-1]}.{sm[-1]}"


@dataclass(frozen=True)
class Support:
    """What an engine takes on one kind of device.

    `compute` are dtypes of activations between layers, `weights` of stored matrices (int8 and int4 are weights alone,
    multiplied in the compute dtype; fp8 and fp4 round activations as well), `kv` of the cache. `why` gives the reason
    where something that the hardware or the engine has elsewhere is missing.
    """

    compute: frozenset[Dtype]
    weights: frozenset[Dtype]
    kv: frozenset[Dtype]
    why: Mapping[Dtype, str]
    verified: bool  # read off the package, or seen when an engine was built or refused

    def refusal(self, dtype: Dtype, role: Role) -> str | None:
        """Say why `dtype` cannot be used in `role`; None where it can."""
        allowed: frozenset[Dtype] = getattr(self, role)
        if dtype in allowed:
            return None
        known = self.why.get(dtype) if role != "kv" else None
        what = {"compute": "computes in", "weights": "stores weights as", "kv": "caches keys and values as"}[role]
        return known or f"it {what} {', '.join(sorted(allowed))}"


@dataclass(frozen=True)
class Use:
    """What a provider takes a dtype for, where the device has its arithmetic, and from capability `least_sm` on."""

    roles: tuple[Role, ...]
    least_sm: int = 0
    below: str = ""  # why not below `least_sm`


@dataclass(frozen=True)
class Provider:
    """A backend on one kind of target.

    Dtypes are told by compute capability, because devices of one capability do not differ here. One that is absent is
    refused when a plan is made; the reasons say why.
    """

    name: str
    kind: Kind | None  # of the targets; None: any, since what it writes is the same for each
    package: str  # that runs its engines, as pip knows it
    requirements: tuple[str, ...]  # of a serving environment, for pip; `{version}` is that of `package`
    builder: str  # module that lowers and builds (llmforge.backends.engines.EngineBuilder)
    session: str  # module whose `open_engine` loads what was built
    dtypes: Mapping[Dtype, Use]
    never: Mapping[Dtype, str] = field(default_factory=dict)  # why dtypes are refused on every device
    capabilities: tuple[str, ...] | None = None  # that it has code for; None: those of the GPU at hand
    uncovered: str = ""  # why it runs on no other; `{sm}` is the capability
    needs_device: str | None = None  # why an engine is built on the GPU that runs it; None: it is built anywhere
    index: str = ""  # where pip gets `package`, if not from PyPI
    verified: bool = False  # `dtypes` were read off the package, or seen when an engine was built or refused
    ranks: bool = False  # several of its engines compute one model together (docs/tensor-parallelism.md)
    ranks_sm: int = 0  # compute capability from which on they can, of GPUs

    @property
    def install(self) -> str:
        """How to get what builds and runs its engines."""
        return f"pip install 'llmforge[{self.name}]'"

    def support(self, sm: str | None) -> Support:
        """Return what it takes on capability `sm`, "89"; None: a CPU."""
        number, why = int(sm or 0), dict(self.never)
        taken: dict[Role, set[Dtype]] = {role: set() for role in _ANY}
        for dtype, use in self.dtypes.items():
            first = ARITHMETIC.get(dtype, 0)
            if number < use.least_sm:
                why.setdefault(dtype, use.below)
            elif sm is not None and number < first:
                came = f"which came with SM {dotted(str(first))}"
                why.setdefault(dtype, f"SM {dotted(sm)} has no {dtype} arithmetic, {came}")
            else:
                for role in use.roles:
                    taken[role].add(dtype)
        compute, weights, kv = (frozenset(taken[role]) for role in _ANY)
        return Support(compute, weights, kv, why, self.verified)


@dataclass(frozen=True)
class Elsewhere:
    """Whose servers load what a backend writes: a file format of theirs, that holds the parameters of a checkpoint.

    A format has the architecture by its name: `passes` change no more of the model than how parameters are stored.
    """

    servers: str  # "vLLM or SGLang"
    serve: str  # the command of one of them; `{engine}` is the folder
    runtime: Literal["transformers", "llama-cpp"]  # that runs what was written on a CPU (llmforge.metrics.agreement)
    passes: tuple[str, ...]


@dataclass(frozen=True)
class BackendRecord:
    """What a recipe's `engine: {backend: …}` names."""

    name: str
    title: str
    module: str  # its Python module
    providers: tuple[Provider, ...]  # one a kind of target
    compiled: bool  # an engine is a plan that `module` compiled from the graph; else the graph itself, as ONNX
    scales: Literal["blocks", "channels"]  # what shares a scale where weights in 8 bits are multiplied as they are
    alone: str = ""  # why engines share no model, of providers that are no `ranks` (docs/tensor-parallelism.md)
    head_dims: range | None = None  # channels of a head that attention has kernels for, keys as values; None: any
    elsewhere: Elsewhere | None = None  # None: llmforge's own runtime runs its engines

    def on(self, kind: Kind) -> Provider | None:
        """Return what of it runs on targets of `kind`, if anything does."""
        return next((provider for provider in self.providers if provider.kind in (kind, None)), None)

    def unsupported(self, sm: str | None) -> str | None:
        """Say why it has no engine at all for capability `sm` (None: a CPU); None where it has."""
        provider = self.on("cpu" if sm is None else "gpu")
        if provider is None:
            return f"it builds engines for {'NVIDIA GPUs' if sm is None else 'CPUs'} only"
        if sm is None or provider.capabilities is None or sm in provider.capabilities:
            return None
        return provider.uncovered.format(sm=dotted(sm))


_CUDA_BINDINGS = "cuda-bindings>=13,<14"  # onnxruntime's wheel is of CUDA 13

ONNXRUNTIME = BackendRecord(
    name="onnxruntime",
    title="ONNX Runtime",
    module="onnxruntime",
    compiled=False,
    scales="blocks",
    providers=(
        Provider(
            name="cpu",
            kind="cpu",
            package="onnxruntime",
            requirements=("onnxruntime=={version}",),
            builder="llmforge.backends.onnxruntime.builder",
            session="llmforge.backends.onnxruntime.session",
            dtypes={"fp32": Use(_ANY), "int8": Use(("weights", "kv")), "int4": Use(("weights", "kv"))},
            never=dict.fromkeys(("fp16", "bf16"), "CPU engines compute in fp32, or in int8 on int8 and int4 weights"),
            verified=True,
            ranks=True,
        ),
        # GroupQueryAttention, MatMulNBits and their caches: the kernel registry of onnxruntime-gpu 1.31.1. The wheel
        # holds machine code (backends/onnxruntime/cuda_kernels.json) and no PTX, so that nothing else runs.
        Provider(
            name="cuda",
            kind="gpu",
            package="onnxruntime-gpu",
            requirements=("onnxruntime-gpu[cuda,cudnn]=={version}", _CUDA_BINDINGS),
            builder="llmforge.backends.onnxruntime.cuda.builder",
            session="llmforge.backends.onnxruntime.cuda.session",
            dtypes={
                "fp16": Use(_ANY),
                "bf16": Use(_ANY),
                "int8": Use(("weights", "kv")),
                "int4": Use(("weights", "kv")),
                "fp8": Use(("kv",)),
            },
            never={
                "fp32": "GroupQueryAttention on CUDA takes fp16 and bf16",
                "fp8": "onnxruntime would dequantize fp8 weights before every matmul",
                "fp4": "onnxruntime would dequantize fp4 weights before every matmul",
            },
            capabilities=("75", "80", "86", "89", "90", "120"),
            uncovered="the onnxruntime-gpu 1.31.1 wheel holds neither code for SM {sm} nor PTX to make it from",
            needs_device="an engine for ONNX Runtime's CUDA provider is verified on the GPU that runs it",
            ranks=True,
        ),
    ),
)


TENSORRT = BackendRecord(
    name="tensorrt",
    title="TensorRT",
    module="tensorrt",
    compiled=True,
    scales="channels",
    head_dims=TENSORRT_HEAD_DIMS,
    providers=(
        # What TensorRT-RTX 1.7 built and refused by capability, without a GPU; TensorRT 11 is taken to do the same.
        # Blocks of int4 weights have no zero points; caches are updated in place, which takes 16 bits.
        Provider(
            name="tensorrt",
            kind="gpu",
            package="tensorrt",
            # The runtime imports onnxruntime whatever runs the engine; any version does.
            requirements=("onnxruntime", "tensorrt=={version}", _CUDA_BINDINGS),
            builder="llmforge.backends.tensorrt.builder",
            session="llmforge.backends.tensorrt.session",
            dtypes={
                "fp16": Use(_ANY),
                "bf16": Use(_ANY),
                "int8": Use(("weights",)),
                "int4": Use(("weights",), INT4_TENSORRT, "TensorRT refuses int4 weights on SM 7.5"),
                "fp8": Use(("weights",)),
                "fp4": Use(("weights",)),
            },
            never={"fp32": "fused attention takes fp16 and bf16"},
            needs_device="TensorRT must build an engine on the GPU that runs it",
            index="NVIDIA's index",
            ranks=True,
            ranks_sm=80,  # NVIDIA, TensorRT 11.1 documentation, "Multi-Device Inference"
        ),
    ),
)

TENSORRT_RTX = replace(
    TENSORRT,
    name="tensorrt-rtx",
    title="TensorRT-RTX",
    module="tensorrt_rtx",
    providers=(
        replace(
            TENSORRT.providers[0],
            name="tensorrt-rtx",
            package="tensorrt-rtx",
            requirements=("onnxruntime", "tensorrt-rtx=={version}", _CUDA_BINDINGS),
            capabilities=("75", "80", "86", "89", "120"),
            uncovered="TensorRT-RTX 1.7 has no target SM {sm}",
            needs_device=None,
            index="",
            verified=True,
        ),
    ),
)

_AS_STORED = ("fuse-norms", "flash-attention")  # they change how a graph runs, and no parameter
_ALL_COMPUTE: Mapping[Dtype, Use] = {"fp32": Use(_ANY), "fp16": Use(_ANY), "bf16": Use(_ANY)}

COMPRESSED_TENSORS = BackendRecord(
    name="compressed-tensors",
    title="compressed-tensors checkpoint",
    module="compressed_tensors",
    compiled=False,
    scales="blocks",
    alone="the servers that load the checkpoint divide it themselves",
    elsewhere=Elsewhere(
        servers="vLLM or SGLang",  # TensorRT-LLM loads one of the formats (docs/other-runtimes.md)
        serve="vllm serve {engine}",
        runtime="transformers",
        passes=(*_AS_STORED, "quantize-weights", "quantize-channels"),
    ),
    providers=(
        Provider(
            name="compressed-tensors",
            kind=None,
            package="compressed-tensors",
            requirements=(),
            builder="llmforge.backends.compressed_tensors.builder",
            session="llmforge.backends.export_format",
            dtypes={**_ALL_COMPUTE, "int8": Use(("weights",)), "int4": Use(("weights",)), "fp8": Use(("weights",))},
        ),
    ),
)

GGUF = BackendRecord(
    name="gguf",
    title="GGUF file",
    module="gguf",
    compiled=False,
    scales="blocks",
    alone="llama.cpp divides the file itself",
    elsewhere=Elsewhere(
        servers="llama.cpp",
        serve="llama-server -m {engine}/model.gguf",
        runtime="llama-cpp",
        passes=(*_AS_STORED, "quantize-weights"),
    ),
    providers=(
        Provider(
            name="gguf",
            kind=None,
            package="gguf",
            requirements=(),
            builder="llmforge.backends.gguf.builder",
            session="llmforge.backends.export_format",
            dtypes={**_ALL_COMPUTE, "int8": Use(("weights", "kv")), "int4": Use(("weights", "kv"))},
            never={"fp8": "GGUF has no fp8 weights", "fp4": "the formats that hold our codes have no fp4"},
        ),
    ),
)

BUILT_IN: Mapping[str, BackendRecord] = {
    each.name: each for each in (ONNXRUNTIME, TENSORRT, TENSORRT_RTX, COMPRESSED_TENSORS, GGUF)
}
BUILT_IN_PROVIDERS: Mapping[str, Provider] = {
    each.name: each for backend in BUILT_IN.values() for each in backend.providers
}


def _check(plugin: Plugin, given: Any) -> BackendRecord:
    """Return the record that a plug-in gives, if it is one."""
    if not isinstance(given, BackendRecord):
        raise ValueError(f"it is a {type(given).__name__}, not an instance of llmforge.backends.BackendRecord")
    if given.name != plugin.name:
        raise ValueError(f"its record calls itself {given.name!r}")
    if not given.providers:
        raise ValueError("it has no providers")
    for provider in given.providers:
        if provider.name != given.name and not provider.name.startswith(f"{given.name}-"):
            raise ValueError(f"its provider {provider.name!r} must be called {given.name!r}, or {given.name}-SOMETHING")
        if provider.name in BUILT_IN_PROVIDERS:
            raise ValueError(f"llmforge has a provider {provider.name!r} itself")
        if provider.kind not in ("cpu", "gpu", None):
            raise ValueError(f"its provider {provider.name!r} is of kind {provider.kind!r}; expected cpu, gpu or None")
    return given


SEAM = Seam("backends", _check)

K = TypeVar("K")


class _Known(dict[str, K]):
    """Records by name: one of a plug-in is found as well, and not listed."""

    def __init__(self, records: Mapping[str, K], of_plugin: Callable[[str], K | None]) -> None:
        super().__init__(records)
        self._of_plugin = of_plugin

    def __missing__(self, name: str) -> K:
        if (found := self._of_plugin(name)) is None:
            raise KeyError(name)
        return found


def _provider(name: str) -> Provider | None:
    """Find a provider of a plug-in's backend by the beginning of its name."""
    for each in sorted(SEAM.names(), key=len, reverse=True):
        if name == each or name.startswith(f"{each}-"):
            backend = SEAM.find(each, BUILT_IN)
            assert backend is not None
            return next((provider for provider in backend.providers if provider.name == name), None)
    return None


# Those of this file, in its order; `[name]` finds those of plug-ins, too, and raises PluginError where one is broken.
BACKENDS: Mapping[str, BackendRecord] = _Known(BUILT_IN, lambda name: SEAM.find(name, BUILT_IN))
PROVIDERS: Mapping[str, Provider] = _Known(BUILT_IN_PROVIDERS, _provider)


@dataclass(frozen=True)
class _Named:
    """Annotates a string that names a record, for pydantic and strict_json."""

    records: Mapping[str, Any]
    of_plugins: Callable[[], Sequence[str]]  # names, for a schema

    def allows(self, name: str) -> bool:
        """Say whether there is such a record."""
        if name in self.records:
            return True
        try:
            self.records[name]
        except KeyError:
            return False
        return True

    def choices(self) -> list[str]:
        """List the names that are allowed."""
        return [*self.records, *self.of_plugins()]

    def _checked(self, name: str) -> str:
        from pydantic_core import PydanticKnownError

        if not self.allows(name):
            known = [f"'{each}'" for each in self.choices()]
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(known[:-1])} or {known[-1]}"})
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._checked, core_schema.str_schema(strict=True))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": self.choices(), "type": "string"}


BackendName = Annotated[str, _Named(BACKENDS, SEAM.names)]
ProviderName = Annotated[str, _Named(PROVIDERS, tuple)]
# As strict_json reads it off annotations; type checkers know no type that is made of values.
if TYPE_CHECKING:
    PlanModule = str
else:
    PlanModule = Literal[tuple(backend.module for backend in BUILT_IN.values() if backend.compiled)]


def plugin_of(name: str) -> Plugin | None:
    """Find the plug-in that brings the backend `name`; None: it is one of this file.

    Raises:
        PluginError: several bring it, or it is written for another interface.
    """
    return SEAM.plugin(name, BUILT_IN)


def elsewhere(name: BackendName) -> Elsewhere | None:
    """Say whose servers load what a backend writes; None: llmforge's own runtime runs it."""
    return BACKENDS[name].elsewhere


def of_provider(name: ProviderName) -> BackendRecord:
    """Find the backend that a provider is of."""
    provider = PROVIDERS[name]
    for backend in BACKENDS.values():
        if provider in backend.providers:
            return backend
    owners = (each for each in SEAM.names() if name == each or name.startswith(f"{each}-"))
    return next(backend for backend in map(BACKENDS.__getitem__, owners) if provider in backend.providers)


def of_module(module: PlanModule) -> BackendRecord:
    """Find the backend whose Python module this is."""
    return next(backend for backend in BACKENDS.values() if backend.module == module)
