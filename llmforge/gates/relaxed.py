"""Limits of a recipe that what was measured would keep, and the `--set` values that say so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from llmforge.gates import verdict
from llmforge.gates.decision import GateResult, Verdict
from llmforge.gates.records import Report
from llmforge.metrics import catalog
from llmforge.recipe import GateSpec

BUDGET_MARGIN = 1.1  # measured again, the same graphs give the same KLD but for the order of sums
INTERVAL_MARGIN = 0.25  # of the half of an interval that lies beyond the figure
TIMING_MARGIN = 0.1  # timings move from run to run

Judge = Callable[[Mapping[str, GateSpec]], Sequence[GateResult]]


def budget(kld_mean: float) -> float:
    """Return a budget that a pass keeps whose cost was measured, with a margin: two digits, rounded up."""
    return rounded_outward(kld_mean * BUDGET_MARGIN, 2, upper=True)


def gates(specs: Mapping[str, GateSpec], results: Sequence[GateResult], judge: Judge) -> dict[str, GateSpec]:
    """Return the gates whose limits move so that those of `results` pass that did not; the others stay as they are.

    `judge` decides gates on what was measured: a limit that would not decide even so, for there is too little data or
    nothing was measured, is left out.
    """
    moved: dict[str, GateSpec] = {}
    for result in results:
        if result.verdict is Verdict.PASS or result.is_relative or (limit := _limit(result)) is None:
            continue
        before = moved.get(result.metric, specs[result.metric])
        moved[result.metric] = before.model_copy(update={result.bound: limit})
    still = {each.metric for each in judge({**specs, **moved}) if each.verdict is not Verdict.PASS}
    return {metric: spec for metric, spec in moved.items() if metric not in still}


def settings(specs: Mapping[str, GateSpec], moved: Mapping[str, GateSpec]) -> tuple[str, ...]:
    """Write the limits that `moved` as `--set` takes them."""
    return tuple(
        f"gates.{metric}.{name}={limit:g}"
        for metric, spec in moved.items()
        for name, limit in spec.limits.items()
        if specs[metric].limits.get(name) != limit
    )


def ways(report: Report, artifact: str) -> tuple[str, ...]:
    """Say what changes the verdict of an artifact whose gates failed or are undecided, a way in each line."""
    specs: dict[str, GateSpec] = {}
    for gate in report.gates:
        limits = specs[gate.metric].limits if gate.metric in specs else {}
        specs[gate.metric] = GateSpec.model_validate({**limits, gate.bound: gate.limit})
    moved = gates(
        specs, report.gates, partial(verdict.judge, measured=report.measured, unmeasured=report.engine.unmeasured)
    )
    found = []
    undecided = [each for each in report.gates if each.verdict is Verdict.INCONCLUSIVE and each.measured is not None]
    if any(each.measured.of == "documents" for each in undecided if each.measured is not None):
        found.append(f"measure more documents: llmforge gate {artifact} --until-decided --text MORE.jsonl")
    counts = [each.samples_needed or 0 for each in undecided if each.measured and each.measured.of == "repetitions"]
    if any(counts):
        found.append(f"time more often: --set validation.latency.repetitions={max(counts)}")
    if moved:
        accepted = " ".join(f"--set {setting}" for setting in settings(specs, moved))
        found.append(f"accept what was measured: build with {accepted}")
    return tuple(found)


def _limit(result: GateResult) -> float | None:
    """Move the limit behind the interval of what was measured; None: there is none."""
    found = result.measured
    if found is None or not math.isfinite(found.value):
        return None
    bound = found.high if result.is_upper else found.low
    reached = found.value if bound is None else bound
    if not math.isfinite(reached):
        return None
    timed = catalog.named(result.metric).section == "latency"
    beyond = abs(reached - found.value) * INTERVAL_MARGIN + (abs(reached) * TIMING_MARGIN if timed else 0.0)
    return rounded_outward(reached + beyond if result.is_upper else reached - beyond, 4, upper=result.is_upper)


def rounded_outward(value: float, digits: int, *, upper: bool) -> float:
    """Round to so many significant digits, up or down."""
    if value == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) + 1 - digits)
    steps = math.ceil(value / unit - 1e-9) if upper else math.floor(value / unit + 1e-9)
    return float(f"{steps * unit:.{digits}g}")
