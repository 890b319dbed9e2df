"""The Python modules that compile plans, `tensorrt` and `tensorrt_rtx`: imported when they are asked for."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llmforge.backends import BACKENDS, BackendName
from llmforge.backends.record import BackendRecord, Provider
from llmforge.base.errors import EnvironmentLacks, UnsupportedError


@dataclass(frozen=True)
class Library:
    """One of the modules: that of `backend`, of which `provider` is all."""

    backend: BackendRecord
    provider: Provider

    @property
    def title(self) -> str:
        """Its name, for messages."""
        return self.backend.title

    @property
    def ahead_of_time(self) -> bool:
        """Whether it builds for a compute capability that is named, without a GPU."""
        return self.provider.needs_device is None

    def require(self) -> None:
        """Return if the module is installed.

        Raises:
            EnvironmentLacks: it is not.
        """
        if importlib.util.find_spec(self.backend.module) is None:
            raise EnvironmentLacks(
                f"{self.title} is not installed: there is no Python module {self.backend.module}",
                hint=self.provider.install,
            )

    @cached_property
    def api(self) -> Any:
        """Import the module.

        Raises:
            EnvironmentLacks: it is not installed.
        """
        self.require()
        return importlib.import_module(self.backend.module)

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
                f"{self.title} {self.version} does not support SM{sm}; supported: {', '.join(known)}",
                hint="set `engine: {backend: tensorrt}`, which builds on the GPU itself",
            )
        return getattr(self.api.ComputeCapability, f"SM{sm}")


def of_backend(name: BackendName) -> Library:
    """Find the module of a backend that compiles plans."""
    backend = BACKENDS[name]
    (provider,) = backend.providers
    return Library(backend, provider)
