"""Artifacts as one file: an uncompressed tar that is the same bytes for the same artifact, and nothing else.

The members are `NAME/VERSION/manifest.json`, then the records of evidence, oldest first, then `model.sig` where the
artifact is signed, then the files that manifest and records list, sorted by path; regular files alone, in the ustar
format (POSIX.1-1988), with mode 0444, owner and group 0 and no time; sizes of 8 GiB and more in base 256, as GNU tar
and libarchive write and read them. Two blocks of zeros end it, and nothing comes after them.

So manifest and records say every byte of an archive but the signature and the contents of the files, whose hashes they
have. `load` reads them, and from then on compares: what is not exactly the header that must come next is refused,
whatever else tar would make of it. Nothing of a name or size in a header is acted upon.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NoReturn

from llmforge.artifact.store import Artifact, adopt, staging
from llmforge.base import sealed
from llmforge.base.errors import EnvironmentLacks, InputError
from llmforge.base.sealed import (
    EVIDENCE,
    LARGEST_MANIFEST,
    LARGEST_RECORD,
    MANIFEST,
    SIGNATURE,
    FileRecord,
    Manifest,
)

BLOCK = 512  # bytes; of tar
END = b"\0" * (2 * BLOCK)
LARGEST_SIGNATURE = 16 << 20  # bytes; it has a line for each file
LARGEST_EVIDENCE = 4 * LARGEST_RECORD  # bytes; of all records together
MOST_FILES = 100_000
_OCTAL_SIZES = 8 << 30  # bytes; what 11 octal digits cannot say begins here
_CHUNK = 1 << 20  # bytes

_KINDS = {
    b"1": "a hard link", b"2": "a symbolic link", b"3": "a character device", b"4": "a block device",
    b"5": "a folder", b"6": "a pipe", b"7": "a contiguous file", b"g": "a pax header", b"x": "a pax header",
    b"K": "a GNU long link", b"L": "a GNU long name", b"M": "a continued file", b"S": "a sparse file",
    b"V": "a volume label", b"D": "a GNU folder",
}  # fmt: skip
_RECORD = re.compile(rf"/({EVIDENCE}/[0-9a-f]{{64}}\.json)\Z")
_SIGNATURE = re.compile(rf"/({re.escape(SIGNATURE)})\Z")
_HINT = "export the artifact again, and compare the hashes of both copies of the file"


def save(artifact: Artifact, stream: IO[bytes]) -> int:
    """Write an artifact to `stream` and return its size in bytes; every file is hashed on the way.

    Raises:
        InputError: a file is not as it was published, or its path is too long for a tar.
    """
    present, listed = set(sealed.walk(artifact.path)), artifact.listed
    first = [name for name in (MANIFEST, *(each.path for each in artifact.evidence), SIGNATURE) if name in present]
    stray = present - {*first, *listed}
    if stray:
        raise InputError(
            f"{artifact.path}: not in the manifest or in evidence: {min(stray)}", hint="artifacts must not be edited"
        )
    written = 0
    unlisted = {name: (artifact.path / name).lstat().st_size for name in first}
    for path, record in _members(listed, unlisted):
        written += stream.write(_header(artifact.manifest, path, record.size_bytes))
        file = artifact.path / path
        try:
            digest, size = _copy_file(file, stream)
        except OSError as error:
            if error.filename is None:  # `stream`
                raise
            raise InputError(f"{file}: cannot be read: {error.strerror}") from error
        if size != record.size_bytes or (path not in unlisted and digest != record.sha256):
            raise InputError(
                f"{artifact.path}: the artifact was changed after it was published: {path}",
                hint="fetch or build it again; artifacts must not be edited",
            )
        written += size + stream.write(b"\0" * (-size % BLOCK))
    return written + stream.write(END)


def save_file(artifact: Artifact, file: Path) -> int:
    """Write an artifact to `file`, which appears when it is whole and on disk; return its size in bytes."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as stream:
            size = save(artifact, stream)
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(file)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
    return size


def load_file(file: Path, out: Path) -> Artifact:
    """Publish the artifact in the archive `file` as `out/<name>/<version>`; see `load`."""
    try:
        with file.open("rb") as stream:
            return load(stream, out, str(file), size_bytes=os.fstat(stream.fileno()).st_size)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        if error.filename != str(file):
            raise
        raise InputError(
            f"{file}: cannot be read: {error.strerror}", hint="give a file of `llmforge export`"
        ) from error


