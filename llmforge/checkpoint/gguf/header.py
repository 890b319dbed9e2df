"""Read the header of a GGUF file strictly: its metadata, and where its tensors lie; nothing of the tensors is read.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3, little-endian: `GGUF`, the
version (uint32), the counts of tensors and of keys (uint64 each); the keys, each a string, a type and a value; the
tensors, each a name, its sizes from the innermost on, a type and an offset; then, from the next multiple of
`general.alignment` on, their bytes. A file from anywhere is read here: every count, length and offset is held against
the bytes that are there before anything is made of it. (The gguf package maps a file and believes it.)
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.base.wording import quoted, shown
from llmforge.checkpoint.gguf.blocks import OTHER_TYPES, TYPES, BlockType
from llmforge.checkpoint.safetensors_file import DAMAGED, LFS_POINTER, TensorEntry, data_type, open_regular

MAGIC = b"GGUF"
SUFFIX = ".gguf"
VERSIONS = (2, 3)
HEADER_LIMIT_BYTES = 96 << 20  # vocabularies of 256,000 tokens with their merges have 15 MB
MOST_KEYS = 1 << 14  # the most that are known have some hundred
MOST_TENSORS = 1 << 18
MOST_STRINGS = 1 << 21  # of one array: vocabularies have up to 262,144 tokens
LONGEST_NAME = 1 << 16  # bytes of a key; of a tensor's name llama.cpp takes 63
MOST_DIMENSIONS = 4  # GGML_MAX_DIMS
DEFAULT_ALIGNMENT = 32
MOST_ALIGNMENT = 1 << 16
DTYPES = {"F32": "FLOAT", "F16": "FLOAT16", "BF16": "BFLOAT16"}  # of plain numbers, as onnx-ir names them
_CHUNK_BYTES = 1 << 20
_STRING, _ARRAY = 8, 9
# Types of values by number, as struct and numpy have them.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: `size_bytes` bytes from byte `offset` of the file on."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]  # as torch has it: the innermost size last
    offset: int
    size_bytes: int


@dataclass(frozen=True, eq=False)
class Header:
    """What stands in front of the tensors' bytes."""

    file: Path
    version: int
    metadata: Mapping[str, Any]  # numbers, strings and lists of them
    tensors: Mapping[str, TensorInfo]  # in the order of their bytes
    data_start: int
    size_bytes: int  # of the file
    sha256: str  # of the header's bytes, hexadecimal

    @property
    def architecture(self) -> str:
        """What `general.architecture` says."""
        return str(self.metadata["general.architecture"])

    def entry(self, info: TensorInfo) -> TensorEntry:
        """Say where a tensor lies; of blocks, their bytes: uint8 [..., bytes of a row]."""
        shape = info.shape
        if info.kind.quantized:
            shape = (*shape[:-1], shape[-1] // info.kind.elements * info.kind.size_bytes)
        dtype = data_type(DTYPES.get(info.kind.name, "UINT8"))
        return TensorEntry(info.name, dtype, shape, self.file, info.offset, info.size_bytes)

    def entries(self) -> dict[str, TensorEntry]:
        """Say where all tensors lie, by their names in the file."""
        return {name: self.entry(info) for name, info in self.tensors.items()}

    def gaps(self) -> list[TensorEntry]:
        """List the bytes between and behind tensors, which belong to none, as tensors without a name."""
        ends = [info.offset + info.size_bytes for info in self.tensors.values()]
        starts = [*(info.offset for info in self.tensors.values()), self.size_bytes]
        dtype = data_type("UINT8")
        return [
            TensorEntry("", dtype, (start - end,), self.file, end, start - end)
            for end, start in zip(ends, starts[1:], strict=True)
            if start > end
        ]


def read(file: Path) -> Header:
    """Read the header of a GGUF file.

    Raises:
        CheckpointError: the file is not GGUF, or states what its bytes do not bear out.
        UnsupportedError: it is of another version or byte order, holds tensors of a type that is not read, or is one
            of several files of a model, or no model.
    """
    with open_regular(file) as stream:
        status = os.fstat(stream.fileno())
    return _read(file, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=2)
def _read(file: Path, device: int, inode: int, size: int, changed_ns: int) -> Header:
    with open_regular(file) as stream:
        fields = _Fields(file, stream, size)
        return _parsed(fields)


class _Fields:
    """The fields of a header one after another, none beyond the file or the limit of a header."""

    def __init__(self, file: Path, stream: FileIO, size: int) -> None:
        self.file, self.size, self.at = file, size, 0
        self._stream, self._data = stream, bytearray()

    def take(self, count: int, what: str) -> bytes:
        """Return the next `count` bytes, which are of `what`."""
        end = self.at + count
        if end > self.size:
            raise CheckpointError(
                f"{self.file}: truncated: {what} ends at byte {end}, the file has {self.size} bytes",
                hint="the download was cut off, or the file is damaged: fetch it again",
            )
        if end > HEADER_LIMIT_BYTES:
            raise CheckpointError(
                f"{self.file}: {what} ends at byte {end} of the header; at most {HEADER_LIMIT_BYTES} are allowed",
                hint=DAMAGED,
            )
        while len(self._data) < end:
            chunk = self._stream.read(min(max(_CHUNK_BYTES, end - len(self._data)), self.size - len(self._data)))
            if not chunk:
                raise CheckpointError(f"{self.file}: changed its size while it was being read", hint=DAMAGED)
            self._data += chunk
        taken = bytes(memoryview(self._data)[self.at : end])
        self.at = end
        return taken

    def numbers(self, layout: str, what: str) -> tuple[Any, ...]:
        """Return little-endian numbers in struct's `layout`."""
        return struct.unpack(f"<{layout}", self.take(struct.calcsize(f"<{layout}"), what))

    def string(self, what: str, longest: int | None = None) -> str:
        """Return a string: its length in bytes, uint64, and UTF-8."""
        (length,) = self.numbers("Q", f"the length of {what}")
        if longest is not None and length > longest:
            raise CheckpointError(
                f"{self.file}: {what} has {length} bytes; at most {longest} are allowed", hint=DAMAGED
            )
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file}: {what} is not UTF-8: {error.reason}", hint=DAMAGED) from error

    def header(self) -> bytes:
        """Return all that was taken."""
        return bytes(memoryview(self._data)[: self.at])


