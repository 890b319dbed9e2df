"""The stage of validation: every proof has ended, and the engine is measured as it ships."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmforge.backends import BACKENDS, engines
from llmforge.compile import attribution, budgets, evidence, export_proxy
from llmforge.compile.evidence import Evidence, Measurement
from llmforge.compile.state import CompileState
from llmforge.compile.tasks import BuildCacheAnswers
from llmforge.gates import release
from llmforge.metrics.attribution import Attribution
from llmforge.runtime.config import physical_cores


def validate(state: CompileState, *, measure: bool) -> None:
    """Wait for the proofs, and measure what the recipe asks for, unless this build is not to `measure`."""
    state.overlap.proofs.finish(state.clock)
    state.excesses = budgets.exceeded(state)
    recipe = state.recipe
    state.evidence = Evidence(None, None, None, evidence.NOT_ASKED)
    if measure:
        state.evidence = _measure(state)
        state.attribution = _attribute(state)
    state.excesses = [budgets.attributed(state, each) for each in state.excesses]
    if recipe.validation.is_empty:
        state.notes.append("nothing was measured: the recipe asks for no validation")
    if release.is_relative(recipe.gates):
        state.notes.append("limits against an earlier artifact are decided by `llmforge gate`, not by this build")
    state.notes += state.evidence.notes


def _measure(state: CompileState) -> Evidence:
    recipe, windows, threads = state.recipe, state.windows, state.recipe.engine.threads or physical_cores()
    spec, interpreters = recipe.validation, state.interpreters
    if (
        state.excesses and not state.checked.publish_failed
    ):  # the message has quality beside the budgets; nothing else ships
        spec, interpreters = spec.model_copy(update={"latency": None, "tasks": None, "behaviour": None}), ()
    with _proxy(state) as proxy:
        asked = Measurement(
            state.staging,
            state.engine,
            state.read,
            spec=spec,
            target=state.target,
            checkpoint=state.checkpoint,
            windows=windows,
            threads=threads,
            ranks=engines.devices(state.target, recipe.engine),
            keep=lambda original, baseline: state.reuse.baseline(original, windows, threads, baseline, state.clock),
            interpreters=interpreters,
            answers=BuildCacheAnswers(state.reuse),
            proxy=proxy,
            adapters=recipe.apart,
        )
        return evidence.measure(asked, state.clock)


@contextmanager
def _proxy(state: CompileState) -> Iterator[Path | None]:
    """Build an engine of llmforge's own for quality to be measured on, where the artifact is for servers of others."""
    engine = state.recipe.engine
    if state.recipe.validation.quality is None or BACKENDS[engine.backend].export_format is None:
        yield None
        return
    folder = state.staging / "stand-in"
    state.clock.stage("Build stand-in")
    export_proxy.build(state.model, engine, state.checkpoint, folder, state.clock)
    yield folder
    shutil.rmtree(folder)


def _attribute(state: CompileState) -> Attribution | None:
    """Tell what each lossy pass cost and gained, where the recipe asks for it."""
    if not state.lossy_steps or not state.recipe.validation.attribution:
        return None
    recipe, checkpoint = state.recipe, state.checkpoint
    return attribution.measure(
        state.traced,
        state.lossy_steps,
        state.texts.of_documents(),
        state.clock,
        memory=attribution.memory_of(
            state.target,
            state.evidence.latency,
            checkpoint.geometry.layers,
            engines.devices(state.target, recipe.engine),
        ),
        context=max(len(window.ids) for window in state.windows),
        threads=recipe.engine.threads or physical_cores(),
        vocabulary=checkpoint.geometry.vocabulary,
    )
