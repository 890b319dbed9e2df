"""Build every recipe that needs no GPU and write the SHA-256 of each engine file; or compare with such a list.

    python -m benchmarks.engine_bytes -o before.json                    # of this checkout
    python -m benchmarks.engine_bytes --root ../other -o before.json    # of another one, with this environment
    python -m benchmarks.engine_bytes --before before.json              # exit 1 where a byte differs

A refactoring changes no byte. Both lists must come from one machine: BLAS kernels differ between processors, and GPTQ's
codes with them. What is measured does not count, so quality is measured on few documents and latency not at all. The
recipe gguf needs `gguf==0.19.0`.
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
DEFERRED = ("70b-h200-int4", "h200-tensorrt", "llama-h100-cuda", "llama-rtx4090-tensorrt", "t4")
DOCUMENTS = 16  # of the evaluation text: enough for budgets, few for figures
BUILT = (
    0,
    3,
    4,
    10,
)  # exit codes of a build that published: gates passed, failed, undecided, or its engine is deferred


def recipes(root: Path) -> list[str]:
    """List those of a checkout that this machine builds."""
    here = [each.stem for each in sorted((root / "recipes").glob("*.yaml")) if "\ntarget: local" in each.read_text()]
    here = [name for name in here if name not in ("embedder", "reranker")]  # which have no perplexity
    return [*here, *(name for name in DEFERRED if (root / "recipes" / f"{name}.yaml").is_file())]


def digests(root: Path, recipe: str, folder: Path) -> dict[str, str]:
    """Build `recipe` of the checkout `root` and return file of its engine or tokenizer → SHA-256."""
    source = root / "recipes" / f"{recipe}.yaml"
    lines = (root / "tests/data/evaluation.jsonl").read_text().splitlines()[:DOCUMENTS]
    few = folder / "few.jsonl"
    few.write_text("\n".join(lines) + "\n")
    validation = {"quality": {"data": str(few), "context": 512}}
    command = [
        sys.executable, "-c", "from llmforge.cli import main; main()", "build", str(source),
        "--out", str(folder / "out"), "--quiet", "--no-cache", "--set", f"validation={json.dumps(validation)}",
        "--set", "gates={kld_mean: {max: 100}}",
        *(["--defer"] if recipe in DEFERRED else ()),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))},
        capture_output=True,
        text=True,
        check=False,
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
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="all by default")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to build with")
    parser.add_argument("-o", "--output", type=Path, help="write the list as JSON")
    parser.add_argument("--before", type=Path, help="an earlier list to compare with")
    arguments = parser.parse_args()
    before = json.loads(arguments.before.read_text()) if arguments.before else None
    found: dict[str, dict[str, str]] = {}
    differing = 0
    for recipe in arguments.recipes or recipes(arguments.root):
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
