"""A recipe: what to build from which checkpoint, for which target, with which passes, evidence and gates.

A recipe is a YAML file (schema 1, `recipes/quickstart.yaml` is an example); paths in it are relative to it. It is
validated in two steps: `Recipe.load` checks all but the options of passes, and `Recipe.instantiate` makes the passes
and checks what holds between them. Nothing heavy runs before both are through.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from llmforge import backends, targets
from llmforge.backends import BACKENDS, BackendName
from llmforge.base import folders, plugins, small_file
from llmforge.base.errors import EnvironmentLacks, InputError, RecipeError, UsageError
from llmforge.base.located_yaml import Location, Source, dotted, read
from llmforge.base.plugins import Plugin
from llmforge.checkpoint import documents, hub
from llmforge.checkpoint.adapters.source import AdapterSource
from llmforge.metrics import catalog
from llmforge.metrics.agreement import PROMPT_AND_ANSWER, RuntimeName
from llmforge.metrics.latency import MOST_LENGTHS, MOST_OF_SURFACE, MOST_STARTS
from llmforge.metrics.quality import ANSWER_TOKENS, PROMPT_TOKENS
from llmforge.metrics.tasks import MOST_TASKS
from llmforge.metrics.workload import MOST_RUNS
from llmforge.recipe import migration
from llmforge.recipe.errors import NAME, Problem, collect, describe, meant
from llmforge.recipe.overrides import apply
from llmforge.rewrite import options, pass_base
from llmforge.rewrite.pass_base import Numerics, Pass

_HINT = "give a recipe, a YAML file; `llmforge init CHECKPOINT` writes one"


def _anchor(path: Path, info: ValidationInfo) -> Path:
    """Make a path of the recipe absolute; the validation context is the folder of the recipe's file."""
    if (why := small_file.why_no_path(path)) is not None:
        raise ValueError(why)
    return folders.followed(info.context / path) if isinstance(info.context, Path) else path


MOST_PASSES = 256
MOST_METRICS = 64  # of plug-ins
MOST_ADAPTERS = 1024
ADD_ADAPTERS = "add-adapters"  # the pass that adds what is kept apart
TASK_FILES = (".yaml", ".yml")

RecipePath = Annotated[Path, AfterValidator(_anchor)]


def _anchor_target(target: str, info: ValidationInfo) -> str:
    """Make the path of a target's file absolute; a name is known in lower case."""
    return str(_anchor(Path(target), info)) if targets.is_file(target) else target.lower()


TargetName = Annotated[str, AfterValidator(_anchor_target)]


def _anchor_task(task: str, info: ValidationInfo) -> str:
    """Make the path of a task's file absolute; other tasks have names."""
    if task.endswith(TASK_FILES):
        return str(_anchor(Path(task), info))
    if re.fullmatch(r"[\w-]{1,128}", task) is None:
        raise ValueError("must be the name of a task, or a YAML file")
    return task


TaskName = Annotated[str, AfterValidator(_anchor_task)]


def _known_metrics(schema: dict[str, Any]) -> None:
    """Name the metrics in the JSON Schema of `gates`; those of plug-ins are not loaded for it."""
    described = {
        name: f"{metric.title} ({metric.unit.name}; {metric.better} is better): {metric.meaning}"
        for name, metric in catalog.limitable().items()
    }
    others = (each for each in plugins.found().plugins if each.kind == catalog.SEAM.kind)
    described = {**{each.name: f"a metric of {each.package}" for each in others}, **described}
    schema["properties"] = {
        name: {"description": described[name], **schema["additionalProperties"]}
        for name in sorted(described, key=lambda name: name not in catalog.limitable())
    }
    schema["patternProperties"] = {
        pattern: {"description": what, **schema["additionalProperties"]}
        for pattern, what in (
            (catalog.TASK_PATTERN, "a score of a task (see docs/tasks.md)"),
            (catalog.ADAPTER_PATTERN, "quality with an adapter that is kept apart (see docs/adapters.md)"),
        )
    }
    schema["additionalProperties"] = False


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_by_name=True, validate_by_alias=True)


class EngineSpec(_Section):
    """The engine to build and the largest request it serves."""

    backend: BackendName = Field(default="onnxruntime", description="runtime that loads the engine")
    max_context: int = Field(
        ge=2, le=2**24, description="maximum tokens of prompt and answer together; the capacity of the KV cache"
    )
    max_batch: int = Field(default=1, ge=1, le=4096, description="maximum number of concurrent sequences")
    threads: int | None = Field(default=None, ge=1, le=1024, description="CPU threads; default: one per physical core")
    tensor_parallel: int = Field(
        default=1, ge=1, le=64, description="number of GPUs, or of processes on a CPU, that each layer is split over"
    )
    decode_batches: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(
        default=(),
        max_length=4096,
        description="batch sizes that decode steps on a GPU are padded to; default: powers of two up to max_batch",
    )
    cuda_graphs: Literal["require", "allow", "off"] = Field(
        default="require",
        description="run decode steps on a GPU as CUDA graphs; require: all, or fail the build; allow: where possible",
    )
    kv_cache: Literal["slots", "paged"] | None = Field(
        default=None,
        description="memory of the KV cache on a GPU; slots: max_context tokens for each sequence; paged: blocks of "
        "one pool, as many as a text fills (onnxruntime only); default: paged where the engine can, else slots",
    )
    deferred: bool = Field(
        default=False,
        description="publish without an engine, to build it later on the target GPU with `llmforge build --finish`",
    )
    # Never in an artifact: what asks for one is refused, with what it would bring (planning/not_built.py).
    pipeline_parallel: int = Field(
        default=1, ge=1, le=64, exclude=True, description="not supported above 1: devices that hold parts of the layers"
    )
    kv_offload: bool = Field(
        default=False, exclude=True, description="not supported: keep caches of idle sequences in host memory"
    )
    disaggregated_prefill: bool = Field(
        default=False, exclude=True, description="not supported: read prompts on other devices than those that generate"
    )

    @property
    def not_built(self) -> tuple[str, ...]:
        """The keys that ask for what is not supported."""
        asked = {
            "pipeline_parallel": self.pipeline_parallel > 1,
            "kv_offload": self.kv_offload,
            "disaggregated_prefill": self.disaggregated_prefill,
        }
        return tuple(key for key, wanted in asked.items() if wanted)

    @model_validator(mode="after")
    def _batches_reach_the_largest(self) -> Self:
        batches = self.decode_batches
        if batches and (list(batches) != sorted(set(batches)) or batches[-1] != self.max_batch):
            raise ValueError(
                f"decode_batches is {list(batches)}; expected ascending numbers up to max_batch, {self.max_batch}"
            )
        return self


