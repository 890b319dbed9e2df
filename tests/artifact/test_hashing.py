"""Files that are hashed while a build goes on: the hash is of what they hold at the end."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from llmforge.artifact import Hashing
from llmforge.base import hashed_files

CONTENT = bytes(range(256)) * 50_000  # more than is read at once


def test_the_hash_is_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "data"
    file.write_bytes(CONTENT)
    with Hashing() as hashing:
        hashing.begin(file)
        assert hashing.sha256(file) == hashlib.sha256(CONTENT).hexdigest()
        monkeypatch.setattr(hashed_files, "sha256", None)
        assert hashing.sha256(file) == hashlib.sha256(CONTENT).hexdigest()  # once


def test_what_was_written_meanwhile_counts(tmp_path: Path) -> None:
    file, other = tmp_path / "data", tmp_path / "other"
    file.write_bytes(CONTENT)
    other.write_bytes(b"")
    with Hashing() as hashing:
        hashing.begin(file)
        hashing.sha256(file)
        with file.open("ab") as stream:
            stream.write(b"more")
        assert hashing.sha256(file) == hashlib.sha256(CONTENT + b"more").hexdigest()
        assert hashing.sha256(other) == hashlib.sha256().hexdigest()  # never begun


def test_a_file_that_is_gone_is_said_by_who_asks(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(CONTENT)
    with Hashing() as hashing:
        hashing.begin(file)
        hashing.sha256(file)
        file.unlink()
        with pytest.raises(FileNotFoundError):
            hashing.sha256(file)
