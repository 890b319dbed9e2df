"""Checks of a recipe before torch is imported, a model traced, or a weight read."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from llmforge.artifact import versions
from llmforge.base import extras, resources
from llmforge.base.errors import EnvironmentLacks, UnsupportedError
from llmforge.checkpoint import CONFIG, CONTEXTS, find_chat_template, folder_of, read_settings
from llmforge.checkpoint.shards import read_headers, weight_files
from llmforge.compile import chat_template, reference, texts
from llmforge.measure import task_files
from llmforge.planning import request, source
from llmforge.recipe import TASK_FILES, Recipe, ValidationSpec
from llmforge.rewrite.pass_base import Pass
from llmforge.targets import Target

if TYPE_CHECKING:  # it imports torch
    from llmforge.calibration.carriers import Carriers

_ROTARY = ("rope_theta", "rope_scaling", "rope_parameters")  # fields of a configuration, of which one is set
# A rotary model may say here that it uses none: Falcon's `alibi`, Granite's and others' kind of position embedding.
_OTHER_KIND = "position_embedding_type"
_ROTARY_KINDS = (None, "rope", "rotary", "rotary_1d")


@dataclass(frozen=True, eq=False)
class CheckedRecipe:
    """A recipe that was held against its target, its data and this machine, before anything is computed."""

    recipe: Recipe
    steps: Sequence[Pass]
    target: Target
    out: Path  # the folder of artifacts
    notes: tuple[str, ...] = ()  # what is tight, or has changed since the artifact before
    publish_failed: bool = False  # it is to be published with verdict FAIL, where nothing but budgets is exceeded
    carriers: Carriers | None = None  # of calibration text; None: this process, on the CPU


def check(recipe: Recipe) -> None:
    """Read the data of `recipe` and the headers of its checkpoint, and hold the context against the configuration.

    Raises:
        InputError: the chat template that it names cannot be used.
        DataError: a text, a trace, the data of a task, queries or passages are missing or not readable, or evaluation
            text was calibrated on.
        RecipeError: the file of a task cannot be read.
        CheckpointError: the folder is no checkpoint: a file is missing or damaged.
        EnvironmentLacks: the recipe asks for tasks, and what runs them is not installed.
        UnsupportedError: the weights are quantized in a way that is not taken, or `engine.max_context` is more than
            rotary tables reach.
    """
    if recipe.validation.tasks is not None:
        extras.require("eval")
    chat_template.check(recipe)
    texts.check(recipe)
    _check_measured(recipe.validation)
    folder = folder_of(recipe.checkpoint.absolute())
    settings = read_settings(folder)
    _check_context(recipe, settings.get("text_config", settings))
    reference.check(recipe)
    recipe.fetched()  # the last check needs the weights, which may have to be downloaded
    read_headers(folder, weight_files(folder))
    texts.check_template(recipe, recipe.chat_template or find_chat_template(folder))


def check_source(recipe: Recipe, steps: Sequence[Pass]) -> None:
    """Hold the passes of `recipe` against a checkpoint that comes quantized.

    Raises:
        RecipeError: a pass chooses other codes, and the recipe does not say that it may.
        CheckpointError, UnsupportedError: see `check`.
    """
    source.refuse_requantizing(recipe, steps, read_settings(recipe.checkpoint.absolute()))


def check_revision(recipe: Recipe, out: Path) -> list[str]:
    """Say whether a branch of the Hub moved since the newest artifact of this name was built from it."""
    snapshot = recipe.snapshot
    if snapshot is None or recipe.name not in versions.names(out):
        return []
    newest = next((each.artifact for each in versions.listed(out, recipe.name) if each.artifact is not None), None)
    if newest is None or newest.manifest.recipe.get("checkpoint") != snapshot.repository:
        return []
    before = str(newest.manifest.recipe.get("revision"))
    if before == snapshot.commit:
        return []
    built = f"{recipe.name}/{newest.path.name} was built from {before[:12]}"
    return [f"{snapshot.repository}: {snapshot.revision} is at {snapshot.commit[:12]}; {built}"]


def check_room(recipe: Recipe, out: Path) -> list[str]:
    """Hold what the build is predicted to take against this machine; return what is tight.

    Where the configuration alone does not tell the sizes of the model, nothing is predicted.

    Raises:
        EnvironmentLacks: it needs more memory than there is, free or not, or more disk than is free at `out`.
    """
    predicted = request.build_of(recipe)
    if predicted is None:
        return []
    memory, needed = resources.usable_memory_bytes(), predicted.memory_bytes
    if needed > memory:
        raise EnvironmentLacks(
            f"out of memory: the build is predicted to need {_gb(needed)} of memory, and there are {_gb(memory)}",
            hint="build on a machine with more memory; see `llmforge plan RECIPE`",
        )
    place = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if predicted.disk_bytes > free and not recipe.engine.deferred:
        raise EnvironmentLacks(
            f"{out}: the disk is full: the artifact is predicted to take {_gb(predicted.disk_bytes)}, and {_gb(free)} "
            "are free",
            hint="free some space, or use --out",
        )
    available = psutil.virtual_memory().available
    if needed <= available:
        return []
    return [f"memory is tight: the build is predicted to need {_gb(needed)}, and {_gb(available)} are free"]


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _check_measured(spec: ValidationSpec) -> None:
    """Read what is measured on, beside texts: the trace of a load, the files of tasks, queries and passages."""
    for task in spec.tasks or ():
        if task.endswith(TASK_FILES):
            task_files.read(Path(task))
    if spec.retrieval is not None:
        spec.retrieval.corpus()
    if spec.latency is not None and spec.latency.trace is not None:
        from llmforge.measure.load.workload import check_trace  # brings ONNX Runtime

        check_trace(spec.latency.trace.data)


def _check_context(recipe: Recipe, settings: Mapping[str, Any]) -> None:
    """Refuse early what `backends.signatures.check_context` would refuse of the graph: a context beyond rotary tables.

    They have as many positions as the configuration says the model is made for. Where it does not plainly say that
    positions are rotary, the graph decides.
    """
    if all(settings.get(name) is None for name in _ROTARY):
        return
    if settings.get("alibi") or settings.get(_OTHER_KIND) not in _ROTARY_KINDS:
        return
    name = next((name for name in CONTEXTS if settings.get(name) is not None), None)
    made_for = None if name is None else settings[name]
    if type(made_for) is int and 0 < made_for < recipe.engine.max_context:
        raise UnsupportedError(
            f"engine.max_context is {recipe.engine.max_context}; the model is made for {made_for} tokens "
            f"({name} in {recipe.checkpoint / CONFIG})",
            hint=f"set engine.max_context to at most {made_for}",
        )
