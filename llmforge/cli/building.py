"""The command `build`. Like all commands it imports what it needs when it runs."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmforge import backends
from llmforge.base import extras, folders, process
from llmforge.base.errors import EnvironmentLacks, UsageError
from llmforge.cli import farming, output, verdicts
from llmforge.cli.caching import connect, remote_option
from llmforge.cli.parameters import (
    ARTIFACT,
    NATURAL,
    PATH,
    goes_on,
    is_json_log,
    keep_quiet,
    out_option,
    refuse_given,
    require_given,
    runtime_option,
)

if TYPE_CHECKING:
    from llmforge.gates.records import EngineRecord
    from llmforge.metrics.agreement import RuntimeName


@contextmanager
def _resumable(*, kept: bool) -> Iterator[None]:
    """Tell of an interruption what it left behind; what a build has published it cannot undo."""
    try:
        yield
    except KeyboardInterrupt as error:
        again = (
            "run the same command to go on from what the cache kept" if kept else "run the same command to start over"
        )
        error.add_note(f"nothing was published; {again}")
        raise


def _next_steps(artifact: Path, engine: EngineRecord) -> Iterator[str]:
    """Say what one does with an artifact whose gates passed."""
    name = shlex.quote(output.here(artifact))
    if artifact.parent.parent == folders.artifacts().absolute():
        name = f"{artifact.parent.name}/{artifact.name}"
    if engine.pending:
        yield f"next, on the target: llmforge build --finish {name} RECIPE"
        return
    export_format = backends.export_format(engine.backend)
    if export_format is not None:
        yield f"next: {export_format.serve.format(engine=shlex.quote(output.here(artifact / 'engine')))}"
    else:
        yield f'next: llmforge run {name} "PROMPT"'
    yield f"      llmforge gate {name}"
    yield f"      llmforge triton {name} -o models"


@contextmanager
def _said(path: Path) -> Iterator[None]:
    """Tell where the artifact is even if standard output, which is to say it, is full."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise EnvironmentLacks(
            f"standard output cannot be written: {error.strerror}", hint=f"the artifact was published: {path}"
        ) from error


_EXAMPLES = """\b
Examples:
  llmforge build recipes/quickstart.yaml
  llmforge build recipes/quickstart.yaml --set engine.max_batch=4
  llmforge build recipes/genai.yaml --set 'validation.runtimes=[optimum]' --runtime optimum=ENV/bin/python
  llmforge build --finish artifacts/NAME/VERSION    # on the host with the GPU
  llmforge build --matrix release.yaml              # models x targets x variants, on Ray

\b
--matrix ends with the exit code of the worst build: 1, 7, 5, 6, 8, 9, 2 (not built), 3, 4, 10 (gates), 0.
"""


def _passed_on(
    no_cache: bool, cache_size: int | None, remote: str | None, key: Path | None, signer: Path | None
) -> list[str]:
    """Write the options of the cache for the builds of a matrix; paths are those of this machine."""
    if no_cache:
        refuse_given("--no-cache", "cache_size", *_REMOTE)
        return ["--no-cache"]
    connect(remote, key, signer)  # refuses now what every build would refuse
    given = {
        "--cache-size": cache_size,
        "--remote-cache": remote,
        "--cache-key": None if key is None else key.absolute(),
        "--remote-cache-write": None if signer is None else signer.absolute(),
    }
    return [word for name, value in given.items() if value is not None for word in (name, str(value))]


_REMOTE = "remote_cache", "cache_key", "remote_cache_write"


