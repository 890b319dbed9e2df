"""A recipe of a small random checkpoint, with the texts that it reads beside it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FUSED = ("fuse-norms", "pack-qkv", "pack-gate-up", "flash-attention")
QUALITY = {"quality": {"data": "evaluation.jsonl", "context": 64}}
_TEXT = ("graph", "engine", "pass", "weight", "scale", "token", "cache", "layer", "head", "probe", "gate", "report")


def write(folder: Path, checkpoint: Path, lossy: Sequence[Mapping[str, Any]], gates: Mapping[str, Any]) -> Path:
    """Write `folder`/recipe.yaml, which fuses, calibrates, takes the `lossy` passes and measures quality."""
    rng = random.Random(0)
    for name in ("calibration", "evaluation"):
        lines = [{"id": f"{name}-{i}", "text": f"{name} {i} " + " ".join(rng.choices(_TEXT, k=30))} for i in range(10)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    recipe = {
        "schema": 1,
        "name": "tiny",
        "checkpoint": str(checkpoint),
        "target": "local",
        "engine": {"max_context": 128, "max_batch": 2, "threads": 1},
        "calibration": {"data": "calibration.jsonl", "samples": 8, "length": 64},
        "passes": [*FUSED, *lossy],
        "validation": QUALITY,
        "gates": gates,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    return path
