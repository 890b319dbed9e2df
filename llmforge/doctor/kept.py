"""What this machine reaches, kept once it was measured: a target file in the user's cache folder, which plans read."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from llmforge import __version__, targets
from llmforge.base import remembered
from llmforge.base.errors import UsageError
from llmforge.doctor import machine
from llmforge.evaluation.machine import Machine
from llmforge.targets import Target

_FOLDER = "machines"


def file(here: Machine) -> Path:
    """Name the file: another one for another CPU, other memory, or another llmforge, whose kernels may be faster."""
    facts = f"{__version__}\n{here.model_dump_json()}"
    return remembered.home() / _FOLDER / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.yaml"


def find(here: Machine) -> Target | None:
    """Read what was kept; None where nothing was, or what is there is no target (any more)."""
    path = file(here)
    try:
        return targets.read(path) if path.is_file() else None
    except UsageError:
        return None


def keep(target: Target, here: Machine) -> None:
    """Keep what was measured, if the machine had nothing else to do meanwhile and the folder can be written."""
    if target.bandwidth_gbs is None or not target.bandwidth_gbs.verified:
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
