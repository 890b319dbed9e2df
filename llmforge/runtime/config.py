"""`engine/runtime.json`: what a runtime must know about an engine, written by the builder and read strictly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import onnxruntime

from llmforge import backends, native
from llmforge.backends import PROVIDERS, PlanModule, ProviderName
from llmforge.base import cores, plugins, small_file, strict_json
from llmforge.base.errors import EnvironmentLacks, InputError, VersionMismatch
from llmforge.base.plugins import Package
from llmforge.base.wording import cut, quoted, shown
from llmforge.runtime.artifact_files import PENDING_FILE
from llmforge.runtime.encoder import EncoderConfig
from llmforge.runtime.signature import CacheInput

physical_cores = cores.physical_cores

FORMAT = 3
FILE = "runtime.json"
DAMAGED = "run `llmforge verify ARTIFACT` to list changed files; fetch or build the artifact again"
MODEL_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"  # the larger initializers of the model; of ranks, those that all of them have
# What a recipe may ask for at most (llmforge.recipe.engine).
MOST_TOKENS = 2**24
MOST_ROWS = 4096
MOST_THREADS = 1024
MOST_RANKS = 64  # llmforge/native/collectives.inc
# With the token before them 8, the most for which our own attention adds as it does for one (FEW_QUERIES,
# native/impl.inc); more pay only where nearly all are right, and each costs about a row of a prefill.
MOST_DRAFT_TOKENS = 7
DRAFT_FOLDER = "draft"  # in that of the engine: the engine of the model that drafts
PLAN_FILE = "model.plan"  # what TensorRT deserializes


# What most engines have nothing of, and their files no entry.
_RARE = {"adapters": (), "plugin": None, "ranks": 1, "kv_blocks": None, "encoder": None, "speculation": None}


def rank_file(rank: int) -> str:
    """Name the graph of a rank, of an engine that has several; the initializers that it alone has are in `….data`."""
    return f"model.rank{rank}.onnx"


def rank_plan(rank: int) -> str:
    """Name the plan of a rank, of an engine that has several."""
    return f"model.rank{rank}.plan"


def plan_record(plan: str) -> str:
    """Name the file that says what a plan was built from."""
    return "plan.json" if plan == PLAN_FILE else f"{plan}.json"


@dataclass(frozen=True)
class SessionConfig:
    """How ONNX Runtime runs a graph. `threads` counts those of one operator; 0 leaves the number to ONNX Runtime."""

    threads: int
    optimize: bool = True  # False: the graph runs as it is written, with no fusion by ONNX Runtime
    entries: Mapping[str, str] = field(default_factory=dict)  # `session.*` and `mlas.*` configuration entries
    profile: str | None = None  # beginning of the path of a trace of every operator; see `Session.end_profile`


@dataclass(frozen=True)
class SessionOptions:
    """Options of ONNX Runtime that the builder chose. `threads` null: the physical cores of the serving machine."""

    threads: int | None
    optimize: bool
    entries: Mapping[str, str]

    def resolve(self, threads: int | None = None) -> SessionConfig:
        """Make the options of a session on this machine; `threads` overrides what was chosen."""
        return SessionConfig(threads or self.threads or physical_cores(), self.optimize, self.entries)


@dataclass(frozen=True)
class DeviceFacts:
    """The GPU that an engine wants."""

    sm: int  # compute capability, ten times major plus minor: 89
    memory_bytes: int  # weights, cache, activations and captured CUDA graphs together


@dataclass(frozen=True)
class Capture:
    """One decode step that is captured as a CUDA graph, and replayed for every step that fits into it.

    `batch` rows, of which none holds more than `length` tokens after the step: kernels are chosen by the longest row,
    which a captured step cannot tell.
    """

    id: int  # ONNX Runtime's run option `gpu_graph_id`, 1 or more
    batch: int
    length: int


@dataclass(frozen=True)
class GraphPlan:
    """Which decode steps are captured, in the order in which they are warmed up.

    `mode`: require: an engine whose steps are not all captured does not load; allow: what cannot be captured runs
    eagerly, and is noted; off: nothing is captured.
    """

    mode: Literal["require", "allow", "off"]
    captures: tuple[Capture, ...]


@dataclass(frozen=True)
class ProfileFacts:
    """One optimization profile of a plan, in the order of the plan's: steps of at most these rows and tokens a row."""

    name: Literal["prefill", "decode", "prompts"]
    max_batch: int
    max_sequence: int


@dataclass(frozen=True)
class PlanFacts:
    """A plan of TensorRT, or of TensorRT-RTX: it is loaded by the very version that built it."""

    module: PlanModule
    version: str
    file: str
    profiles: tuple[ProfileFacts, ...]


@dataclass(frozen=True)
class PluginFacts:
    """The package from outside that brings the backend of an engine (llmforge.base.plugins)."""

    package: str
    version: str


@dataclass(frozen=True)
class SpeculationFacts:
    """How the engine drafts tokens, where whoever loads it does not say otherwise.

    `draft`: by the engine in the folder `draft` beside this file; `eagle3`: by the head in that folder, which reads
    what this engine computed.
    """

    method: Literal["prompt-lookup", "draft", "eagle3"]
    max_tokens: int  # of a draft, 1 to `MOST_DRAFT_TOKENS`


