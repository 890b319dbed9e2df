"""What is refused before anything heavy: data, context and checkpoint, without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmforge.base.errors import CheckpointError, DataError, UnsupportedError
from llmforge.compile import preflight
from llmforge.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "recipes/quickstart.yaml"
SAMPLE = ROOT / "tests/data/docs-llama-7m"  # made for 1024 tokens


@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        ("validation.quality.data=missing.jsonl", 5, "missing.jsonl: cannot be read"),
        ("calibration.data=missing.jsonl", 5, "missing.jsonl: cannot be read"),
        ("engine.max_context=1025", 6, "the model is made for 1024 tokens"),
        ("checkpoint=nowhere", 5, "no such folder"),
        ("engine.max_batch=0", 2, "greater than or equal to 1"),
    ],
)
def test_a_wrong_input_ends_before_torch_is_imported(override: str, code: int, message: str, tmp_path: Path) -> None:
    script = f"""
import sys
from llmforge.cli import cli
try:
    cli(["build", {str(QUICKSTART)!r}, "--quiet", "--out", {str(tmp_path)!r}, "--set", {override!r}])
finally:
    print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == code, done.stderr
    assert message in done.stderr.replace("\n", " ")
    assert not {"torch", "transformers", "onnxruntime"} & set(done.stdout.split())
    assert list(tmp_path.iterdir()) == []


def loaded(tmp_path: Path, *overrides: str, **changed: Any) -> Recipe:
    """The quickstart with a copy of its checkpoint, whose configuration is `changed`; None removes a field."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(SAMPLE, checkpoint)
    settings = {**json.loads((SAMPLE / "config.json").read_text()), **changed}
    kept = {name: value for name, value in settings.items() if value is not None}
    (checkpoint / "config.json").write_text(json.dumps(kept))
    return Recipe.load(QUICKSTART, [f"checkpoint={checkpoint}", *overrides])


@pytest.mark.parametrize(
    "changed",
    [
        {"alibi": True},
        {"position_embedding_type": "nope"},
        {"rope_theta": None, "rope_parameters": None, "rope_scaling": None},
        {"max_position_embeddings": None},
    ],
)
def test_the_graph_decides_where_the_configuration_does_not_say(tmp_path: Path, changed: dict[str, Any]) -> None:
    preflight.check(loaded(tmp_path, "engine.max_context=4096", **changed))
    with pytest.raises(UnsupportedError, match="made for 1024 tokens"):
        preflight.check(loaded(tmp_path / "as it is", "engine.max_context=4096"))


def test_a_nested_configuration_is_read(tmp_path: Path) -> None:
    text = {"rope_theta": 1e4, "max_position_embeddings": 512}
    recipe = loaded(tmp_path, max_position_embeddings=None, text_config=text)
    with pytest.raises(UnsupportedError, match="made for 512 tokens"):
        preflight.check(recipe)


def test_headers_of_weights_are_read(tmp_path: Path) -> None:
    recipe = loaded(tmp_path)
    preflight.check(recipe)
    weights = next(recipe.checkpoint.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="safetensors"):
        preflight.check(recipe)


def test_evaluation_on_calibration_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="also in the calibration data"):
        preflight.check(loaded(tmp_path, "validation.quality.data=../tests/data/calibration.jsonl"))
