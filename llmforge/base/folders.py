"""Where artifacts are, unless a command or a call says otherwise, and where paths lead."""

from __future__ import annotations

import os
from pathlib import Path

ARTIFACTS_VARIABLE = "LLMFORGE_ARTIFACTS"  # of the environment
ARTIFACTS = Path("artifacts")


def artifacts(given: str | Path | None = None) -> Path:
    """Return the folder of artifacts: what is given, else $LLMFORGE_ARTIFACTS, else artifacts/."""
    return Path(given if given is not None else os.environ.get(ARTIFACTS_VARIABLE) or ARTIFACTS)


def followed(path: Path) -> Path:
    """Return the absolute path that the links in `path` lead to, as far as they lead anywhere.

    A link that leads to itself stays as it is, for who opens it to refuse; `Path.resolve` raises RuntimeError of it
    before Python 3.13.
    """
    return Path(os.path.realpath(path))
