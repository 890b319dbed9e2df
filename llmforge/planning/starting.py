"""A recipe to start from: passes that pay on a target, and limits that fit it, as YAML with the reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from llmforge.backends import BACKENDS, BackendName, plugin_of
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import CONFIG, find_chat_template, folder_of, names_end, read_settings
from llmforge.checkpoint.shards import tensor_names
from llmforge.metrics.units import count, significant, size
from llmforge.native import library
from llmforge.planning import choice, config, memory, pass_lines, request, scheme, source, work
from llmforge.planning.choice import UNTRIED, Gates, Named, Probe, Probed, ProposedPasses, Tried
from llmforge.planning.deployment import DeploymentPlan
from llmforge.planning.render import Planned
from llmforge.planning.request import PlanRequest
from llmforge.planning.roofline import Placement
from llmforge.planning.shape import Shape
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
# Behaviour of a start: a part of the chats that ship, and of their answers. Where a template shows tools, chats of two
# more slices are answered, and tools are long to read.
_CHATS_OF_A_SLICE, _CHATS_WITH_TOOLS, _CHAT_TOKENS = 4, 3, 24
_CHAT_CONTEXT = 1024  # tokens that the chats that ship, and their tools, have room in
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
    probe: Probe | None = None,
    tried: Tried = UNTRIED,
) -> StartingRecipe:
    """Write the recipe called `name` for `checkpoint` on `target`, whose figures are known, as far as there are any.

    `given` are the paths that stand in it: checkpoint, target, calibration, evaluation, and of `documents`, which are
    calibration text without chats. `has_device`: the GPU of the
    target is here, so that engines which only it builds need not be deferred. `sample_text`: both texts are those
    that ship with llmforge. `probe` measures what formats cost the checkpoint; what a recipe that was `tried` could not
    do is not in this one.

    Raises:
        UsageError, CheckpointError, UnsupportedError: as `planning.request.answer`; no way to store the weights fits,
            or a recipe for the backend would not build.
    """
    folder = (checkpoint.parent if checkpoint.name == CONFIG else checkpoint).absolute()
    settings = read_settings(folder)
    described = source.described(settings, folder)
    is_stored = described is not None
    chosen, shape = backend or _engine(target, goal, is_stored=is_stored), config.read(checkpoint)
    if plugin_of(chosen) is not None:
        raise UnsupportedError(
            f"--engine {chosen} is of a plug-in, whose passes and formats init does not know",
            hint=f"write the recipe without --engine, and set `engine: {{backend: {chosen}}}` in it",
        )
    others = BACKENDS[chosen].export_format
    before = _plan(shape, target, chosen, Storage(), goal)
    if is_stored and others is not None:
        raise UnsupportedError(
            f"{checkpoint} is quantized already, and {chosen} takes its codes of an unquantized checkpoint",
            hint="give the original checkpoint, or choose another --engine",
        )
    latents = any(each.latent is not None for _, each in shape.attentions())
    grid = source.grid_of(settings, folder) if is_stored else None
    compute = before.plan.scheme.compute
    kernels = library() is not None
    known = latents, is_stored, grid, kernels, shape.dtype == "bf16", _has_experts(shape, folder_of(folder))
    there = Deployment(target, BACKENDS[chosen], compute, goal, *known)
    requantizes = is_stored and grid is None and there.on_cpu and kernels
    if requantizes:
        there = replace(there, is_quantized=False)
    offered = ProposedPasses.of(before, there)
    probed = Probed() if probe is None else probe(() if there.is_quantized else offered.formats())
    tried = tried if probed.runs_by_layer else tried | Tried(uncalibrated=probed.why)
    proposed = offered.without(tried).chosen(probed)
    stores = reduce(Storage.or_else, (each.stores for _, each in proposed), Storage())
    if stores.weights is None and others is not None:
        raise UnsupportedError(
            f"{chosen} has no format to quantize {shape.name} to on {target.name}",
            hint="choose another --goal, --target or --engine",
        )
    template = find_chat_template(folder_of(folder))
    has_chats = sample_text and template is not None
    planned = _plan(shape, target, chosen, stores, goal, reads=_reads(proposed), sample_chats=has_chats)
    if not planned.plan.asked.memory.fits:
        held = planned.plan.asked.memory
        raise UnsupportedError(
            f"{planned.plan.shape.name} needs {size(held.needed)} on {target.name}, which has {size(held.capacity)}",
            hint="choose --goal size, or a target with more memory; `llmforge plan` shows what takes it",
        )
    requantized = described if requantizes else None
    has_end = names_end(folder_of(folder), settings)
    lines = _Lines(planned, before, proposed, goal, name, given, probed, tried, requantized, has_end, template)
    text = "\n".join(lines.written(has_device=has_device, sample_text=sample_text)) + "\n"
    return StartingRecipe(text, planned)


def _has_experts(shape: Shape, folder: Path) -> bool:
    """Say whether there are routed experts; where tensors are there, whether each expert has its own."""
    names = tensor_names(folder) if any(layer.experts for _, layer in shape.layers) else frozenset()
    return names is None or any(".experts.0." in name for name in names)


def _engine(target: Target, goal: Goal, *, is_stored: bool) -> BackendName:
    """Choose what serves the goal best on the target; of a checkpoint that comes quantized, one of the target's own."""
    return ((target.throughput_engines if goal == "throughput" and not is_stored else ()) or target.engines)[0]


