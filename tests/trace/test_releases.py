"""The sweep on every release of transformers that llmforge says it was proven with, each in a folder of its own.

LLMFORGE_TEST_ENVIRONMENTS names a folder that keeps the releases between runs; else they are fetched anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from llmforge.checkpoint import versions
from llmforge.trace.hooks import table

from ..sweep import render

ROOT = Path(__file__).parents[2]
# Those that people deploy most, and the two whose outcome is a refusal.
TYPES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "phi", "phi3", "falcon"),
    *("bloom", "opt", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "mamba", "mamba2", "qwen3_next"),
    *("granite", "granitemoehybrid", "cohere2", "olmo2", "smollm3", "glm4", "stablelm", "starcoder2"),
    *("llama4_text", "bert"),
)
OTHERS = [release for release in versions.PROVEN if release != transformers.__version__]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", params=OTHERS)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    kept = os.environ.get("LLMFORGE_TEST_ENVIRONMENTS")
    folder = (Path(kept) if kept else tmp_path_factory.mktemp("releases")) / f"transformers-{request.param}"
    if not (folder / f"transformers-{request.param}.dist-info").is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*install, f"transformers=={request.param}"], check=True)
    return request.param, folder


def run(release: tuple[str, Path], *arguments: str) -> str:
    """Run a module in an environment whose transformers is that release."""
    environment = {**os.environ, "PYTHONPATH": f"{release[1]}:{ROOT}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_its_hooks_are_those_that_are_written_down(release: tuple[str, Path]) -> None:
    assert json.loads(run(release, "-m", "llmforge.trace.hooks.table")) == table.releases()[release[0]]
    code = (
        "import transformers; from llmforge.checkpoint import versions; from llmforge.trace.hooks import table;"
        "versions.check(); print(transformers.__version__, *filter(None, map(table.lost, table.HOOKS)))"
    )
    assert run(release, "-c", code).split() == [release[0]]


def test_its_sweep_has_the_outcomes_of_the_table(release: tuple[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    run(release, "-m", "tests.sweep.run", "--out", str(out), "--only", ",".join(TYPES))
    records = json.loads(out.read_text())
    rows = [line.split("|") for line in (ROOT / "docs/architectures.md").read_text().splitlines()]
    table_ = {row[1].strip(): row[2].strip() for row in rows if len(row) > 3}
    assert not [name for name, record in records.items() if record["outcome"] in render.BUGS]
    assert {name: record["outcome"] for name, record in records.items()} == {name: table_[name] for name in TYPES}
