"""What an artifact tells of its origin, beside its content: the lock of its inputs."""

from __future__ import annotations

from pathlib import Path

from llmforge import artifact
from llmforge.build.lock import FILE, Lock
from llmforge.report.model import Report


def write(staging: Path, report: Report, lock: Lock) -> None:
    """Write the folder `provenance` into an artifact that is complete but for it."""
    folder = staging / artifact.PROVENANCE
    folder.mkdir()
    (folder / FILE).write_text(lock.model_dump_json(indent=1) + "\n", encoding="utf-8")
