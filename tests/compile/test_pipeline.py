"""Whole builds, of a tiny checkpoint: what is published, what stops a build, and what a killed one leaves behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result
from pydantic.dataclasses import dataclass

from llmforge import native, passes
from llmforge.artifact import Artifact
from llmforge.base.errors import VerificationError
from llmforge.cache import Cache
from llmforge.calibration import driver
from llmforge.calibration.store import LayerResult, Store
from llmforge.cli import cli
from llmforge.compile import pipeline
from llmforge.gates import records
from llmforge.gates.decision import Verdict
from llmforge.recipe import Recipe
from llmforge.rewrite.pass_base import Changes, Context, Numerics, Pass, Rewritten
from llmforge.serving import Sampling, load

from ..sweep import shrink

FUSED: list[Any] = ["fuse-norms", "pack-qkv", "pack-gate-up", "flash-attention"]
LOOSE = {"kld_mean": 5.0}  # random weights: only that the pass runs counts here
QUANTIZED = [
    *FUSED,
    {"quantize-weights": {"block_size": 32, "budget": LOOSE}},
    {"quantize-kv-cache": {"budget": LOOSE}},
]
WORDS = ("graph", "engine", "pass", "weight", "scale", "token", "cache", "layer", "head", "probe", "gate", "report")

Write = Callable[..., Path]


@pytest.fixture
def recipe_file(tmp_path: Path, tiny_checkpoint: Path) -> Write:
    """Write a recipe for the tiny checkpoint; keyword arguments replace its sections."""
    rng = random.Random(0)
    for name in ("calibration", "evaluation"):
        lines = [{"id": f"{name}-{i}", "text": f"{name} {i} " + " ".join(rng.choices(WORDS, k=30))} for i in range(10)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def write(**sections: Any) -> Path:
        recipe: Mapping[str, Any] = {
            "schema": 1,
            "name": "tiny",
            "checkpoint": str(tiny_checkpoint),
            "target": "local",
            "engine": {"max_context": 128, "max_batch": 2, "threads": 1},
            "calibration": {"data": "calibration.jsonl", "samples": 8, "length": 64},
            "passes": FUSED,
            "validation": {"quality": {"data": "evaluation.jsonl", "context": 64}},
            **sections,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps(recipe))  # JSON is YAML
        return path

    return write


def run(recipe: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["build", str(recipe), "--out", str(recipe.parent / "out"), "--quiet", *options])


def visible(out: Path) -> list[Path]:
    return [version for version in out.glob("*/*") if not version.name.startswith(".")]


def test_a_build_is_what_it_says(recipe_file: Write, tmp_path: Path) -> None:
    validation = {
        "quality": {"data": "evaluation.jsonl", "context": 64},
        "latency": {"prompt_tokens": [8], "output_tokens": 4, "repetitions": 2},
    }
    result = run(recipe_file(passes=QUANTIZED, validation=validation, gates={"kld_mean": {"max": 5.0}}))
    assert result.exit_code == 0, result.output
    path = Path(result.stdout.splitlines()[-1])
    artifact = Artifact.open(path)
    artifact.verify()
    assert [path] == visible(tmp_path / "out")
    assert artifact.verdict == "pass"
    assert artifact.manifest.recipe["passes"][4]["quantize-weights"]["method"] == "gptq"
    report = records.read(Artifact.open(path))
    assert [done.name for done in report.passes] == [next(iter(p)) if isinstance(p, dict) else p for p in QUANTIZED]
    assert all(done.rewritten for done in report.passes)
    assert report.quality is not None
    assert 0 < report.quality.kld_mean.value < 5
    assert report.latency is not None
    assert report.latency.points[0].tpot_speedup is not None
    counted = report.latency.footprint
    assert counted.multiply_adds_per_token is not None
    assert 0 < counted.head_multiply_adds < counted.multiply_adds_per_token
    stages = {stage.title: stage.seconds for stage in report.build.stages}
    assert sum(stage.seconds for stage in report.build.stages) == pytest.approx(report.build.seconds)
    assert all(stages[f"Pass {p.name}"] >= p.seconds > 0 for p in report.passes)
    assert all(p.verification.seconds > 0 for p in report.passes)  # of the last, beside what follows
    assert stages["Calibrate"] > 0
    assert stages["Measure quality"] > 0
    assert report.engine.size_bytes == sum(file.stat().st_size for file in (path / "engine").iterdir())
    assert [proof.partition(":")[0] for proof in report.proven] == ["trace", "engine"]
    assert not any(note.startswith("trace") for note in report.notes)
    weights = sum(group.size_bytes for group in report.engine.weights)
    assert 0.5 * report.engine.size_bytes < weights < report.engine.size_bytes
    assert any(group.name.startswith("model.layers.*.") for group in report.engine.weights)
    chunks = list(load(path).generate("graph", Sampling(max_tokens=8, ignore_eos=True)))
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.output_tokens == 8

    later = run(tmp_path / "recipe.yaml", "--set", "engine.max_context=64")
    assert later.exit_code == 0, later.output
    page = Path(later.stdout.splitlines()[-1]) / "report/report.html"
    assert f"Against tiny/{path.name} (PASS" in page.read_text()
    assert f"before: tiny/{path.name}" in later.stdout
    assert "Since the previous version" not in (path / "report/report.html").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers' own, about its model
def test_a_model_of_its_own_attention_is_built_and_says_so(recipe_file: Write, tmp_path: Path) -> None:
    shrink.write("diffllama", tmp_path / "diffllama")
    steps = [*FUSED, {"quantize-weights": {"method": "rtn", "block_size": 32, "budget": LOOSE}}]
    result = run(recipe_file(checkpoint=str(tmp_path / "diffllama"), passes=steps, calibration=None))
    assert result.exit_code == 0, result.output
    path = Path(result.stdout.splitlines()[-1])
    report = records.read(Artifact.open(path))
    assert "attention was traced from the model's own code" in " ".join(report.notes)
    assert not next(done for done in report.passes if done.name == "flash-attention").rewritten
    assert report.quality is not None
    assert report.quality.kld_mean.value < 5
    chunks = list(load(path).generate("graph", Sampling(max_tokens=8, ignore_eos=True)))
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.output_tokens == 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_own_attention_is_not_built_for_longer_texts_than_it_is_made_for(recipe_file: Write, tmp_path: Path) -> None:
    shrink.write("diffllama", tmp_path / "diffllama")
    recipe = recipe_file(checkpoint=str(tmp_path / "diffllama"), engine={"max_context": 256, "threads": 1})
    result = run(recipe)
    assert result.exit_code == 6, result.output
    assert "engine.max_context is 256; the model is made for 128 tokens" in result.stderr.replace("\n", " ")


@pytest.mark.slow
def test_two_builds_give_the_same_bytes(recipe_file: Write, tmp_path: Path) -> None:
    recipe = Recipe.load(recipe_file(passes=QUANTIZED))
    first = Artifact.open(pipeline.build(recipe, tmp_path / "a").path)
    second = Artifact.open(pipeline.build(recipe, tmp_path / "b").path)
    assert first.manifest.content_digest == second.manifest.content_digest
    assert (first.path / "engine/model.onnx").read_bytes() == (second.path / "engine/model.onnx").read_bytes()
    assert (first.path / "engine/model.onnx.data").read_bytes() == (second.path / "engine/model.onnx.data").read_bytes()


@pytest.mark.slow
def test_a_killed_calibration_goes_on_where_it_was(
    recipe_file: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = Recipe.load(recipe_file(passes=QUANTIZED))
    whole = Artifact.open(pipeline.build(recipe, tmp_path / "whole").path)
    saved: list[int] = []
    save, quantize = Store.save, driver.quantize_layer

    def save_one(self: Store, key: str, index: int, result: LayerResult) -> LayerResult:
        if index == 1:
            raise KeyboardInterrupt
        saved.append(index)
        return save(self, key, index, result)

    def cache() -> Cache:
        return Cache(tmp_path / "cache")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "save", save_one)
        with pytest.raises(KeyboardInterrupt):
            pipeline.build(recipe, tmp_path / "out", cache=cache)
    assert saved == [2, 0]  # tables stand behind the layers, and come first
    quantized: list[str] = []
    monkeypatch.setattr(driver, "quantize_layer", lambda layer, *a: quantized.append(layer.name) or quantize(layer, *a))
    resumed = Artifact.open(pipeline.build(recipe, tmp_path / "out", cache=cache).path)
    assert quantized == ["model.layers.1"]
    assert resumed.manifest.content_digest == whole.manifest.content_digest


@pytest.mark.parametrize(
    ("gate", "code", "verdict"),
    [
        ({"kld_mean": {"max": 1e-9}}, 3, "fail"),
        pytest.param({"size_bytes": {"max": 1}}, 3, "fail", marks=pytest.mark.slow),
        ({"top1_agreement": {"min": 0.5}}, 0, "pass"),
    ],
)
@pytest.mark.usefixtures("shared_build_cache")
def test_gates_decide_how_a_build_ends(recipe_file: Write, gate: Any, code: int, verdict: str) -> None:
    result = run(recipe_file(passes=QUANTIZED, gates=gate))
    assert result.exit_code == code, result.output
    assert Artifact.open(Path(result.stdout.splitlines()[-1])).verdict == verdict
    assert ("hint: accept what was measured: build with --set gates." in result.stderr) is (code == 3)


@pytest.mark.slow
def test_a_gate_on_its_limit_is_inconclusive(recipe_file: Write, tmp_path: Path) -> None:
    built = pipeline.build(Recipe.load(recipe_file(passes=QUANTIZED)), tmp_path / "out")
    assert built.report.verdict is Verdict.NONE
    assert built.report.quality is not None
    limit = built.report.quality.kld_mean.value
    result = run(recipe_file(passes=QUANTIZED, gates={"kld_mean": {"max": limit}}))
    assert result.exit_code == 4, result.output
    assert "documents needed to decide" in result.stderr or "too close to the limit" in result.stderr
    assert "hint: measure more documents: llmforge gate " in result.stderr
    assert "or accept what was measured: build with --set gates.kld_mean.max=" in result.stderr


@dataclass(frozen=True)
class Lie(Pass):
    """Multiply one weight by 1.01."""

    name: ClassVar[str] = "lie-outright"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, model: ir.Model, context: Context) -> Changes:
        weight = model.graph.initializers["model.layers.1.mlp.down_proj.weight"]
        assert weight.const_value is not None
        weight.const_value = ir.Tensor(weight.const_value.numpy() * np.float32(1.01), name=weight.name)
        return Changes([Rewritten(str(weight.name), "nothing that anybody would notice")])


@dataclass(frozen=True)
class Boast(Pass):
    """Report a change that was not made."""

    name: ClassVar[str] = "boast-idly"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, model: ir.Model, context: Context) -> Changes:
        return Changes([Rewritten("somewhere", "something")])


@pytest.mark.parametrize(
    ("cls", "says"),
    [(Lie, "declares exact: model.layers.1.mlp.down_proj/MatMul differ by"), (Boast, "did not change the graph")],
)
@pytest.mark.usefixtures("shared_build_cache")
def test_a_pass_that_lies_ends_the_build(
    recipe_file: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cls: type[Pass], says: str
) -> None:
    monkeypatch.setattr(passes, "ALL", (*passes.ALL, cls))
    result = run(recipe_file(passes=["fuse-norms", cls.name]))
    assert result.exit_code == VerificationError.exit_code == 7, result.output
    assert cls.name in result.stderr
    assert says in result.stderr.replace("\n", " ")
    assert visible(tmp_path / "out") == []


@pytest.mark.usefixtures("shared_build_cache")
def test_a_pass_that_breaks_is_named(recipe_file: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(self: Pass, model: ir.Model, context: Context) -> Changes:
        raise KeyError("oops")

    monkeypatch.setattr(Boast, "run", broken)
    monkeypatch.setattr(passes, "ALL", (*passes.ALL, Boast))
    with pytest.raises(KeyError) as caught:
        pipeline.build(Recipe.load(recipe_file(passes=["boast-idly"])), tmp_path / "out")
    assert caught.value.__notes__ == ["in pass boast-idly"]
    assert visible(tmp_path / "out") == []


@pytest.mark.usefixtures("shared_build_cache")
def test_without_compiled_kernels_a_build_goes_on_where_its_recipe_allows(
    recipe_file: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    steps = [*QUANTIZED, {"cpu-kernels": {"budget": {"kld_mean": 1.0}}}]
    refused = run(recipe_file(passes=steps, validation={}))
    assert (refused.exit_code, "install a C compiler" in refused.stderr) == (8, True), refused.output
    steps[-1]["cpu-kernels"]["fallback"] = "onnxruntime"
    built = run(recipe_file(passes=steps, validation={}))
    assert built.exit_code == 0, built.output
    assert "note: cpu-kernels: using ONNX Runtime's slower kernels" in built.output
    report = records.read(Artifact.open(Path(built.stdout.splitlines()[-1])))
    assert any(note.startswith("cpu-kernels: using ONNX Runtime's slower kernels") for note in report.notes)
    assert {skipped.reason for skipped in report.passes[-1].skipped} == {"the kernels are not compiled"}


@pytest.mark.usefixtures("shared_build_cache")
def test_a_budget_that_is_exceeded_ends_the_build(recipe_file: Write, tmp_path: Path) -> None:
    steps = [*FUSED, {"quantize-weights": {"method": "rtn", "budget": {"kld_mean": 1e-7}}}]
    result = run(recipe_file(passes=steps))
    assert result.exit_code == 7, result.output
    assert "quantize-weights" in result.stderr
    assert "budget" in result.stderr
    assert visible(tmp_path / "out") == []


def test_evaluation_on_calibration_text_is_refused(recipe_file: Write) -> None:
    result = run(recipe_file(validation={"quality": {"data": "calibration.jsonl", "context": 64}}))
    assert result.exit_code == 5, result.output
    assert "use different text for evaluation" in result.stderr


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize(
    ("sections", "code", "says"),
    [
        ({"target": "h200"}, 8, "no CUDA device here"),
        ({"target": "h200", "engine": {"backend": "tensorrt", "max_context": 128}}, 8, "no CUDA device here"),
        (
            {"target": "h200", "engine": {"backend": "tensorrt-rtx", "max_context": 128}},
            6,
            "cannot load engines of tensorrt-rtx",
        ),
        ({"engine": {"backend": "tensorrt", "max_context": 128}}, 6, "cannot load engines of tensorrt"),
        ({"engine": {"max_context": 4096}}, 6, "128 tokens"),
    ],
)
def test_what_cannot_be_built_here_is_refused(
    recipe_file: Write, tmp_path: Path, sections: Any, code: int, says: str
) -> None:
    result = run(recipe_file(**sections))
    assert result.exit_code == code, result.output
    assert says in result.stderr.replace("\n", " ")
    assert visible(tmp_path / "out") == []


def test_a_checkpoint_with_nan_is_refused(recipe_file: Write, tiny_checkpoint: Path) -> None:
    from ..models.checkpoints import write_checkpoint

    write_checkpoint(tiny_checkpoint)
    file = tiny_checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-4:] = b"\x00\x00\xc0\x7f"
    file.write_bytes(content)
    result = run(recipe_file())
    assert result.exit_code == 5, result.output
    assert "NaN" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)  # a build in a process of its own, and one here
def test_a_killed_build_leaves_nothing_that_looks_finished(recipe_file: Write, tmp_path: Path) -> None:
    recipe, out = recipe_file(), tmp_path / "out"
    command = [sys.executable, "-c", "from llmforge.cli import main; main()", "build", str(recipe), "--out", str(out)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert any(line.startswith("Publish") for line in process.stderr)
        os.killpg(process.pid, signal.SIGKILL)
    for folder in visible(out):
        Artifact.open(folder).verify()
    assert run(recipe).exit_code == 0
    (finished,) = visible(out)
    Artifact.open(finished).verify()
    assert not list(out.glob("*/.building-*"))
