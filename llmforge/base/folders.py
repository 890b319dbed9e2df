"""Where artifacts are, unless a command or a call says otherwise."""

from __future__ import annotations

import os
from pathlib import Path

ARTIFACTS_VARIABLE = "LLMFORGE_ARTIFACTS"  # of the environment
ARTIFACTS = Path("artifacts")


def artifacts(given: str | Path | None = None) -> Path:
    """Return the folder of artifacts: what is given, else $LLMFORGE_ARTIFACTS, else artifacts/."""
    return Path(given if given is not None else os.environ.get(ARTIFACTS_VARIABLE) or ARTIFACTS)
