"""A recipe to start from: passes that pay on a target, and limits that fit it, as YAML with the reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from llmforge.backends import BACKENDS, BackendName, plugin_of
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import CONFIG, read_settings
from llmforge.metrics.units import count, duration, significant, size
from llmforge.planning import config, memory, request, scheme, source
from llmforge.planning.deployment import DeploymentPlan
from llmforge.planning.render import Planned
from llmforge.planning.request import PlanRequest
from llmforge.planning.roofline import Placement
from llmforge.planning.shape import Shape
from llmforge.rewrite import declared
from llmforge.rewrite.traits import Deployment, Goal, Proposal, Storage
from llmforge.targets import Target

CONTEXT = 4096  # tokens that a recipe has room for, where the model reads more
_GOALS: Mapping[Goal, str] = {
    "latency": "least time per token",
    "throughput": "most tokens per second of all requests",
    "size": "least memory",
    "quality": "hardly to be told from the checkpoint",
}
_ANSWER = 32  # tokens that latency is measured on
_LINE = 110  # characters of a pass and its reason on one line
_BATCH: Mapping[Goal, Mapping[str, int]] = {
    "latency": {"cpu": 4, "gpu": 4},
    "throughput": {"cpu": 8, "gpu": 64},
    "size": {"cpu": 4, "gpu": 4},
    "quality": {"cpu": 4, "gpu": 16},
}


@dataclass(frozen=True)
class StartingRecipe:
    """A recipe, and what was planned with it."""

    yaml: str
    planned: Planned  # with the recipe's weights and cache


def write(
    checkpoint: Path,
    target: Target,
    goal: Goal,
    *,
    name: str,
    given: Mapping[str, str],
    backend: BackendName | None = None,
    has_device: bool = False,
    sample_text: bool = True,
) -> StartingRecipe:
    """Write the recipe called `name` for `checkpoint` on `target`, whose figures are known, as far as there are any.

    `given` are the paths that stand in it: checkpoint, target, calibration, evaluation. `has_device`: the GPU of the
    target is here, so that engines which only it builds need not be deferred. `sample_text`: both texts are those
    that ship with llmforge.

    Raises:
        UsageError, CheckpointError, UnsupportedError: as `planning.request.answer`; no way to store the weights fits,
            or a recipe for the backend would not build.
    """
    chosen, shape = backend or target.engines[0], config.read(checkpoint)
    if plugin_of(chosen) is not None:
        raise UnsupportedError(
            f"--engine {chosen} is of a plug-in, whose passes and formats init does not know",
            hint=f"write the recipe without --engine, and set `engine: {{backend: {chosen}}}` in it",
        )
    others = BACKENDS[chosen].export_format
    before = _plan(shape, target, chosen, Storage(), goal)
    folder = (checkpoint.parent if checkpoint.name == CONFIG else checkpoint).absolute()
    settings = read_settings(folder)
    is_stored = source.described(settings, folder) is not None
    if is_stored and others is not None:
        raise UnsupportedError(
            f"{checkpoint} is quantized already, and {chosen} takes its codes of an unquantized checkpoint",
            hint="give the original checkpoint, or choose another --engine",
        )
    latents = any(each.latent is not None for _, each in shape.attentions())
    grid = source.grid_of(settings, folder) if is_stored else None
    compute = before.plan.scheme.compute
    proposed = _choose(before, Deployment(target, BACKENDS[chosen], compute, goal, latents, is_stored, grid))
    stores = reduce(Storage.or_else, (each.stores for _, each in proposed), Storage())
    if stores.weights is None and others is not None:
        raise UnsupportedError(
            f"{chosen} has no format to quantize {shape.name} to on {target.name}",
            hint="choose another --goal, --target or --engine",
        )
    planned = _plan(shape, target, chosen, stores, goal)
    if not planned.plan.asked.memory.fits:
        held = planned.plan.asked.memory
        raise UnsupportedError(
            f"{planned.plan.shape.name} needs {size(held.needed)} on {target.name}, which has {size(held.capacity)}",
            hint="choose --goal size, or a target with more memory; `llmforge plan` shows what takes it",
        )
    steps = [_step(before, step, proposal) for step, proposal in proposed]
    text = "\n".join(_recipe(planned, goal, steps, proposed, name, given, has_device, sample_text)) + "\n"
    return StartingRecipe(text, planned)


def _plan(shape: Shape, target: Target, backend: BackendName, wanted: Storage, goal: Goal) -> Planned:
    """Plan with the largest batch of the goal that fits at the recipe's context, of powers of two."""
    placed = Placement(shape, target, scheme.choose(target, backend, shape.dtype, wanted), 1)
    batch = _BATCH[goal][target.kind]
    while batch > 1 and memory.largest_batch(placed, _context(shape)) < batch:
        batch //= 2
    calibrated = wanted.weights in ("int4", "fp8")
    asked = PlanRequest(backend=backend, batch=batch, wanted=wanted, calibration_tokens=8192 if calibrated else 0)
    return request.of_target(shape, target, asked)


def _context(shape: Shape) -> int:
    return min(CONTEXT, shape.context or CONTEXT)


def _choose(planned: Planned, there: Deployment) -> list[tuple[str, Proposal]]:
    """Choose among what passes propose, by their names: one way to store weights, and of all others each."""
    proposed = [(step.name, proposal) for step in declared.DECLARED for proposal in step.proposes(there)]
    weights = [each for _, each in proposed if each.stores.weights is not None]
    chosen = next(iter(weights), None) if there.is_quantized else _weights(planned, weights, there)
    return [(name, each) for name, each in proposed if each.stores.weights is None or each is chosen]


