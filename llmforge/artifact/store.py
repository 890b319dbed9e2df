"""The artifact: a folder `out/<name>/<version>/` with what a server loads, its manifest, and evidence about it.

A build writes into a hidden folder, `out/<name>/.building-<pid>-<random>`. `publish` writes `manifest.json` and the
record of evidence last, makes the files read-only and renames the folder to its version, so that whatever has a visible
name is complete: killing a build at any moment leaves hidden folders only, which the next build of that name removes.
What is published stays: the same content built again brings one more record of evidence and replaces none.

Two locks (flock, which the kernel drops with the process): `out/<name>/.lock` while names change, and
`.building-<pid>-<random>.lock` as long as that build lives.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llmforge.artifact import admission, sealed
from llmforge.artifact import manifest as manifests
from llmforge.artifact.sealed import (
    EVIDENCE,
    MANIFEST,
    SIGNATURE,
    EvidenceRecord,
    FileRecord,
    Manifest,
    Verdict,
    is_name,
    walk,
)
from llmforge.base import folders, resources, signals
from llmforge.base.errors import EnvironmentLacks, ForgeError, InputError, UsageError
from llmforge.base.hashed_files import sha256

BUILDING = ".building-"
REPLACED = ".replaced-"
LOCK = ".lock"
_AT_ONCE = 8  # files that are put on disk

_WHERE = "`llmforge ls` lists the artifacts; give NAME, NAME/VERSION, NAME:TAG or the path of one"


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

    @cached_property
    def evidence(self) -> tuple[EvidenceRecord, ...]:
        """What is known of it, oldest first.

        Raises:
            InputError: there is nothing, or a record is damaged.
        """
        with _readable(self.path):
            return sealed.open_evidence(self.path, self.manifest.content_digest)

    @property
    def verdict(self) -> Verdict:
        """How its gates ended, by the newest record that decided; `evidence` says what it raises."""
        return sealed.effective(self.evidence)

    @property
    def listed(self) -> dict[str, FileRecord]:
        """Every file that it has but for the manifest, the records and the signature."""
        files = dict(self.manifest.files)
        for record in self.evidence:
            files |= record.placed_files
        return files

    @classmethod
    def open(cls, path: Path) -> Artifact:
        """Read the manifest of the artifact in folder `path`; `verify` looks at the files.

        Raises:
            InputError: the folder is no artifact, is unfinished, of another schema, or called by another version.
        """
        with _readable(path):
            return cls._open(path)

    @classmethod
    def _open(cls, path: Path) -> Artifact:
        folder = folders.followed(path)
        if not folder.is_dir():
            what = "is a file, an artifact is a folder" if path.exists() else "no such artifact or folder"
            if path.is_symlink() and not path.exists():
                what = "is a link that leads nowhere, or to itself"
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
        manifest = sealed.open_manifest(folder)
        if sealed.is_version(folder.name) and folder.name != manifest.version:
            raise InputError(
                f"{path}: called by another version than its content is: {manifest.name} {manifest.version}",
                hint="the manifest was changed, or the folder renamed; fetch the artifact or build it again",
            )
        return cls(folder, manifest)

    def verify(self) -> None:
        """Hash every file again and compare with manifest and evidence; llmforge.gates.verdict judges the figures.

        Raises:
            InputError: files are missing, changed or added; the message names them.
        """
        listed, records = self.listed, {record.path for record in self.evidence}
        with _readable(self.path):
            present = set(walk(self.path)) - {MANIFEST, SIGNATURE} - records
            changed = {path for path in listed.keys() & present if sha256(self.path / path) != listed[path].sha256}
        problems = {
            "missing": listed.keys() - present,
            "changed": changed,
            "not in the manifest or in evidence": present - listed.keys(),
        }
        admission.refuse_changed(self.path, problems)


def open_version(folder: Path) -> Artifact:
    """Open the artifact in `out/<name>/<version>`.

    Raises:
        InputError: it is none, or has another name or version than its folders say.
    """
    opened = Artifact.open(folder)
    manifest = opened.manifest
    if (folder.parent.name, folder.name) != (manifest.name, manifest.version):
        raise InputError(
            f"{folder}: holds {manifest.name}/{manifest.version}",
            hint=f"move it to {folder.parent.parent / manifest.name / manifest.version}, or fetch it again",
        )
    return opened


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
    manifest: Manifest,
    record: Mapping[str, Any],
    require_unchanged: Callable[[Path], None] = lambda _: None,
    hash_of: Callable[[Path], str] = sha256,
) -> Artifact:
    """Publish the folder that `staging` made, with its `manifest` and the record of its build, by one rename.

    `record` is a report as JSON data; the rest of the folder that is no content are its files. If the same content is
    there already, its evidence stays, with one more record; the old folder steps aside under a hidden name first. All
    bytes are on disk before the rename. `require_unchanged` raises if files in the folder that it is given are not
    those that were sealed; it is asked before the rename and behind it, and then nothing is published. `hash_of` gives
    the SHA-256 of a file of the evidence, and raises likewise.

    Raises:
        UsageError: something else is there under that version, or its evidence is damaged; the record is too large.
    """
    files = manifests.records(folder, content=False, hash_of=hash_of)
    final = folder.parent / manifest.version
    with names_locked(folder.parent):
        existing = _existing(final, manifest)
        head = {
            "schema": sealed.RECORD_SCHEMA,
            "content": manifest.content_digest,
            "previous": existing.evidence[-1].digest if existing is not None else None,
            "created": record["created"],
            "verdict": record["verdict"],
            "files": {path: dataclasses.asdict(file) for path, file in files.items()},
        }
        raw = (json.dumps({**head, **{k: v for k, v in record.items() if k not in head}}, indent=1) + "\n").encode()
        if len(raw) > sealed.LARGEST_RECORD:
            raise UsageError(
                f"{final}: the record of the build has {len(raw):,} bytes; at most {sealed.LARGEST_RECORD:,} are read",
                hint="measure quality on fewer documents, or latency on fewer tokens",
            )
        made = sealed.parse_record(raw, str(final))
        for path in files if made.home else ():
            target = folder / made.home / path
            target.parent.mkdir(parents=True, exist_ok=True)
            (folder / path).rename(target)
        for path in (sealed.REPORT, sealed.PROVENANCE) if made.home else ():
            if (folder / path).is_dir():
                shutil.rmtree(folder / path)  # nothing but empty folders
        (folder / EVIDENCE).mkdir(exist_ok=True)
        (folder / made.path).write_bytes(raw)
        (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        if existing is not None:
            _carry_over(existing, folder)
        _place(folder, manifest, require_unchanged)
    return Artifact(final, manifest)


def adopt(folder: Path, manifest: Manifest) -> Artifact:
    """Publish the folder that `staging` made and that holds a whole artifact from elsewhere, with its `manifest`.

    The same content may be there already; then its files are replaced, which heals what was changed, and of evidence
    there is what is in either, as long as it is one line.

    Raises:
        InputError: what is in the folder is not what its manifest and evidence say.
        UsageError: the version is there with other evidence, or another signature.
    """
    Artifact(folder, manifest).verify()
    final = folder.parent / manifest.version
    with names_locked(folder.parent):
        existing = _existing(final, manifest)
        if existing is not None:
            _carry_over(existing, folder)
            try:
                _ = Artifact(folder, manifest).evidence
            except InputError as error:
                raise UsageError(
                    f"{final} already exists with the same content and other evidence",
                    hint=f"to replace it: llmforge rm {manifest.name}/{manifest.version}, and again",
                ) from error
        _place(folder, manifest)
    return Artifact(final, manifest)


def publish_again(artifact: Artifact, out: Path) -> Artifact:
    """Publish the content of an artifact with its newest record in the folder `out`, behind the evidence there.

    It is as if its build had published there: the record is the same but for the one that it follows.

    Raises:
        InputError: files are missing or were changed.
        UsageError, EnvironmentLacks: as `publish` and `staging`.
    """
    artifact.verify()
    record = artifact.evidence[-1]
    written = json.loads(sealed.read_file(artifact.path / record.path, sealed.LARGEST_RECORD))
    sources = {path: path for path in artifact.manifest.files} | {path: record.home + path for path in record.files}
    with staging(out, artifact.manifest.name) as folder:
        for path, source in sources.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(artifact.path / source, folder / path)
        return publish(folder, artifact.manifest, written)


def _existing(final: Path, manifest: Manifest) -> Artifact | None:
    """Open what is there under the version that `manifest` is going to have; None: nothing.

    Raises:
        UsageError: something else, or its evidence is damaged.
    """
    if not final.exists() and not final.is_symlink():
        return None
    try:
        found = Artifact.open(final)
        evidence = found.evidence
        for record in evidence:
            for path, file in record.placed_files.items():
                if not (final / path).exists() or sha256(final / path) != file.sha256:
                    raise InputError(f"{final / path}: missing or changed")
    except InputError as error:
        raise UsageError(
            f"{final} already exists and is not a usable artifact: {error.message}",
            hint=f"remove it (llmforge rm {manifest.name}/{manifest.version}) or move it away, and try again",
        ) from error
    if found.manifest != manifest:  # two contents of one version: 48 bits of SHA-256
        raise UsageError(f"{final} already exists with the content {found.manifest.content_digest}")
    return found


def _carry_over(existing: Artifact, folder: Path) -> None:
    """Copy the evidence and the signature of an artifact into the `folder` that is going to replace it.

    Raises:
        UsageError: it is signed, and so is what replaces it, otherwise.
    """
    signature = existing.path / SIGNATURE
    if signature.is_file() and (folder / SIGNATURE).exists():
        if len({sealed.read_file(file, sealed.LARGEST_SIGNATURE) for file in (folder / SIGNATURE, signature)}) > 1:
            raise UsageError(
                f"{existing.path} already exists with the same content and another signature",
                hint=f"to replace it: llmforge rm {existing.manifest.name}/{existing.manifest.version}, and again",
            )
    elif signature.is_file():
        shutil.copyfile(signature, folder / SIGNATURE)
    for record in existing.evidence:
        for path in (record.path, *record.placed_files):
            if not (folder / path).exists():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(existing.path / path, folder / path)


def _place(folder: Path, manifest: Manifest, require_unchanged: Callable[[Path], None] = lambda _: None) -> None:
    """Give a finished folder the name of its version; call it with the names of its parent locked."""
    final = folder.parent / manifest.version
    for path in walk(folder):
        if stat.S_IMODE((folder / path).lstat().st_mode) != sealed.MODE:  # else its change time would move
            (folder / path).chmod(sealed.MODE)
    _sync(folder)
    require_unchanged(folder)
    aside = folder.parent / f"{REPLACED}{secrets.token_hex(4)}-{manifest.version}"
    if final.exists():
        final.rename(aside)
    signals.decided()
    folder.rename(final)
    _sync_folder(folder.parent)
    try:
        require_unchanged(final)
    except ForgeError:
        final.rename(folder)  # which who made it removes
        if aside.exists():
            aside.rename(final)
        raise
    if aside.exists():
        take_away(aside)()


def _sync(folder: Path) -> None:
    """Put every file and folder below `folder` on disk, so that a power cut cannot leave a finished name half full."""
    walked = [(Path(base), names) for base, _, names in os.walk(folder)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:  # the file system puts together what is asked for at once
        list(pool.map(_sync_file, [base / name for base, names in walked for name in names]))
        list(pool.map(_sync_folder, [base for base, _ in walked]))


def _sync_file(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


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
