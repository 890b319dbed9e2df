"""Jobs on the nodes of a Ray cluster, and what their workers tell.

A task that was lost with its worker or node is handed in again by `running`, not by Ray, which could not give it more
memory (ray#45257). Tasks return paths and figures: the object store of a local Ray is as small as Ray allows.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from llmforge.base.errors import EnvironmentLacks
from llmforge.farm import worker
from llmforge.farm.placing import NodePlacement, Resources
from llmforge.farm.worker import BuildOutcome, Job

_LOST_S = 15.0  # after which a head that takes none is lost; Ray itself ends this process after 60
_PAUSE_S = 0.5
_LOOK_S = 2.0  # between two looks at the head
_ASK_S = 120.0  # in which a node must answer; to start a worker takes 5 to 20 s on a busy machine
_NODE_ID = "ray.io/node-id"  # label that Ray gives each node

_Answer = TypeVar("_Answer")


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
        reference = self._asked(lambda: run.remote(name, job, self._board))
        self._tasks[reference] = RayTask(name, reference)

    def withdraw(self, name: str) -> None:
        """End a job now, or take it back where it has not begun."""
        for reference in [each for each, task in self._tasks.items() if task.name == name]:
            self._asked(functools.partial(self.ray.cancel, reference, force=True))
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
        task = self.ray.remote(function)
        references = self._asked(
            lambda: {
                task.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy(each, soft=False)).remote(
                    *arguments, **options
                ): each
                for each in asked
            }
        )
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
            self._news = self._board.take.remote()  # to the actor itself: the head is not asked
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
        """List the nodes that are alive.

        Raises:
            ClusterLost: the head does not answer any more.
        """
        return [node for node in self._asked(self.ray.nodes) if node["Alive"]]

    def _asked(self, ask: Callable[[], _Answer]) -> _Answer:
        """Call what asks the head, which is looked after meanwhile: Ray waits for a lost one until it ends the process.

        Raises:
            ClusterLost: the head does not answer any more.
        """
        self._reach()
        if self._head is None:
            return ask()
        answer: futures.Future[_Answer] = futures.Future()

        def run() -> None:
            try:
                answer.set_result(ask())
            except Exception as error:  # noqa: BLE001 (raised by whoever waits)
                answer.set_exception(error)

        threading.Thread(target=run, name="question to Ray", daemon=True).start()
        while not futures.wait([answer], timeout=_LOOK_S).done:
            self._reach()
        return answer.result()

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


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
