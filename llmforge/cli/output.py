"""Standard output of all commands: data. All of it goes through here.

Much of it is in the words of an artifact, a checkpoint or a recipe, which may come from anyone: a terminal is not to
obey them.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmforge.base import folders, resources, wording
from llmforge.base.errors import EnvironmentLacks, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmforge.gates.comparison import Previous
    from llmforge.gates.records import Report

_LONGEST_CELL = 300  # characters
_PLAIN_WIDTH = 200  # columns of a table where there is no terminal; rich would break lines at 80
SUMMARY_WIDTH = 120  # … of the summary of a report


def here(path: Path) -> str:
    """Write a path relative to the current folder where it is inside of it."""
    folder = Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def called(artifact: Path) -> str:
    """Name an artifact as commands take it, quoted for a shell: NAME/VERSION where it is in the folder of artifacts."""
    at_home = artifact.parent.parent.absolute() == folders.artifacts().absolute()
    return shlex.quote(f"{artifact.parent.name}/{artifact.name}" if at_home else here(artifact))


def write_json(value: Any) -> None:
    """Write a value as indented JSON."""
    write_data(json.dumps(value, indent=1, ensure_ascii=False))


def write_data(written: str) -> None:
    """Write what is JSON already."""
    click.echo(wording.plain_json(written.rstrip("\n")))


def write_script(text: str) -> None:
    """Write a program of our own, as it is."""
    click.echo(text.rstrip("\n"))


def write_lines(*lines: str, err: bool = False) -> None:
    """Write lines of text; what is no character to show in one, line ends too, is written out."""
    click.echo("\n".join(map(wording.plain, lines)), err=err)


def write_generated(text: str) -> None:
    """Write a piece of a text that a model makes: as it is, but for what a terminal would obey."""
    click.echo(wording.plain_text(text) if sys.stdout.isatty() else text, nl=False, color=True)
    sys.stdout.flush()


def write_columns(rows: Sequence[tuple[str, ...]]) -> None:
    """Write rows of equal length, their cells below one another."""
    rows = [tuple(wording.plain(cell, _LONGEST_CELL) for cell in row) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def write_summary(report: Report, previous: Previous | None = None) -> None:
    """Write the summary of a report, beside the `previous` version."""
    from llmforge.report.render import summary

    write(summary(report, previous), SUMMARY_WIDTH)


def write(content: RenderableType, plain_width: int = _PLAIN_WIDTH) -> None:
    """Write tables and text as wide as the terminal, or `plain_width` columns where there is none."""
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.segment import Segment

    class Plain:
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for text, style, control in console.render(content, options):
                yield Segment(wording.plain_text(text), style, control)

    Console(highlight=False, width=None if sys.stdout.isatty() else plain_width).print(Plain())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what keeps the block from writing the file `path` into a UsageError, or a full disk into what it is."""
    try:
        yield
    except OSError as error:
        kind = EnvironmentLacks if resources.is_full(error) else UsageError
        raise kind(
            f"{path}: cannot be written: {error.strerror or error}",
            hint="choose a path that is writable and has free space",
        ) from error


def check_file(path: Path, *suffixes: str, makes_folders: bool = False) -> None:
    """Refuse, before work is done for it, a file that could not be written afterwards.

    With `makes_folders` the folders that it lies in are made when it is written.

    Raises:
        UsageError: its name does not end in one of `suffixes`, where there are any; it is a folder; its folder is not
            there, or nothing may be written to it.
    """
    if suffixes and path.suffix not in suffixes:
        raise UsageError(f"{path}: the name must end in {' or '.join(suffixes)}", hint=f"give {path}{suffixes[0]}")
    folder = path.absolute().parent
    while makes_folders and not folder.exists():
        folder = folder.parent
    if path.is_dir():
        raise UsageError(f"{path}: cannot be written: it is a folder", hint="give the path of a file")
    if not folder.is_dir():
        raise UsageError(f"{path}: cannot be written: there is no folder {folder}", hint=f"mkdir -p {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{path}: cannot be written: permission denied", hint="choose a path that you may write to")
