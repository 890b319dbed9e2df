"""Artifacts of a few bytes, for tests of what keeps, moves and removes artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmforge.artifact import Artifact, publish, staging
from llmforge.evaluation.gates import judge, overall
from llmforge.metrics import catalog
from llmforge.recipe import GateSpec

from . import reports

FILES = {
    "engine/model.onnx": b"graph",
    "engine/model.onnx.data": bytes(range(256)) * 5,
    "tokenizer/tokenizer.json": b"{}",
}
PASSES = {"kld_mean": {"max": 0.03}}  # gates and what the figures of `reports` make of them
FAILS = {"kld_mean": {"max": 0.001}}
UNDECIDED = {"kld_mean": {"max": 0.021}}


def put(
    out: Path,
    content: str = "graph",
    *,
    name: str = "tiny",
    version: str | None = None,
    gates: dict[str, Any] | None = None,
    verdict: str | None = None,
    files: dict[str, bytes] | None = None,
) -> Artifact:
    """Publish one; its verdict is what its report gives, unless another is claimed."""
    recipe = {"schema": 1, "name": name, "gates": PASSES if gates is None else gates}
    specs = {metric: GateSpec.model_validate(limits) for metric, limits in recipe["gates"].items()}
    found = overall(judge(specs, catalog.estimates(reports.MEASURED)))
    report = reports.make(recipe=recipe, verdict=found)
    everything = {
        **FILES,
        "engine/model.onnx": content.encode(),
        "report/report.json": report.to_json().encode(),
        **(files or {}),
    }
    with staging(out, name) as folder:
        for path, data in everything.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        return publish(
            folder,
            recipe=recipe,
            checkpoint="c" * 64,
            target="cpu-avx2",
            verdict=verdict or found.value,  # type: ignore[arg-type]
            requires={},
            version=version,
        )
