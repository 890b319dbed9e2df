"""Engine builders: what a backend loads, written from a lowered graph.

`for_target` chooses the one for a backend and a target; each has the functions of `EngineBuilder`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from llmforge.backends import BACKENDS, BackendName, loading, plugin_of
from llmforge.backends.record import dotted
from llmforge.base.errors import EnvironmentLacks, InputError, UnsupportedError
from llmforge.base.plugins import Plugin, blamed, refusal
from llmforge.base.progress import Progress, Silent
from llmforge.ir import graph
from llmforge.runtime.config import FILE, PluginFacts, RuntimeConfig
from llmforge.runtime.device.cuda import CudaDevice

if TYPE_CHECKING:
    import onnx_ir as ir

    from llmforge.backends.exported_parameters import Exported
    from llmforge.checkpoint import Encoding
    from llmforge.recipe import EngineSpec
    from llmforge.rewrite.pass_base import Changes
    from llmforge.targets import Target

# Of weights: up to here a build loads an engine as a server does. ONNX Runtime then holds them twice.
WHOLE_BYTES = 1 << 30
RunInParts = Callable[[Path, int, int], None]  # of a `model.onnx`, for a context of so many tokens, on so many threads
# Runs what proves an engine whose files are written; that depends on them and on these facts, by name.
Prove = Callable[[Callable[[], None], Mapping[str, str]], None]


def at_once(prove: Callable[[], None], facts: Mapping[str, str]) -> None:
    """Prove an engine now, whatever was proven before."""
    prove()


@dataclass(frozen=True)
class BuildRequest:
    """What an engine is built of, and where."""

    model: ir.Model  # lowered
    folder: Path  # created
    spec: EngineSpec
    target: Target
    eos_token_ids: Sequence[int]
    bos_token_id: int | None
    progress: Progress = field(default_factory=Silent)
    exported: Exported | None = None  # where the backend writes a file of parameters (`Backend.export_format`)
    run_in_parts: RunInParts | None = None  # what proves an engine of more than `WHOLE_BYTES`; None: it is loaded
    prove: Prove = at_once
    encoding: Encoding | None = None  # what an engine gives that embeds or scores; None: it predicts tokens
    ranks: Sequence[ir.Model] = ()  # the lowered graph of each, where several share the model; `model` is the first


@dataclass(frozen=True)
class BuiltEngine:
    """What was built, for the report."""

    folder: Path
    config: RuntimeConfig
    nodes: int
    size_bytes: int  # all files together
    facts: Mapping[str, str] = field(default_factory=dict)  # what else is known of it, for a reader
    graph: ir.Model | None = None  # what was written, where the folder holds no graph
    notes: tuple[str, ...] = ()  # what a reader should know of this build
    written: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of what was written, by name

    @classmethod
    def built(
        cls,
        request: BuildRequest,
        config: RuntimeConfig,
        facts: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
        *,
        graph_: ir.Model | None = None,
        written: Mapping[str, str] | None = None,
    ) -> BuiltEngine:
        """Describe what lies in the folder of `request`, once it is all there; `graph_`: where no graph does."""
        size_bytes = sum(file.stat().st_size for file in request.folder.iterdir())
        nodes, known = graph.nodes(request.model), written or {}
        return cls(request.folder, config, nodes, size_bytes, facts or {}, graph_, tuple(notes), known)


class EngineBuilder(Protocol):
    """What a module that builds engines offers."""

    def require_host(self, target: Target, spec: EngineSpec, /) -> None:
        """Return if this machine builds the engine; EnvironmentLacks says what it has not."""

    def lower(self, model: ir.Model, target: Target, spec: EngineSpec, /) -> tuple[ir.Model, Changes]:
        """Rewrite what the passes left into what the engine runs; the given model is left alone.

        No weight is read. Raises UnsupportedError where the engine or the target cannot run it.
        """

    def build(self, request: BuildRequest, /) -> BuiltEngine:
        """Write the engine, and prove it as far as this machine can."""


class Exporter(EngineBuilder, Protocol):
    """What a module that writes for servers of others offers besides."""

    def check(self, exported: Exported, spec: EngineSpec, /) -> None:
        """Return if the format holds every parameter exactly, and the servers load it; reads no weight.

        Raises UnsupportedError where it does not.
        """


def for_target(backend: BackendName, target: Target) -> EngineBuilder:
    """Import what builds engines of `backend` for `target`; whether this machine can is not asked.

    Raises:
        UnsupportedError: the target cannot load such an engine.
        PluginError: it is of a plug-in, which fails.
    """
    provider, plugin = target.require_engine(backend), plugin_of(backend)
    if plugin is None:
        return cast(EngineBuilder, importlib.import_module(provider.builder))
    with blamed(plugin):
        module = importlib.import_module(provider.builder)
    if missing := [name for name in ("require_host", "lower", "build") if not callable(getattr(module, name, None))]:
        raise refusal(plugin, f"its builder {provider.builder} has no {', '.join(missing)}")
    return cast(EngineBuilder, module)


def outside(backend: BackendName, target: Target) -> tuple[str, ...]:
    """Name the modules of a plug-in that build and load engines of `backend` for `target`; none: llmforge does."""
    if plugin_of(backend) is None:
        return ()
    provider = target.require_engine(backend)
    return provider.builder, provider.session


def check_foreign(engine: BuiltEngine, plugin: Plugin, target: Target) -> None:
    """Return if what a plug-in built says so, where a host that serves it looks.

    Raises:
        PluginError: it does not.
    """
    if not isinstance(engine, BuiltEngine):
        raise refusal(plugin, f"its builder returned a {type(engine).__name__}, not an Engine")
    provider = target.require_engine(plugin.name).name
    facts = PluginFacts(plugin.package.name, plugin.package.version)
    try:
        written = RuntimeConfig.read(engine.folder / FILE)
    except InputError as error:
        raise refusal(plugin, f"its builder wrote no whole {FILE}: {error.message}") from error
    if written != engine.config or (written.provider, written.plugin) != (provider, facts):
        raise refusal(
            plugin,
            f"its builder wrote a {FILE} with other facts than provider {provider} and plugin {plugin.package}",
            "its authors make it with `llmforge.backends.signatures.config`",
        )


def exporter(backend: BackendName, target: Target) -> Exporter:
    """Import what writes files of `backend`, which servers of others load."""
    return cast(Exporter, for_target(backend, target))


def refuse_ranks(backend: BackendName, degree: int, target: Target) -> None:
    """Return if `degree` engines of `backend` can share a model on `target`.

    Raises:
        UnsupportedError: they cannot; the message says what the backend lacks.
    """
    provider = target.require_engine(backend)
    if degree == 1:
        return
    if not provider.ranks:
        raise UnsupportedError(
            f"engine.tensor_parallel is {degree}; {backend} does not support it on {target.name}: "
            f"{BACKENDS[backend].alone}",
            hint="set `tensor_parallel: 1`; `llmforge.parallel.split.split` writes the graph of each rank",
        )
    if target.kind == "gpu" and int(target.require_gpu().sm) < provider.ranks_sm:
        raise UnsupportedError(
            f"engine.tensor_parallel is {degree}; {backend} has collectives from compute capability "
            f"{dotted(str(provider.ranks_sm))} on, and {target.name} has {dotted(target.require_gpu().sm)}",
            hint="set `tensor_parallel: 1`, or choose `backend: onnxruntime`",
        )


def refuse_paged(spec: EngineSpec, target: Target) -> None:
    """Return if the engine of `spec` on `target` keeps its KV cache as `spec` wants it.

    Raises:
        UnsupportedError: only ONNX Runtime's CUDA provider has attention over blocks, and no ranks share a model there.
    """
    provider = target.require_engine(spec.backend)
    if spec.kv_cache != "paged" or (provider.paged is not None and spec.tensor_parallel == 1):
        return
    reason = provider.slots_reason(target.sm, spec.tensor_parallel)
    raise UnsupportedError(
        f"engine.kv_cache is paged; {spec.backend} on {target.name} does not support it: {reason}",
        hint="set `engine: {kv_cache: slots}`, or choose one GPU and `backend: onnxruntime`",
    )


def devices(target: Target, spec: EngineSpec) -> int:
    """Count the devices that an engine takes: ranks on a CPU share one."""
    return spec.tensor_parallel if target.kind == "gpu" else 1


def require_device(target: Target, spec: EngineSpec) -> None:
    """Return if the GPU of `target` is here, or the backend of `spec` builds without.

    Raises:
        EnvironmentLacks: it is not; the hint of an engine that was deferred says where it is finished.
    """
    provider = target.require_engine(spec.backend)
    if provider.needs_device is None or (reason := why_not_run(target, devices(target, spec))) is None:
        return
    finish = "`llmforge build --finish ARTIFACT`"
    raise EnvironmentLacks(
        f"{provider.needs_device}: {reason}",
        hint=f"on a host with an {target.title}, run {provider.install}, then {finish}"
        if spec.deferred
        else f"build with --defer, then run {finish} on a host with that GPU",
    )


def why_not_run(target: Target, ranks: int = 1) -> str | None:
    """Say why this machine cannot run what is built for `target`, on a GPU for each of `ranks`; None where it can."""
    try:
        if target.kind == "cpu":
            target.require_here()
            return None
        if ranks > 1:
            loading.require_devices(ranks)
        found = CudaDevice()
    except EnvironmentLacks as error:
        return error.message
    if str(found.sm) != target.sm:
        return f"the CUDA device {found.name} is SM{found.sm}, but target {target.name} is SM{target.sm}"
    return None