def load(stream: IO[bytes], out: Path, source: str, *, size_bytes: int | None = None) -> Artifact:
    """Publish the artifact in the archive `stream` as `out/<name>/<version>`.

    Nothing is visible before every byte was compared with the manifest, and nothing is written outside of the hidden
    folder that builds use. `source` names the archive in messages; `size_bytes`, where it is known, is checked first.

    Raises:
        InputError: the archive is damaged, cut off, or not one that `save` wrote.
        UsageError: the version is there with other content or evidence.
        EnvironmentLacks: the disk has no room, or `out` cannot be written.
    """
    reader = _Reader(stream, source)
    raw, root = reader.manifest()
    manifest = sealed.parse_manifest(raw, f"{source}: {MANIFEST}")
    if root != f"{manifest.name}/{manifest.version}":
        reader.refuse(f"it holds {root!r}, its manifest says {manifest.name!r} {manifest.version!r}")
    unlisted = {MANIFEST: raw, **reader.records(root)}
    records = [sealed.parse_record(unlisted[path], f"{source}: {path}") for path in unlisted if path != MANIFEST]
    records = list(sealed.in_line(records, manifest.content_digest, source))
    if [MANIFEST, *(record.path for record in records)] != list(unlisted):
        reader.refuse("a record of evidence is not called by its SHA-256, or in another place than it must be")
    if (signature := reader.signature(root)) is not None:
        unlisted[SIGNATURE] = signature
    listed = {**manifest.files, **{path: each for record in records for path, each in record.placed_files.items()}}
    _check_files(manifest, listed, unlisted, reader)
    expected = _size(listed, {name: len(content) for name, content in unlisted.items()})
    if size_bytes is not None and size_bytes != expected:
        reader.refuse(f"{'cut off' if size_bytes < expected else 'too long'}: {size_bytes:,} bytes of {expected:,}")
    with staging(out, manifest.name) as folder:
        if (free := shutil.disk_usage(folder).free) < expected:
            raise EnvironmentLacks(
                f"{source}: needs {expected:,} bytes in {out}, where {free:,} are free", hint="use another --out"
            )
        (folder / EVIDENCE).mkdir()
        for name, content in unlisted.items():
            (folder / name).write_bytes(content)
        for path, file in sorted(listed.items()):
            reader.expect(_header(manifest, path, file.size_bytes), path)
            with _written(folder / path, source) as written:
                digest = reader.copy(file.size_bytes, written, path)
            if digest != file.sha256:
                reader.refuse(f"{path}: the content is not what manifest and evidence say")
        reader.expect_end()
        return adopt(folder, manifest)


class _Reader:
    """Reads an archive from its beginning to its end, once."""

    def __init__(self, stream: IO[bytes], source: str) -> None:
        self._stream = stream
        self._source = source
        self._next: bytes | None = None  # a header that was read and not taken

    def refuse(self, why: str) -> NoReturn:
        """Refuse the archive."""
        raise InputError(f"{self._source}: not an artifact that llmforge exported, or damaged: {why}", hint=_HINT)

    def manifest(self) -> tuple[bytes, str]:
        """Read the manifest, which comes first, and the folder that it lies in."""
        block = self._read(BLOCK, "the first header")
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.HeaderError, ValueError) as error:
            self.refuse(f"it does not begin with a header of tar ({error})")
        root, _, name = info.name.rpartition("/")
        if name != MANIFEST or info.type != tarfile.REGTYPE:
            self.refuse(f"it begins with {self._describe(block)}; {MANIFEST} comes first")
        if not 0 < info.size <= LARGEST_MANIFEST:
            self.refuse(f"its manifest has {info.size:,} bytes; at most {LARGEST_MANIFEST:,} are allowed")
        try:
            expected = _named_header(info.name, info.size)
        except ValueError:
            self.refuse(f"the name {info.name[:80]!r} is too long")
        if block != expected:
            self.refuse(f"{info.name!r} has an owner, a mode, a time or a format that export does not write")
        raw = self._read(info.size, MANIFEST)
        self._padding(info.size, MANIFEST)
        return raw, root

    def records(self, root: str) -> dict[str, bytes]:
        """Read the records of evidence, which follow the manifest, by their paths."""
        found: dict[str, bytes] = {}
        left = LARGEST_EVIDENCE
        while (named := self._called(_RECORD)) is not None:
            content = self._unlisted(root, named, min(LARGEST_RECORD, left))
            if named in found:
                self.refuse(f"{named} comes twice")
            found[named] = content
            left -= len(content)
        return found

    def signature(self, root: str) -> bytes | None:
        """Read the signature, which follows the records; None: the artifact is not signed."""
        if self._called(_SIGNATURE) is None:
            return None
        return self._unlisted(root, SIGNATURE, LARGEST_SIGNATURE)

    def _called(self, pattern: re.Pattern[str]) -> str | None:
        """Look at the next header; return the part of its name that `pattern` finds at the end, if it does."""
        if self._next is None:
            self._next = self._read(BLOCK, "a header")
        name, prefix = (self._next[part].partition(b"\0")[0] for part in (slice(0, 100), slice(345, 500)))
        match = pattern.search(b"/".join((prefix, name)).decode("utf-8", "replace"))
        return None if match is None else match[1]

    def _unlisted(self, root: str, path: str, largest: int) -> bytes:
        """Read a member whose size its header alone tells."""
        block = self._header(path)
        try:
            size = tarfile.TarInfo.frombuf(block, "utf-8", "strict").size
            whole = 0 < size <= largest and block == _named_header(f"{root}/{path}", size)
        except (tarfile.HeaderError, ValueError):
            whole = False
        if not whole:
            self.refuse(f"the header of {path} is damaged, or it has more than {largest:,} bytes")
        content = self._read(size, path)
        self._padding(size, path)
        return content

    def expect(self, header: bytes, path: str) -> None:
        """Read the header that must come next."""
        block = self._header(f"the header of {path}")
        if block != header:
            what = "its end" if not block.strip(b"\0") else self._describe(block)
            self.refuse(f"{what} where the header of {path} must be")

    def expect_end(self) -> None:
        """Read the end, after which nothing comes."""
        block = self._header("its end")
        if block.strip(b"\0"):
            self.refuse(f"{self._describe(block)}, which is not in the manifest")
        if self._read(BLOCK, "its end").strip(b"\0") or self._stream.read(1):
            self.refuse("something comes after its end")

    def copy(self, size_bytes: int, target: IO[bytes], path: str) -> str:
        """Copy the content of a member, and return its SHA-256."""
        digest, left = hashlib.sha256(), size_bytes
        while left:
            chunk = self._read(min(left, _CHUNK), path)
            digest.update(chunk)
            target.write(chunk)
            left -= len(chunk)
        self._padding(size_bytes, path)
        return digest.hexdigest()

    def _header(self, what: str) -> bytes:
        block, self._next = self._next, None
        return self._read(BLOCK, what) if block is None else block

    def _padding(self, size_bytes: int, path: str) -> None:
        if self._read(-size_bytes % BLOCK, path).strip(b"\0"):
            self.refuse(f"{path}: something comes after its end")

    def _read(self, count: int, what: str) -> bytes:
        parts, left = [], count
        while left:
            part = self._stream.read(left)
            if not part:
                self.refuse(f"cut off in {what}")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _describe(self, block: bytes) -> str:
        """Say what a header that is not the expected one is of."""
        name = block[:100].partition(b"\0")[0].decode("utf-8", "replace")
        return f"{_KINDS.get(block[156:157], 'a file')} named {name[:80]!r}"


