"""`llmforge push hf://ORG/NAME` through huggingface_hub, to a small Hub of our own (tests/servers/hub_server.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants

from llmforge.artifact import Artifact, sealed
from llmforge.cli import cli

from ..samples import stored
from ..servers.hub_server import Hub, serve

# How huggingface_hub 2.4 uploads large files without Xet: httpx warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

NAME = "org/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve() as running:
        running.writer = "hf_write"
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # another way of moving large files
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", "hf_write")
        yield running


def push(artifact: Artifact, *options: str) -> Result:
    return CliRunner().invoke(cli, ["push", str(artifact.path), f"hf://{NAME}", *options])


def pushed(hub: Hub) -> dict[str, bytes]:
    return hub.repositories[NAME][hub.branches[NAME, "main"]]


def test_the_repository_has_the_artifact_as_it_is(hub: Hub, tmp_path: Path) -> None:
    made = stored.put(tmp_path / "artifacts", gates=stored.PASSES)
    result = push(made)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"hf://{NAME}@{hub.branches[NAME, 'main']}\n"
    assert hub.messages == [f"tiny/{made.path.name}"]
    files = pushed(hub)
    assert files.pop(".gitattributes")
    assert files == {path: (made.path / path).read_bytes() for path in sealed.walk(made.path)}
    assert set(hub.large.values()) >= {files["engine/model.onnx"]}
    there = tmp_path / "downloaded" / made.path.name
    for path, data in files.items():
        (there / path).parent.mkdir(parents=True, exist_ok=True)
        (there / path).write_bytes(data)
    assert CliRunner().invoke(cli, ["verify", str(there)]).exit_code == 0


def test_what_was_there_before_goes_in_the_same_commit(hub: Hub, tmp_path: Path) -> None:
    first = stored.put(tmp_path / "artifacts", "one", files={"engine/other.onnx": b"x"})
    second = stored.put(tmp_path / "artifacts", "two")
    assert push(first).exit_code == 0
    result = push(second, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["removed"] >= 1  # the record of evidence of the first
    assert set(pushed(hub)) == {*sealed.walk(second.path), ".gitattributes"}


def test_one_who_may_not_write_is_told_what_to_do(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = stored.put(tmp_path / "artifacts")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    result = push(made)
    assert result.exit_code == 8, result.output
    assert "HF_TOKEN" in result.output
    assert "hf_other" not in result.output
    assert NAME not in hub.repositories


def test_a_changed_file_is_not_pushed(hub: Hub, tmp_path: Path) -> None:
    made = stored.put(tmp_path / "artifacts")
    file = made.path / "engine" / "model.onnx"
    file.chmod(0o600)
    file.write_bytes(b"grapH")
    assert push(made).exit_code == 5
    assert NAME not in hub.repositories


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hf://tiny"], "give hf://ORG/NAME"),
        (["hf://org/a--b"], "give hf://ORG/NAME"),
        (["hf://org/tiny", "--insecure"], "--insecure cannot be used with hf://"),
        (["localhost:5000/tiny:1", "--private"], "--private requires hf://ORG/NAME"),
    ],
)
def test_references_that_are_none_are_refused(tmp_path: Path, words: list[str], said: str) -> None:
    made = stored.put(tmp_path / "artifacts")
    result = CliRunner().invoke(cli, ["push", str(made.path), *words])
    assert result.exit_code == 2, result.output
    assert said in result.output