@click.command(epilog=_EXAMPLES)
@click.argument("recipe", type=PATH, required=False)
@out_option("Publish the artifact to DIR/NAME/VERSION.")
@click.option(
    "--defer", is_flag=True,
    help="Publish without an engine, to build it later on the target GPU with --finish.",
)  # fmt: skip
@click.option(
    "--finish", "pending", type=ARTIFACT, metavar="ARTIFACT",
    help="Build the deferred engine of ARTIFACT on this machine, as a new version. With RECIPE, also validate it.",
)  # fmt: skip
@click.option(
    "--matrix", type=PATH, metavar="FILE.yaml",
    help="Build models x targets x variants on Ray, as FILE.yaml says (docs/farm.md), and write a page about them.",
)  # fmt: skip
@farming.ray_options
@click.option("--page", type=PATH, metavar="FILE.html", help="Page of --matrix. Default: DIR/NAME.html.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE",
    help="Override a recipe value, such as engine.max_context=512; repeatable. Values are YAML; paths are relative to "
    "the recipe.",
)  # fmt: skip
@click.option("--no-cache", is_flag=True, help="Reuse nothing of earlier builds, and keep nothing for later ones.")
@click.option(
    "--cache-size", type=NATURAL, metavar="BYTES",
    help="Limit of the build cache (see `llmforge cache`); default: $LLMFORGE_CACHE_BYTES, else 20 GB.",
)  # fmt: skip
@remote_option
@click.option(
    "--cache-key", type=PATH, metavar="PUB.pem", envvar="LLMFORGE_CACHE_KEY", show_envvar=True,
    help="Public key; entries of the remote cache that it signed are reused, and no others.",
)  # fmt: skip
@click.option(
    "--remote-cache-write", type=PATH, metavar="KEY.pem", envvar="LLMFORGE_REMOTE_CACHE_WRITE", show_envvar=True,
    help="Sign what the build computes with this private key, and write it to the remote cache.",
)  # fmt: skip
@runtime_option
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a summary.")
@click.option("-q", "--quiet", is_flag=True, callback=keep_quiet, help="Hide progress and notes.")
@click.option(
    "--trace", "trace", type=PATH, metavar="FILE.json",
    help="Write when each stage and pass ran to FILE.json, for a trace viewer such as Perfetto.",
)  # fmt: skip
def build(
    recipe: Path | None,
    out: Path,
    defer: bool,
    pending: Path | None,
    matrix: Path | None,
    address: str | None,
    jobs: int | None,
    store: str | None,
    page: Path | None,
    overrides: tuple[str, ...],
    no_cache: bool,
    cache_size: int | None,
    remote_cache: str | None,
    cache_key: Path | None,
    remote_cache_write: Path | None,
    runtimes: tuple[tuple[RuntimeName, Path], ...],
    as_json: bool,
    quiet: bool,
    trace: Path | None,
) -> None:
    """Build, validate and publish the artifact of RECIPE.

    The last line of standard output is the path of the artifact. The exit code tells how its gates ended.
    """
    if matrix is not None:
        if recipe is not None:
            raise UsageError("RECIPE cannot be used with --matrix", hint="name it in the matrix: `recipe: FILE.yaml`")
        refuse_given("--matrix", "defer", "pending", "trace", "runtimes")
        passed = _passed_on(no_cache, cache_size, remote_cache, cache_key, remote_cache_write)
        options = farming.MatrixOptions(out, overrides, address, jobs, store, page, as_json)
        farming.build_matrix(matrix, options, passed)
        return
    require_given("--matrix", "address", "jobs", "store", "page")
    process.prepare()
    process.keep_freed_memory()
    process.collect_rarely()
    if recipe is not None:  # an engine that was deferred is finished without torch
        extras.require("build")
    with process.unwatched():
        from llmforge import cache
        from llmforge.compile.frontend import Frontend

    resource, folder = click.get_current_context().with_resource, cache.default_folder()
    frontend, nothing = resource(Frontend()), no_cache or cache.is_empty(folder)
    if recipe is not None and recipe.is_file() and pending is None and nothing:
        frontend.start()  # nothing is there to be reused: it imports torch while this process imports the rest
    with process.unwatched():
        with process.deferred("sympy"):
            import onnx_ir  # noqa: F401
        from llmforge.cli import console
        from llmforge.compile.read_ahead import ReadAhead
        from llmforge.recipe import Recipe

    ahead = resource(ReadAhead())
    if pending is not None:  # it goes beside its artifact, and is not deferred again
        refuse_given("--finish", "out", "defer", "no_cache", "cache_size", "runtimes", *_REMOTE)
    if no_cache:
        refuse_given("--no-cache", "cache_size", *_REMOTE)
    cached = pending is None and not no_cache
    remote = connect(remote_cache, cache_key, remote_cache_write) if cached else None
    size = cache.default_size() if cache_size is None else cache_size
    kept = None if no_cache else partial(cache.Cache, folder, size, remote=remote)
    chosen = (*overrides, "engine.deferred=true") if defer else overrides
    loaded = None if recipe is None else Recipe.load(recipe, chosen)
    if loaded is not None:
        if not Frontend.serves(loaded):  # this process will import torch itself
            frontend.end()
        # Else the other process would have to wait for a core; nothing is downloaded before the recipe is checked.
        if pending is None and not nothing and loaded.snapshot is None:
            ahead.begin(loaded.checkpoint, loaded.merged)
        with process.unwatched():
            from llmforge import passes

        steps = loaded.instantiate(passes.ALL)  # a recipe that is wrong says so before torch is imported
        if pending is None:
            with process.unwatched():
                from llmforge.compile import preflight

            for renamed in loaded.migrated:
                console.say(f"note: {renamed}; `llmforge migrate {loaded.path}` rewrites the recipe")
            if loaded.snapshot is not None:
                console.say(f"fetching {loaded.snapshot.repository} at {loaded.snapshot.commit[:12]}")
            preflight.check(loaded)
            preflight.check_source(loaded, steps)
            for tight in (*preflight.check_room(loaded, out), *preflight.check_revision(loaded, out)):
                console.say(f"note: {tight}")

    if pending is None and loaded is None:
        raise UsageError("no recipe given", hint="llmforge build RECIPE")
    if trace is not None:
        output.check_file(trace, ".json")
    with (
        console.traced("build", quiet=quiet, trace=trace) as progress,
        _resumable(kept=pending is None and not no_cache),
    ):
        progress.stage("Load llmforge")
        if pending is not None:
            from llmforge.compile import finishing

            result = finishing.finish(pending, loaded, progress)
        elif loaded is not None:
            with process.unwatched():
                from llmforge.compile import pipeline

            result = pipeline.build(loaded, out, progress, kept, pythons=dict(runtimes), frontend=frontend, ahead=ahead)
    if is_json_log():
        for note in result.report.notes:
            console.say(note)
    with _said(result.path):
        if as_json:
            output.write_json({"artifact": str(result.path), "report": json.loads(result.report.to_json())})
        else:
            output.write_summary(result.report, result.previous)
            output.write_lines(str(result.path))
    found = f"`llmforge inspect {result.path}` says where its report is"
    if pending is None:
        found = f"its report is {output.here(result.path / 'report' / 'report.html')}"
    verdicts.end_of(result.report, result.path, f"the artifact was published with this verdict; {found}")
    if not as_json and not goes_on():
        console.say("\n".join([found, *_next_steps(result.path, result.report.engine)]))
