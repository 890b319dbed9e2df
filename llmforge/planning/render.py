"""Show a plan on a terminal, and write it as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmforge.base.cores import physical_cores
from llmforge.base.errors import ForgeError
from llmforge.metrics.units import count, duration, percent, significant, size, step_time, times
from llmforge.planning.advice import Advice
from llmforge.planning.building import BuildCost
from llmforge.planning.deployment import Degree, DeploymentPlan
from llmforge.planning.roofline import StepCost
from llmforge.targets import matrix_share_of
from llmforge.targets.achieved import Share

_VERDICTS = {"pays": "green", "does not pay": "dim", "refused": "yellow", "done": "dim", "not known": "yellow"}
_WORDS = {"target", "dtypes", "fits", "step", "bound by", "pass", "verdict", "why"}  # columns
_STEP = (  # what is told of a step as data
    "seconds", "memory_s", "compute_s", "links_s", "overhead_s", "bytes", "operations", "intensity", "mbu", "mfu",
    "bound",
)  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A plan, what its build takes, and the passes that pay."""

    plan: DeploymentPlan
    build: BuildCost
    advice: tuple[Advice, ...]


@dataclass(frozen=True)
class Refused:
    """A target that was asked for beside others, and why it has no plan."""

    target: str
    error: ForgeError


def comparison(answers: Sequence[Planned | Refused]) -> RenderableType:
    """Set targets side by side, one line each; what memory holds and what it costs stand in tables of their own."""
    planned = [each for each in answers if isinstance(each, Planned)]
    speeds = _table("", "target", "TTFT", "TPOT", "tok/s", "MBU", "bound by")
    sizes = _table("", "target", "dtypes", "fits", "weights", "batch ≤", "$/M in", "$/M out")
    refusals = []
    for each in answers:
        if isinstance(each, Refused):
            for table in (speeds, sizes):
                table.add_row(each.target, Text("refused", "yellow"))
            hint = f"; hint: {each.error.hint}" if each.error.hint else ""
            refusals.append(Text(f"{each.target}: {each.error.message}{hint}", "yellow"))
            continue
        plan, asked, step = each.plan, each.plan.asked, each.plan.asked.decode.step
        name = plan.target.name if asked.ranks == 1 else f"{asked.ranks} × {plan.target.name}"
        rate = significant(asked.decode.tokens_per_second)
        speeds.add_row(name, *_times(asked), rate, percent(step.mbu), step.bound)
        sizes.add_row(
            name,
            f"{plan.scheme.weights}, cache {plan.scheme.cached}",
            _fits(asked.memory.fits),
            size(asked.memory.weights),
            count(asked.largest_batch),
            *_prices(plan),
        )
    first = planned[0].plan
    return Group(Text(_model(first)), Text(_workload(first), "dim"), speeds, sizes, *refusals)


def details(planned: Planned) -> RenderableType:
    """Show all of one plan."""
    plan = planned.plan
    devices = plan.target.title if plan.asked.ranks == 1 else f"{plan.asked.ranks} × {plan.target.title}"
    head = Text.assemble((plan.shape.name, "bold"), " on ", (devices, "bold"), f", {plan.backend}")
    return Group(
        head,
        Text(_model(plan)),
        Text(plan.scheme.words()),
        Text(_workload(plan)),
        Text(""),
        _memory(plan),
        _largest(plan),
        _steps(plan),
        _degrees(plan),
        *([_of_each(plan)] if len(plan.degrees) > 1 else []),
        _passes(planned.advice),
        *_bases(planned.advice),
        _facts(planned),
        *_assumptions(plan),
        *(Text(f"note: {note}", "dim") for note in plan.notes),
    )


