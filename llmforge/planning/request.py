"""From what a person asks, a recipe or a checkpoint and options, to plans."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmforge import targets
from llmforge.backends import BACKENDS, BackendName
from llmforge.base.cores import physical_cores
from llmforge.base.errors import UnsupportedError, UsageError
from llmforge.checkpoint import CONFIG, read_settings
from llmforge.checkpoint.adapters import Adapter
from llmforge.measure import rates
from llmforge.metrics import units
from llmforge.planning import (
    advice,
    building,
    config,
    deployment,
    families,
    pruning,
    scheme,
    source,
    work,
)
from llmforge.planning.adapters import Adapters
from llmforge.planning.building import BuildCost, BuildWork
from llmforge.planning.render import Planned, Refused
from llmforge.planning.roofline import Workload
from llmforge.planning.scheme import DtypeScheme
from llmforge.planning.shape import Shape
from llmforge.recipe import Recipe
from llmforge.rewrite.pass_base import Pass
from llmforge.rewrite.traits import Storage
from llmforge.targets import Target

DEFAULT = Workload()
PAGEABLE = "gqa"  # the fact of a graph whose caches can lie in blocks


@dataclass(frozen=True)
class PlanRequest:
    """What a person asks, or a recipe says; what is None is the recipe's, else a default."""

    targets: tuple[str, ...] = ()
    backend: BackendName | None = None
    batch: int | None = None
    prompt: int | None = None
    output: int | None = None
    context: int | None = None
    wanted: Storage = field(default_factory=Storage)
    ranks: int | None = None
    usd_per_hour: float | None = None
    calibration_workers: int | None = None  # that carry its text through the layers
    calibration_tokens: int = 0  # that choose codes, where no recipe says what there is to do
    observed_tokens: int = 0  # that are read once, forwards, likewise
    sample_chats: bool = False  # the chats that ship are among the texts, where no recipe says what there is to do
    work: BuildWork | None = None  # of a recipe
    stored: str | None = None  # what becomes of a checkpoint that comes quantized
    adapters: Adapters = field(default_factory=Adapters)  # of a recipe
    slots: str | None = None  # why a recipe has a slot for each sequence
    quant_method: str = ""  # of a recipe
    passes: tuple[Pass, ...] = ()  # of a recipe


def answer(
    what: Path, asked: PlanRequest, measured: Callable[[Target], Target | None] = lambda target: None
) -> list[Planned | Refused]:
    """Plan the recipe or the checkpoint at `what` on every target that is asked for, or that of the recipe, or here.

    Of several targets, those that cannot be planned are `Refused`; if none can, the first one's error is raised.
    `measured` may give the figures of a target that has none, as those of CPUs.

    Raises:
        UsageError: no such target, or options that contradict each other.
        CheckpointError: the configuration is not usable.
        UnsupportedError: an engine does not run on a target, or does not take a dtype there.
    """
    intent, folder = PlanRequest(), what
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


def of_target(shape: Shape, target: Target, asked: PlanRequest) -> Planned:
    """Plan `shape` on one target, by what is `asked` alone; its build is that of a recipe which `init` writes.

    Raises:
        UsageError, UnsupportedError: as `answer`.
    """
    does = work.of_start(
        shape.parameters, asked.calibration_tokens, asked.observed_tokens, has_chats=asked.sample_chats
    )
    said = PlanRequest(work=does)
    return _planned(shape, target, _workload(shape, asked, said), asked, said)


def of_recipe(recipe: Recipe) -> Planned | None:
    """Plan what a recipe, with its overrides, asks for; None where its target has no figures, or it is not planned.

    Raises:
        CheckpointError: the configuration is not usable.
    """
    intent, shape = _intent(recipe), config.read(recipe.checkpoint)
    try:
        return _planned(
            shape, targets.find(recipe.target), _workload(shape, PlanRequest(), intent), PlanRequest(), intent
        )
    except (UnsupportedError, UsageError):  # the build itself says better what is wrong
        return None


