"""Hashes that are computed once: what is remembered, and what makes a file another."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from llmforge.base import hashed_files

OLD = 10**9  # seconds since 1970


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hashed_files, "_SETTLED_NS", 0)
    return tmp_path / "cache" / "llmforge" / hashed_files.FILE


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read, in the order of their hashing."""
    found: list[Path] = []
    whole = hashed_files.sha256

    def counted(file: Path) -> str:
        found.append(file)
        return whole(file)

    monkeypatch.setattr(hashed_files, "sha256", counted)
    return found


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_file_is_read_once(tmp_path: Path, cache: Path, read: list[Path]) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"1")
    other.write_bytes(b"22")
    expected = {one: digest(b"1"), other: digest(b"22")}
    assert hashed_files.all_sha256([one, other]) == (expected, None)
    assert read == [other, one]  # the largest first
    assert hashed_files.all_sha256([one, other]) == (expected, None)
    assert len(read) == 2
    assert hashed_files.all_sha256([one, other], again=True) == (expected, None)
    assert len(read) == 4
    assert cache.stat().st_size < 1000


@pytest.mark.parametrize("way", ["written", "written in place, times set back", "replaced, times set back"])
def test_what_was_changed_is_read_again(way: str, tmp_path: Path, cache: Path, read: list[Path]) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"good")
    os.utime(file, (OLD, OLD))
    hashed_files.all_sha256([file])
    time.sleep(0.02)
    if way.startswith("replaced"):
        (tmp_path / "new").write_bytes(b"evil")
        (tmp_path / "new").rename(file)
    else:
        file.write_bytes(b"evil")
    if "set back" in way:
        os.utime(file, (OLD, OLD))
    found, _ = hashed_files.all_sha256([file])
    assert found == {file: digest(b"evil")}


def test_what_changed_just_now_is_not_remembered(
    tmp_path: Path, cache: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change within one tick of the file system's clock would not show."""
    monkeypatch.setattr(hashed_files, "_SETTLED_NS", 10**12)
    (tmp_path / "file").write_bytes(b"1")
    for _ in range(2):
        assert hashed_files.all_sha256([tmp_path / "file"])[1] is None
    assert len(read) == 2
    assert not cache.exists()


def test_a_damaged_memory_is_none(tmp_path: Path, cache: Path, read: list[Path]) -> None:
    (tmp_path / "file").write_bytes(b"1")
    cache.parent.mkdir(parents=True)
    for content in (b"{", b"[]", b"\xff", b'{"x": 1}', b"[" * 100_000):
        cache.write_bytes(content)
        assert hashed_files.all_sha256([tmp_path / "file"])[0] == {tmp_path / "file": digest(b"1")}
    assert len(read) == 5


def test_where_nothing_can_be_remembered_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(hashed_files, "_SETTLED_NS", 0)
    (tmp_path / "file").write_bytes(b"1")
    found, why = hashed_files.all_sha256([tmp_path / "file"])
    assert found == {tmp_path / "file": digest(b"1")}
    assert "Not a directory" in str(why)


def test_only_so_many_are_remembered(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed_files, "MOST", 3)
    for number in range(9):
        (tmp_path / str(number)).write_bytes(b"1")
        hashed_files.all_sha256([tmp_path / str(number)])
    assert cache.read_text().count("\n") == 4


def test_links_and_pipes_equal_no_hash(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    found, _ = hashed_files.all_sha256([tmp_path / "link", tmp_path / "pipe"])
    assert set(found.values()) == {"not a regular file"}
