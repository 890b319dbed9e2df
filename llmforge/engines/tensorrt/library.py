"""The two Python modules that build plans, `tensorrt` and `tensorrt_rtx`: imported when they are asked for."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from llmforge.base.errors import EnvironmentLacks, UnsupportedError
from llmforge.targets import Backend


@dataclass(frozen=True)
class Library:
    """One of the two modules.

    `ahead_of_time`: builds for a compute capability that is named, with no GPU at hand. TensorRT-RTX does; TensorRT
    builds for the GPU that it finds, whose kernels it times.
    """

    backend: Literal["tensorrt", "tensorrt-rtx"]
    module: Literal["tensorrt", "tensorrt_rtx"]
    title: str
    ahead_of_time: bool

    @cached_property
    def api(self) -> Any:
        """Import the module.

        Raises:
            EnvironmentLacks: it is not installed.
        """
        if importlib.util.find_spec(self.module) is None:
            raise EnvironmentLacks(
                f"{self.title} is not installed: there is no Python module {self.module}",
                hint=f"pip install 'llmforge[{self.backend}]'",
            )
        return importlib.import_module(self.module)

    @property
    def version(self) -> str:
        """Version of the module, which a plan is bound to."""
        return str(self.api.__version__)

    def compute_capability(self, sm: str) -> Any:
        """Find the value that stands for `sm`, "89", where plans are built ahead of time.

        Raises:
            UnsupportedError: the module has no code for it.
        """
        known = [name for name in dir(self.api.ComputeCapability) if name.startswith("SM")]
        if f"SM{sm}" not in known:
            raise UnsupportedError(
                f"{self.title} {self.version} has no code for SM{sm}; it has for {', '.join(known)}",
                hint="set `engine: {backend: tensorrt}`, which builds on the GPU itself",
            )
        return getattr(self.api.ComputeCapability, f"SM{sm}")


LIBRARIES = (
    Library("tensorrt", "tensorrt", "TensorRT", ahead_of_time=False),
    Library("tensorrt-rtx", "tensorrt_rtx", "TensorRT-RTX", ahead_of_time=True),
)


def of_backend(backend: Backend) -> Library:
    """Find the module that builds for `backend`."""
    return next(library for library in LIBRARIES if library.backend == backend)
