"""Types of what a backend says of itself: data alone, for a serving environment reads it, which has no build tools.

A *backend* is what `engine: {backend: …}` of a recipe names. A *provider* is what of it runs on one kind of target, and
the name of that in `engine/runtime.json` and of the extra of this package that brings it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["cpu", "gpu"]  # of a target
Dtype = Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4", "fp4"]
StoredDtype = Dtype | Literal["int6", "int5", "int3"]  # of weights alone
Role = Literal["compute", "weights", "kv"]
ANY: tuple[Role, ...] = ("compute", "weights", "kv")
NO_BLOCKS = "only ONNX Runtime's CUDA provider has attention over blocks"
CUDA_BINDINGS = "cuda-bindings>=13,<14"  # of the CUDA that engines on GPUs run with
# Compute capability from which on devices have arithmetic in a dtype: Ampere, Ada, Blackwell.
ARITHMETIC: Mapping[StoredDtype, int] = {"bf16": 80, "fp8": 89, "fp4": 100}


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

    compute: frozenset[StoredDtype]
    weights: frozenset[StoredDtype]
    kv: frozenset[StoredDtype]
    why: Mapping[StoredDtype, str]
    verified: bool  # read off the package, or seen when an engine was built or refused

    def refusal(self, dtype: StoredDtype, role: Role) -> str | None:
        """Say why `dtype` cannot be used in `role`; None where it can."""
        allowed: frozenset[StoredDtype] = getattr(self, role)
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
class PagedBlocks:
    """What reads a KV cache in blocks of a pool where they lie."""

    session: str  # module whose `open_engine` loads an engine over blocks
    least_sm: int  # compute capability from which on its kernel runs
    most_channels: int  # of a head
    tokens: tuple[tuple[int, int], ...]  # channels of a head up to which a block has at least so many tokens
    least_int8_tokens: int  # of a block of int8
    int8_slots: str  # why int8 caches have slots unless a recipe asks for blocks

    def block_tokens(self, head_dim: int, *, int8: bool = False) -> int:
        """Give the fewest tokens of a block that attention over heads of `head_dim` channels reads in place."""
        tokens = next(tokens for channels, tokens in self.tokens if head_dim <= channels)
        return max(tokens, self.least_int8_tokens) if int8 else tokens


@dataclass(frozen=True)
class SlowerProducts:
    """Products of quantized weights whose kernels lack the matrix instructions of a device."""

    share: float  # of the device's rate that their instructions have
    reason: str


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
    dtypes: Mapping[StoredDtype, Use]
    never: Mapping[StoredDtype, str] = field(default_factory=dict)  # why dtypes are refused on every device
    capabilities: tuple[str, ...] | None = None  # that it has code for; None: those of the GPU that is here
    uncovered: str = ""  # why it runs on no other; `{sm}` is the capability
    needs_device: str | None = None  # why an engine is built on the GPU that runs it; None: it is built anywhere
    index: str = ""  # where pip gets `package`, if not from PyPI
    verified: bool = False  # `dtypes` were read off the package, or seen when an engine was built or refused
    ranks: bool = False  # several of its engines compute one model together (docs/tensor-parallelism.md)
    ranks_sm: int = 0  # compute capability from which on they can, of GPUs
    paged: PagedBlocks | None = None  # None: its KV caches lie in slots alone
    slower_products: Mapping[str, SlowerProducts] = field(default_factory=dict)  # by compute capability, "90"

    @property
    def install(self) -> str:
        """How to get what builds and runs its engines."""
        return f"pip install 'llmforge[{self.name}]'"

    def slots_reason(self, sm: str | None, ranks: int) -> str | None:
        """Say why a KV cache lies in slots and not in blocks, on capability `sm`, "89", if no recipe says where.

        None: it lies in blocks, if the graph can read them.
        """
        if self.paged is None:
            return NO_BLOCKS
        if int(sm or 0) < self.paged.least_sm:
            return f"FlashAttention, which reads blocks in place, needs SM {dotted(str(self.paged.least_sm))}"
        return "ranks of one model have slots alone" if ranks > 1 else None

    def support(self, sm: str | None) -> Support:
        """Return what it takes on capability `sm`, "89"; None: a CPU."""
        number, why = int(sm or 0), dict(self.never)
        taken: dict[Role, set[StoredDtype]] = {role: set() for role in ANY}
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
        compute, weights, kv = (frozenset(taken[role]) for role in ANY)
        return Support(compute, weights, kv, why, self.verified)


@dataclass(frozen=True)
class ExportFormat:
    """Whose servers load what a backend writes: a file format of theirs, that holds the parameters of a checkpoint.

    A format has the architecture by its name: passes change no more of the model than how parameters are stored.
    """

    servers: str  # "vLLM or SGLang"
    serve: str  # the command of one of them; `{engine}` is the folder
    emulated_by: Literal["transformers"] | None  # what else runs it on a CPU, to tell how it computes
    served_by: Literal["vllm", "llama-cpp"]  # that of the servers which runs it on a CPU
    codes: frozenset[str]  # that it holds, by what shares a scale (`llmforge.rewrite.traits.Codes`)
    block: int  # weights that share a scale, best
    tables: bool  # it holds codes of embedding and head, too
    bf16_scales: bool = False  # of blocks, where the model is bf16; else they are fp16
    fp8_caches: bool = False  # it says by which scales keys and values are cached in fp8
    superblocks: bool = False  # it holds scales that are codes under a superscale, as `codes: gguf` has them
    loaded: str | None = None  # the module that says which servers load what passes write (`planned`)

    @property
    def runtimes(self) -> tuple[Literal["transformers", "vllm", "llama-cpp"], ...]:
        """What runs it on a CPU, a server first (llmforge.metrics.agreement)."""
        return (self.served_by,) if self.emulated_by is None else (self.served_by, self.emulated_by)


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
    sparse: bool = False  # it multiplies matrices of 2:4 sparsity faster than dense ones
    head_dims: range | None = None  # channels of a head that attention has kernels for, keys as values; None: any
    export_format: ExportFormat | None = None  # None: llmforge's own runtime runs its engines

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
