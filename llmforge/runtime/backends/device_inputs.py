"""Where the inputs of a step lie: a place for each on the device, and one on the host that it is filled from.

A recorded step reads its inputs where they lay when it was recorded, so the places of decode steps never move.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.runtime.backends.device import Buffer, Device

ALIGNMENT_BYTES = 256  # what cudaMalloc guarantees, and TensorRT wants of every address
ONNX_INTEGERS = {"int32": 6, "int64": 7}  # TensorProto.DataType, of all that is fed besides caches


@dataclass(frozen=True)
class Place:
    """One input of one step: where it lies, of which type and shape; `on_host`: in the host's memory."""

    address: int
    onnx: int
    shape: tuple[int, ...]
    on_host: bool


class Inputs:
    """Places for the inputs `names`, of at most `each_bytes`, of which those in `hosted` stay on the host."""

    def __init__(self, device: Device, names: Collection[str], hosted: Collection[str], each_bytes: int) -> None:
        self._device = device
        self._hosted = frozenset(hosted)
        self._each = -(-each_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._offsets = {name: i * self._each for i, name in enumerate(names)}
        self._staging = device.host((self._each * len(self._offsets),), "uint8")
        self._buffer: Buffer = device.allocate(len(self._staging))

    @property
    def each_bytes(self) -> int:
        """Room for one input."""
        return self._each

    def fill(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, Place]:
        """Bring `feeds` to their places in one copy, which `Device.synchronize` waits for.

        Raises:
            ValueError: one has no place, or is larger than it.
        """
        places = {}
        for name, value in feeds.items():
            if name not in self._offsets or value.nbytes > self._each:
                raise ValueError(f"{name}, {value.nbytes} bytes; places for {self._each} bytes: {list(self._offsets)}")
            at, on_host = self._offsets[name], name in self._hosted
            self._staging[at : at + value.nbytes] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            base = int(self._staging.ctypes.data) if on_host else self._buffer.address
            places[name] = Place(base + at, ONNX_INTEGERS[value.dtype.name], value.shape, on_host)
        self._device.write(self._buffer, 0, self._staging)
        return places
