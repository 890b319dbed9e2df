"""What carries calibration text through the layers: this process, on a device of torch's, or workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmforge.base.errors import UnsupportedError

if TYPE_CHECKING:
    from llmforge.calibration.spread import Worker


@dataclass(frozen=True)
class Carriers:
    """A `device` by its name, see `ExecutionDevice.of`; `workers` starts workers, which compute on CPUs.

    Raises:
        UnsupportedError: workers are to compute on another device.
    """

    device: str = "cpu"
    workers: Callable[[], AbstractContextManager[Sequence[Worker]]] | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.device != "cpu":
            raise UnsupportedError(
                f"workers of calibration compute on CPUs, not on device {self.device}",
                hint="leave --calibration-workers or --device out",
            )
