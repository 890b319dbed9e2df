"""Standard error for people: progress, hints and errors. Standard output is for data alone."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TextIO

import click
from rich import progress as bars
from rich.console import Console
from rich.text import Text

from llmforge.base import spans, wording
from llmforge.base.errors import ForgeError
from llmforge.base.progress import Progress, Silent
from llmforge.base.time_left import Stages, TimeLeft
from llmforge.cli import output
from llmforge.cli.parameters import is_json_log, is_quiet, is_verbose
from llmforge.metrics.units import duration

_WORTH_TELLING = 1.0  # seconds; a stage that ends sooner leaves no time behind
_TENTH = 0.1  # seconds; --verbose says nothing of spans that took less
_WIDE = 100  # columns, where there is room for the time that is left of the build
_EVERY = 10.0  # seconds between two lines of one stage where there is no terminal


def stderr() -> Console:
    """Make a console on the standard error of this moment."""
    return Console(stderr=True, highlight=False)


def show_error(error: ForgeError) -> None:
    """Print one message, and its hint."""
    if is_json_log():
        log("error", message=error.message, hint=error.hint, kind=type(error).__name__, exit_code=error.exit_code)
        return
    console = stderr()
    if is_verbose():
        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    console.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
    if error.hint is not None:
        console.print(Text.assemble(("hint: ", "bold cyan"), error.hint), soft_wrap=True)


def log_bug(error: Exception, hint: str, exit_code: int) -> None:
    """Write what is a bug as one event, with its traceback."""
    message = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_exception(error))
    log("error", message=message, hint=hint, kind="bug", exit_code=exit_code, traceback=trace)


def say(message: str, *, always: bool = False) -> None:
    """Print what people should know besides the result; with --quiet only what they must `always` know."""
    if is_json_log():
        log("note", message=message.removeprefix("note: "))
    elif always or not is_quiet():
        click.echo(wording.bounded(message), err=True)


def prompt(text: str) -> None:
    """Print what stands before a line that is typed."""
    click.echo(text, err=True, nl=False)


def log(event: str, **fields: Any) -> None:
    """Write one event of the JSON log: a line of standard error."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    click.echo(wording.plain_json(json.dumps({"time": now, "event": event, **fields}, ensure_ascii=False)), err=True)


class JsonProgress:
    """Writes the stages of a build, how far they are, and how long they still take, as events."""

    def __init__(self, expected: Stages = ()) -> None:
        self._left = TimeLeft(expected)
        self._title = ""
        self._told = 0.0

    def stage(self, title: str) -> None:
        """Tell that a stage begins."""
        self._title, self._told = title, 0.0
        self._left.stage(title)
        log("stage", name=title, **self._seconds())

    def advance(self, done: int, total: int) -> None:
        """Tell how far the stage is, at its end and once in a while."""
        self._left.advance(done, total)
        if done == total or time.monotonic() - self._told >= _WORTH_TELLING:
            self._told = time.monotonic()
            log("progress", name=self._title, done=done, total=total, **self._seconds())

    def _seconds(self) -> dict[str, float]:
        """Give what is known of the time left."""
        left = {"left_s": self._left.of_stage(), "build_left_s": self._left.of_all()}
        return {name: round(seconds, 1) for name, seconds in left.items() if seconds is not None}


class _LiveBar(bars.BarColumn):
    """A bar that is gone once its stage has ended: what is done shows its time alone."""

    def render(self, task: bars.Task) -> Any:
        """Draw it for a stage that goes on."""
        return Text() if task.finished else super().render(task)


class _LeftColumn(bars.ProgressColumn):
    """How long the stage that goes on still takes and, where there is room, all of the build."""

    max_refresh = 0.5

    def __init__(self, left: TimeLeft, *, whole: bool) -> None:
        super().__init__()
        self._left = left
        self._whole = whole

    def render(self, task: bars.Task) -> Text:
        """Write it for a stage that goes on and lasts."""
        if task.finished or (task.elapsed or 0.0) < _WORTH_TELLING:
            return Text()
        stage, build = self._left.of_stage(), self._left.of_all() if self._whole else None
        parts = [] if stage is None or stage < _WORTH_TELLING else [f"~{_clock(stage)} left"]
        if build is not None and build >= _WORTH_TELLING:
            parts.append(f"build ~{_clock(build)}")
        return Text(", ".join(parts), "cyan")


