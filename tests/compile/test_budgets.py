"""Budgets that do not hold: one message with every excess, and a line that works when it is pasted."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result

from llmforge import passes
from llmforge.artifact import Artifact
from llmforge.cli import cli
from llmforge.compile import validating
from llmforge.gates import records, verdict
from llmforge.gates.decision import Verdict
from llmforge.passes.fuse_norms import FuseNorms
from llmforge.recipe import Recipe
from llmforge.rewrite.pass_base import Changes, Context

from ..samples import tiny_recipes

TIGHT = {"kld_mean": 1e-6}


@pytest.fixture
def recipe_file(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    """Write a recipe whose budgets and gates cannot hold."""
    lossy = [
        {"quantize-weights": {"bits": 4, "block_size": 32, "budget": TIGHT}},
        {"quantize-kv-cache": {"budget": TIGHT}},
    ]
    gates = {"kld_mean": {"max": 1e-5}, "top1_agreement": {"min": 0.9999}}
    return tiny_recipes.write(tmp_path, tiny_checkpoint, lossy, gates)


def build(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["build", *map(str, words)])


def pasted(stderr: str) -> Sequence[str]:
    """Return the words of the command that the hint gives, but for the program."""
    [line] = [line for line in stderr.splitlines() if "llmforge build" in line]
    words = shlex.split(line[line.index("llmforge build") :])
    assert words[0] == "llmforge"
    return words[1:]


@pytest.mark.usefixtures("shared_build_cache")
def test_every_excess_is_told_at_once_and_the_line_passes(recipe_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = build(recipe_file, "--out", out, "--set", "engine.threads=1")
    assert result.exit_code == 7, result.output
    said = result.stderr.splitlines()
    start = said.index("error: 2 passes exceed their budgets:")
    assert said[start + 1].startswith("pass quantize-weights: mean KLD is ")
    assert "its budget 1e-06; most of it in layer " in said[start + 1]
    assert said[start + 2].startswith("pass quantize-kv-cache: mean KLD is ")
    assert [line.split(":")[0] for line in said[start + 3 : start + 5]] == ["gate kld_mean", "gate top1_agreement"]
    assert not list(out.glob("*/[!.]*")), "nothing is published"
    words = pasted(result.stderr)
    assert words[:2] == ["build", str(recipe_file)]
    assert "engine.threads=1" in words
    again = CliRunner().invoke(cli, list(words))
    assert again.exit_code == 0, again.output
    assert Path(again.stdout.splitlines()[-1]).parent == out / "tiny"


def test_a_failed_exact_proof_ends_the_build_whatever_budgets_do(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = FuseNorms.run

    def lying(self: FuseNorms, model: ir.Model, context: Context) -> Changes:
        weight = model.graph.initializers["model.norm.weight"]
        assert weight.const_value is not None
        weight.const_value = ir.Tensor(weight.const_value.numpy() * 2, name=weight.name)
        return own(self, model, context)

    monkeypatch.setattr(FuseNorms, "run", lying)
    assert FuseNorms in passes.ALL
    result = build(recipe_file, "--out", tmp_path / "out", "--publish-failed")
    assert result.exit_code == 7, result.output
    assert "pass fuse-norms declares rounding" in result.stderr
    assert "exceed" not in result.stderr
    assert not list((tmp_path / "out").glob("*/[!.]*"))


@pytest.mark.usefixtures("shared_build_cache")
def test_what_is_published_failed_says_so_wherever_it_is_looked_at(recipe_file: Path, tmp_path: Path) -> None:
    """The gates that could pass do; the verdict is FAIL, in records that are added later, too."""
    out, gates = tmp_path / "out", "gates={kld_mean: {max: 5}}"
    result = build(recipe_file, "--out", out, "--publish-failed", "--set", gates)
    assert result.exit_code == 3, result.output
    path = Path(result.stdout.splitlines()[-1])
    assert "2 passes exceed their budgets" in result.stdout
    assert "pass quantize-weights: mean KLD is" in result.stderr
    published = Artifact.open(path)
    published.verify()
    assert published.verdict == "fail"
    verdict.recompute(published)
    report = records.read(published)
    assert [gate.verdict.value for gate in report.gates] == ["pass"]
    assert report.excesses[1].startswith("pass quantize-kv-cache: mean KLD is")
    assert "2 passes exceed their budgets" in (path / "report" / "report.html").read_text()

    gated = CliRunner().invoke(cli, ["gate", str(path)])
    assert gated.exit_code == 3
    assert "FAIL  pass quantize-weights: mean KLD is" in gated.stdout
    assert "PASS  kld_mean" in gated.stdout
    assert CliRunner().invoke(cli, ["run", str(path), "token"]).exit_code == 3
    assert CliRunner().invoke(cli, ["run", str(path), "token", "--allow", "fail", "--max-tokens", "1"]).exit_code == 0
    assert " fail " in CliRunner().invoke(cli, ["ls", "--out", str(out)]).stdout
    assert CliRunner().invoke(cli, ["tag", f"tiny/{path.name}", "prod", "--out", str(out)]).exit_code == 3

    again = validating.validate(path, Recipe.load(recipe_file, (gates,)))
    assert again.report.verdict is Verdict.FAIL
    assert Artifact.open(again.path).verdict == "fail"


@pytest.mark.usefixtures("shared_build_cache")
def test_a_record_cannot_widen_its_own_budget(recipe_file: Path, tmp_path: Path) -> None:
    """Budgets of a record are held against the sealed recipe: with other ones the verdict would be another."""
    out = tmp_path / "out"
    built = build(recipe_file, "--out", out, "--publish-failed", "--set", "gates={kld_mean: {max: 5}}", "--quiet")
    published = Artifact.open(Path(built.stdout.splitlines()[-1]))
    report = records.read(published)
    held = [each.verification.model_copy(update={"budget": 5.0}) for each in report.passes]
    passes = tuple(
        each.model_copy(update={"verification": found}) if each.excess else each
        for each, found in zip(report.passes, held, strict=True)
    )
    forged = report.model_copy(update={"passes": passes, "verdict": Verdict.PASS})
    assert not forged.excesses
    assert list(verdict._misnamed(published, report, report.checkpoint)) == []
    assert list(verdict._misnamed(published, forged, report.checkpoint)) == [
        "budget of pass quantize-weights",
        "budget of pass quantize-kv-cache",
    ]


@pytest.mark.usefixtures("shared_build_cache")
@pytest.mark.thorough
def test_bisecting_takes_the_recipe_of_a_build_that_failed(recipe_file: Path, tmp_path: Path) -> None:
    """All it computes of the graphs the failed build has left in the cache."""
    assert build(recipe_file, "--out", tmp_path / "out", "--quiet").exit_code == 7
    done = CliRunner().invoke(cli, ["bisect", str(recipe_file), "--documents", "8", "--tokens", "8", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["passes"]
    assert [each["name"] for each in found] == ["quantize-weights", "quantize-kv-cache"]
    assert all(each["kld_mean"]["value"] > 0 for each in found)
    assert "Calibrate: all layers reused" in done.stderr
    refused = CliRunner().invoke(cli, ["bisect", str(recipe_file), "--recipe", str(recipe_file)])
    assert refused.exit_code == 2
    assert "--recipe cannot be used with RECIPE" in refused.stderr
