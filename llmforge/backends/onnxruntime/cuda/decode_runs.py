"""Decode steps that a device runs one after the other, while the host looks at the one before.

The session's thread launches a step and returns; the device copies its top logits to the host when it is done. A step
that is begun after one whose top logits nobody has asked for yet would write over that one's logits: they are copied
aside first, within the device, and read from there on a stream of their own, concurrently with what runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from llmforge.ir.interface import TopLogits
from llmforge.runtime.device.cuda import BlockCopy, Buffer, Device, MemoryBlock
from llmforge.runtime.device.top_logits import FetchedTopLogits, TopLogitsBuffers
from llmforge.runtime.interface import DecodeRun


class _Aside:
    """Room for the logits of one step."""

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        self._buffer = device.allocate(size)
        self._event = device.event()

    def keep(self, logits: Buffer) -> _Aside:
        """Begin to copy `logits` here."""
        size = logits.size
        self._device.copy([BlockCopy(MemoryBlock(self._buffer, 0, size), MemoryBlock(logits, 0, size), size, 1)])
        self._device.record(self._event)
        return self

    def at(self) -> Buffer:
        """Give where they are, once they are there."""
        self._device.wait(self._event)
        return self._buffer


class Running(DecodeRun):
    """A step that the session's thread launches; `launched` gives its top logits, on their way to the host."""

    def __init__(self, buffers: TopLogitsBuffers, logits: Buffer, launched: Future[FetchedTopLogits]) -> None:
        self._buffers = buffers
        self._logits = logits
        self._launched = launched
        self._kept: Future[_Aside] | None = None
        self.taken = False

    def top_logits(self) -> TopLogits:
        """Wait for the step, and give the top logits of its rows."""
        found = self._buffers.wait(self._launched.result())
        self.taken = True
        return found

    def next_ids(self) -> NDArray[np.int64]:
        """Give what the step guessed."""
        return self._buffers.next_ids(self._launched.result())

    def logits(self, row: int) -> NDArray[np.float32]:
        """Fetch all logits of a row."""
        return self._buffers.read_row(self._place(), row)

    def blocks(self, rows: Sequence[int], blocks: Sequence[int]) -> NDArray[np.float32]:
        """Fetch one block of the logits of each of some rows."""
        return self._buffers.read_blocks(self._place(), rows, blocks)

    def launched(self) -> None:
        """Wait until the step is launched, and no longer."""
        wait([self._launched])

    def settle(self) -> None:
        """Wait for the step, whatever becomes of it, unless that was done."""
        self.launched()
        if not self.taken and self._launched.exception() is None:
            self.top_logits()

    def writes_to(self, logits: Buffer) -> bool:
        """Whether its logits go there."""
        return self._logits is logits

    def keep(self, kept: Future[_Aside]) -> None:
        """Read logits from where they were copied aside."""
        self._kept = kept

    def _place(self) -> Buffer:
        return self._logits if self._kept is None else self._kept.result().at()


class DecodeRuns:
    """Begins decode steps of one session, of which at most two are under way.

    Args:
        device: where they run.
        thread: launches them, one after the other.
        buffers: where their top logits go.
        logits: where their logits go.
    """

    def __init__(self, device: Device, thread: ThreadPoolExecutor, buffers: TopLogitsBuffers, logits: Buffer) -> None:
        self._thread = thread
        self._buffers = buffers
        self._logits = logits
        self._aside = _Aside(device, logits.size) if buffers.guesses else None
        self._begun: deque[Running] = deque(maxlen=2)

    def make_room(self) -> None:
        """Wait until no more than one step is under way, so that what another one took on the host is free."""
        if len(self._begun) == 2:
            self._begun[0].settle()

    def begin(self, launch: Callable[[], None], rows: int, logits: Buffer | None = None) -> Running:
        """Begin a step of so many rows that `launch`, which waits for nothing, sends to the device.

        `logits`: where it puts them; None: where decode steps do. Another place is one that no later step writes to.
        """
        logits = self._logits if logits is None else logits
        before = self._begun[-1] if self._begun and logits is self._logits else None
        if self._aside is not None and before is not None and not before.taken and before.writes_to(logits):
            before.keep(self._thread.submit(self._aside.keep, logits))

        def run() -> FetchedTopLogits:
            launch()
            return self._buffers.fetch(rows)

        running = Running(self._buffers, logits, self._thread.submit(run))
        self._begun.append(running)
        return running
