"""The commands `serve`, `bench` and `triton`. Like all commands they import what they need when they run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmforge.base import extras, process, remembered
from llmforge.base.errors import UsageError
from llmforge.cli import output
from llmforge.cli.parameters import (
    ARTIFACT,
    NATURAL,
    PATH,
    POSITIVE,
    Numbers,
    api_key_option,
    chat_template_option,
    is_json_log,
    keep_quiet,
    record,
    refuse_given,
    require_given,
    server_of,
    tool_prompt_option,
)
from llmforge.cli.provenance import admit, loading_options, signature_options
from llmforge.cli.recording import record_options, recording_options

if TYPE_CHECKING:
    from llmforge.artifact import Artifact
    from llmforge.metrics.latency import Footprint
    from llmforge.serving import EngineProcess
    from llmforge.serving.encoder_engine import EncoderEngine
    from llmforge.serving.http import AccessRecord


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of an engine that serves: its threads, and fields of `EngineOptions`."""
    options = (
        click.option("--threads", type=POSITIVE, metavar="N", help="Engine threads. Defaults to all physical cores."),
        click.option(
            "--prefix-cache", "prefix_cache_bytes", type=NATURAL, default=512,
            metavar="MIB", help="Memory for reusing the KV cache of shared prefixes; 0 disables it.",
            callback=lambda context, parameter, mib: mib << 20,
        ),
        click.option(
            "--speculation", type=click.Choice(["off", "prompt-lookup", "draft", "eagle3"]),
            help="Speculative decoding; does not change answers. Defaults to what ARTIFACT was built with.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


# Options of `serve` that say nothing of what embeds or scores.
_OF_LANGUAGE_MODELS = (
    "chat_template",
    "tool_prompt",
    "prefix_cache_bytes",
    "speculation",
    "prefix_file",
    "prefix_store",
    "response_cache",
    "record_folder",
)
# Options of `bench`, alike.
_BENCH_OF_TOKENS = ("output_tokens", "prefix_tokens", "trace", "prefix_cache_bytes", "speculation")
_OPEN_TO_ALL = "note: everybody who reaches this address may use it; --api-key-file asks for keys"
_SERVE = """\b
Example:
  llmforge serve artifacts/NAME/VERSION --port 8000
"""


@click.command(epilog=_SERVE)
@click.argument("artifact", type=ARTIFACT)
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), metavar="PORT", default=8000, help="Port; 0 picks a free one.")
@click.option("--name", help="Model name in requests. Defaults to the name of ARTIFACT.")
@click.option(
    "--max-queue", type=NATURAL, metavar="N", default=128,
    help="Maximum number of waiting requests; further ones get status 429.",
)  # fmt: skip
@chat_template_option
@tool_prompt_option
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="Cancel requests that take longer.")
@engine_options
@click.option(
    "--prefixes", "prefix_file", type=PATH, metavar="FILE.jsonl",
    help="What prompts begin with, computed before the first request: a JSON object with messages or prompt a line.",
)  # fmt: skip
@click.option(
    "--prefix-store", type=PATH, metavar="FOLDER",
    help="Folder that keeps what was computed of --prefixes. Defaults to a folder in your cache folder.",
)  # fmt: skip
@click.option(
    "--response-cache", type=NATURAL, metavar="N", default=0,
    help="Keep the last N greedy answers for requests of the same key that are the same. Off by default.",
)  # fmt: skip
@click.option(
    "--api-key-file", "key_file", type=PATH, metavar="FILE",
    help="API keys of which requests must have one, a line each: KEY, or KEY NAME requests=N tokens=N concurrent=N "
    "(a minute, and at once) priority=N (lower ones first). Also from LLMFORGE_API_KEYS, separated by commas.",
)  # fmt: skip
@click.option(
    "--allow-host", "hosts", metavar="NAME", multiple=True,
    help="A name that clients reach this server by, as in their Host header. On loopback others are refused.",
)  # fmt: skip
@click.option(
    "--cors-origin", "origins", metavar="ORIGIN", multiple=True,
    help="Web pages that may send requests, such as https://example.org; '*' allows all.",
)  # fmt: skip
@click.option("--tls-cert", "certificate", type=PATH, metavar="FILE", help="Certificate chain (PEM), for HTTPS.")
@click.option("--tls-key", "private_key", type=PATH, metavar="FILE", help="Private key of --tls-cert (PEM).")
@click.option("--access-log", is_flag=True, help="Log every request on standard error.")
@click.option(
    "--telemetry", "telemetry_asked", is_flag=True,
    help="Export OpenTelemetry spans of requests, as OTEL_* variables say. So does OTEL_TRACES_EXPORTER=otlp.",
)  # fmt: skip
@click.option(
    "--grace", "grace_s", type=NATURAL, metavar="SECONDS", default=30,
    help="On shutdown, time to finish requests in flight.",
)  # fmt: skip
@recording_options
@loading_options
@signature_options
def serve(artifact: Path, **given: Any) -> None:
    """Serve ARTIFACT through an OpenAI-compatible API.

    For trying things out: one model, on one machine. Use `llmforge triton` for production.
    """
    extras.require("serve")
    process.share_heaps()
    from llmforge.artifact import Artifact
    from llmforge.cli import console
    from llmforge.serving import EngineOptions, EngineProcess, encoder_runner
    from llmforge.serving import http as server
    from llmforge.serving.encoder_engine import EncoderEngine, EncoderOptions
    from llmforge.serving.http.telemetry import wanted
    from llmforge.serving.protocol.tool_prompt import chosen

    options, address = record(_ServeOptions, given), record(server.Address, given)
    wanted_record = record_options(given)
    if (address.certificate is None) != (address.private_key is None):
        raise UsageError("--tls-cert and --tls-key require each other")
    telemetry = server.Telemetry.from_environment() if wanted(options.telemetry_asked, os.environ) else None
    keys = server.read_keys(options.key_file, os.environ.get("LLMFORGE_API_KEYS"))
    policy = server.AccessPolicy.of(address.host, keys, options.hosts, options.origins)
    opened = Artifact.open(artifact)
    admit(opened, options.allow, options.rehash, require_signature=options.require_signature, key=options.key)
    model = options.name or opened.manifest.name
    log = _log if options.access_log else None
    warned = not policy.keys and not server.is_loopback(address.host)
    if encoder_runner.encodes(opened.path):
        refuse_given("an embedder or a reranker", *_OF_LANGUAGE_MODELS)
        loaded = encoder_runner.load_encoder(opened.path, options.threads)
        encoding = EncoderEngine(loaded, record(EncoderOptions, given))
        announced = partial(_announce_encoder, f"{model} ({opened.manifest.version})", encoding, warned)
        server.run(encoding, model, address, announced, policy, log, telemetry)
        return
    template = chosen(opened.path / "tokenizer", options.chat_template, tool_prompt=options.tool_prompt)
    store = _prefix_store(options, opened.path)
    if store is None:
        require_given("--prefixes", "prefix_store")
    engine = EngineProcess(
        opened.path,
        record(EngineOptions, {**given, "prefix_store": store}),
        options.threads,
        template=template,
        prefixes=options.prefix_file,
    )

    with contextlib.ExitStack() as unstarted:
        unstarted.callback(engine.close, drain=False)
        recorder = None
        if wanted_record is not None:
            with output.writing(wanted_record.folder):
                recorder = server.Recorder(wanted_record, engine.encoder)
        unstarted.pop_all()

    def announce(url: str) -> None:
        _announce(f"{model} ({opened.manifest.version})", url, engine)
        if warned:
            console.say(_OPEN_TO_ALL)

    server.run(engine, model, address, announce, policy, log, telemetry, recorder)


