"""Hold `llmforge plan --rate` against `llmforge bench`: p50 of TTFT and TPOT, predicted and measured, of ten loads.

    python -m benchmarks.fleet ARTIFACT [-o figures.json]

Two shapes of requests, five shares of what the artifact can serve. Before and after each load the engine's steps are
timed, as `validation.latency` does; the prediction rests on these alone, and the scheduler serves the very requests
and arrivals of the load in simulation. So whatever else the machine does meanwhile is on both sides. Prints a table in
Markdown with the machine's load average.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from llmforge.measure import latency
from llmforge.measure.load.drive import InProcess, open_loop
from llmforge.measure.load.workload import LoadRequest, RandomPrompts, make_load
from llmforge.metrics.latency import Footprint, LatencyPoint
from llmforge.metrics.serving import RequestOutcome
from llmforge.planning.fleet.simulation import SimulatedEngine, simulate
from llmforge.planning.fleet.steps import MeasuredSteps, chunks
from llmforge.serving import Engine, Runner, load

SHAPES = ((64, 32), (256, 48))  # prompt and answer, in tokens
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the requests per second that the engine can serve
REQUESTS = (16, 24, 32, 40, 48)  # by share
FOOTPRINT = Footprint(artifact_bytes=1, weight_bytes_per_token=1, kv_bytes_per_token=1)  # is not looked at


@dataclass(frozen=True)
class Compared:
    """One load: milliseconds."""

    prompt: int
    output: int
    share: float
    rate: float
    requests: int
    ttft_predicted: float
    ttft_measured: float
    tpot_predicted: float
    tpot_measured: float
    load_average: float


def timed_steps(runner: Runner, seed: int) -> tuple[LatencyPoint, ...]:
    """Time answers at one and more rows, as `validation.latency` times them."""
    most, once = runner.config.max_batch, []
    for batch in sorted({1, 2, 4, most}):
        once.append(latency.TimedLoad(batch, 64, 8, 2))
    once.append(latency.TimedLoad(1, 256, 8, 2))
    run = latency.LatencyRun(
        once,
        runner.config.vocabulary,
        threads=runner.config.session.resolve(None).threads,
        seed=seed,
        instruments=latency.Instruments(bandwidth=lambda footprint, context, threads: None),
    )
    model = latency.TimedModel.of_runner(runner, description="the artifact", load_seconds=0.0)
    return latency.measure(model, None, FOOTPRINT, run).points


def capacity(steps: MeasuredSteps, slots: int, prompt: int, output: int) -> float:
    """Requests per second while every slot is taken in every step."""
    reading = sum(steps.seconds([tokens], [past]) for tokens, past in chunks(prompt))
    return 1 / (reading + output * steps.seconds([1] * slots, [prompt + output // 2] * slots) / slots)


def medians(outcomes: list[RequestOutcome]) -> tuple[float, float]:
    """Give p50 of TTFT and of TPOT in milliseconds."""
    failed = [each.error for each in outcomes if each.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    found = [(each.ttft_ms, each.tpot_ms) for each in outcomes]
    ttft = statistics.median(first for first, _ in found if first is not None)
    return ttft, statistics.median(later for _, later in found if later is not None)


def compare(runner: Runner, engine: Engine) -> list[Compared]:
    """Measure and predict all loads in turn."""
    slots, context = runner.config.max_batch, runner.config.max_context
    before = timed_steps(runner, 0)
    found = []
    for number, (share, requests) in enumerate(zip(SHARES, REQUESTS, strict=True)):
        for prompt, output in SHAPES:
            rate = share * capacity(MeasuredSteps.of(before, "here"), slots, prompt, output)
            sent: list[LoadRequest] = make_load(
                RandomPrompts(runner.config.vocabulary),
                requests,
                prompt_tokens=prompt,
                output_tokens=output,
                rate=rate,
                seed=(number, prompt),
            )
            measured = medians(open_loop(InProcess(engine, "the artifact"), sent))
            after = timed_steps(runner, number + 1)
            steps = MeasuredSteps.of((*before, *after), "here")
            blank = [LoadRequest((0,) * prompt, output, each.at_s) for each in sent]
            predicted = medians(list(simulate(SimulatedEngine(steps, slots, context, 1), blank).outcomes))
            found.append(
                Compared(
                    prompt, output, share, rate, requests,
                    predicted[0], measured[0], predicted[1], measured[1], os.getloadavg()[0],
                )
            )  # fmt: skip
            print(row(found[-1]), file=sys.stderr, flush=True)
            before = after
    return found


def row(each: Compared) -> str:
    """Write a load as a row of the table."""
    ttft, tpot = each.ttft_predicted / each.ttft_measured - 1, each.tpot_predicted / each.tpot_measured - 1
    return (
        f"| {each.prompt} + {each.output} | {each.share:.1f} | {each.rate:.2f} | {each.ttft_predicted:.1f} | "
        f"{each.ttft_measured:.1f} | {ttft:+.0%} | {each.tpot_predicted:.2f} | {each.tpot_measured:.2f} | "
        f"{tpot:+.0%} | {each.load_average:.1f} |"
    )


def table(found: list[Compared]) -> str:
    """Write all loads, one shape after the other."""
    head = (
        "| tokens | share | req/s | TTFT p50 predicted, ms | measured | error | TPOT p50 predicted, ms | measured | "
        "error | load average |"
    )
    rows = sorted(found, key=lambda each: (each.prompt, each.share))
    return "\n".join([head, "|---" * 10 + "|", *map(row, rows)])


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    runner = load(options.artifact)
    with Engine(runner) as engine:
        found = compare(runner, engine)
    print(table(found))
    if options.output is not None:
        options.output.write_text(json.dumps([asdict(each) for each in found], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
