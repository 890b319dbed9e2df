"""Checkpoints named as on the Hub, against a small Hub of our own (tests/servers/hub_server.py): no network."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants

import llmforge
from llmforge.artifact import versions
from llmforge.base import progress
from llmforge.base.errors import CheckpointError, EnvironmentLacks, ForgeError, RecipeError, UsageError
from llmforge.checkpoint import Checkpoint, hub
from llmforge.cli import cli
from llmforge.compile import preflight
from llmforge.diagnosis import mixed_precision_recipe
from llmforge.recipe import Recipe

from ..models.checkpoints import write_checkpoint
from ..servers.hub_server import Hub, serve

RECIPE = {"schema": 1, "name": "tiny", "checkpoint": "org/model", "target": "local", "passes": ["fuse-norms"],
          "engine": {"max_context": 64, "max_batch": 1}}  # fmt: skip
OTHERS = {"pytorch_model.bin": b"pickle", "modeling.py": b"import os", "sub/config.json": b"{}",
          "consolidated.safetensors": b"twice", "../../evil": b"evil", "/tmp/evil": b"evil"}  # fmt: skip


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serve() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        yield running


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    write_checkpoint(tmp_path / "own")
    return {path.name: path.read_bytes() for path in (tmp_path / "own").iterdir()}


def invoke(*words: str) -> Result:
    result = CliRunner().invoke(cli, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_only_what_a_build_reads_is_fetched(server: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    commit = server.push("org/model", {**files, **OTHERS})
    found = hub.snapshot("org/model")
    assert (found.repository, found.revision, found.commit) == ("org/model", "main", commit)
    assert sorted(path.name for path in found.folder.iterdir()) == sorted({*files} - {"model.safetensors"})
    assert not any(name.endswith(".safetensors") for name in server.downloads())
    assert found.fetch() == found.folder
    assert sorted(server.downloads()) == sorted(files)
    opened = Checkpoint.located(found.folder)
    assert opened.digest == Checkpoint.located(tmp_path / "own").digest
    assert opened.name == "org/model"
    assert not list(tmp_path.rglob("evil*"))
    server.asked.clear()
    assert hub.snapshot("org/model").fetch() == found.folder
    assert server.downloads() == []


def test_shards_come_by_the_index(server: Hub, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "shards", shards=2)
    files = {path.name: path.read_bytes() for path in (tmp_path / "shards").iterdir()}
    server.push("org/model", {**files, **OTHERS})
    folder = hub.snapshot("org/model").fetch()
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "*.safetensors", "sub/model.safetensors", "modeling.py"])
def test_an_index_names_shards_and_nothing_else(server: Hub, files: dict[str, bytes], name: str) -> None:
    index = json.dumps({"weight_map": {"a": name}}).encode()
    server.push("org/model", {**files, **OTHERS, "model.safetensors.index.json": index})
    found = hub.snapshot("org/model")
    server.asked.clear()
    with pytest.raises(CheckpointError, match="is not the name of a shard"):
        found.fetch()
    assert server.asked == []


def test_a_revision_is_a_branch_a_tag_or_a_commit(server: Hub, files: dict[str, bytes]) -> None:
    first = server.push("org/model", files)
    second = server.push("org/model", {**files, "config.json": files["config.json"] + b" "}, branch="next")
    assert hub.snapshot("org/model").commit == hub.snapshot("org/model", first).commit == first
    assert hub.snapshot("org/model", "next").commit == second
    server.branches["org/model", "main"] = second
    assert hub.snapshot("org/model").commit == second
    for wrong in ("../main", "a b", "-x"):
        with pytest.raises(UsageError, match="is not a revision"):
            hub.snapshot("org/model", wrong)


def test_what_cannot_be_read_is_said_once(
    server: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.push("org/model", files)
    server.push("org/gated", files)
    server.gated.add("org/gated")
    server.token = "hf_secret"
    cases: list[tuple[str, str | None, type[ForgeError], str, str]] = [
        ("org/nothing", None, CheckpointError, "neither a folder here nor a model", "HF_TOKEN"),
        ("org/model", "v9", CheckpointError, 'has no revision "v9"', "a branch"),
        ("org/gated", None, CheckpointError, "is restricted", "HF_TOKEN"),
    ]
    for name, revision, kind, message, hint in cases:
        with pytest.raises(kind) as caught:
            hub.snapshot(name, revision)
        assert message in caught.value.message
        assert hint in str(caught.value.hint)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert hub.snapshot("org/gated").fetch().is_dir()


def test_without_the_hub_the_cache_serves(
    server: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.push("org/model", files)
    server.push("org/small", {**files, "config.json": files["config.json"] + b" "})
    whole, small = hub.snapshot("org/model").fetch(), hub.snapshot("org/small")
    server.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.snapshot("org/model").fetch() == whole
    for miss in (small.fetch, lambda: hub.snapshot("org/other")):
        with pytest.raises(EnvironmentLacks, match="HF_HUB_OFFLINE is set, and the cache"):
            miss()
    assert server.asked == []


def test_a_download_that_broke_off_is_completed(server: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    server.push("org/model", files)
    server.cut["model.safetensors"] = len(files["model.safetensors"]) // 2
    folder = hub.snapshot("org/model").fetch()
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert server.downloads().count("model.safetensors") == 2


def test_weights_that_are_not_what_the_hub_says(server: Hub, files: dict[str, bytes]) -> None:
    server.push("org/model", files)
    server.damaged.add("model.safetensors")
    opened = Checkpoint.located(hub.snapshot("org/model").fetch())
    with pytest.raises(CheckpointError, match=r"its SHA-256 is \w+, and the Hub names") as caught:
        opened.verify()
    assert "delete " in str(caught.value.hint)


@pytest.mark.parametrize(
    "text", ["model", "a/b/c", "./a", "../a", "/a/b", "a/..", "a/.b", "~/b", "a//b", "a/b c", "a--b/c", "a/b.yaml"]
)
def test_what_looks_like_no_name(text: str) -> None:
    assert not hub.is_name(text)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_are_drawn_where_they_are_wanted(
    server: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.push("org/first", files)
    server.push("org/second", files)
    drawn, kept = _Terminal(), _Terminal()
    monkeypatch.setattr(sys, "stderr", drawn)
    hub.snapshot("org/first").fetch()
    monkeypatch.setattr(sys, "stderr", kept)
    with progress.without_bars():
        hub.snapshot("org/second").fetch()
    assert "100%" in drawn.getvalue()
    assert kept.getvalue() == ""


# recipes and commands


def write(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps({**RECIPE, **changes}))
    return path


def test_a_recipe_records_the_commit(server: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    commit = server.push("org/model", files, branch="v1")
    recipe = Recipe.load(write(tmp_path / "recipe.yaml", revision="v1"))
    assert not (recipe.checkpoint / "model.safetensors").exists()
    resolved = recipe.resolved()
    assert (resolved["checkpoint"], resolved["revision"]) == ("org/model", commit)
    assert (recipe.fetched() / "model.safetensors").exists()
    (tmp_path / "other").mkdir()
    mixed_precision_recipe.write(recipe, {}, tmp_path / "other" / "kept.yaml")
    assert Recipe.load(tmp_path / "other" / "kept.yaml").checkpoint == recipe.checkpoint


def test_a_folder_wins(server: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "org" / "model")
    recipe = Recipe.load(write(tmp_path / "recipe.yaml"))
    assert recipe.checkpoint == tmp_path / "org" / "model"
    assert "revision" not in recipe.resolved()
    with pytest.raises(RecipeError, match="revision: org/model is a folder"):
        Recipe.load(write(tmp_path / "recipe.yaml", revision="main"))
    done = invoke("plan", "org/model", "--target", "h200")
    assert done.exit_code == 0
    assert "note: org/model is the folder here, not a model of the Hub" in done.stderr
    assert invoke("plan", "org/model", "--target", "h200", "--revision", "main").exit_code == 2
    assert server.asked == []


def test_a_file_is_no_folder_that_wins(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model.gguf").write_bytes(b"GGUF, but not for long")
    done = invoke("plan", "org/model.gguf", "--target", "h200")
    assert done.exit_code != 0
    assert "note:" not in done.stderr
    assert server.asked == []


def test_commands_take_names(server: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    server.push("org/model", files, branch="v1.0")
    done = invoke("plan", "org/model", "--revision", "v1.0", "--target", "h200")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("org/model on NVIDIA H200")
    assert not any(name.endswith(".safetensors") for name in server.downloads())
    done = invoke("init", "org/model", "--revision", "v1.0", "--target", "h200")
    assert (done.exit_code, done.stdout) == (0, "model.yaml\n"), done.stderr
    assert "checkpoint: org/model\nrevision: 'v1.0'\n" in (tmp_path / "model.yaml").read_text()
    done = invoke("inspect", "org/model", "--revision", "v1.0")
    assert (done.exit_code, "LlamaForCausalLM" in done.stdout) == (0, True), done.stderr
    wrong = invoke("inspect", "org/other")
    assert wrong.exit_code == 5
    assert "neither a folder here nor a model" in wrong.stderr


@pytest.mark.parametrize(
    ("words", "bars"),
    [("plan", True), ("-q plan", False), ("plan -q", False), ("--log-format json plan", False)],
)
def test_quiet_commands_draw_no_bars(
    server: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, words: str, bars: bool
) -> None:
    server.push("org/model", files)
    seen, download = [], hub._download
    monkeypatch.setattr(hub, "_download", lambda *given: (seen.append(progress.has_bars()), download(*given))[1])
    assert invoke(*words.split(), "org/model", "--target", "h200").exit_code == 0
    assert seen == [bars]
    assert progress.has_bars()


def test_python_takes_names(server: Hub, files: dict[str, bytes]) -> None:
    server.push("org/model", files, branch="v1.0")
    plans = llmforge.plan("org/model", target="h200", revision="v1.0")
    assert str(plans).startswith("org/model on NVIDIA H200")
    assert not any(name.endswith(".safetensors") for name in server.downloads())
    with pytest.raises(UsageError, match="is not on the Hub, and has no revisions"):
        llmforge.plan("own", target="h200", revision="v1.0")


def test_a_branch_that_moved_is_noticed(
    server: Hub, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = server.push("org/model", files)
    recipe = Recipe.load(write(tmp_path / "recipe.yaml"))
    assert preflight.check_revision(recipe, tmp_path / "artifacts") == []

    sealed = SimpleNamespace(recipe=recipe.resolved())
    built = SimpleNamespace(path=tmp_path / "artifacts" / "tiny" / "0123456789ab", manifest=sealed)
    monkeypatch.setattr(versions, "names", lambda out: ["tiny"])
    monkeypatch.setattr(versions, "listed", lambda out, name: [SimpleNamespace(artifact=built)])
    assert preflight.check_revision(recipe, tmp_path / "artifacts") == []
    second = server.push("org/model", {**files, "config.json": files["config.json"] + b" "})
    moved = preflight.check_revision(Recipe.load(recipe.path), tmp_path / "artifacts")
    assert moved == [f"org/model: main is at {second[:12]}; tiny/0123456789ab was built from {first[:12]}"]


@pytest.mark.slow
def test_a_build_from_the_hub(server: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    first = server.push("org/model", files)
    recipe = write(tmp_path / "recipe.yaml")
    environ = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "cache")}

    def build() -> tuple[dict[str, Any], dict[str, Any], str]:
        command = [sys.executable, "-m", "llmforge", "build", str(recipe), "--no-cache"]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        folder = Path(done.stdout.splitlines()[-1])
        lock = json.loads((folder / "provenance" / "lock.json").read_text())
        return json.loads((folder / "manifest.json").read_text())["recipe"], lock["checkpoint"], done.stderr

    sealed, locked, _ = build()
    assert (sealed["checkpoint"], sealed["revision"]) == ("org/model", first)
    assert (locked["repository"], locked["revision"], locked["name"]) == ("org/model", first, "org/model")
    second = server.push("org/model", {**files, "config.json": files["config.json"] + b" "})
    sealed, _, said = build()
    assert sealed["revision"] == second
    assert f"note: org/model: main is at {second[:12]}; tiny/" in said
