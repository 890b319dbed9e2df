"""Budgets of lossy passes that were exceeded: by how much, in which layers, and what becomes of the build.

No proof of a budget ends a build: the passes after it are proven, too, and quality is measured, so that one message has
every limit that does not hold, and the `--set` values with which all of them would. `settle` decides.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from llmforge.base import folders
from llmforge.base.errors import BudgetExceeded
from llmforge.compile import attribution
from llmforge.compile.state import CompileState, Excess
from llmforge.gates import relaxed
from llmforge.gates.decision import Verdict
from llmforge.recipe import GateSpec, Recipe
from llmforge.runtime.config import physical_cores


def exceeded(state: CompileState) -> list[Excess]:
    """List the passes that cost more than their budgets, once their proofs have ended, which this waits for."""
    proven = enumerate(run.proven() for run in state.runs)
    return [Excess(number, done, stays=state.stays.get(number)) for number, done in proven if done.excess is not None]


def attributed(state: CompileState, excess: Excess) -> Excess:
    """Tell in which layers it was lost, where that takes no longer than some runs of a graph."""
    lossy = next((each for each in state.lossy_steps if each.number == excess.number), None)
    if lossy is None or state.checkpoint.encoding is not None:  # layers of encoders are not told apart
        return excess
    state.clock.stage(f"Attribute the excess of {excess.done.name}")
    shares = attribution.layer_shares(
        lossy,
        state.texts.of_documents(),
        state.clock,
        threads=state.recipe.engine.threads or physical_cores(),
    )
    return replace(excess, layers=shares)


def settle(state: CompileState) -> None:
    """Decide what becomes of a build whose passes exceed their budgets; all proofs have ended, the gates are judged.

    Raises:
        BudgetExceeded: it is not to be published so.
    """
    if state.excesses and not state.checked.publish_failed:
        state.clock.stage("Check budgets")
        raise BudgetExceeded(_said(state), settings=_settings(state), hint=_hint(state))


def _said(state: CompileState) -> list[str]:
    count = len(state.excesses)
    head = "a pass exceeds its budget" if count == 1 else f"{count} passes exceed their budgets"
    gates = [f"gate {each.explanation}" for each in state.gates if each.verdict is not Verdict.PASS and each.measured]
    return [f"{head}:", *map(str, state.excesses), *gates]


def _settings(state: CompileState) -> tuple[str, ...]:
    """Write the values that all passes and gates would keep, as `--set` takes them.

    Not among them is a pass that the recipe has twice, for `--set` cannot name it, and a gate that no limit decides.
    """
    recipe = state.recipe
    names = [each.name for each in recipe.passes]
    of_passes = [
        f"passes.{each.done.name}.budget.kld_mean={each.budget:g}"
        for each in state.excesses
        if names.count(each.done.name) == 1
    ]
    judge = partial(state.evidence.judge, engine=state.engine_record, checkpoint=state.facts.checkpoint)
    specs = {name: GateSpec.model_validate(spec) for name, spec in state.facts.recipe["gates"].items()}
    moved = relaxed.gates(specs, state.gates, judge)
    return (*of_passes, *relaxed.settings(specs, moved))


def _hint(state: CompileState) -> str:
    recipe = state.recipe
    again = _command(recipe, state, _settings(state))
    if state.checkpoint.encoding is not None:
        return f"to lose as much as was measured: {again}\nto publish it as it is, with verdict FAIL: --publish-failed"
    return (
        f"to lose as much as was measured: {again}\n"
        "to lose less: more bits (`retreat` gives them to the worst layers), or "
        f"`llmforge bisect {shlex.quote(str(recipe.path))}`; "
        "to publish it as it is, with verdict FAIL: --publish-failed"
    )


def _command(recipe: Recipe, state: CompileState, settings: Sequence[str]) -> str:
    """Write the command that builds `recipe` with other values; its cache has all but their proofs."""
    words = ["llmforge", "build", str(recipe.path)]
    if state.checked.out.absolute() != folders.artifacts().absolute():
        words += ["--out", str(state.checked.out)]
    for setting in (*recipe.overrides, *settings):
        words += ["--set", setting]
    return shlex.join(words)
