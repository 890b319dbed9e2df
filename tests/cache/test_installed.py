"""Which code of installed packages an entry depends on: their contents, however often they are touched."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmforge.cache import installed


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package as it is installed, and the only one that counts."""
    home = tmp_path / "site" / "sample_models"
    for path in ("__init__.py", "models/llama/modeling.py", "kernels.so", "tests/test_x.py", "data.txt"):
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text("x = 1\n")
    (home.parent / "sample_models.libs").mkdir()
    (home.parent / "sample_models.libs" / "libblas.so.3").write_text("1")
    monkeypatch.syspath_prepend(str(home.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield home
    assert "sample_models" not in sys.modules  # it is looked at, not run


def digest() -> str:
    return installed.digest(("sample_models",))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    whole = installed.sha256
    monkeypatch.setattr(installed, "sha256", lambda file: (found.append(file.name), whole(file))[1])
    return found


@pytest.mark.parametrize("path", ["models/llama/modeling.py", "kernels.so", "../sample_models.libs/libblas.so.3"])
def test_an_edit_in_place_changes_it(package: Path, path: str) -> None:
    before = digest()
    (package / path).write_text("x = 2\n")  # of the same size
    assert digest() != before
    (package / path).write_text("x = 1\n" if "libblas" not in path else "1")
    assert digest() == before


def test_a_module_more_or_less_changes_it(package: Path) -> None:
    before = digest()
    (package / "more.py").write_text("")
    assert digest() != before
    (package / "more.py").rename(package / "models" / "more.py")
    assert digest() != before
    (package / "models" / "more.py").unlink()
    assert digest() == before


def test_what_does_not_run_does_not_count(package: Path, read: list[str]) -> None:
    before = digest()
    (package / "tests" / "test_x.py").write_text("y")
    (package / "data.txt").write_text("y")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "modeling.cpython-311.pyc").write_bytes(b"1")
    (package / "dangling.py").symlink_to("nowhere")
    read.clear()
    assert digest() == before
    assert read == []


def test_touching_reads_again_and_changes_nothing(package: Path, read: list[str]) -> None:
    before = digest()
    assert sorted(read) == ["__init__.py", "kernels.so", "libblas.so.3", "modeling.py"]
    assert digest() == before
    assert len(read) == 4
    os.utime(package / "__init__.py", (1, 1))
    assert digest() == before
    assert len(read) == 8


def test_a_package_that_is_not_there_counts_as_such(package: Path) -> None:
    assert installed.digest(("sample_models", "no_such_package")) != digest()


def test_it_does_not_depend_on_where_packages_lie(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest()
    moved = package.parent.rename(package.parent.with_name("elsewhere"))
    monkeypatch.syspath_prepend(str(moved))
    assert digest() == before


def test_files_as_they_were_installed_have_the_recorded_digest(package: Path, read: list[str]) -> None:
    """Until one is touched: then its contents count, whatever its times are set to."""
    by_contents = digest()
    info = package.parent / "sample_models-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sample_models\nVersion: 1.0\n")
    rows = []
    for file in sorted(package.rglob("*.*")):
        value = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
        rows.append(f"{file.relative_to(package.parent)},sha256={value},{file.stat().st_size}")
    record = info / "RECORD"
    record.write_text("\n".join([*rows, "sample_models-1.0.dist-info/RECORD,,"]) + "\n")
    shutil.rmtree(package.parents[1] / "cache")
    read.clear()
    assert digest() == by_contents
    assert read == ["libblas.so.3"]  # which is not recorded
    edited = package / "kernels.so"
    times = edited.stat().st_mtime_ns
    time.sleep(0.02)
    edited.write_text("x = 2\n")
    os.utime(edited, ns=(times, times))
    assert digest() != by_contents
    assert "kernels.so" in read
