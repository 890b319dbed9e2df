"""Builds of one recipe in other folders, with other hash seeds and thread counts: one content digest."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmforge.artifact import Artifact

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


@pytest.mark.timeout(900)  # three builds, one after the other
def test_folder_hash_seed_and_threads_move_no_byte(tmp_path: Path, tiny_checkpoint: Path) -> None:
    manifests = []
    for index, name in enumerate(("a", "another folder/b", "c")):
        recipe = write_recipe(tmp_path / name, tiny_checkpoint)
        threads = str(1 + index)
        settings = {
            "PYTHONPATH": str(ROOT),
            "PYTHONHASHSEED": str(index),
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
        }
        command = [sys.executable, "-m", "llmforge", "build", recipe.name, "--out", "out", "--quiet"]
        done = subprocess.run(
            command, cwd=recipe.parent, env={**os.environ, **settings}, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        manifests.append(Artifact.open(recipe.parent / done.stdout.splitlines()[-1]).manifest)
    first, *others = manifests
    contents = [{path: each.sha256 for path, each in one.files.items() if each.in_content} for one in manifests]
    assert contents[0] == contents[1] == contents[2]
    assert {other.content_digest for other in others} == {first.content_digest}
