"""A build that attributes its loss, and the command that looks into it, on a tiny checkpoint."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmforge.cli import cli
from llmforge.recipe import Recipe
from llmforge.report import charts

from ..cli.test_sealed import rewrite_record

WORDS = ("graph", "engine", "pass", "weight", "scale", "token", "cache", "layer", "head", "probe", "gate", "report")


Edit = Callable[[dict[str, Any]], object]


def of_step(number: int, edit: Edit) -> Edit:
    return lambda found: edit(found["steps"][number])


# What whoever knows the format writes into an attribution, with the digests that follow, and what tells.
FORGED: tuple[tuple[Edit, str], ...] = (
    (of_step(1, lambda step: step["kld_mean"].update(value=1e-3)), "kld_mean of step quantize-weights"),
    (of_step(1, lambda step: step["added"].update(low=1e-3)), "added of step quantize-weights"),
    (of_step(1, lambda step: step["layers"][1]["gain"].update(high=9.0)), "gain of layer 0 in step quantize-weights"),
    (of_step(1, lambda step: step["reached"].pop()), "sums of other documents"),
    (of_step(1, lambda step: step.update(name="flash-attention")), "steps that are no lossy passes"),
    (lambda found: found["steps"].pop(), "steps that are no lossy passes"),
    (of_step(1, lambda step: step.update(step_ms=step["step_ms"] / 2)), "step_ms of step quantize-weights"),
    (of_step(0, lambda step: step.update(step_ms=None)), "step_ms of step traced"),
    (of_step(1, lambda step: step.update(weight_bytes=9)), "weight_bytes of step quantize-weights"),
    (of_step(0, lambda step: step.update(kv_bytes_per_token=9)), "kv_bytes_per_token of step traced"),
    (of_step(1, lambda step: step["weights"].pop(0)), "weights of step quantize-weights"),
    (of_step(1, lambda step: step["weights"][0].update(read_bytes=0)), "weight_bytes of step quantize-weights"),
    (of_step(0, lambda step: step["caches"][0].update(token_bytes=1)), "kv_bytes_per_token of step traced"),
    (lambda found: found.update(context=1), "step_ms of step traced"),
    (lambda found: found.update(memory=None), "step_ms of step traced"),
    (lambda found: found["memory"].update(fixed_us=1e6), "step_ms of step traced"),
    (lambda found: found["memory"].update(bytes_per_second=1e15), "attribution: bandwidth"),
    (lambda found: found["memory"].update(share=2.0), "attribution: bandwidth"),
)


@pytest.fixture
def recipe_file(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    rng = random.Random(0)
    lines = [{"id": f"{i}", "text": f"{i} " + " ".join(rng.choices(WORDS, k=20))} for i in range(10)]
    (tmp_path / "evaluation.jsonl").write_text("\n".join(map(json.dumps, lines)))
    recipe = {
        "schema": 1, "name": "tiny", "checkpoint": str(tiny_checkpoint), "target": "local",
        "engine": {"max_context": 128, "max_batch": 2, "threads": 1},
        "passes": [
            "flash-attention",
            {"quantize-weights": {"block_size": 32, "method": "rtn", "budget": {"kld_mean": 10.0}}},
        ],
        "validation": {
            "quality": {"data": "evaluation.jsonl", "context": 32},
            "latency": {"prompt_tokens": [8], "output_tokens": 3, "repetitions": 3},
            "attribution": True,
        },
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.mark.thorough
def test_a_build_says_where_quality_went_and_bisecting_looks_into_it(recipe_file: Path, tmp_path: Path) -> None:
    done = run("build", str(recipe_file), "--out", str(tmp_path / "out"), "--quiet", "--json")
    assert done.exit_code == 0, done.output
    built = json.loads(done.stdout)
    found: dict[str, Any] = built["report"]["attribution"]
    traced, quantized = found["steps"]
    assert traced["name"] == "traced"
    assert traced["kld_mean"]["value"] == 0
    assert quantized["kld_mean"]["value"] == pytest.approx(quantized["added"]["value"])
    assert quantized["added"]["low"] > 0
    assert quantized["weight_bytes"] < 0.5 * traced["weight_bytes"]
    assert [layer["name"] for layer in quantized["layers"]] == ["model.embed_tokens.weight", "layer 0", "layer 1"]
    assert (
        found["memory"]["bytes_per_second"] == built["report"]["latency"]["bandwidth"]["working_set_bytes_per_second"]
    )
    assert quantized["step_ms"] < traced["step_ms"]
    page = (Path(built["artifact"]) / "report" / "report.html").read_text()
    assert "Where quality went" in page
    assert "most: layer" in page

    verified = run("verify", built["artifact"])
    assert verified.exit_code == 0, verified.output
    for number, (edit, told) in enumerate(FORGED):
        copy = tmp_path / f"edited {number}" / "tiny" / Path(built["artifact"]).name
        shutil.copytree(built["artifact"], copy)
        rewrite_record(copy, lambda record, edit=edit: edit(record["attribution"]))
        refused = run("verify", str(copy))
        assert refused.exit_code == 5
        assert told in " ".join(refused.stderr.split())

    better = tmp_path / "better.yaml"
    done = run("bisect", built["artifact"], "--recipe", str(recipe_file), "--json", "--quiet", "-o", str(better))
    assert done.exit_code == 0, done.output
    [only] = json.loads(done.stdout)["passes"]
    assert only["stands_out"] == []
    assert only["kld_mean"]["value"] > 0
    if only["kept"] is not None:
        assert Recipe.load(better).passes[1].options["exclude"]

    done = run(
        "bisect", built["artifact"], "--recipe", str(recipe_file), "--set", "passes.quantize-weights.block_size=64"
    )
    assert done.exit_code == 2
    assert "passes differ" in done.stderr


def test_attribution_needs_text(recipe_file: Path) -> None:
    done = run("build", str(recipe_file), "--set", "validation.quality=null", "--set", "passes=[flash-attention]")
    assert done.exit_code == 2
    assert "validation.attribution: there is no text to measure it on" in done.stderr


def test_what_a_pass_costs_stands_out_in_the_waterfall() -> None:
    from llmforge.metrics.attribution import AttributedStep, Attribution, LayerCost
    from llmforge.metrics.intervals import Estimate

    def of(value: float) -> Estimate:
        return Estimate(value=value, low=value / 2, high=value * 2, samples=24)

    def step(name: str, reached: float, added: float, *layers: float) -> AttributedStep:
        costs = tuple(LayerCost(name=f"layer {i}", gain=of(cost), gained=()) for i, cost in enumerate(layers))
        return AttributedStep(
            name=name, kld_mean=of(reached), added=of(added), weight_bytes=9, kv_bytes_per_token=2, step_ms=1.0,
            reached=(), layers=costs, weights=(), caches=(),
        )  # fmt: skip

    found = Attribution(
        documents=24, tokens=999, document_tokens=(), context=64, memory=None,
        steps=(step("traced", 0.0, 0.0), step("first", 0.08, 0.08, 0.06, 0.01), step("second", 0.07, -0.01)),
    )  # fmt: skip
    first, second = charts.waterfall(found)
    assert (first.start, first.width, first.gains) == (0.0, pytest.approx(100), False)
    (plot,) = charts.by_layer(found)
    heavy, light = plot.placed
    assert heavy.value - plot.zero == pytest.approx(6 * (light.value - plot.zero))
    assert (second.start, second.width, second.gains) == (pytest.approx(87.5), pytest.approx(12.5), True)


def test_bisecting_says_what_its_divergence_is_from() -> None:
    from llmforge.cli import bisecting
    from llmforge.diagnosis.bisecting import Findings, PassFindings
    from llmforge.metrics.intervals import Estimate

    loss = Estimate(value=0.01, low=0.009, high=0.011, samples=24)
    found = PassFindings(name="quantize-kv-cache", number=5, kld_mean=loss, stands_out=(), groups=0, layers=(),
                         explains=(), kept=None)  # fmt: skip
    lines = list(bisecting._lines(Findings(documents=24, tokens=999, alpha=0.05, passes=(found,))))
    assert lines[1] == "quantize-kv-cache: KLD from the graph before it 0.01 [0.009, 0.011]"


@pytest.mark.slow
def test_a_report_says_why_a_pass_has_no_errors_by_layer(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmforge.verification import divergence

    monkeypatch.setattr(divergence.Divergence, "streams", lambda self, model: True)
    done = run("build", str(recipe_file), "--out", str(tmp_path / "out"), "--quiet", "--json")
    assert done.exit_code == 0, done.output
    built = json.loads(done.stdout)
    _, quantized = built["report"]["attribution"]["steps"]
    assert quantized["layers"] == []
    assert "runs block by block" in quantized["no_layers"]
    for name in ("report.html", "report.md"):
        text = (Path(built["artifact"]) / "report" / name).read_text()
        assert "quantize-weights, errors by layer: not measured: a graph of" in text
    assert run("verify", built["artifact"]).exit_code == 0
