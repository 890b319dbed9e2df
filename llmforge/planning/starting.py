"""A recipe to start from: passes that pay on a target, and limits that fit it, as YAML with the reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from llmforge.backends import BACKENDS, BackendName, plugin_of
from llmforge.backends.record import CodeLayout, Dtype, Provider
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import CONFIG, read_settings
from llmforge.metrics.units import count, duration, significant, size
from llmforge.planning import config, deployment, request, scheme, source
from llmforge.planning.advice import Advice
from llmforge.planning.deployment import DeploymentPlan
from llmforge.planning.render import Planned
from llmforge.planning.request import Request
from llmforge.planning.roofline import Placement
from llmforge.planning.scheme import Wanted
from llmforge.planning.shape import Shape
from llmforge.quantization.grids import Grid
from llmforge.targets import Target

Goal = Literal["latency", "throughput", "size", "quality"]

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
_CALIBRATED = ("gptq", "auto", "quantize-kv-cache", "static")  # what reads calibration text


@dataclass(frozen=True)
class _Weights:
    """A way to store weights: its pass, what it costs in quality at most, and how plans name it."""

    pass_: str  # as in a recipe, less its budget
    kld: float  # nats per token that the pass may cost
    change: str  # of `Advice`
    wanted: Wanted
    smallest: int  # bits of a weight, for the goal `size`
    good: bool = False  # hardly to be told from the checkpoint


_FP8 = _Weights(
    "quantize-channels: {dtype: fp8",
    0.02,
    "quantize-channels, dtype: fp8",
    Wanted(weights="fp8", block=0),
    8,
    good=True,
)
_FP8_BOTH = _Weights(
    "quantize-channels: {dtype: fp8, activations: static", 0.03, "quantize-channels, dtype: fp8, activations: static",
    Wanted(weights="fp8", product="fp8", block=0), 8,
)  # fmt: skip
_AUTO = _Weights(
    "quantize-weights: {method: auto, weight_bits: 4.5", 0.05, "quantize-weights, bits: 4",
    Wanted(weights="int4", block=32), 4,
)  # fmt: skip


def _blocks(bits: Literal[4, 8], layout: CodeLayout) -> _Weights:
    """Make codes of 4 or 8 bits in blocks, as kernels or a file want them."""
    options = [f"bits: {bits}", f"block_size: {layout.block}"]
    if bits in layout.symmetric_bits:
        options.append("symmetric: true")
    if layout.scales_fp16:
        options.append("scales: fp16")
    if not layout.embeds_codes:
        options.append("embedding_bits: 16")
    options.append(f"method: {'gptq' if bits == 4 else 'rtn'}")
    wanted = Wanted(weights="int4" if bits == 4 else "int8", block=layout.block)
    change = f"quantize-weights, bits: {bits}"
    cost = 0.05 if bits == 4 else 0.005
    return _Weights(f"quantize-weights: {{{', '.join(options)}", cost, change, wanted, bits, good=bits == 8)


def _ways(plan: DeploymentPlan, goal: Goal) -> tuple[_Weights, ...]:
    """List the ways to store weights that the backend of a plan has."""
    backend = BACKENDS[plan.backend]
    layout = _provider(plan).layout
    four = _blocks(4, layout)
    if backend.scales == "channels":
        return four, _FP8, _FP8_BOTH
    # Sizes of codes that differ between layers have zero points.
    return _AUTO if goal == "size" and not layout.symmetric_bits else four, _blocks(8, layout)


def _provider(plan: DeploymentPlan) -> Provider:
    """Give what runs the engine of a plan."""
    return plan.target.require_engine(plan.backend)


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
    target is at hand, so that engines which only it builds need not be deferred. `sample_text`: both texts are those
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
    before = _plan(shape, target, chosen, Wanted(), goal)
    folder = (checkpoint.parent if checkpoint.name == CONFIG else checkpoint).absolute()
    settings = read_settings(folder)
    is_stored = source.described(settings, folder) is not None
    if is_stored and others is not None:
        raise UnsupportedError(
            f"{checkpoint} is quantized already, and {chosen} takes its codes of an unquantized checkpoint",
            hint="give the original checkpoint, or choose another --engine",
        )
    weights, why = _stored(before, source.grid_of(settings, folder)) if is_stored else _choose(before, goal)
    if weights is None and others is not None:
        raise UnsupportedError(
            f"{chosen} has no format to quantize {shape.name} to on {target.name}",
            hint="choose another --goal, --target or --engine",
        )
    wanted = Wanted() if weights is None else weights.wanted
    latent = any(each.latent is not None for _, each in shape.attentions())  # which quantize-kv-cache does not take
    cached = target.kind == "cpu" and goal != "quality" and not latent and others is None
    planned = _plan(shape, target, chosen, replace(wanted, kv="int8") if cached else wanted, goal)
    if not planned.plan.asked.memory.fits:
        held = planned.plan.asked.memory
        raise UnsupportedError(
            f"{planned.plan.shape.name} needs {size(held.needed)} on {target.name}, which has {size(held.capacity)}",
            hint="choose --goal size, or a target with more memory; `llmforge plan` shows what takes it",
        )
    on_device = others is None and target.kind == "gpu" and _provider(planned.plan).needs_device is not None
    recipe = _Recipe(
        planned=planned,
        goal=goal,
        passes=[*_passes(before, weights, why, cached=cached)],
        kld=(weights.kld if weights is not None else 0.001) + 0.01 * (cached or target.kind == "gpu"),
        name=name,
        given=given,
        deferred=on_device and not has_device,
        sample_text=sample_text,
    )
    return StartingRecipe("\n".join(recipe.lines()) + "\n", planned)


def _plan(shape: Shape, target: Target, backend: BackendName, wanted: Wanted, goal: Goal) -> Planned:
    """Plan with the largest batch of the goal that fits at the recipe's context, of powers of two."""
    placed = Placement(shape, target, scheme.choose(target, backend, shape.dtype, wanted), 1)
    batch = _BATCH[goal][target.kind]
    while batch > 1 and deployment.largest_batch(placed, _context(shape)) < batch:
        batch //= 2
    calibrated = wanted.weights in ("int4", "fp8")
    asked = Request(backend=backend, batch=batch, wanted=wanted, calibration_tokens=8192 if calibrated else 0)
    return request.of_target(shape, target, asked)


