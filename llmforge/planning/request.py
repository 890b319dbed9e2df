"""From what a person asks, a recipe or a checkpoint and options, to plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from llmforge import targets
from llmforge.backends import BACKENDS, BackendName
from llmforge.backends.record import Dtype
from llmforge.base.errors import UnsupportedError, UsageError
from llmforge.checkpoint import CONFIG, read_settings
from llmforge.checkpoint.adapters import Adapter
from llmforge.planning import (
    advice,
    building,
    config,
    deployment,
    families,
    pruning,
    scheme,
    source,
)
from llmforge.planning.adapters import Adapters
from llmforge.planning.building import BuildCost
from llmforge.planning.render import Planned, Refused
from llmforge.planning.roofline import Workload
from llmforge.planning.scheme import DtypeScheme, Wanted
from llmforge.planning.shape import Shape
from llmforge.quantization.statistics import PruningDemand
from llmforge.recipe import Recipe
from llmforge.targets import Target

DEFAULT = Workload()


@dataclass(frozen=True)
class Request:
    """What a person asks, or a recipe says; what is None is the recipe's, else a default."""

    targets: tuple[str, ...] = ()
    backend: BackendName | None = None
    batch: int | None = None
    prompt: int | None = None
    output: int | None = None
    context: int | None = None
    wanted: Wanted = field(default_factory=Wanted)
    ranks: int | None = None
    usd_per_hour: float | None = None
    calibration_tokens: int = 0  # of a recipe
    stored: str | None = None  # what becomes of a checkpoint that comes quantized
    adapters: Adapters = field(default_factory=Adapters)  # of a recipe
    slots: str | None = None  # why a recipe has a slot for each sequence
    pruned: PruningDemand | None = None  # of a recipe
    passes: tuple[str, ...] = ()  # of a recipe


def answer(
    what: Path, asked: Request, measured: Callable[[Target], Target | None] = lambda target: None
) -> list[Planned | Refused]:
    """Plan the recipe or the checkpoint at `what` on every target that is asked for, or that of the recipe, or here.

    Of several targets, those that cannot be planned are `Refused`; if none can, the first one's error is raised.
    `measured` may give the figures of a target that has none, as those of CPUs.

    Raises:
        UsageError: no such target, or options that contradict each other.
        CheckpointError: the configuration is not usable.
        UnsupportedError: an engine does not run on a target, or does not take a dtype there.
    """
    intent, folder = Request(), what
    if targets.is_file(what.name):
        recipe = Recipe.load(what)
        intent, folder = _intent(recipe), recipe.checkpoint
    found = [targets.find(name) for name in asked.targets or intent.targets or (targets.LOCAL,)]
    shape = config.read(folder)
    if intent.stored is None:
        own = (folder.parent if folder.name == CONFIG else folder).absolute()
        intent = replace(intent, stored=source.note(read_settings(own), own, ()))
    workload = _workload(shape, asked, intent)
    answers: list[Planned | Refused] = []
    for target in found:
        figures = measured(target) if target.bandwidth_gbs is None else None
        try:
            answers.append(_planned(shape, figures or target, workload, asked, intent))
        except (UnsupportedError, UsageError) as error:
            if len(found) == 1:
                raise
            answers.append(Refused(target.name, error))
    if all(isinstance(each, Refused) for each in answers):
        raise next(each.error for each in answers if isinstance(each, Refused))
    return answers


def of_target(shape: Shape, target: Target, asked: Request) -> Planned:
    """Plan `shape` on one target, by what is `asked` alone.

    Raises:
        UsageError, UnsupportedError: as `answer`.
    """
    said = Request(calibration_tokens=asked.calibration_tokens)
    return _planned(shape, target, _workload(shape, asked, said), asked, said)


def of_recipe(recipe: Recipe) -> Planned | None:
    """Plan what a recipe, with its overrides, asks for; None where its target has no figures, or it is not planned.

    Raises:
        CheckpointError: the configuration is not usable.
    """
    intent, shape = _intent(recipe), config.read(recipe.checkpoint)
    try:
        return _planned(shape, targets.find(recipe.target), _workload(shape, Request(), intent), Request(), intent)
    except (UnsupportedError, UsageError):  # the build itself says better what is wrong
        return None


def build_of(recipe: Recipe) -> BuildCost | None:
    """Predict what the build of a recipe takes; None where its configuration alone does not tell, or is not planned.

    Raises:
        CheckpointError: the configuration is not usable.
    """
    settings = read_settings(recipe.checkpoint.absolute())
    intent, target = _intent(recipe), targets.find(recipe.target)
    try:
        shape = families.shape(recipe.checkpoint.name, settings)
        chosen = scheme.choose(target, recipe.engine.backend, shape.dtype, intent.wanted)
    except (families.Unsaid, UnsupportedError, UsageError):  # the build itself says better what is wrong
        return None
    build = building.predict(shape, chosen, recipe.engine.backend, calibration_tokens=intent.calibration_tokens)
    return _with_adapters(build, intent.adapters, chosen)


def _with_adapters(build: BuildCost, adapters: Adapters, chosen: DtypeScheme) -> BuildCost:
    return replace(build, disk_bytes=build.disk_bytes + adapters.bytes_apart(chosen))


