"""Builds whose artifact runs in another runtime too: evidence, gates, failures, and what is refused at once.

The other runtime is llmforge's own, in a process that speaks as `runtime_process` does; tests/build/test_other_runtimes
has the real ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmforge.artifact import Artifact
from llmforge.base.errors import InputError
from llmforge.cli import cli
from llmforge.gates import records, verdict
from llmforge.gates.records import Report

ROOT = Path(__file__).parents[2]
OWN = f"""#!{sys.executable}
import json, sys
sys.path.insert(0, {str(ROOT)!r})
print(json.dumps({{"versions": {{"onnxruntime-genai": "9.9"}}}}), flush=True)
if len(sys.argv) < 5:
    sys.exit()
from pathlib import Path
from llmforge.serving import Sampling, load
runner = load(Path(sys.argv[4]).parent, threads=1)
for line in sys.stdin:
    asked = json.loads(line)
    prompt, answer = asked["prompt"], asked["answer"]
    steps = runner.generate(prompt, Sampling(max_tokens=asked["tokens"]))
    made = [step.token_id for step in steps if step.token_id is not None]
    rows = runner.logits([*prompt, *answer[:-1]], 1, first_step=len(prompt))[len(prompt) - 1 :]
    rows.tofile(asked["logits"])
    print(json.dumps({{"answer": made}}), flush=True)