def _context(shape: Shape) -> int:
    return min(CONTEXT, shape.context or CONTEXT)


def _choose(planned: Planned, goal: Goal) -> tuple[_Weights | None, Advice | None]:
    """Choose how weights are stored: what the goal gains most from, of what the target runs and pays."""
    plan = planned.plan
    advice = {each.change: each for each in planned.advice}
    possible = [
        (way, advice[way.change])
        for way in _ways(plan, goal)
        if way.change in advice and advice[way.change].verdict in ("pays", "does not pay")
        and (goal != "quality" or way.good)
    ]  # fmt: skip
    if goal == "size":
        return min(possible, key=lambda pair: pair[0].smallest, default=(None, None))
    if _is_ours(plan):  # what others load is asked for to have codes
        possible = [pair for pair in possible if pair[1].verdict == "pays"]

    def gained(pair: tuple[_Weights, Advice]) -> float:
        said = pair[1]
        return -(said.tokens_per_second or 1.0) if goal == "throughput" else said.tpot or 1.0

    return min(possible, key=gained, default=(None, None))


def _stored(planned: Planned, grid: Grid | None) -> tuple[_Weights | None, Advice | None]:
    """Take the codes of a checkpoint that comes quantized, where its `grid` is one that the target's kernels read."""
    plan = planned.plan
    on_cpu, in_blocks = plan.target.kind == "cpu", BACKENDS[plan.backend].scales == "blocks"
    if grid is None or not (on_cpu or (grid.portable and (in_blocks or (grid.symmetric and grid.bits == 4)))):
        return None, None
    change = f"quantize-weights, bits: {4 if grid.bits <= 4 else 8}"
    wanted = Wanted(
        weights=cast(Dtype, f"int{grid.bits}") if grid.portable else "int4" if grid.bits <= 4 else "int8",
        block=grid.block_size,
        symmetric=grid.symmetric,
    )
    more = ", scales: fp16" if on_cpu else "" if _provider(plan).layout.embeds_codes else ", embedding_bits: 16"
    weights = _Weights(f"quantize-weights: {{method: stored{more}", 0.01, change, wanted, grid.bits)
    advice = next((each for each in planned.advice if each.change == change), None)
    return weights, None if advice is None else replace(advice, reason="the codes of the checkpoint, as they are")


