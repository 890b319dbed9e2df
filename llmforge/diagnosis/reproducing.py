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
from llmforge.compile import finishing, inputs, lock, pipeline
from llmforge.diagnosis import comparison
from llmforge.diagnosis.comparison import BuildComparison
from llmforge.gates import confirmed
from llmforge.recipe import Recipe, RetrievalSpec
from llmforge.recipe.retrieval import SHIPPED


def recorded(path: Path, checkpoint: Path | None, texts: Sequence[Path], folder: Path) -> Recipe:
    """Make the recipe that the artifact at `path` records, of inputs that lie here; it is written into `folder`.

    An input that is not given (None: the checkpoint) is looked for where a build on this machine has found it.

    Raises:
        InputError: what it records is no recipe of a build.
        UsageError: an input is not known here.
    """
    opened = confirmed.open_artifact(path)
    plain: dict[str, Any] = json.loads(json.dumps(opened.manifest.recipe))
    if not isinstance(plain.get("passes"), list) or not {"name", "checkpoint", "target"} <= plain.keys():
        raise InputError(
            f"{path}: its manifest records no recipe of a build",
            hint="give the recipe with --recipe; fetch or build the artifact again",
        )
    plain.pop("plugins", None)  # the lock says which they were
    if "revision" not in plain:  # else it is named as on the Hub, at that commit
        found = checkpoint or inputs.find(opened.manifest.checkpoint, plain["checkpoint"])
        if found is None:
            raise _unknown(path, f"the checkpoint {plain['checkpoint']}", opened.manifest.checkpoint, "--checkpoint")
        plain["checkpoint"] = str(folders.followed(found))
    quality = (plain.get("validation") or {}).get("quality") or {}
    if quality.get("reference"):
        raise UsageError(
            f"{path}: its quality is held against the checkpoint {quality['reference']}, which no digest names",
            hint="give the recipe with --recipe",
        )
    if (retrieval := (plain.get("validation") or {}).get("retrieval")) is not None:
        retrieval["data"] = _queries(path, retrieval)
    here = {documents.digest(text): text for text in texts}

    def placed(value: Any) -> Any:
        if inputs.is_content(value):
            known = here.get(value["sha256"]) or inputs.find(value["sha256"], value["name"])
            if known is None:
                raise _unknown(path, value["name"], value["sha256"], "--text")
            return str(folders.followed(known))
        if isinstance(value, dict):
            return {key: placed(each) for key, each in value.items()}
        return [placed(each) for each in value] if isinstance(value, list) else value

    file = folder / "recipe.yaml"
    file.write_text(json.dumps(placed(plain)), encoding="utf-8")  # JSON is YAML
    return Recipe.load(file)


def _queries(path: Path, retrieval: dict[str, Any]) -> str:
    """Say what the queries and passages are that a recipe records by their digest: those that ship, or unknown ones."""
    shipped = RetrievalSpec.model_validate({**retrieval, "data": SHIPPED})
    if shipped.digest != retrieval.get("data"):
        raise UsageError(
            f"{path}: its retrieval was measured on queries and passages of a folder that nothing names",
            hint="give the recipe with --recipe",
        )
    return SHIPPED


def _unknown(path: Path, name: str, digest: str, option: str) -> UsageError:
    return UsageError(
        f"{path}: was built with {name} ({digest[:12]}…), which is none of those given, and no build on this machine "
        "has remembered where it lies",
        hint=f"give it with {option}, or the recipe with --recipe",
    )


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
