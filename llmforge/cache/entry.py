"""One entry of the cache on disk: a folder, with a record of its key and of the bytes of every other file."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmforge.base import hashed_files

FORMAT = 1
RECORD = "record.json"
LOCAL_KINDS = frozenset({"calibration-gradients", "calibration-states", "imports"})  # that no other machine is given


class RemoteRefused(Exception):
    """Why something of a remote cache is not used, in words."""


@dataclass(frozen=True)
class Key:
    """What an entry depends on: its `kind`, and digests and words by name."""

    kind: str
    parts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, hexadecimal."""
        plain = json.dumps([FORMAT, self.kind, dict(self.parts)], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(plain.encode()).hexdigest()


@dataclass(frozen=True)
class CacheEntry:
    """An entry whose bytes were verified, or just written; it stays while the cache that gave it is open."""

    path: Path

    def read(self, name: str) -> bytes:
        """Return the content of file `name`."""
        return (self.path / name).read_bytes()

    def json(self, name: str) -> Any:
        """Return the JSON document in file `name`."""
        return json.loads(self.read(name))


@dataclass(frozen=True)
class Summary:
    """What the record of an entry tells, unverified."""

    digest: str
    kind: str
    parts: Mapping[str, str]
    size_bytes: int
    created: float  # seconds since 1970
    used: float
    in_use: bool


def record_of(folder: Path, key: Key) -> str:
    """Give the record of an entry whose files are in `folder`; its own digest is of the rest of it."""
    files = {
        str(path.relative_to(folder)): {"sha256": hashed_files.sha256(path), "size_bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != RECORD
    }
    facts = {"format": FORMAT, **asdict(key), "created": time.time(), "files": files}
    return json.dumps({**facts, "digest": _digest(facts)}, indent=1, ensure_ascii=False)


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read_record(path: Path) -> dict[str, Any] | None:
    """Read the record of the entry at `path`; None where it is damaged."""
    try:
        facts = json.loads((path / RECORD).read_bytes())
        digest = facts.pop("digest")
    except (ValueError, KeyError, AttributeError, TypeError):  # of JSON, of its encoding, no digest, no object
        return None
    return facts if isinstance(facts, dict) and digest == _digest(facts) else None


def problem_of(path: Path, key: Key) -> str | None:
    """Say what of the entry at `path` is not as its record has it; None where all is."""
    facts = read_record(path)
    if facts is None or (facts["kind"], facts["parts"]) != (key.kind, dict(key.parts)):
        return f"{RECORD} has other bytes than were written"
    for name, recorded in facts["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != recorded["size_bytes"] or hashed_files.sha256(file) != recorded["sha256"]:
            return f"{name} has other bytes than were written"
    return None


def summary_of(path: Path) -> Summary | None:
    """Describe the entry at `path`; None where it is gone."""
    try:
        facts, used = read_record(path), (path / RECORD).stat().st_mtime
        size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        descriptor = os.open(path / RECORD, os.O_RDWR)
    except FileNotFoundError:
        return None if not path.exists() else Summary(path.name, "damaged", {}, 0, 0.0, 0.0, in_use=False)
    in_use = False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        in_use = True
    finally:
        os.close(descriptor)
    if facts is None:
        return Summary(path.name, "damaged", {}, size_bytes, 0.0, used, in_use)
    return Summary(path.name, facts["kind"], facts["parts"], size_bytes, facts["created"], used, in_use)
