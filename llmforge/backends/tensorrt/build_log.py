"""Messages of TensorRT's parser and builder: collected, sorted into refusals, notes and noise."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

# Warnings after which a plan computes something else than its graph says. "Unused Input": the parser knows no use for
# an input of a node and drops it, such as the lengths of padded keys (seen with TensorRT-RTX 1.7.1).
_FATAL = re.compile(r"Unused Input")

# Warnings that say what is so by design.
_NOISE = re.compile(r"Make sure (input|output) \S+ has Int64 binding")

_SEVERE = ("INTERNAL_ERROR", "ERROR")
_PREFIX = re.compile(r"^(?:\S+\.(?:cpp|h):\d+: |IBuilder::\w+: |Error Code \d+: )+")


@dataclass
class BuildLog:
    """Every line of a build, in order: severity as TensorRT names it, and text."""

    lines: list[tuple[str, str]] = field(default_factory=list)

    def logger(self, api: Any) -> Any:
        """Make the `ILogger` of the module `api` that writes here; keep a reference as long as it is in use."""
        lines = self.lines

        class Collector(api.ILogger):  # type: ignore[misc]  # the class is known when the module is
            def __init__(self) -> None:
                api.ILogger.__init__(self)  # pybind11 wants it called in this way

            def log(self, severity: Any, message: str) -> None:
                lines.append((severity.name, message))

        return Collector()

    @property
    def errors(self) -> list[str]:
        """What went wrong, without the places in TensorRT's own sources."""
        return [_PREFIX.sub("", text) for severity, text in self.lines if severity in _SEVERE]

    @property
    def fatal_warnings(self) -> list[str]:
        """Warnings that mean another result than the graph's."""
        return [text for text in self._warnings() if _FATAL.search(text)]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings that a reader may want to see, each once."""
        kept = (_PREFIX.sub("", text) for text in self._warnings() if not _NOISE.search(text))
        return tuple(dict.fromkeys(kept))

    def _warnings(self) -> list[str]:
        return [text for severity, text in self.lines if severity == "WARNING"]
