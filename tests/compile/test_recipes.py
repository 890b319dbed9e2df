"""The recipes that ship, built unchanged: those whose engine needs no GPU (minutes: slow)."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from llmforge.artifact import Artifact
from llmforge.cli import cli
from llmforge.recipe import Recipe

FOLDER = Path(__file__).parents[2] / "recipes"
ELSEWHERE = {"genai", "optimum"}  # also run in other runtimes: tests/evaluation has them


def here() -> list[Path]:
    """List those whose engine this machine builds and runs."""
    found = sorted(FOLDER.glob("*.yaml"))
    return [path for path in found if path.stem not in ELSEWHERE and Recipe.load(path).target == "local"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", here(), ids=lambda path: path.stem)
def test_a_recipe_builds_and_passes_its_gates(path: Path, tmp_path: Path) -> None:
    if Recipe.load(path).engine.backend == "gguf":
        pytest.importorskip("gguf", reason="the extra gguf")
    result = CliRunner().invoke(cli, ["build", str(path), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    opened = Artifact.open(Path(result.stdout.splitlines()[-1]))
    opened.verify()
    assert opened.verdict == "pass"
