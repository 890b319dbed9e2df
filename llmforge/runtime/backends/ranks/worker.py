"""The process of a rank: `session.py` starts this module, and talks to it as `messages.py` says."""

from __future__ import annotations

import logging
import os
import select
import threading
from multiprocessing.connection import Connection
from typing import NoReturn

import numpy as np

from llmforge.base import process
from llmforge.base.errors import ForgeError
from llmforge.runtime.backends.ranks import group as groups
from llmforge.runtime.backends.ranks.group import Group, Logits, Memory
from llmforge.runtime.backends.ranks.messages import (
    LEFT,
    Allocate,
    Begin,
    Call,
    Copy,
    Drop,
    Failed,
    Place,
    Ready,
    Step,
)
from llmforge.runtime.backends.session import Cache, Session

LOOK_S = 5.0  # between two looks at a group that has nothing to do

logger = logging.getLogger(__name__)


class _Rank:
    """Does what the driver asks of a rank."""

    def __init__(self, begin: Begin, session: Session, logits: Logits) -> None:
        self._rank, self._session, self._logits = begin.rank, session, logits
        self._caches: dict[int, Cache] = {}

    def do(self, call: Call) -> None:
        match call:
            case Allocate(cache, batch, capacity):
                self._caches[cache] = self._session.allocate(batch, capacity)
            case Drop(cache):
                del self._caches[cache]
            case Copy():
                to, source = self._rows(call.to), self._rows(call.source)
                to.copy(call.row, call.start, source, call.source_row, call.source_start, call.tokens)
            case Step(inputs, rows, shape):
                first = self._rank == 0  # logits are whole on every rank
                out = self._logits.array(shape, grow=False) if first else np.empty(shape, np.float32)
                self._session._run(inputs, self._rows(rows), out)  # split by the driver where rows run alone

    def _rows(self, place: Place) -> Cache:
        return self._caches[place.cache].rows(place.start, place.stop)


def _end_with(driver: int) -> None:
    """Wait for the end of the driver, and end with it: no rank outlives it, whatever it is doing."""
    try:
        handle = os.pidfd_open(driver)
    except ProcessLookupError:
        os._exit(LEFT)
    if os.getppid() == driver:
        watched = select.poll()
        watched.register(handle, select.POLLIN)
        watched.poll()
    os._exit(LEFT)


def _fail(connection: Connection, group: Group, rank: int, error: ForgeError) -> NoReturn:
    """Tell the driver why this rank ends; one that ends because another did says nothing."""
    if group.broken_by not in (None, rank):
        os._exit(LEFT)
    connection.send(Failed(error))
    group.break_up(rank)
    os._exit(error.exit_code)


def main() -> None:
    """Load the engine of a rank, and run what the process that started this one asks for, through file 0 and memory."""
    process.share_heaps()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    connection = Connection(os.dup(0))
    begin = connection.recv()
    assert isinstance(begin, Begin)
    threading.Thread(target=_end_with, args=[begin.driver], name="llmforge-watch", daemon=True).start()
    group = Group(begin.ranks, begin.room, begin.group)
    group.join(begin.rank, begin.spins, begin.limit_s)
    try:
        session = Session(begin.file, begin.session, own_kernels=begin.own_kernels)
        rank = _Rank(begin, session, Logits(Memory(begin.logits, os.fstat(begin.logits).st_size)))
        connection.send(Ready(session.signature))
        seen = 0
        while (status := group.wait(seen, LOOK_S)) != groups.BROKEN:
            if status == groups.TIMEOUT:
                continue
            seen += 1
            for call in group.read():
                rank.do(call)
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
