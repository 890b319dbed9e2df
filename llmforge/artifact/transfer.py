"""Transfer of artifacts, as export, import, push and pull share it: what may leave one, and what may come in.

Manifest, records of evidence and signature go first, in this order: they say what all other files are. An artifact from
elsewhere is written into the hidden folder of `store.staging`. It is published when all of it is there and matches.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from llmforge.artifact import sealed
from llmforge.artifact.sealed import (
    EVIDENCE,
    LARGEST_MANIFEST,
    LARGEST_RECORD,
    LARGEST_SIGNATURE,
    MANIFEST,
    SIGNATURE,
    FileRecord,
    Manifest,
)
from llmforge.artifact.store import Artifact, adopt
from llmforge.base.errors import EnvironmentLacks, InputError

LARGEST_EVIDENCE = 16 * LARGEST_RECORD  # bytes; of all records together
MOST_FILES = 100_000
CHUNK = 1 << 20  # bytes

Check = Callable[[Artifact, str], None]  # raises where an artifact must not be published; the text is its source


@dataclass(frozen=True)
class Inventory:
    """What an artifact must be by what goes first."""

    manifest: Manifest
    unlisted: Mapping[str, bytes]  # what goes first: paths and contents, in their order
    listed: Mapping[str, FileRecord]  # all other files, sorted by path


def unlisted(artifact: Artifact) -> dict[str, int]:
    """Give the sizes, in bytes, of what goes first of an artifact.

    Raises:
        InputError: there are files that belong to nothing.
    """
    present = set(sealed.walk(artifact.path))
    first = [MANIFEST, *(record.path for record in artifact.evidence), SIGNATURE]
    if stray := present - {*first, *artifact.listed}:
        raise InputError(
            f"{artifact.path}: not in the manifest or in evidence: {min(stray)}", hint="artifacts must not be edited"
        )
    return {path: (artifact.path / path).lstat().st_size for path in first if path in present}


def largest(path: str) -> int:
    """Give the most bytes that a file which goes first may have; 0: it is none of them."""
    if is_record(path):
        return LARGEST_RECORD
    return {MANIFEST: LARGEST_MANIFEST, SIGNATURE: LARGEST_SIGNATURE}.get(path, 0)


def is_record(path: str) -> bool:
    """Say if a path is that of a record of evidence."""
    return re.fullmatch(rf"{EVIDENCE}/[0-9a-f]{{64}}\.json", path) is not None


def take_stock(unlisted: Mapping[str, bytes], source: str, refuse: Callable[[str], NoReturn]) -> Inventory:
    """Read what goes first, as it came from elsewhere, and say what must follow.

    Raises:
        InputError: manifest or evidence are damaged, or no folder can hold what they list.
    """
    manifest = sealed.parse_manifest(unlisted[MANIFEST], f"{source}: {MANIFEST}")
    found = [sealed.parse_record(unlisted[path], f"{source}: {path}") for path in unlisted if is_record(path)]
    records = sealed.in_line(found, manifest.content_digest, source)
    if [MANIFEST, *(record.path for record in records)] != [path for path in unlisted if path != SIGNATURE]:
        refuse("a record of evidence is not called by its SHA-256, or stands where another must")
    listed = dict(manifest.files)
    for record in records:
        listed |= record.placed_files
    _check_paths(listed, unlisted, refuse)
    return Inventory(manifest, unlisted, dict(sorted(listed.items())))


def changed(artifact: Artifact, path: str) -> InputError:
    """Say that a file is not what the manifest says."""
    return InputError(
        f"{artifact.path}: the artifact was changed after it was published: {path}",
        hint="fetch or build it again; artifacts must not be edited",
    )


@contextmanager
def reading(artifact: Artifact, path: str) -> Iterator[IO[bytes]]:
    """Open a regular file of an artifact.

    Raises:
        InputError: it cannot be read, or is a link.
    """
    file = artifact.path / path
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}", hint="fetch or build it again") from error
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        yield stream


def _check_paths(
    listed: Mapping[str, FileRecord], unlisted: Mapping[str, bytes], refuse: Callable[[str], NoReturn]
) -> None:
    """Refuse what no folder can hold: too many files, names that the file system does not take, files in files."""
    if len(listed) > MOST_FILES:
        refuse(f"{len(listed):,} files; at most {MOST_FILES:,} are allowed")
    taken = {*listed, *unlisted, SIGNATURE}
    for path in listed:
        if not path.isprintable() or any(len(part.encode("utf-8", "replace")) > 255 for part in path.split("/")):
            refuse(f"the path {path[:80]!r} is too long, or not text")
        parents = path.split("/")[:-1]
        if any("/".join(parents[: depth + 1]) in taken for depth in range(len(parents))):
            refuse(f"{path!r} lies in a file")


def require_room(folder: Path, size_bytes: int, source: str) -> None:
    """Refuse what the disk of `folder` has no room for."""
    if (free := shutil.disk_usage(folder).free) < size_bytes:
        raise EnvironmentLacks(
            f"{source}: needs {size_bytes:,} bytes in {folder.parent.parent}, where {free:,} are free",
            hint="use another --out",
        )


@contextmanager
def writing(file: Path, source: str) -> Iterator[IO[bytes]]:
    """Open a new file in the hidden folder, where nobody else writes."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = file.open("xb")
    except (FileExistsError, NotADirectoryError) as error:  # names that this file system takes for the same
        raise InputError(f"{source}: {file.name}: two files of one name: {error.strerror}") from error
    with stream:
        yield stream


def write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write what goes first."""
    (folder / EVIDENCE).mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def publish(folder: Path, manifest: Manifest, source: str, check: Check | None) -> Artifact:
    """Publish what is whole in the hidden folder, unless `check` refuses it."""
    if check is not None:
        check(Artifact(folder, manifest), source)
    return adopt(folder, manifest)


def sha256(content: bytes) -> str:
    """Hash bytes."""
    return hashlib.sha256(content).hexdigest()
