"""From a plan, or an artifact, and a rate of requests to a fleet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmforge import targets
from llmforge.artifact import Artifact
from llmforge.backends import PROVIDERS
from llmforge.base.errors import ForgeError, InputError, UnsupportedError, UsageError
from llmforge.gates import records
from llmforge.metrics.serving import Objective
from llmforge.metrics.units import count
from llmforge.planning import memory
from llmforge.planning.deployment import DeploymentPlan
from llmforge.planning.fleet.keda import ScalingValues
from llmforge.planning.fleet.load import FleetLoad, PoissonLoad, RecordedLoad
from llmforge.planning.fleet.simulation import SimulatedEngine
from llmforge.planning.fleet.sizing import PERCENTILE, FleetGoal, FleetSize, smallest
from llmforge.planning.fleet.steps import MeasuredSteps, RooflineSteps
from llmforge.planning.render import Planned, Refused
from llmforge.planning.roofline import Placement, Workload
from llmforge.runtime.config import FILE, RuntimeConfig
from llmforge.serving.interface import EngineOptions

VARIATION = 0.5  # of lengths: answers of chats and their prompts differ by more, those of one task by less
LONGEST = 4  # times the mean tokens of a request: what no request exceeds, where no context says so
SLOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # that are tried, and the most that fit
Tell = Callable[[str], None]


@dataclass(frozen=True)
class FleetRequest:
    """What a person asks of a fleet. Without a `rate`, that of the `trace`."""

    goal: FleetGoal
    rate: float | None = None  # requests per second
    trace: Path | None = None
    variation: float = VARIATION
    seed: int = 0
    slots: int | None = None  # None: the best number is found
    max_context: int | None = None  # of a slot; None: the longest request

    @classmethod
    def of(cls, slo: str, percentile: float | None = None, **asked: object) -> FleetRequest:
        """Read the objective.

        Raises:
            UsageError: it is none.
        """
        return cls(FleetGoal(Objective.parse(slo), percentile or PERCENTILE), **asked)  # type: ignore[arg-type]

    def load(self, prompt: int, output: int, limit: int) -> FleetLoad:
        """Make the load, with lengths of these means where there is no trace.

        Raises:
            UsageError: neither a rate nor a trace is given.
            DataError: the trace cannot be used.
        """
        if self.trace is not None:
            return RecordedLoad.read(self.trace, self.rate, self.seed)
        if self.rate is None:
            raise UsageError("a fleet is planned for a rate of requests, or for a trace of them")
        return PoissonLoad(self.rate, prompt, output, self.variation, limit, self.seed)


@dataclass(frozen=True)
class FleetPlan:
    """A fleet on one kind of device."""

    model: str
    target: str
    backend: str
    ranks: int  # devices of a replica
    load: FleetLoad
    goal: FleetGoal
    engine: SimulatedEngine
    size: FleetSize
    usd_per_hour: float | None  # of a device; None: no price is known
    price_source: str
    notes: tuple[str, ...] = field(default=())

    @property
    def devices(self) -> int:
        """Devices of all replicas."""
        return self.size.replicas * self.ranks

    @property
    def cost_per_hour(self) -> float | None:
        """US dollars of all devices."""
        return None if self.usd_per_hour is None else self.devices * self.usd_per_hour

    @property
    def scaling(self) -> ScalingValues:
        """Values for KEDA."""
        return ScalingValues.of(self.size, self.goal, self.load.rate)


def of_plans(
    planned: Sequence[Planned | Refused], asked: FleetRequest, tell: Tell = lambda what: None
) -> list[FleetPlan | Refused]:
    """Size a fleet for each plan, with its prompt and answer as mean lengths.

    Of several, those that cannot be sized are `Refused`; if none can, the first one's error is raised.

    Raises:
        UsageError: the model does not fit the device, one request alone is too slow, or options make no sense.
        DataError: the trace cannot be used.
    """
    answers: list[FleetPlan | Refused] = []
    for each in planned:
        if isinstance(each, Refused):
            answers.append(each)
            continue
        try:
            answers.append(_of_plan(each.plan, asked, tell))
        except (UnsupportedError, UsageError) as error:
            if len(planned) == 1:
                raise
            answers.append(Refused(each.plan.target.name, error))
    if all(isinstance(each, Refused) for each in answers):
        raise next(each.error for each in answers if isinstance(each, Refused))
    return answers


def _of_plan(plan: DeploymentPlan, asked: FleetRequest, tell: Tell) -> FleetPlan:
    placed = Placement(plan.shape, plan.target, plan.scheme, plan.asked.ranks)
    workload = plan.workload
    limit = asked.max_context or plan.shape.context
    longest = LONGEST * workload.context
    load = asked.load(workload.prompt, workload.output, longest if limit is None else min(limit, longest))
    if limit is not None and load.longest > limit:
        raise UsageError(f"a request has {count(load.longest)} tokens, and the context {count(limit)}")
    context = asked.max_context or load.longest
    engine = SimulatedEngine(
        steps=RooflineSteps(placed),
        slots=1,
        max_context=context,
        kv_bytes_per_token=max(1, plan.asked.memory.kv_per_token),
        prefix_cache_bytes=EngineOptions.prefix_cache_bytes if asked.trace is not None else 0,
        keeps_state=plan.shape.state_elements() > 0,
        reads_prompts_alone=plan.scheme.kv == "int8",
    )
    most = memory.largest_batch(placed, context)
    if plan.block_tokens is not None and most:
        engine = replace(engine, block_tokens=plan.block_tokens, blocks=_blocks(placed, context, plan.block_tokens))
        mean = max(1, round(sum(load.mean_tokens())))
        most = max(1, engine.block_tokens * (engine.blocks or 0) // mean)
    size = smallest(load, asked.goal, engine, _slots(asked, most, placed, context), tell)
    price = plan.cost
    return FleetPlan(
        model=plan.shape.name,
        target=plan.target.name,
        backend=plan.backend,
        ranks=plan.asked.ranks,
        load=load,
        goal=asked.goal,
        engine=engine,
        size=size,
        usd_per_hour=None if price is None else price.usd_per_hour / plan.asked.ranks,
        price_source="" if price is None else price.source,
        notes=_notes(plan, load),
    )


def _blocks(placed: Placement, context: int, block_tokens: int) -> int:
    """Count the blocks of a pool that fit beside a step of the most rows that are tried."""
    held = memory.of(placed, Workload(context, 0, SLOTS[-1]))
    free = held.capacity - held.needed + held.cache
    return max(-(-context // block_tokens), free // (block_tokens * held.kv_per_token))


def _slots(asked: FleetRequest, most: int, placed: Placement, context: int) -> list[int]:
    """List the numbers of slots to try, of which at most so many fit.

    Raises:
        UsageError: the model, or the number that is asked for, does not fit.
    """
    device = placed.target.name if placed.ranks == 1 else f"{placed.ranks} × {placed.target.name}"
    if most < 1 or (asked.slots or 1) > most:
        wanted = count(asked.slots or 1)
        raise UsageError(
            f"{placed.shape.name} does not fit {device} with {wanted} slots of {count(context)} tokens: "
            + (f"at most {count(most)} do" if most else "its weights and one slot are too much"),
            hint="split the model (--tp), quantize (--weights, --kv), or plan for less --batch or --context",
        )
    if asked.slots is not None:
        return [asked.slots]
    return sorted({*(each for each in SLOTS if each <= most), min(most, SLOTS[-1])})


def _notes(plan: DeploymentPlan, load: FleetLoad) -> tuple[str, ...]:
    notes = []
    if plan.target.kind == "gpu":
        notes.append("figures of GPUs are predictions, unverified: no fleet was measured on one")
    if plan.backend not in plan.target.engines:
        notes.append(f"engines of {plan.backend} are served by others, whose scheduler differs from the one simulated")
    if isinstance(load, RecordedLoad):
        notes.append("each replica keeps prefixes of its own, and requests are sent to replicas at random")
    return tuple(notes)


def of_artifact(
    folder: Path,
    asked: FleetRequest,
    prompt: int | None = None,
    output: int | None = None,
    usd_per_hour: float | None = None,
    tell: Tell = lambda what: None,
) -> FleetPlan:
    """Size a fleet of an artifact by the steps that its report has timed, on machines as the one that timed them.

    Raises:
        InputError: it is no artifact, or an embedder or a reranker.
        UsageError: its report has no latency, one request alone is too slow, or options make no sense.
        DataError: the trace cannot be used.
    """
    opened = Artifact.open(folder)
    record, config = records.read(opened), RuntimeConfig.read(folder / "engine" / FILE)
    name = f"{opened.manifest.name} {opened.manifest.version}"
    if config.encoder is not None:
        raise InputError(f"{name} is an embedder or a reranker; a fleet is planned for what generates tokens")
    latency = record.latency
    if latency is None:
        raise UsageError(
            f"{name}: its report has no latency, so the steps of its engine are not known",
            hint="build with `validation: {latency: …}`, or plan its recipe or checkpoint",
        )
    limit = config.max_context
    output = output or min(Workload.output, max(limit // 4, 1))
    prompt = prompt or min(Workload.prompt, max(limit - output, 1))
    if prompt + output > limit:
        raise UsageError(f"{prompt} prompt tokens and {output} output tokens exceed the context of {name}, {limit}")
    load = asked.load(prompt, output, limit)
    if load.longest > limit:
        raise UsageError(f"a request has {count(load.longest)} tokens, and the context of {name} {count(limit)}")
    if (asked.slots or 1) > config.max_batch:
        raise UsageError(f"{name} runs {config.max_batch} requests at once, not {asked.slots}")
    engine = _engine_of(config, MeasuredSteps.of(latency.points, name), latency.footprint.kv_bytes_per_token)
    if asked.trace is not None:
        engine = replace(engine, prefix_cache_bytes=EngineOptions.prefix_cache_bytes)
    size = smallest(load, asked.goal, engine, [asked.slots or config.max_batch], tell)
    price, source = _price(opened.manifest.target, usd_per_hour)
    notes = [f"a replica is a machine as the one that timed the artifact: {record.machine.cpu}"]
    if config.speculation is not None:
        notes.append("drafts of tokens are not simulated")
    return FleetPlan(
        model=name,
        target=opened.manifest.target,
        backend=config.provider,
        ranks=config.ranks,
        load=load,
        goal=asked.goal,
        engine=engine,
        size=size,
        usd_per_hour=price,
        price_source=source,
        notes=tuple(notes),
    )


def _engine_of(config: RuntimeConfig, steps: MeasuredSteps, kv_bytes_per_token: int) -> SimulatedEngine:
    """Make what serves an artifact; the search sets its slots."""
    engine = SimulatedEngine(
        steps=steps,
        slots=1,
        max_context=config.max_context,
        kv_bytes_per_token=max(1, kv_bytes_per_token),
        keeps_state=not config.caches,
        buckets=config.buckets,
    )
    paged = PROVIDERS[config.provider].paged
    if config.kv_blocks is None or paged is None:
        return engine
    int8 = config.caches[0].dtype == "int8"
    tokens = paged.block_tokens(config.caches[0].head_dim, int8=int8)
    return replace(engine, blocks=config.kv_blocks, block_tokens=tokens, reads_prompts_alone=int8)


def _price(target: str, given: float | None) -> tuple[float | None, str]:
    """Give the price of a device, and where it is from."""
    if given is not None:
        return given, "given"
    try:
        known = targets.find(target).usd_per_hour
    except ForgeError:  # a target of another machine has no file here
        return None, ""
    return (None, "") if known is None else (known.value, f"{known.source}, {known.date}")
