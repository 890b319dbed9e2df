"""Read safetensors files strictly: headers first, tensor bytes only in one streaming walk.

The format (https://github.com/huggingface/safetensors#format): 8 bytes, the little-endian length N of the header;
N bytes of UTF-8 JSON, an object of name → {dtype, shape, data_offsets}; then the tensors' bytes, row-major and
little-endian, without holes. A file from anywhere is read here, so everything that it states is checked against
the bytes that are there, and what does not hold is a `CheckpointError`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from itertools import cycle, pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmforge.base import small_file
from llmforge.base.errors import CheckpointError

if TYPE_CHECKING:
    import onnx_ir as ir

PREFIX_BYTES = 8  # the header's length, uint64
HEADER_LIMIT_BYTES = 32_000_000  # of 250,000 tensors; safetensors' own MAX_HEADER_SIZE is 100,000,000
SMALL_BYTES = 64 << 20  # of a file without weights: the largest tokenizers have 35 MB
RANK_LIMIT = 64  # numpy's NPY_MAXDIMS
# One read: stays in the L3 cache between hashing and the check of its values. Between two, a thread has to wait for its
# turn in the interpreter, beside one that imports up to 5 ms.
CHUNK_BYTES = 1 << 23
DAMAGED = "the file is damaged, or was edited: fetch the checkpoint again"
TOO_LARGE = "files beside the weights are smaller than that; fetch the checkpoint again"
DENIED = "check the permissions of the checkpoint"
NAMES_SHOWN = 3  # names that a message lists before it counts the rest
LFS_POINTER = b"version https://git-lfs"

# safetensors' dtypes of whole bytes, and the names of onnx-ir for them; F4 and F6 are packed and have no element
# addresses.
DTYPES: Mapping[str, str] = {
    "BOOL": "BOOL",
    "U8": "UINT8",
    "I8": "INT8",
    "U16": "UINT16",
    "I16": "INT16",
    "U32": "UINT32",
    "I32": "INT32",
    "U64": "UINT64",
    "I64": "INT64",
    "F8_E4M3": "FLOAT8E4M3FN",
    "F8_E4M3FNUZ": "FLOAT8E4M3FNUZ",
    "F8_E5M2": "FLOAT8E5M2",
    "F8_E5M2FNUZ": "FLOAT8E5M2FNUZ",
    "F8_E8M0": "FLOAT8E8M0",
    "F16": "FLOAT16",
    "BF16": "BFLOAT16",
    "F32": "FLOAT",
    "F64": "DOUBLE",
    "C64": "COMPLEX64",
}


@dataclass(frozen=True)
class NonFinite:
    """The bit pattern of NaN and infinity: `word & mask == pattern` on unsigned little-endian words."""

    word: str
    mask: int
    pattern: int

    def absent(self, words: NDArray[np.unsignedinteger[Any]]) -> bool:
        """Say whether it is seen to be in none of `words` without an array of results: by the largest of each sign.

        Where it is all bits of the exponent, everything from there on, up to the sign, is NaN or infinity.
        """
        sign = 1 << (8 * words.itemsize - 1)
        if not words.size:
            return True
        if self.mask != self.pattern or self.mask >= sign:
            return False
        positive = words.view(self.word.replace("u", "i")).max()
        return int(positive) < self.pattern and int(words.max()) < sign | self.pattern


# IEEE 754: all exponent bits set. 8-bit formats: OCP OFP8 and MX 1.0 (E4M3FN, E8M0), and Graphcore's FNUZ proposal.
NON_FINITE: Mapping[str, NonFinite] = {
    "DOUBLE": NonFinite("<u8", 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000),
    "FLOAT": NonFinite("<u4", 0x7F80_0000, 0x7F80_0000),
    "COMPLEX64": NonFinite("<u4", 0x7F80_0000, 0x7F80_0000),
    "FLOAT16": NonFinite("<u2", 0x7C00, 0x7C00),
    "BFLOAT16": NonFinite("<u2", 0x7F80, 0x7F80),
    "FLOAT8E4M3FN": NonFinite("<u1", 0x7F, 0x7F),
    "FLOAT8E5M2": NonFinite("<u1", 0x7C, 0x7C),
    "FLOAT8E4M3FNUZ": NonFinite("<u1", 0xFF, 0x80),
    "FLOAT8E5M2FNUZ": NonFinite("<u1", 0xFF, 0x80),
    "FLOAT8E8M0": NonFinite("<u1", 0xFF, 0xFF),
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `size_bytes` bytes of `file` (absolute path) from byte `offset` of the file on."""

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]
    file: Path
    offset: int
    size_bytes: int