class AdapterSpec(_Section):
    """A LoRA adapter as peft saves it: merged into the weights, or kept apart and chosen by each request."""

    name: str = Field(pattern=NAME, description="name; requests choose one kept apart by it")
    path: RecipePath = Field(description="folder with adapter_config.json; relative to the recipe")
    mode: Literal["merged", "apart"] = Field(
        default="merged", description="merged: into the weights; apart: chosen by each request, of several"
    )
    weight: float = Field(
        default=1.0, allow_inf_nan=False, ge=-1e3, le=1e3, description="factor of what it adds to the weights"
    )


class CalibrationSpec(_Section):
    """Text for calibration: a JSON Lines file of `{id, text}`."""

    data: RecipePath = Field(description="JSON Lines file of {id, text}; relative to the recipe")
    samples: int = Field(ge=1, le=2**20, description="number of sequences to run")
    length: int = Field(ge=2, le=2**24, description="tokens per sequence")
    seed: int = Field(default=0, ge=0, lt=2**32, description="random seed for choosing sequences")
    threads: int = Field(
        default=2, ge=1, le=64, description="threads of every product that decides a code; another number, other bits"
    )


class QualitySpec(_Section):
    """Measure perplexity, KL divergence, and agreement of the engine with the checkpoint, by document and position."""

    data: RecipePath = Field(description="JSON Lines file of {id, text}; must not overlap the calibration data")
    context: int = Field(ge=2, le=2**24, description="tokens per window")
    max_tokens: int | None = Field(
        default=None, ge=1, le=2**40, description="maximum tokens to evaluate, spread over all documents; default: all"
    )
    max_documents: int | None = Field(
        default=None, ge=1, le=10_000, description="maximum documents to evaluate, spread over the file; default: all"
    )
    scored: Literal["all", "second-half"] = Field(
        default="all",
        description="tokens of each window that count; second-half: as llama.cpp, and full windows alone",
    )
    decode_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens, in whole windows, to read one by one as well, through the KV cache; default: none",
    )
    samples: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description=f"documents whose first {PROMPT_TOKENS} tokens both models continue by {ANSWER_TOKENS}, greedily; "
        "default: none",
    )
    reference: RecipePath | None = Field(
        default=None,
        description="folder of the checkpoint before it was quantized, which quality is measured against; default: "
        "`checkpoint`",
    )
    metrics: tuple[catalog.PluginMetricName, ...] = Field(
        default=(), max_length=MOST_METRICS, description="metrics of plug-ins to measure besides (docs/plugins.md)"
    )

    adapter_tokens: int = Field(
        default=4096,
        ge=0,
        le=2**40,
        description="tokens, in whole windows, on which each adapter that is kept apart is compared with the "
        "checkpoint that has it merged; 0: none",
    )

    @model_serializer(mode="wrap")
    def _asked_for(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is as it was before it could be asked for: versions of older recipes stay."""
        fields: dict[str, Any] = write(self)
        new = {"reference": None, "adapter_tokens": type(self).model_fields["adapter_tokens"].default}
        same = {name for name, default in new.items() if fields[name] == default}
        return {n: value for n, value in fields.items() if n not in same and (n != "metrics" or value)}


class SloSpec(_Section):
    """A service level objective: a request is good if it meets all of these bounds."""

    ttft_ms: float | None = Field(default=None, gt=0, le=1e9, description="maximum time to the first token")
    tpot_ms: float | None = Field(default=None, gt=0, le=1e9, description="maximum mean time per later token")
    latency_ms: float | None = Field(default=None, gt=0, le=1e9, description="maximum time to the last token")

    @model_validator(mode="after")
    def _has_bounds(self) -> Self:
        if self.ttft_ms is None and self.tpot_ms is None and self.latency_ms is None:
            raise ValueError("an SLO needs `ttft_ms`, `tpot_ms` or `latency_ms`")
        return self


class SurfaceSpec(_Section):
    """Measure every combination of batch size, prompt length and output length."""

    batches: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(
        default=(1,), min_length=1, max_length=MOST_OF_SURFACE, description="numbers of sequences at once"
    )
    prompt_tokens: tuple[Annotated[int, Field(ge=1, le=2**24)], ...] = Field(
        min_length=1, max_length=MOST_OF_SURFACE, description="prompt lengths"
    )
    output_tokens: tuple[Annotated[int, Field(ge=2, le=2**24)], ...] = Field(
        min_length=1, max_length=MOST_OF_SURFACE, description="output lengths"
    )
    repetitions: int = Field(default=6, ge=1, le=1000, description="runs per combination; an interval needs at least 6")
    baseline_repetitions: int = Field(
        default=1,
        ge=0,
        le=1000,
        description="runs per combination of the checkpoint; an interval of the speed-up needs at least 6",
    )

    @model_serializer(mode="wrap")
    def _asked_for(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the baseline's runs where nothing was said of them: versions of older recipes stay."""
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if name != "baseline_repetitions" or value != 1}


