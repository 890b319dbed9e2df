"""A build that trains scales: attributed as every lossy pass is, and as without it where that does not pay."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmforge.calibration import recovery
from llmforge.cli import cli

LOOSE = {"kld_mean": 10.0}
WORDS = ("graph", "engine", "pass", "weight", "scale", "token", "cache", "layer", "head", "probe", "gate", "report")


def build(folder: Path, checkpoint: Path, least: float, *, attribution: bool) -> dict[str, Any]:
    drawn = random.Random(0)
    for name, first in (("calibration", 0), ("evaluation", 100)):
        lines = [
            {"id": f"{i}", "text": f"{i} " + " ".join(drawn.choices(WORDS, k=20))} for i in range(first, first + 16)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    steps = [
        {"quantize-weights": {"bits": 3, "block_size": 32, "method": "gptq", "scales": "int8", "budget": LOOSE}},
        {"recover-scales": {"tokens": 4096, "least": least, "budget": LOOSE}},
        {"cpu-kernels": {"budget": LOOSE}},
    ]
    recipe = {
        "schema": 1, "name": "tiny", "checkpoint": str(checkpoint), "target": "local", "passes": steps,
        "engine": {"max_context": 128, "max_batch": 2, "threads": 1},
        "calibration": {"data": "calibration.jsonl", "samples": 12, "length": 48},
        "validation": {"quality": {"data": "evaluation.jsonl", "context": 32}, "attribution": attribution},
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    done = CliRunner().invoke(cli, ["build", str(path), "--out", str(folder / "out"), "--quiet", "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)["report"]
    return found


@pytest.mark.thorough
def test_it_is_attributed_or_leaves_the_scales_and_says_why(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the loss of text held out falls is made up: a model of random weights need not do so on random words."""
    checks = itertools.count(1)
    monkeypatch.setattr(recovery._Student, "kld", lambda *_: 1 / next(checks))
    monkeypatch.setattr(recovery, "BATCH_TOKENS", 128)
    pays = build(tmp_path, tiny_checkpoint, 0.0, attribution=True)
    quantized, recovered = pays["passes"][:2]
    assert [quantized["name"], recovered["name"]] == ["quantize-weights", "recover-scales"]
    assert len(recovered["rewritten"]) == 14
    assert recovered["weight_bytes_before"] == recovered["weight_bytes_after"]
    steps = {step["name"]: step for step in pays["attribution"]["steps"]}
    assert steps["recover-scales"]["kld_mean"] != steps["quantize-weights"]["kld_mean"]
    assert any("scales trained on" in note for note in pays["notes"])

    checks = itertools.count(1)
    left = build(tmp_path, tiny_checkpoint, 0.95, attribution=False)
    assert not left["passes"][1]["rewritten"]
    assert any("scales stay as they are: training takes the KLD" in note for note in left["notes"])
