"""A backend is one folder: with its place in the table and in a target, schema, plan, doctor and builds know it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..models.checkpoints import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
MACHINE = """\
title: a machine
like: cpu-generic
kind: cpu
isa: generic
engines: [toy]
memory_gb: {value: 24, source: measured, verified: true}
bandwidth_gbs: {value: 30, source: measured, verified: true}
rates:
  fp32: {value: 0.3, source: measured, verified: true}
  int8: {value: 0.6, source: measured, verified: true}
"""
USE = """
import json, sys
from pathlib import Path

import llmforge
from click.testing import CliRunner
from llmforge.cli import cli
from llmforge.doctor import environment
from llmforge.serving import Sampling, load

def said(*arguments):
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout

recipe = Path("recipe.yaml")
found = {
    "backends": json.loads(said("schema"))["$defs"]["EngineSpec"]["properties"]["backend"]["enum"],
    "target": said("targets", "cpu-generic"),
    "plan": json.loads(said("plan", str(recipe), "--target", "machine.yaml", "--json")),
    "doctor": "toy-runtime" in environment._PACKAGES,
}
result = llmforge.build(recipe, out="out")
runner = load(result.path, threads=1)
found["session"] = type(runner.session).__name__
found["text"] = "".join(chunk.text for chunk in runner.generate("a", Sampling(max_tokens=5)))
found["provider"] = runner.config.provider
print(json.dumps(found))
"""


def house_with(folder: Path, into: Path) -> None:
    """Make a copy of llmforge that has the backend in `folder`; its other modules are links to ours."""
    package, name = into / "llmforge", folder.name
    (package / "backends").mkdir(parents=True)
    for file in (ROOT / "llmforge").iterdir():
        if file.name not in ("backends", "targets"):
            (package / file.name).symlink_to(file.resolve())
    for file in (ROOT / "llmforge" / "backends").iterdir():
        if file.name != "__init__.py":
            (package / "backends" / file.name).symlink_to(file)
    shutil.copytree(folder, package / "backends" / name)
    shutil.copytree(ROOT / "targets", package / "targets")
    for file, old, new in (
        (package / "backends" / "__init__.py", "_FOLDERS = (", f"_FOLDERS = ({name}, "),
        (package / "backends" / "__init__.py", "gguf, onnxruntime", f"gguf, {name}, onnxruntime"),
        (package / "targets" / "cpu-generic.yaml", "engines: [", f"engines: [{name}, "),
    ):
        source = ROOT / "llmforge" / file.relative_to(package) if not file.exists() else file
        text = source.read_text(encoding="utf-8")
        assert text.count(old) == 1
        file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.thorough
@pytest.mark.usefixtures("_own_build_cache")
def test_a_backend_is_a_folder(tmp_path: Path) -> None:
    house_with(ROOT / "tests" / "backends" / "toy", tmp_path / "house")
    write_checkpoint(tmp_path / "tiny-llama")
    lines = [{"id": f"{i}", "text": f"document {i} of the evaluation has some words. " * 4} for i in range(8)]
    (tmp_path / "evaluation.jsonl").write_text("\n".join(map(json.dumps, lines)))
    facts = {
        "schema": 1,
        "name": "toy",
        "checkpoint": "tiny-llama",
        "target": "cpu-generic",
        "engine": {"backend": "toy", "max_context": 64, "threads": 1},
        "passes": [],
        "validation": {"quality": {"data": "evaluation.jsonl", "context": 32}},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(facts))
    (tmp_path / "machine.yaml").write_text(MACHINE)
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'house')!r})\n{USE}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "toy" in found["backends"]
    assert "toy" in found["target"]
    assert found["plan"]["backend"] == "toy"
    assert found["doctor"]
    assert (found["session"], found["provider"]) == ("ToySession", "toy")
    assert found["text"]