def _weights(planned: Planned, proposed: Sequence[Proposal], there: Deployment) -> Proposal | None:
    """Choose how weights are stored: what the goal gains most from, of what the target runs and pays."""
    advice, goal = {each.change: each for each in planned.advice}, there.goal
    possible = [
        each
        for each in proposed
        if each.change in advice
        and advice[each.change].verdict in ("pays", "does not pay")
        and (goal != "quality" or each.near_lossless)
    ]
    if goal == "size":
        return min(possible, key=lambda each: each.bits, default=None)
    if not there.exported:  # what others load is asked for to have codes
        possible = [each for each in possible if advice[each.change].verdict == "pays"]

    def gained(each: Proposal) -> float:
        said = advice[each.change]
        return -(said.tokens_per_second or 1.0) if goal == "throughput" else said.tpot or 1.0

    return min(possible, key=gained, default=None)


def _step(planned: Planned, name: str, proposal: Proposal) -> tuple[str, str]:
    """Write a pass of the recipe, and its reason."""
    why = next((each for each in planned.advice if each.change == proposal.change), None)
    line, reason = proposal.line(name), proposal.reason
    if why is not None and proposal.stores.weights is not None:
        # On a CPU the factor is a machine's, and the figures that the recipe is chosen by are those of its kind.
        on_cpu = planned.plan.target.kind == "cpu"
        faster = f"; decode {significant(1 / why.tpot, 2)}× as fast" if why.tpot and not on_cpu else ""
        return line, f"{reason or why.reason}{faster} (predicted)"
    return line, reason or ("" if why is None else why.reason.partition(":")[0])


def _is_ours(plan: DeploymentPlan) -> bool:
    """Say if llmforge runs the engine: passes that change more than codes, and figures of latency, are for no other."""
    return BACKENDS[plan.backend].export_format is None


def _recipe(
    planned: Planned,
    goal: Goal,
    steps: Sequence[tuple[str, str]],
    proposed: Sequence[tuple[str, Proposal]],
    name: str,
    given: Mapping[str, str],
    has_device: bool,
    sample_text: bool,
) -> Iterator[str]:
    plan, build = planned.plan, planned.build
    context, tokens = _context(plan.shape), min(512, _context(plan.shape))
    of_weights = [each.kld for _, each in proposed if each.stores.weights is not None]
    cached = any(each.stores.kv is not None for _, each in proposed)
    kld = sum(of_weights or [0.001]) + 0.01 * (cached or plan.target.kind == "gpu")
    ours = _is_ours(plan)
    provider = plan.target.require_engine(plan.backend)
    deferred = ours and plan.target.kind == "gpu" and provider.needs_device is not None and not has_device
    engine = f"backend: {plan.backend}, max_context: {context}, max_batch: {plan.workload.batch}"
    billions = plan.shape.parameters / 1e9
    shown = f"{significant(billions)} billion" if billions >= 1 else f"{significant(billions * 1e3)} million"
    yield f"# {plan.shape.name}, {shown} parameters, on {plan.target.title}: {_GOALS[goal]}."
    yield "# Written by `llmforge init`; change what you like. `llmforge passes` and `llmforge schema` describe it."
    yield "schema: 1"
    yield f"name: {name}"
    yield f"checkpoint: {given['checkpoint']}"
    yield f"target: {given['target']}  # see `llmforge targets`"
    yield f"engine: {{{engine}{', deferred: true' if deferred else ''}}}"
    if deferred:
        yield "# deferred: on the GPU's host, `llmforge build --finish` builds the engine of what is published here."
    if sample_text:
        yield "# The texts ship with llmforge: documentation, and chats, for a template, which the checkpoint answers."
        yield '# Put your own in their place: a line of JSON, {"text": …} or {"messages": […]}, none in both.'
    if any(each.calibrated for _, each in proposed):
        yield f"calibration: {{data: {given['calibration']}, samples: 16, length: {tokens}, seed: 0}}"
    yield "passes:"
    for line, reason in steps:
        if len(line) + len(reason) > _LINE:
            yield f"  # {reason}:"
            yield f"  - {line}"
        else:
            yield f"  - {line}  # {reason}" if reason else f"  - {line}"
    yield "validation:"
    yield f"  quality: {{data: {given['evaluation']}, context: {tokens}, max_tokens: 30720}}  # null: all tokens"
    if ours:
        longest = min(tokens, context - _ANSWER)
        prompts = ", ".join(map(str, sorted({min(32, longest), longest})))
        yield f"  latency: {{prompt_tokens: [{prompts}], output_tokens: {_ANSWER}, repetitions: 6}}"
    yield "# Limits to start with: tighten them once a report shows where this model stands."
    yield "gates:"
    yield f"  perplexity_ratio: {{max: {1 + max(kld, 0.01):g}}}"
    yield f"  kld_mean: {{max: {kld:g}}}"
    cost = f"{duration(build.cpu_s)} of CPU time and {size(build.memory_bytes)} of memory"
    step = f"; {significant(plan.asked.decode.tokens_per_second)} tokens/s at {count(plan.workload.batch)} at once"
    if plan.target.kind == "cpu":
        step = ". `llmforge plan` predicts its speed"
    yield f"# Predicted: a build of about {cost}; {size(plan.asked.memory.weights)} of weights{step}."