class WorkloadSpec(_Section):
    """Requests as users send them."""

    requests: int = Field(default=32, ge=1, le=1000, description="number of requests, or of sessions")
    prompt_tokens: int = Field(default=128, ge=1, le=2**24, description="tokens of a prompt, or that a turn adds")
    output_tokens: int = Field(default=64, ge=2, le=2**24, description="tokens of an answer")
    runs: int = Field(
        default=1, ge=1, le=MOST_RUNS, description="times the load is sent; intervals of rates need at least 6"
    )


class ChatSpec(WorkloadSpec):
    """Single requests that arrive at random."""

    rate: float = Field(default=1.0, gt=0, le=1e6, description="mean arrivals per second (Poisson)")


class SessionsSpec(WorkloadSpec):
    """Conversations: each turn repeats what was said before and adds a prompt."""

    requests: int = Field(default=8, ge=1, le=1000, description="number of sessions")
    turns: int = Field(default=3, ge=2, le=100, description="requests of a session, one after the other")
    concurrency: int = Field(default=2, ge=1, le=256, description="sessions at once")


class SharedPrefixSpec(WorkloadSpec):
    """Long prompts that begin with the same text, as in retrieval."""

    prefix_tokens: int = Field(default=512, ge=1, le=2**24, description="tokens that all prompts begin with")
    concurrency: int = Field(default=2, ge=1, le=256, description="requests at once")


class OfflineSpec(WorkloadSpec):
    """All requests at once: how many tokens per second the engine gives."""


class TraceSpec(_Section):
    """Replay a file of arrivals: JSON Lines of `{at_s, prompt_tokens or prompt, output_tokens}`."""

    data: RecipePath = Field(description="JSON Lines file; relative to the recipe")


class WorkloadsSpec(_Section):
    """Loads to send to the engine as it serves."""

    chat: ChatSpec | None = None
    sessions: SessionsSpec | None = None
    shared_prefix: SharedPrefixSpec | None = None
    offline: OfflineSpec | None = None
    trace: TraceSpec | None = None


class LatencySpec(_Section):
    """Measure TTFT and TPOT of the engine and of the checkpoint, in the same run."""

    prompt_tokens: tuple[Annotated[int, Field(ge=1, le=2**24)], ...] = Field(
        min_length=1, max_length=MOST_LENGTHS, description="prompt lengths to measure"
    )
    output_tokens: int = Field(ge=2, le=2**24, description="tokens to generate after each prompt")
    repetitions: int = Field(
        default=10, ge=1, le=1000, description="runs per length; an interval of the median needs at least 6"
    )
    surface: SurfaceSpec | None = None
    workloads: WorkloadsSpec | None = None
    slo: SloSpec | None = None
    precision: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="repeat until half the interval of the median TTFT and TPOT is at most this share of it",
    )
    budget_s: float = Field(default=120.0, gt=0, le=86400, description="with precision: when to stop, in seconds")
    starts: int = Field(
        default=0, ge=0, le=MOST_STARTS, description="starts in a process of its own, for load time and peak memory"
    )

    @property
    def trace(self) -> TraceSpec | None:
        """The arrivals to replay, if there are some."""
        return None if self.workloads is None else self.workloads.trace


class ValidationSpec(_Section):
    """What to measure on the finished engine."""

    quality: QualitySpec | None = None
    latency: LatencySpec | None = None
    attribution: bool = Field(
        default=False, description="measure what each lossy pass, and each layer in it, costs; requires quality"
    )
    runtimes: tuple[RuntimeName, ...] = Field(
        default=(),
        description="other runtimes to run the artifact in, and to hold against our own; requires quality, for its "
        "text, and `--runtime NAME=PYTHON` where llmforge's own Python lacks one",
    )
    tasks: Annotated[tuple[TaskName, ...], Field(min_length=1, max_length=MOST_TASKS)] | None = Field(
        default=None,
        description="tasks of lm-evaluation-harness to run: names, or YAML files; requires the extra `eval`",
    )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is measured."""
        return self.quality is None and self.latency is None and self.tasks is None

    @model_validator(mode="after")
    def _each_runtime_once(self) -> Self:
        if len(set(self.runtimes)) != len(self.runtimes):
            raise ValueError(f"runtimes is {list(self.runtimes)}; expected each name once")
        return self

    @model_serializer(mode="wrap")
    def _asked_for(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out runtimes and tasks where there are none: versions of older recipes stay."""
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if name not in ("runtimes", "tasks") or value}


class TritonSpec(_Section):
    """Settings of the Triton model repository."""

    kind: Literal["cpu", "gpu"] | None = Field(
        default=None,
        description="KIND_… of `instance_group`; default: the target's; never KIND_MODEL: an engine has one device",
    )
    instances: int = Field(
        default=1, ge=1, le=64, description="number of processes, each with its own weights and KV cache"
    )
    gpus: tuple[Annotated[int, Field(ge=0, le=1023)], ...] = Field(
        default=(), max_length=1024, description="GPU indices, for kind gpu; default: all"
    )
    versions: int | None = Field(default=1, ge=1, le=2**20, description="number of newest versions to serve; null: all")

    @field_validator("kind", mode="before")
    @classmethod
    def _has_one_device(cls, kind: object) -> object:
        if kind == "model":
            raise ValueError("must be 'cpu' or 'gpu': an instance of KIND_MODEL has no device, and an engine needs one")
        return kind


