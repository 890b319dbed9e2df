"""Artifacts whose verdict was recomputed, which whatever lists, loads, compares or ships one opens.

`llmforge.gates.verdict` recomputes it. That it held is remembered in the user's cache folder by the digest of the
newest record, which names the content and every record before it, and by the state of this package's files: then it
costs their status. Nothing is remembered of what did not hold.
"""

from __future__ import annotations

import functools
from pathlib import Path

from llmforge.artifact import Artifact
from llmforge.artifact.versions import Version
from llmforge.base.errors import InputError
from llmforge.base.remembered import RememberedTexts
from llmforge.cache import installed

FILE = "confirmed-verdicts.json"
_MOST = 1000  # records that are remembered, the last ones; 0.1 MB


def open_artifact(path: Path) -> Artifact:
    """Open the artifact in folder `path`, and recompute its verdict.

    Raises:
        InputError: as `Artifact.open` and `confirm`.
    """
    opened = Artifact.open(path)
    confirm(opened)
    return opened


def confirm(opened: Artifact, source: str | None = None) -> None:
    """Recompute the verdict of an artifact, which messages call `source`, unless this code did so before.

    Raises:
        ForgedVerdict: a record says something else than what was measured.
        InputError: a record is damaged, or no report of this version.
    """
    record, memory = opened.evidence[-1].digest, RememberedTexts(FILE, _MOST)
    if memory.read().get(record) == _code():
        return
    from llmforge.gates import verdict  # takes longer to import than what remembers

    verdict.recompute(opened, source)
    memory.add({record: _code()})  # where it cannot be written, the next command recomputes


def damage(version: Version) -> InputError | None:
    """Say why a version that is listed must not be used: it cannot be read, or `confirm` refuses it; None: it may."""
    if version.artifact is None:
        return InputError(str(version.damage))
    try:
        confirm(version.artifact)
    except InputError as error:
        return error
    return None


@functools.cache  # the code that this process runs is the one that it began with
def _code() -> str:
    return installed.identity("llmforge")
