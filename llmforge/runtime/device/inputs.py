"""Input buffers of steps: an address for each on the device, and one on the host that it is filled from.

A CUDA graph reads its inputs where they lay when it was captured, so the addresses of decode steps never change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmforge.runtime.device.cuda import Buffer, Device

ALIGNMENT_BYTES = 256  # what cudaMalloc guarantees, and TensorRT wants of every address
ONNX_TYPES = {"float32": 1, "int32": 6, "int64": 7}  # TensorProto.DataType, of all that is fed besides caches


@dataclass(frozen=True)
class BoundInput:
    """One input of one step: where it lies, of which type and shape; `on_host`: in the host's memory."""

    address: int
    onnx: int
    shape: tuple[int, ...]
    on_host: bool


class StagedInputs(NamedTuple):
    """Inputs of a step in the host's memory, and where they will be bound."""

    bound: dict[str, BoundInput]
    values: NDArray[np.uint8]


class InputBuffers:
    """Room for the inputs `names`, of at most `each_bytes`, of which those in `on_host` stay on the host.

    There are `sets` of them on the host, which `stage` fills in turn, for one on the device. The attribute `each_bytes`
    is what each has room for: that, rounded up to the alignment.
    """

    def __init__(
        self, device: Device, names: Collection[str], on_host: Collection[str], each_bytes: int, sets: int = 1
    ) -> None:
        self._device = device
        self._on_host = frozenset(on_host)
        self.each_bytes = -(-each_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._offsets = {name: i * self.each_bytes for i, name in enumerate(names)}
        size = self.each_bytes * len(self._offsets)
        self._sets = [device.host((size,), "uint8") for _ in range(sets)]
        self._buffer: Buffer = device.allocate(size)

    def upload(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, BoundInput]:
        """Stage `feeds`, and send them; what was staged `sets` calls before must have been copied.

        Raises what `stage` raises.
        """
        staged = self.stage(feeds)
        self.send(staged)
        return staged.bound

    def send(self, staged: StagedInputs) -> None:
        """Begin to bring inputs to their addresses, in one copy."""
        self._device.write(self._buffer, 0, staged.values)

    def stage(self, feeds: Mapping[str, NDArray[Any]]) -> StagedInputs:
        """Copy `feeds` to a set on the host: that which was staged longest ago, and must have been copied.

        Raises:
            ValueError: one has no room, or is larger than that.
        """
        staging = self._sets.pop(0)
        self._sets.append(staging)
        bound = {}
        for name, value in feeds.items():
            if name not in self._offsets or value.nbytes > self.each_bytes:
                raise ValueError(
                    f"{name}, {value.nbytes} bytes; room for {self.each_bytes} each: {list(self._offsets)}"
                )
            offset, on_host = self._offsets[name], name in self._on_host
            staging[offset : offset + value.nbytes] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            base = int(staging.ctypes.data) if on_host else self._buffer.address
            bound[name] = BoundInput(base + offset, ONNX_TYPES[value.dtype.name], value.shape, on_host)
        return StagedInputs(bound, staging)
