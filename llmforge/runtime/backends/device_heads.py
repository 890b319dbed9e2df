"""Where heads of rows lie (`interface.Heads`): on the device, at addresses that never change, and on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmforge.ir import interface
from llmforge.ir.interface import Heads
from llmforge.runtime.backends.device import Buffer, Device
from llmforge.runtime.backends.device_inputs import ALIGNMENT_BYTES, ONNX_TYPES

_BYTES = 4  # of a number: fp32, int32


class HeadBuffers:
    """Room for the heads of up to `most_rows` rows.

    Those of n rows lie behind each other, so that one copy brings them all: logits [n, H], ids [n, H], masses
    [n, blocks], each at an address that TensorRT takes.
    """

    def __init__(self, device: Device, most_rows: int, vocabulary: int) -> None:
        self.most_rows = most_rows
        self._device = device
        self._vocabulary, self._width = vocabulary, min(interface.HEAD, vocabulary)
        self._blocks, self._block_size = interface.mass_blocks(vocabulary)
        self._buffer = device.allocate(self.size_bytes(most_rows))
        self._host: NDArray[np.uint8] = device.host((self._buffer.size,), "uint8")
        self._row: NDArray[np.float32] = device.host((vocabulary,), "float32")
        self._fetched: NDArray[np.float32] = device.host((most_rows, self._block_size), "float32")

    def size_bytes(self, rows: int) -> int:
        """Count the bytes of the heads of so many rows."""
        return 2 * self._each_bytes(rows) + rows * self._blocks * _BYTES

    def _each_bytes(self, rows: int) -> int:
        """Count the bytes of the logits, or ids, of so many heads, rounded up to the alignment."""
        return -(-rows * self._width * _BYTES // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def outputs(self, rows: int) -> list[tuple[str, int, tuple[int, ...], int]]:
        """Give name, type, shape and address of what a step of so many rows writes."""
        base, each = self._buffer.address, self._each_bytes(rows)
        return [
            (interface.TOP_LOGITS, ONNX_TYPES["float32"], (rows, self._width), base),
            (interface.TOP_IDS, ONNX_TYPES["int32"], (rows, self._width), base + each),
            (interface.MASSES, ONNX_TYPES["float32"], (rows, self._blocks), base + 2 * each),
        ]

    def read(self, rows: int) -> Heads:
        """Copy the heads of the last step, of so many rows; they hold until the next call."""
        held = self._host[: self.size_bytes(rows)]
        self._device.read(self._buffer, 0, held)
        each, shape = self._each_bytes(rows), (rows, self._width)
        logits, ids, masses = np.split(held, [each, 2 * each])
        own = rows * self._width
        return Heads(
            logits.view(np.float32)[:own].reshape(shape),
            ids.view(np.int32)[:own].reshape(shape),
            masses.view(np.float32).reshape(rows, self._blocks),
            self._vocabulary,
        )

    def read_row(self, logits: Buffer, row: int) -> NDArray[np.float32]:
        """Copy one row out of `logits` [n, V]; it holds until the next call."""
        self._device.read(logits, row * self._row.nbytes, self._row)
        return self._row

    def read_blocks(self, logits: Buffer, rows: Sequence[int], blocks: Sequence[int]) -> NDArray[np.float32]:
        """Copy one block (`interface.mass_blocks`) out of each of `rows`, -inf behind a row's end.

        They hold until the next call.
        """
        found = self._fetched[: len(rows)]
        for into, row, block in zip(found, rows, blocks, strict=True):
            start = block * self._block_size
            own = into[: self._vocabulary - start]
            self._device.read(logits, (row * self._vocabulary + start) * _BYTES, own)
            into[len(own) :] = -np.inf
        return found
