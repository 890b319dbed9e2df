"""Measures a server over a sweep of loads, and what of the machine's bandwidth decoding reaches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from llmforge.measure.latency import DRAM_PROBE_BYTES
from llmforge.measure.load.drive import Responder, closed_loop, open_loop
from llmforge.measure.load.report import LoadPoint, Utilization
from llmforge.measure.load.workload import LoadRequest, Prompts, make_load
from llmforge.measure.machine import read_bandwidth
from llmforge.metrics.latency import Footprint
from llmforge.metrics.serving import Objective, RequestOutcome, figures

Progress = Callable[[int, int], None]  # is told how many requests are done, and how many there are


@dataclass(frozen=True)
class Setting:
    """One point of a sweep: lengths, and either a number of requests in flight or an arrival rate per second.

    With `texts`, requests have so many to encode, each of `prompt_tokens`, and `output_tokens` is 0.
    """

    prompt_tokens: int
    output_tokens: int
    concurrency: int | None = None
    rate: float | None = None
    texts: int | None = None


@dataclass(frozen=True)
class SweepPlan:
    """What every point of a sweep has in common.

    Before a point is timed, `warmup` requests of the same kind run. No two requests share more of their prompts than
    the first `prefix_tokens`, which are the same within one run of one point.
    """

    requests: int
    repetitions: int = 1
    warmup: int = 1
    prefix_tokens: int = 0
    seed: int = 0
    objective: Objective | None = None


def measure(
    subject: Responder, settings: Sequence[Setting], prompts: Prompts, plan: SweepPlan, progress: Progress
) -> list[LoadPoint]:
    """Measure all settings in turn, `plan.repetitions` times, so that a machine that slows down slows all of them."""
    each = plan.requests + plan.warmup
    done, total = 0, each * len(settings) * plan.repetitions
    runs: list[list[list[RequestOutcome]]] = [[] for _ in settings]
    for repetition in range(plan.repetitions):
        for at, setting in enumerate(settings):
            warmup, load = loads(setting, prompts, plan, (plan.seed, repetition, at))
            closed_loop(subject, warmup, setting.concurrency or 1, _shifted(progress, done, total))
            tell = _shifted(progress, done + plan.warmup, total)
            if setting.concurrency is None:
                runs[at].append(open_loop(subject, load, tell))
            else:
                runs[at].append(closed_loop(subject, load, setting.concurrency, tell))
            done += each
    return [
        LoadPoint(**asdict(setting), figures=figures(run, plan.objective))
        for setting, run in zip(settings, runs, strict=True)
    ]


def replay(
    subject: Responder, load: Sequence[LoadRequest], objective: Objective | None, progress: Progress
) -> LoadPoint:
    """Measure a trace of arrivals, once: a second time a prefix cache would know its prompts."""
    outcomes = open_loop(subject, load, _shifted(progress, 0, len(load)))
    return LoadPoint(figures=figures([outcomes], objective))


def utilization(points: Sequence[LoadPoint], footprint: Footprint, *, slots: int, threads: int) -> list[LoadPoint]:
    """Add to each closed-loop point the share of the measured bandwidth that its decoding uses (MBU).

    A step reads the weights once, and for each row in flight the cache at the middle of its answer; it takes the
    median TPOT. Where prompts are read between the steps, TPOT holds their time too, and MBU is a lower bound.
    """
    return [point.model_copy(update={"bandwidth": _utilization(point, footprint, slots, threads)}) for point in points]


def _utilization(point: LoadPoint, footprint: Footprint, slots: int, threads: int) -> Utilization | None:
    if point.concurrency is None or point.prompt_tokens is None or point.output_tokens is None:
        return None
    if point.figures.tpot_ms is None:
        return None
    rows = min(point.concurrency, slots)
    context = point.prompt_tokens + point.output_tokens // 2
    size = footprint.weight_bytes_per_token + rows * context * footprint.kv_bytes_per_token
    # Beyond the probe of DRAM a larger working set tells nothing new, and its memory may not be there.
    bandwidth = read_bandwidth(min(size, DRAM_PROBE_BYTES), threads)
    return Utilization(
        bytes_read_per_step=size,
        bytes_per_second=bandwidth,
        share=size / (point.figures.tpot_ms.p50.value / 1e3) / bandwidth,
    )


def loads(
    setting: Setting, prompts: Prompts, plan: SweepPlan, seed: tuple[int, ...]
) -> tuple[list[LoadRequest], list[LoadRequest]]:
    """Make what warms up for a run, and its load: prompts are drawn in one go, so that they share a prefix."""
    made = make_load(
        prompts,
        plan.warmup + plan.requests,
        prompt_tokens=setting.prompt_tokens,
        output_tokens=setting.output_tokens,
        prefix_tokens=plan.prefix_tokens,
        rate=setting.rate,
        seed=seed,
        texts=setting.texts,
    )
    first = made[plan.warmup].at_s or 0.0
    load = [each if each.at_s is None else replace(each, at_s=each.at_s - first) for each in made[plan.warmup :]]
    return made[: plan.warmup], load


def _shifted(progress: Progress, before: int, total: int) -> Callable[[int], None]:
    return lambda count: progress(before + count, total)
