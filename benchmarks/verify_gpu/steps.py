"""What a check is: its name, its limit, and what it gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.verify_gpu.scale import Scale

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a step gets."""

    scale: Scale
    work: Path
    target: str | None


@dataclasses.dataclass(frozen=True)
class Step:
    """One step: `limit_s` bounds it; `after` must have gone well before it."""

    name: str
    limit_s: float
    work: Callable[[Run], Result]
    after: tuple[str, ...] = ()
    read_log: Callable[[Result, str], Result] | None = None  # adds to the result what the log says


def named(work: Callable[..., Result], *names: str) -> Callable[[Run], Result]:
    """Make the work of a step out of a function that also takes `names`."""
    return lambda run: work(run, *names)
