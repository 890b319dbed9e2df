"""What carries calibration text through the layers: this process, on a device of torch's, or workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from llmforge.base.errors import UnsupportedError


class WorkerLost(Exception):
    """A worker has ended, and what it carried with it."""


class Worker(Protocol):
    """A `spread.WindowsWorker` in another process."""

    def ask(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Have a method of it called, in the order of asking; what is returned waits for the result.

        That raises what the method raises, and WorkerLost.
        """


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
