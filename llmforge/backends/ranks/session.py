"""A decoder that several processes of this machine compute together, driven step by step as if it were one session.

Every rank is a process with its part of the weights and of the caches, on the CPU or on a GPU of its own. A step is
broadcast through shared memory: ids, positions and places in the cache, some hundred bytes; each rank runs its graph,
they meet in its collectives, and the first one leaves the logits, or the top ones of a decode step. Nothing else knows
that there are several.

A rank that ends, and one that does not move on for `limit_s`, end the session: the others stop waiting at once, all are
killed, and every call raises the same error from then on.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import connection as connections
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmforge.backends.ranks import group as groups
from llmforge.backends.ranks.group import Logits, RankGroup, Reply
from llmforge.backends.ranks.messages import (
    LEFT,
    Allocate,
    Allocated,
    Ask,
    CacheRows,
    Call,
    CopyTokens,
    Drop,
    OnGpu,
    RankReady,
    RunDecode,
    RunStep,
    StartRank,
)
from llmforge.base import interpreter
from llmforge.base.child_process import ChildProcess
from llmforge.base.errors import EnvironmentLacks, ForgeError, InputError, Unavailable, UsageError
from llmforge.ir.interface import TopLogits
from llmforge.runtime.config import SessionConfig, physical_cores
from llmforge.runtime.interface import Decoder, DecodeRun, Rows, StepInputs
from llmforge.runtime.signature import ELEMENTS

if TYPE_CHECKING:
    from llmforge.runtime.config import RuntimeConfig

LIMIT_S = 60.0  # in which every rank comes to its next collective, half a layer further on
LIMIT_VARIABLE = "LLMFORGE_RANK_TIMEOUT_S"
SLOWER = 3  # times: how much longer than the first rank the others may load, where that is more than the limit
END_S = 5.0  # in which the end of a rank is told
ROOM_BYTES = 1 << 20  # of a command, besides the ids of its tokens; and of a reply, besides what rows have
REPLY_BYTES = 16 << 10  # of a reply for each row, and each 1024 logits: a head
ALLOCATE_S = 900.0  # in which a GPU compiles its kernels and captures its steps, as a cache is allocated
_SPINS = 2000  # some 30 µs, where each rank has cores of its own
_SPINNING = "session.intra_op.allow_spinning"
_WORKER = "llmforge.backends.ranks.worker"


@dataclass(frozen=True)
class _HeldCache:
    """A cache that every rank has; when nobody has this any more, they drop it."""

    number: int


@dataclass(frozen=True, eq=False)
class RankCache(Rows):
    """Rows of a cache that lies in the ranks, each with its part of the heads."""

    session: RankSession = field(repr=False)
    held: _HeldCache
    start: int = 0

    @property
    def place(self) -> CacheRows:
        """Which rows of which cache."""
        return CacheRows(self.held.number, self.start, self.start + self.batch)

    def _view(self, start: int, stop: int) -> RankCache:
        return RankCache(stop - start, self.capacity, self.session, self.held, self.start + start)

    def copy(self, row: int, start: int, source: RankCache, source_row: int, source_start: int, tokens: int) -> None:
        """Copy `tokens` tokens, and states as a whole, on every rank, before the next step."""
        self.session.later(CopyTokens(self.place, row, start, source.place, source_row, source_start, tokens))

    @property
    def size_bytes(self) -> int:
        """Size of all rows on all ranks."""
        signature = self.session.signature
        token = sum(c.kv_heads * c.head_dim * ELEMENTS[c.dtype].size_bytes for c in signature.caches)
        state = sum(math.prod(s.dims) * ELEMENTS[s.dtype].size_bytes for s in signature.states)
        return self.session.ranks * self.batch * (self.capacity * token + state)


class RankSession(Decoder[RankCache]):
    """A decoder (docs/dialect.md) in as many processes as it has graphs, on the CPU or on a GPU each.

    Args:
        files: the graph, or the plan, of each rank.
        config: threads of each rank, and options of ONNX Runtime.
        own_kernels: the graphs have kernels of llmforge's own, besides collectives.
        most_ids: most tokens of a step, all rows together.
        limit_s: how long a rank may take from one collective to the next; on a GPU, for a step.
        gpu: the engine on GPUs, and the device of the first rank; others have those after it. None: the CPU.

    Raises:
        EnvironmentLacks: no process can be started, one ended while it loaded, or the system has no such memory.
        ForgeError: what a rank raised when it loaded its graph.
    """

    def __init__(
        self,
        files: Sequence[Path],
        config: SessionConfig,
        *,
        own_kernels: bool = False,
        most_ids: int,
        limit_s: float = LIMIT_S,
        gpu: OnGpu | None = None,
    ) -> None:
        self.ranks, self._limit_s, self._on_gpu = len(files), limit_s, gpu is not None
        self._lock = threading.Lock()
        self._later: list[Call] = []
        self._caches = 0
        self._failure: ForgeError | None = None
        self._group = RankGroup(self.ranks, ROOM_BYTES + 16 * most_ids)
        self._logits = Logits()
        rows, vocabulary = (1, 1) if gpu is None else (gpu.config.max_batch, gpu.config.vocabulary)
        self._reply = Reply(ROOM_BYTES + REPLY_BYTES * (rows + vocabulary // 1024))
        self._pending: int | None = None  # the command that nobody has waited for yet
        self._told_by_ranks: tuple[Allocated, ...] = ()
        self._processes: list[ChildProcess] = []
        self._connections: list[Connection] = []
        self._end = weakref.finalize(self, _end, self._processes, self._group, self._logits, self._reply)
        crowded = gpu is None and self.ranks * max(config.threads, 1) > physical_cores()
        if crowded:  # a thread that spins takes the core of one that works
            config = replace(config, entries={**config.entries, _SPINNING: "0"})
        begin = StartRank(
            rank=0,
            ranks=self.ranks,
            driver=os.getpid(),
            file=files[0],
            session=config,
            own_kernels=own_kernels,
            group=self._group.descriptor,
            room=self._group.room,
            logits=self._logits.descriptor,
            reply=self._reply.descriptor,
            spins=0 if crowded else _SPINS,
            limit_s=2 * limit_s,  # the driver sees first who holds the others up
        )
        try:
            for rank, file in enumerate(files):
                own = gpu and replace(gpu, device=gpu.device + rank)
                self._start(replace(begin, rank=rank, file=file, gpu=own))
            loaded = self._loaded()
        except BaseException:
            self._end()
            raise
        first = loaded[0]
        self.signature, self.rows_alone, self.longest_step = first.signature, first.rows_alone, first.longest_step
        self.buckets, self._decodes_ahead = first.buckets, first.decodes_ahead
        if any(each != first for each in loaded):
            self._end()
            raise InputError(f"{files[0].parent}: the graphs of the ranks do not belong together")
        self._told: list[weakref.WeakMethod[Callable[[], None]]] = []
        watch = threading.Thread(target=_watch, args=[self.processes, self._group, self._told], daemon=True)
        watch.name = "llmforge-ranks"
        watch.start()

    @property
    def processes(self) -> tuple[int, ...]:
        """The ids of the ranks' processes."""
        return tuple(process.id for process in self._processes)

    def allocate(self, batch: int, capacity: int) -> RankCache:
        """Reserve caches for `batch` sequences of at most `capacity` tokens on every rank."""
        if batch < 1 or capacity < 1:
            raise ValueError(f"a cache of {batch} rows of {capacity} tokens")
        with self._lock:
            self._caches += 1
            held = _HeldCache(self._caches)
            self._call(Allocate(held.number, batch, capacity), ALLOCATE_S if self._on_gpu else self._limit_s)
            if self._on_gpu:
                self._told_by_ranks = tuple(self._receive(rank) for rank in range(self.ranks))
        weakref.finalize(held, _drop, weakref.ref(self), held.number)
        return RankCache(batch, capacity, self, held)

    def when_ended(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when a rank ends, though nothing waits for it."""
        self._told.append(weakref.WeakMethod(tell))

    def check_alive(self) -> None:
        """Raise what a step would raise, if a rank has ended."""
        with self._lock:
            self._check_alive()
            if self._group.broken_by is not None:
                self._failure = self._why_broken()
                self._end()
                raise self._failure

    @property
    def notes(self) -> tuple[str, ...]:
        """What the ranks' devices do without; what several say, once."""
        return tuple(dict.fromkeys(note for each in self._told_by_ranks for note in each.notes))

    @property
    def spare_bytes(self) -> int | None:
        """Count the bytes that all devices have left together: each as many as the fullest."""
        left = [each.spare_bytes for each in self._told_by_ranks if each.spare_bytes is not None]
        return self.ranks * min(left) if left else None

    @property
    def decodes_ahead(self) -> bool:
        """Whether the ranks give top logits."""
        return self._decodes_ahead

    def begin_decode(self, inputs: StepInputs, cache: RankCache) -> DecodeRun:
        """Begin a step of one token a row on all ranks; arrays are read before this returns."""
        self._check(inputs, cache)
        with self._lock:
            self._give(RunDecode(inputs, cache.place))
        return _RankDecode(self)

    def top_logits(self) -> TopLogits:
        """Wait for the decode step that was begun last, and give the top logits of its rows."""
        with self._lock:
            self._check_alive()
            self._settle(self._limit_s)
            found: TopLogits = self._reply.read()
            return found

    def ask(self, method: str, *arguments: Any) -> Any:
        """Have the first rank answer for the decode step that was begun last (`DecodeRun`)."""
        with self._lock:
            self._call(Ask(method, arguments))
            return self._reply.read()

    def later(self, call: Call) -> None:
        """Have the ranks do something before the next step."""
        self._later.append(call)  # atomic: finalizers of caches come from any thread, at any time

    def close(self) -> None:
        """End the ranks; may be called again."""
        if self._failure is None:
            self._failure = Unavailable("the ranks were closed")
        self._end()

    def _run(self, inputs: StepInputs, cache: RankCache, out: NDArray[np.float32]) -> None:
        batch, rows, vocabulary = out.shape
        with self._lock:
            self._check_alive()
            logits = self._logits.array((batch, rows, vocabulary), grow=True)
            self._call(RunStep(inputs, cache.place, (batch, rows, vocabulary)))
            out[...] = logits

    # ---- commands

    def _call(self, call: Call, limit_s: float | None = None) -> None:
        """Have all ranks do what waits and then `call`, and wait for all of them.

        Raises:
            Unavailable: one ended, or does not move on; now or in an earlier call.
            ForgeError: what a rank raised.
        """
        self._give(call)
        self._settle(self._limit_s if limit_s is None else limit_s)

    def _give(self, call: Call) -> None:
        """Have all ranks do what waits and then `call`, once they have done what they were given before."""
        self._check_alive()
        self._settle(self._limit_s)
        count = len(self._later)
        calls = [*self._later[:count], call]
        del self._later[:count]
        self._pending = self._group.command(calls)

    def _settle(self, limit_s: float) -> None:
        """Wait until all ranks have done what they were given."""
        if self._pending is None:
            return
        try:
            self._wait(self._pending, limit_s)
            self._pending = None
        except ForgeError as error:
            self._failure = error
            self._end()
            raise

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise Unavailable(self._failure.message, hint=self._failure.hint)

    def _receive(self, rank: int) -> Any:
        """Read what a rank sent beside its answer."""
        try:
            return self._connections[rank].recv()
        except (EOFError, OSError):
            self._failure = self._why_broken()
            self._end()
            raise self._failure from None

    def _wait(self, number: int, limit_s: float) -> None:
        moved, since = self._group.progress(), time.monotonic()
        while (status := self._group.answers(number, min(1.0, limit_s / 4))) != groups.CAME:
            if status == groups.BROKEN:
                raise self._why_broken()
            if (now := self._group.progress()) != moved:
                moved, since = now, time.monotonic()
            elif time.monotonic() - since > limit_s:
                working = [rank for rank in range(self.ranks) if self._group.answered(rank) != number]
                least = min(now[rank] for rank in working)
                held = ", ".join(str(rank) for rank in working if now[rank] == least)
                raise Unavailable(
                    f"rank {held} of {self.ranks} does not respond: no progress for {limit_s:g} s",
                    hint=f"restart it; where steps take longer, set {LIMIT_VARIABLE} to more seconds",
                )

    # ---- start and end

    def _start(self, begin: StartRank) -> None:
        command = interpreter.command(_WORKER, "running a rank")
        files = (begin.group, begin.logits, begin.reply)
        process = ChildProcess(command, f"rank {begin.rank} cannot be started", files=files)
        self._processes.append(process)
        connection = Connection(process.socket.detach())
        self._connections.append(connection)
        with contextlib.suppress(OSError):  # it has ended: `_loaded` says how
            connection.send(begin)

    def _loaded(self) -> list[RankReady]:
        """Wait until all ranks have loaded; the first that fails ends it."""
        found: dict[int, RankReady] = {}
        began, end = time.monotonic(), math.inf
        while len(found) < self.ranks:
            left = {self._connections[rank]: rank for rank in range(self.ranks) if rank not in found}
            wait_s = None if end == math.inf else max(0.0, end - time.monotonic())
            ready = connections.wait(list(left), wait_s)
            if not ready:
                late = ", ".join(str(rank) for rank in left.values())
                raise Unavailable(
                    f"rank {late} of {self.ranks} did not load within {time.monotonic() - began:.0f} s; others did"
                )
            for each in ready:
                assert isinstance(each, Connection)
                rank = left[each]
                try:
                    message = each.recv()
                except (EOFError, OSError):
                    raise EnvironmentLacks(
                        f"rank {rank} of {self.ranks} did not load: {self._processes[rank].why_ended()}"
                    ) from None
                if isinstance(message, ForgeError):
                    raise _of_rank(message, rank, self.ranks)
                if isinstance(message, bytes):
                    for other in self._connections[1:]:
                        with contextlib.suppress(OSError):
                            other.send(message)
                    continue
                assert isinstance(message, RankReady)
                found[rank] = message
            if found and end == math.inf:
                now = time.monotonic()
                end = now + max(self._limit_s, SLOWER * (now - began))
        return [found[rank] for rank in range(self.ranks)]

    def _why_broken(self) -> ForgeError:
        """Say what ended the group: what a rank says, or how its process ended."""
        end = time.monotonic() + END_S
        while time.monotonic() < end:
            for rank, connection in enumerate(self._connections):
                with contextlib.suppress(EOFError, OSError):
                    if connection.poll(0) and isinstance(message := connection.recv(), ForgeError):
                        return _of_rank(message, rank, self.ranks)
            for rank, process in enumerate(self._processes):
                if process.code not in (None, LEFT):
                    return Unavailable(
                        f"rank {rank} of {self.ranks} ended: {process.why_ended()}",
                        hint="restart it; see the log for details",
                    )
            time.sleep(0.01)
        return Unavailable(f"the {self.ranks} ranks ended", hint="restart; see the log for details")


@dataclass(frozen=True)
class _RankDecode(DecodeRun):
    """A decode step that all ranks run; the first one has what is asked of it."""

    _session: RankSession

    def top_logits(self) -> TopLogits:
        """Wait for the step, and give the top logits of its rows."""
        return self._session.top_logits()

    def launched(self) -> None:
        """Return: the ranks were told, and take what they are told in order."""

    def logits(self, row: int) -> NDArray[np.float32]:
        """Fetch all logits of a row."""
        found: NDArray[np.float32] = self._session.ask("logits", row)
        return found

    def blocks(self, rows: Sequence[int], blocks: Sequence[int]) -> NDArray[np.float32]:
        """Fetch one block of the logits of each of some rows."""
        found: NDArray[np.float32] = self._session.ask("blocks", list(rows), list(blocks))
        return found


def _of_rank(error: ForgeError, rank: int, ranks: int) -> ForgeError:
    """Name the rank in its error."""
    return type(error)(f"rank {rank} of {ranks}: {error.message}", hint=error.hint)


def _drop(session: weakref.ref[RankSession], number: int) -> None:
    """Have the ranks of a session, if it is still there, drop a cache that nobody has."""
    if (found := session()) is not None:
        found.later(Drop(number))


def _end(processes: Sequence[ChildProcess], group: RankGroup, logits: Logits, reply: Reply) -> None:
    """Kill the ranks and wait for them, and give the memory back: descriptors are closed here, mappings when unused."""
    group.break_up()
    for process in processes:
        process.kill()
    for descriptor in (group.descriptor, logits.descriptor, reply.descriptor):
        os.close(descriptor)


def _watch(
    processes: Sequence[int],
    group: RankGroup,
    told: Sequence[weakref.WeakMethod[Callable[[], None]]],
) -> None:
    """Wait for the end of any rank, let nobody wait for it, and tell those who want to know."""
    watched, handles = select.poll(), []
    for process in processes:
        try:
            handles.append(os.pidfd_open(process))
        except ProcessLookupError:
            group.break_up()
            break
        watched.register(handles[-1], select.POLLIN)
    else:
        watched.poll()
        group.break_up()
    for handle in handles:
        os.close(handle)
    for each in told:
        if (tell := each()) is not None:
            tell()


def limit_s() -> float:
    """Read how long a rank may take from one collective to the next.

    Raises:
        UsageError: the variable is no number of seconds.
    """
    given = os.environ.get(LIMIT_VARIABLE, "")
    try:
        seconds = float(given or LIMIT_S)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UsageError(f"{LIMIT_VARIABLE} is {given!r}; expected a number of seconds")
    return seconds


def open_engine(folder: Path, config: RuntimeConfig, threads: int | None, device: int = 0) -> RankSession:
    """Open the ranks in `folder`; `threads` are those of all together, at least one for each.

    On GPUs, `device` is that of the first rank, and the others have those after it.
    """
    session = config.session.resolve(threads)
    return RankSession(
        [folder / name for name in config.rank_files],
        replace(session, threads=max(1, session.threads // config.ranks)),
        most_ids=config.max_batch * config.max_context,
        limit_s=limit_s(),
        gpu=None if config.device is None else OnGpu(config, device),
    )