def data(planned: Planned | Refused) -> dict[str, Any]:
    """Write a plan as plain data: bytes, seconds, shares between 0 and 1, US dollars; or why there is none."""
    if isinstance(planned, Refused):
        return {"target": planned.target, "refused": planned.error.message, "hint": planned.error.hint}
    plan = planned.plan
    return {
        "model": {
            "name": plan.shape.name,
            "architecture": plan.shape.architecture,
            "parameters": plan.shape.parameters,
            "active_parameters": plan.shape.active_parameters,
            "layers": plan.shape.depth,
            "context": plan.shape.context,
        },
        "target": plan.target.name,
        "backend": plan.backend,
        "ranks": plan.asked.ranks,
        "scheme": asdict(plan.scheme),
        "workload": asdict(plan.workload),
        "memory": {**asdict(plan.asked.memory), "needed": plan.asked.memory.needed, "fits": plan.asked.memory.fits},
        "largest_batch": [{"context": context, "batch": batch} for context, batch in plan.largest],
        "prefill": _step_data(plan.asked.prefill),
        "decode": [
            {
                "batch": each.batch,
                "fits": each.fits,
                "tokens_per_second": each.tokens_per_second,
                **_step_data(each.step),
            }
            for each in plan.decodes
        ],
        "ops_per_byte": plan.ceilings.balance,
        "compute_bound_from_batch": plan.turning_batch,
        "tensor_parallel": [
            {
                "ranks": each.ranks,
                "fits": each.memory.fits,
                "weights": each.memory.weights,
                "kv_cache": each.memory.cache,
                "activations": each.memory.activations,
                "sent_bytes_per_token": each.sent_per_token,
                "largest_batch": each.largest_batch,
                "ttft_s": each.prefill.seconds,
                "tpot_s": each.decode.step.seconds,
                "links_share": _links_share(each),
                "tokens_per_second": each.decode.tokens_per_second,
            }
            for each in plan.degrees
        ],
        "cost": None if plan.cost is None else asdict(plan.cost),
        "build": {
            **asdict(planned.build),
            "machine": "this machine",  # whatever the target
            "speed": dict(zip(("products", "python"), planned.build.speed, strict=True)),
            "seconds": planned.build.seconds(physical_cores()),
        },
        "passes": [asdict(each) for each in planned.advice],
        "assumptions": {name: asdict(plan.target.share(name)) for name in _shares(plan)},
        "notes": list(plan.notes),
    }


def _step_data(step: StepCost) -> dict[str, Any]:
    return {name: getattr(step, name) for name in _STEP}


def _model(plan: DeploymentPlan) -> str:
    shape = plan.shape
    sparse = f", {_billions(shape.active_parameters)} of them active" if _is_sparse(plan) else ""
    context = "" if shape.context is None else f", context of {count(shape.context)} tokens"
    return f"{shape.architecture}, {_billions(shape.parameters)} parameters{sparse}, {shape.depth} layers{context}"


def _is_sparse(plan: DeploymentPlan) -> bool:
    return plan.shape.active_parameters < plan.shape.parameters


def _billions(parameters: int) -> str:
    return f"{significant(parameters / 1e9)} B" if parameters >= 1e8 else f"{significant(parameters / 1e6)} M"


def _workload(plan: DeploymentPlan) -> str:
    asked = plan.workload
    at_once = "1 sequence" if asked.batch == 1 else f"{asked.batch} concurrent sequences"
    return f"{at_once}, {count(asked.prompt)} prompt tokens, {count(asked.output)} output tokens"


def _table(title: str, *columns: str) -> Table:
    """Make a table: words stand on the left, figures on the right."""
    table = Table(title=title or None, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in _WORDS else "right")
    return table


def _fits(fits: bool) -> Text:
    return Text("yes", "green") if fits else Text("no", "bold red")


def _times(degree: Degree) -> tuple[str, str]:
    return step_time(degree.prefill.seconds), step_time(degree.decode.step.seconds)


def _prices(plan: DeploymentPlan) -> tuple[str, str]:
    if plan.cost is None:
        return "–", "–"
    return significant(plan.cost.per_million_in, 2), significant(plan.cost.per_million_out, 2)


def _memory(plan: DeploymentPlan) -> Table:
    held = plan.asked.memory
    names = ("weights", "KV cache", "activations", "reserve", "needed", "of", "fits")
    table = _table(f"Memory per device; a token takes {size(held.kv_per_token)} of the KV cache", *names)
    table.columns[-1].justify = "right"
    parts = (held.weights, held.cache, held.activations, held.reserve, held.needed, held.capacity)
    table.add_row(*map(size, parts), _fits(held.fits))
    return table


def _largest(plan: DeploymentPlan) -> Table:
    title = "Largest batch by context"
    table = _table(title, *(count(context) for context, _ in plan.largest))
    table.min_width = len(title)
    table.add_row(*(count(batch) if batch else Text("none", "bold red") for _, batch in plan.largest))
    return table


def _steps(plan: DeploymentPlan) -> Table:
    names = ("step", "time", "tok/s", "MBU", "MFU", "ops/byte", "bound by", "fits")  # 80 columns wide
    table = _table("Prefill, and decode by batch size", *names)
    first = plan.asked.prefill
    table.add_row(
        "prefill",
        step_time(first.seconds),
        significant(plan.workload.prompt / first.seconds),
        *_shares_of(first),
        _fits(plan.asked.memory.fits),
    )
    for each in plan.decodes:
        style = "bold" if each.batch == plan.workload.batch else ""
        table.add_row(
            f"batch {count(each.batch)}",
            step_time(each.step.seconds),
            significant(each.tokens_per_second),
            *_shares_of(each.step),
            _fits(each.fits),
            style=style,
        )
    return table


