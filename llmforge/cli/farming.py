"""Builds on Ray: `build --matrix`, and what `tune` shows of it. Imports late what it needs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import click

from llmforge.base import errors, extras, remote_files
from llmforge.base.errors import ForgeError, UsageError
from llmforge.cli import output
from llmforge.cli.parameters import PATH, POSITIVE, grouped, is_json_log, is_quiet

if TYPE_CHECKING:
    from rich.table import Table

    from llmforge.cli.caching import CacheOptions
    from llmforge.farm.matrix import Build
    from llmforge.farm.preflight import NodeNeeds
    from llmforge.farm.rows import Row

_COLORS = {"pass": "green", "fail": "red", "error": "red", "inconclusive": "yellow", "pending": "yellow"}
_EVERY_S = 0.25  # between two drawings of the table


ray_options = grouped(  # where builds run
    click.option(
        "--address", metavar="ADDRESS", envvar="LLMFORGE_RAY_ADDRESS", show_envvar=True,
        help="Ray cluster to build on, such as 10.0.0.1:6379 or `auto`. Default: Ray on this machine, for this "
        "command alone.",
    ),
    click.option(
        "--jobs", type=POSITIVE, metavar="N",
        help="Builds that may share a node. Default: 1 if latency is measured, otherwise one per two CPUs.",
    ),
    click.option(
        "--store", metavar="URL",
        help="Write artifacts to URL/NAME/VERSION.tar as well, such as s3://bucket/artifacts, for nodes that do "
        "not share the folder of artifacts. The folder or bucket must be there.",
    ),
    click.option(
        "--share-checkpoints", is_flag=True,
        help="Write checkpoints to the store, by their digest, for nodes that lack them.",
    ),
    click.option(
        "--wheel", type=PATH, metavar="FILE.whl",
        help="Let nodes run the llmforge of this wheel, whatever llmforge they have, or none; all else that it "
        "requires they must have.",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class MatrixOptions:
    """Options of `build --matrix`."""

    out: Path
    overrides: tuple[str, ...]
    address: str | None
    jobs: int | None
    store: str | None
    share_checkpoints: bool
    wheel: Path | None
    page: Path | None
    as_json: bool


def build_matrix(path: Path, options: MatrixOptions, kept: CacheOptions) -> None:
    """Run all builds of the matrix at `path`, write its page, and end with the worst of their exit codes.

    Each build gets the options of the cache as well. Where builds are interrupted, the page has what is known.

    Raises:
        ForgeError: of the kind of the worst build; this machine, or every node, lacks what builds need.
    """
    arguments = kept.arguments()
    extras.require("build", "farm", *(("remote",) if options.store else ()))
    from llmforge.cli import console
    from llmforge.farm import checkpoints, connection, matrix, page, running
    from llmforge.farm.rows import worst

    read = matrix.Matrix.load(path)
    builds = matrix.expand(read, path, options.overrides)
    for url in dict.fromkeys(build.url for build in builds if build.url is not None):
        console.say(f"fetching {remote_files.without_login(url)}")
        checkpoints.fetch(url)
    for build in builds:
        build.load()  # a matrix that is wrong says so before anything runs
    file = options.page or options.out / f"{read.name}.html"
    output.check_file(file, ".html", makes_folders=options.page is None)
    settings = running.FarmSettings(needs(builds, options.out, options, kept), options.jobs, tuple(arguments))
    address, began = options.address, time.monotonic()
    rows: list[Row] = []
    nodes: dict[str, str] = {}

    def write_page() -> None:
        with output.writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            made = page.MatrixPage(read.name, rows, nodes, time.monotonic() - began, options.jobs)
            file.write_text(page.of_matrix(made), encoding="utf-8")

    console.say(f"{len(builds)} builds; starting Ray" if address is None else f"{len(builds)} builds on {address}")
    with _said_how_to_go_on(write_page), connection.opened(address, wheel=options.wheel) as farm, shown() as table:
        if address is not None:
            running.admit(farm, settings.needs)
        try:
            running.run(builds, farm, settings, table.tell, rows)
        finally:
            nodes.update(farm.states())
    write_page()
    code = worst(row.exit_code for row in rows)
    if options.as_json:
        facts = {"matrix": read.name, "verdict": page.verdict(rows), "exit_code": code}
        facts |= {"seconds": round(time.monotonic() - began, 3), "page": str(file), "nodes": nodes}
        output.write_json({**facts, "builds": page.data(rows)})
    else:
        output.write(_table(rows, final=True))
        for row in rows:
            if row.outcome is not None and row.outcome.message is not None:
                console.say(f"{row.build.title}: {row.outcome.message}", always=True)
        for node, why in nodes.items():
            if why:
                console.say(f"node {node} is out: {why}", always=True)
        output.write_lines(str(file))
    if code:
        raise _error(code, rows)


def _error(code: int, rows: Sequence[Row]) -> ForgeError:
    """Make the error that has the exit code of the worst build, and says how many there are of it."""
    of = [row.build.title for row in rows if row.exit_code == code]
    named = ", ".join(of[:5]) + (f" and {len(of) - 5} more" if len(of) > 5 else "")
    found = errors.kind_of(code)
    said = {
        errors.GateFailed: "a gate failed",
        errors.GateInconclusive: "a gate is inconclusive",
        errors.EnginePending: "the engine waits for its device",
    }.get(found, f"not built (exit code {code})")
    hint = "run the same command when a node with the device has joined" if found is errors.EnginePending else None
    return found(f"{len(of)} of {len(rows)} builds: {said}: {named}", hint=hint)


class SharedOptions(Protocol):
    """What a matrix and a search have in common of how nodes come by things."""

    @property
    def store(self) -> str | None:
        """URL of the store."""

    @property
    def share_checkpoints(self) -> bool:
        """Whether checkpoints are written to it."""


def needs(builds: Sequence[Build], out: Path, options: SharedOptions, kept: CacheOptions) -> NodeNeeds:
    """Say what builds need of every node, and refuse what this machine itself lacks of it.

    Raises:
        ForgeError: it lacks something, such as the store, or the right to write to it.
    """
    from llmforge.farm import checkpoints, preflight

    if options.share_checkpoints and options.store is None:
        raise UsageError("--share-checkpoints requires --store", hint="add --store URL")
    writes_to = kept.remote_cache if kept.remote_cache_write is not None else None
    needed = preflight.needs(builds, out.absolute(), store_url=options.store, remote_cache=writes_to, keys=kept.keys)
    preflight.require(needed, writes=True)
    if not options.share_checkpoints or options.store is None:
        return needed
    shared = {
        folder: checkpoints.share(folder, digest, options.store)
        for folder, digest in needed.checkpoints.items()
        if folder not in needed.urls and folder.is_dir()
    }
    return dataclasses.replace(needed, urls={**needed.urls, **shared})


@contextmanager
def _said_how_to_go_on(write_page: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        write_page()
        error.add_note("all builds were ended; run the same command to go on from what the cache kept")
        raise


class Shown(Protocol):
    """Shows rows as they change."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None: ...

    def tell(self, row: Row) -> None:
        """Show what has changed of a row."""


