"""The commands `plan` and `doctor`. Like all commands they import what they need when they run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

import llmforge
from llmforge.backends.record import Dtype
from llmforge.base import extras
from llmforge.base.errors import EnvironmentLacks, UsageError
from llmforge.cli import output
from llmforge.cli.hub import REVISION, on_hub
from llmforge.cli.parameters import (
    BACKEND,
    NATURAL,
    PATH,
    POSITIVE,
    TARGET,
    first_given,
    grouped,
    options_record,
    record,
    refuse_given,
    require_given,
)

if TYPE_CHECKING:
    from llmforge.measure.ceilings import CpuCeilings
    from llmforge.measure.gpus import Gpu
    from llmforge.measure.machine import Machine
    from llmforge.planning.fleet import FleetPlan, FleetRequest
    from llmforge.planning.render import Planned, Refused
    from llmforge.targets import Target

_DTYPES = get_args(Dtype)
_MANIFEST = "manifest.json"  # that every artifact has


_EXAMPLES = """\b
Examples:
  llmforge plan CHECKPOINT
  llmforge plan recipes/quickstart.yaml --target l4
  llmforge plan CHECKPOINT --target h100-sxm --weights int4 --batch 8
  llmforge plan CHECKPOINT --target h100-sxm --target l4
  llmforge plan ORG/NAME --target h100-sxm    # on the Hub; downloads no weights
  llmforge plan CHECKPOINT --target h200 --rate 50/s --slo ttft=500ms,tpot=30ms
  llmforge plan ARTIFACT --rate 2/s --slo ttft=1s,tpot=50ms    # by the steps that its report has timed
