"""The artifact: a folder `out/<name>/<version>/` with what a server loads, and a manifest that vouches for it.

A build writes into a hidden folder, `out/<name>/.building-<pid>-<random>`. `publish` writes `manifest.json` last,
makes the files read-only and renames the folder to its version, so that whatever has a visible name is complete:
killing a build at any moment leaves hidden folders only, which the next build of that name removes.

Two locks (flock, which the kernel drops with the process): `out/<name>/.lock` while names change, and
`.building-<pid>-<random>.lock` as long as that build lives.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from llmforge import __version__
from llmforge.base.backends import PROVIDERS
from llmforge.base.errors import EnvironmentLacks, InputError, UsageError

MANIFEST = "manifest.json"
REPORT = "report/"  # timings and dates: listed in the manifest, outside the content digest
BUILDING = ".building-"
REPLACED = ".replaced-"
LOCK = ".lock"
VERSION_DIGITS = 12  # of the content digest: 48 bits, no collision to be expected below 10 million versions of a name
CONTENT_FORMAT = b"llmforge content 1\n"
CHUNK_BYTES = 1 << 20
LISTED = 5  # files that a message names before it counts the rest
TOOLS = (
    "jinja2", "ml-dtypes", "numpy", "onnx", "onnx-ir", "onnxscript", *(each.package for each in PROVIDERS.values()),
    "tokenizers", "torch", "transformers",
)  # fmt: skip

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")

Verdict = Literal["pass", "fail", "inconclusive", "none"]  # of all gates together (llmforge.evaluation.gates)


def _inside(path: str) -> str:
    plain = PurePosixPath(path)
    if path in ("", ".") or str(plain) != path or plain.is_absolute() or ".." in plain.parts or path == MANIFEST:
        raise ValueError(f"{path!r} is not a plain path inside the artifact")
    return path


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
InsidePath = Annotated[str, AfterValidator(_inside)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True)


class FileRecord(_Record):
    """One file of an artifact."""

    sha256: Sha256
    size_bytes: int = Field(ge=0)
    in_content: bool  # counted in the content digest: the same inputs give the same bytes


class Manifest(_Record):
    """What an artifact is, what it was made of, and the hash of every file in it."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    name: str
    version: str
    content_digest: Sha256
    verdict: Verdict
    created: AwareDatetime  # UTC
    checkpoint: Sha256  # digest of the checkpoint's content
    target: str
    recipe: dict[str, Any]  # resolved
    tools: dict[str, str]  # that it was built with
    requires: dict[str, str]  # package → version that the engine must be run with
    files: dict[InsidePath, FileRecord]

    def to_json(self) -> str:
        """Write it as JSON, indented, with a final newline."""
        return self.model_dump_json(indent=1) + "\n"


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
        folder = path.resolve()
        if not folder.is_dir():
            raise InputError(f"{path}: {'is a file, an artifact is a folder' if path.exists() else 'no such folder'}")
        if folder.name.startswith((BUILDING, REPLACED)):
            raise InputError(
                f"{path}: the folder of a build that is running or was killed, not an artifact",
                hint="build again; what a killed build left behind is removed then",
            )
        if not (folder / MANIFEST).is_file():
            versions = sorted(entry.parent.name for entry in folder.glob(f"[!.]*/{MANIFEST}"))
            raise InputError(
                f"{path}: not an artifact: it has no {MANIFEST}",
                hint=f"give one of its versions: {', '.join(versions)}" if versions else None,
            )
        return cls(folder, _read_manifest(folder / MANIFEST))

    def verify(self) -> None:
        """Hash every file again and compare with the manifest.

        Raises:
            InputError: files are missing, changed or added; the message names them.
        """
        recorded = self.manifest.files
        present = {path: path in recorded and _hash(self.path / path) for path in _walk(self.path) if path != MANIFEST}
        problems = {
            "missing": [path for path in recorded if path not in present],
            "changed": [path for path, record in recorded.items() if present.get(path, record.sha256) != record.sha256],
            "not in the manifest": [path for path in present if path not in recorded],
        }
        found = [f"{what}: {_listed(sorted(paths))}" for what, paths in problems.items() if paths]
        if not found and content_digest_of(recorded, self.manifest.recipe) != self.manifest.content_digest:
            found = [f"{MANIFEST} contradicts itself: content_digest is not that of its files and recipe"]
        if found:
            raise InputError(
                f"{self.path}: the artifact is not what was published: {'; '.join(found)}",
                hint="fetch it or build it again; nothing in an artifact may be edited",
            )


