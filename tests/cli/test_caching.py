"""The command `cache`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmforge.cache import Cache, Key
from llmforge.cli import cli


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["cache", *arguments])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a trace and the proofs of two passes."""
    monkeypatch.setenv("LLMFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LLMFORGE_CACHE_BYTES", "5000000")
    keys = [Key("trace", {}), Key("proof", {"pass": "fuse-norms"}), Key("proof", {"pass": "pack-qkv"})]
    with Cache(tmp_path / "cache") as cache:
        for key in keys:
            cache.put(key, lambda folder: (folder / "file").write_bytes(bytes(10_000)) and None)
    return tmp_path / "cache"


def test_entries_are_listed_counted_and_removed(folder: Path) -> None:
    listed = invoke("ls")
    assert listed.exit_code == 0, listed.output
    assert len(listed.stdout.splitlines()) == 4
    assert "pass fuse-norms" in listed.stdout
    plain = json.loads(invoke("ls", "--json").stdout)
    assert sorted(entry["kind"] for entry in plain) == ["proof", "proof", "trace"]
    stats = json.loads(invoke("stats", "--json").stdout)
    assert stats["folder"] == str(folder)
    assert stats["limit_bytes"] == 5_000_000
    assert stats["kinds"]["proof"]["entries"] == 2
    assert 30_000 < stats["size_bytes"] < 35_000
    assert "of 5.00 MB" in invoke("stats").stdout
    assert invoke("rm", "proof").stdout.startswith("removed 2 entries, 20.")
    assert [entry.kind for entry in Cache(folder).entries()] == ["trace"]
    digest = Cache(folder).entries()[0].digest
    assert json.loads(invoke("rm", digest[:12], "--json").stdout)["removed"] == 1
    assert invoke("rm", "--all").stdout == "removed 0 entries, 0 B\n"


def test_what_a_build_uses_stays(folder: Path) -> None:
    with Cache(folder) as cache:
        assert cache.find(Key("trace", {})) is not None
        assert "in use" in invoke("ls").stdout
        assert "removed 2 entries" in (said := invoke("rm", "--all").stdout)
        assert "1 in use by running builds" in said
    assert [entry.kind for entry in Cache(folder).entries()] == ["trace"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "name entries or kinds, or use --all"),
        (["trace", "--all"], 2, "name entries or kinds, or use --all"),
        (["traces"], 5, "no entry is called 'traces'"),
        (["0123"], 5, "no entry is called '0123'"),
    ],
)
def test_wrong_names_are_refused(folder: Path, arguments: list[str], code: int, message: str) -> None:
    result = invoke("rm", *arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert "hint: " in result.stderr
    assert len(Cache(folder).entries()) == 3


def test_a_size_that_is_no_number_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMFORGE_CACHE_BYTES", "20GB")
    result = invoke("stats")
    assert result.exit_code == 2
    assert "expected a number of bytes" in result.stderr
