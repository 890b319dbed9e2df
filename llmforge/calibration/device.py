"""The device that layers run on: what of a layer is resident there, what rests on the host, and when it moves.

On the CPU all of it is one memory, and nothing moves. Elsewhere, a layer's weights cross to the device as it is loaded,
while a thread reads the next layer's to the host. Hidden states of as many windows as fit stay on the device from the
first layer to the last, with what a layer's linears read of them; those of further windows rest on the host. Sums over
tokens come to the host once for each group of linears that read one tensor: codes are chosen there, by compiled loops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from llmforge.base.errors import EnvironmentLacks, UsageError
from llmforge.calibration.carriers import Carriers
from llmforge.calibration.residency import ModelWidths
from llmforge.calibration.threads import IN_ORDER, WindowMap, compute_alone, over_windows

_CPU = torch.device("cpu")
WORKSPACE = 32 << 20  # bytes that torch gives cuBLAS for each thread on Hopper; 8 MiB on others
CUDA_THREADS = 2  # that multiply: the calling one, and torch's own on the way back
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class ExecutionDevice:
    """Where tensors live: `windows` of the text, the first ones, stay on `device` with what is held of them."""

    device: torch.device = _CPU
    windows: int = sys.maxsize

    @classmethod
    def of(cls, name: str) -> ExecutionDevice:
        """Find a device by torch's name of it; "auto" is the first GPU, or the CPU where there is none.

        Raises:
            UsageError: nothing is called so.
            EnvironmentLacks: torch has no such device.
        """
        if name == "auto":
            name = "cuda:0" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise UsageError(f"no device is called {name!r}", hint="auto, cpu, or cuda:N") from error
        count = torch.cuda.device_count() if device.type == "cuda" else 1
        if (device.index or 0) >= count:
            raise EnvironmentLacks(
                f"device {name} is not there: torch {torch.__version__} finds {count} CUDA devices",
                hint="use --device cpu; or install torch for CUDA, and look at nvidia-smi",
            )
        return cls(device)

    @property
    def is_host(self) -> bool:
        """Say whether it is the CPU, whose memory the host's is."""
        return self.device == _CPU

    @property
    def identity(self) -> str:
        """Tell it from devices that compute other last bits; "" is the CPU, which its own key says."""
        if self.is_host:
            return ""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    @property
    def carriers(self) -> Carriers:
        """Let it carry windows."""
        return Carriers(str(self.device))

    @property
    def notes(self) -> tuple[str, ...]:
        """Say for the report what device it was; nothing of the CPU."""
        return () if self.is_host else (f"calibration: layers ran on {self.identity} ({self.device.type})",)

    def fitting(self, widths: Callable[[], ModelWidths], lengths: Sequence[int]) -> ExecutionDevice:
        """Return the device with as many windows of these `lengths`, in tokens, as its free memory has room for.

        Raises:
            EnvironmentLacks: it has not room for one.
        """
        free = self._free_bytes()
        if free is None:
            return self
        windows = widths().windows_within(free, lengths)
        if not windows:
            raise EnvironmentLacks(
                f"device {self.device}: {free / 1e9:.1f} GB of memory are free, which a layer, its sums and one window "
                "do not fit into",
                hint="use --device cpu, or free memory of the device",
            )
        return replace(self, windows=windows)

    def _free_bytes(self) -> int | None:
        """Return how much memory is free for tensors; None where that is not known or not limited."""
        if self.device.type != "cuda":
            return None
        return max(0, torch.cuda.mem_get_info(self.device)[0] - CUDA_THREADS * WORKSPACE)

    def put(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` on the device."""
        return x.to(self.device)

    def rest(self, window: int, x: torch.Tensor) -> torch.Tensor:
        """Return what is held of a window where it rests: on the device, or on the host where it does not fit."""
        return x.to(self.device if window < self.windows else _CPU)

    def rest_all(self, sides: Sequence[list[torch.Tensor]]) -> None:
        """Put the hidden states of all windows to where they rest; what two sides share crosses once."""
        moved: dict[int, torch.Tensor] = {}
        for side in sides:
            for window, state in enumerate(side):
                if id(state) not in moved:
                    moved[id(state)] = self.rest(window, state)
            side[:] = [moved[id(state)] for state in side]

    def put_all(self, values: Any, moved: dict[int, torch.Tensor]) -> Any:
        """Return `values` with the tensors in them on the device, each `moved` once, by identity."""
        if isinstance(values, torch.Tensor):
            if id(values) not in moved:
                moved[id(values)] = self.put(values)
            return moved[id(values)]
        if type(values) is dict:
            return {key: self.put_all(value, moved) for key, value in values.items()}
        if type(values) in (list, tuple):
            return type(values)(self.put_all(value, moved) for value in values)
        return values

    def place(self, module: torch.nn.Module) -> None:
        """Move the parameters and buffers of `module` that have memory to the device."""
        for part in module.modules():
            of_part: tuple[dict[str, Any], ...] = part._parameters, part._buffers
            for held in of_part:
                for name, tensor in held.items():
                    if tensor is None or tensor.is_meta or tensor.device == self.device:
                        continue
                    moved = self.put(tensor.detach())
                    if isinstance(tensor, torch.nn.Parameter):
                        moved = torch.nn.Parameter(moved, tensor.requires_grad)
                    held[name] = moved

    def over_windows(self, threads: int) -> AbstractContextManager[WindowMap]:
        """Return a `map` over windows: on the CPU on so many threads, elsewhere one window after the other."""
        return over_windows(threads) if self.is_host else nullcontext(IN_ORDER)

    def ahead(self, read: Callable[[int], _Read], indices: Iterable[int]) -> Iterator[_Read]:
        """Yield what `read` makes of each of `indices`; a thread reads the next while one is worked on."""
        with ThreadPoolExecutor(1, initializer=compute_alone) as reader:
            coming: list[Future[_Read]] = []
            for index in indices:
                coming.append(reader.submit(read, index))
                if len(coming) > 1:
                    yield coming.pop(0).result()
            for last in coming:
                yield last.result()


HOST = ExecutionDevice()
