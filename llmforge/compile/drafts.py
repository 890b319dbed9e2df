"""What drafts tokens: a smaller model, built as any other, or a head. Its engine lies in that of the artifact."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmforge import passes, targets
from llmforge.backends import BACKENDS
from llmforge.base.errors import InputError, UnsupportedError
from llmforge.compile import heads
from llmforge.compile.heads import Head
from llmforge.recipe import Recipe, ServingSpec
from llmforge.runtime.config import DRAFT_FOLDER, SpeculationFacts


def facts_of(serving: ServingSpec) -> SpeculationFacts | None:
    """Say what the engine is told of speculation; None: nothing."""
    return None if serving.draft is None else SpeculationFacts(serving.draft.method, serving.draft.max_tokens)


@dataclass(frozen=True)
class Draft:
    """A smaller model that was built: its artifact, and what a reader of the report should know of it."""

    artifact: Path
    note: str

    def copy_into(self, staging: Path) -> None:
        """Put its engine into that of the artifact in `staging`.

        Raises:
            InputError: its vocabulary is another than that of the model which it drafts for.
        """
        from llmforge.serving.prompts import read_tokenizer  # brings ONNX Runtime

        own, other = (read_tokenizer(each / "tokenizer" / "tokenizer.json") for each in (self.artifact, staging))
        if own.get_vocab() != other.get_vocab():
            raise InputError(
                "serving.speculation: the draft has a different vocabulary",
                hint="a draft needs the tokenizer of the model that it drafts for",
            )
        shutil.copytree(self.artifact / "engine", staging / "engine" / DRAFT_FOLDER)


def recipe_of(recipe: Recipe) -> Recipe | None:
    """Give the recipe of the model that drafts for what `recipe` builds; None: none does.

    It is the one that `serving.speculation` names, or `recipe` itself, of the other checkpoint: without what belongs to
    its own, without gates, and of what is measured with the text of budgets alone. Context and rows are those of the
    model that it drafts for; its cache has slots.

    Raises:
        RecipeError: it does not validate.
        UnsupportedError: the engine is for servers of others, or is built elsewhere.
    """
    spec = recipe.serving.draft
    if spec is None or spec.method != "draft":
        return None
    _require_own_engine(recipe, "a draft")
    path, given = (recipe.path, recipe.overrides) if spec.recipe is None else (spec.recipe, ())
    changes = {
        "serving.speculation": "off",
        "serving.prefixes": None,
        "engine.max_context": recipe.engine.max_context,
        "engine.max_batch": recipe.engine.max_batch,
        **({} if recipe.engine.kv_cache is None else {"engine.kv_cache": "slots"}),
        **({} if spec.checkpoint is None else {"checkpoint": str(spec.checkpoint), "revision": None}),
        **(_without_checkpoint(recipe) if spec.recipe is None else {}),
    }
    return Recipe.load(path, [*given, *(f"{key}={json.dumps(value)}" for key, value in changes.items())])


def _without_checkpoint(recipe: Recipe) -> dict[str, Any]:
    """Say what of `recipe` is set for another checkpoint: no adapters, and of what is measured, the text of budgets."""
    quality = recipe.validation.quality
    text = None if quality is None else {**quality.model_dump(mode="json", by_alias=True), "reference": None}
    measured = {"validation": {"quality": text}, "gates": {}}
    if not recipe.adapters:
        return measured
    adding = {cls.name for cls in passes.ALL if cls.adds_adapters}
    kept = [{spec.name: spec.options} for spec in recipe.passes if spec.name not in adding]
    return {**measured, "adapters": [], "passes": kept}


def _require_own_engine(recipe: Recipe, what: str) -> None:
    """Return if the engine of `recipe` is one of ours, and is built here."""
    where = recipe.where("serving", "speculation")
    if BACKENDS[recipe.engine.backend].export_format is not None:
        raise UnsupportedError(
            f"{where}: {what} ships with an engine of llmforge's own, and {recipe.engine.backend} is for servers of "
            "others",
            hint="remove `speculation`, or choose another backend",
        )
    if recipe.engine.deferred:
        raise UnsupportedError(
            f"{where}: {what} ships with an engine that is built here, and this one is deferred",
            hint="remove `deferred`, or --defer",
        )


def _require_heads(recipe: Recipe) -> None:
    """Return if the engine of `recipe` can give hidden states."""
    _require_own_engine(recipe, "an EAGLE-3 head")
    engine = recipe.engine
    if engine.backend != "onnxruntime" or targets.find(recipe.target).kind != "cpu" or engine.tensor_parallel > 1:
        raise UnsupportedError(
            f"{recipe.where('serving', 'speculation')}: EAGLE-3 heads are compiled for ONNX Runtime on one CPU",
            hint="use `method: prompt-lookup` or `method: draft`",
        )


@contextmanager
def built(recipe: Recipe, build: Callable[[Recipe, Path], Path]) -> Iterator[Draft | Head | None]:
    """Have the model or the head that drafts for what `recipe` builds until the `with` block ends; None: none does.

    `build` makes an artifact of a recipe in a folder, and measures nothing.
    """
    if recipe.serving.draft is not None and recipe.serving.draft.method == "eagle3":
        _require_heads(recipe)
        with tempfile.TemporaryDirectory(prefix="llmforge-head-") as folder:
            yield heads.build(recipe, Path(folder))
        return
    wanted = recipe_of(recipe)
    if wanted is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="llmforge-draft-") as folder:
        path = build(wanted, Path(folder))
        yield Draft(path, f"speculation: drafts of {wanted.checkpoint.name}, engine {path.name}")
