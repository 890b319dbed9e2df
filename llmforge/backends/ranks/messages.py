"""Messages of a driver and a rank while the rank starts, and what a driver has them do (`RankGroup.command`).

A rank that ends with an error sends it (`ForgeError`). On GPUs the first one sends what names the communicator, bytes,
which the driver hands to the others.

A command is a list of calls, done in order: copies of cached tokens wait for the next step, and cost no round of their
own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmforge.runtime.config import RuntimeConfig, SessionConfig
from llmforge.runtime.interface import StepInputs
from llmforge.runtime.signature import Signature

LEFT = 75  # exit code of a rank that ends because another one did, or the driver


@dataclass(frozen=True)
class OnGpu:
    """Where a rank runs that has a GPU of its own, and what its engine is."""

    config: RuntimeConfig
    device: int  # among those that the process sees


@dataclass(frozen=True)
class StartRank:
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
    reply: int  # descriptor
    spins: int
    limit_s: float
    gpu: OnGpu | None = None  # None: it computes on the CPU


@dataclass(frozen=True)
class RankReady:
    """A rank has loaded its engine, which says of itself what a scheduler asks (`interface.Decoder`)."""

    signature: Signature
    rows_alone: bool
    longest_step: int | None
    buckets: tuple[int, ...]
    decodes_ahead: bool


@dataclass(frozen=True)
class Allocated:
    """What a rank says of its device, once a cache is allocated and steps are captured over it."""

    notes: tuple[str, ...]
    spare_bytes: int | None


@dataclass(frozen=True)
class CacheRows:
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
class CopyTokens:
    """Copy tokens from row to row (`Rows.copy`)."""

    to: CacheRows
    row: int
    start: int
    source: CacheRows
    source_row: int
    source_start: int
    tokens: int


@dataclass(frozen=True)
class RunStep:
    """Run the graph once; the first rank writes the logits, of this shape, where the driver reads them."""

    inputs: StepInputs
    rows: CacheRows
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class RunDecode:
    """Run one token a row by `Backend.begin_decode`; the first rank replies with their top logits."""

    inputs: StepInputs
    rows: CacheRows


@dataclass(frozen=True)
class Ask:
    """Have the first rank reply what a method of its last decode step (`DecodeRun`) returns."""

    method: str
    arguments: tuple[Any, ...]


Call = Allocate | Drop | CopyTokens | RunStep | RunDecode | Ask
