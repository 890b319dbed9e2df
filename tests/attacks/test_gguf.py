"""Hostile GGUF files: each is refused in words, none costs memory, time or another exception."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from llmforge.base.errors import CheckpointError, ForgeError, UnsupportedError
from llmforge.checkpoint import gguf
from llmforge.checkpoint.gguf import architectures
from llmforge.checkpoint.gguf.header import HEADER_LIMIT_BYTES, MOST_STRINGS
from llmforge.checkpoint.quantized.gguf import grouped

from ..models.checkpoints import write_checkpoint
from ..models.gguf_files import ARRAY, F32, STRING, UINT32, tensor_info, text, value, write
from ..models.gguf_files import gguf as file_of

ARCHITECTURE = {"general.architecture": value(STRING, "llama")}
TENSOR = ("w", (2, 2), F32, bytes(16))
HUGE = 2**63


def counted(tensors: int, keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def placed(*infos: bytes, data: bytes = bytes(64)) -> bytes:
    """A file of such tensors, right but for what they state."""
    key = text("general.architecture") + ARCHITECTURE["general.architecture"]
    header = counted(len(infos), 1, key + b"".join(infos))
    return header + bytes(-len(header) % 32) + data


def info(name: str | bytes = "w", shape: tuple[int, ...] = (2, 2), kind: int = F32, offset: int = 0) -> bytes:
    return tensor_info(name, shape, kind, offset)  # type: ignore[arg-type]


def refusal(folder: Path, content: bytes) -> ForgeError:
    file = folder / "model.gguf"
    file.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises((CheckpointError, UnsupportedError)) as caught:
            gguf.read(file)
        assert tracemalloc.get_traced_memory()[1] < 20e6 + 20 * len(content)
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert str(file) in message
    assert len(message) < 1500
    assert all(line.isprintable() for line in message.split("\n"))
    return caught.value


def test_the_unharmed_file_is_read(tmp_path: Path) -> None:
    """What the attacks below start from is valid, so that they fail for the reason that they name."""
    file = tmp_path / "model.gguf"
    for version in (2, 3):
        file.write_bytes(file_of(ARCHITECTURE, [TENSOR, ("v", (3,), F32, bytes(12))], version=version))
        header = gguf.read(file)
        assert [(each.name, each.shape, each.size_bytes) for each in header.tensors.values()] == [
            ("w", (2, 2), 16),
            ("v", (3,), 12),
        ]
        assert [each.size_bytes for each in header.gaps()] == [16, 20]
    file.write_bytes(placed(info(), info("v", (4,), F32, 32)))
    assert set(gguf.read(file).tensors) == {"w", "v"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a GGUF file"),
        (b"GGUF", "truncated: the counts ends at byte 24, the file has 4 bytes"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file: it begins with b'PK"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (counted(1, HUGE), f"states {HUGE} keys"),
        (counted(HUGE, 0), f"states {HUGE} tensors"),
        (counted(2**18, 0, bytes(10)), "has no general.architecture"),
        (counted(0, 1, struct.pack("<Q", HUGE)), "key 0 has"),
        (counted(0, 1, struct.pack("<Q", 5) + b"abc"), "truncated: key 0"),
        (counted(0, 1, text("")), "is empty or not printable"),
        (counted(0, 1, text("a\x1b[2J")), "is empty or not printable"),
        (counted(0, 1, text(b"\xff\xfe")), "key 0 is not UTF-8"),
        (counted(0, 1, text("a") + struct.pack("<I", 99)), "'a' is of type 99"),
        (counted(0, 1, text("a") + struct.pack("<IQ", STRING, HUGE)), "truncated: 'a' ends at byte"),
        (counted(0, 1, text("a") + struct.pack("<IIQ", ARRAY, UINT32, 2**62)), "truncated: the array 'a' ends at"),
        (counted(0, 1, text("a") + struct.pack("<IIQ", ARRAY, STRING, MOST_STRINGS + 1)), "strings; at most"),
        (counted(0, 1, text("a") + struct.pack("<IIQ", ARRAY, STRING, 1000)), "truncated: the length of a string"),
        (counted(0, 1, text("a") + struct.pack("<IIQ", ARRAY, ARRAY, 1)), "an array of type 9"),
        (counted(0, 2, (text("a") + value(UINT32, 1)) * 2), "the key 'a' appears more than once"),
        (file_of({"a": value(UINT32, 1)}, [TENSOR]), "has no general.architecture"),
        (file_of({"general.architecture": value(UINT32, 1)}, [TENSOR]), "has no general.architecture"),
        (file_of({**ARCHITECTURE, "general.alignment": value(UINT32, 0)}, [TENSOR]), "general.alignment is 0"),
        (file_of({**ARCHITECTURE, "general.alignment": value(UINT32, 48)}, [TENSOR]), "general.alignment is 48"),
        (file_of({**ARCHITECTURE, "general.alignment": value(STRING, "32")}, [TENSOR]), 'general.alignment is "32"'),
        (file_of(ARCHITECTURE, []), "holds no tensors"),
        (placed(text("w") + struct.pack("<I", 0)), "has 0 dimensions"),
        (placed(text("w") + struct.pack("<I", 2**31)), f"has {2**31} dimensions"),
        (placed(info(shape=(0, 4))), "has shape [0, 4]"),
        (placed(info(shape=(2**40, 2**40))), "has shape"),
        (placed(info(shape=(2**20, 2**20))), "truncated: it ends at byte"),
        (placed(info(offset=HUGE)), "truncated: it ends at byte"),
        (placed(info(offset=1)), "begins at byte 1, no multiple of 32"),
        (placed(info(offset=32)), "belong to no tensor"),
        (placed(info(), info(offset=32)), "tensor 'w' appears more than once"),
        (placed(info(), info("v", (2, 2), F32, 0)), "overlap"),
        (placed(info(), data=bytes(16)) + bytes(64), "belong to none"),
        (placed(info(), info("v", (1,), F32, 64), data=bytes(96)), "belong to no tensor"),
        (placed(info("w\n")), "is empty or not printable"),
        (placed(info(b"\xff")), "the name of tensor 0 is not UTF-8"),
        (placed(info(shape=(2, 33), kind=2)), "rows of 33 numbers, which blocks of 32 (Q4_0) do not divide"),
        (placed(info(), info("v")[:-9], data=b""), "truncated"),
    ],
)  # fmt: skip
def test_a_header_that_its_bytes_do_not_bear_out_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    error = refusal(tmp_path, content)
    assert said in str(error)
    assert error.exit_code == 5


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (counted(0, 0, version=1), "GGUF version 1; little-endian files of version 2 and 3 are read"),
        (counted(0, 0, version=3 << 24), "big-endian; little-endian"),
        (placed(info(kind=39)), "is of type MXFP4; read are F32, F16,"),
        (placed(info(kind=4)), "is of type number 4; read are F32, F16,"),
        (file_of({**ARCHITECTURE, "split.count": value(UINT32, 3)}, [TENSOR]), "one of 3 files of a model"),
        (file_of({**ARCHITECTURE, "general.type": value(STRING, "adapter")}, [TENSOR]), 'general.type is "adapter"'),
    ],
)
def test_what_is_not_taken_is_told_by_name(tmp_path: Path, content: bytes, said: str) -> None:
    error = refusal(tmp_path, content)
    assert said in str(error)
    assert error.exit_code == 6
    assert error.hint


def test_a_header_beyond_the_limit_is_refused_unread(tmp_path: Path) -> None:
    """The file has the bytes that it states: 100 MB of one string, most of them a hole."""
    file = tmp_path / "model.gguf"
    with file.open("wb") as stream:
        stream.write(counted(0, 1, text("a") + struct.pack("<IQ", STRING, HEADER_LIMIT_BYTES)))
        stream.truncate(HEADER_LIMIT_BYTES + 100)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="at most"):
        gguf.read(file)
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_no_cut_and_no_flipped_bit_ends_in_another_exception(count: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", num_hidden_layers=1)
    file = tmp_path / "model.gguf"
    write(tmp_path / "hf", file)
    whole = file.read_bytes()
    start = gguf.read(file).data_start
    rng = np.random.default_rng(5)
    harmed = [whole[:cut] for cut in rng.integers(0, start, count)]
    for _ in range(3 * count):
        data = bytearray(whole)
        for at in rng.integers(0, start, rng.integers(1, 4)):
            data[at] ^= 1 << int(rng.integers(8))
        harmed.append(bytes(data))
    said = {}
    for number, content in enumerate(harmed):
        other = tmp_path / f"{number}.gguf"
        other.write_bytes(content)
        try:
            header = gguf.read(other)
            grouped(header, architectures.settings(header))
        except (CheckpointError, UnsupportedError) as error:
            said[other] = str(error)
        other.unlink()
    assert all(str(file) in message for file, message in said.items())
    assert len(said) >= 1.5 * count  # of four times as many; many flips are of a token's letters


def test_layers_without_tensors_cost_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", num_hidden_layers=1)
    file = tmp_path / "model.gguf"
    write(tmp_path / "hf", file, **{"llama.block_count": value(UINT32, 2**32 - 1)})
    with pytest.raises(CheckpointError, match="states 4294967295 layers, and holds 11 tensors"):
        architectures.settings(gguf.read(file))
