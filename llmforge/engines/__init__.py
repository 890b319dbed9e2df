"""Engine builders: what a backend loads, written from a lowered graph.

`for_target` chooses the one for a backend and a target; each has the functions of `Builder`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from llmforge.base.backends import BACKENDS, BackendName
from llmforge.base.errors import EnvironmentLacks, UnsupportedError
from llmforge.base.progress import Progress, Silent
from llmforge.ir import graph
from llmforge.runtime.backends.device import CudaDevice

if TYPE_CHECKING:
    import onnx_ir as ir

    from llmforge.engines.parameters import Exported
    from llmforge.lowering.pass_base import Changes
    from llmforge.recipe import EngineSpec
    from llmforge.runtime.backends.config import RuntimeConfig
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
    exported: Exported | None = None  # where the backend writes a file of parameters (`Backend.elsewhere`)
    run_in_parts: RunInParts | None = None  # what proves an engine of more than `WHOLE_BYTES`; None: it is loaded
    prove: Prove = at_once


@dataclass(frozen=True)
class Engine:
    """What was built, for the report."""

    folder: Path
    config: RuntimeConfig
    nodes: int
    size_bytes: int  # all files together
    facts: Mapping[str, str] = field(default_factory=dict)  # what else is known of it, in words
    graph: ir.Model | None = None  # what was written, where the folder holds no graph
    notes: tuple[str, ...] = ()  # what a reader should know of this build

    @classmethod
    def built(
        cls,
        request: BuildRequest,
        config: RuntimeConfig,
        facts: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
        *,
        graph_: ir.Model | None = None,
    ) -> Engine:
        """Describe what lies in the folder of `request`, once it is all there; `graph_`: where no graph does."""
        size_bytes = sum(file.stat().st_size for file in request.folder.iterdir())
        return cls(request.folder, config, graph.nodes(request.model), size_bytes, facts or {}, graph_, tuple(notes))


class Builder(Protocol):
    """What a module that builds engines offers."""

    def require_host(self, target: Target, spec: EngineSpec, /) -> None:
        """Return if this machine builds the engine; EnvironmentLacks says what it has not."""

    def lower(self, model: ir.Model, target: Target, spec: EngineSpec, /) -> tuple[ir.Model, Changes]:
        """Rewrite what the passes left into what the engine runs; the given model is left alone.

        No weight is read. Raises UnsupportedError where the engine or the target cannot run it.
        """

    def build(self, request: BuildRequest, /) -> Engine:
        """Write the engine, and prove it as far as this machine can."""


class Exporter(Builder, Protocol):
    """What a module that writes for servers of others offers besides."""

    def check(self, exported: Exported, spec: EngineSpec, /) -> None:
        """Return if the format holds every parameter exactly, and the servers load it; reads no weight.

        Raises UnsupportedError where it does not.
        """


def for_target(backend: BackendName, target: Target) -> Builder:
    """Import what builds engines of `backend` for `target`; whether this machine can is not asked.

    Raises:
        UnsupportedError: the target cannot load such an engine.
    """
    return cast(Builder, importlib.import_module(target.require_engine(backend).builder))


def exporter(backend: BackendName, target: Target) -> Exporter:
    """Import what writes files of `backend`, which servers of others load."""
    return cast(Exporter, for_target(backend, target))


def refuse_ranks(backend: BackendName, degree: int) -> None:
    """Return if an engine of `backend` can be one of `degree` that share a model: with 1 alone, in this version.

    Raises:
        UnsupportedError: it cannot; the message says what the backend lacks.
    """
    if degree > 1:
        raise UnsupportedError(
            f"engine.tensor_parallel is {degree}; {backend} does not support it: {BACKENDS[backend].alone}",
            hint="set `tensor_parallel: 1`; `llmforge.parallel.split.split` writes the graph of each rank",
        )


def refuse_paged(spec: EngineSpec, target: Target) -> None:
    """Return if the engine of `spec` on `target` keeps its KV cache as `spec` wants it.

    Raises:
        UnsupportedError: only ONNX Runtime's CUDA provider has attention over blocks.
    """
    provider = target.require_engine(spec.backend)
    if spec.kv_cache == "paged" and provider.name != "cuda":
        raise UnsupportedError(
            f"engine.kv_cache is paged; {spec.backend} on {target.name} does not support it: only ONNX Runtime's CUDA "
            "provider has attention over blocks of a pool",
            hint="set `engine: {kv_cache: slots}`, or choose a GPU and `backend: onnxruntime`",
        )


def require_device(target: Target, spec: EngineSpec) -> None:
    """Return if the GPU of `target` is at hand, or the backend of `spec` builds without.

    Raises:
        EnvironmentLacks: it is not; the hint of an engine that was deferred says where it is finished.
    """
    provider = target.require_engine(spec.backend)
    if provider.needs_device is None or (reason := why_not_run(target)) is None:
        return
    finish = "`llmforge build --finish ARTIFACT`"
    raise EnvironmentLacks(
        f"{provider.needs_device}: {reason}",
        hint=f"on a host with an {target.title}, run {provider.install}, then {finish}"
        if spec.deferred
        else f"build with --defer, then run {finish} on a host with that GPU",
    )


def why_not_run(target: Target) -> str | None:
    """Say why this machine cannot run what is built for `target`; None where it can."""
    try:
        if target.kind == "cpu":
            target.require_here()
            return None
        found = CudaDevice()
    except EnvironmentLacks as error:
        return error.message
    if str(found.sm) != target.sm:
        return f"the CUDA device {found.name} is SM{found.sm}, but target {target.name} is SM{target.sm}"
    return None
