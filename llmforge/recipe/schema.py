"""A recipe: what to build from which checkpoint, for which target, with which passes, evidence and gates.

A recipe is a YAML file (schema 1, `recipes/quickstart.yaml` is an example); paths in it are relative to it. It is
validated in two steps: `Recipe.load` checks all but the options of passes, and `Recipe.instantiate` makes the passes
and checks what holds between them. Nothing heavy runs before both are through.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticKnownError

from llmforge import targets
from llmforge.base.backends import BackendName
from llmforge.base.errors import RecipeError, UsageError
from llmforge.base.located_yaml import Location, Source, dotted, read
from llmforge.checkpoint import documents
from llmforge.lowering import options
from llmforge.lowering.pass_base import Numerics, Pass
from llmforge.metrics import catalog
from llmforge.recipe.errors import Problem, collect, describe, meant
from llmforge.recipe.overrides import apply


def _anchor(path: Path, info: ValidationInfo) -> Path:
    """Make a path of the recipe absolute; the validation context is the folder of the recipe's file."""
    return (info.context / path).resolve() if isinstance(info.context, Path) else path


RecipePath = Annotated[Path, AfterValidator(_anchor)]


def _anchor_target(target: str, info: ValidationInfo) -> str:
    """Make the path of a target's file absolute; a name is known in lower case."""
    return str(_anchor(Path(target), info)) if targets.is_file(target) else target.lower()


TargetName = Annotated[str, AfterValidator(_anchor_target)]


def _known_metric(name: str) -> str:
    """Allow the metrics that a gate can decide on, and say of others what pydantic says of a Literal."""
    known = [f"'{each}'" for each in catalog.deciding()]
    if f"'{name}'" not in known:
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(known[:-1])} or {known[-1]}"})
    return name


def _known_metrics(schema: dict[str, Any]) -> None:
    """Name the metrics in the JSON Schema of `gates`."""
    schema["properties"] = {
        name: {
            "description": f"{metric.title} ({metric.unit.name}; {metric.better} is better): {metric.meaning}",
            **schema["additionalProperties"],
        }
        for name, metric in catalog.deciding().items()
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
    threads: int | None = Field(default=None, ge=1, le=4096, description="CPU threads; default: one per physical core")
    tensor_parallel: int = Field(default=1, ge=1, le=64, description="number of GPUs that each layer is split over")
    decode_batches: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(
        default=(),
        description="batch sizes that decode steps on a GPU are padded to; default: powers of two up to max_batch",
    )
    cuda_graphs: Literal["require", "allow", "off"] = Field(
        default="require",
        description="run decode steps on a GPU as CUDA graphs; require: all, or fail the build; allow: where possible",
    )
    deferred: bool = Field(
        default=False,
        description="publish without an engine, to build it later on the target GPU with `llmforge build --finish`",
    )

    @model_validator(mode="after")
    def _batches_reach_the_largest(self) -> Self:
        batches = self.decode_batches
        if batches and (list(batches) != sorted(set(batches)) or batches[-1] != self.max_batch):
            raise ValueError(
                f"decode_batches is {list(batches)}; expected ascending numbers up to max_batch, {self.max_batch}"
            )
        return self


class CalibrationSpec(_Section):
    """Text for calibration: a JSON Lines file of `{id, text}`."""

    data: RecipePath = Field(description="JSON Lines file of {id, text}; relative to the recipe")
    samples: int = Field(ge=1, description="number of sequences to run")
    length: int = Field(ge=2, description="tokens per sequence")
    seed: int = Field(default=0, ge=0, lt=2**32, description="random seed for choosing sequences")
    threads: int = Field(
        default=2, ge=1, le=64, description="threads of every product that decides a code; another number, other bits"
    )


class QualitySpec(_Section):
    """Measure perplexity, KL divergence and top-1 agreement of the engine against the checkpoint."""

    data: RecipePath = Field(description="JSON Lines file of {id, text}; must not overlap the calibration data")
    context: int = Field(ge=2, description="tokens per window")
    max_tokens: int | None = Field(
        default=None, ge=1, description="maximum tokens to evaluate, spread over all documents; default: all"
    )


class LatencySpec(_Section):
    """Measure TTFT and TPOT of the engine and of the checkpoint, in the same run."""

    prompt_tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        min_length=1, description="prompt lengths to measure"
    )
    output_tokens: int = Field(ge=2, description="tokens to generate after each prompt")
    repetitions: int = Field(
        default=10, ge=1, le=1000, description="runs per length; an interval of the median needs at least 6"
    )