def check_name(name: str, what: str = "name") -> str:
    """Return a name or version of an artifact that can be a folder's name.

    Raises:
        UsageError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"artifact {what} {name!r}: allowed are a-z, 0-9, '.', '_' and '-', at most 128, a letter or digit first"
        )
    return name


def tool_versions() -> dict[str, str]:
    """List Python, llmforge and the packages that shape an artifact, as installed here."""
    versions = {"python": platform.python_version(), "llmforge": __version__}
    for package in TOOLS:
        try:
            versions[package] = installed_version(package)
        except PackageNotFoundError:  # an extra that is not installed shapes nothing
            continue
    return versions


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
        with _names_of(parent):
            _remove_stale(parent)
            folder, lock = _reserve(parent)
            folder.mkdir()
    except OSError as error:
        raise EnvironmentLacks(
            f"{parent}: cannot be written: {error.strerror}", hint="choose another folder with --out"
        ) from error
    try:
        yield folder
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise EnvironmentLacks(f"{parent}: the disk is full", hint="free some space, or use --out") from error
    finally:
        if folder.exists():
            shutil.rmtree(folder)
        _release(folder, lock)


def content_digest(folder: Path, recipe: Mapping[str, Any]) -> str:
    """Compute the content digest that `folder` will be published with; the report may be written after that."""
    return content_digest_of(_records(folder), recipe)


def content_digest_of(files: Mapping[str, FileRecord], recipe: Mapping[str, Any]) -> str:
    """Combine the hashes of the files that count and the resolved recipe: equal for builds from equal inputs.

    SHA-256 over one line `<path> <SHA-256>` a file, sorted by path, and the recipe as canonical JSON.
    """
    digest = hashlib.sha256(CONTENT_FORMAT)
    for path, record in sorted(files.items()):
        if record.in_content:
            digest.update(f"{path} {record.sha256}\n".encode())
    digest.update(json.dumps(recipe, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
    return digest.hexdigest()


def version_of(content_digest: str) -> str:
    """Name the version that content gets when the recipe names none."""
    return content_digest[:VERSION_DIGITS]


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
    files = _records(folder)
    digest = content_digest_of(files, recipe)
    version = check_name(version, "version") if version is not None else version_of(digest)
    manifest = Manifest(
        name=folder.parent.name,
        version=version,
        content_digest=digest,
        verdict=verdict,
        created=datetime.now(UTC).replace(microsecond=0),
        checkpoint=checkpoint,
        target=target,
        recipe=dict(recipe),
        tools=tool_versions(),
        requires=dict(requires),
        files=files,
    )
    final = folder.parent / version
    with _names_of(folder.parent):
        _refuse_other(final, digest)  # before anything is written: the folder stays unfinished
        for path in files:
            (folder / path).chmod(0o444)
        (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        (folder / MANIFEST).chmod(0o444)
        _sync(folder)
        aside = None
        if final.exists():
            aside = folder.parent / f"{REPLACED}{secrets.token_hex(4)}-{version}"
            final.rename(aside)
        folder.rename(final)
        _sync_folder(folder.parent)
        if aside is not None:
            _discard(aside)
    return Artifact(final, manifest)


def _read_manifest(file: Path) -> Manifest:
    try:
        data = from_json(file.read_bytes())
    except ValueError as error:
        raise InputError(f"{file}: not valid JSON: {error}") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != 1:
        raise InputError(
            f"{file}: schema {schema!r} is unknown to llmforge {__version__}, which reads schema 1",
            hint="use the version of llmforge that built the artifact, or build it again",
        )
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{file}: {where}: {first['msg']}") from error


def _walk(folder: Path) -> Iterator[str]:
    """Yield the relative path of everything in `folder` that is not a folder, hidden files and links included."""
    for base, folders, names in os.walk(folder):
        here = Path(base)
        links = [name for name in folders if (here / name).is_symlink()]
        for name in [*names, *links]:
            yield (here / name).relative_to(folder).as_posix()


def _hash(file: Path) -> str:
    """Hash a regular file; anything else, links included, gets a word that equals no hash."""
    if not stat.S_ISREG(file.lstat().st_mode):
        return "not a regular file"
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _records(folder: Path) -> dict[str, FileRecord]:
    files = {}
    for path in sorted(_walk(folder)):
        file = folder / path
        assert stat.S_ISREG(file.lstat().st_mode), f"{file}: an artifact holds regular files only"
        files[path] = FileRecord(
            sha256=_hash(file), size_bytes=file.stat().st_size, in_content=not path.startswith(REPORT)
        )
    return files


def _refuse_other(final: Path, digest: str) -> None:
    """Let a version be replaced by its own content only."""
    if not final.exists() and not final.is_symlink():
        return
    try:
        existing = Artifact.open(final).manifest.content_digest
    except InputError as error:
        raise UsageError(
            f"{final} exists and is not a usable artifact: {error.message}", hint="move it away, or name a version"
        ) from error
    if existing != digest:
        raise UsageError(
            f"{final} exists with other content ({existing[:VERSION_DIGITS]}, this build {digest[:VERSION_DIGITS]})",
            hint="a version never changes: name another, or none to have it named by its content",
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
def _names_of(parent: Path) -> Iterator[None]:
    """Be the only process that changes names in `parent`; waits for its turn."""
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


def _discard(folder: Path) -> None:
    """Delete a folder under an unfinished name, so that a half deleted one is never taken for a whole one."""
    doomed, lock = _reserve(folder.parent)
    folder.rename(doomed)
    shutil.rmtree(doomed)
    _release(doomed, lock)


def _remove_stale(parent: Path) -> None:
    """Clean up after killed builds; call it with the names of `parent` locked."""
    for aside in sorted(parent.glob(f"{REPLACED}*")):
        final = parent / aside.name.removeprefix(REPLACED).partition("-")[2]
        if final.exists():
            _discard(aside)
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
