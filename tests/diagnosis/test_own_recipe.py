"""Commands that measure an artifact again need no recipe: it has its own, and where inputs lie is remembered."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmforge.cli import cli
from llmforge.compile import inputs

WORDS = ("graph", "engine", "pass", "weight", "scale", "token", "cache", "layer", "head", "probe", "gate", "report")


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, list(map(str, words)))


def text(name: str, documents: int) -> str:
    rng = random.Random(name)
    lines: Sequence[dict[str, str]] = [
        {"id": f"{name}-{i}", "text": f"{name} {i} " + " ".join(rng.choices(WORDS, k=30))} for i in range(documents)
    ]
    return "\n".join(map(json.dumps, lines))


@pytest.fixture
def built(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    """Build an artifact that calibration, evaluation and a target's slots take part in."""
    for name in ("calibration", "evaluation"):
        (tmp_path / f"{name}.jsonl").write_text(text(name, 10))
    recipe: dict[str, Any] = {
        "schema": 1,
        "name": "tiny",
        "checkpoint": str(tiny_checkpoint),
        "target": "local",
        "engine": {"max_context": 128, "max_batch": 2, "threads": 1},
        "calibration": {"data": "calibration.jsonl", "samples": 8, "length": 64},
        "passes": [
            "flash-attention",
            {"quantize-weights": {"block_size": 32, "method": "rtn", "budget": {"kld_mean": 10.0}}},
        ],
        "validation": {"quality": {"data": "evaluation.jsonl", "context": 32}},
        "gates": {"kld_mean": {"max": 5}},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    done = run("build", path, "--out", tmp_path / "out", "--quiet")
    assert done.exit_code == 0, done.output
    path.unlink()  # nothing reads it any more
    return Path(done.stdout.splitlines()[-1])


@pytest.mark.thorough
def test_an_artifact_is_enough_as_long_as_its_inputs_lie_where_they_were(
    built: Path, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    few = ("--documents", "8", "--tokens", "8", "--quiet")
    done = run("validate", built, "--quiet")
    assert done.exit_code == 0, done.output
    done = run("bisect", built, *few)
    assert done.exit_code == 0, done.output
    assert "quantize-weights: KLD from the graph before it" in done.stdout
    (tmp_path / "more.jsonl").write_text(text("more", 10))
    done = run("gate", built, "--until-decided", "--text", tmp_path / "more.jsonl")
    assert done.exit_code == 0, done.output
    assert "look at 10 documents, at α 0.0125" in done.stdout  # of 20

    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "evaluation.jsonl").rename(tmp_path / "elsewhere" / "evaluation.jsonl")
    done = run("validate", built, "--quiet")
    assert done.exit_code == 2
    assert "was built with evaluation.jsonl (" in done.stderr
    assert "hint: give the recipe with --recipe" in done.stderr  # validate has no --text
    assert run("bisect", built, *few).exit_code == 2
    done = run("bisect", built, *few, "--text", moved)
    assert done.exit_code == 0, done.output

    moved.rename(tmp_path / "evaluation.jsonl")
    config = tiny_checkpoint / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "note": 1}))
    done = run("validate", built, "--quiet")
    assert done.exit_code == 2
    assert "its digest is" in done.stderr
    tiny_checkpoint.rename(tmp_path / "elsewhere" / "checkpoint")
    done = run("validate", built, "--quiet")
    assert done.exit_code == 2
    assert "was built with the checkpoint " in done.stderr


def test_files_of_a_resolved_recipe_are_found_wherever_they_stand() -> None:
    def content(name: str) -> dict[str, str]:
        return {"name": name, "sha256": f"hash of {name}"}

    resolved = {"a": content("x"), "b": {"data": [content("y"), content("z")], "name": "n"}, "c": [1, {"d": None}]}
    written = {"a": "/x", "b": {"data": ["/y", "/z"], "name": "n"}, "c": [1, {"d": None}], "e": 2}
    assert dict(inputs.files(resolved, written)) == {"hash of x x": "/x", "hash of y y": "/y", "hash of z z": "/z"}
