"""Measured figures of this machine: a target file in the user's cache folder, which plans read."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from llmforge import __version__, targets
from llmforge.base import remembered
from llmforge.base.errors import UsageError
from llmforge.doctor import machine
from llmforge.measure.machine import Machine
from llmforge.targets import Target

_FOLDER = "machines"


def file(here: Machine) -> Path:
    """Name the file: another one for another CPU, other memory, or another llmforge, whose kernels may be faster."""
    memory_gib = round(here.memory_bytes / 2**30)  # what a kernel takes of it at boot differs
    facts = "\n".join(map(str, (__version__, here.cpu, here.cores, here.usable_cpus, *here.isa, memory_gib)))
    return remembered.home() / _FOLDER / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.yaml"


def find(here: Machine) -> Target | None:
    """Read what was kept; None where nothing was, or what is there is no target (any more)."""
    path = file(here)
    try:
        return targets.read(path) if path.is_file() else None
    except UsageError:
        return None


def of_target(target: Target, here: Machine) -> Target | None:
    """Give a CPU target that is this machine's own the figures that were kept; None: it is another's, or none were."""
    if not is_here(target):
        return None
    found = find(here)
    return None if found is None else found.model_copy(update={"name": target.name})


def is_here(target: Target) -> bool:
    """Say if a CPU target is this machine's own."""
    return target.kind == "cpu" and target.isa is not None and target.isa is targets.detect()


def keep(target: Target, here: Machine) -> None:
    """Keep what was measured, if the folder can be written; what other processes were in the way of replaces no better.

    The latter is marked by figures that are not verified.
    """
    before = find(here)
    if before is not None and _undisturbed(before) and not _undisturbed(target):
        return
    path = file(here)
    written = path.with_name(f".{path.stem}-{os.getpid()}.yaml")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        machine.write(target, written)
        written.replace(path)
    except (OSError, UsageError):  # the next plan measures again
        with suppress(OSError):
            written.unlink()


def _undisturbed(target: Target) -> bool:
    return target.bandwidth_gbs is not None and target.bandwidth_gbs.verified