def _shares_of(step: StepCost) -> tuple[str, ...]:
    return percent(step.mbu), percent(step.mfu), significant(step.intensity), step.bound


def _degrees(plan: DeploymentPlan) -> Table:
    names = ("devices", "fits", "weights of each", "batch ≤", "TTFT", "TPOT", "links", "tok/s")
    table = _table("Tensor parallelism", *names)
    for each in plan.degrees:
        table.add_row(
            str(each.ranks),
            _fits(each.memory.fits),
            size(each.memory.weights),
            count(each.largest_batch),
            *_times(each),
            percent(_links_share(each)),
            significant(each.decode.tokens_per_second),
        )
    return table


def _of_each(plan: DeploymentPlan) -> Table:
    table = _table("What each device holds, and sends", "devices", "weights", "KV cache", "activations", "sent a token")
    for each in plan.degrees:
        held = (each.memory.weights, each.memory.cache, each.memory.activations)
        table.add_row(str(each.ranks), *map(size, held), size(each.sent_per_token) if each.ranks > 1 else "–")
    return table


def _links_share(degree: Degree) -> float:
    return degree.decode.step.links_s / degree.decode.step.seconds


def _passes(advice: Sequence[Advice]) -> Table:
    table = _table("Effect of passes: how many times as fast", "pass", "verdict", "decode", "prefill", "tok/s", "why")
    for each in advice:
        ratios = (each.tpot and 1 / each.tpot, each.ttft and 1 / each.ttft, each.tokens_per_second)
        table.add_row(
            each.change,
            Text(each.verdict, _VERDICTS[each.verdict]),
            *("" if ratio is None else times(ratio) for ratio in ratios),
            each.reason,
        )
    return table


def _bases(advice: Sequence[Advice]) -> Iterator[Text]:
    """Say what the figures of passes rest on, those that share a basis in one line."""
    for basis in dict.fromkeys(each.basis for each in advice if each.basis):
        names = "; ".join(each.change for each in advice if each.basis == basis)
        yield Text(f"basis of {names}: {basis}", "dim")


def _facts(planned: Planned) -> Table:
    plan, build, cores = planned.plan, planned.build, physical_cores()
    products, python = build.speed
    table = Table.grid(padding=(0, 2))
    for title, text in (
        ("balance", _balance(plan)),
        ("cost", _cost(plan)),
        (
            "build",
            f"about {duration(build.seconds(cores))} on this machine ({count(cores)} cores, "
            f"{duration(build.cpu_s)} of CPU time), {size(build.memory_bytes)} of memory, "
            f"{size(build.disk_bytes)} of disk in addition to the checkpoint ({size(build.checkpoint_bytes)}); "
            f"measured on {build.of}; this machine is now {times(products)} as fast in matrix products and "
            f"{times(python)} in Python{_calibrates(build, cores)}",
        ),
    ):
        table.add_row(Text(title, "dim"), Text(text))
    return table


def _calibrates(build: BuildCost, cores: int) -> str:
    """Say how long calibration takes over workers, where there are some."""
    spread = next((stage for stage in build.stages if stage.workers), None)
    if spread is None:
        return ""
    alone = replace(spread, workers=0).seconds(cores)
    return (
        f"; calibration takes {duration(spread.seconds(cores))} of it with {count(spread.workers)} workers on other "
        f"machines, each on a CPU as fast as here, {duration(alone)} without"
    )


def _balance(plan: DeploymentPlan) -> str:
    turning = (
        "decode is never compute-bound: each sequence reads its own cache"
        if plan.turning_batch is None
        else f"decode is compute-bound from batch {count(plan.turning_batch)} on"
    )
    return f"the device does {significant(plan.ceilings.balance)} operations per byte; {turning}"


def _cost(plan: DeploymentPlan) -> str:
    if plan.cost is None:
        return f"no price known for {plan.target.name}: set --price"
    cost = plan.cost
    return (
        f"${significant(cost.per_million_in, 2)} per million input tokens, "
        f"${significant(cost.per_million_out, 2)} per million output tokens, "
        f"at ${significant(cost.usd_per_hour)} per hour ({cost.source})"
    )


def _assumptions(plan: DeploymentPlan) -> Iterator[Text]:
    for name in _shares(plan):
        taken = plan.target.share(name)
        yield Text(f"assumed: {name} {taken.value:g}: {taken.source}", "dim")


def _shares(plan: DeploymentPlan) -> tuple[Share, ...]:
    """Name the assumptions that this plan rests on."""
    used: list[Share] = ["bandwidth", matrix_share_of(plan.scheme.product), "layer_us"]
    if len(plan.degrees) > 1:
        used += ["link", "collective_us"]
    return tuple(used)