class ServingSpec(_Section):
    """Serving options; unset ones take the default of the runtime."""

    max_queue: int | None = Field(
        default=None, ge=0, le=2**20, description="maximum number of waiting requests; further ones are refused"
    )
    step_tokens: int | None = Field(default=None, ge=1, le=2**24, description="maximum tokens per engine step")
    prefix_cache_bytes: int | None = Field(
        default=None,
        ge=0,
        le=2**50,
        description="memory for reusing the KV cache of shared prefixes, in bytes; 0 disables it",
    )
    speculation: Literal["off", "prompt-lookup"] | None = Field(
        default=None, description="speculative decoding with tokens copied from the prompt"
    )
    timeout_s: float | None = Field(default=None, gt=0, le=1e6, description="default deadline of a request")
    triton: TritonSpec = Field(default_factory=TritonSpec)

    @model_validator(mode="after")
    def _gpus_have_a_kind(self) -> Self:
        if self.triton.gpus and self.triton.kind == "cpu":
            raise ValueError(f"`gpus` requires kind gpu, not {self.triton.kind}")
        return self

    @classmethod
    def published(cls, recipe: Mapping[str, Any], where: str) -> ServingSpec:
        """Read the section of a resolved recipe that stands in an artifact; `where` names that.

        Raises:
            InputError: there is none, or it is not one of this version.
        """
        try:
            return cls.model_validate_json(json.dumps(recipe.get("serving")))
        except ValidationError as error:
            first = error.errors()[0]
            key = dotted(("serving", *first["loc"]))
            raise InputError(f"{where}: recipe: {key}: {first['msg']}", hint="build the artifact again") from None

    def changed(self, overrides: Sequence[str]) -> ServingSpec:
        """Apply overrides, `KEY.KEY=VALUE` with values in YAML.

        Raises:
            RecipeError, UsageError: one names nothing that could be set, or a value that is not allowed.
        """
        source, schema = Source(Path("serving"), self.model_dump(mode="json")), self.model_json_schema()
        apply(overrides, source, schema)
        try:
            return ServingSpec.model_validate_json(json.dumps(source.data))
        except ValidationError as error:
            raise collect(describe(error, source, schema)) from None


class GateSpec(_Section):
    """Limits of a metric, and of what it may lose against an earlier artifact (`llmforge gate --against`)."""

    min: float | None = Field(default=None, allow_inf_nan=False, description="minimum value to pass")
    max: float | None = Field(default=None, allow_inf_nan=False, description="maximum value to pass")
    drop_max: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="maximum drop against an earlier artifact, and of a task against the checkpoint; of a metric "
        "whose better is higher",
    )
    rise_max: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="maximum rise against an earlier artifact; of a metric whose better is lower",
    )

    @model_validator(mode="after")
    def _has_bounds(self) -> Self:
        if not self.limits:
            raise ValueError("a gate needs `min`, `max`, `drop_max` or `rise_max`")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self

    @model_serializer(mode="wrap")
    def _written_ones(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is against an earlier artifact where it is not set: versions of older recipes stay."""
        fields: dict[str, Any] = write(self)
        return {name: limit for name, limit in fields.items() if limit is not None or name in ("min", "max")}

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by their names."""
        found = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: limit for name, limit in found.items() if limit is not None}


def misdirected(metric: str, gate: GateSpec) -> tuple[str, str] | None:
    """Say what is wrong with a gate that watches the better direction, or none, and a hint; None: nothing is."""
    better = catalog.named(metric).better
    if better == "neither":
        return (
            "no gate decides on it: more of it is neither better nor worse",
            "limit the lower tail: delta_p_p01 or delta_p_p05",
        )
    wrong, right = ("drop_max", "rise_max") if better == "lower" else ("rise_max", "drop_max")
    if wrong not in gate.limits:
        return None
    return f"`{wrong}` would limit an improvement: {better} is better", f"use `{right}`"


Gates = dict[catalog.MetricName, GateSpec]


class GatesFile(_Section):
    """Gates of a release, beside or in place of those of a recipe; a YAML file."""

    baseline: str | None = Field(
        default=None, description="artifact that the release is held against, or `latest-passed`, as --against"
    )
    gates: Gates = Field(description="limits that the release must meet", json_schema_extra=_known_metrics)

    @classmethod
    def of(cls, gates: Mapping[str, Mapping[str, float]]) -> GatesFile:
        """Make it of limits that a program gives.

        Raises:
            UsageError: they do not validate.
        """
        try:
            found = cls.model_validate_json(json.dumps({"gates": gates}))
        except ValidationError as error:
            first = error.errors()[0]
            raise UsageError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        for metric, gate in found.gates.items():
            if why := misdirected(metric, gate):
                raise UsageError(f"gates.{metric}: {why[0]}", hint=why[1])
        return found

    @classmethod
    def load(cls, path: Path) -> GatesFile:
        """Read the file at `path`.

        Raises:
            RecipeError: it does not validate; the message names file, line, column and key of each problem.
        """
        source = read(path)
        schema = cls.model_json_schema()
        try:
            found = cls.model_validate_json(json.dumps(source.data))
        except ValidationError as error:
            raise collect(describe(error, source, schema)) from None
        wrong = [(metric, misdirected(metric, gate)) for metric, gate in found.gates.items()]
        if problems := [
            Problem(source.where(("gates", metric)), f"gates.{metric}", *why) for metric, why in wrong if why
        ]:
            raise collect(problems)
        return found


class PassSpec(_Section):
    """One entry of `passes`, as written: a bare name, or a name with options."""

    name: str
    options: dict[str, JsonValue] = Field(default_factory=dict)
    where: str  # file:line:column of the entry

    def problem(self, what: str, hint: str | None) -> Problem:
        """Say what is wrong with the pass."""
        return Problem(self.where, f"passes.{self.name}", what, hint)


