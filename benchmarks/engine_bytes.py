"""Build every recipe that needs no GPU and write the SHA-256 of each engine file; or compare with such a list.

    python -m benchmarks.engine_bytes -o before.json                    # of the checkout at hand
    python -m benchmarks.engine_bytes --root ../other -o before.json    # of another one, with this environment
    python -m benchmarks.engine_bytes --before before.json              # exit 1 where a byte differs

A refactoring changes no byte. Both lists must come from one machine: BLAS kernels differ between processors, and GPTQ's
codes with them. What is measured does not count, so quality is measured on few documents and latency not at all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# `llmforge build --defer` and TensorRT-RTX need no GPU either: what they publish is compared, too.
RECIPES = (
    "fp32", "genai", "int4-rtn", "int8", "optimum", "portable", "quickstart",
    "h200-tensorrt", "llama-h100-cuda",
)  # fmt: skip
DOCUMENTS = 3  # of the evaluation text
BUILT = (0, 3, 4)  # exit codes of a build that published: gates passed, failed, undecided


def digests(root: Path, recipe: str, folder: Path) -> dict[str, str]:
    """Build `recipe` of the checkout `root` and return file of its engine or tokenizer → SHA-256."""
    source = root / "recipes" / f"{recipe}.yaml"
    lines = (root / "tests/data/evaluation.jsonl").read_text().splitlines()[:DOCUMENTS]
    few = folder / "few.jsonl"
    few.write_text("\n".join(lines) + "\n")
    command = [
        sys.executable, "-c", "from llmforge.cli import main; main()", "build", str(source),
        "--out", str(folder / "out"), "--quiet",
        "--set", f"validation.quality.data={few}", "--set", "validation.latency=null",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
    )
    if done.returncode not in BUILT:
        sys.exit(f"{recipe}: exit {done.returncode}\n{done.stderr}")
    artifact = Path(done.stdout.splitlines()[-1])
    return {
        str(path.relative_to(artifact)): hashlib.sha256(path.read_bytes()).hexdigest()
        for part in ("engine", "tokenizer")
        for path in sorted((artifact / part).rglob("*"))
        if path.is_file()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(RECIPES)}; all by default")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to build with")
    parser.add_argument("-o", "--output", type=Path, help="write the list as JSON")
    parser.add_argument("--before", type=Path, help="an earlier list to compare with")
    arguments = parser.parse_args()
    before = json.loads(arguments.before.read_text()) if arguments.before else None
    found: dict[str, dict[str, str]] = {}
    differing = 0
    for recipe in arguments.recipes or RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            found[recipe] = digests(arguments.root.resolve(), recipe, Path(folder))
        line = f"{recipe}: {len(found[recipe])} files"
        if before is not None:
            old, new = before[recipe], found[recipe]
            other = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
            differing += len(other)
            line += f", {', '.join(other)} differ" if other else ", the same bytes"
        print(line, flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
