"""The command `build`. Like all commands it imports what it needs when it runs."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmforge import backends
from llmforge.base import extras, process
from llmforge.base.errors import EnvironmentLacks, UsageError
from llmforge.cli import farming, output, verdicts
from llmforge.cli.caching import REMOTE, CacheOptions, cache_options
from llmforge.cli.parameters import (
    ARTIFACT,
    PATH,
    goes_on,
    is_json_log,
    keep_quiet,
    options_record,
    out_option,
    record,
    refuse_given,
    require_given,
    runtime_option,
)
from llmforge.runtime.artifact_files import TEMPLATE_FILE

if TYPE_CHECKING:
    from llmforge.calibration.carriers import Carriers, Worker
    from llmforge.compile.state import BuildResult
    from llmforge.gates.records import EngineRecord
    from llmforge.metrics.agreement import RuntimeName

_DEVICE = re.compile(r"auto|cpu|cuda:\d+")


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


def _encodes(artifact: Path) -> bool:
    """Say whether its engine embeds or scores texts."""
    from llmforge.runtime.config import FILE, RuntimeConfig

    file = artifact / "engine" / FILE
    return file.exists() and RuntimeConfig.read(file).encoder is not None


def _next_steps(artifact: Path, engine: EngineRecord) -> Iterator[str]:
    """Say what one does with an artifact whose gates passed."""
    from llmforge.triton import repository

    name = output.called(artifact)
    if engine.pending:
        yield f"next, on the target: llmforge build --finish {name} RECIPE"
        return
    foreign = backends.export_format(engine.backend)
    if foreign is not None:
        yield f"next: {foreign.serve.format(engine=shlex.quote(output.here(artifact / 'engine')))}"
    elif _encodes(artifact):
        yield f"next: llmforge serve {name}"
    else:
        chats = (artifact / "tokenizer" / TEMPLATE_FILE).exists()
        yield f"next: llmforge run {name} " + ("--chat" if chats else '"PROMPT"')
    yield f"      llmforge gate {name}"
    if (artifact / repository.FOLDER).is_dir():  # not of what no Triton serves
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


@dataclass(frozen=True)
class BuildOptions:
    """Options of `build`."""

    out: Path
    defer: bool
    publish_failed: bool
    pending: Path | None  # the artifact whose engine is to be built
    matrix: Path | None
    address: str | None
    calibration_workers: int | None
    device: str | None
    jobs: int | None
    store: str | None
    share_checkpoints: bool
    wheel: Path | None
    page: Path | None
    overrides: tuple[str, ...]
    runtimes: tuple[tuple[RuntimeName, Path], ...]
    as_json: bool
    quiet: bool
    trace: Path | None
    cache: CacheOptions


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
@click.option(
    "--calibration-workers", type=click.IntRange(1, 8), metavar="N",
    help="Carry calibration text through the layers on N workers of one CPU each, on Ray at --address or on this "
    "machine. The results are the same without.",
)  # fmt: skip
@click.option(
    "--device", metavar="DEVICE",
    help="Calibrate on DEVICE: cpu (the default), cuda:N, or auto, the first GPU that torch finds.",
)  # fmt: skip
@click.option("--page", type=PATH, metavar="FILE.html", help="Page of --matrix. Default: DIR/NAME.html.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE",
    help="Override a recipe value, such as engine.max_context=512; repeatable. Values are YAML; paths are relative to "
    "the recipe.",
)  # fmt: skip
@click.option(
    "--publish-failed", is_flag=True,
    help="Publish the artifact even if passes exceed their budgets, with verdict FAIL: `run` and `serve` refuse it "
    "without --allow fail. Not after any other failed proof.",
)  # fmt: skip
@cache_options
@runtime_option
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a summary.")
@click.option("-q", "--quiet", is_flag=True, callback=keep_quiet, help="Hide progress and notes.")
@click.option(
    "--trace", "trace", type=PATH, metavar="FILE.json",
    help="Write when each stage and pass ran to FILE.json, for a trace viewer such as Perfetto.",
)  # fmt: skip
@options_record(CacheOptions, "cache")
@options_record(BuildOptions)
def build(recipe: Path | None, options: BuildOptions) -> None:
    """Build, validate and publish the artifact of RECIPE.

    The last line of standard output is the path of the artifact. The exit code tells how its gates ended.
    """
    if options.matrix is not None:
        if recipe is not None:
            raise UsageError("RECIPE cannot be used with --matrix", hint="name it in the matrix: `recipe: FILE.yaml`")
        refuse_given(
            "--matrix", "defer", "publish_failed", "pending", "trace", "runtimes", "calibration_workers", "device"
        )
        of_matrix = record(farming.MatrixOptions, vars(options))
        farming.build_matrix(options.matrix, of_matrix, options.cache)
        return
    require_given("--matrix", "jobs", "store", "share_checkpoints", "wheel", "page")
    if options.calibration_workers is None:
        require_given("--matrix or --calibration-workers", "address")
    if options.device is not None:
        refuse_given("--device", "calibration_workers")
        if not _DEVICE.fullmatch(options.device):
            raise UsageError(f"--device {options.device}: nothing is called so", hint="auto, cpu, or cuda:N")
    process.prepare()
    process.keep_freed_memory()
    process.collect_rarely()
    if options.pending is not None:  # it goes to where its artifact is, and is not deferred again
        whole = "out", "defer", "publish_failed", "no_cache", "cache_size", "runtimes", "calibration_workers", "device"
        refuse_given("--finish", *whole, *REMOTE)
    options.cache.check()
    if options.trace is not None:
        output.check_file(options.trace, ".json")
    if options.pending is not None:
        result = _finished(options.pending, recipe, options)
    elif recipe is not None:
        result = _built(recipe, options)
    else:
        raise UsageError("no recipe given", hint="llmforge build RECIPE")
    _show(result, options)


def _built(path: Path, options: BuildOptions) -> BuildResult:
    """Check the recipe at `path`, which needs no torch, and build it."""
    extras.require("build")
    with process.unwatched():
        from llmforge import cache
        from llmforge.compile.overlap import Overlap

    folder, overlap = cache.default_folder(), click.get_current_context().with_resource(Overlap())
    if path.is_file() and (options.cache.no_cache or cache.is_empty(folder)):
        overlap.start()  # it imports torch while this process imports the rest
    with process.unwatched():
        from llmforge.cli import console
        from llmforge.recipe import Recipe

    recipe = Recipe.load(path, (*options.overrides, "engine.deferred=true") if options.defer else options.overrides)
    overlap.chosen_frontend(recipe)
    with process.unwatched():
        from llmforge.compile.stages.recipe import check_recipe
        from llmforge.planning import request

    kept: Callable[[], cache.Cache] | None = None
    if not options.cache.no_cache:
        given = options.cache.cache_size
        size = cache.default_size() if given is None else given
        kept = partial(cache.Cache, folder, size, remote=options.cache.connected())
    for renamed in recipe.migrated:
        console.say(f"note: {renamed}; `llmforge migrate {recipe.path}` rewrites the recipe")
    if recipe.snapshot is not None:
        console.say(f"fetching {recipe.snapshot.repository} at {recipe.snapshot.commit[:12]}")
    checked = replace(check_recipe(recipe, options.out), publish_failed=options.publish_failed)
    if options.device is not None:
        checked = replace(checked, carriers=_device(options.device))
    elif options.calibration_workers is not None:
        extras.require("farm")
        checked = replace(checked, carriers=_workers(options.calibration_workers, options.address))
    for note in checked.notes:
        console.say(f"note: {note}")
    expected = request.expected_stages(recipe, options.calibration_workers or 0)
    with (
        console.traced("build", quiet=options.quiet, trace=options.trace, expected=expected) as progress,
        _resumable(kept=kept is not None),
    ):
        progress.stage("Load llmforge")
        with process.unwatched():
            from llmforge.compile import pipeline

        runtimes = dict(options.runtimes)
        return pipeline.build(
            recipe,
            options.out,
            progress,
            kept,
            pythons=runtimes,
            checked=checked,
            overlap=overlap,
        )


def _device(name: str) -> Carriers:
    """Hold a device against those that torch finds."""
    with process.unwatched():
        from llmforge.calibration.device import ExecutionDevice

    return ExecutionDevice.of(name).carriers


def _workers(count: int, address: str | None) -> Carriers:
    """Let workers carry windows, which start once they are wanted."""
    from llmforge.calibration.carriers import Carriers

    def started() -> AbstractContextManager[Sequence[Worker]]:
        from llmforge.farm import calibrating

        return calibrating.started(count, address)

    return Carriers(workers=started)


def _finished(pending: Path, path: Path | None, options: BuildOptions) -> BuildResult:
    """Build the engine that was deferred, without torch unless the recipe at `path` asks for measurements."""
    if path is not None:
        extras.require("build")
    from llmforge import passes
    from llmforge.cli import console
    from llmforge.recipe import Recipe

    recipe, expected = None, []
    if path is not None:
        from llmforge.planning import request

        recipe = Recipe.load(path, options.overrides)
        recipe.instantiate(passes.ALL)  # a recipe that is wrong says so before anything else is read
        expected = request.expected_stages(recipe)
    with (
        console.traced("build", quiet=options.quiet, trace=options.trace, expected=expected) as progress,
        _resumable(kept=False),
    ):
        progress.stage("Load llmforge")
        from llmforge.compile import finishing

        return finishing.finish(pending, recipe, progress)


def _show(result: BuildResult, options: BuildOptions) -> None:
    """Print the artifact's report and path, and end with the exit code of its gates."""
    from llmforge.cli import console

    if is_json_log():
        for note in result.report.notes:
            console.say(note)
    with _said(result.path):
        if options.as_json:
            output.write_json({"artifact": str(result.path), "report": json.loads(result.report.to_json())})
        else:
            output.write_summary(result.report, result.previous)
            output.write_lines(str(result.path))
    found = f"`llmforge inspect {result.path}` says where its report is"
    if options.pending is None:
        found = f"its report is {output.here(result.path / 'report' / 'report.html')}"
    verdicts.end_of(result.report, result.path, f"the artifact was published with this verdict; {found}")
    if not options.as_json and not goes_on():
        console.say("\n".join([found, *_next_steps(result.path, result.report.engine)]))