class ValidationSpec(_Section):
    """What to measure on the finished engine."""

    quality: QualitySpec | None = None
    latency: LatencySpec | None = None
    attribution: bool = Field(
        default=False, description="measure what each lossy pass, and each layer in it, costs; requires quality"
    )


class TritonSpec(_Section):
    """Settings of the Triton model repository."""

    kind: Literal["cpu", "gpu", "model"] | None = Field(
        default=None, description="KIND_… of `instance_group`; default: that of the target"
    )
    instances: int = Field(
        default=1, ge=1, le=64, description="number of processes, each with its own weights and KV cache"
    )
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="GPU indices, for kind gpu; default: all"
    )
    versions: int | None = Field(default=1, ge=1, description="number of newest versions to serve; null: all")


class ServingSpec(_Section):
    """Serving options; unset ones take the default of the runtime."""

    max_queue: int | None = Field(
        default=None, ge=0, description="maximum number of waiting requests; further ones are refused"
    )
    step_tokens: int | None = Field(default=None, ge=1, description="maximum tokens per engine step")
    prefix_cache_bytes: int | None = Field(
        default=None, ge=0, description="memory for reusing the KV cache of shared prefixes, in bytes; 0 disables it"
    )
    speculation: Literal["off", "prompt-lookup"] | None = Field(
        default=None, description="speculative decoding with tokens copied from the prompt"
    )
    timeout_s: float | None = Field(default=None, gt=0, description="default deadline of a request")
    triton: TritonSpec = Field(default_factory=TritonSpec)

    @model_validator(mode="after")
    def _gpus_have_a_kind(self) -> Self:
        if self.triton.gpus and self.triton.kind in ("cpu", "model"):
            raise ValueError(f"`gpus` requires kind gpu, not {self.triton.kind}")
        return self

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
    """Limits of a metric: `min`, `max` or both."""

    min: float | None = Field(default=None, description="minimum value to pass")
    max: float | None = Field(default=None, description="maximum value to pass")

    @model_validator(mode="after")
    def _has_bounds(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("a gate needs `min`, `max` or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


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
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$", description="name of the artifact and its folder")
    checkpoint: RecipePath = Field(description="folder of a Hugging Face checkpoint; relative to the recipe")
    target: TargetName = Field(
        description="deployment device: a name of `llmforge targets`, `local`, or a file written by `llmforge doctor`"
    )
    engine: EngineSpec
    calibration: CalibrationSpec | None = None
    passes: tuple[PassSpec, ...] = Field(description="passes to run, in order")
    validation: ValidationSpec = Field(default_factory=ValidationSpec)
    gates: dict[Annotated[str, AfterValidator(_known_metric)], GateSpec] = Field(
        default_factory=dict, description="limits that the artifact must meet", json_schema_extra=_known_metrics
    )
    serving: ServingSpec = Field(default_factory=ServingSpec)

    _source: Source = PrivateAttr()

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> Recipe:
        """Read the recipe at `path`; `overrides` are `KEY.KEY=VALUE`, with values in YAML.

        Raises:
            RecipeError: the file does not validate; the message names file, line, column and key of each problem.
            UsageError: an override names nothing that could be set.
        """
        source = read(path)
        if not isinstance(source.data, dict):
            raise RecipeError(
                f"{source.where(())}: expected a mapping with `schema`, `name`, `checkpoint`, …",
                hint="see recipes/quickstart.yaml for an example",
            )
        apply(overrides, source, cls.model_json_schema())
        written = {**source.data, "passes": _entries(source)} if "passes" in source.data else source.data
        try:
            recipe = cls.model_validate_json(json.dumps(written), context=path.resolve().parent)
        except ValidationError as error:
            raise collect(describe(error, source, cls.model_json_schema())) from None
        recipe._source = source
        if problems := list(recipe._inconsistencies()):
            raise collect(problems)
        return recipe

    @property
    def path(self) -> Path:
        """The file that this recipe was read from."""
        return self._source.path

    @property
    def written(self) -> dict[str, Any]:
        """The recipe as it is written, with its overrides: plain data."""
        return self._source.mapping

    def instantiate(self, registry: Sequence[type[Pass]]) -> tuple[Pass, ...]:
        """Make the passes from their options, and check what holds between them.

        Every fact that a pass requires is provided by an earlier one; only exact passes follow the one that lowers the
        precision; a pass with demands has calibration data; a pass with a budget has text to measure it on.

        Raises:
            RecipeError: no such pass or option, an option of the wrong type or range, a missing budget or fact.
        """
        known = {cls.name: cls for cls in registry}
        made: list[Pass] = []
        facts: frozenset[str] = frozenset()
        problems: list[Problem] = []
        for index, spec in enumerate(self.passes):
            cls = known.get(spec.name)
            if cls is None:
                what = f"unknown pass; known: {', '.join(known) or 'none'}"
                problems.append(spec.problem(what, meant(spec.name, list(known))))
                continue
            problems += _misplaced(spec, cls, facts, registry)
            facts |= cls.provides
            try:
                made.append(options.make(cls, spec.options))
            except ValidationError as error:
                problems += describe(error, self._source, options.schema(cls), prefix=("passes", index, spec.name))
            else:
                problems += self._missing_text(spec, made[-1])
        if problems:
            raise collect(problems)
        return tuple(made)

    def resolved(self, passes: Sequence[Pass] = ()) -> dict[str, Any]:
        """Write the recipe as plain JSON data that is the same on every machine.

        Data files stand as their name and SHA-256, the checkpoint as the name of its folder (its digest is the
        manifest's business). With the instantiated `passes`, their options include the defaults.

        Raises:
            DataError: a data file cannot be read.
        """
        plain = self.model_dump(mode="json", by_alias=True)
        plain["checkpoint"] = self.checkpoint.name
        if targets.is_file(self.target):
            plain["target"] = _content(Path(self.target))
        if self.calibration is not None:
            plain["calibration"]["data"] = _content(self.calibration.data)
        if self.validation.quality is not None:
            plain["validation"]["quality"]["data"] = _content(self.validation.quality.data)
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
        quality, latency, longest = self.validation.quality, self.validation.latency, self.engine.max_context
        if quality is not None and quality.context > longest:
            yield self._problem(
                ("validation", "quality", "context"), f"{quality.context} is above engine.max_context, {longest}"
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
        for metric in self.gates:
            section = catalog.deciding()[metric].section
            if section is not None and getattr(self.validation, section) is None:
                yield self._problem(
                    ("gates", metric),
                    "it would not be measured",
                    f"add `validation: {{{section}: …}}`, or remove the gate",
                )

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


def json_schema(registry: Sequence[type[Pass]]) -> dict[str, Any]:
    """Make the JSON Schema of a recipe, for editors; it includes the options of each pass."""
    whole = Recipe.model_json_schema(by_alias=True)
    definitions = whole["$defs"]
    definitions.pop("PassSpec")
    definitions.pop("JsonValue", None)
    entries: list[dict[str, Any]] = []
    for cls in registry:
        own = options.schema(cls)
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


def _entries(source: Source) -> list[Any]:
    """Bring each entry of `passes`, a bare name or `{name: {options}}`, to the form of `PassSpec`.

    Raises:
        RecipeError: `passes` is no list, or an entry has another form.
    """
    written = source.mapping["passes"]
    if not isinstance(written, list):
        raise collect([Problem(source.where(("passes",)), "passes", "must be a list of passes")])
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
