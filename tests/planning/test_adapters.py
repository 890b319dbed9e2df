"""What a plan says of adapters: their bytes, and what a row with one reads more."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from llmforge.cli import cli
from llmforge.metrics import units
from llmforge.planning import request

from ..models.adapters import ATTENTION, write_adapter
from ..models.checkpoints import write_checkpoint

LAYERS = 2


def recipe(folder: Path, mode: str) -> Path:
    write_checkpoint(folder / "base", tie_word_embeddings=False)
    write_adapter(folder / "one", folder / "base", rank=4)
    write_adapter(folder / "two", folder / "base", rank=8, targets=ATTENTION)
    passes = ["add-adapters"] if mode == "apart" else []
    plain = {
        "schema": 1,
        "name": "tiny",
        "checkpoint": "base",
        "target": "h200",
        "engine": {"max_context": 128},
        "passes": passes,
        "adapters": [{"name": name, "path": name, "mode": mode} for name in ("one", "two")],
    }
    (folder / "recipe.yaml").write_text(json.dumps(plain))
    return folder / "recipe.yaml"


def test_a_plan_says_the_bytes_of_adapters(tmp_path: Path) -> None:
    path = recipe(tmp_path, "apart")
    [planned] = request.answer(path, request.PlanRequest())
    assert isinstance(planned, request.Planned)
    attention = 2 * (64 + 64) + 2 * (64 + 32)  # features that products of q, o and k, v read and make
    elements = LAYERS * (8 * attention + 4 * (3 * (64 + 128)))
    said = next(note for note in planned.plan.notes if note.startswith("adapters kept apart (one, two)"))
    assert f"{units.size(3 * 2 * elements)} in the engine, in bf16" in said
    assert f"reads {units.size(2 * elements)} more" in said
    [merged] = request.answer(recipe(tmp_path, "merged"), request.PlanRequest())
    assert isinstance(merged, request.Planned)
    assert planned.build.disk_bytes - merged.build.disk_bytes == 3 * 2 * elements
    recipe(tmp_path, "apart")
    result = CliRunner().invoke(cli, ["plan", str(path)])
    assert result.exit_code == 0, result.output
    assert "adapters kept apart (one, two)" in " ".join(result.stdout.split())


def test_merged_adapters_cost_nothing(tmp_path: Path) -> None:
    [planned] = request.answer(recipe(tmp_path, "merged"), request.PlanRequest())
    assert isinstance(planned, request.Planned)
    assert "adapters merged (one, two): no bytes and no time of the engine" in planned.plan.notes
