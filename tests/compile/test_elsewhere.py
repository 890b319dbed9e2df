"""Artifacts for servers of others: measured, sealed and shown as every artifact, and loaded by none of our commands."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner

from llmforge import artifact, calibration, passes, targets
from llmforge.base.errors import RecipeError, UnsupportedError
from llmforge.base.progress import Silent
from llmforge.checkpoint import Checkpoint
from llmforge.cli import cli
from llmforge.compile import dry_run, export_proxy, pipeline
from llmforge.compile.state import BuildResult
from llmforge.gates.decision import Verdict
from llmforge.ir import dialect
from llmforge.passes import QuantizeChannels, QuantizeFp4, QuantizeWeights
from llmforge.planning import starting
from llmforge.quantization.grid import gguf_type
from llmforge.quantization.statistics import InputRange, Statistics
from llmforge.recipe import EngineSpec, Recipe
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.rewrite.traits import Goal
from llmforge.serving import load

from ..models import zoo
from ..planning.test_starting import measured

RECIPES = Path(__file__).parents[2] / "recipes"
# In place of the Python of vLLM: all logits are zero, and all it says is one token.
SERVER = """#!{python} -S
import json, sys
print(json.dumps({{"versions": {{"vllm": "9.9"}}}}), flush=True)
for line in sys.stdin if len(sys.argv) > 4 else ():
    asked = json.loads(line)
    if rows := len(asked.get("answer") or asked.get("ids") or ()):
        open(asked["logits"], "wb").write(bytes(4 * {vocabulary} * rows))
    said = {{"answer": [7] * asked["tokens"]}} if "prompt" in asked else {{"tokens": rows}}
    print(json.dumps(said), flush=True)
