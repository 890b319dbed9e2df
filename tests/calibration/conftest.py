from pathlib import Path

import pytest

from llmforge.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def opened() -> Checkpoint:
    """The trained sample."""
    return Checkpoint.open(Path(__file__).parents[1] / "data" / "docs-llama-7m")
