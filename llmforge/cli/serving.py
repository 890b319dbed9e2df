"""The commands `serve`, `bench` and `triton`. Like all commands they import what they need when they run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmforge import __version__
from llmforge.base import extras
from llmforge.base.errors import UsageError
from llmforge.cli import output
from llmforge.cli.parameters import NATURAL, PATH, POSITIVE, Numbers, record, refuse_given

if TYPE_CHECKING:
    from llmforge.metrics.latency import Footprint


def _engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of an engine that serves: its threads, and fields of `EngineOptions`."""
    options = (
        click.option("--threads", type=POSITIVE, help="Threads of the engine; all physical cores if left out."),
        click.option(
            "--prefix-cache", "prefix_cache_bytes", type=NATURAL, default=512,
            metavar="MIB", help="Keep so much of texts for later ones that begin alike; 0 keeps nothing.",
            callback=lambda context, parameter, mib: mib << 20,
        ),
        click.option(
            "--speculation", type=click.Choice(["off", "prompt-lookup"]), default="off",
            help="Guess tokens from the text itself; answers stay the same.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("artifact", type=PATH)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="0 takes a free port.")
@click.option("--name", help="Name of the model in requests; the artifact's own name if left out.")
@click.option(
    "--max-queue", type=NATURAL, default=128,
    help="Requests that wait while all slots are taken; one more gets status 503.",
)  # fmt: skip
@click.option("--timeout", "timeout_s", type=float, help="End answers that take longer, in seconds.")
@_engine_options
@click.option(
    "--grace", "grace_s", type=NATURAL, default=30,
    help="At the end, wait so many seconds for answers that are being made.",
)  # fmt: skip
def serve(
    artifact: Path, host: str, port: int, name: str | None, threads: int | None, grace_s: int, **options: Any
) -> None:
    """Serve ARTIFACT by OpenAI's protocol, for trying things: no access control, no TLS."""
    extras.require("serve")
    from llmforge import serve as server
    from llmforge.artifact import Artifact
    from llmforge.runtime import Engine, EngineOptions

    opened = Artifact.open(artifact)
    model = name or opened.manifest.name
    engine = Engine.load(opened.path, EngineOptions(**options), threads)

    def announce(url: str) -> None:
        config, queue = engine.runner.config, options["max_queue"]
        click.echo(
            f"llmforge {__version__} serves {model} ({opened.manifest.version}) at {url}/v1: {config.max_batch} "
            f"requests at once, {queue} more may wait, {config.max_context} tokens of context. Ctrl-C ends it.",
            err=True,
        )
        for note in engine.stats().notes:
            click.echo(f"note: {note}", err=True)

    server.run(engine, model, server.Address(host, port, grace_s), announce)


@click.command()
@click.argument("artifact", type=PATH)
@click.option(
    "--concurrency", type=Numbers(int), default=(), metavar="N,…",
    help="Requests in flight, each number a point of its own; 1,4 if nothing else is chosen.",
)  # fmt: skip
@click.option(
    "--rate", "rates", type=Numbers(float), default=(), metavar="R,…",
    help="Poisson arrivals per second, in place of the above.",
)  # fmt: skip
@click.option(
    "--trace", type=PATH, metavar="FILE.jsonl",
    help='Replay arrivals: {"at_s", "prompt_tokens" or "prompt", "output_tokens"} a line.',
)  # fmt: skip
@click.option("--prompt-tokens", type=Numbers(int), default="128", metavar="N,…")
@click.option("--output-tokens", type=Numbers(int), default="64", metavar="N,…")
@click.option("--requests", type=POSITIVE, default=32, help="Of each point and run.")
@click.option("--repetitions", type=POSITIVE, default=1, help="Runs of each point.")
@click.option("--warmup", type=NATURAL, default=2, help="Requests before each run.")
@click.option("--data", type=PATH, metavar="FILE.jsonl", help="Cut prompts from its texts.")
@click.option("--prefix-tokens", type=NATURAL, default=0, help="Begin all prompts of a run with the same tokens.")
@click.option("--slo", metavar="ttft=200ms,tpot=50ms", help="Count the requests that meet all of these: goodput.")
@click.option("--seed", type=NATURAL, default=0, help="Of prompts and arrivals.")
@_engine_options
@click.option("--url", help="Measure the endpoint there, which serves ARTIFACT's tokenizer, and not this process.")
@click.option("-o", "--output", "path", type=PATH, metavar="REPORT.json", help="Write the report there.")
@click.option("--json", "as_json", is_flag=True, help="Write the report as JSON instead of a table.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def bench(
    artifact: Path,
    slo: str | None,
    url: str | None,
    threads: int | None,
    path: Path | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Measure how ARTIFACT serves: latencies, throughput and goodput by load."""
    from llmforge import bench as measuring
    from llmforge import runtime
    from llmforge.artifact import Artifact
    from llmforge.cli import console

    if options["trace"] is not None:
        refuse_given("--trace", "prompt_tokens", "output_tokens", "requests", "repetitions", "warmup", "prefix_tokens")
        options["warmup"] = 0
    if url is not None:
        refuse_given("--url", "threads", "prefix_cache_bytes", "speculation")
    if not (options["concurrency"] or options["rates"] or options["trace"]):
        options["concurrency"] = (1, 4)
    load = record(measuring.Load, options)
    plan = record(measuring.Plan, options, objective=None if slo is None else measuring.Objective.parse(slo))
    engine = record(runtime.EngineOptions, options, max_queue=max((128, *load.concurrency)))
    opened = Artifact.open(artifact)
    if path is not None:
        output.check_file(path)
    with console.progress(quiet=quiet) as progress:
        progress.stage("Send requests")
        report = measuring.run(
            opened.path,
            f"{opened.manifest.name} {opened.manifest.version}",
            load,
            plan,
            url=url,
            local=measuring.LocalEngine(engine, threads, _footprint(opened.path)),
            progress=progress.advance,
        )
    if path is not None:
        with output.writing(path):
            path.write_text(report.to_json(), encoding="utf-8")
    if as_json:
        click.echo(report.to_json(), nl=False)
    else:
        output.write(measuring.table(report))


@click.command()
@click.argument("artifact", type=PATH)
@click.argument("server_options", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-o", "--output", "models", type=PATH, required=True, metavar="REPO",
    help="The model repository, which may hold other models and versions.",
)  # fmt: skip
@click.option("--name", help="The model's name; the artifact's unless given.")
@click.option("--model-version", "version", type=POSITIVE, default=1, help="The model's version.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE",
    help="Change how it is served: max_queue=64, triton.instances=2. Keys are those of `serving` in a recipe.",
)  # fmt: skip
@click.option("--copy", is_flag=True, help="Copy the engine instead of making hard links.")
@click.option("--launch", is_flag=True, help="Start the server on it; SERVER_OPTIONS after `--` go to the server.")
@click.option("--server", type=PATH, help="The server's binary; `tritonserver` on PATH if not.")
@click.option("--host", default="127.0.0.1", help="Address of the server.")
@click.option("--http-port", "http", type=click.IntRange(1, 65535), default=8000)
@click.option("--grpc-port", "grpc", type=click.IntRange(1, 65535), default=8001)
@click.option("--metrics-port", "metrics", type=click.IntRange(1, 65535), default=8002)
def triton(
    artifact: Path,
    server_options: tuple[str, ...],
    models: Path,
    name: str | None,
    version: int,
    overrides: tuple[str, ...],
    copy: bool,
    launch: bool,
    server: Path | None,
    **ports: Any,
) -> None:
    """Write a Triton model repository for ARTIFACT that stands alone.

    The last line of standard output is the model's folder, or the server's command line with --launch.
    """
    from llmforge.artifact import Artifact, check_name
    from llmforge.triton import launch as starting
    from llmforge.triton import repository

    if server_options and not launch:
        raise UsageError("SERVER_OPTIONS are for the server that --launch starts")
    binary = starting.find(server) if launch else None
    opened = Artifact.open(artifact)
    opened.verify()
    model = repository.of_artifact(opened, name=check_name(name) if name is not None else None, overrides=overrides)
    click.echo(str(repository.export(opened, model, models, version=version, copy=copy)))
    if binary is not None:
        line = starting.command(binary, models, starting.Ports(**ports), server_options)
        click.echo(shlex.join(line))
        sys.stdout.flush()
        os.execv(binary, line)


def _footprint(artifact: Path) -> Footprint | None:
    """Read what a decode step of an artifact reads, if its report says so."""
    from llmforge.report import model

    record = artifact / "report" / "report.json"
    latency = model.read(record).latency if record.is_file() else None
    return None if latency is None else latency.footprint
