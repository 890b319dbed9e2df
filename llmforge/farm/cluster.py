"""Ray: a cluster that is there, or one on this machine that lives as long as the command.

A task that was lost with its worker or node is handed in again by `running`, not by Ray, which could not give it more
memory (ray#45257). Tasks return paths and figures: the object store of a local Ray is as small as Ray allows.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from llmforge.base import extras, process, signals
from llmforge.base.errors import EnvironmentLacks, UsageError
from llmforge.farm import placing, worker
from llmforge.farm.placing import NodePlacement, Resources
from llmforge.farm.worker import BuildOutcome, Job

_STORE_BYTES = 100_000_000  # Ray takes no less than 75 MB
_PASSED_ON = "LLMFORGE_CACHE", "LLMFORGE_CACHE_BYTES"  # folders of one machine are those of all
_SHORT = Path("/tmp")  # sockets of Ray have paths of 107 characters at most


@dataclass(frozen=True)
class Lost:
    """A task that did not return: its worker died, was killed for memory, or the code that started it has a bug."""

    kind: Literal["worker", "memory", "bug"]
    why: str


@dataclass
class RayTask:
    """A job that was handed to Ray."""

    name: str
    reference: Any = field(repr=False)


@dataclass
class Farm:
    """A connection to Ray."""

    ray: Any
    board: Any
    address: str | None
    _tasks: dict[Any, RayTask] = field(default_factory=dict)
    _news: Any = None  # the answer of the board that is awaited

    def nodes(self) -> list[Resources]:
        """List the resources of the nodes that are alive."""
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def submit(self, name: str, job: Job, place: NodePlacement) -> None:
        """Hand a job in; what it tells goes by `name`."""
        run = self.ray.remote(_run).options(
            name=name,
            num_cpus=place.cpus,
            num_gpus=place.gpus,
            memory=place.memory_bytes,
            resources=dict(place.marks),
            max_retries=0,
        )
        reference = run.remote(name, job, self.board)
        self._tasks[reference] = RayTask(name, reference)

    @property
    def busy(self) -> bool:
        """Whether tasks have not ended."""
        return bool(self._tasks)

    def wait(self, seconds: float) -> tuple[list[tuple[str, dict[str, Any]]], list[tuple[str, BuildOutcome | Lost]]]:
        """Wait until something happens, but not for long; return what tasks told, and which ended and how."""
        if self._news is None:
            self._news = self.board.take.remote()
        # The board answers at once: it is not waited for, or nobody would wait.
        ready, _ = self.ray.wait(list(self._tasks), num_returns=1, timeout=seconds)
        told: list[tuple[str, dict[str, Any]]] = []
        if self.ray.wait([self._news], timeout=0)[0]:
            told, self._news = self.ray.get(self._news), None
        return told, [(self._tasks.pop(each).name, self._result(each)) for each in ready]

    def cancel(self) -> None:
        """End all tasks now."""
        for reference in self._tasks:
            self.ray.cancel(reference, force=True)
        self._tasks.clear()

    def _result(self, reference: Any) -> BuildOutcome | Lost:
        errors = self.ray.exceptions
        try:
            outcome: BuildOutcome = self.ray.get(reference)
        except errors.OutOfMemoryError as error:
            return Lost("memory", first_line(error))
        except errors.RayTaskError as error:
            return Lost("bug", str(error))
        except errors.RayError as error:
            return Lost("worker", first_line(error))
        return outcome


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, or its kind."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def _run(name: str, job: Job, board: Any) -> BuildOutcome:
    """Run on a worker of Ray."""
    return worker.run(job, lambda event: board.tell.remote(name, event))


class _Board:
    """An actor to which tasks tell how far they are, and which the driver asks."""

    def __init__(self) -> None:
        self._told: list[tuple[str, dict[str, Any]]] = []

    def tell(self, name: str, event: dict[str, Any]) -> None:
        self._told.append((name, event))

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        told, self._told = self._told, []
        return told


@contextmanager
def opened(address: str | None = None, *, cpus: int | None = None, store_bytes: int = _STORE_BYTES) -> Iterator[Farm]:
    """Connect to the cluster at `address`, or start Ray on this machine, and end it with the block.

    One on this machine has `cpus`, and an object store of `store_bytes`.

    Whatever the block leaves running is cancelled.

    Raises:
        EnvironmentLacks: Ray is not installed, or does not start.
        UsageError: there is no cluster at the address.
    """
    if (lack := extras.trouble("ray")) is not None:
        raise lack
    process.prepare()  # what this process has in its environment, local workers inherit
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # builds are measured; Ray would run its workers at 15
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # Ray's own 30 s are too few on a busy machine
    import ray

    folder = None if address else tempfile.mkdtemp(prefix="llmforge-ray-", dir=_SHORT if _SHORT.is_dir() else None)
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        with _own_signals():
            try:
                if address is None:
                    ray.init(**common, **_local(cpus, store_bytes), _temp_dir=folder)
                else:
                    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
                    ray.init(address, **common, runtime_env={"env_vars": environment} if environment else None)
            except Exception as error:
                if type(error) is not Exception and not isinstance(error, ConnectionError | ValueError | RuntimeError):
                    raise
                if address is None:
                    raise EnvironmentLacks(f"Ray does not start: {first_line(error)}") from error
                raise UsageError(
                    f"no Ray cluster at {address}: {first_line(error)}",
                    hint="`ray start --head` starts one and prints its address; leave --address out for this machine",
                ) from error
        board = ray.remote(_Board).options(num_cpus=0, max_restarts=-1).remote()
        farm = Farm(ray, board, address)
        try:
            yield farm
        finally:
            farm.cancel()
    finally:
        if ray.is_initialized():
            ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # a process of Ray may still write its log


def _local(cpus: int | None, store_bytes: int) -> Mapping[str, Any]:
    from llmforge import targets
    from llmforge.measure import gpus

    found = [gpu.target for gpu in gpus.find()]
    return {
        "address": "local",
        "num_cpus": cpus,
        "object_store_memory": store_bytes,
        "include_dashboard": False,
        "resources": placing.here(targets.detect(), [name for name in found if name is not None]),
    }


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this program's way to end: Ray sets a handler for SIGTERM that calls sys.exit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signals.ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
