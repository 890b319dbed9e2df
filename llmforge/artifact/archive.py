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
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from llmforge.artifact import sealed, transfer
from llmforge.artifact.sealed import (
    EVIDENCE,
    LARGEST_MANIFEST,
    MANIFEST,
    SIGNATURE,
    EvidenceRecord,
    FileRecord,
    Manifest,
)
from llmforge.artifact.store import Artifact, staging
from llmforge.base import small_file
from llmforge.base.errors import InputError

BLOCK = 512  # bytes; of tar
END = b"\0" * (2 * BLOCK)
_OCTAL_SIZES = 8 << 30  # bytes; what 11 octal digits cannot say begins here

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
    written = 0
    unlisted = transfer.unlisted(artifact)
    for path, record in _members(artifact.listed, unlisted):
        written += stream.write(_header(artifact.manifest, path, record.size_bytes))
        with transfer.reading(artifact, path) as source:
            digest, size = _copy(source, stream)
        if size != record.size_bytes or (path not in unlisted and digest != record.sha256):
            raise transfer.changed(artifact, path)
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


def load_file(file: Path, out: Path, check: transfer.Check | None = None) -> Artifact:
    """Publish the artifact in the archive `file` as `out/<name>/<version>`; see `load`."""
    with small_file.open_regular(file, hint="give a file of `llmforge export`") as stream:
        return load(stream, out, str(file), size_bytes=os.fstat(stream.fileno()).st_size, check=check)


def load(
    stream: IO[bytes],
    out: Path,
    source: str,
    *,
    size_bytes: int | None = None,
    check: transfer.Check | None = None,
) -> Artifact:
    """Publish the artifact in the archive `stream` as `out/<name>/<version>`.

    Nothing is visible before every byte was compared with manifest and evidence, and nothing is written outside of the
    hidden folder that builds use. `source` names the archive in messages; `size_bytes`, where it is known, is checked
    first; `check` may refuse what is whole, such as for its signature.

    Raises:
        InputError: the archive is damaged, cut off, or not one that `save` wrote.
        UsageError: the version is there with other content or evidence.
        EnvironmentLacks: the disk has no room, or `out` cannot be written.
    """
    reader = _ArchiveReader(stream, source)
    stock = reader.first()
    manifest, first = stock.manifest, stock.unlisted
    _check_headers(stock, reader)
    expected = _size(stock.listed, {path: len(content) for path, content in first.items()})
    if size_bytes is not None and size_bytes != expected:
        reader.refuse(f"{'cut off' if size_bytes < expected else 'too long'}: {size_bytes:,} bytes of {expected:,}")
    with staging(out, manifest.name) as folder:
        transfer.require_room(folder, expected, source)
        transfer.write(folder, first)
        for path, file in stock.listed.items():
            reader.expect(_header(manifest, path, file.size_bytes), path)
            with transfer.writing(folder / path, source) as written:
                digest = reader.copy(file.size_bytes, written, path)
            if digest != file.sha256:
                reader.refuse(f"{path}: the content is not what manifest and evidence say")
        reader.expect_end()
        return transfer.publish(folder, manifest, source, check)


def read_evidence(stream: IO[bytes], source: str) -> tuple[Manifest, tuple[EvidenceRecord, ...]]:
    """Read the manifest and the records of evidence of the archive `stream`, oldest first, and nothing behind them.

    Raises:
        InputError: they are damaged, cut off, or not what `save` wrote.
    """
    stock = _ArchiveReader(stream, source).first()
    records = [sealed.parse_record(raw, source) for path, raw in stock.unlisted.items() if transfer.is_record(path)]
    return stock.manifest, tuple(records)


class _ArchiveReader:
    """Reads an archive from its beginning to its end, once."""

    def __init__(self, stream: IO[bytes], source: str) -> None:
        self._stream = stream
        self._source = source
        self._next: bytes | None = None  # a header that was read and not taken

    def refuse(self, why: str) -> NoReturn:
        """Refuse the archive."""
        raise InputError(f"{self._source}: not an artifact that llmforge exported, or damaged: {why}", hint=_HINT)

    def first(self) -> transfer.Inventory:
        """Read what goes first: manifest, records of evidence and signature."""
        raw, root = self.manifest()
        manifest = sealed.parse_manifest(raw, f"{self._source}: {MANIFEST}")
        if root != f"{manifest.name}/{manifest.version}":
            self.refuse(f"it holds {root!r}, its manifest says {manifest.name!r} {manifest.version!r}")
        unlisted = {MANIFEST: raw, **self.records(root), **self.signature(root)}
        return transfer.take_stock(unlisted, self._source, self.refuse)

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
        left = transfer.LARGEST_EVIDENCE
        while (named := self._called(_RECORD)) is not None:
            content = self._unlisted(root, named, min(sealed.LARGEST_RECORD, left))
            if named in found:
                self.refuse(f"{named} comes twice")
            found[named] = content
            left -= len(content)
        return found

    def signature(self, root: str) -> dict[str, bytes]:
        """Read the signature, which follows the records, by its path; nothing: the artifact is not signed."""
        if self._called(_SIGNATURE) is None:
            return {}
        return {SIGNATURE: self._unlisted(root, SIGNATURE, sealed.LARGEST_SIGNATURE)}

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
            chunk = self._read(min(left, transfer.CHUNK), path)
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


def _check_headers(stock: transfer.Inventory, reader: _ArchiveReader) -> None:
    """Refuse paths and sizes that no header can say."""
    for path, file in stock.listed.items():
        try:
            _header(stock.manifest, path, file.size_bytes)
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


def _copy(source: IO[bytes], stream: IO[bytes]) -> tuple[str, int]:
    """Copy a file to `stream`; its SHA-256 and size."""
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(transfer.CHUNK):
        digest.update(chunk)
        size += stream.write(chunk)
    return digest.hexdigest(), size
