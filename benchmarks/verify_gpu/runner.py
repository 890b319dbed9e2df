"""Runs the steps, each in a process of its own, and keeps what became of each.

A step dies with the process that runs the steps, however that ends: nothing is left on the GPU. What it was doing then
is known from a file that was written before, so that it is not begun again: a step that ends a machine would end it
each time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.verify_gpu.steps import Step
from llmforge.base import process
from llmforge.base.errors import UsageError

OK, REFUSED, NOT_RUN, FAILED = "ok", "refused", "not run", "failed"
# Exit codes of llmforge (llmforge/base/errors.py): what is asked for cannot be served, or this machine lacks something.
_BY_EXIT = {0: OK, 6: REFUSED, 8: NOT_RUN}
REASON_CHARACTERS = 600


@dataclass(frozen=True)
class Outcome:
    """What became of a step: `result` where it went well, else `reason`."""

    status: str
    seconds: float = 0.0
    result: Mapping[str, Any] | None = None
    reason: str | None = None


class Record:
    """The outcomes in a folder, one file a step, and what each step printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, step: str, kind: str) -> Path:
        """Name the file of a step: kind json, result.json or log."""
        return self.folder / f"{step.replace(':', '.')}.{kind}"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let no other process run steps of this record.

        Raises:
            UsageError: one does.
        """
        with (self.folder / "lock").open("wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"steps of {self.folder} are being run", hint="wait, or give another --work") from None
            yield

    def begin(self, step: str) -> None:
        """Note that a step is begun."""
        self.path(step, "began").touch()

    def read(self, step: str) -> Outcome | None:
        """Give the outcome of a step that was run; also of one whose run was ended with it."""
        path = self.path(step, "json")
        if path.exists():
            return Outcome(**json.loads(path.read_text(encoding="utf-8")))
        ended = self.path(step, "began").exists()
        return Outcome(FAILED, reason="the whole run was ended while it ran") if ended else None

    def write(self, step: str, outcome: Outcome) -> None:
        """Keep an outcome; the file is there whole or not at all."""
        partial = self.path(step, "partial")
        partial.write_text(json.dumps(asdict(outcome), indent=1), encoding="utf-8")
        partial.rename(self.path(step, "json"))
        self.path(step, "began").unlink(missing_ok=True)


def run(
    steps: Sequence[Step],
    record: Record,
    command: Sequence[str],
    *,
    deadline: float,
    again: bool = False,
    after_each: Callable[[], object] = lambda: None,
) -> None:
    """Run what was not run yet, and `again` what failed, until `deadline` (of `time.monotonic`) has come.

    `command`, with the name of a step behind it, runs that step and writes its result to the record. `after_each` is
    called when an outcome was written.

    Raises:
        UsageError: another process runs steps of the record.
    """
    settled = (OK, REFUSED) if again else (OK, REFUSED, FAILED)
    with record.held():
        _run_all(steps, record, command, deadline, settled, after_each)


def _run_all(
    steps: Sequence[Step],
    record: Record,
    command: Sequence[str],
    deadline: float,
    settled: Sequence[str],
    after_each: Callable[[], object],
) -> None:
    for step in steps:
        done = record.read(step.name)
        if done is not None and done.status in settled:
            _say(f"{step.name}: {done.status}, done before")
            record.write(step.name, done)
            continue
        missing = [name for name in step.after if (before := record.read(name)) is None or before.status != OK]
        left = deadline - time.monotonic()
        if missing:
            outcome = Outcome(NOT_RUN, reason=f"{', '.join(missing)} did not go well")
        elif left <= 0:
            outcome = Outcome(NOT_RUN, reason="the time for the whole run was used up")
        else:
            _say(f"{step.name} …")
            record.begin(step.name)
            outcome = _run_one(step, record, command, min(step.limit_s, left))
        record.write(step.name, outcome)
        after_each()
        _say(f"{step.name}: {outcome.status}, {outcome.seconds:.0f} s{': ' + outcome.reason if outcome.reason else ''}")


def _run_one(step: Step, record: Record, command: Sequence[str], limit_s: float) -> Outcome:
    """Run one step in a process group of its own, which is ended with the time, and itself with this process."""
    log, result = record.path(step.name, "log"), record.path(step.name, "result.json")
    result.unlink(missing_ok=True)
    start = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, step.name],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_dies_with(os.getpid()),
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = time.monotonic() - start
    text = log.read_text(encoding="utf-8", errors="replace")
    if code is None:
        return Outcome(FAILED, seconds, reason=f"it took more than {limit_s:.0f} s and was ended")
    status = _BY_EXIT.get(code, FAILED)
    if status == OK:
        found = json.loads(result.read_text(encoding="utf-8"))
        return Outcome(OK, seconds, result=step.read_log(found, text) if step.read_log else found)
    said = text.strip()[-REASON_CHARACTERS:] or "it printed nothing"
    return Outcome(status, seconds, reason=f"exit {code}: {said}")


def _dies_with(parent: int) -> Callable[[], None]:
    """Give what a new process does first, so that it is killed when `parent`, which began it, ends in any way."""

    def attach() -> None:
        process.end_with_parent()
        if os.getppid() != parent:  # it ended before that
            os._exit(128 + signal.SIGKILL)

    return attach


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
