"""`llmforge.build`: a recipe in, a published artifact out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmforge.base import extras, folders
from llmforge.base.progress import Progress

if TYPE_CHECKING:
    from llmforge.gates.decision import Verdict
    from llmforge.gates.records import Report
    from llmforge.recipe import Recipe


@dataclass(frozen=True)
class Built:
    """A published artifact. A notebook shows its report."""

    path: Path
    report: Report

    @property
    def verdict(self) -> Verdict:
        """How its gates ended: pass, fail or inconclusive, as that of an engine that is not built yet."""
        return self.report.verdict

    def _repr_html_(self) -> str:
        from llmforge.api.pages import framed
        from llmforge.report import render

        return framed(render.to_html(self.report))


def build(
    recipe: str | Path | Recipe,
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    cached: bool = True,
    progress: Progress | None = None,
) -> Built:
    """Build, validate and publish what a recipe describes, as `llmforge build` does.

    `overrides` are KEY=VALUE, as --set takes them. Without `cached` nothing of earlier builds is used or kept. A failed
    gate raises nothing: look at `Built.verdict`. `progress` is told of each stage.

    Raises:
        llmforge.base.errors.ForgeError: what keeps the artifact from being built; `message`, `hint` and `exit_code`
            are those of the command. Nothing that looks finished is left behind.
    """
    extras.require("build")
    from llmforge import cache
    from llmforge.compile import pipeline
    from llmforge.recipe import Recipe

    if isinstance(recipe, str | Path):
        recipe = Recipe.load(Path(recipe), tuple(overrides))
    elif overrides:
        raise ValueError("overrides go with the path of a recipe")
    store = partial(cache.Cache, cache.default_folder(), cache.default_size()) if cached else None
    result = pipeline.build(recipe, folders.artifacts(out), progress, store)
    return Built(result.path, result.report)