@dataclass(frozen=True)
class RuntimeConfig:
    """Content of `runtime.json`.

    `max_context` bounds prompt and answer together, in tokens; `max_batch` bounds the sequences that run at once.
    A plan of TensorRT has `plan` in place of `onnxruntime`; what runs on a GPU has `device`. `buckets` are the numbers
    of rows that decode steps are padded to, ascending; none: steps run the rows that they need. With several `ranks`,
    `caches` are those of one of them; all have as many heads.
    """

    format: int
    onnxruntime: str | None  # the version that the engine was built and proved with
    kernels: int | None  # the version of the CPU kernels (llmforge.native) that the engine needs; null: none
    max_context: int
    max_batch: int
    vocabulary: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    caches: tuple[CacheInput, ...]
    session: SessionOptions  # a plan has no use for them
    provider: ProviderName = "cpu"
    provider_options: Mapping[str, str] = field(default_factory=dict)  # of CUDA's; trt_…: of TensorRT's before it
    buckets: tuple[int, ...] = ()
    device: DeviceFacts | None = None  # null: a CPU
    graphs: GraphPlan | None = None
    plan: PlanFacts | None = None
    adapters: tuple[str, ...] = ()  # that requests choose from; the first is number 1 of the input `adapter_ids`
    plugin: PluginFacts | None = None  # that brings `provider`; null: llmforge itself
    ranks: int = 1  # processes that compute each layer together, each with a graph of its own (tensor parallelism)
    encoder: EncoderConfig | None = None  # what an engine gives that embeds or scores; null: it predicts tokens
    kv_blocks: int | None = None  # of a pool, at most; null: the cache has a slot of `max_context` for each sequence
    speculation: SpeculationFacts | None = None  # null: no tokens are drafted

    def to_json(self) -> str:
        """Write the file's text: sorted keys, one trailing newline; of what is rare, what there is."""
        plain = dataclasses.asdict(self)
        plain = {name: value for name, value in plain.items() if name not in _RARE or value != _RARE[name]}
        if self.encoder is not None and self.encoder.template is None:
            del plain["encoder"]["template"]
        return json.dumps(plain, indent=2, sort_keys=True) + "\n"

    @classmethod
    def read(cls, path: Path) -> RuntimeConfig:
        """Read `path`.

        Raises:
            InputError: the file is missing, is no JSON, or has unknown, missing or wrong entries.
            EnvironmentLacks: the engine is pending: it is built on another machine.
        """
        if not path.exists():
            if (path.parent / PENDING_FILE).is_file():
                raise EnvironmentLacks(
                    f"{path.parent.parent}: the engine of this artifact is not built yet",
                    hint=f"run `llmforge build --finish {path.parent.parent}` on a host with its GPU",
                )
            raise InputError(f"{path} is missing: {path.parent.parent} is not an artifact")
        data = small_file.read_json(path, hint=DAMAGED)
        if isinstance(data, dict) and data.get("format") != FORMAT:
            raise InputError(
                f"{path}: format {quoted(data.get('format'))}; this llmforge reads format {FORMAT}",
                hint="build the artifact again, or run it with the llmforge that built it",
            )
        if isinstance(data, dict):
            data = {**_RARE, "adapters": [], **data}
            if isinstance(data["encoder"], dict):
                data["encoder"] = {"template": None, **data["encoder"]}
            _require_plugin(data, str(path))
        config = strict_json.read(cls, data, str(path))
        config._check_parts(str(path))
        return config

    def _check_parts(self, where: str) -> None:
        """Refuse parts that `provider` does not have, and missing ones that it has."""
        backend, kind = backends.of_provider(self.provider), PROVIDERS[self.provider].kind
        ours = backend.export_format is None
        parts = {"onnxruntime": ours and not backend.compiled, "plan": backend.compiled, "device": kind == "gpu"}
        if self.provider not in backends.BUILT_IN_PROVIDERS:  # its session module knows whether it runs ONNX Runtime
            if self.plugin is None:
                raise InputError(f"{where}: plugin is missing where provider is {self.provider}")
            parts |= {"onnxruntime": self.onnxruntime is not None, "plan": False}
        for name, wanted in parts.items():
            if (getattr(self, name) is not None) != wanted:
                state = "is missing" if wanted else "makes no sense"
                raise InputError(f"{where}: {name} {state} where provider is {self.provider}")
        if self.kv_blocks is not None and PROVIDERS[self.provider].paged is None:
            raise InputError(f"{where}: kv_blocks makes no sense where provider is {self.provider}")
        if list(self.buckets) != sorted(set(self.buckets)) or min(self.buckets, default=1) < 1:
            raise InputError(f"{where}: buckets is {list(self.buckets)}; expected numbers of rows, ascending")
        for name, (value, most) in self._sizes().items():
            if value is not None and not 1 <= value <= most:
                raise InputError(f"{where}: {name} is {shown(value)}; expected 1 to {most}")
        if self.plan is not None and (Path(self.plan.file).name != self.plan.file or "\0" in self.plan.file):
            raise InputError(f"{where}: plan.file is {shown(self.plan.file)}; expected the name of a file beside it")
        if self.ranks > 1 and not PROVIDERS[self.provider].ranks:
            raise InputError(f"{where}: ranks is {self.ranks}, and engines of provider {self.provider} run alone")
        captures = () if self.graphs is None else self.graphs.captures
        if len({capture.id for capture in captures}) < len(captures) or min((c.id for c in captures), default=1) < 1:
            raise InputError(f"{where}: graphs: expected captures with unique ids, 1 or more")

    def _sizes(self) -> dict[str, tuple[int | None, int]]:
        """Name the numbers that memory and threads are taken by, and the most that each may be."""
        captures = () if self.graphs is None else self.graphs.captures
        profiles = () if self.plan is None else self.plan.profiles
        return {
            "max_context": (self.max_context, MOST_TOKENS),
            "max_batch": (self.max_batch, MOST_ROWS),
            "vocabulary": (self.vocabulary, MOST_TOKENS),
            "session.threads": (self.session.threads, MOST_THREADS),
            "buckets": (max(self.buckets, default=None), MOST_ROWS),
            "graphs.captures": (max((len(captures), *(c.batch for c in captures))) or None, MOST_ROWS),
            "graphs.captures.length": (max((c.length for c in captures), default=None), MOST_TOKENS),
            "plan.profiles": (max((p.max_batch for p in profiles), default=None), MOST_ROWS),
            "plan.profiles.max_sequence": (max((p.max_sequence for p in profiles), default=None), MOST_TOKENS),
            "caches": (len(self.caches) or None, MOST_ROWS),
            "adapters": (len(self.adapters) or None, MOST_ROWS),
            "kv_blocks": (self.kv_blocks, MOST_TOKENS),
            "ranks": (self.ranks, MOST_RANKS),
            "speculation.max_tokens": (
                None if self.speculation is None else self.speculation.max_tokens,
                MOST_DRAFT_TOKENS,
            ),
        }

    @property
    def rank_files(self) -> tuple[str, ...]:
        """Name the graph, or the plan, of each rank, where there are several."""
        return tuple(map(rank_file if self.plan is None else rank_plan, range(self.ranks)))

    @property
    def requires(self) -> dict[str, str]:
        """The package that runs the engine, by the name that pip knows, and its version."""
        own = {} if self.plugin is None else {self.plugin.package: self.plugin.version}
        version = self.onnxruntime if self.plan is None else self.plan.version
        return own if version is None else {PROVIDERS[self.provider].package: version, **own}

    def check_versions(self) -> None:
        """Refuse an ONNX Runtime of another minor release: its contrib operators and kernels change between them.

        Raises:
            VersionMismatch: always names both versions.
            EnvironmentLacks: the engine needs the CPU kernels, and they are not compiled here.
        """
        if self.kernels not in (None, *native.READS):
            raise VersionMismatch(
                f"the artifact was built with version {self.kernels} of the CPU kernels, but this llmforge reads "
                f"versions {', '.join(map(str, native.READS))}",
                hint="build the artifact again, or run it with the llmforge that built it",
            )
        if self.kernels is not None:
            native.require()
        if self.onnxruntime is None:
            return
        wanted, installed = self.onnxruntime.split(".")[:2], onnxruntime.__version__.split(".")[:2]
        if wanted != installed:
            raise VersionMismatch(
                f"the artifact was built and validated with onnxruntime {self.onnxruntime}, "
                f"and {onnxruntime.__version__} is installed",
                hint=f"pip install 'onnxruntime=={self.onnxruntime}', or build the artifact again",
            )


def _require_plugin(data: Mapping[str, object], where: str) -> None:
    """Return if the backend that an engine names is one of ours, or of the plug-in that it was built with.

    Raises:
        InputError: the file says otherwise of a backend of ours.
        EnvironmentLacks: the plug-in is not installed, or fails.
        VersionMismatch: it is installed in another version.
    """
    facts, provider = data["plugin"], data.get("provider")
    if facts is None or not isinstance(provider, str):
        return
    given = strict_json.read(PluginFacts, facts, f"{where}: plugin")
    wanted = Package(cut(given.package), cut(given.version))
    if provider in backends.BUILT_IN_PROVIDERS:
        raise InputError(f"{where}: plugin makes no sense where provider is {provider}", hint=DAMAGED)
    here = [each for each in plugins.found().plugins if each.kind == "backends" and each.package.name == wanted.name]
    if not any(provider == each.name or provider.startswith(f"{each.name}-") for each in here):
        raise plugins.missing(f"{where}: the engine runs on the backend {cut(provider)}", wanted)
    if (installed := here[0].package) != wanted:
        raise VersionMismatch(
            f"{where}: the engine was built with {wanted}, and {installed} is installed",
            hint=f"pip install '{wanted.name}=={wanted.version}', or build the artifact again",
        )
