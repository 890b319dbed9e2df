"""Make the graphs of a build again, from its recipe and what the build cache has of it, without proofs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from llmforge import passes, targets
from llmforge.artifact import Artifact
from llmforge.base.errors import InputError, UnsupportedError
from llmforge.base.progress import Progress
from llmforge.cache import Cache
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.adapters import Adapter
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile import chat_template, dry_run, finishing, lock, preflight, retreats, reuse
from llmforge.compile.answered import answering
from llmforge.compile.cached_passes import PassChain
from llmforge.compile.lock import StageDigests
from llmforge.compile.lossy_parts import LossyStep
from llmforge.compile.stages.passes import calibrate
from llmforge.compile.texts import BuildTexts
from llmforge.ir.scratch import Scratch
from llmforge.recipe import Recipe
from llmforge.rewrite import pass_base
from llmforge.rewrite.pass_base import Context, Numerics
from llmforge.runtime.config import physical_cores
from llmforge.verification.promises import Promises


@dataclass(frozen=True, eq=False)
class Rebuilt:
    """The lossy passes of a build, with the graphs before and behind each, and the text that it was measured on."""

    checkpoint: Checkpoint
    lossy: Sequence[LossyStep]
    windows: Sequence[TokenWindow]
    stages: StageDigests


@contextmanager
def rebuilt(
    recipe: Recipe, cache: Callable[[], Cache] | None, progress: Progress, built: Artifact | None = None
) -> Iterator[Rebuilt]:
    """Make the graphs of `recipe`, as in the artifact `built` of it; they are there as long as the context lasts.

    Raises:
        ForgeError: as a build of the recipe.
        UnsupportedError: its checkpoint embeds or scores: what is lost is measured on tokens that are predicted.
    """
    progress.stage("Check recipe, target and data")
    steps, target = recipe.instantiate(passes.ALL), targets.find(recipe.target)
    preflight.check(recipe)
    preflight.check_source(recipe, steps)
    if built is not None:
        steps = retreats.as_built(steps, built.manifest.recipe)
    with TemporaryDirectory() as folder, reuse.opened(cache, Path(folder), progress) as kept:
        checkpoint = Checkpoint.located(*recipe.origin())
        if (encoding := checkpoint.encoding) is not None:
            raise UnsupportedError(
                f"{checkpoint.name} is {encoding.title}: what its layers lose is not told apart",
                hint="the report says of each lossy pass what it lost (Passes), and of all what is found (Retrieval); "
                "build with fewer of them, and compare: llmforge diff A B",
            )
        chat_template.choose(recipe, checkpoint)
        kept.configure(checkpoint, progress)
        model = kept.trace(checkpoint, progress)
        stages, lossy = StageDigests(), []
        stages.graph(lock.TRACE, model)
        demands = [demand for step in steps for demand in step.demands()]
        read = BuildTexts(recipe, checkpoint, demands, answering(kept), progress)
        calibration = calibrate(read, model, demands, kept, progress)
        stages.statistics(calibration.statistics)
        chosen = [window.ids for window in read.budget_windows()]
        promised = Promises.of(checkpoint, recipe.engine.max_context, recipe.engine.max_batch)
        apart = tuple(map(Adapter.open, recipe.apart))
        threads = recipe.engine.threads or physical_cores()
        chain = PassChain.of(kept, checkpoint, calibration.key, promised, chosen, threads, apart)
        scratch = Scratch(Path(folder))
        for number, step in enumerate(steps):
            progress.stage(f"Pass {step.name}")
            wanted = calibration.statistics if step.demands() else None
            context = Context(target, wanted, scratch, stored=dry_run.stored_codes(checkpoint), adapters=apart)
            before = model.clone()
            there = {name: value.const_value for name, value in model.graph.initializers.items()}
            link = chain.step(step, model)
            changes = pass_base.run(step, model, context)
            link.keep_tensors(model, there)
            stages.graph(step.name, model)
            if changes and step.numerics is Numerics.LOSSY:
                lossy.append(LossyStep(number, step, before, model.clone(), context))
        yield Rebuilt(checkpoint, lossy, read.of_documents(), stages)


def check_recipe(opened: Artifact, recipe: Recipe) -> None:
    """Refuse an artifact whose graphs `recipe` does not give.

    Raises:
        InputError: the artifact was changed, or was built without a lock.
        UsageError: the recipe, or its checkpoint, is not the artifact's.
    """
    opened.verify()
    lock.read(opened)
    finishing.check_recipe(recipe, opened)


def check_stages(opened: Artifact, found: StageDigests) -> None:
    """Refuse graphs that are not those that the artifact was built of.

    Raises:
        InputError: one differs, or the artifact has no lock.
    """
    written = {stage.name: stage.sha256 for stage in lock.read(opened).stages}
    wrong = [stage.name for stage in found.done if written.get(stage.name) != stage.sha256]
    if wrong:
        raise InputError(
            f"{opened.path}: was built of other graphs than its recipe gives here; the first that differs is that of "
            f"stage {wrong[0]}",
            hint="`llmforge reproduce` says what differs in code, packages and machine",
        )
