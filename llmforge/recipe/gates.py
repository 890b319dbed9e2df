"""The section `gates` of a recipe, and the file of a release's gates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, ValidationError, model_validator

from llmforge.base import plugins
from llmforge.base.errors import UsageError
from llmforge.base.located_yaml import read
from llmforge.metrics import catalog
from llmforge.recipe.errors import Problem, collect, describe
from llmforge.recipe.section import Contradiction, Section
from llmforge.recipe.validation import ValidationSpec

_UNMEASURED = "it would not be measured"


def known_metrics(schema: dict[str, Any]) -> None:
    """Name the metrics in the JSON Schema of `gates`; those of plug-ins are not loaded for it."""
    described = {
        name: f"{metric.title} ({metric.unit.name}; {metric.wanted} is better): {metric.meaning}"
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
            (catalog.BEHAVIOUR_PATTERN, "what chats of a slice do (see docs/behaviour.md)"),
            (catalog.ADAPTER_PATTERN, "quality with an adapter that is kept apart (see docs/adapters.md)"),
        )
    }
    schema["additionalProperties"] = False


class GateSpec(Section):
    """Limits of a metric, and of what it may lose against an earlier artifact (`llmforge gate --against`)."""

    newer: ClassVar[frozenset[str]] = frozenset({"drop_max", "rise_max"})

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


class GatesFile(Section):
    """Gates of a release, beside or in place of those of a recipe; a YAML file."""

    baseline: str | None = Field(
        default=None, description="artifact that the release is held against, or `latest-passed`, as --against"
    )
    gates: Gates = Field(description="limits that the release must meet", json_schema_extra=known_metrics)

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


class PairedGatesFile(Section):
    """Gates of a shadow: limits on what differs between pairs of answers; a YAML file."""

    gates: dict[str, GateSpec] = Field(description="limits of paired figures, `min` or `max` (docs/shadow.md)")

    @classmethod
    def load(cls, path: Path) -> PairedGatesFile:
        """Read the file at `path`; raises as `GatesFile.load`."""
        source = read(path)
        try:
            return cls.model_validate_json(json.dumps(source.data))
        except ValidationError as error:
            raise collect(describe(error, source, cls.model_json_schema())) from None


def contradictions(gates: Gates, validation: ValidationSpec, apart: Sequence[str]) -> Iterator[Contradiction]:
    """Find gates of what is not measured, or that watch the better direction; `apart` are adapters to choose from."""
    for metric, gate in gates.items():
        if (wrong := misdirected(metric, gate)) is not None:
            yield Contradiction((metric,), *wrong)
        if (missing := _not_measured(metric, validation, apart)) is not None:
            yield Contradiction((metric,), *missing)


def _not_measured(name: str, validation: ValidationSpec, apart: Sequence[str]) -> tuple[str, str] | None:
    """Say that a metric would not be measured, and what to do about it; None: it is."""
    metric, needs = catalog.named(name), catalog.needed(name)
    quality, latency = validation.quality, validation.latency
    add = None
    if isinstance(metric, catalog.RuntimeMetric):
        if metric.runtime not in validation.runtimes:
            add = f"add `validation: {{runtimes: [{metric.runtime}]}}`"
    elif metric.section is not None and getattr(validation, metric.section) is None:
        add = f"add `validation: {{{metric.section}: …}}`"
    elif isinstance(metric, catalog.AdapterMetric):
        if metric.adapter not in apart:
            which = f"{', '.join(apart)} are kept apart" if apart else "no adapter is kept apart"
            return f"{_UNMEASURED}: {which}", "remove the gate"
        if not (quality and quality.adapter_tokens):
            return f"{_UNMEASURED}: validation.quality.adapter_tokens is 0", "remove the gate"
    elif quality is not None and catalog.plugin_of(name) is not None and name not in quality.metrics:
        add = f"set `validation.quality.metrics: [{name}]`"
    elif isinstance(metric, catalog.QualityMetric) and getattr(quality, metric.source, 0) is None:
        add = f"set `validation.quality.{metric.source}`"
    elif latency is not None and needs is not None and not getattr(latency, needs):
        add = f"add `validation: {{latency: {{{needs}: …}}}}`"
    return None if add is None else (_UNMEASURED, f"{add}, or remove the gate")
