"""Memory of the top logits of rows (`interface.TopLogits`): on the device, at fixed addresses, and on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.ir import interface
from llmforge.ir.interface import TopLogits
from llmforge.runtime.device.cuda import Buffer, Device
from llmforge.runtime.device.inputs import ALIGNMENT_BYTES, ONNX_TYPES, BoundInput

_BYTES = 4  # of a number: fp32, int32
_ID_BYTES = 8  # of an id: int64


@dataclass(eq=False)
class FetchedTopLogits:
    """Top logits of a step of `rows` rows on their way to `values`, where they are after `event`."""

    values: NDArray[np.uint8]
    event: Any
    rows: int = 0


class TopLogitsBuffers:
    """Room for the top logits of `most_rows` rows, one on the device, and two on the host, which are filled in turn.

    Those of n rows lie after each other, so that one copy brings them all: logits [n, H], ids [n, H], masses
    [n, blocks], each at an address that TensorRT takes. Where a graph guesses ids, they lie before them, at one address
    for any number of rows: there a step leaves its `next_ids`, and the next one finds its `chosen_ids`.
    """

    def __init__(self, device: Device, most_rows: int, vocabulary: int, *, guesses: bool = False) -> None:
        self.most_rows = most_rows
        self.guesses = guesses
        self._device = device
        self._vocabulary, self._width = vocabulary, min(interface.HEAD, vocabulary)
        self._blocks, self._block_size = interface.mass_blocks(vocabulary)
        self._start = _aligned(most_rows * _ID_BYTES) if guesses else 0
        self._buffer = device.allocate(self.size_bytes(most_rows))
        self._sets = [FetchedTopLogits(device.host((self._buffer.size,), "uint8"), device.event()) for _ in range(2)]
        self._row: NDArray[np.float32] = device.host((vocabulary,), "float32")
        self._fetched: NDArray[np.float32] = device.host((most_rows, self._block_size), "float32")

    def size_bytes(self, rows: int) -> int:
        """Count the bytes of the top logits of so many rows, with what lies before them."""
        return self._start + 2 * self._each_bytes(rows) + rows * self._blocks * _BYTES

    def _each_bytes(self, rows: int) -> int:
        """Count the bytes of the logits, or ids, of so many rows, rounded up to the alignment."""
        return _aligned(rows * self._width * _BYTES)

    def outputs(self, rows: int) -> list[tuple[str, int, tuple[int, ...], int]]:
        """Give name, type, shape and address of what a step of so many rows writes."""
        base, each = self._buffer.address + self._start, self._each_bytes(rows)
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

    def fetch(self, rows: int) -> FetchedTopLogits:
        """Begin to copy the top logits of the last step, of so many rows, which hold until the second call from now."""
        fetched = self._sets.pop(0)
        self._sets.append(fetched)
        self._device.fetch(self._buffer, 0, fetched.values[: self.size_bytes(rows)])
        fetched.rows = rows
        self._device.record(fetched.event)
        return fetched

    def next_ids(self, fetched: FetchedTopLogits) -> NDArray[np.int64]:
        """Give what the step guessed, whose top logits were waited for, int64 [rows]."""
        return fetched.values[: fetched.rows * _ID_BYTES].view(np.int64)

    def wait(self, fetched: FetchedTopLogits) -> TopLogits:
        """Wait for what is on its way to the host."""
        self._device.wait(fetched.event)
        rows, each = fetched.rows, self._each_bytes(fetched.rows)
        logits, ids, masses = np.split(fetched.values[self._start : self.size_bytes(rows)], [each, 2 * each])
        own, shape = rows * self._width, (rows, self._width)
        return TopLogits(
            logits.view(np.float32)[:own].reshape(shape),
            ids.view(np.int32)[:own].reshape(shape),
            masses.view(np.float32).reshape(rows, self._blocks),
            self._vocabulary,
        )

    def read(self, rows: int) -> TopLogits:
        """Copy the top logits of the last step, of so many rows, and wait for them."""
        return self.wait(self.fetch(rows))

    def read_row(self, logits: Buffer, row: int) -> NDArray[np.float32]:
        """Copy one row out of `logits` [n, V]; it holds until the next call."""
        self._device.read_beside(logits, row * self._row.nbytes, self._row)
        return self._row

    def read_blocks(self, logits: Buffer, rows: Sequence[int], blocks: Sequence[int]) -> NDArray[np.float32]:
        """Copy one block (`interface.mass_blocks`) out of each of `rows`, -inf after a row's end.

        They hold until the next call.
        """
        found = self._fetched[: len(rows)]
        for into, row, block in zip(found, rows, blocks, strict=True):
            start = block * self._block_size
            own = into[: self._vocabulary - start]
            self._device.read_beside(logits, (row * self._vocabulary + start) * _BYTES, own)
            into[len(own) :] = -np.inf
        return found


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
