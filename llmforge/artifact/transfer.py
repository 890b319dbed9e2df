"""What export, import, push and pull have in common: what may leave an artifact, and what may come in.

An artifact from elsewhere is written into the hidden folder of `store.staging`. It is published when all of it is
there and matches its manifest.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn

from llmforge.artifact import manifest as manifests
from llmforge.artifact.manifest import MANIFEST, SIGNATURE, Manifest
from llmforge.artifact.store import Artifact, adopt, is_name
from llmforge.base.errors import EnvironmentLacks, InputError

LARGEST_MANIFEST = 16 << 20  # bytes; one of 100,000 files has 15 MB
LARGEST_SIGNATURE = 16 << 20  # bytes; it has a line for each file
MOST_FILES = 100_000
CHUNK = 1 << 20  # bytes

Check = Callable[[Artifact, str], None]  # raises where an artifact must not be published; the text is its source


def unlisted(artifact: Artifact) -> dict[str, int]:
    """Give the sizes, in bytes, of the files that go with an artifact and that its manifest does not list.

    Raises:
        InputError: there are others.
    """
    present = set(manifests.walk(artifact.path))
    stray = present - {MANIFEST, SIGNATURE, *artifact.manifest.files}
    if stray:
        raise InputError(f"{artifact.path}: not in the manifest: {min(stray)}", hint="artifacts must not be edited")
    return {name: (artifact.path / name).lstat().st_size for name in (MANIFEST, SIGNATURE) if name in present}


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


def check(manifest: Manifest, refuse: Callable[[str], NoReturn]) -> None:
    """Refuse what no folder can hold: too many files, names that the file system does not take, files in files."""
    for name in (manifest.name, manifest.version):
        if not is_name(name):
            refuse(f"its manifest says {manifest.name!r} {manifest.version!r}")
    if len(manifest.files) > MOST_FILES:
        refuse(f"{len(manifest.files):,} files; at most {MOST_FILES:,} are allowed")
    taken = {*manifest.files, MANIFEST, SIGNATURE}
    for path in manifest.files:
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
    """Write the files that the manifest does not list."""
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
