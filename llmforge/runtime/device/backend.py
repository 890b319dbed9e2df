"""The base of decoders over a device's memory: buckets, logits in page-locked memory, verified CUDA graphs."""

from __future__ import annotations

import logging
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import VerificationError
from llmforge.runtime.config import Capture
from llmforge.runtime.device.cuda import Device
from llmforge.runtime.device.graph_capture import CaptureProbe, CaptureResult, verify_capture
from llmforge.runtime.interface import C, Decoder

logger = logging.getLogger(__name__)

INPUT_BYTES = 8  # of what is fed for each row and token of a step, at most: int64
LOGIT_BYTES = 4  # fp32
RESERVE = 0.05  # of a device's memory: workspaces of kernels, and logits of many rows


class DeviceDecoder(Decoder[C], Generic[C]):
    """A decoder over the memory of `device`, whose decode steps may be CUDA graphs.

    `capture_results` tell which steps were captured over the cache that was allocated last. A subclass says whether it
    is an error that a step cannot be captured.
    """

    device: Device
    capture_results: tuple[CaptureResult, ...] = ()
    _graphs_required: bool

    @property
    def notes(self) -> tuple[str, ...]:
        """Which steps are not captured though they were planned to be, and why."""
        return tuple(each.note for each in self.capture_results if each.reason is not None)

    @property
    def spare_bytes(self) -> int | None:
        """Count the bytes that are free, less `RESERVE` of all for what steps take; None: the device is the host."""
        free, total = self.device.memory()
        return max(0, free - int(RESERVE * total)) if total else None

    def logits_array(self, shape: tuple[int, int, int]) -> NDArray[np.float32]:
        """Make an array for `out` of `step` in memory that the device writes to by itself."""
        array: NDArray[np.float32] = self.device.host(shape, "float32")
        return array

    def _verify_capture(self, capture: Capture, probe: CaptureProbe) -> CaptureResult:
        """Capture a step by running `probe`, verify its replays, and keep the result in `capture_results`.

        Raises:
            VerificationError: a step that must be captured is not.
        """
        result = verify_capture(capture, probe, lambda: self.device.memory()[0])
        self.capture_results += (result,)
        logger.info("%s", result)
        if self._graphs_required and result.reason is not None:
            raise VerificationError(
                result.note, hint="set `engine: {cuda_graphs: allow}` to run them without CUDA graph"
            )
        return result