def damaged(entry: TensorEntry, what: str) -> CheckpointError:
    """Say what is wrong with a tensor of a file: "… tensor 'a.g_idx' `what`"."""
    return CheckpointError(f"{entry.file}: tensor {entry.name!r} {what}", hint=DAMAGED)


def listed(names: Sequence[str]) -> str:
    """Quote the first few names and count the rest, for a message."""
    shown = ", ".join(repr(name) for name in names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"


def read_small(file: Path, limit_bytes: int = SMALL_BYTES) -> bytes:
    """Read a file that holds no weights: configuration, tokenizer, index.

    Raises:
        CheckpointError: it is missing, no regular file, not readable, or larger than `limit_bytes`.
    """
    _refuse_irregular(file)
    data = small_file.read(file, limit_bytes, error=CheckpointError, hint=DENIED, smaller=TOO_LARGE)
    if data.startswith(LFS_POINTER):
        raise _lfs_pointer(file)
    return data


def parse_json(data: bytes, where: Path | str, *, unique_keys: bool = False) -> dict[str, Any]:
    """Parse a JSON object out of foreign bytes; `where` names them in the message.

    Raises:
        CheckpointError: not UTF-8, not JSON, nested too deeply, not an object, or, with `unique_keys`, a key twice.
    """
    value = small_file.parse_json(data, where, error=CheckpointError, hint=DAMAGED, unique_keys=unique_keys)
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: must hold a JSON object, holds {type(value).__name__}", hint=DAMAGED)
    return value


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Read the header of one safetensors file: its tensors by name, in the order of their bytes.

    Raises:
        CheckpointError: the file is not safetensors, or states what its bytes do not bear out.
    """
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = _header_length(stream.read(PREFIX_BYTES + len(LFS_POINTER)), size, file)
        stream.seek(PREFIX_BYTES)
        raw = _read(stream, length, file)
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{file}: the safetensors header must begin with '{{', begins with {raw[:1]!r}")
    header = parse_json(raw, f"{file} (safetensors header)", unique_keys=True)
    header.pop("__metadata__", None)
    data_start = PREFIX_BYTES + length
    entries = [_entry(name, value, file, data_start, size) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.size_bytes))
    _check_layout(entries, file, data_start, size)
    return {entry.name: entry for entry in entries}


def digest_weights(file: Path, entries: Sequence[TensorEntry], advance: Callable[[int], None]) -> str:
    """Hash a whole safetensors file and look at every value in the same walk, at once; memory stays at two chunks.

    `entries` are all tensors of `file`; `advance` gets the number of bytes of each read.

    Returns: SHA-256 of the file, hexadecimal.

    Raises:
        CheckpointError: a floating-point tensor holds NaN or infinity, or the file changed since it was opened.
    """
    digest, hashed = hashlib.sha256(), None
    with open_regular(file) as stream, ThreadPoolExecutor(1, "digest") as beside:
        ordered = sorted(entries, key=lambda entry: entry.offset)
        data_start = ordered[0].offset if ordered else os.fstat(stream.fileno()).st_size
        for chunk in _chunks(stream, data_start, file):
            digest.update(chunk)
            advance(len(chunk))
        longest = min(CHUNK_BYTES, sum(entry.size_bytes for entry in ordered))
        buffers = cycle([memoryview(bytearray(longest)) for _ in range(2)])  # one is read into, the other is hashed
        for pieces in _pieces(ordered):
            count = sum(size for _, _, size in pieces)
            chunk = _filled(next(buffers)[:count], stream, file)
            if hashed is not None:
                hashed.result()
            hashed = beside.submit(digest.update, chunk)
            at = 0
            for entry, done, size in pieces:
                _refuse_non_finite(entry, chunk[at : at + size], done)
                at += size
            advance(count)
        if hashed is not None:
            hashed.result()
        if stream.read(1):
            raise _changed(file)
    return digest.hexdigest()


def _pieces(entries: Sequence[TensorEntry]) -> Iterator[list[tuple[TensorEntry, int, int]]]:
    """Divide tensors that follow one another into reads of at most CHUNK_BYTES: tensor, first byte of it, bytes.

    What is larger than that has reads of its own, so that no element is divided.
    """
    together: list[tuple[TensorEntry, int, int]] = []
    size = 0
    for entry in entries:
        if together and size + entry.size_bytes > CHUNK_BYTES:
            yield together
            together, size = [], 0
        if entry.size_bytes > CHUNK_BYTES:
            for at in range(0, entry.size_bytes, CHUNK_BYTES):
                yield [(entry, at, min(CHUNK_BYTES, entry.size_bytes - at))]
        else:
            together.append((entry, 0, entry.size_bytes))
            size += entry.size_bytes
    if together:
        yield together


def data_type(name: str) -> ir.DataType:
    """Return a dtype of onnx-ir by its name; onnx-ir is imported where weights are."""
    import onnx_ir as ir

    return ir.DataType[name]


def external(entry: TensorEntry) -> ir.ExternalTensor:
    """Map a tensor; its bytes are read when it is.

    The path is absolute and `base_dir` empty, because onnx-ir refuses symbolic and hard links below a `base_dir`.
    """
    import onnx_ir as ir

    return ir.ExternalTensor(
        str(entry.file), entry.offset, entry.size_bytes, entry.dtype, shape=ir.Shape(entry.shape), name=entry.name
    )


def same_bytes(left: TensorEntry, right: TensorEntry) -> bool:
    """Tell whether two tensors have equal dtype, shape and bytes; reads up to the first difference."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    with open_regular(left.file) as a, open_regular(right.file) as b:
        a.seek(left.offset)
        b.seek(right.offset)
        pairs = zip(_chunks(a, left.size_bytes, left.file), _chunks(b, right.size_bytes, right.file), strict=True)
        return all(x == y for x, y in pairs)


def _refuse_irregular(file: Path) -> None:
    if not file.is_file():  # follows symlinks, which Hub snapshots are made of; a FIFO would block
        if file.exists():
            raise CheckpointError(f"{file}: not a regular file", hint=DAMAGED)
        what = f"a symbolic link to {file.readlink()}, which is missing" if file.is_symlink() else "no such file"
        raise CheckpointError(
            f"{file}: {what}", hint="fetch the checkpoint again; complete files are not downloaded again"
        )


def open_regular(file: Path) -> FileIO:
    """Open a regular file to read its bytes.

    Raises:
        CheckpointError: it is none, or cannot be read.
    """
    _refuse_irregular(file)
    try:
        return file.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}", hint=DENIED) from error


