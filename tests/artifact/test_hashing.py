"""Files that are hashed while a build goes on: the hash is of what was proven and measured, or nothing is sealed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llmforge.artifact import Hashing
from llmforge.base import hashed_files
from llmforge.base.errors import VerificationError

CONTENT = bytes(range(256)) * 50_000  # more than is read at once


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "data").write_bytes(CONTENT)
    return tmp_path / "engine" / "data"


def test_the_hash_is_that_of_the_file(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Hashing(tmp_path) as hashing:
        hashing.begin(file)
        assert hashing.sha256(file) == hashlib.sha256(CONTENT).hexdigest()
        monkeypatch.setattr(hashed_files, "sha256", None)
        hashing.begin_content()
        assert hashing.sha256(file) == hashlib.sha256(CONTENT).hexdigest()  # once
        hashing.require_unchanged(tmp_path)


def test_content_that_comes_with_the_evidence_is_refused(tmp_path: Path, file: Path) -> None:
    with Hashing(tmp_path) as hashing:
        hashing.begin_content()
        (tmp_path / "report").mkdir()
        (tmp_path / "report" / "report.md").write_bytes(b"PASS")
        hashing.begin_evidence()
        hashing.require_unchanged(tmp_path)
        file.with_name("more").write_bytes(b"")
        hashing.begin_evidence()
        with pytest.raises(VerificationError, match="engine/more: was written after the build had written"):
            hashing.require_unchanged(tmp_path)


def zero(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.write(bytes(100))


def zero_and_hide(file: Path) -> None:
    before = file.stat()
    zero(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(file: Path) -> None:
    (other := file.with_name("other")).write_bytes(CONTENT)
    other.replace(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (zero, "engine/data: was changed after the build had written the artifact"),
        (zero_and_hide, "engine/data: was changed"),
        (replace, "engine/data: was changed"),
        (Path.unlink, "engine/data: was removed"),
        (lambda file: file.with_name("more").write_bytes(b""), "engine/more: was written"),
    ],
)
def test_what_changes_meanwhile_is_refused(
    tmp_path: Path, file: Path, change: Callable[[Path], object], said: str
) -> None:
    with Hashing(tmp_path) as hashing:
        hashing.begin_content()
        hashing.sha256(file)
        change(file)
        with pytest.raises(VerificationError, match=said):
            hashing.require_unchanged(tmp_path)
        with pytest.raises(VerificationError, match=said):
            _ = [hashing.sha256(each) for each in (file, *file.parent.iterdir())]


def test_a_file_that_changes_while_it_is_hashed_is_refused(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = hashed_files.sha256
    monkeypatch.setattr(hashed_files, "sha256", lambda file: (zero(file), whole(file))[1])
    with Hashing(tmp_path) as hashing:
        hashing.begin(file)
        with pytest.raises(VerificationError, match="was changed"):
            hashing.sha256(file)


def test_a_link_changes_nothing(tmp_path: Path, file: Path) -> None:
    with Hashing(tmp_path) as hashing:
        hashing.begin(file)
        hashing.sha256(file)
        (tmp_path / ".linked").hardlink_to(file)
        assert hashing.sha256(file) == hashlib.sha256(CONTENT).hexdigest()


def test_files_are_found_in_the_folder_that_theirs_became(tmp_path: Path) -> None:
    folder, final = tmp_path / "staged", tmp_path / "final"
    folder.mkdir()
    (folder / "data").write_bytes(CONTENT)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "entry").write_bytes(b"")  # no content, and gone before anything is sealed
    with Hashing(folder) as hashing:
        hashing.begin_content()
        (folder / ".cache" / "entry").unlink()
        hashing.sha256(folder / "data")
        folder.rename(final)
        hashing.require_unchanged(final)
        zero(final / "data")
        with pytest.raises(VerificationError, match=r"^data: was changed"):
            hashing.require_unchanged(final)


def test_evidence_is_held_to_what_was_written_until_it_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (report := tmp_path / "report" / "report.md").write_text("PASS")
    with Hashing(tmp_path) as hashing:
        hashing.begin_content()
        assert hashing.sha256(report) == hashlib.sha256(b"PASS").hexdigest()
        zero(report)
        hashing.require_unchanged(tmp_path)  # the record of it tells
        with pytest.raises(VerificationError, match=r"report/report\.md: was changed"):
            hashing.sha256(report)