def _prefix_store(options: _ServeOptions, artifact: Path) -> Path | None:
    """Choose where prefixes are kept that the artifact has no files of."""
    from llmforge.serving import saved_prefixes

    if options.prefix_file is None and not (artifact / "engine" / saved_prefixes.FOLDER).is_dir():
        return None
    return options.prefix_store or remembered.home() / "prefixes"


@dataclass(frozen=True)
class _ServeOptions:
    """Options of `serve`, besides those of its address and its engine."""

    name: str | None
    chat_template: Path | None
    tool_prompt: bool
    threads: int | None
    prefix_file: Path | None
    prefix_store: Path | None
    key_file: Path | None
    hosts: tuple[str, ...]
    origins: tuple[str, ...]
    access_log: bool
    telemetry_asked: bool
    allow: str | None
    rehash: bool
    require_signature: bool
    key: Path | None


def _announce_encoder(model: str, engine: EncoderEngine, warned: bool, url: str) -> None:
    from llmforge import __version__
    from llmforge.cli import console

    config = engine.runner.config
    console.say(
        f"llmforge {__version__} serves the {config.kind} {model} at {url}/v1: {engine.options.max_queue} requests "
        f"queued, texts of {config.max_tokens} tokens. Press Ctrl-C to stop."
    )
    if warned:
        console.say(_OPEN_TO_ALL)