def _passes(
    planned: Planned, weights: _Weights | None, why: Advice | None, *, cached: bool
) -> Iterator[tuple[str, str]]:
    """Give the passes in their order, each with a reason."""
    plan = planned.plan
    ours, on_cpu, compiled = _is_ours(plan), plan.target.kind == "cpu", BACKENDS[plan.backend].compiled
    reasons = {each.change: each.reason for each in planned.advice}
    for name in ("fuse-norms", "pack-qkv", "pack-gate-up", "flash-attention"):
        if ours and (not compiled or name.startswith("pack")):  # compilers fuse the others themselves
            yield name, reasons.get(name, "").partition(":")[0]
    if weights is not None and why is not None:
        # On a CPU the factor is a machine's, and the figures that the recipe is chosen by are those of its kind.
        faster = f"; decode {significant(1 / why.tpot, 2)}× as fast" if why.tpot and not on_cpu else ""
        yield f"{weights.pass_}, budget: {{kld_mean: {weights.kld:g}}}}}", f"{why.reason}{faster} (predicted)"
    if cached:
        yield "quantize-kv-cache: {bits: 8, budget: {kld_mean: 0.005}}", "a quarter of the cache's memory"
    if not ours:
        return
    if on_cpu:
        yield "cpu-kernels: {budget: {kld_mean: 0.005}, fallback: onnxruntime}", "llmforge's own kernels"
    elif plan.scheme.compute in ("fp16", "bf16"):
        yield f"lower-precision: {{dtype: {plan.scheme.compute}, budget: {{kld_mean: 0.005}}}}", "as the GPU computes"


def _is_ours(plan: DeploymentPlan) -> bool:
    """Say if llmforge runs the engine: passes that change more than codes, and figures of latency, are for no other."""
    return BACKENDS[plan.backend].export_format is None


@dataclass(frozen=True)
class _Recipe:
    """What a recipe is written of."""

    planned: Planned
    goal: Goal
    passes: Sequence[tuple[str, str]]  # each with a reason
    kld: float  # nats per token that all of them may cost
    name: str
    given: Mapping[str, str]
    deferred: bool
    sample_text: bool

    def lines(self) -> Iterator[str]:
        """Give its lines."""
        yield from self._sources()
        yield from self._steps()
        yield from self._checks()

    def _sources(self) -> Iterator[str]:
        plan, given = self.planned.plan, self.given
        engine = f"backend: {plan.backend}, max_context: {_context(plan.shape)}, max_batch: {plan.workload.batch}"
        billions = plan.shape.parameters / 1e9
        shown = f"{significant(billions)} billion" if billions >= 1 else f"{significant(billions * 1e3)} million"
        yield f"# {plan.shape.name}, {shown} parameters, on {plan.target.title}: {_GOALS[self.goal]}."
        yield "# Written by `llmforge init`; change what you like. `llmforge passes` and `llmforge schema` describe it."
        yield "schema: 1"
        yield f"name: {self.name}"
        yield f"checkpoint: {given['checkpoint']}"
        yield f"target: {given['target']}  # see `llmforge targets`"
        yield f"engine: {{{engine}{', deferred: true' if self.deferred else ''}}}"
        if self.deferred:
            finish = "on the GPU's host, `llmforge build --finish` builds the engine of what is published here"
            yield f"# deferred: {finish}."
        if self.sample_text:
            yield "# Both texts are technical documentation that ships with llmforge. Put your own in their place:"
            yield '# a line of JSON, {"id": …, "text": …}, for each document, and no document in both files.'
        if any(word in line for line, _ in self.passes for word in _CALIBRATED):
            yield f"calibration: {{data: {given['calibration']}, samples: 16, length: {self._tokens}, seed: 0}}"

    @property
    def _tokens(self) -> int:
        """Tokens of a text that calibrates or evaluates."""
        return min(512, _context(self.planned.plan.shape))

    def _steps(self) -> Iterator[str]:
        yield "passes:"
        for line, reason in self.passes:
            if len(line) + len(reason) > _LINE:
                yield f"  # {reason}:"
                yield f"  - {line}"
            else:
                yield f"  - {line}  # {reason}" if reason else f"  - {line}"

    def _checks(self) -> Iterator[str]:
        plan, build, tokens, kld = self.planned.plan, self.planned.build, self._tokens, self.kld
        yield "validation:"
        documents = f"data: {self.given['evaluation']}, context: {tokens}, max_tokens: 30720"
        yield f"  quality: {{{documents}}}  # null: all tokens"
        if _is_ours(plan):
            longest = min(tokens, _context(plan.shape) - _ANSWER)
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