class Recipe(_Section):
    """A validated recipe; its paths are absolute."""

    schema_version: Literal[1] = Field(alias="schema", description="version of this format")
    name: str = Field(pattern=NAME, description="name of the artifact and its folder")
    checkpoint: RecipePath = Field(
        description="folder of a Hugging Face checkpoint, relative to the recipe; or ORG/NAME on the Hub"
    )
    revision: str | None = Field(
        default=None, description="branch, tag or commit of a checkpoint on the Hub; default: main"
    )
    target: TargetName = Field(
        description="deployment device: a name of `llmforge targets`, `local`, or a file written by `llmforge doctor`"
    )
    adapters: tuple[AdapterSpec, ...] = Field(
        default=(), max_length=MOST_ADAPTERS, description="LoRA adapters of the checkpoint"
    )
    engine: EngineSpec
    calibration: CalibrationSpec | None = None
    passes: tuple[PassSpec, ...] = Field(max_length=MOST_PASSES, description="passes to run, in order")
    validation: ValidationSpec = Field(default_factory=ValidationSpec)
    gates: Gates = Field(
        default_factory=dict, description="limits that the artifact must meet", json_schema_extra=_known_metrics
    )
    serving: ServingSpec = Field(default_factory=ServingSpec)
    requantize: bool = Field(
        default=False, description="let passes choose codes for weights that the checkpoint stores as codes already"
    )

    _source: Source = PrivateAttr()
    _migrated: tuple[str, ...] = PrivateAttr(default=())
    _snapshot: hub.HubSnapshot | None = PrivateAttr(default=None)

    @property
    def slots_reason(self) -> str | None:
        """Why serving, as the recipe wants it, needs a slot for each sequence; None: it does not."""
        if self.serving.speculation != "prompt-lookup":
            return None
        return "serving.speculation is prompt-lookup, and drafts are not verified over blocks"

    @model_validator(mode="after")
    def _serves_from_its_cache(self) -> Self:
        if self.engine.kv_cache == "paged" and self.slots_reason is not None:
            raise ValueError(f"engine.kv_cache is paged; expected slots: {self.slots_reason}")
        return self

    @model_serializer(mode="wrap")
    def _with_adapters(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out adapters and revision where there are none: versions of older recipes stay."""
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if name not in ("adapters", "revision") or value}

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> Recipe:
        """Read the recipe at `path`; `overrides` are `KEY.KEY=VALUE`, with values in YAML.

        Of a checkpoint on the Hub all but the weights is downloaded.

        Raises:
            RecipeError: the file does not validate; the message names file, line, column and key of each problem.
            UsageError: an override names nothing that could be set.
            CheckpointError, EnvironmentLacks: as `hub.snapshot`.
        """
        source = read(path, hint=_HINT)
        if not isinstance(source.data, dict):
            raise RecipeError(
                f"{source.where(())}: expected a mapping with `schema`, `name`, `checkpoint`, …",
                hint="see recipes/quickstart.yaml for an example",
            )
        migrated = migration.migrate(source)
        apply(overrides, source, cls.model_json_schema())
        written = {**source.data, "passes": _entries(source)} if "passes" in source.data else source.data
        try:
            recipe = cls.model_validate_json(json.dumps(written), context=folders.followed(path).parent)
        except ValidationError as error:
            raise collect(describe(error, source, cls.model_json_schema())) from None
        recipe._source, recipe._migrated = source, tuple(migrated)
        if problems := list(recipe._inconsistencies()):
            raise collect(problems)
        return recipe._with_snapshot()

    def _with_snapshot(self) -> Recipe:
        """Put the cache's folder in the place of a name on the Hub; a folder that is called so wins."""
        written = str(self._source.mapping["checkpoint"])
        if hub.is_here(self.checkpoint) or not hub.is_name(written):
            if self.revision is not None:
                what = f"{written} is a folder; only checkpoints on the Hub, ORG/NAME, have revisions"
                raise collect([self._problem(("revision",), what, "remove it")])
            return self
        found = hub.snapshot(written, self.revision)
        here = self.model_copy(update={"checkpoint": found.folder})
        here._snapshot = found
        return here

    @property
    def snapshot(self) -> hub.HubSnapshot | None:
        """The checkpoint on the Hub, and its commit; None: it is a folder."""
        return self._snapshot

    def fetched(self) -> Path:
        """Return the folder of the checkpoint with its weights; those on the Hub are downloaded.

        Raises:
            CheckpointError, EnvironmentLacks: as `hub.HubSnapshot.fetch`.
        """
        return self.checkpoint if self._snapshot is None else self._snapshot.fetch()

    def where(self, *location: str | int) -> str:
        """Name the place of a key in the recipe's file: file:line:column."""
        return self._source.where(location)

    @property
    def path(self) -> Path:
        """The file that this recipe was read from."""
        return self._source.path

    @property
    def migrated(self) -> tuple[str, ...]:
        """What the file calls by an earlier name, a sentence each."""
        return self._migrated

    @property
    def written(self) -> dict[str, Any]:
        """The recipe as it is written, with its overrides: plain data."""
        return self._source.mapping

    @property
    def merged(self) -> tuple[AdapterSource, ...]:
        """The adapters that are merged into the checkpoint, in order."""
        return tuple(_source(each) for each in self.adapters if each.mode == "merged")

    @property
    def apart(self) -> tuple[AdapterSource, ...]:
        """The adapters that requests choose from, in order."""
        return tuple(_source(each) for each in self.adapters if each.mode == "apart")

    def instantiate(self, registry: Sequence[type[Pass]]) -> tuple[Pass, ...]:
        """Make the passes from their options, and check what holds between them.

        Every fact that a pass requires is provided by an earlier one; only exact passes follow the one that lowers the
        precision; a pass with demands has calibration data; a pass with a budget has text to measure it on.

        Raises:
            RecipeError: no such pass or option, an option of the wrong type or range, a missing budget or fact.
        """
        registry = self._with_plugins(registry)
        known = {cls.name: cls for cls in registry}
        made: list[Pass] = []
        facts: frozenset[str] = frozenset()
        problems: list[Problem] = []
        for index, spec in enumerate(self.passes):
            cls = known.get(spec.name)
            if cls is None:
                offered = [*known, *(name for name in pass_base.SEAM.names() if name not in known)]
                what = f"unknown pass; known: {', '.join(offered) or 'none'}"
                problems.append(spec.problem(what, meant(spec.name, offered)))
                continue
            problems += _misplaced(spec, cls, facts, registry)
            facts |= cls.provides
            cls = cls.taking(spec.options)
            plugin = pass_base.of_plugin(cls)
            with nullcontext() if plugin is None else plugins.blamed(plugin):
                try:
                    made.append(options.make(cls, spec.options))
                except ValidationError as error:
                    problems += describe(error, self._source, options.schema(cls), prefix=("passes", index, spec.name))
                else:
                    problems += self._missing_text(spec, made[-1])
        problems += self._apart_without_pass(known)
        found = (self.why_not_loaded(name, registry) for name in self.validation.runtimes)
        problems += [self._problem(("validation", "runtimes"), *why) for why in found if why is not None]
        if problems:
            raise collect(problems)
        self.plugins(made)  # refuses those that clash
        return tuple(made)

    def _with_plugins(self, registry: Sequence[type[Pass]]) -> tuple[type[Pass], ...]:
        """Add the passes of plug-ins that the recipe names to `registry`.

        Raises:
            PluginError: one fails, or clashes with another.
        """
        built_in = {cls.name for cls in registry}
        named = dict.fromkeys(spec.name for spec in self.passes)
        found = (pass_base.SEAM.find(name, built_in) for name in named)
        return (*registry, *(cls for cls in found if cls is not None))

    def plugins(self, passes: Sequence[Pass]) -> tuple[Plugin, ...]:
        """List the plug-ins that take part, of the passes of this recipe and of all else that it names.

        Raises:
            PluginError: one clashes with another, or is written for another interface.
        """
        found = [pass_base.of_plugin(step) for step in passes]
        found += [plugin for step in passes for plugin in step.brought()]
        if not targets.is_file(self.target):
            found.append(targets.plugin_of(targets.meant(self.target)))
        found.append(backends.plugin_of(self.engine.backend))
        measured = () if self.validation.quality is None else self.validation.quality.metrics
        found += [catalog.plugin_of(name) for name in (*self.gates, *measured)]
        return tuple(dict.fromkeys(plugin for plugin in found if plugin is not None))

    def _apart_without_pass(self, known: Mapping[str, type[Pass]]) -> Iterator[Problem]:
        """Find adapters that no pass adds, a pass without adapters, and interfaces that cannot choose one."""
        places = {spec.name: spec for spec in self.passes}
        added = places.get(ADD_ADAPTERS)
        for number, adapter in enumerate(self.adapters):
            if adapter.mode == "apart" and added is None:
                what = "it is kept apart, and no pass adds it to the graph"
                hint = f"add `{ADD_ADAPTERS}` to `passes`, before those that quantize"
                yield self._problem(("adapters", number), what, hint)
        if added is not None and not self.apart:
            yield added.problem("the recipe has no adapters with `mode: apart`", "leave it out")
        for spec in self.passes:
            if self.apart and spec.name in known and known[spec.name].loads_in:
                what = "other runtimes cannot choose an adapter for each request"
                yield spec.problem(what, "merge one adapter: `mode: merged`")

    def why_not_loaded(self, runtime: RuntimeName, registry: Sequence[type[Pass]]) -> tuple[str, str] | None:
        """Say why another runtime would not load what this recipe builds, and a hint; None: it does."""
        named = {spec.name for spec in self.passes}
        passes = [cls for cls in self._with_plugins(registry) if cls.name in named]
        hint = "see recipes/portable.yaml and recipes/genai.yaml"
        record = BACKENDS[self.engine.backend].elsewhere
        if record is not None and runtime == record.runtime:
            return None
        if record is not None:
            return f"{runtime} cannot load a {self.engine.backend} artifact", f"its runtime is {record.runtime}"
        if runtime in {each.elsewhere.runtime for each in BACKENDS.values() if each.elsewhere is not None}:
            return f"{runtime} cannot load engines of the backend {self.engine.backend}", hint
        if self.engine.backend != "onnxruntime":
            return f"{runtime} cannot load engines of the backend {self.engine.backend}", hint
        if own := [cls.name for cls in passes if cls.own_operators]:
            return f"{runtime} cannot load the operators of the pass {', '.join(own)}, which only llmforge has", hint
        if not any(runtime in cls.loads_in for cls in passes):
            offered = " or ".join(cls.name for cls in registry if runtime in cls.loads_in)
            return f"{runtime} cannot load the engine: no pass adapts it", f"add the pass {offered}; {hint}"
        return None

    def resolved(self, passes: Sequence[Pass] = ()) -> dict[str, Any]:
        """Write the recipe as plain JSON data that is the same on every machine.

        Data files stand as their name and SHA-256, the checkpoint as the name of its folder (its digest is the
        manifest's business). With the instantiated `passes`, their options include the defaults.

        Raises:
            DataError: a data file cannot be read.
        """
        plain = self.model_dump(mode="json", by_alias=True)
        plain["checkpoint"] = hub.title(self.checkpoint)
        if self._snapshot is not None:
            plain["revision"] = self._snapshot.commit
        if not self.requantize:
            del plain["requantize"]  # versions of older recipes stay
        for number, adapter in enumerate(self.adapters):
            plain["adapters"][number]["path"] = {"name": adapter.path.name, "sha256": _source(adapter).digest()}
        if targets.is_file(self.target):
            plain["target"] = _content(Path(self.target))
        if self.calibration is not None:
            plain["calibration"]["data"] = _content(self.calibration.data)
        if self.validation.quality is not None:
            plain["validation"]["quality"]["data"] = _content(self.validation.quality.data)
            if (reference := self.validation.quality.reference) is not None:
                plain["validation"]["quality"]["reference"] = reference.name
        if (latency := self.validation.latency) is not None and latency.trace is not None:
            plain["validation"]["latency"]["workloads"]["trace"]["data"] = _content(latency.trace.data)
        if (tasks := self.validation.tasks) is not None:
            files = [Path(task) if task.endswith(TASK_FILES) else task for task in tasks]
            plain["validation"]["tasks"] = [_content(each) if isinstance(each, Path) else each for each in files]
        if used := self.plugins(passes):
            plain["plugins"] = {each.package.name: each.package.version for each in used}
        plain["passes"] = [{instance.name: options.values(instance)} for instance in passes] or [
            {spec.name: spec.options} for spec in self.passes
        ]
        return plain

    def _inconsistencies(self) -> Iterator[Problem]:
        """Find what pydantic cannot see: sections that contradict each other, and names that live elsewhere."""
        if targets.is_file(self.target):
            yield from self._target_file(Path(self.target))
        else:
            try:
                targets.meant(self.target)
            except UsageError as error:
                yield self._problem(("target",), error.message, error.hint)
        yield from self._triton_elsewhere()
        named = [each.name for each in self.adapters]
        for number, name in enumerate(named):
            if name in named[:number]:
                yield self._problem(("adapters", number, "name"), f"there are two adapters {name}")
        quality, latency, longest = self.validation.quality, self.validation.latency, self.engine.max_context
        if quality is not None and quality.context > longest:
            yield self._problem(
                ("validation", "quality", "context"), f"{quality.context} is above engine.max_context, {longest}"
            )
        if quality is not None and quality.samples is not None and longest < PROMPT_TOKENS + ANSWER_TOKENS:
            yield self._problem(
                ("validation", "quality", "samples"),
                f"{PROMPT_TOKENS} tokens of each document and {ANSWER_TOKENS} after them exceed engine.max_context, "
                f"{longest}",
            )
        if latency is not None and max(latency.prompt_tokens) + latency.output_tokens > longest:
            yield self._problem(
                ("validation", "latency", "prompt_tokens"),
                f"{max(latency.prompt_tokens)} prompt tokens and {latency.output_tokens} output tokens exceed "
                f"engine.max_context, {longest}",
            )
        if self.validation.attribution and quality is None:
            yield self._problem(
                ("validation", "attribution"), "there is no text to measure it on", "add `validation: {quality: …}`"
            )
        if self.validation.runtimes:
            where = ("validation", "runtimes")
            if quality is None:
                yield self._problem(where, "there is no text to answer", "add `validation: {quality: …}`")
            if longest < PROMPT_AND_ANSWER:
                yield self._problem(
                    where, f"prompts and answers of {PROMPT_AND_ANSWER} tokens exceed engine.max_context, {longest}"
                )
        if (record := BACKENDS[self.engine.backend].elsewhere) is not None:
            hint = f"serve the artifact, `{record.serve.format(engine='ARTIFACT/engine')}`, and measure it there"
            for where_else in ("latency", "tasks"):
                if getattr(self.validation, where_else) is not None:
                    what = f"is measured on what serves, and that is {record.servers}"
                    yield self._problem(("validation", where_else), what, hint)
        if latency is not None:
            yield from self._loads_that_do_not_fit(latency)
        for metric, gate in self.gates.items():
            if (wrong := misdirected(metric, gate)) is not None:
                yield self._problem(("gates", metric), *wrong)
            measured, needs = catalog.named(metric), catalog.needed(metric)
            section = measured.section
            if isinstance(measured, catalog.RuntimeMetric):
                if measured.runtime not in self.validation.runtimes:
                    yield self._problem(
                        ("gates", metric),
                        "it would not be measured",
                        f"add `validation: {{runtimes: [{measured.runtime}]}}`, or remove the gate",
                    )
            elif section is not None and getattr(self.validation, section) is None:
                yield self._problem(
                    ("gates", metric),
                    "it would not be measured",
                    f"add `validation: {{{section}: …}}`, or remove the gate",
                )
            elif isinstance(measured, catalog.AdapterMetric):
                apart = [each.name for each in self.apart]
                if measured.adapter not in apart or not (quality and quality.adapter_tokens):
                    which = "validation.quality.adapter_tokens is 0"
                    if measured.adapter not in apart:
                        which = f"{', '.join(apart)} are kept apart" if apart else "no adapter is kept apart"
                    yield self._problem(("gates", metric), f"it would not be measured: {which}", "remove the gate")
            elif quality is not None and catalog.plugin_of(metric) is not None and metric not in quality.metrics:
                yield self._problem(
                    ("gates", metric),
                    "it would not be measured",
                    f"set `validation.quality.metrics: [{metric}]`, or remove the gate",
                )
            elif isinstance(measured, catalog.QualityMetric) and getattr(quality, measured.source, 0) is None:
                yield self._problem(
                    ("gates", metric),
                    "it would not be measured",
                    f"set `validation.quality.{measured.source}`, or remove the gate",
                )
            elif latency is not None and needs is not None and not getattr(latency, needs):
                yield self._problem(
                    ("gates", metric),
                    "it would not be measured",
                    f"add `validation: {{latency: {{{needs}: …}}}}`, or remove the gate",
                )

    def _loads_that_do_not_fit(self, latency: LatencySpec) -> Iterator[Problem]:
        """Find loads beyond the largest request, or the largest batch, that the engine serves."""
        where, longest, surface = ("validation", "latency"), self.engine.max_context, latency.surface
        if surface is not None:
            if max(surface.batches) > self.engine.max_batch:
                yield self._problem(
                    (*where, "surface", "batches"),
                    f"{max(surface.batches)} sequences exceed engine.max_batch, {self.engine.max_batch}",
                )
            if max(surface.prompt_tokens) + max(surface.output_tokens) > longest:
                yield self._problem(
                    (*where, "surface", "prompt_tokens"),
                    f"{max(surface.prompt_tokens)} prompt tokens and {max(surface.output_tokens)} output tokens exceed "
                    f"engine.max_context, {longest}",
                )
        for name, load in () if latency.workloads is None else latency.workloads:
            if isinstance(load, WorkloadSpec):
                turns = load.turns if isinstance(load, SessionsSpec) else 1
                prefix = load.prefix_tokens if isinstance(load, SharedPrefixSpec) else 0
                tokens = prefix + turns * (load.prompt_tokens + load.output_tokens)
                if tokens > longest:
                    yield self._problem(
                        (*where, "workloads", name),
                        f"its longest request has {tokens} tokens of prompt and answer, more than engine.max_context, "
                        f"{longest}",
                    )

    def _triton_elsewhere(self) -> Iterator[Problem]:
        """Find instances of Triton on a kind of device that engines for the target do not run on."""
        triton = self.serving.triton
        wanted = triton.kind or ("gpu" if triton.gpus else None)
        try:
            kind = targets.find(self.target).kind
        except (UsageError, EnvironmentLacks):
            return
        if wanted not in (None, kind):
            key = "kind" if triton.kind else "gpus"
            what = f"asks for a {wanted}, and engines for target {Path(self.target).stem} run on a {kind}"
            yield self._problem(("serving", "triton", key), what, "leave it out")

    def _target_file(self, path: Path) -> Iterator[Problem]:
        """Find what is wrong with the file of a target; an engine is built for one that is known everywhere."""
        try:
            target = targets.read(path)
        except UsageError as error:
            yield self._problem(("target",), error.message, error.hint)
            return
        if target.known_as not in targets.names():
            yield self._problem(
                ("target",),
                f"{path.name} has no `like`",
                "add `like: NAME`, with a name of `llmforge targets`",
            )

    def _missing_text(self, spec: PassSpec, instance: Pass) -> Iterator[Problem]:
        if instance.demands() and self.calibration is None:
            yield spec.problem(
                "these options need calibration, but the recipe has no `calibration`",
                "add `calibration: {data: FILE.jsonl, samples: 64, length: 512}`",
            )
        elif instance.numerics is Numerics.LOSSY and self.calibration is None and self.validation.quality is None:
            yield spec.problem(
                "the pass has a budget, but the recipe has no text to measure it on",
                "add `calibration` or `validation: {quality: …}`",
            )

    def _problem(self, location: Location, what: str, hint: str | None = None) -> Problem:
        return Problem(self._source.where(location), dotted(location), what, hint)


def _source(spec: AdapterSpec) -> AdapterSource:
    return AdapterSource(spec.name, spec.path, spec.weight)


def json_schema(registry: Sequence[type[Pass]], of_plugins: Sequence[str] = ()) -> dict[str, Any]:
    """Make the JSON Schema of a recipe, for editors; it includes the options of each pass.

    `of_plugins` are the methods of plug-ins that it is to list, with their options.
    """
    whole = Recipe.model_json_schema(by_alias=True)
    definitions = whole["$defs"]
    definitions.pop("PassSpec")
    definitions.pop("JsonValue", None)
    entries: list[dict[str, Any]] = []
    for cls in registry:
        own = options.schema(cls)
        for method in of_plugins:
            if (more := cls.taking({"method": method})) is not cls:
                _add(own, options.schema(more))
        title = inspect.getdoc(cls) or cls.name
        short = title.splitlines()[0]
        definitions |= {**own.pop("$defs", {}), cls.name: {**own, "description": title}}
        if not own.get("required"):
            entries.append({"const": cls.name, "description": short})
        entries.append(
            {
                "type": "object",
                "description": short,
                "properties": {cls.name: {"$ref": f"#/$defs/{cls.name}"}},
                "required": [cls.name],
                "additionalProperties": False,
            }
        )
    whole["properties"]["passes"]["items"] = {"anyOf": entries}
    whole["properties"]["target"]["examples"] = [targets.LOCAL, *targets.names()]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole, "title": "llmforge recipe"}