def shown() -> Shown:
    """Choose how to show the progress of builds on standard error."""
    from llmforge.cli import console

    if is_quiet():
        return _Quiet()
    if is_json_log() or not console.stderr().is_terminal:
        return _Lines()
    return _Live()


class _Quiet:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        pass

    def tell(self, row: Row) -> None:
        """Ignore."""


class _Lines(_Quiet):
    """Writes a line, or an event of the JSON log, for each stage of each build."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[object, ...]] = {}

    def tell(self, row: Row) -> None:
        """Write what is new."""
        from llmforge.cli import console

        title, now = row.build.title, (row.state, row.stage, len(row.notes))
        before, self._last[title] = self._last.get(title), now
        if before == now:
            return
        if is_json_log():
            fields = {"build": title, "state": row.state, "stage": row.stage, "attempt": row.attempts}
            ended = {"verdict": row.verdict, "exit_code": row.exit_code} if row.outcome is not None else {}
            console.log("build", **fields, **ended, notes=list(row.notes))
        elif row.state in ("done", "failed"):
            console.say(f"{title}: {row.verdict} after {row.seconds:.1f} s")
        elif before is not None and before[2] != now[2]:
            console.say(f"{title}: {row.notes[-1]}")
        else:
            console.say(f"{title}: {row.stage or row.state}")


class _Live:
    """Draws a table on a terminal."""

    def __init__(self) -> None:
        from rich.live import Live

        from llmforge.cli import console

        self._rows: dict[str, Row] = {}
        self._drawn = 0.0
        self._live = Live(console=console.stderr(), auto_refresh=False, transient=True, vertical_overflow="ellipsis")

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Take the table away: the result is written to standard output."""
        self._live.stop()

    def tell(self, row: Row) -> None:
        """Draw it again, if the last time is some time ago."""
        self._rows[row.build.title] = row
        if time.monotonic() - self._drawn >= _EVERY_S:
            self._drawn = time.monotonic()
            self._live.update(_table(list(self._rows.values()), final=False), refresh=True)


def _table(rows: Sequence[Row], *, final: bool) -> Table:
    """Make a table of builds: how far they are, or, once it is `final`, how they ended and what was measured."""
    from rich.table import Table
    from rich.text import Text

    from llmforge.farm import page
    from llmforge.metrics import catalog

    table = Table(box=None, pad_edge=False)
    heads = [catalog.named(name).title for name in page.SHOWN] if final else ["stage"]
    for head in ("build", "verdict" if final else "state", *heads, "time", "node"):
        table.add_column(head, no_wrap=head == "build")
    for row in rows:
        word = row.verdict if row.state in ("done", "failed") else row.state
        state = Text(word, style=_COLORS.get(word, ""))
        if final:
            cells = [page.figure(row, name) for name in page.SHOWN]
        else:
            cells = [f"{row.stage} {row.done}/{row.total}" if row.total else row.stage]
        running_s = time.monotonic() - row.began if row.began is not None and row.outcome is None else row.seconds
        table.add_row(row.build.title, state, *cells, f"{running_s:.0f} s", row.node)
    return table
