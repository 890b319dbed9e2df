"""Ray: a cluster that is there, or one on this machine that lives as long as the command.

A task that was lost with its worker or node is handed in again by `running`, not by Ray, which could not give it more
memory (ray#45257). Tasks return paths and figures: the object store of a local Ray is as small as Ray allows.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from llmforge.base import extras, process, signals
from llmforge.base.errors import EnvironmentLacks, UsageError
from llmforge.farm import placing, worker
from llmforge.farm.placing import NodePlacement, Resources
from llmforge.farm.worker import BuildOutcome, Job

_STORE_BYTES = 100_000_000  # Ray takes no less than 75 MB
_PASSED_ON = "LLMFORGE_CACHE", "LLMFORGE_CACHE_BYTES"  # folders of one machine are those of all
_TOKENS = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"  # variables that name Ray's token
_SHORT = Path("/tmp")  # sockets of Ray have paths of 107 characters at most


_COMMON: Mapping[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_END_S = 10.0  # in which a connection to a head that was lost must end
CONNECT_S = 10.0  # in which the head of a cluster must take a connection
_LOST_S = 15.0  # after which a head that takes none is lost; Ray itself ends this process after 60
_PAUSE_S = 0.5
_LOOK_S = 2.0  # between two looks at the head
_ASK_S = 120.0  # in which a node must answer; to start a worker takes 5 to 20 s on a busy machine
_NODE_ID = "ray.io/node-id"  # label that Ray gives each node
_ADDRESS = re.compile(r"(?:[a-z]+://)?\[?(?P<host>[^\[\]/]+?)\]?:(?P<port>\d+)")


class ClusterLost(EnvironmentLacks):
    """The head of a cluster does not answer any more."""


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
    """A connection to Ray. Nodes that are out get no more jobs."""

    ray: Any
    address: str | None
    out: dict[str, str] = field(default_factory=dict)  # why, by the identity of nodes
    lost: bool = False  # the head of its cluster does not answer any more
    _names: dict[str, str] = field(default_factory=dict)
    _tasks: dict[Any, RayTask] = field(default_factory=dict)
    _board: Any = None
    _news: Any = None  # the answer of the board that is awaited
    _head: tuple[str, int] | None = None
    _answered: float = field(default_factory=time.monotonic)  # when the head was last seen
    _looked: float = 0.0

    def __post_init__(self) -> None:
        context = self.ray.get_runtime_context()
        here = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
        actor = self.ray.remote(_Board).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here)
        self._board = actor.remote()
        if self.address is not None:
            host, _, port = context.gcs_address.rpartition(":")
            self._head = host.strip("[]"), int(port)

    def names(self) -> dict[str, str]:
        """Name the nodes that are alive, by their identity: as they were started, else by their host."""
        alive = self._alive()
        given = {
            node["NodeID"]: node["NodeManagerHostname"] if _is_ip(node["NodeName"]) else node["NodeName"]
            for node in alive
        }
        twice = {name for name in given.values() if list(given.values()).count(name) > 1}
        found = {each: f"{name} ({each[:6]})" if name in twice else name for each, name in given.items()}
        self._names |= found
        return found

    def nodes(self, avoided: Collection[str] = ()) -> list[Resources]:
        """List the resources of the nodes that are alive and not out, without those that are `avoided`."""
        no = {*self.out, *avoided}
        return [node["Resources"] for node in self._alive() if node["NodeID"] not in no]

    def submit(self, name: str, job: Job, place: NodePlacement) -> None:
        """Hand a job in; what it tells goes by `name`."""
        self._reach()
        no = sorted({*self.out, *place.avoided})
        run = self.ray.remote(_run).options(
            name=name,
            num_cpus=place.cpus,
            num_gpus=place.gpus,
            memory=place.memory_bytes,
            resources=dict(place.marks),
            max_retries=0,
            **({"label_selector": {_NODE_ID: f"!in({','.join(no)})"}} if no else {}),
        )
        reference = run.remote(name, job, self._board)
        self._tasks[reference] = RayTask(name, reference)

    def withdraw(self, name: str) -> None:
        """End a job now, or take it back where it has not begun."""
        for reference in [each for each, task in self._tasks.items() if task.name == name]:
            self.ray.cancel(reference, force=True)
            del self._tasks[reference]

    def is_alive(self, node: str) -> bool:
        """Say if a node is there."""
        return any(each["NodeID"] == node for each in self._alive())

    def name(self, node: str) -> str:
        """Name a node by its identity, also one that was lost."""
        if node not in self._names:
            self.names()
        return self._names.get(node, node)

    def states(self) -> dict[str, str]:
        """Say of each node that was seen, by its name, why it is out; empty: it is not."""
        with contextlib.suppress(ClusterLost):
            self.names()
        return {name: self.out.get(node, "") for node, name in self._names.items()}

    def ask(
        self, function: Callable[..., Any], *arguments: Any, nodes: Sequence[str] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Call a function on each node that is not out, or on `nodes`; return what it returned, or the error.

        A node that does not answer gives a `Lost`.
        """
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        asked = [each for each in self.names() if each not in self.out] if nodes is None else nodes
        references = {
            self.ray.remote(function)
            .options(num_cpus=0, max_retries=0, scheduling_strategy=strategy(each, soft=False))
            .remote(*arguments, **options): each
            for each in asked
        }
        found: dict[str, Any] = {}
        waiting, until = list(references), time.monotonic() + _ASK_S
        while waiting and time.monotonic() < until:
            self._look()
            ready, waiting = self.ray.wait(waiting, num_returns=1, timeout=_LOOK_S)
            found |= {references[each]: self._result(each) for each in ready}
        for each in waiting:
            self.ray.cancel(each, force=True)
        return {each: found.get(each, Lost("worker", f"no answer within {_ASK_S:g} s")) for each in asked}

    @property
    def busy(self) -> bool:
        """Whether tasks have not ended."""
        return bool(self._tasks)

    def wait(self, seconds: float) -> tuple[list[tuple[str, dict[str, Any]]], list[tuple[str, BuildOutcome | Lost]]]:
        """Wait until something happens, but not for long; return what tasks told, and which ended and how.

        Raises:
            ClusterLost: the head does not answer any more.
        """
        self._look()
        if self._news is None:
            self._news = self._board.take.remote()
        # The board answers at once: it is not waited for, or nobody would wait.
        ready, _ = self.ray.wait(list(self._tasks), num_returns=1, timeout=seconds)
        told: list[tuple[str, dict[str, Any]]] = []
        if self.ray.wait([self._news], timeout=0)[0]:
            answer, self._news = self._news, None
            with contextlib.suppress(self.ray.exceptions.RayActorError):  # it was lost, and starts again
                told = self.ray.get(answer)
        return told, [(self._tasks.pop(each).name, self._result(each)) for each in ready]

    def cancel(self) -> None:
        """End all tasks now."""
        for reference in self._tasks:
            self.ray.cancel(reference, force=True)
        self._tasks.clear()

    def _look(self) -> None:
        """See now and then whether the head is there.

        Raises:
            ClusterLost: it was not for a while.
        """
        if time.monotonic() - self._looked >= _LOOK_S:
            self._answers()

    def _alive(self) -> list[dict[str, Any]]:
        """List the nodes that are alive; the head is not asked before it takes a connection: Ray would wait for it.

        Raises:
            ClusterLost: it does not for a while.
        """
        self._reach()
        return [node for node in self.ray.nodes() if node["Alive"]]

    def _reach(self) -> None:
        """Wait until the head takes a connection.

        Raises:
            ClusterLost: it does not for a while.
        """
        while not self._answers():
            time.sleep(_PAUSE_S)

    def _answers(self) -> bool:
        """Say if the head takes a connection.

        Raises:
            ClusterLost: it did not for a while.
        """
        if self._head is None:
            return True
        now = self._looked = time.monotonic()
        try:
            if not self.lost:
                socket.create_connection(self._head, timeout=_LOOK_S).close()
                self._answered = now
                return True
        except OSError:
            self.lost = now - self._answered > _LOST_S
        if not self.lost:
            return False
        raise ClusterLost(
            f"the head of the Ray cluster at {self.address} does not answer any more",
            hint="start the cluster again, and run the same command: it goes on from what the cache kept",
        )

    def _result(self, reference: Any) -> Any:
        errors = self.ray.exceptions
        try:
            return self.ray.get(reference)
        except errors.OutOfMemoryError as error:
            return Lost("memory", first_line(error))
        except errors.RayTaskError as error:
            return Lost("bug", str(error))
        except errors.RayError as error:
            return Lost("worker", first_line(error))


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, or its kind."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def _run(name: str, job: Job, board: Any) -> BuildOutcome:
    """Run on a worker of Ray."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    board.tell.remote(name, {"event": "begun", "node": here})
    return replace(worker.run(job, lambda event: board.tell.remote(name, event)), node=here)


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
def opened(
    address: str | None = None, *, cpus: int | None = None, store_bytes: int = _STORE_BYTES, wheel: Path | None = None
) -> Iterator[Farm]:
    """Connect to the cluster at `address`, or start Ray on this machine, and end it with the block.

    One on this machine has `cpus`, and an object store of `store_bytes`. Workers of the cluster run the llmforge of
    `wheel`, else the one that their node has.

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
    if address is not None:
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # Ray's own 20 take minutes; a head is there or not
        if any(name in os.environ for name in _TOKENS) or (Path.home() / ".ray" / "auth_token").is_file():
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # which `ray start --head` asks for, and `ray.init` lacks
    import ray

    folder = None if address else tempfile.mkdtemp(prefix="llmforge-ray-", dir=_SHORT if _SHORT.is_dir() else None)
    try:
        with _output_apart():
            with _own_signals():
                if address is None:
                    _start(ray, folder, cpus, store_bytes)
                else:
                    _connect(ray, address, wheel)
            farm = Farm(ray, address)
            try:
                yield farm
            finally:
                _end(farm)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # a process of Ray may still write its log