def _parsed(fields: _Fields) -> Header:
    file = fields.file
    start = fields.take(min(len(LFS_POINTER), fields.size), "the first bytes")
    fields.at = 0
    if start.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{file}: a Git LFS pointer, not the file it points to", hint="run `git lfs pull` in that folder"
        )
    if not start.startswith(MAGIC):
        raise CheckpointError(f"{file}: not a GGUF file: it begins with {start[:4]!r}, not {MAGIC!r}")
    _, version, tensor_count, key_count = fields.numbers("4sIQQ", "the counts")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = "big-endian" if swapped in VERSIONS else f"GGUF version {version}"
        raise UnsupportedError(
            f"{file}: {what}; little-endian files of version {' and '.join(map(str, VERSIONS))} are read",
            hint="convert the model again with a current llama.cpp",
        )
    for count, most, what in ((key_count, MOST_KEYS, "keys"), (tensor_count, MOST_TENSORS, "tensors")):
        if count > most:
            raise CheckpointError(f"{file}: states {count} {what}; at most {most} are allowed", hint=DAMAGED)
    metadata = _metadata(fields, key_count)
    _refuse_no_model(file, metadata)
    alignment = _alignment(file, metadata)
    found = [_tensor(fields, index) for index in range(tensor_count)]
    data_start = -(-fields.at // alignment) * alignment
    tensors = _placed(file, found, data_start, alignment, fields.size)
    digest = hashlib.sha256(fields.header()).hexdigest()
    return Header(file, version, metadata, tensors, data_start, fields.size, digest)


def _metadata(fields: _Fields, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = fields.string(f"key {index}", LONGEST_NAME)
        if not key or not key.isprintable():
            raise CheckpointError(f"{fields.file}: key {quoted(key)} is empty or not printable", hint=DAMAGED)
        if key in metadata:
            raise CheckpointError(f"{fields.file}: the key {quoted(key)} appears more than once", hint=DAMAGED)
        (kind,) = fields.numbers("I", f"the type of {quoted(key)}")
        metadata[key] = _value(fields, kind, key)
    return metadata


def _value(fields: _Fields, kind: int, key: str) -> Any:
    if kind in _SCALARS:
        return fields.numbers(_SCALARS[kind], quoted(key))[0]
    if kind == _STRING:
        return fields.string(quoted(key))
    if kind != _ARRAY:
        raise CheckpointError(f"{fields.file}: {quoted(key)} is of type {kind}, which GGUF does not have", hint=DAMAGED)
    inner, count = fields.numbers("IQ", f"the array {quoted(key)}")
    if inner in _SCALARS:
        width = struct.calcsize(_SCALARS[inner])
        data = fields.take(count * width, f"the array {quoted(key)}")
        return np.frombuffer(data, np.dtype(_SCALARS[inner]).newbyteorder("<")).tolist()
    if inner != _STRING:
        raise CheckpointError(
            f"{fields.file}: {quoted(key)} is an array of type {inner}, which is not read", hint=DAMAGED
        )
    if count > MOST_STRINGS:
        raise CheckpointError(
            f"{fields.file}: the array {quoted(key)} has {count} strings; at most {MOST_STRINGS} are allowed",
            hint=DAMAGED,
        )
    return [fields.string(f"a string of {quoted(key)}") for _ in range(count)]


def _refuse_no_model(file: Path, metadata: Mapping[str, Any]) -> None:
    parts = metadata.get("split.count")
    if type(parts) is int and parts > 1:
        raise UnsupportedError(
            f"{file}: one of {parts} files of a model; a model in one file is read",
            hint="merge them: llama-gguf-split --merge FIRST_FILE MERGED.gguf",
        )
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedError(
            f"{file}: general.type is {shown(kind)}, not a whole model", hint="give the file of the language model"
        )
    if not isinstance(metadata.get("general.architecture"), str):
        raise CheckpointError(f"{file}: has no general.architecture", hint=DAMAGED)


def _alignment(file: Path, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(
            f"{file}: general.alignment is {shown(alignment)}; a power of two up to {MOST_ALIGNMENT} is expected",
            hint=DAMAGED,
        )
    return alignment


def _tensor(fields: _Fields, index: int) -> tuple[str, BlockType, tuple[int, ...], int, int]:
    """Read what stands about one tensor: name, type, shape, offset from the start of the data, bytes."""
    name = fields.string(f"the name of tensor {index}", LONGEST_NAME)
    if not name or not name.isprintable():
        raise CheckpointError(f"{fields.file}: tensor name {quoted(name)} is empty or not printable", hint=DAMAGED)
    where = f"tensor {quoted(name)}"
    (rank,) = fields.numbers("I", where)
    if not 0 < rank <= MOST_DIMENSIONS:
        raise CheckpointError(
            f"{fields.file}: {where} has {rank} dimensions; 1 to {MOST_DIMENSIONS} are expected", hint=DAMAGED
        )
    shape = tuple(reversed(fields.numbers(f"{rank}Q", where)))
    number, offset = fields.numbers("IQ", where)
    kind = TYPES.get(number)
    if kind is None:
        called = OTHER_TYPES.get(number, f"number {number}")
        raise UnsupportedError(
            f"{fields.file}: {where} is of type {called}; read are {', '.join(each.name for each in TYPES.values())}",
            hint="take a file of another quantization, or the model's original checkpoint",
        )
    if any(side < 1 for side in shape) or prod(shape) >= 1 << 58:
        raise CheckpointError(f"{fields.file}: {where} has shape {shown(list(shape))}", hint=DAMAGED)
    if shape[-1] % kind.elements:
        raise CheckpointError(
            f"{fields.file}: {where} has rows of {shape[-1]} numbers, which blocks of {kind.elements} ({kind.name}) "
            "do not divide",
            hint=DAMAGED,
        )
    return name, kind, shape, offset, prod(shape) // kind.elements * kind.size_bytes


def _placed(
    file: Path, found: list[tuple[str, BlockType, tuple[int, ...], int, int]], start: int, alignment: int, size: int
) -> dict[str, TensorInfo]:
    """Put tensors in the order of their bytes, and refuse those beyond the file, overlaps and holes."""
    tensors: dict[str, TensorInfo] = {}
    for name, kind, shape, offset, count in sorted(found, key=lambda each: each[3]):
        where = f"{file}: tensor {quoted(name)}"
        if name in tensors:
            raise CheckpointError(f"{where} appears more than once", hint=DAMAGED)
        if offset % alignment:
            raise CheckpointError(f"{where} begins at byte {offset}, no multiple of {alignment}", hint=DAMAGED)
        if start + offset + count > size:
            raise CheckpointError(
                f"{where}: truncated: it ends at byte {start + offset + count}, the file has {size} bytes",
                hint="the download was cut off; fetch the file again",
            )
        tensors[name] = TensorInfo(name, kind, shape, start + offset, count)
    if not tensors:
        raise CheckpointError(f"{file}: holds no tensors")
    ordered = list(tensors.values())
    if ordered[0].offset != start:
        raise CheckpointError(f"{file}: bytes {start} to {ordered[0].offset} belong to no tensor", hint=DAMAGED)
    for left, right in pairwise(ordered):
        end = left.offset + left.size_bytes
        if right.offset < end:
            raise CheckpointError(
                f"{file}: tensors {quoted(left.name)} and {quoted(right.name)} overlap at byte {right.offset}",
                hint=DAMAGED,
            )
        if right.offset - end >= alignment:
            raise CheckpointError(f"{file}: bytes {end} to {right.offset} belong to no tensor", hint=DAMAGED)
    end = ordered[-1].offset + ordered[-1].size_bytes
    if size - end >= alignment:
        raise CheckpointError(f"{file}: {size - end} bytes after the last tensor belong to none", hint=DAMAGED)
    return tensors
