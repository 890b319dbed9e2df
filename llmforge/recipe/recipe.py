"""A recipe: what to build from which checkpoint, for which target, with which passes, evidence and gates.

A recipe is a YAML file (schema 1, `recipes/quickstart.yaml` is an example); paths in it are relative to it. It is
validated in two steps: `Recipe.load` checks all but the options of passes, and `Recipe.instantiate` makes the passes
and checks what holds between them. Nothing heavy runs before both are through.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from llmforge import backends, targets
from llmforge.backends import BACKENDS
from llmforge.base import folders, plugins
from llmforge.base.errors import EnvironmentLacks, RecipeError, UsageError
from llmforge.base.located_yaml import Location, Source, dotted, parse, read
from llmforge.base.plugins import Plugin
from llmforge.checkpoint import hub
from llmforge.checkpoint.adapters.source import AdapterSource
from llmforge.metrics import catalog
from llmforge.metrics.agreement import RuntimeName
from llmforge.metrics.behaviour.outcomes import ACCEPTED_LENGTH
from llmforge.metrics.behaviour.results import PREFIX as BEHAVIOUR
from llmforge.recipe import adapters as adapters_section
from llmforge.recipe import gates as gates_section
from llmforge.recipe import migration
from llmforge.recipe import passes as passes_section
from llmforge.recipe.adapters import MOST_ADAPTERS, AdapterSpec
from llmforge.recipe.calibration import CalibrationSpec
from llmforge.recipe.engine import EngineSpec
from llmforge.recipe.errors import NAME, Problem, collect, describe, meant
from llmforge.recipe.gates import Gates
from llmforge.recipe.overrides import apply
from llmforge.recipe.passes import MOST_PASSES, PassSpec
from llmforge.recipe.section import TASK_FILES, Contradiction, RecipePath, Section, TargetName, content, contents
from llmforge.recipe.serving import ServingSpec, SpeculationSpec
from llmforge.recipe.validation import ValidationSpec
from llmforge.rewrite import options, pass_base
from llmforge.rewrite.pass_base import Numerics, Pass

if TYPE_CHECKING:
    from llmforge.checkpoint.folder import Origin

_HINT = "give a recipe, a YAML file; `llmforge init CHECKPOINT` writes one"


class Recipe(Section):
    """A validated recipe; its paths are absolute."""

    newer: ClassVar[frozenset[str]] = frozenset({"adapters", "revision", "chat_template", "tool_prompt", "reranker"})

    schema_version: Literal[1] = Field(alias="schema", description="version of this format")
    name: str = Field(pattern=NAME, description="name of the artifact and its folder")
    checkpoint: RecipePath = Field(
        description="folder of a Hugging Face checkpoint, relative to the recipe; or ORG/NAME on the Hub"
    )
    revision: str | None = Field(
        default=None, description="branch, tag or commit of a checkpoint on the Hub; default: main"
    )
    reranker: Literal["qwen3"] | None = Field(
        default=None,
        description="score pairs with a causal model, by its yes and no: qwen3, with Qwen3-Reranker's prompt",
    )
    chat_template: RecipePath | None = Field(
        default=None, description="file of a Jinja template, relative to the recipe; default: the checkpoint's own"
    )
    tool_prompt: Literal["default"] | None = Field(
        default=None, description="how tools are described where the chat template knows none; null: they are refused"
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
        default_factory=dict,
        description="limits that the artifact must meet",
        json_schema_extra=gates_section.known_metrics,
    )
    serving: ServingSpec = Field(default_factory=ServingSpec)
    requantize: bool = Field(
        default=False, description="let passes choose codes for weights that the checkpoint stores as codes already"
    )

    _source: Source = PrivateAttr()
    _migrated: tuple[str, ...] = PrivateAttr(default=())
    _overrides: tuple[str, ...] = PrivateAttr(default=())
    _snapshot: hub.HubSnapshot | None = PrivateAttr(default=None)

    @property
    def slots_reason(self) -> str | None:
        """Why serving, as the recipe wants it, needs a slot for each sequence; None: it does not."""
        if self.serving.draft is None:
            return None
        return f"serving.speculation is {self.serving.draft.method}, and no device has verified drafts over blocks"

    @model_validator(mode="after")
    def _serves_from_its_cache(self) -> Self:
        if self.engine.kv_cache == "paged" and self.serving.draft is not None and self.serving.draft.method == "eagle3":
            raise ValueError("engine.kv_cache is paged; expected slots: serving.speculation is eagle3")
        return self

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> Recipe:
        """Read the recipe at `path`; `overrides` are `KEY.KEY=VALUE`, with values in YAML.

        Of a checkpoint on the Hub all but the weights is downloaded.

        Raises:
            RecipeError: the file does not validate; the message names file, line, column and key of each problem.
            UsageError: an override names nothing that could be set.
            CheckpointError, EnvironmentLacks: as `hub.snapshot`.
        """
        return cls._of(read(path, hint=_HINT), path, overrides)

    @classmethod
    def parse(cls, text: str, path: Path) -> Recipe:
        """Read the `text` of a recipe that is to stand at `path`; raises as `load`."""
        return cls._of(parse(text, path), path, ())

    @classmethod
    def _of(cls, source: Source, path: Path, overrides: Sequence[str]) -> Recipe:
        if not isinstance(source.data, dict):
            raise RecipeError(
                f"{source.where(())}: expected a mapping with `schema`, `name`, `checkpoint`, …",
                hint="see recipes/quickstart.yaml for an example",
            )
        migrated = migration.migrate(source)
        apply(overrides, source, cls.model_json_schema())
        written = {**source.data, "passes": passes_section.entries(source)} if "passes" in source.data else source.data
        try:
            recipe = cls.model_validate_json(json.dumps(written), context=folders.followed(path).parent)
        except ValidationError as error:
            raise collect(describe(error, source, cls.model_json_schema())) from None
        recipe._source, recipe._migrated, recipe._overrides = source, tuple(migrated), tuple(overrides)
        if problems := [recipe._problem(*each) for each in recipe._contradictions()]:
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
    def overrides(self) -> tuple[str, ...]:
        """What was set besides what the file says, KEY=VALUE each."""
        return self._overrides

    @property
    def written(self) -> dict[str, Any]:
        """The recipe as it is written, with its overrides: plain data."""
        return self._source.mapping

    @property
    def merged(self) -> tuple[AdapterSource, ...]:
        """The adapters that are merged into the checkpoint, in order."""
        return tuple(each.source for each in self.adapters if each.mode == "merged")

    def origin(self) -> Origin:
        """Return what the checkpoint is opened from, with its weights.

        Raises:
            CheckpointError, EnvironmentLacks: as `fetched`.
        """
        return self.fetched(), self.merged, self.reranker

    @property
    def apart(self) -> tuple[AdapterSource, ...]:
        """The adapters that requests choose from, in order."""
        return tuple(each.source for each in self.adapters if each.mode == "apart")

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
            problems += passes_section.misplaced(spec, cls, facts, registry)
            facts |= cls.provides
            cls = cls.taking(spec.options)
            with plugins.blamed(pass_base.of_plugin(cls)):
                try:
                    made.append(options.make(cls, spec.options))
                except ValidationError as error:
                    problems += describe(error, self._source, options.schema(cls), prefix=("passes", index, spec.name))
                else:
                    problems += self._missing_text(spec, made[-1])
        problems += self._apart_without_pass(registry)
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
        found += [plugin for step in passes for plugin in step.plugins_used()]
        if not targets.is_file(self.target):
            found.append(targets.plugin_of(targets.meant(self.target)))
        found.append(backends.plugin_of(self.engine.backend))
        measured = () if self.validation.quality is None else self.validation.quality.metrics
        found += [catalog.plugin_of(name) for name in (*self.gates, *measured)]
        return tuple(dict.fromkeys(plugin for plugin in found if plugin is not None))

    def why_not_loaded(self, runtime: RuntimeName, registry: Sequence[type[Pass]]) -> tuple[str, str] | None:
        """Say why another runtime would not load what this recipe builds, and a hint; None: it does."""
        named = {spec.name for spec in self.passes}
        passes = [cls for cls in self._with_plugins(registry) if cls.name in named]
        hint = "see recipes/portable.yaml and recipes/genai.yaml"
        record = BACKENDS[self.engine.backend].export_format
        if record is not None and runtime in record.runtimes:
            return None
        if record is not None:
            return f"{runtime} cannot load a {self.engine.backend} artifact", f"choose {' or '.join(record.runtimes)}"
        others = [each for each in BACKENDS.values() if each.export_format and runtime in each.export_format.runtimes]
        if others:
            hint = f"set engine.backend to {' or '.join(each.name for each in others)}"
        if others or self.engine.backend != "onnxruntime":
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
        if self.chat_template is not None:
            plain["chat_template"] = content(self.chat_template)
        if not self.requantize:
            del plain["requantize"]  # versions of older recipes stay
        if isinstance(self.serving.speculation, SpeculationSpec):
            found: dict[str, Any] = self.serving.speculation.model_dump(mode="json", exclude_none=True)
            for key in found.keys() & {"checkpoint", "recipe"}:  # its engine's files are in the manifest
                found[key] = Path(found[key]).name
            plain["serving"]["speculation"] = found
        for number, adapter in enumerate(self.adapters):
            plain["adapters"][number]["path"] = {"name": adapter.path.name, "sha256": adapter.source.digest()}
        if targets.is_file(self.target):
            plain["target"] = content(Path(self.target))
        if self.calibration is not None:
            plain["calibration"]["data"] = contents(self.calibration.data)
        if self.validation.quality is not None:
            plain["validation"]["quality"]["data"] = contents(self.validation.quality.data)
            if (reference := self.validation.quality.reference) is not None:
                plain["validation"]["quality"]["reference"] = reference.name
        if (latency := self.validation.latency) is not None and latency.trace is not None:
            plain["validation"]["latency"]["workloads"]["trace"]["data"] = content(latency.trace.data)
        if (tasks := self.validation.tasks) is not None:
            files = [Path(task) if task.endswith(TASK_FILES) else task for task in tasks]
            plain["validation"]["tasks"] = [content(each) if isinstance(each, Path) else each for each in files]
        if (behaviour := self.validation.behaviour) is not None:
            plain["validation"]["behaviour"]["data"] = content(behaviour.file)
        if (retrieval := self.validation.retrieval) is not None:
            plain["validation"]["retrieval"]["data"] = retrieval.digest
        if used := self.plugins(passes):
            plain["plugins"] = {each.package.name: each.package.version for each in used}
        plain["passes"] = [{instance.name: options.values(instance)} for instance in passes] or [
            {spec.name: spec.options} for spec in self.passes
        ]
        return plain

    def _contradictions(self) -> Iterator[Contradiction]:
        """Find what pydantic cannot see: sections that contradict each other, and names that live elsewhere."""
        if targets.is_file(self.target):
            yield from _of_target_file(Path(self.target))
        else:
            try:
                targets.meant(self.target)
            except UsageError as error:
                yield Contradiction(("target",), error.message, error.hint)
        yield from self._triton_elsewhere()
        yield from (each.inside("adapters") for each in adapters_section.contradictions(self.adapters))
        yield from (each.inside("validation") for each in self.validation.contradictions(self.engine))
        apart = [each.name for each in self.apart]
        yield from (each.inside("gates") for each in gates_section.contradictions(self.gates, self.validation, apart))
        if self.serving.draft is None:
            for name in self.gates:
                if name.startswith(f"{BEHAVIOUR}{ACCEPTED_LENGTH}"):
                    hint = "add `serving: {speculation: …}`, or remove the gate"
                    yield Contradiction(("gates", name), "is not measured: the recipe has no drafts", hint)

    def _triton_elsewhere(self) -> Iterator[Contradiction]:
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
            yield Contradiction(("serving", "triton", key), what, "leave it out")

    @property
    def _has_text(self) -> bool:
        read = self.validation
        return any(section is not None for section in (self.calibration, read.quality, read.retrieval))

    def _missing_text(self, spec: PassSpec, instance: Pass) -> Iterator[Problem]:
        if instance.demands() and self.calibration is None:
            yield spec.problem(
                "these options need calibration, but the recipe has no `calibration`",
                "add `calibration: {data: FILE.jsonl, samples: 64, length: 512}`",
            )
        elif instance.numerics is Numerics.LOSSY and not self._has_text:
            yield spec.problem(
                "the pass has a budget, but the recipe has no text to measure it on",
                "add `calibration` or `validation: {quality: …}`",
            )

    def _apart_without_pass(self, registry: Sequence[type[Pass]]) -> Iterator[Problem]:
        """Find adapters that no pass adds, a pass without adapters, and interfaces that cannot choose one."""
        adding = {cls.name for cls in registry if cls.adds_adapters}
        exporting = {cls.name for cls in registry if cls.loads_in}
        added = [spec for spec in self.passes if spec.name in adding]
        for number, adapter in enumerate(self.adapters):
            if adapter.mode == "apart" and not added:
                what = "it is kept apart, and no pass adds it to the graph"
                hint = f"add `{' or '.join(sorted(adding))}` to `passes`, before those that quantize"
                yield self._problem(("adapters", number), what, hint)
        if not self.apart:
            yield from (each.problem("the recipe has no adapters with `mode: apart`", "leave it out") for each in added)
        for spec in self.passes:
            if self.apart and spec.name in exporting:
                what = "other runtimes cannot choose an adapter for each request"
                yield spec.problem(what, "merge one adapter: `mode: merged`")

    def _problem(self, location: Location, what: str, hint: str | None = None) -> Problem:
        return Problem(self._source.where(location), dotted(location), what, hint)


def _of_target_file(path: Path) -> Iterator[Contradiction]:
    """Find what is wrong with the file of a target; an engine is built for one that is known everywhere."""
    try:
        target = targets.read(path)
    except UsageError as error:
        yield Contradiction(("target",), error.message, error.hint)
        return
    if target.catalog_name not in targets.names():
        hint = "add `like: NAME`, with a name of `llmforge targets`"
        yield Contradiction(("target",), f"{path.name} has no `like`", hint)