def _start(ray: Any, folder: str | None, cpus: int | None, store_bytes: int) -> None:
    try:
        ray.init(**_COMMON, **_local(cpus, store_bytes), _temp_dir=folder)
    except Exception as error:
        raise EnvironmentLacks(f"Ray does not start: {first_line(error)}") from error


def _connect(ray: Any, address: str, wheel: Path | None) -> None:
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    runtime: dict[str, Any] = {"env_vars": environment} if environment else {}
    with tempfile.TemporaryDirectory() as folder:
        if wheel is not None:
            runtime["py_modules"] = _unpacked(wheel, Path(folder))
        try:
            if (found := _ADDRESS.fullmatch(address)) is not None:
                socket.create_connection((found["host"], int(found["port"])), timeout=CONNECT_S).close()
            ray.init(address, **_COMMON, runtime_env=runtime or None)
        except Exception as error:
            raise UsageError(
                f"no Ray cluster at {address}: {first_line(error)}",
                hint="`ray start --head` starts one and prints its address; leave --address out for this machine",
            ) from error


def _unpacked(wheel: Path, folder: Path) -> list[str]:
    """Unpack a wheel into `folder`, and list what Ray is to put in front of its workers' paths.

    Of a wheel itself each node would install what it requires, from a registry, and besides what is there.

    Raises:
        UsageError: it is no wheel of llmforge.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    except (OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"{wheel}: cannot be read: {error}", hint="give the wheel of this llmforge") from error
    if not (folder / "llmforge" / "__init__.py").is_file():
        raise UsageError(f"{wheel}: is no wheel of llmforge", hint="give the wheel of this llmforge")
    return [str(each) for each in sorted(folder.iterdir()) if each.is_dir()]  # the package, and its metadata


def _end(farm: Farm) -> None:
    """Cancel what runs, and disconnect; a head that was lost is not waited for."""

    def end() -> None:
        if not farm.lost:
            farm.cancel()
        if farm.ray.is_initialized():
            farm.ray.shutdown()

    if not farm.lost:
        end()
        return
    ending = threading.Thread(target=end, name="end of Ray", daemon=True)
    ending.start()
    ending.join(_END_S)


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@contextmanager
def _output_apart() -> Iterator[None]:
    """Let what Ray prints go to standard error: standard output is for data."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


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
