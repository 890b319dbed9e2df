"""Try a recipe that is being written on the traced graph of its checkpoint: what it could not do is left out of it."""

from __future__ import annotations

from llmforge import passes, targets
from llmforge.base.errors import UnsupportedError
from llmforge.base.progress import Progress
from llmforge.cache import Cache
from llmforge.checkpoint import Checkpoint
from llmforge.compile import dry_run
from llmforge.compile.reuse import Reuse
from llmforge.compile.stages.engine import placed
from llmforge.compile.stages.trace import planned
from llmforge.planning.choice import Tried
from llmforge.recipe import Recipe
from llmforge.rewrite import pruning


def run(recipe: Recipe, *, cache: Cache, progress: Progress) -> Tried:
    """Trace the checkpoint of `recipe`, and run its passes dry; the build takes the graph from the `cache`.

    Raises:
        UnsupportedError: no recipe with these passes builds.
        CheckpointError: the folder is no checkpoint: a file is missing or damaged.
        EnvironmentLacks: what writes the engine is not installed.
    """
    checkpoint, target = Checkpoint.open(recipe.checkpoint), targets.find(recipe.target)
    reuse = Reuse(cache)
    reuse.configure(checkpoint, progress)
    model = reuse.trace(checkpoint, progress)
    progress.stage("Check passes")
    steps = recipe.instantiate(passes.ALL)
    demands = [pruning.bound(demand, model) for step in steps for demand in step.demands()]
    try:
        calibrated = planned(checkpoint, model, demands)
    except UnsupportedError as error:
        return Tried(uncalibrated=error.message.replace(str(checkpoint.path), "the model"))
    idle: dict[str, str] = {}
    dry_run.run(
        model,
        steps,
        target=target,
        spec=placed(recipe, target)[0],
        checkpoint=checkpoint,
        calibrated=calibrated,
        idle=idle,
    )
    return Tried(idle)