def _plan(
    shape: Shape,
    target: Target,
    backend: BackendName,
    wanted: Storage,
    goal: Goal,
    *,
    reads: tuple[int, int] = (0, 0),
    sample_chats: bool = False,
) -> Planned:
    """Plan with the largest batch of the goal that fits at the recipe's context, of powers of two."""
    placed = Placement(shape, target, scheme.choose(target, backend, shape.dtype, wanted), 1)
    batch = _BATCH[goal][target.kind]
    while batch > 1 and memory.largest_batch(placed, _context(shape)) < batch:
        batch //= 2
    calibration, observed = reads
    asked = PlanRequest(
        backend=backend,
        batch=batch,
        wanted=wanted,
        calibration_tokens=calibration,
        observed_tokens=observed,
        sample_chats=sample_chats,
    )
    return request.of_target(shape, target, asked)


def _reads(proposed: Sequence[Named]) -> tuple[int, int]:
    """Count the tokens of calibration text that choose codes, or else those that are read once, forwards."""
    if any(each.calibrated for _, each in proposed):
        return choice.CALIBRATION_TOKENS, 0
    return 0, choice.OBSERVED_TOKENS * any(each.observes for _, each in proposed)


def _context(shape: Shape) -> int:
    return min(CONTEXT, shape.context or CONTEXT)


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


