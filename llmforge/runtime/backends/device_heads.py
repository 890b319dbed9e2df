"""Where heads of rows lie (`interface.Heads`): on the device, at addresses that never change, and on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmforge.ir import interface
from llmforge.ir.interface import Heads
from llmforge.runtime.backends.device import Buffer, Device
from llmforge.runtime.backends.device_inputs import ALIGNMENT_BYTES, ONNX_TYPES, BoundInput

_BYTES = 4  # of a number: fp32, int32
_ID_BYTES = 8  # of an id: int64


class FetchedHeads:
    """Heads of one step on the host, which hold until the second step behind it begins."""

    def __init__(self, device: Device, size: int, vocabulary: int) -> None:
        self._device = device
        self._vocabulary, self._width = vocabulary, min(interface.HEAD, vocabulary)
        self._event = device.event()
        self.rows = 0
        self.values: NDArray[np.uint8] = device.host((size,), "uint8")

    def record(self, rows: int) -> FetchedHeads:
        """Hold `rows` of them when all is done that the device was asked for up to now."""
        self.rows = rows
        self._device.record(self._event)
        return self

    def wait(self) -> None:
        """Wait until they are there."""
        self._device.wait(self._event)

    def next_ids(self) -> NDArray[np.int64]:
        """Give what the step guessed [rows]."""
        return self.values[: self.rows * _ID_BYTES].view(np.int64)

    def heads(self, start: int, stop: int) -> Heads:
        """Give those between two bytes."""
        each, shape = self.rows * self._width * _BYTES, (self.rows, self._width)
        logits, ids, masses = np.split(self.values[start:stop], [each, 2 * each])
        return Heads(
            logits.view(np.float32).reshape(shape),
            ids.view(np.int32).reshape(shape),
            masses.view(np.float32).reshape(self.rows, -1),
            self._vocabulary,
        )


class HeadBuffers:
    """Room for the heads of up to `most_rows` rows, one on the device, and two on the host, which are filled in turn.

    Those of n rows lie behind each other, so that one copy brings them all: logits [n, H], ids [n, H], masses
    [n, blocks]. Where a graph guesses ids, they lie before them, at one address for any number of rows: there a step
    leaves its `next_ids`, and the one behind it finds its `chosen_ids`.
    """

    def __init__(self, device: Device, most_rows: int, vocabulary: int, *, guesses: bool = False) -> None:
        self.most_rows = most_rows
        self.guesses = guesses
        self._device = device
        self._vocabulary, self._width = vocabulary, min(interface.HEAD, vocabulary)
        self._blocks, self._block_size = interface.mass_blocks(vocabulary)
        self._start = -(-most_rows * _ID_BYTES // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if guesses else 0
        self._buffer = device.allocate(self.size_bytes(most_rows))
        self._sets = [FetchedHeads(device, self._buffer.size, vocabulary) for _ in range(2)]
        self._row: NDArray[np.float32] = device.host((vocabulary,), "float32")
        self._fetched: NDArray[np.float32] = device.host((most_rows, self._block_size), "float32")

    def size_bytes(self, rows: int) -> int:
        """Count the bytes of the heads of so many rows, with what lies before them."""
        return self._start + rows * (2 * self._width + self._blocks) * _BYTES

    def outputs(self, rows: int) -> list[tuple[str, int, tuple[int, ...], int]]:
        """Give name, type, shape and address of what a step of so many rows writes."""
        base, each = self._buffer.address + self._start, rows * self._width * _BYTES
        next_ids = (interface.NEXT_IDS, ONNX_TYPES["int64"], (rows,), self._buffer.address)
        return [
            (interface.TOP_LOGITS, ONNX_TYPES["float32"], (rows, self._width), base),
            (interface.TOP_IDS, ONNX_TYPES["int32"], (rows, self._width), base + each),
            (interface.MASSES, ONNX_TYPES["float32"], (rows, self._blocks), base + 2 * each),
            *([next_ids] if self.guesses else []),
        ]

    def chosen_ids(self) -> dict[str, BoundInput]:
        """Give the input that the last step has filled."""
        given = BoundInput(self._buffer.address, ONNX_TYPES["int64"], (self.most_rows,), on_host=False)
        return {interface.CHOSEN_IDS: given} if self.guesses else {}

    def fetch(self, rows: int) -> FetchedHeads:
        """Begin to copy the heads of the last step, of so many rows; see what is given for how long they hold."""
        fetched = self._sets.pop(0)
        self._sets.append(fetched)
        self._device.fetch(self._buffer, 0, fetched.values[: self.size_bytes(rows)])
        return fetched.record(rows)

    def heads(self, fetched: FetchedHeads) -> Heads:
        """Wait for what was fetched."""
        fetched.wait()
        return fetched.heads(self._start, self.size_bytes(fetched.rows))

    def read_row(self, logits: Buffer, row: int) -> NDArray[np.float32]:
        """Copy one row out of `logits` [n, V]; it holds until the next call."""
        self._device.read_beside(logits, row * self._row.nbytes, self._row)
        return self._row

    def read_blocks(self, logits: Buffer, rows: Sequence[int], blocks: Sequence[int]) -> NDArray[np.float32]:
        """Copy one block (`interface.mass_blocks`) out of each of `rows`, -inf behind a row's end.

        They hold until the next call.
        """
        found = self._fetched[: len(rows)]
        for into, row, block in zip(found, rows, blocks, strict=True):
            start = block * self._block_size
            own = into[: self._vocabulary - start]
            self._device.read_beside(logits, (row * self._vocabulary + start) * _BYTES, own)
            into[len(own) :] = -np.inf
        return found
