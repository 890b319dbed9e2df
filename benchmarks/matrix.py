"""Time of a matrix on a local Ray against the same builds one after the other, each side with an empty cache.

    python -m benchmarks.matrix [--jobs N] [--models N]

Small random checkpoints, three CPU targets and two variants; nothing is measured on the engines. What is timed is from
the start of the command to its end, Ray's own start included. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.models import zoo

ARCHITECTURES = ("llama", "qwen3", "mistral", "gemma2")
RECIPE = """\
schema: 1
name: zoo
checkpoint: llama
target: local
engine: {max_context: 64, max_batch: 2}
passes: [fuse-norms, pack-qkv, pack-gate-up, flash-attention]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--models", type=int, default=2, choices=range(1, len(ARCHITECTURES) + 1))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="llmforge-matrix-") as name:
        folder, models = Path(name), ARCHITECTURES[: asked.models]
        prepare(folder, models)
        alone = serial(folder, models)
        matrix, report = together(folder, asked.jobs)
    builds = report["builds"]
    print(json.dumps({
        "builds": len(builds),
        "jobs": asked.jobs,
        "cpus": os.cpu_count(),
        "serial_s": round(alone, 1),
        "matrix_s": round(matrix, 1),
        "speedup": round(alone / matrix, 2),
        "sum_of_builds_s": round(sum(each["seconds"] for each in builds), 1),
        "exit_code": report["exit_code"],
    }))  # fmt: skip


def prepare(folder: Path, models: tuple[str, ...]) -> None:
    """Write checkpoints, the recipe and the matrix."""
    for model in models:
        zoo.write(model, folder / model)
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    matrix = {
        "schema": 1, "name": "release", "recipe": "recipe.yaml",
        "models": {model: {"checkpoint": model} for model in models},
        "targets": {"local": None, "cpu-avx2": None, "cpu-generic": None},
        "variants": {"one": {"engine.max_batch": 1}, "two": None},
    }  # fmt: skip
    (folder / "release.yaml").write_text(json.dumps(matrix), encoding="utf-8")


def run(folder: Path, cache: str, *arguments: str) -> tuple[float, str]:
    """Run the command line with a cache of its own; return seconds and what it printed."""
    environment = {**os.environ, "LLMFORGE_CACHE": str(folder / cache)}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "llmforge", "build", *arguments],
        stdout=subprocess.PIPE, text=True, env=environment, check=True, cwd=folder,
    )  # fmt: skip
    return time.monotonic() - began, done.stdout


def serial(folder: Path, models: tuple[str, ...]) -> float:
    """Build one after the other, in the order of the matrix."""
    total = 0.0
    for batch in (1, 2):
        for target in ("local", "cpu-avx2", "cpu-generic"):
            for model in models:
                overrides = [f"checkpoint={model}", f"target={target}", f"engine.max_batch={batch}"]
                words = [word for each in overrides for word in ("--set", each)]
                total += run(folder, "serial", "-q", "recipe.yaml", "--out", "alone", *words)[0]
    return total


def together(folder: Path, jobs: int) -> tuple[float, dict[str, object]]:
    """Build them as a matrix."""
    seconds, printed = run(
        folder, "matrix", "-q", "--matrix", "release.yaml", "--out", "together", "--jobs", str(jobs), "--json"
    )
    return seconds, json.loads(printed)


if __name__ == "__main__":
    main()