"""
INT4 = {"bits": 4, "block_size": 32, "scales": "fp16", "embedding_bits": 16, "method": "rtn"}


def recipe_of(folder: Path, checkpoint: Path, data: Path, **changes: Any) -> Path:
    recipe: dict[str, Any] = {
        "schema": 1,
        "name": "tiny",
        "checkpoint": str(checkpoint),
        "target": "l4",
        "engine": {"backend": "compressed-tensors", "max_context": 96, "max_batch": 4},
        "passes": ["fuse-norms", {"quantize-weights": {**INT4, "budget": {"kld_mean": 1.0}}}],
        "validation": {"quality": {"data": str(data / "evaluation.jsonl"), "context": 64, "max_tokens": 1024}},
        "gates": {"kld_mean": {"max": 1.0}, "weight_bits": {"max": 16}},
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe))  # JSON is YAML
    return file


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    zoo.write("llama-tied", folder)
    return folder


@pytest.fixture(scope="module")
def built(checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    """An artifact for a GPU that is not here."""
    folder = tmp_path_factory.mktemp("built")
    return pipeline.build(Recipe.load(recipe_of(folder, checkpoint, data)), folder / "out", Silent())


def test_quality_is_of_the_same_graph_and_the_report_says_so(built: BuildResult) -> None:
    report = built.report
    assert report.verdict is Verdict.PASS
    assert report.quality is not None
    assert report.engine.unmeasured is None
    [note] = [note for note in report.notes if note.startswith("quality: ")]
    assert "of the same graph, as llmforge's own engine (ONNX Runtime " in note
    assert "vLLM or SGLang did not run engine/" in note
    assert report.engine.facts["codes"] == "read back, and equal to those of the graph"
    assert {"uint8", "float"} <= {group.dtype.lower() for group in report.engine.weights}, report.engine.weights
    assert not report.engine.session


def test_quality_and_answers_are_those_of_the_server(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    longer = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    config = json.loads((longer / "config.json").read_text()) | {"max_position_embeddings": 160}
    (longer / "config.json").write_text(json.dumps(config))
    source, python = Checkpoint.open(longer), tmp_path / "python"
    python.write_text(SERVER.format(python=sys.executable, vocabulary=source.geometry.vocabulary))
    python.chmod(0o755)
    quality = {"data": str(data / "evaluation.jsonl"), "context": 64, "max_tokens": 256, "samples": 2}
    validation = {"quality": quality, "runtimes": ["vllm"]}
    engine = {"backend": "compressed-tensors", "max_context": 160, "max_batch": 4}
    recipe = recipe_of(tmp_path, longer, data, validation=validation, gates={}, target="local", engine=engine)
    report = pipeline.build(Recipe.load(recipe), tmp_path / "out", Silent(), pythons={"vllm": python}).report
    [note] = [note for note in report.notes if note.startswith("quality: ")]
    assert note == "quality: of the files in engine/, as vllm 9.9 runs them on a CPU"
    assert report.quality is not None
    said = source.tokenizer.decode([7] * 128, skip_special_tokens=False)
    assert [sample.shared + sample.artifact for sample in report.quality.samples] == [said] * 2
    assert report.quality.figures["perplexity"] == pytest.approx(source.geometry.vocabulary)  # all are as likely


def test_the_artifact_holds_what_servers_load_and_nothing_else(built: BuildResult) -> None:
    files = {path.relative_to(built.path).as_posix() for path in built.path.rglob("*") if path.is_file()}
    assert {"engine/config.json", "engine/model.safetensors", "engine/tokenizer.json", "engine/runtime.json"} <= files
    assert not any("stand-in" in name or name.endswith(".onnx") for name in files)
    triton = {name for name in files if name.startswith("triton/")}
    assert triton == {f"triton/tiny/{name}" for name in ("config.pbtxt", "README.md", "1/model.json")}
    artifact.Artifact.open(built.path).verify()


def test_vllms_repository_names_the_checkpoint(built: BuildResult, tmp_path: Path) -> None:
    inside = built.path / "triton" / "tiny"
    assert 'backend: "vllm"' in (inside / "config.pbtxt").read_text()
    arguments = json.loads((inside / "1" / "model.json").read_text())
    assert arguments["model"] == "engine"
    assert (built.path / arguments["model"] / "config.json").is_file()  # from the folder where the server starts
    assert (arguments["max_model_len"], arguments["max_num_seqs"]) == (96, 4)
    assert "quantization" not in arguments  # config.json says it, by ModelOpt's names, too

    models = tmp_path / "models"
    result = CliRunner().invoke(cli, ["triton", str(built.path), "--output", str(models), "--model-version", "3"])

    assert result.exit_code == 0, result.output
    arguments = json.loads((models / "tiny" / "3" / "model.json").read_text())
    assert (models / arguments["model"] / "model.safetensors").is_file()
    assert "cd REPOSITORY && tritonserver" in (models / "tiny" / "README.md").read_text()
    again = CliRunner().invoke(cli, ["triton", str(built.path), "--output", str(models), "--model-version", "3"])
    assert again.exit_code == 2
    assert "already exists" in again.output


def test_our_own_commands_name_who_loads_it(built: BuildResult) -> None:
    result = CliRunner().invoke(cli, ["run", str(built.path), "x"])
    assert result.exit_code == UnsupportedError.exit_code
    assert "is loaded by vLLM or SGLang, not by llmforge" in result.output
    assert f"vllm serve {built.path / 'engine'}" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"validation": {"latency": {"prompt_tokens": [8], "output_tokens": 8}}, "gates": {}},
            "measured on what serves",
        ),
        ({"validation": {"tasks": ["arc_easy"]}, "gates": {}}, "are answered by what serves"),
    ],
)
def test_what_is_measured_on_a_server_is_not_measured_here(
    changes: Mapping[str, Any], message: str, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.load(recipe_of(tmp_path, checkpoint, data, **changes))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"passes": ["pack-qkv"]}, "pack-qkv: a compressed-tensors checkpoint", "leave pack-qkv out"),
        ({"passes": ["fuse-norms"]}, "nothing is quantized", ""),
        (
            {"passes": [{"quantize-weights": {**INT4, "scales": "fp32", "budget": {"kld_mean": 1.0}}}]},
            "its scales are fp32",
            "scales: fp16",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_when_it_is_planned(
    changes: Mapping[str, Any], message: str, hint: str, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    recipe = Recipe.load(recipe_of(tmp_path, checkpoint, data, **changes))
    with pytest.raises(UnsupportedError, match=message) as caught:
        pipeline.build(recipe, tmp_path / "out", Silent())
    assert hint in (caught.value.hint or "")
    assert not list((tmp_path / "out").glob("tiny/[!.]*"))


@pytest.mark.parametrize("name", ["compressed-tensors", "gguf"])
def test_the_shipped_recipe_is_taken(name: str, sample_checkpoint: Path, sample_graph: ir.Model) -> None:
    recipe = Recipe.load(RECIPES / f"{name}.yaml")
    assert recipe.engine.backend == name
    steps, checkpoint = recipe.instantiate(passes.ALL), Checkpoint.open(sample_checkpoint)
    demands = [demand for step in steps for demand in step.demands()]
    linears = calibration.plan(checkpoint, demands, dialect.caches(sample_graph)) if demands else {}
    known = {"target": targets.local(), "spec": recipe.engine, "checkpoint": checkpoint}
    dry_run.run(sample_graph, steps, **known, calibrated=linears)


@pytest.mark.parametrize(
    ("backend", "target", "goal", "bits"),
    [
        ("compressed-tensors", "h200", "latency", 4),
        ("compressed-tensors", "cpu-avx2", "quality", 8),
        ("gguf", "h200", "quality", 8),
        ("gguf", "cpu-avx2", "quality", 8),
        ("gguf", "cpu-avx2", "size", 4),
    ],
)
def test_a_recipe_that_init_writes_is_taken(
    backend: str,
    target: str,
    goal: Goal,
    bits: int,
    sample_checkpoint: Path,
    sample_graph: ir.Model,
    tmp_path: Path,
) -> None:
    """It has no pass that the file cannot express, and nothing is measured that is not served here."""
    given = {"checkpoint": str(sample_checkpoint), "target": target, "calibration": "a.jsonl", "evaluation": "b.jsonl"}
    known = measured(targets.load(target))
    made = starting.write(sample_checkpoint, known, goal, name="m", given=given, backend=backend)
    (tmp_path / "recipe.yaml").write_text(made.yaml)
    recipe = Recipe.load(tmp_path / "recipe.yaml")
    [step] = recipe.instantiate(passes.ALL)
    assert isinstance(step, QuantizeWeights)
    if backend == "gguf" and target == "cpu-avx2":
        assert step.grid == gguf_type(bits)
    else:
        scales = {"compressed-tensors": "bf16", "gguf": "fp16"}[backend]  # the sample is in bf16
        assert (step.bits, step.symmetric, step.scales) == (bits, True, scales)
    assert not recipe.engine.deferred
    checkpoint = Checkpoint.open(sample_checkpoint)
    linears = calibration.plan(checkpoint, step.demands(), dialect.caches(sample_graph)) if step.demands() else {}
    dry_run.run(sample_graph, [step], target=known, spec=recipe.engine, checkpoint=checkpoint, calibrated=linears)


def test_it_cannot_be_deferred(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    engine = {"backend": "compressed-tensors", "max_context": 96, "deferred": True}
    recipe = Recipe.load(recipe_of(tmp_path, checkpoint, data, engine=engine))
    with pytest.raises(UnsupportedError, match="cannot be deferred"):
        pipeline.build(recipe, tmp_path / "out", Silent())


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_a_stand_in_runs_products_of_rounded_activations(
    dtype: str, bf16_llama: tuple[Checkpoint, ir.Model], tmp_path: Path
) -> None:
    """No CPU multiplies fp8: ONNX Runtime would refuse what it makes of the two DequantizeLinear."""
    checkpoint, traced = bf16_llama
    model = traced.clone()
    step = QuantizeChannels(budget=Budget(kld_mean=1.0), dtype=dtype, activations="per_token", head=False, smooth=False)
    assert step.run(model, Context(targets.load("l4"), Statistics(0, 0, {}, {}, {})))
    spec = EngineSpec(backend="compressed-tensors", max_context=32)
    export_proxy.build(model, spec, checkpoint, tmp_path, Silent())
    export_proxy.build(traced, spec, checkpoint, tmp_path / "plain", Silent())
    rounded, plain = (load(folder).logits(list(range(3, 20))) for folder in (tmp_path, tmp_path / "plain"))
    assert 0 < np.abs(rounded - plain).mean() < 0.1 * plain.std()


def test_a_stand_in_multiplies_in_nvfp4(bf16_llama: tuple[Checkpoint, ir.Model], tmp_path: Path) -> None:
    checkpoint, traced = bf16_llama
    model = traced.clone()
    ranges = {name: InputRange(np.full(entry.shape[-1], 4.0, np.float32)) for name, entry in checkpoint.tensors.items()}
    step = QuantizeFp4(budget=Budget(kld_mean=1.0))
    assert step.run(model, Context(targets.load("b200"), Statistics(0, 0, {}, {}, ranges)))
    spec = EngineSpec(backend="compressed-tensors", max_context=32)
    export_proxy.build(model, spec, checkpoint, tmp_path, Silent())
    export_proxy.build(traced, spec, checkpoint, tmp_path / "plain", Silent())
    rounded, plain = (load(folder).logits(list(range(3, 20))) for folder in (tmp_path, tmp_path / "plain"))
    assert 0 < np.abs(rounded - plain).mean() < 0.5 * plain.std()


def test_a_stand_in_rounds_squares_and_groups(sample_checkpoint: Path, sample_graph: ir.Model, tmp_path: Path) -> None:
    checkpoint, model = Checkpoint.open(sample_checkpoint), sample_graph.clone()
    step = QuantizeChannels(
        budget=Budget(kld_mean=1.0), dtype="fp8", activations="per_token", granularity="block", head=False
    )
    assert step.run(model, Context(targets.load("l4"), Statistics(0, 0, {}, {}, {})))
    spec = EngineSpec(backend="compressed-tensors", max_context=32)
    export_proxy.build(model, spec, checkpoint, tmp_path, Silent())
    export_proxy.build(sample_graph, spec, checkpoint, tmp_path / "plain", Silent())
    rounded, plain = (load(folder).logits(list(range(3, 20))) for folder in (tmp_path, tmp_path / "plain"))
    assert 0 < np.abs(rounded - plain).mean() < 0.1 * plain.std()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_measures_what_was_written(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """In an interpreter that has compressed-tensors where this one has it: `-I` hides PYTHONPATH from it."""
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors==0.20.0")
    python = interpreter(tmp_path / "env")
    validation = {
        "quality": {"data": str(data / "evaluation.jsonl"), "context": 64, "max_tokens": 1024, "decode_tokens": 64},
        "runtimes": ["transformers"],
    }
    gates = {"runtime.transformers.agreement": {"min": 0.5}, "kld_mean": {"max": 1.0}}
    recipe = recipe_of(
        tmp_path,
        checkpoint,
        data,
        validation=validation,
        gates=gates,
        engine={"backend": "compressed-tensors", "max_context": 128, "max_batch": 4},
    )
    built = pipeline.build(Recipe.load(recipe), tmp_path / "out", Silent(), pythons={"transformers": python})
    [run] = built.report.runtimes
    assert run.failure is None
    assert run.figures is not None
    print(f"KLD between both {run.figures.kld_mean.value:.2e}, |Δlogit| {run.figures.logit_difference_max:.2e}")
    [note] = [note for note in built.report.notes if note.startswith("quality: ")]
    assert "of the files in engine/, as transformers 5." in note
    assert "compressed-tensors 0.20.0" in note
    assert built.report.quality is not None


def interpreter(folder: Path) -> Path:
    """Make a Python that imports what this process does."""
    import venv

    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    [site] = folder.glob("lib/python*/site-packages")
    (site / "own.pth").write_text("\n".join(path for path in sys.path if os.path.isdir(path)) + "\n")  # noqa: PTH112
    return python