def _announce(model: str, url: str, engine: EngineProcess) -> None:
    from llmforge import __version__
    from llmforge.cli import console

    config, queue = engine.encoder.config, engine.options.max_queue
    console.say(
        f"llmforge {__version__} serves {model} at {url}/v1: {config.max_batch} concurrent requests, {queue} queued, "
        f"{config.max_context} tokens of context. Press Ctrl-C to stop."
    )
    for note in engine.stats().notes:
        console.say(f"note: {note}")


def _log(request: AccessRecord) -> None:
    from llmforge.cli import console

    if is_json_log():
        fields = dataclasses.asdict(request)
        console.log("access", **{name: value for name, value in fields.items() if value is not None})
    else:
        console.say(
            f"{request.client} {request.method} {request.path} {request.status} {request.seconds * 1000:.1f} ms "
            f"{request.request_id}"
        )


_BENCH = """\b
Examples:
  llmforge bench artifacts/NAME/VERSION --concurrency 1,4,8 --slo ttft=200ms
  llmforge bench artifacts/NAME/VERSION --rate 0.5,2 --output report.json
  llmforge bench artifacts/EMBEDDER/VERSION --prompt-tokens 16,128 --texts 1,8,32
"""


@click.command(epilog=_BENCH)
@click.argument("artifact", type=ARTIFACT)
@click.option(
    "--concurrency", type=Numbers(int), default=(), metavar="N,…",
    help="Numbers of requests in flight, each measured separately. Defaults to 1,4.",
)  # fmt: skip
@click.option(
    "--rate", "rates", type=Numbers(float), default=(), metavar="R,…",
    help="Request rates per second (Poisson arrivals), instead of --concurrency.",
)  # fmt: skip
@click.option(
    "--trace", type=PATH, metavar="FILE.jsonl",
    help='Replay requests, one per line: {"at_s", "prompt_tokens" or "prompt", "output_tokens"}.',
)  # fmt: skip
@click.option("--prompt-tokens", type=Numbers(int), default="128", metavar="N,…", help="Prompt lengths.")
@click.option("--output-tokens", type=Numbers(int), default="64", metavar="N,…", help="Answer lengths.")
@click.option(
    "--texts", type=Numbers(int), default=(), metavar="N,…",
    help="Of an embedder or a reranker: texts of a request, each of --prompt-tokens. Defaults to 1.",
)  # fmt: skip
@click.option("--requests", type=POSITIVE, metavar="N", default=32, help="Requests per run.")
@click.option("--repetitions", type=POSITIVE, metavar="N", default=1, help="Runs per load.")
@click.option("--warmup", type=NATURAL, metavar="N", default=2, help="Warm-up requests before each run.")
@click.option("--data", type=PATH, metavar="FILE.jsonl", help="Take prompts from the texts of FILE.jsonl.")
@click.option(
    "--prefix-tokens", type=NATURAL, metavar="N", default=0, help="Length of a prefix shared by all prompts of a run."
)
@click.option(
    "--slo", metavar="ttft=200ms,tpot=50ms", help="Measure goodput: the rate of requests that meet these limits."
)
@click.option("--seed", type=NATURAL, metavar="N", default=0, help="Random seed of prompts and arrivals.")
@engine_options
@click.option("--url", metavar="URL", help="Measure this endpoint instead; it must use the tokenizer of ARTIFACT.")
@api_key_option
@click.option("-o", "--output", "path", type=PATH, metavar="REPORT.json", help="Write the report to a file.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
@click.option("-q", "--quiet", is_flag=True, callback=keep_quiet, help="Hide progress and notes.")
@loading_options
def bench(artifact: Path, slo: str | None, path: Path | None, as_json: bool, quiet: bool, **options: Any) -> None:
    """Measure latency, throughput and goodput under load."""
    from llmforge import serving
    from llmforge.artifact import Artifact
    from llmforge.cli import console
    from llmforge.measure import load as measuring
    from llmforge.serving.encoder_runner import encodes

    if options["trace"] is not None:
        refuse_given("--trace", "prompt_tokens", "output_tokens", "requests", "repetitions", "warmup", "prefix_tokens")
        options["warmup"] = 0
    if options["url"] is not None:
        refuse_given("--url", "threads", "prefix_cache_bytes", "speculation")
    server = server_of(options["url"], options["api_key"])
    if not (options["concurrency"] or options["rates"] or options["trace"]):
        options["concurrency"] = (1, 4)
    objective = None if slo is None else measuring.Objective.parse(slo)
    load = record(measuring.LoadSpec, options)
    plan = record(measuring.SweepPlan, options, objective=objective)
    engine = record(serving.EngineOptions, options, max_queue=max((128, *load.concurrency)))
    opened = Artifact.open(artifact)
    admit(opened, options["allow"], options["rehash"])
    if encodes(opened.path):
        refuse_given("an embedder or a reranker", *_BENCH_OF_TOKENS)
        if objective is not None and (objective.ttft_ms is not None or objective.tpot_ms is not None):
            raise UsageError(f"--slo {slo}: an embedder or a reranker gives no tokens", hint="--slo latency=…")
        load = dataclasses.replace(load, texts=load.texts or (1,))
    if path is not None:
        output.check_file(path)
    with console.progress(quiet=quiet) as progress:
        progress.stage("Send requests")
        report = measuring.run(
            opened.path,
            f"{opened.manifest.name} {opened.manifest.version}",
            load,
            plan,
            server=server,
            local=measuring.LocalEngine(engine, options["threads"], _footprint(opened)),
            progress=progress.advance,
        )
    if path is not None:
        with output.writing(path):
            path.write_text(report.to_json(), encoding="utf-8")
    if as_json:
        output.write_data(report.to_json())
    else:
        from llmforge.report import bench_table

        output.write(bench_table.table(report))


_TRITON = """\b
Examples:
  llmforge triton artifacts/NAME/VERSION -o models
  llmforge triton artifacts/NAME/VERSION -o models --launch -- --log-verbose=1
"""


@click.command(epilog=_TRITON)
@click.argument("artifact", type=ARTIFACT)
@click.argument("server_options", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-o", "--output", "models", type=PATH, required=True, metavar="REPO",
    help="Model repository; may already hold other models and versions.",
)  # fmt: skip
@click.option("--name", help="Model name. Defaults to the name of ARTIFACT.")
@click.option("--model-version", "version", type=POSITIVE, metavar="N", default=1, help="Model version.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE",
    help="Override a `serving` value of the recipe, such as max_queue=64 or triton.instances=2; repeatable.",
)  # fmt: skip
@chat_template_option
@tool_prompt_option
@loading_options
@click.option("--copy", is_flag=True, help="Copy the engine files instead of hard-linking them.")
@click.option("--json", "as_json", is_flag=True, help="Print the model's folder as JSON.")
@click.option("--launch", is_flag=True, help="Start the server; SERVER_OPTIONS after `--` are passed to it.")
@click.option(
    "--server", type=PATH,
    help="Server binary, or an environment with nvidia-pytriton of PyPI. Defaults to `tritonserver` on PATH.",
)  # fmt: skip
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", help="With --launch: address of the server.")
@click.option("--http-port", "http", type=click.IntRange(1, 65535), metavar="PORT", default=8000, help="HTTP port.")
@click.option("--grpc-port", "grpc", type=click.IntRange(1, 65535), metavar="PORT", default=8001, help="gRPC port.")
@click.option(
    "--metrics-port", "metrics", type=click.IntRange(1, 65535), metavar="PORT", default=8002, help="Metrics port."
)
def triton(artifact: Path, server_options: tuple[str, ...], as_json: bool, launch: bool, **given: Any) -> None:
    """Write a self-contained Triton model repository for ARTIFACT.

    The last line of standard output is the model's folder or, with --launch, the command line of the server.
    """
    from llmforge.artifact import Artifact, check_name
    from llmforge.triton import launch as starting
    from llmforge.triton import repository, vllm

    if as_json and launch:
        raise UsageError("--json cannot be used with --launch")
    if server_options and not launch:
        raise UsageError("SERVER_OPTIONS require --launch")
    options = record(_TritonOptions, given)
    opened = Artifact.open(artifact)
    needed = Path(output.here(opened.path)) / repository.FOLDER / opened.manifest.name / "1" / repository.REQUIREMENTS
    found = starting.find(options.server, needed if needed.is_file() else None) if launch else None
    admit(opened, options.allow, options.rehash, besides=[f"{repository.FOLDER}/"])
    chosen = check_name(options.name) if options.name is not None else None
    model = repository.of_artifact(
        opened,
        name=chosen,
        overrides=options.overrides,
        allow=options.allow,
        chat_template=_other_template(opened, options.chat_template, options.tool_prompt),
    )
    export = vllm.exporter(opened, model)
    of_vllm = export is vllm.export
    if of_vllm and model.chat_template is not None:
        refuse_given("a model of Triton's vLLM backend, which takes no chats", "chat_template", "tool_prompt")
    written = str(export(opened, model, options.models, version=options.version, copy=options.copy))
    if as_json:
        output.write_json({"model": written})
    else:
        output.write_lines(written)
    if found is None and not as_json:
        from llmforge.cli import console

        console.say(f"next: {written}/README.md says what the server needs and how to start it")
    if found is not None:
        models = options.models
        if of_vllm:  # which reads paths from where the server starts
            os.chdir(models)
            models = Path()
        line = starting.command(found, models, record(starting.Ports, given), server_options)
        output.write_lines(shlex.join(line))
        sys.stdout.flush()
        os.execve(found.program, line, found.environment)


def _other_template(opened: Artifact, file: Path | None, tool_prompt: bool) -> str | None:
    """Give the source of the template that was asked for in place of an artifact's own; None: it has that one."""
    from llmforge.serving.protocol.tool_prompt import chosen

    template = chosen(opened.path / "tokenizer", file, tool_prompt=tool_prompt) if file or tool_prompt else None
    return None if template is None else template.source


@dataclass(frozen=True)
class _TritonOptions:
    """Options of `triton`, besides the ports of its server."""

    models: Path
    name: str | None
    version: int
    chat_template: Path | None
    tool_prompt: bool
    overrides: tuple[str, ...]
    copy: bool
    server: Path | None
    allow: str | None
    rehash: bool


def _footprint(opened: Artifact) -> Footprint | None:
    """Read what a decode step of an artifact reads, if its report says so."""
    from llmforge.gates import records as model

    latency = model.read(opened).latency
    return None if latency is None else latency.footprint
