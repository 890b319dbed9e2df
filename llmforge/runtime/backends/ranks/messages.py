"""What a driver and a rank tell each other while the rank starts, and what a driver has its ranks do (`Group.command`).

A command is a list of calls, done in order: copies of cached tokens wait for the next step, and cost no round of their
own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmforge.base.errors import ForgeError
from llmforge.runtime.backends.interface import StepInputs
from llmforge.runtime.backends.session import SessionConfig
from llmforge.runtime.backends.signature import Signature

LEFT = 75  # exit code of a rank that ends because another one did, or the driver


@dataclass(frozen=True)
class Begin:
    """What a rank is, and what it loads."""

    rank: int
    ranks: int
    driver: int  # the id of its process: when that ends, so does the rank
    file: Path
    session: SessionConfig
    own_kernels: bool
    group: int  # descriptor
    room: int
    logits: int  # descriptor
    spins: int
    limit_s: float


@dataclass(frozen=True)
class Ready:
    """A rank has loaded its engine."""

    signature: Signature


@dataclass(frozen=True)
class Failed:
    """A rank ends with an error."""

    error: ForgeError


@dataclass(frozen=True)
class Place:
    """Rows of a cache that every rank has, by its number."""

    cache: int
    start: int
    stop: int


@dataclass(frozen=True)
class Allocate:
    """Reserve cache number `cache`."""

    cache: int
    batch: int
    capacity: int


@dataclass(frozen=True)
class Drop:
    """Nobody has the cache any more."""

    cache: int


@dataclass(frozen=True)
class Copy:
    """Copy tokens from row to row (`Rows.copy`)."""

    to: Place
    row: int
    start: int
    source: Place
    source_row: int
    source_start: int
    tokens: int


@dataclass(frozen=True)
class Step:
    """Run the graph once; the first rank writes the logits, of this shape, where the driver reads them."""

    inputs: StepInputs
    rows: Place
    shape: tuple[int, int, int]


Call = Allocate | Drop | Copy | Step
