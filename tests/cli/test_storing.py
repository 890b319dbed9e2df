"""The commands that keep artifacts, through the runner: exit codes, both streams, messages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmforge.artifact import tags
from llmforge.cli import cli

from ..stored import FAILS, UNDECIDED, put


@pytest.fixture(autouse=True)
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMFORGE_ARTIFACTS", str(tmp_path / "store"))
    return tmp_path / "store"


def invoke(*args: str) -> Result:
    result = CliRunner().invoke(cli, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_ls_of_nothing() -> None:
    done = invoke("ls")
    assert (done.exit_code, done.stdout) == (0, "")
    assert re.fullmatch(r"no artifacts in .*store\n", done.stderr)
    assert invoke("ls", "--json").stdout == "[]\n"
    assert invoke("gc").stdout == "0 versions, 0 B removed\n"


def test_ls(out: Path) -> None:
    put(out, version="1")
    put(out, version="1", name="other", gates=FAILS)
    tags.move(out / "tiny", "new", "1")
    head, second, first = invoke("ls").stdout.splitlines()
    assert head.split() == ["ARTIFACT", "GATES", "SIZE", "CREATED", "(UTC)", "TARGET", "TAGS"]
    assert second.startswith("other/1   fail")
    assert first.startswith("tiny/1    pass")
    assert first.endswith("cpu-avx2  new")
    (facts,) = json.loads(invoke("ls", "tiny", "--json").stdout)
    assert facts["artifact"] == "tiny/1"
    assert facts["tags"] == ["new"]
    assert facts["verdict"] == "pass"
    done = invoke("ls", "tyni")
    assert done.exit_code == 2
    assert "named 'tyni'\nhint: known: other, tiny" in done.stderr


def test_tag_and_history(out: Path) -> None:
    for version in ("1", "2"):
        put(out, version, version=version)
    assert invoke("tag", "tiny/1", "new").stdout == "tiny:new is now on 1\n"
    assert invoke("tag", "tiny/2", "new").stdout == "tiny:new is now on 2; it was on 1\n"
    assert invoke("tag", "tiny:new", "new").stdout == "tiny:new is on 2 already\n"
    assert json.loads(invoke("tag", "tiny:new", "new", "--delete", "--json").stdout)["moved"]["from"] == "2"
    lines = invoke("ls", "--history").stdout.splitlines()
    assert [line.split()[2:] for line in lines[1:]] == [
        ["tiny:new", "tag", "–", "1"],
        ["tiny:new", "tag", "1", "2"],
        ["tiny:new", "delete", "2", "–"],
    ]
    assert len(json.loads(invoke("ls", "--history", "--json").stdout)) == 3


def test_rm(out: Path, tmp_path: Path) -> None:
    for version in ("1", "2", "3"):
        put(out, version, version=version)
    done = invoke("rm", "tiny/1", str(out / "tiny" / "2"))
    assert done.stdout == "removed tiny/1\nremoved tiny/2\n"
    assert [path.name for path in (out / "tiny").glob("[!.]*")] == ["3"]
    elsewhere = put(tmp_path / "elsewhere", version="1").path
    for what in (str(elsewhere), str(out), str(out / "tiny"), str(out / "tiny" / "3" / "engine"), "/"):
        done = invoke("rm", "tiny/3", what)
        assert done.exit_code == 2
        assert "not a version of an artifact in" in done.stderr
    assert elsewhere.is_dir()
    assert [path.name for path in (out / "tiny").glob("[!.]*")] == ["3"]


def test_gc(out: Path) -> None:
    for version in ("1", "2", "3"):
        put(out, version, version=version)
    done = invoke("gc", "--keep", "2", "--dry-run")
    assert re.fullmatch(r"would remove tiny/\d\n1 version, .* to be removed\n", done.stdout)
    assert sorted(json.loads(invoke("gc", "--keep", "0", "--json").stdout)["removed"]) == ["tiny/1", "tiny/2", "tiny/3"]


def test_promote_and_rollback(out: Path) -> None:
    for version in ("one", "two"):
        put(out, version, version=version)
    assert invoke("promote", "tiny", "one", "--to", "prod").stdout == "tiny:prod is now on one\n"
    assert invoke("promote", "tiny", "tw", "--to", "prod").stdout == "tiny:prod is now on two; it was on one\n"
    assert invoke("inspect", "tiny:prod").stdout.startswith("tiny two\n")
    assert invoke("promote", "tiny", "--to", "prod", "--rollback").stdout == "tiny:prod is now on one; it was on two\n"
    done = invoke("promote", "tiny", "--to", "prod", "--rollback")
    assert done.exit_code == 2
    assert "tiny:prod has no version to return to" in done.stderr


@pytest.mark.parametrize(
    ("gates", "code", "said"),
    [
        (FAILS, 3, "tiny/bad cannot be promoted: a gate failed\nkld_mean: 0.02104"),
        (UNDECIDED, 4, "tiny/bad cannot be promoted: a gate is inconclusive\nkld_mean: 0.02104"),
        ({}, 4, "tiny/bad cannot be promoted: its recipe has no gates"),
    ],
)
def test_promote_asks_the_gates(out: Path, gates: dict[str, object], code: int, said: str) -> None:
    put(out, "good", version="good")
    put(out, "bad", version="bad", gates=gates)
    invoke("promote", "tiny", "good", "--to", "prod")
    done = invoke("promote", "tiny", "bad", "--to", "prod")
    assert done.exit_code == code
    assert said in done.stderr
    assert tags.current(out / "tiny", "prod") == "good"
    # nor by another way
    assert invoke("tag", "tiny/bad", "prod").exit_code == 2
    assert tags.current(out / "tiny", "prod") == "good"


def test_promote_believes_figures_not_words(out: Path) -> None:
    """A manifest that claims a verdict, and files that were changed."""
    put(out, "bad", version="bad", gates=FAILS, verdict="pass")
    done = invoke("promote", "tiny", "bad", "--to", "prod")
    assert done.exit_code == 5
    assert "the manifest says that its gates end with pass; the figures in its report give fail" in done.stderr
    made = put(out, "good", version="good")
    (made.path / "engine/model.onnx").chmod(0o644)
    (made.path / "engine/model.onnx").write_text("other")
    done = invoke("promote", "tiny", "good", "--to", "prod")
    assert done.exit_code == 5
    assert "changed: engine/model.onnx" in done.stderr
    unreadable = put(out, "x", version="x", gates={}, verdict="none", files={"report/report.json": b"{}"})
    assert "not a report of this version" in invoke("promote", "tiny", unreadable.path.name, "--to", "prod").stderr
    assert tags.names(out / "tiny") == []


@pytest.mark.parametrize("words", [(), ("one", "--rollback")])
def test_promote_takes_a_version_or_rolls_back(words: tuple[str, ...]) -> None:
    done = invoke("promote", "tiny", *words, "--to", "prod")
    assert done.exit_code == 2
    assert "expected either VERSION or --rollback" in done.stderr


def test_out_comes_before_the_environment(tmp_path: Path) -> None:
    put(tmp_path / "mine", version="1")
    assert invoke("tag", "tiny/1", "new", "--out", str(tmp_path / "mine")).exit_code == 0
    assert invoke("inspect", "tiny:new").exit_code == 5
    assert invoke("ls", "--out", str(tmp_path / "mine")).stdout.splitlines()[1].startswith("tiny/1")