"""
CRASHING = """#!/bin/sh
echo '{"versions": {"onnxruntime-genai": "9.9"}}'
[ -z "$4" ] && exit 0
kill -SEGV $$
"""
PASSES = ["fuse-norms", "flash-attention", "genai-interface"]


def invoke(*args: object) -> Result:
    result = CliRunner().invoke(cli, [str(word) for word in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


Write = Callable[..., Path]


@pytest.fixture
def recipe(tmp_path: Path, sample_checkpoint: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setenv("LLMFORGE_ARTIFACTS", str(tmp_path / "store"))

    def write(*, passes: Any = PASSES, validation: Any = (("runtimes", ["onnxruntime-genai"]),), **more: Any) -> Path:
        quality = {"data": str(data / "evaluation.jsonl"), "context": 96, "max_tokens": 800}
        fields = {
            "schema": 1, "name": "elsewhere", "checkpoint": str(sample_checkpoint), "target": "local",
            "engine": {"max_context": 96, "threads": 1}, "passes": passes,
            "validation": {"quality": quality, **dict(validation)}, **more,
        }  # fmt: skip
        file = tmp_path / "recipe.yaml"
        file.write_text(json.dumps(fields))
        return file

    return write


def python(folder: Path, text: str) -> str:
    file = folder / "python"
    file.write_text(text)
    file.chmod(0o755)
    return f"onnxruntime-genai={file}"


def newest(path: Path) -> tuple[Artifact, Report]:
    opened = Artifact.open(path)
    return opened, records.read(opened)


@pytest.mark.thorough
def test_evidence_of_another_runtime(recipe: Write, tmp_path: Path) -> None:
    gates = {"runtime.onnxruntime-genai.agreement": {"min": 0.95}, "runtime.onnxruntime-genai.kld_mean": {"max": 0.01}}
    file, own = recipe(gates=gates), python(tmp_path, OWN)
    built = invoke("build", file, "--quiet", "--runtime", own)
    assert built.exit_code == 0, built.output
    assert "tokens agree (" in built.stdout
    path = Path(built.stdout.splitlines()[-1])
    opened, report = newest(path)
    (run,) = report.runtimes
    assert (run.runtime, run.versions, run.failure) == ("onnxruntime-genai", {"onnxruntime-genai": "9.9"}, None)
    assert run.figures is not None
    assert run.figures.agreement.value == 1.0
    assert run.figures.same_answers.value == 1.0
    assert run.figures.logit_difference_max == 0.0
    assert len({each.ours for each in run.prompts}) > 5  # the model answers the prompt
    assert opened.manifest.recipe["validation"]["runtimes"] == ["onnxruntime-genai"]
    assert str(tmp_path) not in json.dumps(opened.manifest.recipe)  # no path of this machine decides the version
    assert invoke("verify", path).exit_code == 0
    html = next((path / opened.evidence[-1].home).glob("**/report.html")).read_text()
    assert "onnxruntime-genai 9.9" in html

    # Other values of one token than the figures were made of.
    told = json.loads((path / opened.evidence[-1].path).read_text())
    told["runtimes"][0]["prompts"][0]["their_top"][0] += 1
    changed = Report.model_validate(told)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "read", lambda *_: changed)
        with pytest.raises(InputError, match="does not follow from what was measured: runtime onnxruntime-genai"):
            verdict.recompute(opened)

    # A gate of later holds it too, and one that crashes fails it.
    release = tmp_path / "release.yaml"
    release.write_text(json.dumps({"gates": {"runtime.onnxruntime-genai.same_answers": {"min": 0.5}}}))
    assert invoke("gate", path, "--gates", release).exit_code == 0
    options = ("--recipe", tmp_path / "recipe.yaml", "--quiet", "--runtime", python(tmp_path, CRASHING))
    crashed = invoke("validate", path, *options)
    assert crashed.exit_code == 3, crashed.output
    said = " ".join(crashed.output.split())
    assert "onnxruntime-genai 9.9 failed: ended by SIGSEGV, after 0 of" in said
    assert "runtime.onnxruntime-genai.agreement: not measured, limit: at least 0.95" in said
    assert invoke("verify", path).exit_code == 0
    assert invoke("gate", path, "--gates", release).exit_code == 3


@pytest.mark.slow
def test_an_artifact_is_run_elsewhere_afterwards(recipe: Write, tmp_path: Path) -> None:
    file = recipe(validation=())
    built = invoke("build", file, "--quiet")
    path = Path(built.stdout.splitlines()[-1])
    assert newest(path)[1].runtimes == ()
    again = invoke("validate", path, "--recipe", file, "--quiet", "--runtime", python(tmp_path, OWN))
    assert again.exit_code == 0, again.output
    opened, report = newest(path)
    assert len(opened.evidence) == 2
    assert [run.runtime for run in report.runtimes] == ["onnxruntime-genai"]
    assert report.runtimes[0].figures is not None
    assert invoke("verify", path).exit_code == 0

    lacking = invoke("validate", path, "--recipe", file, "--quiet", "--runtime", f"optimum={sys.executable}")
    assert lacking.exit_code == 8
    assert len(Artifact.open(path).evidence) == 2


def test_what_is_missing_is_said_before_anything_is_built(recipe: Write, tmp_path: Path) -> None:
    for given in ((), ("--runtime", f"onnxruntime-genai={tmp_path / 'nowhere'}")):
        result = invoke("build", recipe(), *given)
        assert result.exit_code == 8, result.output
        assert "Read checkpoint" not in result.output
        assert not list((tmp_path / "store").glob("*/*"))
        assert len([line for line in result.stderr.splitlines() if "error" in line]) == 1
    assert "cannot be run" in result.stderr


def test_a_runtime_that_the_recipe_does_not_name_is_refused(recipe: Write, tmp_path: Path) -> None:
    result = invoke("build", recipe(), "--runtime", f"optimum={sys.executable}")
    assert result.exit_code == 2
    assert "--runtime optimum: `validation.runtimes` of" in result.stderr


@pytest.mark.parametrize("given", ["genai=/usr/bin/python", "optimum", "optimum="])
def test_the_option_wants_a_name_and_a_python(given: str, recipe: Write) -> None:
    result = invoke("build", recipe(), "--runtime", given)
    assert result.exit_code == 2
    assert "expected NAME=PYTHON; names: onnxruntime-genai, optimum" in " ".join(result.stderr.split())


def test_pythons_may_stand_in_the_environment(recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMFORGE_RUNTIMES", f"onnxruntime-genai={tmp_path}/here:optimum={tmp_path}/there")
    result = invoke("build", recipe(validation=[("runtimes", ["optimum", "onnxruntime-genai"])]))
    assert result.exit_code == 8
    assert f"{tmp_path}/there: cannot be run" in result.stderr


def test_own_operators_are_refused_by_name(recipe: Write) -> None:
    kernels = {"cpu-kernels": {"budget": {"kld_mean": 0.01}}}
    result = invoke("build", recipe(passes=[*PASSES[:2], kernels]))
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert "onnxruntime-genai cannot load the operators of the pass cpu-kernels, which only llmforge has" in said
    assert "recipes/portable.yaml" in said


def test_an_engine_for_a_gpu_is_refused(recipe: Write) -> None:
    result = invoke("build", recipe(target="h100-sxm", engine={"max_context": 96, "deferred": True}))
    assert result.exit_code == 6
    assert "onnxruntime-genai: other runtimes run engines for CPUs alone, and h100-sxm is none" in result.stderr
