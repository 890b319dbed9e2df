"""Builds wheels of this checkout, without writing into it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Folders at the top of the repository that ship inside the package, and what of them.
MAPPED = {"passes": "*.py", "targets": "*", "recipes": "*"}


# A compiler that takes a fifth of the time: of several levels the last one counts.
HASTY = '#!/bin/sh\nexec {cc} "$@" -O0\n'


def copy_source(folder: Path) -> Path:
    """Copy what a build reads into `folder`; return it."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("llmforge", *MAPPED):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def build(source: Path, out: Path, *arguments: str) -> Path:
    """Build into `out`, an sdist and a wheel from it unless `arguments` say else; return the wheel.

    What is compiled is not optimized: these wheels are looked at, and not measured.
    """
    compiler = source / "cc"
    compiler.write_text(HASTY.format(cc=os.environ.get("CC", "cc")))
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *arguments, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "CC": str(compiler)})
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel
