"""Hostile safetensors files: each is refused in words, none costs memory, time or another exception."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from llmforge.base.errors import CheckpointError
from llmforge.checkpoint import safetensors_file
from llmforge.checkpoint.safetensors_file import (
    HEADER_LIMIT_BYTES,
    NON_FINITE,
    SMALL_BYTES,
    TensorEntry,
    digest_weights,
    read_header,
    read_small,
)

from ..models.checkpoints import safetensors_bytes


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def read(folder: Path, content: bytes) -> dict[str, TensorEntry]:
    file = folder / "model.safetensors"
    file.write_bytes(content)
    return read_header(file)


def refusal(folder: Path, content: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(folder, content)
    message = str(caught.value)
    assert str(folder / "model.safetensors") in message
    assert len(message) < 3000
    assert message.isprintable() or "\n" in message
    return message


def test_the_unharmed_file_is_read(tmp_path: Path) -> None:
    """What the attacks below start from is valid, so that they fail for the reason that they name."""
    tensors = read(tmp_path, safetensors_bytes({"__metadata__": {"format": "pt"}, "w": entry()}, bytes(8)))
    assert [(t.name, t.shape, t.size_bytes) for t in tensors.values()] == [("w", (2,), 8)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "truncated: 0 bytes"),
        (b"\x02\0\0\0", "truncated: 4 bytes"),
        (b"\xff" * 8 + b"{}", f"header of {2**64 - 1} bytes, at most {HEADER_LIMIT_BYTES} are allowed"),
        ((HEADER_LIMIT_BYTES + 1).to_bytes(8, "little") + b"{}", f"at most {HEADER_LIMIT_BYTES} are allowed"),
        ((3).to_bytes(8, "little") + b"{}", "truncated: the header has 3 bytes, the file ends after 2 of them"),
        (bytes(8), "must begin with '{', begins with b''"),
        (safetensors_bytes(b" {}"), "must begin with '{', begins with b' '"),
        (safetensors_bytes(b"[]"), "must begin with '{', begins with b'['"),
        (safetensors_bytes(b"{}{}"), "not valid JSON"),
        (safetensors_bytes(b"{"), "not valid JSON"),
        (safetensors_bytes(b'{"\xff": 1}'), "not valid JSON: 'utf-8' codec can't decode"),
        (safetensors_bytes(b'{"a": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"), "nested too deeply"),
        (safetensors_bytes(b'{"a": ' * 1_000_000), "nested too deeply"),
        (safetensors_bytes(b'{"a": ' + b"9" * 10_000 + b"}"), "not valid JSON"),
        (b"<!DOCTYPE html><html>not found</html>", "not a safetensors file"),
        (b"PK\x03\x04" + bytes(100), "give a header of 67324752 bytes, at most 32000000"),
    ],
    ids=lambda value: value[:24].decode("latin1") if isinstance(value, bytes) else None,
)
def test_header(tmp_path: Path, content: bytes, said: str) -> None:
    assert said in refusal(tmp_path, content)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "needs exactly the keys dtype, shape and data_offsets"),
        ([], "needs exactly the keys dtype, shape and data_offsets"),
        ({"dtype": "F32"}, "needs exactly the keys dtype, shape and data_offsets"),
        (entry(extra=1), "needs exactly the keys dtype, shape and data_offsets"),
        (entry(dtype="F33"), "dtype 'F33' is unknown; allowed are BOOL, U8"),
        (entry(dtype="F4"), "dtype 'F4' is unknown"),
        (entry(dtype=["F32"]), "dtype ['F32'] is unknown"),
        (entry(dtype={}), "dtype {} is unknown"),
        (entry(shape=[-2]), "shape must be a list of at most 64 integers from 0"),
        (entry(shape=[2.0]), "shape must be a list"),
        (entry(shape=[True, 2]), "shape must be a list"),
        (entry(shape=["2"]), "shape must be a list"),
        (entry(shape="2"), "shape must be a list"),
        (entry(shape=[1] * 65), "shape must be a list of at most 64"),
        (entry(shape=[2**63]), "shape must be a list"),
        (entry(shape=[2**62, 4]), "overflows 64 bits"),  # 2**64 elements: 0 in 64-bit arithmetic
        (entry(shape=[2**32, 2**32, 0], offsets=[0, 0]), "overflows 64 bits"),
        (entry(shape=[2**61 + 2]), "overflows 64 bits"),  # 2**63 + 8 bytes: 8 in 63-bit arithmetic
        (entry(shape=[3]), "F32 of shape [3] takes 12 bytes, its data_offsets [0, 8] hold 8"),
        (entry(shape=[]), "takes 4 bytes"),
        (entry(offsets=[-8, 0]), "data_offsets must be two integers"),
        (entry(offsets=[0, 8.0]), "data_offsets must be two integers"),
        (entry(offsets=[0]), "data_offsets must be two integers"),
        (entry(offsets=[False, 8]), "data_offsets must be two integers"),
        (entry(offsets={"a": 1}), "data_offsets must be two integers"),
        (entry(offsets=[8, 0]), "data_offsets [8, 0] run backwards"),
        (entry(offsets=[8, 16]), "truncated: it ends at byte"),
        (entry(offsets=[0, 2**62]), "truncated: it ends at byte"),
    ],
    ids=repr,
)
def test_entry(tmp_path: Path, value: object, said: str) -> None:
    message = refusal(tmp_path, safetensors_bytes({"w": value}, bytes(8)))
    assert "tensor 'w'" in message
    assert said in message


@pytest.mark.parametrize("name", ["", "\x1b[31mred", "a\nb", "\ud800", "\u202eevil", "a\0b"])
def test_tensor_name(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path, safetensors_bytes({name: entry()}, bytes(8)))
    assert "is empty or not printable" in message
    assert name not in message or not name


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"a": entry(offsets=[0, 8]), "b": entry(offsets=[4, 12])}, "tensors 'a' and 'b' overlap at byte"),
        ({"a": entry(offsets=[0, 8]), "b": entry(offsets=[0, 8])}, "tensors 'a' and 'b' overlap at byte"),
        ({"a": entry(offsets=[0, 12], shape=[3]), "b": entry(offsets=[4, 8], shape=[1])}, "'a' and 'b' overlap"),
        ({"a": entry(shape=[1], offsets=[0, 4]), "b": entry(shape=[1], offsets=[8, 12])}, "belong to no tensor"),
        ({"a": entry(offsets=[4, 12])}, "after the header, belong to no tensor"),
        ({"a": entry(offsets=[0, 8])}, "4 trailing bytes after the last tensor belong to no tensor"),
        ({}, "12 trailing bytes"),
    ],
)
def test_layout(tmp_path: Path, header: object, said: str) -> None:
    assert said in refusal(tmp_path, safetensors_bytes(header, bytes(12)))


def test_same_name_twice(tmp_path: Path) -> None:
    one = json.dumps(entry()).encode()
    content = safetensors_bytes(b'{"w": ' + one + b', "w": ' + one + b"}", bytes(8))
    assert 'the key "w" appears more than once' in refusal(tmp_path, content)


def test_truncated_at_every_byte(tmp_path: Path) -> None:
    whole = save({"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.float16)})
    assert len(read(tmp_path, whole)) == 2
    for length in range(len(whole)):
        refusal(tmp_path, whole[:length])
    assert "1 trailing bytes" in refusal(tmp_path, whole + b"\0")


def test_empty_tensors_and_scalars_are_no_attack(tmp_path: Path) -> None:
    header = {
        "empty": entry(shape=[0, 7], offsets=[0, 0]), "scalar": entry(shape=[], offsets=[0, 4]),
        "last": entry(shape=[0], offsets=[4, 4]),
    }  # fmt: skip
    tensors = read(tmp_path, safetensors_bytes(header, bytes(4)))
    assert {name: math.prod(t.shape) for name, t in tensors.items()} == {"empty": 0, "scalar": 1, "last": 0}
    digest_weights(tmp_path / "model.safetensors", list(tensors.values()), lambda count: None)


def test_fifo_does_not_block(tmp_path: Path) -> None:
    fifo = tmp_path / "model.safetensors"
    os.mkfifo(fifo)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(fifo)
    (tmp_path / "link").symlink_to(fifo)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_small(tmp_path / "link")


def test_link_loop(tmp_path: Path) -> None:
    loop = tmp_path / "model.safetensors"
    loop.symlink_to(loop)
    with pytest.raises(CheckpointError, match="a symbolic link to"):
        read_header(loop)


def test_sparse_giant_is_not_loaded(tmp_path: Path) -> None:
    """A file of 1 TiB without content behind its header opens at once: only the header is read."""
    file = tmp_path / "model.safetensors"
    size = 1 << 40
    file.write_bytes(safetensors_bytes({"w": entry(shape=[size], offsets=[0, size], dtype="U8")}))
    os.truncate(file, file.stat().st_size + size)
    began = time.monotonic()
    assert read_header(file)["w"].size_bytes == size
    assert time.monotonic() - began < 1
    with pytest.raises(CheckpointError, match=f"at most {SMALL_BYTES} are allowed"):
        read_small(file)


VALID = save(
    {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.int8), "c": np.zeros((0, 2), np.float16)},
    metadata={"format": "pt"},
)
HEADER_END = 8 + int.from_bytes(VALID[:8], "little")
PLACES = st.integers(0, HEADER_END - 1)
MUTATIONS = st.lists(st.tuples(PLACES, st.integers(0, 255)), min_size=1, max_size=4)
JSON_MUTATIONS = st.lists(st.tuples(PLACES, st.sampled_from(b'0129-.e[]{}",: ')), max_size=4)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["F32", "U8", "dtype"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "w", "__metadata__"]), inner)
    ),
    max_leaves=12,
)


def read_or_refuse(file: Path) -> dict[str, TensorEntry] | None:
    """Read header and values; None where the file is refused. Any other exception is a failure."""
    try:
        tensors = read_header(file)
        digest_weights(file, list(tensors.values()), lambda count: None)
    except CheckpointError:
        return None
    return tensors


@settings(max_examples=400, deadline=None)
@given(mutations=MUTATIONS, json_mutations=JSON_MUTATIONS)
def test_mutated_header(
    tmp_path_factory: pytest.TempPathFactory, mutations: list[tuple[int, int]], json_mutations: list[tuple[int, int]]
) -> None:
    """Whatever bytes of a valid header change: its tensors fill the file exactly, or it is refused."""
    content = bytearray(VALID)
    for place, byte in mutations + json_mutations:
        content[place] = byte
    file = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    file.write_bytes(content)
    tensors = read_or_refuse(file)
    if tensors is None:
        return
    for tensor in tensors.values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.size_bytes <= len(content)
        assert math.prod(tensor.shape) * tensor.dtype.bitwidth == 8 * tensor.size_bytes
    start = 8 + int.from_bytes(content[:8], "little")
    assert sum(tensor.size_bytes for tensor in tensors.values()) == len(content) - start


@settings(max_examples=200, deadline=None)
@given(header=JSON_VALUES, data=st.binary(max_size=16))
def test_any_json_as_header(tmp_path_factory: pytest.TempPathFactory, header: object, data: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    file.write_bytes(safetensors_bytes(header, data))
    tensors = read_or_refuse(file)
    assert tensors is None or sum(tensor.size_bytes for tensor in tensors.values()) == len(data)


@pytest.mark.parametrize("name", [name for name in NON_FINITE if NON_FINITE[name].word in ("<u1", "<u2")])
def test_absence_is_seen_for_exactly_the_finite_words(name: str) -> None:
    """Each word alone, and beside words of both signs; a format for which it cannot be told says nothing."""
    bits = NON_FINITE[name]
    every = np.arange(1 << 8 * np.dtype(bits.word).itemsize, dtype=bits.word)
    holds = (every & bits.mask) == bits.pattern
    finite = every[~holds]
    assert not bits.absent(every)
    if bits.absent(finite[:1]):
        assert bits.absent(finite)
        beside = np.array([finite[0], finite[-1], 0], every.dtype)
        assert not any(bits.absent(np.append(beside, word)) for word in every[holds])


@pytest.mark.parametrize("chunk", [8, 24, 64, 1 << 20])
@pytest.mark.parametrize("place", [None, 0, 7, 8, 29])
def test_every_read_is_hashed_and_looked_at(
    chunk: int, place: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "CHUNK_BYTES", chunk)
    large = np.arange(30, dtype=np.float32).reshape(3, 10)
    if place is not None:
        large.flat[place] = np.inf
    content = save({"a": np.ones(3, np.float16), "b": large, "c": np.zeros(0, np.int8), "d": np.ones(5, np.float64)})
    tensors = read(tmp_path, content)
    seen: list[int] = []
    if place is None:
        found = digest_weights(tmp_path / "model.safetensors", list(tensors.values()), seen.append)
        assert found == hashlib.sha256(content).hexdigest()
        assert sum(seen) == len(content)
        assert max(seen[1:]) <= chunk
        return
    with pytest.raises(CheckpointError, match=rf"tensor 'b' holds infinity at \[{place // 10}, {place % 10}\]"):
        digest_weights(tmp_path / "model.safetensors", list(tensors.values()), seen.append)
