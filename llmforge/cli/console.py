"""What people see on standard error: progress, hints and errors. Standard output is for data alone."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Self, TextIO

from rich import progress as bars
from rich.console import Console
from rich.text import Text

from llmforge.base.errors import ForgeError
from llmforge.base.progress import Progress, Silent

_WORTH_TELLING = 1.0  # seconds; a stage that ends sooner leaves no time behind
_EVERY = 10.0  # seconds between two lines of one stage where there is no terminal


def stderr() -> Console:
    """Make a console on the standard error of this moment."""
    return Console(stderr=True, highlight=False)


def show_error(error: ForgeError) -> None:
    """Print one message, and its hint."""
    console = stderr()
    console.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
    if error.hint is not None:
        console.print(Text.assemble(("hint: ", "bold cyan"), error.hint), soft_wrap=True)


class TerminalProgress:
    """Draws the stages of a build (`base.progress.Progress`) on a terminal: one line each, the last one alive."""

    def __init__(self, console: Console) -> None:
        self._bars = bars.Progress(
            bars.SpinnerColumn(finished_text="[green]✓"),
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=24),
            bars.TextColumn("{task.fields[count]}"),
            bars.TimeElapsedColumn(),
            console=console,
        )

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """End the last stage, as done only where nothing was raised, and leave what was drawn."""
        if kind is None:
            self._finish()
        self._bars.stop()

    def stage(self, title: str) -> None:
        """End the current stage and begin another."""
        self._finish()
        self._bars.add_task(title, total=None, count="")

    def advance(self, done: int, total: int) -> None:
        """Move the bar of the current stage."""
        self._bars.update(self._bars.task_ids[-1], completed=done, total=total, count=f"{done}/{total}")

    def _finish(self) -> None:
        for last in self._bars.task_ids[-1:]:
            self._bars.update(last, total=1, completed=1, count="")
            self._bars.stop_task(last)


class PlainProgress(AbstractContextManager["PlainProgress"]):
    """Writes the stages of a build as lines, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._title = ""
        self._began = self._told = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Tell how long the last stage took."""
        self._finish("failed after" if kind is not None else "took")

    def stage(self, title: str) -> None:
        """Tell how long the last stage took, if it was long, and that another begins."""
        self._finish("took")
        self._title, self._began, self._told = title, time.monotonic(), time.monotonic()
        self._write(title)

    def advance(self, done: int, total: int) -> None:
        """Tell how far the stage is, once in a while."""
        if time.monotonic() - self._told >= _EVERY:
            self._told = time.monotonic()
            self._write(f"{self._title}: {done}/{total}")

    def _finish(self, how: str) -> None:
        seconds = time.monotonic() - self._began
        if self._title and seconds >= _WORTH_TELLING:
            self._write(f"{self._title}: {how} {seconds:.1f} s")

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def progress(*, quiet: bool = False) -> AbstractContextManager[Progress]:
    """Choose how to show progress on standard error."""
    if quiet:
        return nullcontext(Silent())
    console = stderr()
    return TerminalProgress(console) if console.is_terminal else PlainProgress(console.file)  # type: ignore[arg-type]