def _header_length(start: bytes, size: int, file: Path) -> int:
    if start.startswith(LFS_POINTER):
        raise _lfs_pointer(file)
    if len(start) < PREFIX_BYTES:
        raise CheckpointError(
            f"{file}: truncated: {size} bytes, a safetensors file has at least {PREFIX_BYTES + 2}", hint=DAMAGED
        )
    length = int.from_bytes(start[:PREFIX_BYTES], "little")
    if length > HEADER_LIMIT_BYTES:
        raise CheckpointError(
            f"{file}: not a safetensors file: its first 8 bytes give a header of {length} bytes, "
            f"at most {HEADER_LIMIT_BYTES} are allowed"
        )
    if length > size - PREFIX_BYTES:
        raise CheckpointError(
            f"{file}: truncated: the header has {length} bytes, the file ends after {size - PREFIX_BYTES} of them",
            hint="the download was cut off; fetch the file again",
        )
    return length


def _entry(name: str, value: object, file: Path, data_start: int, size: int) -> TensorEntry:
    """Check one entry of the header; `size` is that of the file."""
    import onnx_ir as ir  # here, because configurations are read where nothing is built, too

    if not name or not name.isprintable():  # refuses lone surrogates and terminal control codes, too
        raise CheckpointError(f"{file}: tensor name {name!r} is empty or not printable")
    where = f"{file}: tensor {name!r}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: needs exactly the keys dtype, shape and data_offsets")
    known = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if known is None:
        raise CheckpointError(f"{where}: dtype {value['dtype']!r} is unknown; allowed are {', '.join(DTYPES)}")
    shape = value["shape"]
    if not isinstance(shape, list) or len(shape) > RANK_LIMIT or not all(_is_count(dim) for dim in shape):
        raise CheckpointError(
            f"{where}: shape must be a list of at most {RANK_LIMIT} integers from 0 to 2**63 - 1, is {_cut(shape)}"
        )
    offsets = value["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise CheckpointError(f"{where}: data_offsets must be two integers ≥ 0, is {_cut(offsets)}")
    begin, end = offsets
    if begin > end:
        raise CheckpointError(f"{where}: data_offsets [{begin}, {end}] run backwards")
    if data_start + end > size:
        raise CheckpointError(
            f"{where}: truncated: it ends at byte {data_start + end}, the file has {size} bytes",
            hint="the download was cut off; fetch the file again",
        )
    dtype = ir.DataType[known]
    item_bytes = dtype.bitwidth // 8
    if prod(max(dim, 1) for dim in shape) * item_bytes >= 1 << 63:  # numpy cannot even name such an empty array
        raise CheckpointError(f"{where}: shape {_cut(shape)} overflows 64 bits")
    needed = prod(shape) * item_bytes
    if needed != end - begin:
        raise CheckpointError(
            f"{where}: {value['dtype']} of shape {shape} takes {needed} bytes, "
            f"its data_offsets [{begin}, {end}] hold {end - begin}"
        )
    return TensorEntry(name, dtype, tuple(shape), file, data_start + begin, end - begin)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _check_layout(entries: Sequence[TensorEntry], file: Path, data_start: int, size: int) -> None:
    """Refuse overlaps, holes and trailing bytes; `entries` in the order of their offsets."""
    for left, right in pairwise(entries):
        end = left.offset + left.size_bytes
        if right.offset < end:
            raise CheckpointError(f"{file}: tensors {left.name!r} and {right.name!r} overlap at byte {right.offset}")
        if right.offset > end:
            raise CheckpointError(
                f"{file}: bytes {end} to {right.offset}, between tensors {left.name!r} and {right.name!r}, "
                "belong to no tensor"
            )
    start = entries[0].offset if entries else data_start
    end = entries[-1].offset + entries[-1].size_bytes if entries else data_start
    if start > data_start:
        raise CheckpointError(f"{file}: bytes {data_start} to {start}, after the header, belong to no tensor")
    if end < size:
        raise CheckpointError(f"{file}: {size - end} trailing bytes after the last tensor belong to no tensor")


def _chunks(stream: FileIO, count: int, file: Path) -> Iterator[memoryview]:
    """Read the next `count` bytes; each chunk is valid until the next one, all but the last have CHUNK_BYTES."""
    buffer = memoryview(bytearray(min(count, CHUNK_BYTES)))
    while count:
        chunk = _filled(buffer[: min(count, CHUNK_BYTES)], stream, file)
        count -= len(chunk)
        yield chunk


def _filled(chunk: memoryview, stream: FileIO, file: Path) -> memoryview:
    filled = 0
    while filled < len(chunk):
        got = stream.readinto(chunk[filled:])
        if not got:
            raise _changed(file)
        filled += got
    return chunk


def _read(stream: FileIO, count: int, file: Path) -> bytes:
    return b"".join(bytes(chunk) for chunk in _chunks(stream, count, file))


def _lfs_pointer(file: Path) -> CheckpointError:
    return CheckpointError(
        f"{file}: a Git LFS pointer, not the file it points to", hint="run `git lfs pull` in that folder"
    )


def _changed(file: Path) -> CheckpointError:
    return CheckpointError(f"{file}: changed its size while it was being read", hint="is it still being downloaded?")


def _refuse_non_finite(entry: TensorEntry, chunk: memoryview, done_bytes: int) -> None:
    bits = NON_FINITE.get(entry.dtype.name)
    if bits is None:
        return
    words = np.frombuffer(chunk, bits.word)
    if bits.absent(words):
        return
    hit: NDArray[np.bool_] = (words & words.dtype.type(bits.mask)) == bits.pattern
    if not hit.any():
        return
    first = int(hit.argmax()) * words.itemsize
    dtype = entry.dtype.numpy()
    element = (done_bytes + first) // dtype.itemsize
    start = element * dtype.itemsize - done_bytes
    value = np.frombuffer(chunk[start : start + dtype.itemsize], dtype)[0]
    with np.errstate(invalid="ignore"):  # ml_dtypes raises the flag on a signalling NaN
        kind = "NaN" if np.isnan(value) else "infinity"
    place = [int(index) for index in np.unravel_index(element, entry.shape)]
    raise CheckpointError(
        f"{entry.file}: tensor {entry.name!r} holds {kind} at {place}; weights must be finite",
        hint="the file is damaged or the training diverged: compare its SHA-256 with the publisher's",
    )
