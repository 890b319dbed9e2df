"""Checkpoints at URLs: fetched by who lacks them, whole or not at all, and going on where an attempt was cut off."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmforge.base.errors import CheckpointError, InputError, UsageError
from llmforge.farm import checkpoints, preflight, worker
from llmforge.farm.matrix import Build, Matrix, expand
from llmforge.farm.worker import Job

fsspec = pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
SAMPLE = Path(__file__).parents[1] / "data" / "docs-llama-7m"
URL = "memory://bucket/models/llama"


@pytest.fixture(autouse=True)
def memory(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hold the sample's checkpoint there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoints, "_CHUNK_BYTES", 1 << 20)
    for file in SAMPLE.iterdir():
        memory.pipe(f"/bucket/models/llama/{file.name}", file.read_bytes())
    return memory


def test_a_checkpoint_is_fetched_once(memory: Any) -> None:
    expected = checkpoints.digest(SAMPLE)
    found = checkpoints.fetch(URL, expected)
    assert found.name == "llama"
    assert checkpoints.digest(found) == expected
    before = (found / "model.safetensors").stat().st_mtime_ns
    assert checkpoints.fetch(URL, expected) == found
    assert (found / "model.safetensors").stat().st_mtime_ns == before


def test_a_fetch_that_was_cut_off_goes_on(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    real = memory.cat_file

    def cut_off(path: str, start: int, end: int) -> bytes:
        asked.append((start, end))
        if len(asked) == 1 or not path.endswith("model.safetensors") or start < 2 << 20 or len(asked) > 20:
            return bytes(real(path, start=start, end=end))
        asked.extend([(0, 0)] * 20)
        raise ConnectionResetError("reset")

    monkeypatch.setattr(type(memory), "cat_file", lambda self, path, start, end: cut_off(path, start, end))
    with pytest.raises(InputError, match="cannot be read: reset"):
        checkpoints.fetch(URL)
    part = checkpoints.place_of(URL) / "model.safetensors.part"
    assert part.stat().st_size == 2 << 20
    count = len(asked)
    found = checkpoints.fetch(URL, checkpoints.digest(SAMPLE))
    assert (2 << 20, 3 << 20) in asked[count:]
    assert (0, 1 << 20) not in asked[count:]
    assert not part.exists()
    assert (found / "model.safetensors").read_bytes() == (SAMPLE / "model.safetensors").read_bytes()


def test_what_is_another_checkpoint_is_not_kept(memory: Any) -> None:
    with pytest.raises(CheckpointError, match="has other files"):
        checkpoints.fetch(URL, "0" * 64)
    assert not checkpoints.place_of(URL).exists()
    with pytest.raises(InputError, match="no such file or bucket"):
        checkpoints.fetch("memory://bucket/none/llama")
    memory.pipe("/bucket/empty/notes.txt", b"x")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoints.require("memory://bucket/empty")
    with pytest.raises(UsageError, match="not the folder of a checkpoint"):
        checkpoints.place_of("memory://")


def test_a_checkpoint_is_shared_by_its_digest(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    digest = checkpoints.digest(SAMPLE)
    url = checkpoints.share(SAMPLE, digest, (tmp_path / "store").as_uri())
    assert url == f"{(tmp_path / 'store').as_uri()}/checkpoints/{digest}/{SAMPLE.name}"
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "store").rglob("*.*") if file.is_file()}
    assert checkpoints.share(SAMPLE, digest, (tmp_path / "store").as_uri()) == url
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert checkpoints.digest(checkpoints.fetch(url, digest)) == digest


MATRIX = """\
schema: 1
name: release
recipe: recipe.yaml
models: {a: {checkpoint: "memory://bucket/models/llama"}, b: {checkpoint: "hf://org/name@v1"}}
targets: {cpu-avx2: }
variants: {v: }
"""
RECIPE = "schema: 1\nname: base\ncheckpoint: x\ntarget: cpu-avx2\nengine: {max_context: 64}\npasses: [fuse-norms]\n"


@pytest.fixture
def builds(tmp_path: Path) -> list[Build]:
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "matrix.yaml").write_text(MATRIX, encoding="utf-8")
    return expand(Matrix.load(tmp_path / "matrix.yaml"), tmp_path / "matrix.yaml")


def test_urls_in_a_matrix(builds: list[Build]) -> None:
    first, second = builds
    assert first.url == URL
    assert f'checkpoint="{checkpoints.place_of(URL)}"' in first.overrides
    assert second.url is None
    assert {'checkpoint="org/name"', 'revision="v1"'} <= set(second.overrides)


def test_a_node_that_lacks_a_checkpoint_fetches_it(
    builds: list[Build], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Any
) -> None:
    folder = checkpoints.fetch(URL)
    needed = preflight.needs(builds[:1], tmp_path / "out", store_url=None, remote_cache=None, keys=[])
    assert needed.urls == {folder: URL}
    needed = replace(needed, extras=())
    shutil.rmtree(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "node"))  # another machine has other folders
    assert preflight.lack(needed, writes=True) is None
    ran: list[Job] = []
    monkeypatch.setattr(worker, "_build", lambda job, tell: ran.append(job) or {"exit_code": 2, "message": "enough"})
    told: list[dict[str, Any]] = []
    assert worker.run(Job(("r.yaml",), needed, folder), told.append).message == "enough"
    there = checkpoints.place_of(URL)
    assert ran[0].arguments == ("r.yaml", "--set", f'checkpoint="{there}"')
    assert told == [{"event": "stage", "name": "Fetch the checkpoint"}]
    assert checkpoints.digest(there) == needed.checkpoints[folder]
    memory.rm("/bucket", recursive=True)
    shutil.rmtree(there)
    found = preflight.lack(needed, writes=True)
    assert found is not None
    assert "no such file or bucket" in found.message
