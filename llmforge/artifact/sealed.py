"""The seal of an artifact, in plain JSON: a manifest of its content, and records of evidence about it.

`manifest.json` has one form only: keys sorted, one space of indent, a final newline. So the SHA-256 of its bytes is the
digest of the content, of which the version is the beginning. Nothing in it changes from build to build: no time, no
tool, no measurement. Those stand in `evidence/<SHA-256 of its bytes>.json`, one record a build of that content. A
record names the one before it, so that they form one line, which only grows.

This module needs the standard library alone: what serves an artifact reads it as well.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from llmforge.base import small_file, strict_json
from llmforge.base.errors import InputError
from llmforge.base.wording import cut, quoted

MANIFEST = "manifest.json"
SIGNATURE = "model.sig"  # made after publication, of everything that was there
EVIDENCE = "evidence"
REPORT = "report/"  # with the next two, what a record has files of
PROVENANCE = "provenance/"  # what it was made of and on
CARD = "README.md"  # tells of measurements
MODE = 0o444  # of files of an artifact
SCHEMA = 2
RECORD_SCHEMA = 3  # of records of evidence: since 3, intervals are those of llmforge.metrics.skewed_t
MOST_VALUES = 400_000  # in the JSON of a record: what a reader makes of each has 1 kB
VERSION_DIGITS = 12  # of the content digest: 48 bits, no collision to be expected below 10 million versions of a name
LARGEST_MANIFEST = 16 << 20  # bytes; one of 100,000 files has 15 MB
LARGEST_SIGNATURE = 16 << 20  # bytes; it has a line for each file
LARGEST_RECORD = 16 << 20  # bytes; a report has lines for each node that a pass changed, some 2 MB of an 80-layer model

Verdict = Literal["pass", "fail", "inconclusive", "none"]  # of all gates together (llmforge.gates.decision)
VERDICTS: tuple[Verdict, ...] = ("pass", "fail", "inconclusive", "none")

# What becomes the name of a folder or a file, wherever a manifest comes from; what is printed to a terminal.
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9.,+!_~-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HINT = "fetch the artifact or build it again"


@dataclass(frozen=True)
class FileRecord:
    """One file of an artifact."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Manifest:
    """What an artifact is: equal inputs give equal bytes."""

    schema: int
    name: str
    target: str
    checkpoint: str  # digest of the checkpoint's content
    recipe: Mapping[str, Any]  # resolved
    requires: Mapping[str, str]  # package → version that the engine must be run with
    files: Mapping[str, FileRecord]  # of the content

    @cached_property
    def content_digest(self) -> str:
        """SHA-256 of the manifest's bytes."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def version(self) -> str:
        """Name the version, which is the folder's name."""
        return version_of(self.content_digest)

    def to_json(self) -> str:
        """Write it in the one form that it has; ASCII."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, indent=1, allow_nan=False) + "\n"


@dataclass(frozen=True)
class EvidenceRecord:
    """The head of a record of evidence, whatever else it says (llmforge.gates.records)."""

    digest: str  # SHA-256 of its bytes; its name
    size_bytes: int
    content: str  # digest of the content that it tells of
    previous: str | None  # digest of the record before it
    created: datetime  # UTC
    verdict: Verdict
    files: Mapping[str, FileRecord]  # that belong to it, by their paths below `home`

    @property
    def path(self) -> str:
        """Where it lies in the artifact."""
        return f"{EVIDENCE}/{self.digest}.json"

    @property
    def home(self) -> str:
        """Where its files lie: those of the first record at the top of the artifact, of others in a folder of theirs.

        So nothing that was published, and maybe signed, ever moves.
        """
        return "" if self.previous is None else f"{EVIDENCE}/{self.digest}/"

    @property
    def placed_files(self) -> dict[str, FileRecord]:
        """The files that belong to it, by their paths in the artifact."""
        return {self.home + path: file for path, file in self.files.items()}


def version_of(content_digest: str) -> str:
    """Name the version of some content."""
    return content_digest[:VERSION_DIGITS]


def is_name(name: str) -> bool:
    """Say if `name` can be that of an artifact, a version or a tag."""
    return _NAME.fullmatch(name) is not None


def is_word(text: str) -> bool:
    """Say if `text` can be the name of a package, or its version."""
    return _WORD.fullmatch(text) is not None


def is_version(name: str) -> bool:
    """Say if `name` has the form of a version."""
    return re.fullmatch(rf"[0-9a-f]{{{VERSION_DIGITS}}}", name) is not None


def is_content(path: str) -> bool:
    """Say if a file of an artifact is content, and no evidence about it."""
    return path not in (MANIFEST, SIGNATURE, CARD) and not path.startswith((REPORT, PROVENANCE, f"{EVIDENCE}/"))


def parse_manifest(raw: bytes, source: str) -> Manifest:
    """Read the bytes of a manifest; `source` says in messages where they are from.

    Raises:
        InputError: they are not one, not in the one form that it has, or of another schema.
    """
    data = small_file.parse_json(raw, source, hint=_HINT)
    if isinstance(data, dict) and type(written := data.get("schema")) is int and written > SCHEMA:
        raise InputError(
            f"{source}: schema {written} is newer than this llmforge, which reads schema {SCHEMA}",
            hint="update llmforge, or use the one that built the artifact",
        )
    if isinstance(data, dict) and data.get("schema") != SCHEMA:
        raise InputError(
            f"{source}: schema {quoted(data.get('schema'))} is not supported; this llmforge reads schema {SCHEMA}",
            hint="artifacts are not migrated: build it again, or use the llmforge that built it",
        )
    manifest = strict_json.read(Manifest, data, source)
    if not is_name(manifest.name):
        raise InputError(f"{source}: name {quoted(manifest.name)} cannot be that of an artifact", hint=_HINT)
    if not is_name(manifest.target):
        raise InputError(f"{source}: target {quoted(manifest.target)} cannot be the name of one", hint=_HINT)
    for word in (*manifest.requires, *manifest.requires.values()):
        if not is_word(word):
            raise InputError(f"{source}: requires {quoted(word)}: no package or version", hint=_HINT)
    _check_digest(manifest.checkpoint, "checkpoint", source)
    _check_files(manifest.files, source, content=True)
    try:
        canonical = manifest.to_json().encode()
    except ValueError as error:  # NaN, and infinity
        raise InputError(f"{source}: {error}", hint=_HINT) from error
    if raw != canonical:
        raise InputError(
            f"{source}: not in the form that llmforge writes (keys sorted and unique, indented by one space)",
            hint=_HINT,
        )
    return manifest


def parse_record(raw: bytes, source: str) -> EvidenceRecord:
    """Read the head of a record of evidence.

    Raises:
        InputError: the bytes are none.
    """
    data = small_file.parse_json(raw, source, hint=_HINT, unique_keys=True, most_values=MOST_VALUES)
    if isinstance(data, dict) and type(written := data.get("schema")) is int and 0 < written < RECORD_SCHEMA:
        raise InputError(
            f"{source}: a record of evidence of schema {written}, whose intervals were too narrow; this llmforge reads "
            f"schema {RECORD_SCHEMA}",
            hint="artifacts are not migrated: build it again, or use the llmforge that built it",
        )
    if not isinstance(data, dict) or data.get("schema") != RECORD_SCHEMA:
        raise InputError(f"{source}: not a record of evidence of schema {RECORD_SCHEMA}", hint=_HINT)
    try:
        files = {path: strict_json.read(FileRecord, file, f"{source}: files") for path, file in data["files"].items()}
        previous, created = data["previous"], datetime.fromisoformat(data["created"])
        moment = created.astimezone(UTC)  # which the years 1 and 9999 need not have
        head = EvidenceRecord(
            hashlib.sha256(raw).hexdigest(), len(raw), data["content"], previous, moment, data["verdict"], files
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{source}: not a record of evidence: {cut(str(error))}", hint=_HINT) from error
    if created.tzinfo is None or head.verdict not in VERDICTS:
        raise InputError(
            f"{source}: not a record of evidence: `created` has no time zone, or `verdict` is unknown", hint=_HINT
        )
    for what, digest in {"content": head.content, "previous": "0" * 64 if previous is None else previous}.items():
        _check_digest(digest, what, source)
    _check_files(files, source, content=False)
    return head


def open_manifest(folder: Path) -> Manifest:
    """Read the manifest of the artifact in `folder`; raises what `parse_manifest` and `read_file` raise."""
    return parse_manifest(read_file(folder / MANIFEST, LARGEST_MANIFEST), str(folder / MANIFEST))


def open_evidence(folder: Path, content: str) -> tuple[EvidenceRecord, ...]:
    """Read the records about `content` in the artifact in `folder`, oldest first.

    Raises:
        InputError: there are none, one is damaged or about something else, or they are not one line.
    """
    found = []
    for file in sorted((folder / EVIDENCE).glob("*.json")):
        record = parse_record(read_file(file, LARGEST_RECORD), str(file))
        if file.name != f"{record.digest}.json":
            raise InputError(f"{file}: was changed: its name is not the SHA-256 of its bytes", hint=_HINT)
        found.append(record)
    return in_line(found, content, str(folder))


def in_line(records: Collection[EvidenceRecord], content: str, source: str) -> tuple[EvidenceRecord, ...]:
    """Put the records about `content` in their order, oldest first.

    Raises:
        InputError: there are none, one is about another content, or they are not one line.
    """
    if not records:
        raise InputError(f"{source}: there is no evidence about it: {EVIDENCE}/ holds no record", hint=_HINT)
    for record in records:
        if record.content != content:
            raise InputError(
                f"{source}: {record.path} is about the content {version_of(record.content)}, not {version_of(content)}",
                hint=_HINT,
            )
    after = {record.previous: record for record in records}
    ordered: list[EvidenceRecord] = []
    while (following := after.get(ordered[-1].digest if ordered else None)) is not None:
        ordered.append(following)
    if len(ordered) != len(records):
        raise InputError(
            f"{source}: a record of evidence is missing, or two follow one: {len(ordered)} of {len(records)} are in "
            "one line",
            hint=_HINT,
        )
    return tuple(ordered)


def effective(records: Sequence[EvidenceRecord]) -> Verdict:
    """Give the one verdict of some content: that of the newest record which decided its gates.

    A later FAIL stands against an earlier PASS, and a later PASS, which needs a measurement of its own, against an
    earlier FAIL. A record that is INCONCLUSIVE takes nothing back: it counts where none decided.
    """
    decided = [record.verdict for record in records if record.verdict in ("pass", "fail")]
    return decided[-1] if decided else records[-1].verdict


def walk(folder: Path) -> Iterator[str]:
    """Yield the relative path of everything in `folder` that is not a folder, hidden files and links included."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix()


