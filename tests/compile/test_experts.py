"""Whole builds of models with experts: the default passes, what ships, and what it computes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from llmforge import passes, targets
from llmforge.backends import pending
from llmforge.base.progress import Progress, Silent
from llmforge.checkpoint import Checkpoint
from llmforge.compile import evidence, finishing, pipeline
from llmforge.compile.evidence import Evidence, Measurement
from llmforge.measure import footprint
from llmforge.measure.footprint import BytesRead
from llmforge.recipe import Recipe
from llmforge.rewrite.pass_base import Budget, Pass
from llmforge.serving import Sampling, load
from llmforge.trace import trace
from llmforge.verification.verifier import Verifier

from ..models import graphs, zoo
from .test_pipeline import WORDS

FUSED: list[Any] = ["fuse-norms", "pack-qkv", "pack-gate-up", "flash-attention"]
LOOSE = {"kld_mean": 5.0}  # random weights: only that the pass runs counts here
DEEPSEEK = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}
MODELS = {"mixtral": {}, "qwen3-moe": {}, "gpt-oss": {}, "deepseek-v3": DEEPSEEK}


def recipe(folder: Path, name: str, steps: list[Any], **sections: Any) -> Recipe:
    zoo.write(name, folder / "checkpoint", **MODELS[name])  # type: ignore[arg-type]
    rng = random.Random(0)
    for part in ("calibration", "evaluation"):
        lines = [{"id": f"{part}-{i}", "text": f"{part} {i} " + " ".join(rng.choices(WORDS, k=30))} for i in range(10)]
        (folder / f"{part}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    path = folder / "recipe.yaml"
    content = {
        "schema": 1,
        "name": "tiny",
        "checkpoint": "checkpoint",
        "target": "local",
        "engine": {"max_context": 128, "max_batch": 2, "threads": 1},
        "calibration": {"data": "calibration.jsonl", "samples": 6, "length": 64},
        "passes": steps,
        "validation": {"quality": {"data": "evaluation.jsonl", "context": 64}},
        **sections,
    }
    path.write_text(json.dumps(content))  # JSON is YAML
    return Recipe.load(path)


def shipped(path: Path) -> list[str]:
    return [node.op_type for node in ir.load(path / "engine" / "model.onnx").graph.all_nodes()]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_4_bits_by_calibration_ship_and_generate(name: str, tmp_path: Path) -> None:
    validation = {
        "quality": {"data": "evaluation.jsonl", "context": 64},
        "latency": {"prompt_tokens": [8], "output_tokens": 4, "repetitions": 2},
    }
    quantize: Any = {"quantize-weights": {"block_size": 32, "budget": LOOSE}}
    built = pipeline.build(recipe(tmp_path, name, [*FUSED, quantize], validation=validation), tmp_path / "out")
    operators = shipped(built.path)
    assert operators.count("QMoE") == 2
    assert "Loop" not in operators
    [done] = [done for done in built.report.passes if done.name == "quantize-weights"]
    assert sum("experts, top 2" in change.what for change in done.rewritten) == 2
    assert [skip.reason.partition(" of ")[0] for skip in done.skipped] == 2 * ["router"]
    assert built.report.quality is not None
    assert 0 < built.report.quality.kld_mean.value < 0.05
    assert built.report.latency is not None
    held = (built.path / "engine" / "model.onnx.data").stat().st_size
    assert built.report.latency.footprint.weight_bytes_per_token < 0.9 * held  # half of the experts is not read
    chunks = list(load(built.path).generate("graph", Sampling(max_tokens=8, ignore_eos=True)))
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.output_tokens == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_fp32_experts_ship_as_the_kernel_and_answer_as_transformers(name: str, tmp_path: Path) -> None:
    built = pipeline.build(recipe(tmp_path, name, [*FUSED, "fuse-experts"]), tmp_path / "out")
    operators = shipped(built.path)
    assert operators.count("MoE") == 1
    assert "Loop" not in operators
    ids = np.random.default_rng(0).integers(3, 260, 24)
    with torch.inference_mode():
        expected = zoo.reference(tmp_path / "checkpoint")(torch.from_numpy(ids)[None]).logits[0].numpy()
    np.testing.assert_allclose(load(built.path, threads=2).logits(ids.tolist()), expected, rtol=0, atol=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["qwen3-moe", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "qwen3-moe")]
)
def test_every_pass_of_a_recipe_holds(name: str, tmp_path: Path) -> None:
    """The fusing passes in fp32, then 4 bits of all but one layer's experts, then the kernel for the one left."""
    zoo.write(name, tmp_path / "checkpoint", **MODELS[name])  # type: ignore[arg-type]
    model = trace(Checkpoint.open(tmp_path / "checkpoint"))
    layers = sum(node.op_type == "MoE" for node in model.graph)
    text = np.random.default_rng(0).integers(3, 260, 40)
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[text])
    registry = {change.name: change for change in passes.ALL}
    steps: list[Pass] = [registry[step]() for step in FUSED]
    exclude = ("model.layers.1.mlp.experts.*",)
    steps.append(registry["quantize-weights"](budget=Budget(**LOOSE), method="rtn", exclude=exclude))  # type: ignore[call-arg]
    steps.append(registry["fuse-experts"]())
    for step in steps:
        changes = step.run(model, graphs.CPU)
        verifier.check(step, model, changes)
    operators = graphs.operators(model)
    assert (operators.get("QMoE", 0), operators["MoE"]) == (layers - 1, 1)
    assert operators["SkipSimplifiedLayerNormalization"] > 0


@pytest.mark.thorough
def test_an_engine_that_is_finished_elsewhere_reads_what_one_built_in_one_go_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the experts those that a token chooses: the lowered graph, which is all that lies there, cannot say it."""
    reads: list[BytesRead] = []

    def measure(asked: Measurement, progress: Progress) -> Evidence:
        reads.append(asked.read)
        return Evidence(None, None, None, "nothing is measured here")

    monkeypatch.setattr(evidence, "measure", measure)
    step = {"lower-precision": {"dtype": "fp16", "budget": LOOSE}}
    engine = {"backend": "tensorrt", "max_context": 128, "max_batch": 2, "deferred": True}
    given = recipe(tmp_path, "mixtral", [step], target="l4", engine=engine)
    folder = pipeline.build(given, tmp_path / "out").path / "engine"
    finishing.measure(pending.read(folder), tmp_path, None, targets.load("l4"), given, Silent())  # type: ignore[arg-type]
    built, finished = reads
    assert finished == built
    lowered = footprint.count(ir.load(folder / "model.onnx"))
    assert built.kv == lowered.kv
    assert 1.5 * built.weights < lowered.weights  # 2 of 4 experts
