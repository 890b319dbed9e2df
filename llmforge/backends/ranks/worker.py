"""The process of a rank: `session.py` starts this module, and talks to it as `messages.py` says."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np

from llmforge.backends import loading
from llmforge.backends.onnxruntime.cuda.session import PROVIDERS
from llmforge.backends.onnxruntime.session import Session
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
    RankReady,
    RunDecode,
    RunStep,
    StartRank,
)
from llmforge.base import process
from llmforge.base.child_process import end_with
from llmforge.base.errors import ForgeError, Unavailable, VerificationError
from llmforge.native import nccl
from llmforge.runtime.config import GraphPlan, RuntimeConfig
from llmforge.runtime.interface import Decoder, DecodeRun

LOOK_S = 5.0  # between two looks at a group that has nothing to do

logger = logging.getLogger(__name__)


class _RankProcess:
    """Does what the driver asks of a rank."""

    def __init__(self, begin: StartRank, session: Decoder[Any], logits: Logits, reply: Reply) -> None:
        self._rank, self._session, self._logits, self._reply = begin.rank, session, logits, reply
        self._caches: dict[int, Any] = {}
        self._decoding: DecodeRun | None = None

    def do(self, call: Call) -> None:
        match call:
            case Allocate(cache, batch, capacity):
                self._caches[cache] = self._allocate(batch, capacity)
            case Drop(cache):
                del self._caches[cache]
            case CopyTokens():
                to, source = self._rows(call.to), self._rows(call.source)
                to.copy(call.row, call.start, source, call.source_row, call.source_start, call.tokens)
            case RunStep(inputs, rows, shape):
                first = self._rank == 0  # logits are whole on every rank
                out = self._logits.array(shape, grow=False) if first else np.empty(shape, np.float32)
                self._session._run(inputs, self._rows(rows), out)  # split by the driver where rows run alone
            case RunDecode(inputs, rows):
                self._decoding = self._session.begin_decode(inputs, self._rows(rows))
                self._answer(self._decoding.top_logits())  # which waits for the step, on every rank
            case Ask(method, arguments) if self._rank == 0:
                self._answer(getattr(self._decoding, method)(*arguments))

    def _allocate(self, batch: int, capacity: int) -> Any:
        try:
            return self._session.allocate(batch, capacity)
        except VerificationError as error:
            hint = "set `engine: {cuda_graphs: off}`: ranks run the same steps, captured by all of them or by none"
            raise VerificationError(error.message, hint=hint) from None

    def allocated(self) -> Allocated:
        """Say what a device has left, and what it does without."""
        return Allocated(self._session.notes, self._session.spare_bytes)

    def _answer(self, found: Any) -> None:
        if self._rank == 0:
            self._reply.answer(found)

    def _rows(self, place: CacheRows) -> Any:
        return self._caches[place.cache].rows(place.start, place.stop)


def _open(begin: StartRank, connection: Connection, group: RankGroup) -> Decoder[Any]:
    """Open the engine of a rank: on the CPU, or on its GPU, where it joins the others first."""
    if begin.gpu is None:
        return Session(begin.file, begin.session, own_kernels=begin.own_kernels)
    config = begin.gpu.config
    device = loading.reach(config, begin.gpu.device, begin.file)
    unique_id: bytes = nccl.make_id() if begin.rank == 0 else connection.recv()
    if begin.rank == 0:
        connection.send(unique_id)
    missing = Unavailable(
        f"NCCL found not all {begin.ranks} ranks within {begin.limit_s:g} s",
        hint="set NCCL_DEBUG=INFO to see how it looks for them; NCCL_SOCKET_IFNAME names a network interface",
    )
    late = threading.Timer(begin.limit_s, _fail, (connection, group, begin.rank, missing))
    late.daemon = True
    late.start()
    nccl.join(unique_id, begin.rank, begin.ranks, PROVIDERS[device.kind])
    late.cancel()
    config = replace(config, graphs=_graphs(config))
    opened: Decoder[Any] = loading.module_of(config).open_engine(begin.file, config, None, device)
    return opened


def _graphs(config: RuntimeConfig) -> GraphPlan:
    """Say which steps a rank captures: all that are planned, or none, because all ranks must run the same steps.

    Plans capture none: nothing is known of their collectives in a CUDA graph.
    """
    if config.plan is not None or config.graphs is None or config.graphs.mode == "off":
        return GraphPlan("off", ())
    return replace(config.graphs, mode="require")


def _fail(connection: Connection, group: RankGroup, rank: int, error: ForgeError) -> NoReturn:
    """Tell the driver why this rank ends; one that ends because another did says nothing."""
    if group.broken_by not in (None, rank):
        os._exit(LEFT)
    connection.send(error)
    group.break_up(rank)
    os._exit(error.exit_code)


def main() -> None:
    """Load the engine of a rank, and run what the process that started this one asks for, through file 0 and memory."""
    process.share_heaps()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    connection = Connection(os.dup(0))
    begin = connection.recv()
    assert isinstance(begin, StartRank)
    if os.getppid() != begin.driver:  # it has ended
        os._exit(LEFT)
    threading.Thread(target=end_with, args=[[begin.driver]], name="llmforge-watch", daemon=True).start()
    group = RankGroup(begin.ranks, begin.room, begin.group)
    group.join(begin.rank, begin.spins, begin.limit_s)
    try:
        session = _open(begin, connection, group)
        logits = Logits(os.fstat(begin.logits).st_size, begin.logits)
        reply = Reply(os.fstat(begin.reply).st_size, begin.reply)
        rank = _RankProcess(begin, session, logits, reply)
        facts = session.rows_alone, session.longest_step, session.buckets, session.decodes_ahead
        connection.send(RankReady(session.signature, *facts))
        seen = 0
        while (status := group.wait(seen, LOOK_S)) != groups.BROKEN:
            if status == groups.TIMEOUT:
                continue
            seen += 1
            for call in group.read():
                rank.do(call)
                if begin.gpu is not None and isinstance(call, Allocate):
                    connection.send(rank.allocated())
            group.answer(begin.rank, seen)
    except ForgeError as error:
        _fail(connection, group, begin.rank, error)
    except Exception:  # a bug: the driver reads the exit code, and a person what is logged
        logger.exception("rank %d failed", begin.rank)
        group.break_up(begin.rank)
        os._exit(1)
    os._exit(LEFT)


if __name__ == "__main__":
    main()