def _clock(seconds: float) -> str:
    """Write a time as clocks do: 1:05, 2:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class TerminalProgress:
    """Draws the stages of a build (`base.progress.Progress`) on a terminal: one line each, the last one alive.

    `expected` are the stages that are predicted, and their seconds (`TimeLeft`).
    """

    def __init__(self, console: Console, expected: Stages = ()) -> None:
        self._left = TimeLeft(expected)
        self._bars = bars.Progress(
            bars.SpinnerColumn(finished_text="[green]✓"),
            bars.TextColumn("{task.description}"),
            _LiveBar(bar_width=24),
            bars.TextColumn("{task.fields[count]}"),
            bars.TimeElapsedColumn(),
            _LeftColumn(self._left, whole=console.width >= _WIDE),
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
        with suppress(OSError):  # of a terminal that was closed; how the block ended is not for its bars to decide
            self._bars.stop()

    def stage(self, title: str) -> None:
        """End the current stage and begin another."""
        self._finish()
        self._left.stage(title)
        self._bars.add_task(title, total=None, count="")

    def advance(self, done: int, total: int) -> None:
        """Move the bar of the current stage."""
        self._left.advance(done, total)
        self._bars.update(self._bars.task_ids[-1], completed=done, total=total, count=f"{done}/{total}")

    def _finish(self) -> None:
        for last in self._bars.task_ids[-1:]:
            self._bars.update(last, total=1, completed=1, count="")
            self._bars.stop_task(last)


class PlainProgress(AbstractContextManager["PlainProgress"]):
    """Writes the stages of a build as lines, for logs and pipes; `expected` as in `TerminalProgress`."""

    def __init__(self, stream: TextIO, expected: Stages = ()) -> None:
        self._left = TimeLeft(expected)
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
        self._left.stage(title)
        foreseen = self._left.of_stage()
        self._write(title if foreseen is None or foreseen < _EVERY else f"{title}: about {duration(foreseen)}")

    def advance(self, done: int, total: int) -> None:
        """Tell how far the stage is and how long it still takes, once in a while."""
        self._left.advance(done, total)
        if time.monotonic() - self._told >= _EVERY:
            self._told = time.monotonic()
            self._write(f"{self._title}: {done}/{total}{self._time_left()}")

    def _time_left(self) -> str:
        stage, build = self._left.of_stage(), self._left.of_all()
        parts = [] if not stage else [f"about {duration(stage)} left"]
        if build:
            parts.append(f"{duration(build)} of the build")
        return "".join(f", {part}" for part in parts)

    def _finish(self, how: str) -> None:
        seconds = time.monotonic() - self._began
        if self._title and seconds >= _WORTH_TELLING:
            self._write(f"{self._title}: {how} {seconds:.1f} s")

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def progress(*, quiet: bool = False, expected: Stages = ()) -> AbstractContextManager[Progress]:
    """Choose how to show progress on standard error; `expected` are stages that are predicted, and their seconds."""
    if quiet or is_quiet():
        return nullcontext(Silent())
    if is_json_log():
        return nullcontext(JsonProgress(expected))
    console = stderr()
    if console.is_terminal:
        return TerminalProgress(console, expected)
    return PlainProgress(console.file, expected)  # type: ignore[arg-type]


@contextmanager
def traced(name: str, *, quiet: bool = False, trace: Path | None = None, expected: Stages = ()) -> Iterator[Progress]:
    """Show progress, as `progress` does, and make the block and each of its stages a span.

    Spans are events of the JSON log; at the end, however it is, they are written to `trace` for a trace viewer.
    """
    tracer = spans.Tracer((lambda span: log("span", **span.data())) if is_json_log() and not quiet else _ignore)
    try:
        with progress(quiet=quiet, expected=expected) as shown, spans.active(tracer), tracer.span(name):
            yield spans.TracedProgress(shown, tracer)
    finally:
        if is_verbose() and not is_json_log():
            _say_times(tracer.spans)
        if trace is not None:
            try:
                with output.writing(trace):
                    trace.write_text(json.dumps(spans.chrome_trace(tracer.spans)) + "\n", encoding="utf-8")
            except ForgeError as error:  # how the block ended is not for its trace to decide
                say(f"note: {error.message}")


def _say_times(ended: Sequence[spans.Span]) -> None:
    """Say how long each span took that took a tenth of a second, those inside of others indented."""
    depth: dict[str, int] = {}
    for span in ended:
        depth[span.span_id] = depth.get(span.parent_span_id or "", -1) + 1
        seconds = ((span.end_ns or span.start_ns) - span.start_ns) / 1e9
        if seconds >= _TENTH:
            click.echo(f"{seconds:8.1f} s  {'  ' * depth[span.span_id]}{wording.bounded(span.name)}", err=True)


def _ignore(span: spans.Span) -> None:
    pass