def _planned(shape: Shape, target: Target, workload: Workload, asked: Request, intent: Request) -> Planned:
    wanted = intent.backend or target.engines[0]
    anywhere = wanted in target.engines or BACKENDS[wanted].export_format is not None
    backend = asked.backend or (wanted if anywhere else target.engines[0])
    said = intent.wanted if asked.wanted.kv is None else replace(intent.wanted, cache=None)
    chosen = scheme.choose(target, backend, shape.dtype, asked.wanted.or_else(said))
    price, slots = asked.usd_per_hour, intent.slots
    ranks = asked.ranks or (target.kind == "gpu" and intent.ranks) or 1  # ranks on a CPU share what it has
    made = deployment.make(shape, target, backend, chosen, workload, ranks=ranks, usd_per_hour=price, slots=slots)
    build = building.predict(shape, chosen, backend, calibration_tokens=intent.calibration_tokens)
    told = advice.advise(made)
    noted = [] if intent.stored is None else [intent.stored]
    if intent.pruned is not None:
        noted.append(pruning.note(intent.pruned, intent.passes, shape, target, backend))
    made = replace(made, notes=(*noted, *made.notes, *intent.adapters.notes(chosen, made.asked.decode.step.bytes)))
    return Planned(made, _with_adapters(build, intent.adapters, chosen), told)


def _workload(shape: Shape, asked: Request, intent: Request) -> Workload:
    """Fill in prompt and answer: the asked context, the recipe's, the default; at most the model's."""
    if asked.context is not None and asked.prompt is not None and asked.output is not None:
        raise UsageError("--context is the sum of --prompt and --output; give at most two of them")
    given = asked.context or intent.context
    limit = min((each for each in (given, shape.context) if each is not None), default=DEFAULT.context)
    if asked.context is not None:
        output = asked.output or (
            asked.context - asked.prompt if asked.prompt else min(DEFAULT.output, limit // 4 or 1)
        )
        prompt = asked.prompt or asked.context - output
    else:
        output = asked.output or min(DEFAULT.output, max(limit // 4, 1))
        prompt = asked.prompt or min(DEFAULT.prompt, max(limit - output, 1))
    if prompt < 1 or output < 1:
        raise UsageError(f"--context {asked.context} leaves no tokens for prompt or output")
    return Workload(prompt, output, asked.batch or intent.batch or DEFAULT.batch)


def _intent(recipe: Recipe) -> Request:
    """Read the dtypes that a recipe's passes will leave; options that it does not name have the passes' defaults."""
    from llmforge import passes

    spec, calibration = recipe.engine, recipe.calibration
    steps, folder = recipe.instantiate(passes.ALL), recipe.checkpoint.absolute()
    settings = read_settings(folder)
    source.refuse_requantizing(recipe, steps, settings)
    instances: dict[str, Any] = {each.name: each for each in steps}
    cache, precision = instances.get("quantize-kv-cache"), instances.get("lower-precision")
    tokens = 0
    wanted = Wanted(
        compute=None if precision is None else precision.dtype,
        kv=None if cache is None else "int8",
        cache=None if cache is None or cache.format.portable else cache.format,
    )
    if (blocks := instances.get("quantize-weights")) is not None:
        if blocks.demands() and calibration is not None:
            tokens = calibration.samples * calibration.length
        table = blocks.embedding_bits  # and of the head; 16: both are left alone
        grid = source.grid_of(settings, folder) if blocks.takes_stored else blocks.grid
        wanted = replace(wanted, embedding=cast(Dtype, f"int{table}") if table in (4, 8) else None)
        if grid is not None:
            weights = cast(Dtype, f"int{grid.bits}")
            wanted = replace(wanted, weights=weights, block=grid.block_size, symmetric=grid.symmetric)
    elif (channels := instances.get("quantize-channels")) is not None:
        wanted = replace(
            wanted,
            weights=channels.dtype,
            product=channels.dtype if channels.activations != "none" else None,
            head=channels.dtype if channels.head else None,
            block=0,
        )
    elif "quantize-fp4" in instances:
        wanted = replace(wanted, weights="fp4", product="fp4")
    return Request(
        targets=(recipe.target,),
        backend=spec.backend,
        batch=spec.max_batch,
        context=spec.max_context,
        ranks=spec.tensor_parallel,
        wanted=wanted,
        calibration_tokens=tokens,
        stored=source.note(settings, folder, steps),
        pruned=next((each for step in steps for each in step.demands() if isinstance(each, PruningDemand)), None),
        passes=tuple(step.name for step in steps),
        adapters=Adapters(tuple(map(Adapter.open, recipe.merged)), tuple(map(Adapter.open, recipe.apart))),
        slots=_slots_reason(recipe, instances),
    )


def _slots_reason(recipe: Recipe, steps: Mapping[str, Any]) -> str | None:
    """Say why the engine of a recipe has a slot for each sequence; None: nothing in the recipe does."""
    if recipe.engine.kv_cache == "slots":
        return "the recipe says so"
    if recipe.apart:
        return "each request chooses its adapter, which a graph over blocks does not take"
    if "flash-attention" not in steps:
        return "flash-attention is not among the passes"
    return recipe.slots_reason
