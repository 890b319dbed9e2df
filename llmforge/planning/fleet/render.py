"""Show a fleet on a terminal, and write it as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmforge.metrics.units import count, ms, significant
from llmforge.planning.fleet.answer import FleetPlan
from llmforge.planning.fleet.sizing import quantiles
from llmforge.planning.render import Refused


def table(answers: Sequence[FleetPlan | Refused]) -> RenderableType:
    """Set fleets side by side, one line a kind of device, and say below what they rest on."""
    planned = [each for each in answers if isinstance(each, FleetPlan)]
    goal = planned[0].goal
    shown = _table("target", "devices", "replicas", "slots of each", "req/s of each", "$/h")
    times = _times_table(goal.percentile)
    refusals = []
    for each in answers:
        if isinstance(each, Refused):
            shown.add_row(each.target, Text("refused", "yellow"))
            hint = f"; hint: {each.error.hint}" if each.error.hint else ""
            refusals.append(Text(f"{each.target}: {each.error.message}{hint}", "yellow"))
            continue
        size = each.size
        cost = "–" if each.cost_per_hour is None else significant(each.cost_per_hour)
        rate = significant(each.load.rate / size.replicas)
        shown.add_row(each.target, count(each.devices), count(size.replicas), count(size.slots), rate, cost)
        times.add_row(each.target, *_times(each), significant(size.running))
    return Group(
        Text.assemble((planned[0].model, "bold"), f": {planned[0].load.words}"),
        Text(f"goal: {goal.words}"),
        shown,
        times,
        *(line for each in planned for line in _below(each, several=len(planned) > 1)),
        *refusals,
    )


def _below(plan: FleetPlan, *, several: bool) -> list[Text]:
    of, scaling = f"{plan.target}: " if several else "", plan.scaling
    lines = [
        Text(
            f"{of}KEDA: minReplicaCount {scaling.least}, maxReplicaCount {scaling.most}, thresholds of a replica: "
            f"{scaling.waiting} requests waiting, {scaling.running:g} running (docs/deploy/kubernetes/autoscaling.yaml)"
        ),
        Text(f"{of}steps {plan.engine.steps.basis}", "dim"),
        Text(f"{of}served in simulation by llmforge's scheduler over {_cache(plan)}, {plan.backend}", "dim"),
    ]
    if plan.cost_per_hour is None:
        lines.append(Text(f"{of}no price known for {plan.target}: set --price", "dim"))
    else:
        lines.append(Text(f"{of}price of a device: {plan.price_source}", "dim"))
    return [*lines, *(Text(f"{of}note: {note}", "dim") for note in plan.notes)]


def _cache(plan: FleetPlan) -> str:
    engine = plan.engine
    if engine.blocks is None:
        return f"slots of {count(engine.max_context)} tokens"
    return f"{count(engine.blocks)} blocks of {engine.block_tokens} tokens"


def _table(*columns: str) -> Table:
    made = Table()
    for name in columns:
        made.add_column(name, justify="left" if name == "target" else "right")
    return made


def _times_table(percentile: float) -> Table:
    tail = f"p{percentile:g}"
    return _table("target", "TTFT p50", tail, "TPOT p50", tail, "TTFT alone", "running")


def _times(plan: FleetPlan) -> list[str]:
    shown, percentile = [], plan.goal.percentile
    for name in ("TTFT", "TPOT"):
        for each in (50.0, percentile):
            found = quantiles(plan.size.outcomes, each)
            shown.append(ms(found[name]) if name in found else "–")
    return [*shown, ms(plan.size.alone["TTFT"])]


def data(plan: FleetPlan | Refused) -> dict[str, Any]:
    """Write a fleet as plain data: milliseconds, requests per second, US dollars; or why there is none."""
    if isinstance(plan, Refused):
        return {"target": plan.target, "refused": plan.error.message, "hint": plan.error.hint}
    size, percentile, scaling = plan.size, plan.goal.percentile, plan.scaling
    prompt, output = plan.load.mean_tokens()
    return {
        "model": plan.model,
        "target": plan.target,
        "backend": plan.backend,
        "rate": plan.load.rate,
        "load": plan.load.words,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "objective": {name.lower() + "_ms": bound for name, bound in plan.goal.bounds.items()},
        "percentile": percentile,
        "devices": plan.devices,
        "ranks": plan.ranks,
        "replicas": size.replicas,
        "slots": size.slots,
        "max_context": plan.engine.max_context,
        "blocks": plan.engine.blocks,
        "block_tokens": None if plan.engine.blocks is None else plan.engine.block_tokens,
        "rate_of_a_replica": plan.load.rate / size.replicas,
        "running_of_a_replica": size.running,
        "predicted": {
            f"p{each:g}": {name.lower() + "_ms": value for name, value in quantiles(size.outcomes, each).items()}
            for each in sorted({50.0, percentile})
        },
        "alone": {name.lower() + "_ms": value for name, value in size.alone.items()},
        "usd_per_hour": plan.cost_per_hour,
        "price_source": plan.price_source or None,
        "keda": {**asdict(scaling), "spec": scaling.spec()},
        "steps": plan.engine.steps.basis,
        "notes": list(plan.notes),
    }
