"""From what a person asks, a recipe or a checkpoint and options, to plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from llmforge import targets
from llmforge.base.errors import UsageError
from llmforge.planning import advice, building, config, deployment, scheme
from llmforge.planning.deployment import Workload
from llmforge.planning.render import Planned
from llmforge.planning.shape import Shape
from llmforge.recipe import Recipe
from llmforge.targets import Backend, Target
from llmforge.targets.support import Dtype

DEFAULT = Workload()


@dataclass(frozen=True)
class Request:
    """What a person asks; what is None is the recipe's, else a default."""

    targets: tuple[str, ...] = ()
    backend: str | None = None
    batch: int | None = None
    prompt: int | None = None
    output: int | None = None
    context: int | None = None
    compute: str | None = None
    weights: str | None = None
    kv: str | None = None
    product: str | None = None
    ranks: int = 1
    usd_per_hour: float | None = None


@dataclass(frozen=True)
class _Intent:
    """What a recipe says that a plan depends on; nothing of it for a bare checkpoint."""

    backend: Backend | None = None
    batch: int | None = None
    context: int | None = None
    compute: Dtype | None = None
    weights: Dtype | None = None
    kv: Dtype | None = None
    product: Dtype | None = None
    embedding: Dtype | None = None
    head: Dtype | None = None
    block: int | None = None
    symmetric: bool = True
    calibration_tokens: int = 0


def answer(what: Path, asked: Request) -> list[Planned]:
    """Plan the recipe or the checkpoint at `what` on every target that is asked for.

    Raises:
        UsageError: no such target, no target at all, or options that contradict each other.
        CheckpointError: the configuration is not usable.
        UnsupportedError: an engine does not run on a target, or does not take a dtype there.
    """
    names, intent, folder = asked.targets, _Intent(), what
    if targets.is_file(what.name):
        recipe = Recipe.load(what)
        names, intent, folder = names or (recipe.target,), _intent(recipe), recipe.checkpoint
    if not names:
        raise UsageError(
            f"{what}: a checkpoint names no device",
            hint=f"say which: --target {', --target '.join(('h200', 'rtx-4090'))}; `llmforge targets` lists them",
        )
    found = [targets.find(name) for name in names]
    shape = config.read(folder)
    workload = _workload(shape, asked, intent)
    return [_planned(shape, target, workload, asked, intent) for target in found]


def _planned(shape: Shape, target: Target, workload: Workload, asked: Request, intent: _Intent) -> Planned:
    wished = cast(Backend | None, asked.backend) or intent.backend
    backend = wished if wished in target.engines or asked.backend is not None else target.engines[0]
    assert backend is not None
    chosen = scheme.choose(
        target,
        backend,
        shape.dtype,
        compute=cast(Dtype | None, asked.compute) or intent.compute,
        weights=cast(Dtype | None, asked.weights) or intent.weights,
        kv=cast(Dtype | None, asked.kv) or intent.kv,
        product=cast(Dtype | None, asked.product) or intent.product,
        embedding=intent.embedding,
        head=intent.head,
        block=intent.block,
        symmetric=intent.symmetric,
    )
    made = deployment.make(shape, target, backend, chosen, workload, ranks=asked.ranks, usd_per_hour=asked.usd_per_hour)
    build = building.predict(shape, chosen, backend, calibration_tokens=intent.calibration_tokens)
    return Planned(made, build, advice.advise(made))


def _workload(shape: Shape, asked: Request, intent: _Intent) -> Workload:
    """Fill in prompt and answer: the asked context, the recipe's, the default; at most the model's."""
    if asked.context is not None and asked.prompt is not None and asked.output is not None:
        raise UsageError("--context is prompt and answer together; give two of --context, --prompt and --output")
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
        raise UsageError(f"--context {asked.context} leaves no token for prompt or answer")
    return Workload(prompt, output, asked.batch or intent.batch or DEFAULT.batch)


def _intent(recipe: Recipe) -> _Intent:
    """Read the dtypes that a recipe's passes will leave; options that it does not name have the passes' defaults."""
    from llmforge import passes

    spec, calibration = recipe.engine, recipe.calibration
    instances: dict[str, Any] = {each.name: each for each in recipe.instantiate(passes.ALL)}
    cache, precision = instances.get("quantize-kv-cache"), instances.get("lower-precision")
    common = _Intent(
        backend=spec.backend,
        batch=spec.max_batch,
        context=spec.max_context,
        compute=None if precision is None else precision.dtype,
        kv=None if cache is None else cast(Dtype, f"int{cache.bits}"),
    )
    if (blocks := instances.get("quantize-weights")) is not None:
        solved = bool(blocks.demands()) and calibration is not None
        return replace(
            common,
            weights=cast(Dtype, f"int{blocks.bits}"),
            embedding=_embedding(blocks),
            block=blocks.block_size,
            symmetric=blocks.symmetric,
            calibration_tokens=calibration.samples * calibration.length if solved and calibration else 0,
        )
    if (channels := instances.get("quantize-channels")) is not None:
        return replace(
            common,
            weights=channels.dtype,
            product=channels.dtype if channels.activations == "static" else None,
            head=channels.dtype if channels.head else None,
            block=0,
        )
    return common


def _embedding(weights: Any) -> Dtype | None:
    """Return what `quantize-weights` makes of embedding and head; 16 bits mean that it leaves them alone."""
    if weights.embedding_bits not in (4, 8):
        return None
    return cast(Dtype, f"int{weights.embedding_bits}")
