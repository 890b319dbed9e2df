"""Builds wheels of this checkout, without writing into it."""

from __future__ import annotations

import os
from pathlib import Path

from release import wheels
from release.wheels import MAPPED, copy_source

__all__ = ["MAPPED", "build", "copy_source"]

# A compiler that takes a fifth of the time: of several levels the last one counts.
HASTY = '#!/bin/sh\nexec {cc} "$@" -O0\n'


def hasty_compiler(folder: Path, compiler: str | None = None) -> Path:
    """Write into `folder` a compiler that does not optimize: its wheels are looked at, and not measured."""
    file = folder / "cc"
    file.write_text(HASTY.format(cc=compiler or os.environ.get("CC", "cc")))
    file.chmod(0o755)
    return file


def build(source: Path, out: Path, *arguments: str) -> Path:
    """Build into `out`, an sdist and a wheel from it unless `arguments` say else; return the wheel."""
    wheels.build(source, out, *arguments, compiler=str(hasty_compiler(source)))
    (wheel,) = out.glob("*.whl")
    return wheel
