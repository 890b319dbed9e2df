"""The artifact: a folder `out/<name>/<version>/` with what a server loads, and a manifest that vouches for it.

A build writes into a hidden folder, `out/<name>/.building-<pid>-<random>`. `publish` writes `manifest.json` last,
makes the files read-only and renames the folder to its version, so that whatever has a visible name is complete:
killing a build at any moment leaves hidden folders only, which the next build of that name removes.

Two locks (flock, which the kernel drops with the process): `out/<name>/.lock` while names change, and
`.building-<pid>-<random>.lock` as long as that build lives.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmforge.artifact import manifest as manifests
from llmforge.artifact.manifest import MANIFEST, NAME_PATTERN, SIGNATURE, VERSION_DIGITS, Manifest, Verdict
from llmforge.base import resources, signals
from llmforge.base.errors import EnvironmentLacks, InputError, UsageError

BUILDING = ".building-"
REPLACED = ".replaced-"
LOCK = ".lock"
LISTED = 5  # files that a message names before it counts the rest

_NAME = re.compile(NAME_PATTERN)


_WHERE = "`llmforge build` prints the path of the artifact at its end: artifacts/NAME/VERSION"


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say of what may not be read in the artifact at `path` that it may not."""
    try:
        yield
    except PermissionError as error:
        raise InputError(
            f"{error.filename or path}: cannot be read: {error.strerror}",
            hint=f"check the permissions of {path}",
        ) from error


@dataclass(frozen=True)
class Artifact:
    """A published artifact."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path) -> Artifact:
        """Read the manifest of the artifact in folder `path`; `verify` looks at the files.

        Raises:
            InputError: the folder is no artifact, is unfinished, or is of another format version.
        """
        with _readable(path):
            return cls._open(path)

    @classmethod
    def _open(cls, path: Path) -> Artifact:
        folder = path.resolve()
        if not folder.is_dir():
            what = "is a file, an artifact is a folder" if path.exists() else "no such folder"
            raise InputError(f"{path}: {what}", hint=_WHERE)
        if folder.name.startswith((BUILDING, REPLACED)):
            raise InputError(
                f"{path}: not an artifact, but the folder of an unfinished build",
                hint="build again; leftovers of killed builds are removed",
            )
        if not (folder / MANIFEST).is_file():
            versions = sorted(entry.parent.name for entry in folder.glob(f"[!.]*/{MANIFEST}"))
            raise InputError(
                f"{path}: not an artifact: it has no {MANIFEST}",
                hint=f"use one of its versions: {', '.join(versions)}" if versions else _WHERE,
            )
        return cls(folder, manifests.read(folder / MANIFEST))

    def verify(self) -> None:
        """Hash every file again and compare with the manifest.

        Raises:
            InputError: files are missing, changed or added; the message names them.
        """
        recorded = self.manifest.files
        with _readable(self.path):
            present = {
                path: path in recorded and manifests.sha256(self.path / path)
                for path in manifests.walk(self.path)
                if path not in (MANIFEST, SIGNATURE)
            }
        problems = {
            "missing": [path for path in recorded if path not in present],
            "changed": [path for path, record in recorded.items() if present.get(path, record.sha256) != record.sha256],
            "not in the manifest": [path for path in present if path not in recorded],
        }
        found = [f"{what}: {_listed(sorted(paths))}" for what, paths in problems.items() if paths]
        if not found and manifests.content_digest_of(recorded, self.manifest.recipe) != self.manifest.content_digest:
            found = [f"{MANIFEST} contradicts itself: content_digest is not that of its files and recipe"]
        if found:
            raise InputError(
                f"{self.path}: the artifact was changed after it was published: {'; '.join(found)}",
                hint="fetch or build it again; artifacts must not be edited",
            )


def is_name(name: str) -> bool:
    """Say if `name` can be that of an artifact, a version or a tag."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str, what: str = "name") -> str:
    """Return a name, version or tag of an artifact that can be the name of a folder or file.

    Raises:
        UsageError: it cannot.
    """
    if not is_name(name):
        raise UsageError(
            f"artifact {what} {name!r}: allowed are a-z, 0-9, '.', '_' and '-', at most 128, a letter or digit first"
        )
    return name


@contextmanager
def staging(out: Path, name: str) -> Iterator[Path]:
    """Make the hidden folder that a build of `name` writes into; it is removed unless it gets published.

    What killed builds of that name left behind is removed first.

    Raises:
        UsageError: the name is not allowed.
        EnvironmentLacks: `out` cannot be written, or the disk filled up in the block.
    """
    parent = out.absolute() / check_name(name)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with names_locked(parent):
            remove_stale(parent)
            folder, lock = _reserve(parent)
            folder.mkdir()
    except OSError as error:
        raise EnvironmentLacks(
            f"{parent}: cannot be written: {error.strerror}", hint="choose another folder with --out"
        ) from error
    try:
        yield folder
    except OSError as error:
        if not resources.is_full(error):
            raise
        raise EnvironmentLacks(f"{parent}: the disk is full", hint="free some space, or use --out") from error
    finally:
        if folder.exists():
            shutil.rmtree(folder)
        _release(folder, lock)