def _check_files(
    manifest: Manifest, listed: Mapping[str, FileRecord], unlisted: Mapping[str, bytes], reader: _Reader
) -> None:
    """Refuse what no folder can hold: too many files, names that tar or the file system do not take, files in files."""
    if len(listed) > MOST_FILES:
        reader.refuse(f"{len(listed):,} files; at most {MOST_FILES:,} are allowed")
    taken = {*listed, *unlisted, SIGNATURE}
    for path, file in listed.items():
        if not path.isprintable() or any(len(part.encode("utf-8", "replace")) > 255 for part in path.split("/")):
            reader.refuse(f"the path {path[:80]!r} is too long, or not text")
        parents = path.split("/")[:-1]
        if any("/".join(parents[: depth + 1]) in taken for depth in range(len(parents))):
            reader.refuse(f"{path!r} lies in a file")
        try:
            _header(manifest, path, file.size_bytes)
        except (ValueError, OverflowError):
            reader.refuse(f"{path[:80]!r}: the path or the size is too large for a tar")


def _members(listed: Mapping[str, FileRecord], unlisted: Mapping[str, int]) -> Iterator[tuple[str, FileRecord]]:
    """List the members of an archive in their order; `unlisted` has the sizes of those that nothing lists."""
    for name, size_bytes in unlisted.items():
        yield name, FileRecord(sha256="0" * 64, size_bytes=size_bytes)
    yield from sorted(listed.items())


def _size(listed: Mapping[str, FileRecord], unlisted: Mapping[str, int]) -> int:
    """Compute how large the archive of an artifact is."""
    sizes = (record.size_bytes for _, record in _members(listed, unlisted))
    return sum(BLOCK + size + -size % BLOCK for size in sizes) + len(END)


def _header(manifest: Manifest, path: str, size_bytes: int) -> bytes:
    return _named_header(f"{manifest.name}/{manifest.version}/{path}", size_bytes)


def _named_header(name: str, size_bytes: int) -> bytes:
    """Make the header of a member.

    Raises:
        ValueError: the name cannot be said in 100 bytes, or 155 and 100.
        OverflowError: the size cannot be said in 11 bytes.
    """
    info = tarfile.TarInfo(name)
    info.mode = 0o444
    info.size = size_bytes if size_bytes < _OCTAL_SIZES else 0
    header = bytearray(info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict"))
    if size_bytes >= _OCTAL_SIZES:
        header[124:136] = b"\x80" + size_bytes.to_bytes(11, "big")
        header[148:156] = b" " * 8  # the checksum counts itself as spaces
        header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@contextmanager
def _written(file: Path, source: str) -> Iterator[IO[bytes]]:
    """Open a new file in the hidden folder, where nobody else writes."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = file.open("xb")
    except (FileExistsError, NotADirectoryError) as error:  # names that this file system takes for the same
        raise InputError(f"{source}: {file.name}: two files of one name: {error.strerror}") from error
    with stream:
        yield stream


def _copy_file(file: Path, stream: IO[bytes]) -> tuple[str, int]:
    """Copy a regular file to `stream`; its SHA-256 and size."""
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb", buffering=0) as source:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            size += stream.write(chunk)
    return digest.hexdigest(), size
