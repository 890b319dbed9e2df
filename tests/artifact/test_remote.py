"""Archives at URLs: whole or not there, and errors of the other side in plain words."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmforge.artifact import Artifact, remote, versions
from llmforge.artifact.remote import Url
from llmforge.base.errors import InputError, UsageError
from llmforge.cli import cli

from ..samples.stored import put

fsspec = pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
pytestmark = pytest.mark.usefixtures("memory")
URL = Url("memory://bucket/x.tar")


@pytest.fixture
def made(tmp_path: Path) -> Artifact:
    return put(tmp_path / "here")


def invoke(*words: str | Path) -> Result:
    done = CliRunner().invoke(cli, list(map(str, words)))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.mark.parametrize("where", ["memory://bucket/x.tar", "file://{}/x.tar"])
def test_there_and_back(made: Artifact, tmp_path: Path, where: str) -> None:
    url = where.format(tmp_path)
    done = invoke("export", made.path, "-o", url)
    assert (done.exit_code, done.stdout) == (0, f"{url}\n"), done.output
    assert json.loads(invoke("export", made.path, "-o", url, "--json").stdout)["archive"] == url
    local = tmp_path / "local.tar"
    invoke("export", made.path, "-o", local)
    assert fsspec.open(url).open().read() == local.read_bytes()
    done = invoke("import", url, "--out", tmp_path / "there")
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'there/tiny' / made.path.name}\n"), done.output
    Artifact.open(tmp_path / "there/tiny" / made.path.name).verify()


def test_an_export_that_fails_leaves_what_was_there(made: Artifact, memory: Any) -> None:
    remote.save(made, URL)
    before = memory.cat("/bucket/x.tar")
    file = made.path / "tokenizer/tokenizer.json"  # the last one
    file.chmod(0o644)
    file.write_bytes(b"[]")
    for url in (URL, Url("memory://bucket/new.tar")):
        with pytest.raises(InputError, match="was changed after it was published"):
            remote.save(made, url)
    assert memory.cat("/bucket/x.tar") == before
    assert memory.ls("/bucket", detail=False) == ["/bucket/x.tar"]


def test_damaged_archives(made: Artifact, memory: Any, tmp_path: Path) -> None:
    remote.save(made, URL)
    whole = memory.cat("/bucket/x.tar")
    for data, said in ((whole[:-1], "cut off"), (whole + b"x", "too long"), (whole.replace(b"graph", b"grapf"), "")):
        memory.pipe("/bucket/x.tar", data)
        done = invoke("import", URL.text, "--out", tmp_path / "there")
        assert done.exit_code == 5
        assert done.stderr.startswith("error: memory://bucket/x.tar: not an artifact that llmforge exported")
        assert said in done.stderr
    assert versions.names(tmp_path / "there") == []


def test_a_signature_can_be_required(made: Artifact, tmp_path: Path) -> None:
    pytest.importorskip("model_signing", reason="the extra `signing` is not installed")
    from .test_signing import key_pair

    _, public = key_pair(tmp_path, "mine")
    remote.save(made, URL)
    words = ("import", URL.text, "--out", tmp_path / "there")
    done = invoke(*words, "--require-signature", "--key", public)
    assert done.exit_code == 5
    assert done.stderr.startswith("error: memory://bucket/x.tar: is not signed")
    assert versions.names(tmp_path / "there") == []
    assert invoke(*words).exit_code == 0


class Broken:
    """A connection that ends after some bytes."""

    def __init__(self, left: int) -> None:
        self.left = left

    def read(self, count: int) -> bytes:
        self.left -= count
        if self.left < 0:
            raise ConnectionResetError("reset\nby peer")
        return b"\0" * count


def test_what_the_other_side_cannot(made: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "there"
    with pytest.raises(InputError, match=r"memory://none/x\.tar: cannot be read: no such file or bucket"):
        remote.load(Url("memory://none/x.tar"), out)
    with pytest.raises(InputError, match=r"none\.tar: cannot be read: No such file"):
        remote.load(Url(f"file://{tmp_path}/none.tar"), out)
    with pytest.raises(UsageError, match=r"x\.tar: cannot be written: no such file or bucket"):
        remote.save(made, Url(f"file://{tmp_path}/none/x.tar"))
    with pytest.raises(UsageError, match="unknown protocol 'nope'"):
        remote.load(Url("nope://x/y.tar"), out)
    reader = remote._Reader(Broken(600), URL)
    assert reader.read(512) == b"\0" * 512
    with pytest.raises(InputError, match=r"memory://bucket/x\.tar: cannot be read: reset by peer"):
        reader.read(512)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    from fsspec.registry import _registry

    monkeypatch.delitem(_registry, "s3", raising=False)
    done = invoke("export", made.path, "-o", "s3://bucket/x.tar")
    assert done.exit_code == 8
    assert done.stderr == "error: s3://bucket/x.tar: s3fs is not installed\nhint: pip install s3fs\n"


def test_passwords_are_not_shown(tmp_path: Path) -> None:
    assert str(Url("https://user:secret@example.com/x.tar")) == "https://example.com/x.tar"
    assert str(Url("s3://bucket/a@b.tar")) == "s3://bucket/a@b.tar"
    done = invoke("import", "nope://user:secret@x/y.tar", "--out", tmp_path)
    assert done.exit_code == 2
    assert "secret" not in done.output


def test_what_is_a_url() -> None:
    assert [remote.is_url(text) for text in ("s3://b/x", "memory://x", "https://x", "x.tar", "a/b://c", "C:/x")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    assert re.fullmatch(r"error: .*x/a:/b: cannot be read.*\nhint: .*\n", invoke("import", "x/a://b").stderr)
