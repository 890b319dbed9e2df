"""Environments of other runtimes, each made from a file of requirements in tests/runtimes/.

LLMFORGE_TEST_ENVIRONMENTS names a folder that keeps the environments between runs; else they are made anew.

    python -m tests.models.runtimes vllm build/runtimes    # make that of vLLM there, or leave it as it is
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RUNTIMES = Path(__file__).parents[1] / "runtimes"
REMOVE = "# remove: "  # packages that others demand, and that break here


def environment(name: str, scratch: Path) -> Path:
    """Make the environment of tests/runtimes/`name`.txt, or take the one that is kept; return its Python."""
    kept = os.environ.get("LLMFORGE_TEST_ENVIRONMENTS")
    folder = (Path(kept) if kept else scratch) / name
    python, done = folder / "bin" / "python", folder / "requirements.txt"
    wanted = (RUNTIMES / f"{name}.txt").read_text()
    if not done.exists() or done.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--requirement", RUNTIMES / f"{name}.txt"]
        subprocess.run(install, check=True)
        removed = [line.removeprefix(REMOVE).split() for line in wanted.splitlines() if line.startswith(REMOVE)]
        if removed:
            subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *removed[0]], check=True)
        done.write_text(wanted)
    return python


if __name__ == "__main__":
    print(environment(sys.argv[1], Path(sys.argv[2])))