def build_of(recipe: Recipe, workers: int = 0) -> BuildCost | None:
    """Predict what the build of a recipe takes here, with so many workers of calibration.

    None where its configuration alone does not tell, or is not planned.

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
    assert intent.work is not None
    does = replace(intent.work, workers=workers)
    build = building.predict(shape, chosen, recipe.engine.backend, does, rates=rates.measure())
    return _with_adapters(build, intent.adapters, chosen)


def expected_stages(recipe: Recipe, workers: int = 0) -> list[tuple[str, float]]:
    """Name the stages of a recipe's build, and the seconds that each is predicted to take here, as `build_of`.

    Raises:
        CheckpointError: the configuration is not usable.
    """
    cost, cores = build_of(recipe, workers), physical_cores()
    return [] if cost is None else [(stage.title, stage.seconds(cores)) for stage in cost.stages]


def _with_adapters(build: BuildCost, adapters: Adapters, chosen: DtypeScheme) -> BuildCost:
    return replace(build, disk_bytes=build.disk_bytes + adapters.bytes_apart(chosen))


def _planned(shape: Shape, target: Target, workload: Workload, asked: PlanRequest, intent: PlanRequest) -> Planned:
    wanted = intent.backend or target.engines[0]
    anywhere = wanted in target.engines or BACKENDS[wanted].export_format is not None
    backend = asked.backend or (wanted if anywhere else target.engines[0])
    said = intent.wanted if asked.wanted.kv is None else replace(intent.wanted, cache=None)
    chosen = scheme.choose(target, backend, shape.dtype, asked.wanted.or_else(said))
    price, slots = asked.usd_per_hour, intent.slots
    ranks = asked.ranks or (target.kind == "gpu" and intent.ranks) or 1  # ranks on a CPU share what it has
    made = deployment.make(shape, target, backend, chosen, workload, ranks=ranks, usd_per_hour=price, slots=slots)
    does = intent.work or BuildWork(calibration_tokens=intent.calibration_tokens)
    does = replace(does, workers=asked.calibration_workers or 0)
    build = building.predict(shape, chosen, backend, does, rates=rates.measure())
    told = advice.advise(made)
    noted = [] if intent.stored is None else [intent.stored]
    if (pruned := pruning.note(intent.passes, shape, target, backend)) is not None:
        noted.append(pruned)
    noted += [
        f"{step.name}: where its budget is exceeded, the layers that lose most get more bits, as far as all weights "
        f"fit in {units.size(step.may_retreat.max_bytes)}"
        for step in intent.passes
        if step.may_retreat is not None
    ]
    if (loaded := _loaded(shape, backend, intent)) is not None:
        noted.append(loaded)
    made = replace(made, notes=(*noted, *made.notes, *intent.adapters.notes(chosen, made.asked.decode.step.bytes)))
    return Planned(made, _with_adapters(build, intent.adapters, chosen), told)


def _loaded(shape: Shape, backend: BackendName, intent: PlanRequest) -> str | None:
    """Say which servers load the file that a recipe ends in; None: it ends in none, or there is no table of them."""
    other = BACKENDS[backend].export_format
    if other is None or other.loaded is None:
        return None
    linears, experts = set[str](), set[str]()
    has_experts = any(layer.experts for _, layer in shape.layers)
    for step in intent.passes:
        if (name := step.server_format) is None:
            continue
        if step.writes_codes != "experts":
            linears.add(name)
        if step.writes_codes == "experts" or (step.writes_codes == "blocks" and has_experts):
            experts.add(name)
    says = importlib.import_module(other.loaded).planned(
        frozenset(linears), frozenset(experts), caches=intent.wanted.kv == "fp8", quant_method=intent.quant_method
    )
    return None if says is None else f"servers that load the file: {says}"


def _workload(shape: Shape, asked: PlanRequest, intent: PlanRequest) -> Workload:
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


def _intent(recipe: Recipe) -> PlanRequest:
    """Read the dtypes that a recipe's passes will leave; options that it does not name have the passes' defaults."""
    from llmforge import passes  # which brings onnx-ir

    spec = recipe.engine
    steps, folder = recipe.instantiate(passes.ALL), recipe.checkpoint.absolute()
    settings = read_settings(folder)
    source.refuse_requantizing(recipe, steps, settings)
    grid, wanted = source.grid_of(settings, folder), Storage()
    for step in steps:
        wanted = wanted.or_else(step.stores(grid))  # what is left for a later pass are the weights of few layers
    return PlanRequest(
        targets=(recipe.target,),
        backend=spec.backend,
        batch=spec.max_batch,
        context=spec.max_context,
        ranks=spec.tensor_parallel,
        wanted=wanted,
        work=work.of_recipe(recipe, steps),
        stored=source.note(settings, folder, steps),
        quant_method=spec.quant_method,
        passes=steps,
        adapters=Adapters(tuple(map(Adapter.open, recipe.merged)), tuple(map(Adapter.open, recipe.apart))),
        slots=_slots_reason(recipe, steps, passes.ALL),
    )


def _slots_reason(recipe: Recipe, steps: Sequence[Pass], registry: Sequence[type[Pass]]) -> str | None:
    """Say why the engine of a recipe has a slot for each sequence; None: nothing in the recipe does."""
    if recipe.engine.kv_cache == "slots":
        return "the recipe says so"
    if recipe.apart:
        return "each request chooses its adapter, which a graph over blocks does not take"
    if not any(PAGEABLE in step.provides for step in steps):
        return f"{next(step.name for step in registry if PAGEABLE in step.provides)} is not among the passes"
    return recipe.slots_reason