def _add(schema: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Add the methods and the options of `other` to the schema of the same pass."""
    own, more = schema["properties"], other["properties"]
    methods_ = [*own["method"]["enum"], *(name for name in more["method"]["enum"] if name not in own["method"]["enum"])]
    schema["properties"] = {**more, **own, "method": {**own["method"], "enum": methods_}}


def _entries(source: Source) -> list[Any]:
    """Bring each entry of `passes`, a bare name or `{name: {options}}`, to the form of `PassSpec`.

    Raises:
        RecipeError: `passes` is no list, or an entry has another form.
    """
    written = source.mapping["passes"]
    if not isinstance(written, list):
        raise collect([Problem(source.where(("passes",)), "passes", "must be a list of passes")])
    if len(written) > MOST_PASSES:
        what = f"{len(written)} passes; at most {MOST_PASSES} are allowed"
        raise collect([Problem(source.where(("passes",)), "passes", what)])
    entries, problems = [], []
    for index, entry in enumerate(written):
        where = source.where(("passes", index))
        ((name, values),) = entry.items() if isinstance(entry, dict) and len(entry) == 1 else [(entry, None)]
        if isinstance(name, str) and isinstance(values, dict | None):
            entries.append({"name": name, "options": values or {}, "where": where})
        else:
            what = "a pass must be a name or a name with options: `- name` or `- name: {option: value}`"
            problems.append(Problem(where, f"passes.{index}", what))
    if problems:
        raise collect(problems)
    return entries


def _misplaced(
    spec: PassSpec, cls: type[Pass], facts: frozenset[str], registry: Sequence[type[Pass]]
) -> Iterator[Problem]:
    """Refuse passes before one that they need, and those proven in fp32 behind the one that leaves it."""
    for fact in sorted(cls.requires - facts):
        providers = [other.name for other in registry if fact in other.provides]
        yield spec.problem(
            f"requires {fact!r}, which no earlier pass provides",
            f"put {' or '.join(providers)} before it" if providers else None,
        )
    if "precision" in facts and cls.numerics is not Numerics.EXACT:
        yield spec.problem(
            "follows a pass that lowers the precision, but is verified on fp32 graphs", "put it before that pass"
        )


def _content(path: Path) -> dict[str, str]:
    return {"name": path.name, "sha256": documents.digest(path)}
