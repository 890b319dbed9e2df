"""A build on a node: one `llmforge build` in a process of its own, which dies with the worker that started it.

The same command as everywhere: its bytes do not depend on who starts it, and its memory is given back when it ends.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from llmforge.base.errors import ForgeError
from llmforge.farm import checkpoints, preflight, store
from llmforge.farm.preflight import NodeNeeds

Tell = Callable[[dict[str, Any]], None]

_NOT_A_VERDICT = 1, 2, 5, 6, 7, 8, 9  # exit codes of builds that published nothing
_EVERY_S = 0.5  # between two words of how far a stage is
_LAST_LINES = 20  # of standard error that is no event: what Python says of a bug
_NO_MEMORY = "out of memory"
_OF_RAY = "OMP_NUM_THREADS"  # which Ray sets for its workers, and a build decides itself


@dataclass(frozen=True)
class Job:
    """One run of `llmforge build`: its arguments, and what its node must have."""

    arguments: tuple[str, ...]
    needs: NodeNeeds
    checkpoint: Path | None = None  # where the machine that gave the command has it
    finishes: Path | None = None  # the artifact whose engine is pending
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A measured figure and its interval, as far as it has one."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class BuildOutcome:
    """How a build ended. What has an artifact has been published, whatever its gates say."""

    exit_code: int
    node: str
    seconds: float
    artifact: Path | None = None
    verdict: str = "none"
    pending: bool = False
    figures: Mapping[str, Figure] = field(default_factory=dict)
    reused: tuple[str, ...] = ()  # stages and passes that the cache had
    computed: tuple[str, ...] = ()  # passes that it had not
    gates: tuple[str, ...] = ()  # in words, those that did not pass
    notes: tuple[str, ...] = ()
    message: str | None = None  # of the error
    hint: str | None = None
    peak_bytes: int | None = None

    @property
    def out_of_memory(self) -> bool:
        """Say if it ended for want of memory, by its own words or what the kernel counted."""
        return (self.message or "").startswith(_NO_MEMORY)

    @property
    def killed(self) -> bool:
        """Say if somebody ended it, and not for its memory."""
        return self.exit_code < 0 and not self.out_of_memory


def run(job: Job, tell: Tell) -> BuildOutcome:
    """Build on this machine, and `tell` how far it is: events of the JSON log."""
    began = time.monotonic()
    node = platform.node()
    try:
        preflight.require(job.needs, writes=False)
        if job.finishes is not None and not job.finishes.is_dir():
            store.fetch(job.finishes, job.needs.store)
        at = job.checkpoint
        if at is not None and at in job.needs.urls and not at.exists():
            tell({"event": "stage", "name": "Fetch the checkpoint"})
            found = checkpoints.fetch(job.needs.urls[at], job.needs.checkpoints[at])
            job = replace(job, arguments=(*job.arguments, "--set", f"checkpoint={json.dumps(str(found))}"))
        ended = _build(job, tell)
        if job.needs.store is not None and ended.get("artifact"):
            tell({"event": "stage", "name": "Write to the store"})
            store.share(Path(ended["artifact"]), job.needs.store)
    except ForgeError as error:
        ended = {"exit_code": error.exit_code, "message": error.message, "hint": error.hint}
    return _outcome(ended, node, time.monotonic() - began)


def _build(job: Job, tell: Tell) -> dict[str, Any]:
    """Run the command, and return its exit code, what it printed, and its error."""
    before = {name: value for name, value in os.environ.items() if name != _OF_RAY}
    kills = _kernel_kills()
    # -P: the llmforge of this process, whatever lies in the folder that the node was started in
    command = [sys.executable, "-P", "-m", "llmforge.farm.attached", str(os.getpid()), "build", *job.arguments]
    with (
        tempfile.TemporaryFile() as printed,
        subprocess.Popen(
            [*command, "--json", "--log-format", "json"],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**before, **job.environment},
        ) as process,
    ):
        assert process.stderr is not None
        try:
            said = _follow(process.stderr, tell)
        except BaseException:
            process.kill()
            raise
        exit_code = process.wait()
        if exit_code == -signal.SIGKILL and _kernel_kills() > kills:
            said = {"message": f"{_NO_MEMORY}: the kernel killed the build"}
        printed.seek(0)
        return {**said, "exit_code": exit_code, **_result(printed, exit_code)}


def _kernel_kills() -> int:
    """Count the processes that the kernel has killed for memory, since this machine was started."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:  # no Linux
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _result(printed: IO[bytes], exit_code: int) -> dict[str, Any]:
    """Read what the command printed: the artifact that it published and its report."""
    if exit_code in _NOT_A_VERDICT or exit_code < 0:
        return {}
    found: dict[str, Any] = json.load(printed)
    return found


def _follow(lines: Iterable[str], tell: Tell) -> dict[str, Any]:
    """Pass the events on until there are no more; return the error among them."""
    said: dict[str, Any] = {}
    rest: list[str] = []
    told = 0.0
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            rest = [*rest, line.rstrip()][-_LAST_LINES:]
        elif event["event"] == "error":
            said = {"message": event["message"], "hint": event.get("hint")}
        elif event["event"] == "stage" or (event["event"] == "progress" and time.monotonic() - told > _EVERY_S):
            told = time.monotonic()
            tell(event)
    return said or ({"message": "\n".join(rest)} if rest else {})


def _outcome(ended: Mapping[str, Any], node: str, seconds: float) -> BuildOutcome:
    from llmforge.gates.records import Report
    from llmforge.metrics import catalog

    exit_code = ended["exit_code"]
    if "report" not in ended:
        message = ended.get("message") or f"the build was killed: exit code {exit_code}"
        return BuildOutcome(exit_code, node, seconds, message=message, hint=ended.get("hint"))
    report = Report.model_validate_json(json.dumps(ended["report"]))
    found = catalog.estimates(report.measured)
    reused = report.build.reused
    return BuildOutcome(
        exit_code,
        node,
        seconds,
        artifact=Path(ended["artifact"]).absolute(),
        verdict=report.verdict.value,
        pending=report.engine.pending,
        figures={name: Figure(each.value, each.low, each.high) for name, each in found.items()},
        reused=(*reused.stages, *reused.passes),
        computed=tuple(each.name for each in report.passes if not each.reused),
        gates=tuple(gate.explanation for gate in report.gates if gate.verdict.value in ("fail", "inconclusive")),
        notes=report.notes,
        peak_bytes=report.build.peak_rss_bytes,
    )
