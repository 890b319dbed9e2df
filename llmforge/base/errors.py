"""Every error that llmforge raises on purpose, and the exit code of each; docs/limits.md has the table of codes.

::

    ForgeError                      1   (never raised itself; 1 is left to our own bugs)
    ├── UsageError                  2   command line
    │   └── RecipeError             2   a recipe does not validate
    ├── GateFailed                  3   built, and a gate failed
    ├── GateInconclusive            4   built, and the data cannot decide a gate
    ├── EnginePending              10   the engine is not built yet, and so its gates are not decided
    ├── Unavailable                 9   the engine cannot take a request now: full, or shutting down
    │   └── QueueFull               9   as many requests wait as may
    ├── InputError                  5   checkpoint or data cannot be used
    │   ├── CheckpointError         5
    │   ├── DataError               5
    │   └── ForgedVerdict           5   evidence says something else than what was measured
    ├── UnsupportedError            6   the target, architecture or option cannot be served
    │   ├── NotADecoder             6   the model is an encoder, or has one
    │   └── RunFailed               6   what runs a graph took it, and a run of it failed
    ├── VerificationError           7   a pass did not do what it declares; a build gives other bytes again
    │   └── BudgetExceeded          7   lossy passes cost more than their budgets
    └── EnvironmentLacks            8   a package, a device, network, disk space or memory is missing
        ├── VersionMismatch         8   an artifact needs other versions than are installed
        └── PluginError             8   a plug-in does not load, or is not what it should be

No errors, and ends of a command: 0 success; 129 SIGHUP, 130 SIGINT and 143 SIGTERM (`base.signals.Interrupted`); 141
nobody reads standard output any more (SIGPIPE).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from llmforge.base.wording import LONGEST_HINT, bounded


class ForgeError(Exception):
    """Base of all errors that llmforge raises on purpose.

    `message` says what is wrong, where (file:line, node, tensor) and what is allowed; `hint` says what to do. Both are
    shortened: what they quote may come from strangers.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = bounded(message)
        self.hint = None if hint is None else bounded(hint, LONGEST_HINT)
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


def kind_of(exit_code: int) -> type[ForgeError]:
    """Give the branch of the tree that has an exit code; a code that none has is a bug's."""
    kinds = [ForgeError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return next((kind for kind in kinds if kind.exit_code == exit_code), ForgeError)


class UsageError(ForgeError):
    """The command line asks for something that does not exist."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe does not validate."""


class GateFailed(ForgeError):
    """The artifact was built and a gate failed."""

    exit_code = 3


class GateInconclusive(ForgeError):
    """The artifact was built and its data cannot decide a gate."""

    exit_code = 4


class EnginePending(ForgeError):
    """The engine of the artifact is not built yet: `llmforge build --finish` builds it on the target."""

    exit_code = 10


class Unavailable(ForgeError):
    """The engine cannot take a request now: its queue is full, or it is shutting down. Later it may."""

    exit_code = 9


class QueueFull(Unavailable):
    """As many requests wait as may; later one more may."""


class InputError(ForgeError):
    """A checkpoint or a data file cannot be used."""

    exit_code = 5


class CheckpointError(InputError):
    """A checkpoint cannot be used."""


class DataError(InputError):
    """A calibration or evaluation file cannot be used."""


class ForgedVerdict(InputError):
    """A record of evidence says something else than what was measured."""


class UnsupportedError(ForgeError):
    """The target, the architecture or an option cannot be served."""

    exit_code = 6


class NotADecoder(UnsupportedError):
    """The architecture is no decoder; no other way to trace it would help."""


class RunFailed(UnsupportedError):
    """ONNX Runtime, TensorRT or CUDA took a graph, and failed at running it."""


class VerificationError(ForgeError):
    """A pass did not do what it declares, or a build gives other bytes than it gave before."""

    exit_code = 7


class BudgetExceeded(VerificationError):
    """Lossy passes cost more than their budgets; every other proof held.

    `lines` say of each what it cost. `settings` are the `KEY=VALUE` with which a build would pass, as far as what was
    measured tells; `hint` has them as a command, and is not shortened: it is there to be pasted.
    """

    def __init__(self, lines: Sequence[str], *, settings: Sequence[str], hint: str) -> None:
        super().__init__("\n".join(bounded(line) for line in lines))
        self.message = "\n".join(bounded(line) for line in lines)  # a recipe has few lossy passes, and gates
        self.settings = tuple(settings)
        self.hint = hint


class EnvironmentLacks(ForgeError):
    """A package, a device, disk space or something in the network is missing."""

    exit_code = 8


class VersionMismatch(EnvironmentLacks):
    """An artifact needs other versions than are installed."""


class PluginError(EnvironmentLacks):
    """A plug-in does not load, is not what it should be, or fails."""
