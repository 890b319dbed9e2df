"""Build an artifact again from what it records, and compare."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from llmforge.artifact import Artifact
from llmforge.base import folders
from llmforge.base.errors import InputError, UsageError
from llmforge.base.progress import Progress
from llmforge.checkpoint import documents
from llmforge.compile import finishing, lock, pipeline
from llmforge.diagnosis import comparison
from llmforge.diagnosis.comparison import BuildComparison
from llmforge.gates import confirmed
from llmforge.recipe import Recipe


def recorded(path: Path, checkpoint: Path, texts: Sequence[Path], folder: Path) -> Recipe:
    """Make the recipe that the artifact at `path` records, of inputs that lie here; it is written into `folder`.

    Raises:
        InputError: what it records is no recipe of a build.
        UsageError: a text that it names is not among `texts`; the recipe's target is a file.
    """
    opened = confirmed.open_artifact(path)
    plain: dict[str, Any] = json.loads(json.dumps(opened.manifest.recipe))
    try:
        named_ones = plain.get("calibration"), (plain.get("validation") or {}).get("quality")
        sections: list[dict[str, Any]] = [section for section in named_ones if section is not None]
        wanted = [[(file["sha256"], file["name"]) for file in _listed(section["data"])] for section in sections]
        target = plain["target"]
        named = target["name"] if isinstance(target, dict) else target
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: its manifest records no recipe of a build: {type(error).__name__}: {error}",
            hint="give the recipe with --recipe; fetch or build the artifact again",
        ) from error
    if isinstance(target, dict):
        raise UsageError(
            f"{path}: its recipe names the target file {named}, which the artifact does not hold",
            hint="give the recipe with --recipe",
        )
    if plain.get("adapters"):
        raise UsageError(
            f"{path}: was built with {len(plain['adapters'])} adapters, which the artifact does not hold as files",
            hint="give the recipe with --recipe",
        )
    plain.pop("plugins", None)  # the lock says which they were
    if "revision" not in plain:  # else it is named as on the Hub, at that commit
        plain["checkpoint"] = str(folders.followed(checkpoint))
    here = {documents.digest(text): text for text in texts}
    for section, files in zip(sections, wanted, strict=True):
        for digest, name in files:
            if digest not in here:
                raise UsageError(
                    f"{path}: was built with the text {name} ({digest[:12]}…), which is none of "
                    f"those given: {', '.join(map(str, texts)) or 'none'}",
                    hint="give it with --text FILE",
                )
        section["data"] = [str(folders.followed(here[digest])) for digest, _ in files]
    validation = plain.get("validation") or {}
    for number, task in enumerate(validation.get("tasks") or []):
        if isinstance(task, dict):
            if task["sha256"] not in here:
                raise UsageError(
                    f"{path}: was built with the task {task['name']} ({task['sha256'][:12]}…), which is none of those "
                    f"given: {', '.join(map(str, texts)) or 'none'}",
                    hint="give it with --text FILE",
                )
            validation["tasks"][number] = str(folders.followed(here[task["sha256"]]))
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(plain), encoding="utf-8")  # JSON is YAML
    return Recipe.load(file)


def _listed(data: Any) -> list[Any]:
    """Give the files of a text, which stand alone where there is one."""
    return data if isinstance(data, list) else [data]


def reproduce(path: Path, recipe: Recipe, out: Path | None = None, progress: Progress | None = None) -> BuildComparison:
    """Build `recipe`, which must be that of the artifact at `path`, and compare both; nothing is measured.

    What is built goes to `out`, or is deleted after the comparison.

    Raises:
        InputError: the artifact was changed, or was built without a lock.
        UsageError: the recipe, or its checkpoint, is not the artifact's; the engine was finished elsewhere.
        ForgeError: the build fails.
    """
    opened = confirmed.open_artifact(path)
    opened.verify()
    lock.read(opened)
    finishing.check_recipe(recipe, opened)
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        again = pipeline.build(recipe, folder, progress, measure=False)
        return comparison.compare(opened, Artifact.open(again.path))