def publish(
    folder: Path,
    *,
    recipe: Mapping[str, Any],
    checkpoint: str,
    target: str,
    verdict: Verdict,
    requires: Mapping[str, str],
    version: str | None = None,
) -> Artifact:
    """Publish the folder that `staging` made: manifest, read-only files, one rename to `<version>`.

    An artifact of the same version and content is replaced: the old one steps aside under a hidden name first.
    All bytes are on disk before the rename.

    `recipe` is the resolved recipe as JSON data, `checkpoint` the digest of the checkpoint, `requires` the packages
    and versions that the engine must be run with.

    Raises:
        UsageError: the version is not allowed, or something else has it already.
    """
    files = manifests.records(folder)
    digest = manifests.content_digest_of(files, recipe)
    version = check_name(version, "version") if version is not None else manifests.version_of(digest)
    manifest = Manifest(
        name=folder.parent.name,
        version=version,
        content_digest=digest,
        verdict=verdict,
        created=datetime.now(UTC).replace(microsecond=0),
        checkpoint=checkpoint,
        target=target,
        recipe=dict(recipe),
        tools=manifests.tool_versions(),
        requires=dict(requires),
        files=files,
    )
    final = folder.parent / version
    with names_locked(folder.parent):
        _refuse_other(final, digest)  # before anything is written: the folder stays unfinished
        (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        _place(folder, manifest)
    return Artifact(final, manifest)


def adopt(folder: Path, manifest: Manifest) -> Artifact:
    """Publish the folder that `staging` made and that holds a whole artifact from elsewhere, with its `manifest`.

    The same artifact may be there already; then it is replaced, which heals files that were changed.

    Raises:
        InputError: what is in the folder is not what the manifest says.
        UsageError: the version is there with other content, or with other evidence.
    """
    Artifact(folder, manifest).verify()
    final = folder.parent / check_name(manifest.version, "version")
    with names_locked(folder.parent):
        _refuse_other(final, manifest.content_digest)
        if any(_differs(final / name, folder / name) for name in (MANIFEST, SIGNATURE)):
            raise UsageError(
                f"{final} already exists with the same content and another report, date or signature",
                hint=f"to replace it: llmforge rm {manifest.name}/{manifest.version}, and again",
            )
        _place(folder, manifest)
    return Artifact(final, manifest)


def _differs(existing: Path, new: Path) -> bool:
    """Say if a file that is there would be lost."""
    return existing.exists() and not (new.exists() and existing.read_bytes() == new.read_bytes())


def _place(folder: Path, manifest: Manifest) -> None:
    """Give a finished folder the name of its version; call it with the names of its parent locked."""
    final = folder.parent / manifest.version
    for path in manifests.walk(folder):
        (folder / path).chmod(0o444)
    _sync(folder)
    aside = folder.parent / f"{REPLACED}{secrets.token_hex(4)}-{manifest.version}"
    if final.exists():
        final.rename(aside)
    signals.decided()
    folder.rename(final)
    _sync_folder(folder.parent)
    if aside.exists():
        take_away(aside)()


def _refuse_other(final: Path, digest: str) -> None:
    """Let a version be replaced by its own content only."""
    if not final.exists() and not final.is_symlink():
        return
    try:
        existing = Artifact.open(final).manifest.content_digest
    except InputError as error:
        raise UsageError(
            f"{final} already exists and is not a usable artifact: {error.message}",
            hint="move it away, or give a version",
        ) from error
    if existing != digest:
        raise UsageError(
            f"{final} already exists with different content ({existing[:VERSION_DIGITS]}; this build: "
            f"{digest[:VERSION_DIGITS]})",
            hint="published versions never change; give another version, or none to name it by its content",
        )


def _listed(paths: list[str]) -> str:
    more = f" and {len(paths) - LISTED} more" if len(paths) > LISTED else ""
    return ", ".join(paths[:LISTED]) + more


def _sync(folder: Path) -> None:
    """Put every file and folder below `folder` on disk, so that a power cut cannot leave a finished name half full."""
    for base, _, names in os.walk(folder):
        for name in names:
            with (Path(base) / name).open("rb") as stream:
                os.fsync(stream.fileno())
        _sync_folder(Path(base))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def names_locked(parent: Path) -> Iterator[None]:
    """Be the only process that changes names or tags in `parent`; waits for its turn."""
    with (parent / LOCK).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _reserve(parent: Path) -> tuple[Path, int]:
    """Choose a hidden name and lock it for the life of this process; call it with the names of `parent` locked."""
    folder = parent / f"{BUILDING}{os.getpid()}-{secrets.token_hex(4)}"
    descriptor = os.open(_lock_of(folder), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return folder, descriptor


def _release(folder: Path, lock: int) -> None:
    _lock_of(folder).unlink(missing_ok=True)
    os.close(lock)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + LOCK)


def take_away(folder: Path) -> Callable[[], None]:
    """Hide a folder under an unfinished name, so that a half deleted one is never taken for a whole one.

    Call it with the names of its parent locked. What it returns deletes the folder, and needs no lock; killed before
    its end, the next build of that name does. Files that a process has open or mapped stay readable to it.
    """
    doomed, lock = _reserve(folder.parent)
    folder.rename(doomed)

    def delete() -> None:
        shutil.rmtree(doomed)
        _release(doomed, lock)

    return delete


def remove_stale(parent: Path) -> None:
    """Clean up after killed builds; call it with the names of `parent` locked."""
    for aside in sorted(parent.glob(f"{REPLACED}*")):
        final = parent / aside.name.removeprefix(REPLACED).partition("-")[2]
        if final.exists():
            take_away(aside)()
        else:  # killed between the two renames of an exchange: the old one is still whole
            aside.rename(final)
    for name in sorted({path.name.removesuffix(LOCK) for path in parent.glob(f"{BUILDING}*")}):
        folder = parent / name
        descriptor = os.open(_lock_of(folder), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # that build lives
            os.close(descriptor)
            continue
        if folder.exists():
            shutil.rmtree(folder)
        _release(folder, descriptor)