@dataclass(frozen=True)
class _Lines:
    """What a recipe says, and how it is written."""

    planned: Planned
    before: Planned  # of the checkpoint as it is
    proposed: Sequence[Named]
    goal: Goal
    name: str
    given: Mapping[str, str]
    probed: Probed
    tried: Tried
    requantized: str | None  # codes of the checkpoint that no kernel runs
    has_end: bool  # whether the checkpoint names a token that ends a text
    template: str | None  # of chats

    def written(self, *, has_device: bool, sample_text: bool) -> Iterator[str]:
        """Write the recipe, line by line."""
        plan = self.planned.plan
        tokens = min(512, _context(plan.shape))
        yield from self._head(has_device)
        if sample_text:
            yield "# The texts ship with llmforge: documentation, and chats for a template, which the model answers."
            yield '# Put your own in their place: a line of JSON, {"text": …} or {"messages": […]}, none in both.'
        calibration, observed = _reads(self.proposed)
        if calibration:
            yield f"calibration: {{data: {self.given['calibration']}, samples: 16, length: {tokens}, seed: 0}}"
        elif observed:  # of what ships, documentation alone: the model answers no chats for it
            data = self.given.get("documents", self.given["calibration"])
            yield f"calibration: {{data: {data}, samples: {max(1, observed // tokens)}, length: {tokens}, seed: 0}}"
        yield from self._measured()
        if self.tried.uncalibrated and self.probed.runs_by_layer:
            yield f"# Nothing is calibrated: {self.tried.uncalibrated}."
        if sizes := [each.max_bytes for _, each in self.proposed if each.max_bytes is not None]:
            yield "# retreat: where the weights exceed their budget, the layers that lose most get more bits, as far as"
            yield f"# all weights fit in {size(sizes[0])}: what the next format takes in every layer."
        yield "passes:"
        for step, proposal in self.proposed:
            line, reason = _step(self.before, step, proposal)
            yield from pass_lines.of_pass(line, reason)
        for reason in self.tried.idle.values():
            yield f"  # left out: {reason}"
        yield from self._validation(tokens)
        yield from self._drafts()
        build = self.planned.build
        speed = significant(plan.asked.decode.tokens_per_second)
        step = f"; {speed} tokens/s at {count(plan.workload.batch)} at once"
        if plan.target.kind == "cpu":
            step = ". `llmforge plan` predicts times and speeds here"
        yield (
            f"# Predicted: {size(build.memory_bytes)} of memory in a build; {size(self._weight_bytes())} of "
            f"weights{step}."
        )

    def _weight_bytes(self) -> int:
        """Give the size of all weights: as it was counted with the chosen formats, else as a plan predicts it."""
        formats = next((each.formats for _, each in self.proposed if each.formats is not None), None)
        counted = None if formats is None or self.probed.costs is None else self.probed.costs.of(formats)
        return self.planned.plan.asked.memory.weights if counted is None else counted.size_bytes

    def _head(self, has_device: bool) -> Iterator[str]:
        plan = self.planned.plan
        provider = plan.target.require_engine(plan.backend)
        deferred = _is_ours(plan) and plan.target.kind == "gpu" and provider.needs_device is not None and not has_device
        engine = f"backend: {plan.backend}, max_context: {_context(plan.shape)}, max_batch: {plan.workload.batch}"
        billions = plan.shape.parameters / 1e9
        shown = f"{significant(billions)} billion" if billions >= 1 else f"{significant(billions * 1e3)} million"
        yield f"# {plan.shape.name}, {shown} parameters, on {plan.target.title}: {_GOALS[self.goal]}."
        yield "# Written by `llmforge init`; change what you like. `llmforge passes` and `llmforge schema` describe it."
        yield "schema: 1"
        yield f"name: {self.name}"
        yield f"checkpoint: {self.given['checkpoint']}"
        if self.requantized is not None:
            yield f"requantize: true  # no kernel runs its codes ({self.requantized}): its numbers are rounded again"
        yield f"target: {self.given['target']}  # see `llmforge targets`"
        yield f"engine: {{{engine}{', deferred: true' if deferred else ''}}}"
        if self.goal == "throughput" and plan.backend in plan.target.throughput_engines:
            own = " or ".join(f"`--engine {each}`" for each in plan.target.engines)
            yield "# Not an engine of llmforge: for many requests at once vLLM is faster on this GPU (docs/cuda.md),"
            yield "# with products of fp8 by fp8. For single users, lowest latency or a fixed appliance, write the"
            yield f"# recipe with `--goal latency`, {own}; the gates below hold for either."
        if deferred:
            how = "on the GPU's host, `llmforge build --finish` builds the engine of what is published here."
            yield f"# deferred: {how}"

    def _measured(self) -> Iterator[str]:
        """Say what formats and limits rest on."""
        costs = self.probed.costs
        if costs is None:
            if self.probed.why:
                also = "" if self.probed.runs_by_layer else ", and nothing is calibrated"
                yield f"# What formats cost this model was not measured{also}: {self.probed.why}."
            return
        said = [f"{each.formats.linears.bits} bits {each.kld:.2g}" for each in costs.weights]
        if said:
            yield f"# Measured, KLD on {count(costs.tokens)} tokens of weights rounded to nearest: {', '.join(said)};"
        of_numbers = f"an int8 cache {costs.cache:.2g}, int8 activations {costs.activations:.2g}"
        begin = "of " if said else f"Measured, KLD on {count(costs.tokens)} tokens of "
        yield f"# {begin}{of_numbers}. Budgets and gates stand at {choice.MARGIN:g} times what that predicts."
        if share := next((each.share for _, each in self.proposed if each.observes), None):
            yield f"# method: importance weighs errors by what layers read, which leaves {share:g} of that or less."

    def _drafts(self) -> Iterator[str]:
        """Have prompt lookup draft where that pays on the text of the probe; else say why not."""
        plan, found = self.planned.plan, self.probed.drafts
        if found is None or not _is_ours(plan) or self.goal == "throughput" or plan.shape.state_elements():
            return
        if plan.target.kind != "cpu":
            yield "# No speculation: what a step with drafts takes on this GPU was not measured (docs/runtime.md)."
            return
        gain = f"{significant(found.gain, 2)} times the tokens a second"
        why = f"{significant(found.length)} tokens a step, {choice.VERIFY_STEPS:g} times as long with a draft"
        if found.gain >= choice.LEAST_GAIN:
            yield f"# Predicted, of repetitions in the calibration text: {gain} ({why})."
            yield "serving: {speculation: prompt-lookup}"
        else:
            yield f"# No `serving: {{speculation: prompt-lookup}}`: by repetitions in the calibration text {gain}"
            yield f"# ({why}). Edits of code and JSON do gain: docs/runtime.md."

    def _validation(self, tokens: int) -> Iterator[str]:
        plan = self.planned.plan
        yield "validation:"
        most = work.evaluated_of_start(plan.shape.parameters)
        quality = f"data: {self.given['evaluation']}, context: {tokens}, max_tokens: {most}"
        yield f"  quality: {{{quality}}}  # null: all tokens"
        if _is_ours(plan):
            answer = min(_ANSWER, max(1, _context(plan.shape) // 2))
            longest = min(tokens, _context(plan.shape) - answer)
            prompts = ", ".join(map(str, sorted({min(32, longest), longest})))
            yield f"  latency: {{prompt_tokens: [{prompts}], output_tokens: {answer}, repetitions: 6}}"
        chats = self.template if _is_ours(plan) and _context(plan.shape) >= _CHAT_CONTEXT else None
        if chats is not None:
            yield "  # The first chats of each slice of those that ship; {}: all, answered whole (docs/behaviour.md)."
            first = _CHATS_WITH_TOOLS if "tools" in chats else _CHATS_OF_A_SLICE
            yield f"  behaviour: {{of_each_slice: {first}, max_tokens: {_CHAT_TOKENS}}}"
        yield "# Limits to start with: tighten them once a report shows where this model stands."
        chosen = [each for _, each in self.proposed]
        gates = Gates.of(chosen, self.probed.costs, computes_coarsely=plan.target.kind == "gpu")
        yield "gates:"
        yield f"  perplexity_ratio: {{max: {gates.perplexity_ratio:g}}}"
        yield f"  kld_mean: {{max: {gates.kld_mean:g}}}"
        if self.has_end:
            shift = f"min: {-choice.END_SHIFT:g}, max: {choice.END_SHIFT:g}"
            yield f"  eos_shift_elsewhere: {{{shift}}}  # nats: how much likelier it is to stop, before other tokens"
        if chats:
            # Checks have no gate here: of a model that passes few of them, so few chats cannot show that more are lost.
            yield f"  behaviour.length_change: {{max: {choice.LENGTH_CHANGE:g}}}  # |ln ratio| of lengths of answers"
            surety = "nats: how sure of the checkpoint's answers"
            yield f"  behaviour.answer_odds: {{drop_max: {choice.ANSWER_ODDS:g}}}  # {surety}"
            if self.has_end:
                yield f"  behaviour.end_shift: {{max: {choice.END_SHIFT:g}}}  # nats: of the end, along these answers"