def read_file(file: Path, largest: int) -> bytes:
    """Read a file of an artifact, which holds no links; raises what `small_file.read` does."""
    return small_file.read(file, largest, hint=_HINT, links=False)


def _check_digest(text: object, what: str, source: str) -> None:
    if not isinstance(text, str) or not _SHA256.fullmatch(text):
        raise InputError(f"{source}: {what} {quoted(text)} is not a SHA-256", hint=_HINT)


def _check_files(files: Mapping[str, FileRecord], source: str, *, content: bool) -> None:
    for path, file in files.items():
        plain = PurePosixPath(path)
        inside = path not in ("", ".") and str(plain) == path and not plain.is_absolute() and ".." not in plain.parts
        if not inside or "\0" in path:
            raise InputError(f"{source}: {quoted(path)} is not a plain path inside the artifact", hint=_HINT)
        if content != is_content(path) or (not content and path != CARD and not path.startswith((REPORT, PROVENANCE))):
            what = "content" if content else f"a file of evidence ({CARD}, {REPORT}…, {PROVENANCE}…)"
            raise InputError(f"{source}: {quoted(path)} cannot be {what}", hint=_HINT)
        _check_digest(file.sha256, f"{cut(path)}: sha256", source)
        if type(file.size_bytes) is not int or file.size_bytes < 0:
            raise InputError(f"{source}: {quoted(path)} has a size of {quoted(file.size_bytes)} bytes", hint=_HINT)
