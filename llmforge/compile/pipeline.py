"""Recipe in, published artifact out: the picture of the whole.

    recipe → checkpoint → trace → passes → engine → validation → gates → artifact

Each stage is a function of a module in `llmforge.compile.stages`; it reads what the stages before it have added to the
state of the build (`llmforge.compile.state`), and adds its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from llmforge import artifact
from llmforge.artifact import Hashing
from llmforge.base.progress import Progress, Silent
from llmforge.cache import Cache
from llmforge.compile import budgets, drafts, evidence, reuse
from llmforge.compile.evidence import Clock
from llmforge.compile.overlap import Overlap
from llmforge.compile.preflight import CheckedRecipe
from llmforge.compile.stages.artifact import publish
from llmforge.compile.stages.checkpoint import open_checkpoint
from llmforge.compile.stages.engine import build_engine
from llmforge.compile.stages.gates import judge_gates, record_facts
from llmforge.compile.stages.passes import run_passes
from llmforge.compile.stages.recipe import check_recipe
from llmforge.compile.stages.trace import trace_model
from llmforge.compile.stages.validation import validate
from llmforge.compile.state import BuildResult, CompileState
from llmforge.metrics.agreement import RuntimeName
from llmforge.recipe import Recipe


def build(
    recipe: Recipe,
    out: Path,
    progress: Progress | None = None,
    cache: Callable[[], Cache] | None = None,
    *,
    measure: bool = True,
    pythons: Mapping[RuntimeName, Path] | None = None,
    checked: CheckedRecipe | None = None,
    overlap: Overlap | None = None,
) -> BuildResult:
    """Build what `recipe` describes and publish it as `out/<name>/<version>`; without `measure` nothing is measured.

    What an earlier build, or one that was killed, left in the `cache` is not computed again; None: nothing is reused.
    Other runtimes that the recipe names are imported by the Pythons of `pythons`, else by this one. `checked` is the
    recipe where it was checked already, and `overlap` has what was started for this build before; it is ended.
    A failed gate does not stop publication: the artifact says so itself, and so does `gates.verdict`. Nor do passes
    that exceed their budgets, where `checked` says so.

    Raises:
        ForgeError: anything that keeps the artifact from being built; nothing that looks finished is left behind.
    """
    clock = Clock(progress or Silent())
    clock.stage("Check recipe, target and data")
    checked = checked or check_recipe(recipe, out)
    runtimes = recipe.validation.runtimes
    others = evidence.interpreters(recipe, checked.target, pythons or {}, runtimes) if measure else ()
    overlap = overlap or Overlap()
    frontend = overlap.chosen_frontend(recipe, checked.steps, measure=measure)

    def build_draft(smaller: Recipe, folder: Path) -> Path:
        return build(smaller, folder, progress, cache, measure=False).path

    with (
        drafts.built(recipe, build_draft) as draft,
        artifact.staging(out, recipe.name) as staging,
        overlap,
        Hashing(staging) as hashing,
    ):
        state = CompileState(staging, checked.target, clock, hashing, draft=draft)
        state.checked, state.interpreters, state.overlap = checked, others, overlap
        with reuse.opened(cache, staging, clock, frontend) as state.reuse, overlap.proofs:
            open_checkpoint(state)
            trace_model(state)
            run_passes(state)
            build_engine(state)
            validate(state, measure=measure)
        overlap.frontend.end()
        record_facts(state)
        judge_gates(state)
        budgets.settle(state)
        return publish(state)