"""


@dataclass(frozen=True)
class _FleetOptions:
    """Options of `plan` for the size of a fleet."""

    rate: str | None
    slo: str | None
    trace: Path | None
    variation: float | None
    percentile: float | None
    seed: int | None

    @property
    def asked(self) -> bool:
        """Whether a fleet is asked for."""
        return self.rate is not None or self.trace is not None


_FLEET = grouped(
    click.option(
        "--rate", metavar="N/s|min|h",
        help="Plan a fleet for so many requests (Poisson arrivals): devices, replicas, slots, cost, KEDA values.",
    ),
    click.option("--slo", metavar="ttft=500ms,tpot=30ms", help="With --rate: objective that a fleet must meet."),
    click.option(
        "--trace", type=PATH, metavar="FILE.jsonl",
        help="Plan a fleet for these arrivals, as `bench --trace` takes them; --rate scales them.",
    ),
    click.option(
        "--length-cv", "variation", type=click.FloatRange(0, 5), metavar="X",
        help="With --rate: standard deviation over mean of prompt and answer lengths. Defaults to 0.5; 0: all alike.",
    ),
    click.option(
        "--percentile", type=click.FloatRange(50, 99.9), metavar="P",
        help="With --slo: percentile that each bound holds for. Defaults to 95.",
    ),
    click.option("--seed", type=NATURAL, metavar="N", help="With --rate: random seed of lengths and arrivals."),
)  # fmt: skip


@click.command(epilog=_EXAMPLES)
@click.argument("what", metavar="RECIPE|CHECKPOINT|ARTIFACT", type=PATH)
@click.option(
    "--target", "targets", type=TARGET, multiple=True, metavar="NAME|FILE.yaml",
    help="Target to plan for, see `llmforge targets`; repeatable. Defaults to the target of RECIPE, "
    "or of CHECKPOINT to `local`, the CPU of this machine.",
)  # fmt: skip
@click.option(
    "--engine",
    "backend",
    type=BACKEND,
    help="Runtime. Defaults to the one of RECIPE, or the first of the target.",
)
@click.option(
    "--batch", type=POSITIVE, metavar="N", help="Concurrent sequences. Defaults to max_batch of RECIPE, else 1."
)
@click.option(
    "--prompt", type=POSITIVE, metavar="N", help="Prompt tokens. Defaults to 1024, or less if the context is shorter."
)
@click.option(
    "--output", type=POSITIVE, metavar="N", help="Output tokens. Defaults to 256, or less if the context is shorter."
)
@click.option(
    "--context", type=click.IntRange(min=2), metavar="N", help="Prompt and output tokens together, instead of --prompt."
)
@click.option(
    "--dtype",
    "compute",
    type=click.Choice(["fp32", "fp16", "bf16"]),
    help="Dtype of activations. Defaults to the checkpoint's.",
)
@click.option("--weights", type=click.Choice(_DTYPES), help="Dtype of weight matrices. Defaults to --dtype.")
@click.option("--kv", type=click.Choice(_DTYPES), help="Dtype of the KV cache. Defaults to --dtype.")
@click.option(
    "--products", "product", type=click.Choice(["fp8", "fp4", "int8"]),
    help="Also quantize activations, and multiply in this dtype. Defaults to --dtype.",
)  # fmt: skip
@click.option(
    "--tp",
    "ranks",
    type=POSITIVE,
    metavar="N",
    help="Tensor parallelism: number of devices. Defaults to tensor_parallel of RECIPE on a GPU, else 1.",
)
@click.option(
    "--price",
    "usd_per_hour",
    type=click.FloatRange(min=0, min_open=True),
    metavar="USD",
    help="Price of one device per hour.",
)
@click.option(
    "--calibration-workers", type=click.IntRange(1, 8), metavar="N",
    help="Predict the build with N workers of calibration, one CPU each on other machines as fast as this one.",
)  # fmt: skip
@_FLEET
@REVISION
@click.option("--plot", type=PATH, metavar="FILE.svg|html", help="Plot the roofline to a file.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@options_record(_FleetOptions, "fleet")
def plan(
    what: Path, revision: str | None, plot: Path | None, as_json: bool, fleet: _FleetOptions, **asked: Any
) -> None:
    """Predict memory, speed and cost without building.

    Reads no weights: a folder with only config.json is enough. Several targets are compared in a table. If a target
    is this machine's CPU, it is measured first, once (`llmforge doctor --measure`).

    With --rate or --trace, predict the smallest fleet that meets --slo, by serving in simulation; of an ARTIFACT by
    the step times in its report.
    """
    from llmforge.planning import render, request
    from llmforge.planning.render import Planned
    from llmforge.rewrite.traits import Storage

    if asked["usd_per_hour"] is not None and not math.isfinite(asked["usd_per_hour"]):
        raise UsageError(f"--price {asked['usd_per_hour']}: expected a finite number of US dollars")
    if plot is not None:
        from llmforge.planning import plot as plots

        output.check_file(plot, *plots.SUFFIXES)
    if not fleet.asked:
        require_given("--rate or --trace", "slo", "variation", "percentile", "seed")
    else:
        refuse_given("--rate and --trace", "plot", "calibration_workers")
    if os.path.isfile(what / _MANIFEST):  # noqa: PTH113 - a folder that may not be read is refused as a checkpoint
        if not fleet.asked:
            raise UsageError(f"{what} is an artifact", hint="plan its recipe or checkpoint, or give --rate and --slo")
        _size_artifact(what, fleet, as_json, asked)
        return
    snapshot = on_hub(what, revision)
    what = what if snapshot is None else snapshot.folder
    if _plan_encoder(what, asked, as_json):
        return
    wanted = record(Storage, asked)
    planned = request.answer(what, record(request.PlanRequest, asked, wanted=wanted), measured_here)
    if plot is not None:
        plots.write([each.plan for each in planned if isinstance(each, Planned)], plot)
    if fleet.asked:
        _size(what, planned, fleet, as_json, asked)
        return
    if as_json:
        facts = [render.data(each) for each in planned]
        output.write_json(facts[0] if len(facts) == 1 else facts)
    else:
        [*others, last] = planned
        output.write(render.comparison(planned) if others or not isinstance(last, Planned) else render.details(last))
    if plot is not None:
        output.write_lines(str(plot), err=as_json)


_ON_ARTIFACTS = (  # what an artifact says itself
    "targets", "backend", "context", "compute", "weights", "kv", "product", "ranks", "calibration_workers", "revision"
)  # fmt: skip


def _size_artifact(folder: Path, options: _FleetOptions, as_json: bool, asked: Mapping[str, Any]) -> None:
    """Show the fleet of an artifact."""
    from llmforge.planning import fleet

    refuse_given("an artifact", *_ON_ARTIFACTS)
    wanted = _fleet_request(options, slots=asked["batch"])
    with _told() as tell:
        found = fleet.of_artifact(folder, wanted, asked["prompt"], asked["output"], asked["usd_per_hour"], tell)
    _show_fleet([found], as_json)


def _size(
    what: Path, planned: Sequence[Planned | Refused], options: _FleetOptions, as_json: bool, asked: Mapping[str, Any]
) -> None:
    """Show fleets of a recipe, which says slots and context, or of a checkpoint."""
    from llmforge import targets
    from llmforge.planning import fleet

    slots, context = asked["batch"], asked["context"]
    if targets.is_file(what.name):
        from llmforge.recipe import Recipe

        engine = Recipe.load(what).engine
        slots, context = slots or engine.max_batch, context or engine.max_context
    wanted = _fleet_request(options, slots=slots, max_context=context)
    with _told() as tell:
        found = fleet.of_plans(planned, wanted, tell)
    _show_fleet(found, as_json)


def _fleet_request(options: _FleetOptions, **more: Any) -> FleetRequest:
    from llmforge.planning import fleet

    if options.slo is None:
        raise UsageError("--rate and --trace require --slo", hint="for example --slo ttft=500ms,tpot=30ms")
    if options.trace is not None:
        refuse_given("--trace", "variation", "prompt", "output")
    given = {name: getattr(options, name) for name in ("trace", "variation", "seed")}
    return fleet.FleetRequest.of(
        options.slo,
        options.percentile,
        rate=None if options.rate is None else fleet.parse_rate(options.rate),
        **{name: value for name, value in given.items() if value is not None},
        **more,
    )


@contextlib.contextmanager
def _told() -> Iterator[Callable[[str], None]]:
    """Show what is simulated."""
    from llmforge.cli import console

    with console.progress() as progress:
        yield lambda what: progress.stage(f"Simulate {what}")


def _show_fleet(found: Sequence[FleetPlan | Refused], as_json: bool) -> None:
    from llmforge.planning import fleet

    if as_json:
        facts = [fleet.data(each) for each in found]
        output.write_json(facts[0] if len(facts) == 1 else facts)
    else:
        output.write(fleet.table(found))


def _plan_encoder(what: Path, asked: Mapping[str, Any], as_json: bool) -> bool:
    """Plan what embeds or scores; False: it is a language model.

    Raises:
        UsageError: an option is for language models.
    """
    from llmforge.planning import encoder_plan

    folder, recipe, encoding = encoder_plan.encoding_at(what)
    if encoding is None:
        return False
    fleet = (each.name for each in dataclasses.fields(_FleetOptions))
    if (option := first_given("plot", *fleet, *(asked.keys() - {"targets"}))) is not None:
        raise UsageError(
            f"{encoding.title} is planned by --target alone; {option} is for language models", hint=f"remove {option}"
        )
    made = encoder_plan.answer(folder, encoding, recipe, asked["targets"], measured_here)
    if as_json:
        output.write_json(encoder_plan.data(made))
    else:
        output.write(encoder_plan.details(made))
    return True


def measured_here(target: Target) -> Target | None:
    """Give the figures of this machine to a CPU target that is its own; None where it is another's.

    They are measured once, and again by `llmforge doctor --measure`.
    """
    from llmforge.doctor import kept
    from llmforge.measure import machine

    if not kept.is_here(target):
        return None
    here = machine.describe()
    if (known := kept.of_target(target, here)) is not None:
        return known
    if extras.missing("build") or extras.trouble(extras.RUNTIME) is not None:  # nothing that could be measured
        return None
    from llmforge.cli import console
    from llmforge.doctor import machine as files
    from llmforge.measure import ceilings

    console.say("measuring this machine, once: memory bandwidth and matrix products")
    with console.progress() as progress:
        reached = ceilings.measure(here.cores, progress.stage)
    if reached.disturbed:
        console.say(
            f"other processes used {reached.others:.1f} cores meanwhile: an idle machine is faster; "
            "`llmforge doctor --measure` measures again"
        )
    found = files.of_cpu(target.name, here, reached, datetime.now(UTC).date().isoformat())
    kept.keep(found, here)
    return found


_CONSTRAINTS = Path(llmforge.__file__).with_name("constraints.txt")
_DOCTOR = """\b
Examples:
  llmforge doctor
  llmforge doctor --measure --write here.yaml    # then: llmforge plan RECIPE --target here.yaml
  llmforge doctor --constraints > constraints.txt    # then: pip install -c constraints.txt 'llmforge[build,cpu]'
