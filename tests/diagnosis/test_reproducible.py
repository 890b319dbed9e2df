"""Builds of one recipe in other folders, with other hash seeds and thread counts: one content digest."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmforge.artifact import Artifact
from llmforge.cli import cli
from llmforge.compile import lock, pipeline
from llmforge.quantization.methods import gptq
from llmforge.recipe import Recipe
from llmforge.runtime.config import physical_cores

from ..models.checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]
WORDS = ("graph", "engine", "pass", "weight", "scale", "token", "cache", "layer", "head", "probe", "gate", "report")
BUDGET = {"budget": {"kld_mean": 5.0}}  # random weights


def write_recipe(folder: Path, checkpoint: Path) -> Path:
    """Write recipe, text and checkpoint into `folder`."""
    rng = random.Random(0)
    folder.mkdir(parents=True)
    shutil.copytree(checkpoint, folder / "tiny-llama")
    lines = [{"id": str(i), "text": f"{i} " + " ".join(rng.choices(WORDS, k=30))} for i in range(6)]
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, lines)))
    recipe = {
        "schema": 1,
        "name": "tiny",
        "checkpoint": "tiny-llama",
        "target": "local",
        "engine": {"max_context": 128, "max_batch": 2},
        "calibration": {"data": "text.jsonl", "samples": 4, "length": 64},
        "passes": [
            "fuse-norms",
            "pack-qkv",
            "flash-attention",
            {"quantize-weights": {"block_size": 32, **BUDGET}},
            {"quantize-kv-cache": BUDGET},
        ],
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


@dataclass(frozen=True)
class Built:
    """A recipe, and what was built of it in this process."""

    recipe: Path
    artifact: Artifact


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    write_checkpoint(folder / "checkpoint")
    recipe = write_recipe(folder / "a", folder / "checkpoint")
    result = pipeline.build(Recipe.load(recipe), folder / "out")
    return Built(recipe, Artifact.open(result.path))


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_folder_hash_seed_and_threads_move_no_byte(tmp_path: Path, built: Built) -> None:
    recipe = write_recipe(tmp_path / "another folder/b", built.recipe.parent / "tiny-llama")
    threads = str(physical_cores() + 1)
    settings = {
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": "1",  # this process has a random one
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
    }
    command = [sys.executable, "-m", "llmforge", "build", recipe.name, "--out", "out", "--quiet", "--no-cache"]
    done = subprocess.run(
        command, cwd=recipe.parent, env={**os.environ, **settings}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    first, other = (
        Artifact.open(each).manifest for each in (built.artifact.path, recipe.parent / done.stdout.splitlines()[-1])
    )
    assert {path: each.sha256 for path, each in other.files.items()} == {
        path: each.sha256 for path, each in first.files.items()
    }
    assert other.content_digest == first.content_digest


def command_line(*arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments])


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_an_artifact_is_reproduced_and_a_difference_is_named(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, path = built.recipe, built.artifact.path
    locked = lock.read(Artifact.open(path))
    assert [stage.name for stage in locked.stages] == [
        "trace", "calibration", "fuse-norms", "pack-qkv", "flash-attention", "quantize-weights", "quantize-kv-cache",
        "engine",
    ]  # fmt: skip
    assert locked.checkpoint.digest == Artifact.open(path).manifest.checkpoint
    assert [(text.role, text.name, text.documents) for text in locked.texts] == [("calibration", "text.jsonl", 6)]
    assert locked.seeds == {"calibration": 0}
    assert locked.threads.calibration == 2
    assert locked.packages["torch"] == version("torch")
    assert (
        str(recipe.parent.parent) not in (path / "provenance/lock.json").read_text()
    )  # nothing of the machine's folders
    again = command_line(
        "reproduce", str(path), "--checkpoint", str(recipe.parent / "tiny-llama"), "--text",
        str(recipe.parent / "text.jsonl"), "--quiet",
    )  # fmt: skip
    assert again.exit_code == 0, again.output
    assert again.stdout.strip() == f"equal: content digest {Artifact.open(path).manifest.content_digest}"
    # Now GPTQ damps otherwise: some codes change, and nothing in front of calibration does.
    damped = gptq.Curvature.of
    monkeypatch.setattr(gptq.Curvature, "of", lambda hessian, damping, threads: damped(hessian, damping * 8, threads))
    other = command_line("reproduce", str(path), "--recipe", str(recipe), "--quiet", "--json")
    assert other.exit_code == 7, other.output
    found = json.loads(other.stdout)
    assert found["stage"] == "calibration"
    assert found["recipe"]
    assert "engine/model.onnx.data" in found["files"]
    codes = [each for each in found["tensors"] if each["largest"] is not None and 1 <= each["largest"] <= 15]
    assert codes
    assert all(0 < each["differing"] < each["elements"] for each in codes)
    assert "was not reproduced" in other.stderr


def test_inputs_that_are_missing_are_named(tmp_path: Path) -> None:
    lacking = command_line("reproduce", str(tmp_path))
    assert lacking.exit_code == 5
    assert "manifest.json" in lacking.stderr


@pytest.mark.parametrize("layout", ["cache", "download"])
def test_the_revision_is_what_the_hub_noted(layout: str, tmp_path: Path) -> None:
    commit = "0123456789" * 4
    folder = tmp_path / ("snapshots" if layout == "cache" else "models") / (commit if layout == "cache" else "llama")
    folder.mkdir(parents=True)
    assert lock.revision(tmp_path) is None
    if layout == "download":
        notes = folder / ".cache/huggingface/download"
        notes.mkdir(parents=True)
        (notes / "config.json.metadata").write_text(f"{commit}\netag\n1.0\n")
    assert lock.revision(folder) == commit
