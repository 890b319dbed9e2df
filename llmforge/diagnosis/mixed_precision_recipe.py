"""Passes, and recipes, that keep parts of a model in higher precision."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from llmforge import targets
from llmforge.base import folders
from llmforge.compile.lossy_parts import LossyPart, literal
from llmforge.recipe import TASK_FILES, Recipe
from llmforge.rewrite import options
from llmforge.rewrite.pass_base import Pass
from llmforge.rewrite.traits import FinerCodes

Entry = tuple[str, dict[str, Any]]  # a pass of a recipe, and its options


def entries(step: Pass, written: Mapping[str, Any], parts: Sequence[LossyPart]) -> list[Entry]:
    """Write what takes the place of `step`, whose options are `written`, in a recipe that keeps `parts`.

    Weights of 4 bits are kept in 8, by a second pass, and tables and others as they are; layers of a cache in fp32.
    """
    layers = {layer for part in parts for layer in part.layers}
    if layers:
        kept = sorted({*written.get("exclude_layers", ()), *layers})
        return [(step.name, {**written, "exclude_layers": kept})]
    own = list(written.get("exclude", ()))
    excluded = list(dict.fromkeys([*own, *(literal(name) for part in parts for name in part.parameters)]))
    made: list[Entry] = [(step.name, {**written, "exclude": excluded})]
    if (finer := in_more_bits(step, written, parts)) is not None:
        tables = [literal(name) for part in parts if part.table for name in part.parameters]
        made.append((step.name, {**finer.options, **({"exclude": own + tables} if own + tables else {})}))
    return made


def in_more_bits(step: Pass, written: Mapping[str, Any], parts: Sequence[LossyPart]) -> FinerCodes | None:
    """Say how weights of `parts` can be kept in more bits; None: as they are."""
    return None if all(part.table for part in parts) else step.finer(written)


def passes(step: Pass, written: Mapping[str, Any], parts: Sequence[LossyPart]) -> list[Pass]:
    """Make the passes of `entries`."""
    return [options.make(type(step), given) for _, given in entries(step, written, parts)]


def how(step: Pass, written: Mapping[str, Any], parts: Sequence[LossyPart]) -> str:
    """Say in what the parts are kept."""
    finer = in_more_bits(step, written, parts)
    return "unquantized" if finer is None else f"in {finer.bits} bits"


def names(part: LossyPart) -> Sequence[str]:
    """Name what is kept of a part."""
    return part.parameters or [f"cache of layer {layer}" for layer in part.layers]


def write(recipe: Recipe, replaced: Mapping[int, Sequence[Entry]], path: Path) -> None:
    """Write `recipe` to `path` with the passes of some numbers `replaced`; its paths are relative to the new file."""
    plain = deepcopy(recipe.written)
    old = plain["passes"]
    plain["passes"] = [
        each
        for number, entry in enumerate(old)
        for each in ([{name: given} for name, given in replaced[number]] if number in replaced else [entry])
    ]
    folder = folders.followed(path).parent
    if recipe.snapshot is None:
        plain["checkpoint"] = _relative(recipe.checkpoint, folder)
    for number, adapter in enumerate(recipe.adapters):
        plain["adapters"][number]["path"] = _relative(adapter.path, folder)
    if targets.is_file(recipe.target):
        plain["target"] = _relative(Path(recipe.target), folder)
    if recipe.calibration is not None:
        plain["calibration"]["data"] = _all_relative(recipe.calibration.data, folder)
    if recipe.validation.quality is not None:
        plain["validation"]["quality"]["data"] = _all_relative(recipe.validation.quality.data, folder)
    if (latency := recipe.validation.latency) is not None and latency.trace is not None:
        plain["validation"]["latency"]["workloads"]["trace"]["data"] = _relative(latency.trace.data, folder)
    if recipe.validation.tasks is not None:
        plain["validation"]["tasks"] = [
            _relative(Path(task), folder) if task.endswith(TASK_FILES) else task for task in recipe.validation.tasks
        ]
    yaml = YAML(typ="safe")
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 120
    stream = io.StringIO()
    yaml.dump(plain, stream)
    path.write_text(stream.getvalue(), encoding="utf-8")


def _all_relative(paths: Sequence[Path], folder: Path) -> str | list[str]:
    found = [_relative(path, folder) for path in paths]
    return found if len(found) > 1 else found[0]


def _relative(path: Path, folder: Path) -> str:
    return os.path.relpath(path, folder)