"""


@click.command(epilog=_DOCTOR)
@click.option(
    "--measure", is_flag=True,
    help="Measure memory bandwidth and matrix multiplication rates; `llmforge plan` uses what was measured last.",
)  # fmt: skip
@click.option(
    "--write", "path", type=PATH, metavar="FILE.yaml",
    help="With --measure: write this machine as a target file, for `plan --target` and recipes.",
)  # fmt: skip
@click.option("--device", default="cpu", metavar="cpu|cuda:N", help="With --measure: device to measure.")
@click.option(
    "--threads",
    type=POSITIVE,
    metavar="N",
    help="With --measure: maximum number of threads. Default: all physical cores.",
)
@click.option(
    "--prove-transformers", "prove", is_flag=True,
    help="Prove that the installed release of transformers works, which lets it pass from then on.",
)  # fmt: skip
@click.option(
    "--constraints", is_flag=True, help="Print the package versions that llmforge is tested with, for `pip install -c`."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def doctor(
    measure: bool,
    path: Path | None,
    device: str,
    threads: int | None,
    prove: bool,
    constraints: bool,
    as_json: bool,
) -> None:
    """Check what this machine can build and run, and measure it."""
    if constraints:
        refuse_given("--constraints", "measure", "path", "device", "threads", "prove", "as_json")
        output.write_script(_CONSTRAINTS.read_text(encoding="utf-8"))
        return
    if prove:
        refuse_given("--prove-transformers", "measure", "path", "device", "threads")
        _prove_transformers(as_json)
        return
    from llmforge.cli import console
    from llmforge.doctor import environment, plugins, render
    from llmforge.measure import gpus, machine

    if path is not None:
        output.check_file(path, ".yaml", ".yml")
    if not measure:
        require_given("--measure", "path", "device", "threads")
    here, found = machine.describe(), gpus.find()
    checks = [*environment.checklist(here, found, Path.cwd()), *plugins.checks()]
    ceilings = None
    if measure:
        with console.progress() as progress:
            ceilings = _measured(device, found, here, threads, path, progress.stage)
    if as_json:
        output.write_json(render.data(checks, environment.packages(), environment.settings(), found, ceilings))
    else:
        output.write(render.report(checks, ceilings))
    if path is not None:
        output.write_lines(str(path), err=as_json)


def _prove_transformers(as_json: bool) -> None:
    """Prove the installed release of transformers, and say what was found."""
    from llmforge.cli import console
    from llmforge.doctor import releases

    extras.require("build")
    with console.progress() as progress:
        proof = releases.prove(progress)
    if as_json:
        output.write_json({**dataclasses.asdict(proof), "record": str(proof.record)})
        return
    changed = f", of which {', '.join(proof.changed)} have a source that is new" if proof.changed else ""
    lines = [f"transformers {proof.version}: {proof.hooks} hooks are there{changed}"]
    lines += [f"{name}: {found}" for name, found in proof.types.items()]
    output.write_lines(*lines, str(proof.record))


def _measured(
    device: str,
    found: Sequence[Gpu],
    here: Machine,
    threads: int | None,
    path: Path | None,
    told: Callable[[str], None],
) -> CpuCeilings | None:
    """Measure `device` and write its target file to `path`; the ceilings of a CPU."""
    from llmforge import targets
    from llmforge.cli import console
    from llmforge.doctor import kept, machine
    from llmforge.measure import ceilings, gpus

    day = datetime.now(UTC).date().isoformat()
    name = "" if path is None else path.stem
    if device == "cpu":
        cpu = ceilings.measure(threads or here.cores, told)
        if threads is None:
            kept.keep(machine.of_cpu(targets.local().name, here, cpu, day), here)
        if path is not None:
            machine.write(machine.of_cpu(name, here, cpu, day), path)
        return cpu
    gpu = next((each for each in found if device == f"cuda:{each.index}"), None)
    if gpu is None:
        known = ", ".join(["cpu", *(f"cuda:{each.index}" for each in found)])
        if re.fullmatch(r"cuda:\d+", device) is None:
            raise UsageError(f"--device {device!r}: expected cpu or cuda:N", hint=f"available here: {known}")
        raise EnvironmentLacks(f"there is no NVIDIA GPU {device} on this machine", hint=f"available here: {known}")
    told(f"Memory bandwidth of {gpu.title}")
    bandwidth = gpus.copy_bandwidth(gpu)
    told(f"Matrix multiplication on {gpu.title}")
    rates = gpus.matrix_rates(gpu, ceilings.cuda_product(gpus.PRODUCT))
    for what, rate in (("bytes copied", bandwidth), *rates.items()):
        console.say(f"{gpu.title}: {what}: {rate / 1e12:.3g} T/s")
    if path is not None:
        machine.write(machine.of_gpu(name, gpu, bandwidth, rates, day), path)
    return None
