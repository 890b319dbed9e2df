"""Finish an artifact whose engine is pending: build the engine on the host that can, and publish both as a new version.

Quality, and latency against the checkpoint, are measured where the recipe is given again: an artifact names
checkpoint and texts, and does not hold them.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from llmforge import artifact, passes, targets
from llmforge.artifact import Artifact, Hashing
from llmforge.backends import engines, pending
from llmforge.backends.engines import BuiltEngine
from llmforge.backends.pending import Pending
from llmforge.base import hashed_files
from llmforge.base.errors import UsageError
from llmforge.base.progress import Progress, Silent
from llmforge.checkpoint import Checkpoint
from llmforge.compile import chat_template, drafts, evidence, lock, prefixes, retreats, written_files
from llmforge.compile.answered import answering
from llmforge.compile.evidence import Clock, Evidence, Measurement
from llmforge.compile.stages.artifact import publish
from llmforge.compile.stages.gates import judge_gates
from llmforge.compile.state import BuildResult, CompileState, ReportFacts
from llmforge.compile.texts import BuildTexts
from llmforge.compile.written_files import Expected
from llmforge.gates import confirmed, records
from llmforge.measure import machine
from llmforge.measure.footprint import BytesRead
from llmforge.recipe import Recipe, ServingSpec
from llmforge.runtime.config import physical_cores
from llmforge.targets import Target
from llmforge.triton import repository


def finish(path: Path, recipe: Recipe | None = None, progress: Progress | None = None) -> BuildResult:
    """Build the engine that is pending in the artifact at `path`, and publish it as another version.

    `recipe` is the one that the artifact was built by; its checkpoint and texts are read for what is measured.

    Raises:
        InputError: no engine is pending there, or files or verdict of the artifact were changed.
        UsageError: `recipe` is another one, or its checkpoint is another.
        EnvironmentLacks: this machine has not what builds the engine.
        ForgeError: anything else that keeps it from being built; nothing that looks finished is left behind.
    """
    progress = clock = Clock(progress or Silent())
    progress.stage("Check artifact and host")
    opened = confirmed.open_artifact(path)
    manifest, waiting = opened.manifest, pending.read(opened.path / "engine")
    target = targets.load(waiting.target)
    builder = engines.for_target(waiting.backend, target)
    builder.require_host(target, waiting.spec)
    if recipe is not None:
        check_recipe(recipe, opened)
    read = _identities(opened)
    opened.verify()
    parent = opened.path.parent  # one that was moved out of `<name>` gets its new version in the same folder
    out = parent.parent if parent.name == manifest.name else parent
    with artifact.staging(out, manifest.name) as staging, Hashing(staging) as hashing:
        progress.stage("Build engine")
        shutil.copytree(opened.path / "tokenizer", staging / "tokenizer", copy_function=shutil.copyfile)
        serving = ServingSpec.published(manifest.recipe, str(opened.path))
        request = waiting.request(opened.path / "engine", staging / "engine", target, progress)
        engine = builder.build(replace(request, speculation=drafts.facts_of(serving)))
        made_of = {"checkpoint": f"{manifest.recipe.get('checkpoint')} {manifest.checkpoint}"}
        model = repository.TritonModel(manifest.name, target.kind, serving, engine.config, made_of)
        repository.write(model, staging / repository.FOLDER / manifest.name)
        prefix_notes = prefixes.write(staging, serving, target)
        hashing.begin_content()
        if _identities(opened) != read:  # its bytes tell: a link to a file moves its change time, too
            opened.verify()
        written_files.require_written(staging, engine.written, hashing)
        written_files.require_right(staging, Expected.of_pending(manifest, waiting), engine.config, model)
        found = measure(waiting, staging, engine, target, recipe, progress)
        before = records.read(opened)
        built_from = f"engine built from version {manifest.version}, which was written on {before.machine.cpu}"
        locked = lock.read(opened)
        here = {"machine": machine.describe(), "packages": lock.packages(), "code": lock.code()}
        stages = tuple(stage for stage in locked.stages if stage.name != lock.ENGINE)
        state = CompileState(staging, target, clock, hashing)
        # Passes and calibration stay.
        state.facts = ReportFacts.of(before, (built_from, *engine.notes, *prefix_notes, *found.notes))
        state.engine, state.evidence = engine, found
        state.lock = locked.model_copy(update={**here, "stages": stages})
        judge_gates(state)
        return publish(state)


def _identities(opened: Artifact) -> list[str]:
    """Identify the files that an engine is built of, and those that it gets beside it."""
    read = [opened.path / path for path in sorted(opened.manifest.files)]
    return [hashed_files.identity(file.lstat()) if file.exists() else "missing" for file in read]


def check_recipe(recipe: Recipe, opened: Artifact) -> None:
    """Refuse a recipe, or a checkpoint, that the artifact was not built by."""
    written = opened.manifest.recipe
    resolved = recipe.resolved(retreats.as_built(recipe.instantiate(passes.ALL), written))
    if different := sorted(key for key in {*resolved, *written} if resolved.get(key) != written.get(key)):
        raise UsageError(
            f"{recipe.path}: does not match {opened.path}: {', '.join(different)} differ",
            hint="give the recipe that it was built from, with the values of --set, or none",
        )
    digest = Checkpoint.open(*recipe.origin()).digest
    if digest != opened.manifest.checkpoint:
        raise UsageError(
            f"{recipe.checkpoint}: its digest is {digest}, but the artifact was built from {opened.manifest.checkpoint}"
        )


def measure(
    waiting: Pending, staging: Path, engine: BuiltEngine, target: Target, recipe: Recipe | None, progress: Progress
) -> Evidence:
    """Measure the engine as it ships, where this machine runs it and the recipe says against what."""
    if recipe is None:
        missing = "no recipe was given to measure it with"
        return Evidence(None, None, None, engines.why_not_run(target) or missing)
    checkpoint = Checkpoint.open(*recipe.origin())
    chat_template.choose(recipe, checkpoint)
    asked = Measurement(
        staging,
        engine,
        BytesRead(
            waiting.weight_bytes_per_token,
            waiting.kv_bytes_per_token,
            waiting.multiply_adds_per_token,
            waiting.head_multiply_adds,
        ),
        spec=recipe.validation,
        target=target,
        checkpoint=checkpoint,
        windows=BuildTexts(recipe, checkpoint, (), answering(), progress).evaluation,
        threads=physical_cores(),
        ranks=engines.devices(target, waiting.spec),
        adapters=recipe.apart,
    )
    return evidence.measure(asked, progress)
