"""Builds of checkpoints that come quantized: their codes in the artifact, what is said, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from llmforge import passes, targets
from llmforge.artifact import Artifact
from llmforge.base.errors import CheckpointError, RecipeError, UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.cli.root import cli
from llmforge.compile import dry_run, pipeline, preflight
from llmforge.gates import records
from llmforge.ir import graph, onnx_file
from llmforge.ir.operators.contrib import MatMulNBits, QMoE
from llmforge.ir.operators.standard import Gather
from llmforge.quantization.grids import QuantizedMatrix, pack_bits, unpack_bits
from llmforge.quantization.stored import UnrepresentableCodes
from llmforge.recipe import Recipe
from llmforge.rewrite import options, pass_base
from llmforge.rewrite.pass_base import Changes, Context
from llmforge.trace import trace

from ..checkpoint.quantized import writers
from ..checkpoint.quantized.writers import BF16, Drawn
from ..models import zoo

BUDGET = {"kld_mean": 0.01}
STORED = {"quantize-weights": {"method": "stored", "budget": BUDGET}}
TEXTS = [
    {"id": f"{i}", "text": f"document {i} says graph engine pass weight scale token cache layer {i}"} for i in range(8)
]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
LAYER = "model.layers.0.self_attn.o_proj"
Store = Callable[[str, tuple[int, int]], Drawn]


def as_gptq(folder: Path, *, act: bool = False, bits: int = 4, symmetric: bool = False) -> dict[str, Drawn]:
    """Store all linear layers as GPTQ; those that read the same have one order of groups."""
    drawn: dict[str, Drawn] = {}

    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        made = writers.draw(*shape, bits, shape[1] // 32, symmetric=symmetric)
        if act:
            order = np.random.default_rng(shape[1]).permutation(made.group_of)
            made = Drawn(made.codes, made.scales, made.zeros, order)
        drawn[f"{name}.weight"] = made
        return writers.gptq(name, made, bits), made.weight

    writers.quantize(folder, {**GPTQ, "bits": bits, "desc_act": act}, store)
    return drawn


def as_awq(folder: Path) -> dict[str, Drawn]:
    """Store all linear layers as AWQ."""
    drawn: dict[str, Drawn] = {}

    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        made = drawn[f"{name}.weight"] = writers.draw(*shape, 4, shape[1] // 32)
        return writers.awq(name, made), made.weight

    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    writers.quantize(folder, config, store)
    return drawn


def as_packed(folder: Path) -> dict[str, Drawn]:
    """Store all linear layers as pack-quantized, 8 bits by channel, symmetric, in bf16."""
    drawn: dict[str, Drawn] = {}

    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        made = drawn[f"{name}.weight"] = writers.draw(*shape, 8, 1, symmetric=True, dtype=BF16)
        return writers.packed(name, made, 8, symmetric=True), made.weight

    writers.quantize(folder, writers.compressed("pack-quantized", writers.scheme(8, "channel")), store)
    return drawn


def as_fp8(folder: Path) -> None:
    """Store all linear layers as fp8 by tensor, which no grid holds."""
    import ml_dtypes

    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        codes = np.random.default_rng(shape[0]).normal(0, 30, shape).astype(ml_dtypes.float8_e4m3fn)
        return {f"{name}.weight": codes, f"{name}.weight_scale": np.full(1, 0.001, np.float32)}, np.empty(0)

    writers.quantize(folder, writers.compressed("float-quantized", writers.scheme(8, "tensor", kind="float")), store)


def rewritten(folder: Path, *before: str, **more: Any) -> tuple[ir.Model, Changes]:
    """Trace a checkpoint, run passes, and let quantize-weights take its codes."""
    checkpoint = Checkpoint.open(folder)
    model = trace(checkpoint)
    known = {each.name: each for each in passes.ALL}
    context = Context(targets.find("local"), stored=dry_run.stored_codes(checkpoint))
    for name in before:
        pass_base.run(options.make(known[name], {}), model, context)
    given = {"method": "stored", "budget": BUDGET, "embedding_bits": 16, **more}
    return model, pass_base.run(options.make(known["quantize-weights"], given), model, context)


def matrices(model: ir.Model) -> dict[str, QuantizedMatrix]:
    """Read each MatMulNBits of a graph, by the parameters that its codes come from."""
    found = {}
    for product in MatMulNBits.all(model):
        node = product.node
        n, k, bits = (node.attributes[name].as_int() for name in ("N", "K", "bits"))
        blocks = -(-k // node.attributes["block_size"].as_int())
        codes = unpack_bits(graph.tensor(product.b).numpy().reshape(n, -1), bits, k)
        scales = product.scales if product.scales.is_initializer() else product.scales.producer().inputs[0]
        points = product.zero_points
        zeros = None if points is None else unpack_bits(graph.tensor(points).numpy().reshape(n, -1), bits, blocks)
        grid: Any = None
        made = QuantizedMatrix(grid, codes, graph.tensor(scales).numpy().astype(np.float32), zeros)
        found["+".join(graph.sources(product.b))] = made
    return found


@pytest.mark.parametrize("store", [as_gptq, pytest.param(as_awq, marks=pytest.mark.thorough), as_packed])
def test_codes_in_the_graph_are_those_of_the_checkpoint(
    tiny_checkpoint: Path, store: Callable[[Path], dict[str, Drawn]]
) -> None:
    drawn = store(tiny_checkpoint)
    model, changes = rewritten(tiny_checkpoint)
    assert not changes.notes
    found = matrices(model)
    assert found.keys() == drawn.keys()
    for name, matrix in found.items():
        wanted = drawn[name]
        times = matrix.scales.shape[1] // wanted.scales.shape[1]
        assert np.array_equal(matrix.codes, wanted.codes)
        assert np.array_equal(matrix.scales, np.repeat(wanted.scales.astype(np.float32), times, 1))
        assert matrix.zero_points is None or np.array_equal(matrix.zero_points, np.repeat(wanted.zeros, times, 1))


@pytest.mark.parametrize(
    ("store", "wanted"),
    [(as_awq, ir.DataType.FLOAT16), pytest.param(as_packed, ir.DataType.FLOAT, marks=pytest.mark.thorough)],
)
def test_scales_are_fp16_where_that_holds_them(tiny_checkpoint: Path, store: Any, wanted: ir.DataType) -> None:
    drawn = store(tiny_checkpoint)
    model, _ = rewritten(tiny_checkpoint, scales="fp16")
    scales = {name: value for name, value in model.graph.initializers.items() if name.endswith(".scales")}
    assert {value.dtype for value in scales.values()} == {wanted}
    found = matrices(model)[f"{LAYER}.weight"].scales
    assert np.array_equal(found[:, 0], drawn[f"{LAYER}.weight"].scales[:, 0].astype(np.float32))


def test_packed_layers_have_the_codes_of_all(tiny_checkpoint: Path) -> None:
    drawn = as_gptq(tiny_checkpoint, act=True)
    model, changes = rewritten(tiny_checkpoint, "pack-qkv", "pack-gate-up")
    found = matrices(model)
    prefix = "model.layers.1.mlp"
    names = [f"{prefix}.{which}_proj.weight" for which in ("gate", "up")]
    order = np.argsort(drawn[names[0]].group_of, kind="stable")
    assert np.array_equal(found["+".join(names)].codes, np.concatenate([drawn[name].codes for name in names])[:, order])
    # what reads the same is put in order once
    reordered = [gather for gather in Gather.all(model) if gather.node.name.endswith("/columns")]
    assert len(reordered) == 8
    assert not changes.notes


@pytest.mark.thorough
def test_orders_that_differ_stay_dequantized(tiny_checkpoint: Path) -> None:
    as_gptq(tiny_checkpoint, act=True)
    file = tiny_checkpoint / "model.safetensors"
    stored = dict(load_file(file))
    name = "model.layers.0.self_attn.q_proj.g_idx"
    stored[name] = stored[name][::-1].copy()
    save_file(stored, file)
    _, changes = rewritten(tiny_checkpoint, "pack-qkv")
    [note] = changes.notes
    assert "input features in different orders in one matrix" in note
    assert "model.layers.0.self_attn.q_proj.weight" in note
    _, changes = rewritten(tiny_checkpoint)
    assert not changes.notes


def test_codes_that_no_format_holds_stay_dequantized(tiny_checkpoint: Path) -> None:
    as_fp8(tiny_checkpoint)
    _, changes = rewritten(tiny_checkpoint)
    assert not changes
    [note] = changes.notes
    assert "and 13 more: the codes are fp8 with one scale, for which there is no format here" in note


@pytest.mark.parametrize("act", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_codes_of_experts(tmp_path: Path, act: bool) -> None:
    """Gates and up projections of an expert lie on top of each other, in the order of the kernel."""
    zoo.write("qwen3-moe", tmp_path, moe_intermediate_size=64)
    drawn: dict[str, Drawn] = {}

    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        made = writers.draw(*shape, 4, shape[1] // 32, shuffled=act, seed=len(drawn))
        drawn[f"{name}.weight"] = made
        return writers.gptq(name, made, 4), made.weight

    writers.quantize(tmp_path, {**GPTQ, "desc_act": act}, store)
    model, changes = rewritten(tmp_path)
    found = list(QMoE.all(model))
    if act:
        [untaken, left] = [note for note in changes.notes if "experts" in note]
        assert "input features in" in untaken
        assert "are not quantized" in left
        assert not found
        return
    [kernel] = found
    assert not changes.notes
    prefix = "model.layers.1.mlp.experts"
    up, down = graph.tensor(kernel.fc1_experts_weights).numpy(), graph.tensor(kernel.fc2_experts_weights).numpy()
    zeros = graph.tensor(kernel.fc1_zero_points).numpy()  # type: ignore[arg-type]
    for expert in range(8):
        gate, other, last = (drawn[f"{prefix}.{expert}.{which}_proj.weight"] for which in ("gate", "up", "down"))
        pairs = np.stack([gate.codes, other.codes], 1).reshape(128, 64)  # gate and up features in turns
        assert np.array_equal(unpack_bits(up[expert], 4, 64), pairs)
        assert np.array_equal(unpack_bits(zeros[expert], 4, 2), np.stack([gate.zeros, other.zeros], 1).reshape(128, 2))
        assert np.array_equal(unpack_bits(down[expert], 4, 64), last.codes)


@pytest.mark.thorough
def test_what_the_checkpoint_stores_as_it_is_stays(tiny_checkpoint: Path) -> None:
    as_gptq(tiny_checkpoint)
    name = "model.layers.1.mlp.down_proj"
    file = tiny_checkpoint / "model.safetensors"
    stored = {key: array for key, array in load_file(file).items() if not key.startswith(name)}
    save_file({**stored, f"{name}.weight": np.ones((64, 128), np.float32)}, file)
    model, changes = rewritten(tiny_checkpoint)
    assert len(matrices(model)) == 13
    assert "its codes are none: the checkpoint stores it in FLOAT" in [each.reason for each in changes.skipped]
    with pytest.raises(UnrepresentableCodes, match="are none"):
        Checkpoint.open(tiny_checkpoint).codes(f"{name}.weight")


def test_stored_needs_codes(tiny_checkpoint: Path) -> None:
    with pytest.raises(UnsupportedError, match="method: stored takes the codes of a quantized checkpoint"):
        rewritten(tiny_checkpoint)


@pytest.mark.parametrize("option", [{"bits": 8}, {"block_size": 64}, {"symmetric": True}, {"scales": "int8"}])
def test_stored_takes_its_format_from_the_checkpoint(option: dict[str, Any]) -> None:
    known = {each.name: each for each in passes.ALL}
    with pytest.raises(ValueError, match=r"method: stored (takes|keeps)"):
        options.make(known["quantize-weights"], {"method": "stored", "budget": BUDGET, **option})


@pytest.fixture
def recipe_file(tmp_path: Path, tiny_checkpoint: Path) -> Callable[..., Path]:
    """Write a recipe for the tiny checkpoint; keyword arguments replace its sections."""
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, TEXTS)))

    def write(**sections: Any) -> Path:
        recipe = {
            "schema": 1,
            "name": "tiny",
            "checkpoint": str(tiny_checkpoint),
            "target": "local",
            "engine": {"max_context": 128, "max_batch": 2, "threads": 1},
            "passes": [STORED],
            "validation": {"quality": {"data": "text.jsonl", "context": 64}},
            **sections,
        }
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        return tmp_path / "recipe.yaml"

    return write


@pytest.mark.parametrize(
    ("store", "said"),
    [
        (partial(as_gptq, act=True), "GPTQ, int4 in groups of 32, desc_act"),
        pytest.param(as_awq, "AWQ, int4 in groups of 32", marks=pytest.mark.slow),
        pytest.param(as_packed, "compressed-tensors, int8", marks=pytest.mark.slow),
    ],
)
def test_an_artifact_of_stored_codes(
    tiny_checkpoint: Path,
    tmp_path: Path,
    recipe_file: Callable[..., Path],
    store: Callable[[Path], dict[str, Drawn]],
    said: str,
) -> None:
    """Held against a checkpoint that has the dequantized weights as they are: what is left is activations."""
    plain = tmp_path / "plain"
    shutil.copytree(tiny_checkpoint, plain)
    drawn = store(tiny_checkpoint)
    weights = {name: each.weight.astype(np.float32) for name, each in drawn.items()}
    save_file({**load_file(plain / "model.safetensors"), **weights}, plain / "model.safetensors")
    quality = {"data": "text.jsonl", "context": 64, "reference": str(plain)}
    recipe = Recipe.load(recipe_file(validation={"quality": quality}))
    built = pipeline.build(recipe, tmp_path / "out")
    report = records.read(Artifact.open(built.path))
    assert report.quality is not None
    assert report.quality.kld_mean.value < 5e-3  # of bf16 weights, and of activations in 8 bits
    digest = Checkpoint.open(plain).digest
    assert report.quality_baseline is not None
    assert report.quality_baseline.startswith(f"the reference plain, {digest}: transformers ")
    assert f"quality is measured against the reference plain, {digest}" in report.notes
    assert f"the checkpoint is quantized ({said}); its codes are taken as they are" in report.notes
    assert report.checkpoint.digest == Checkpoint.open(tiny_checkpoint).digest
    engine = onnx_file.load(built.path / "engine" / "model.onnx")
    held = {each.const_value.numpy().tobytes() for each in engine.graph.initializers.values() if each.const_value}
    for each in drawn.values():
        order = np.argsort(each.group_of, kind="stable")
        assert pack_bits(each.codes[:, order], 8 if each.codes.max() > 15 else 4).tobytes() in held


def test_requantizing_is_refused_unless_it_is_wanted(tiny_checkpoint: Path, recipe_file: Callable[..., Path]) -> None:
    as_gptq(tiny_checkpoint)
    given = {"passes": [{"quantize-weights": {"method": "rtn", "budget": BUDGET}}]}
    file = recipe_file(**given)
    for command in ("plan", "build"):
        result = CliRunner().invoke(cli, [command, str(file)])
        assert result.exit_code == 2
    with pytest.raises(RecipeError, match=r"passes\.quantize-weights: the pass chooses codes for weights") as caught:
        preflight.check_source(Recipe.load(file), Recipe.load(file).instantiate(passes.ALL))
    assert "is GPTQ, int4 in groups of 32" in caught.value.message
    assert caught.value.hint is not None
    assert "`quantize-weights: {method: stored}`" in caught.value.hint
    wanted = Recipe.load(recipe_file(**given, requantize=True))
    preflight.check_source(wanted, wanted.instantiate(passes.ALL))
    assert wanted.resolved()["requantize"] is True
    assert "requantize" not in Recipe.load(recipe_file()).resolved()


@pytest.mark.thorough
def test_plan_says_what_becomes_of_the_codes(tiny_checkpoint: Path, recipe_file: Callable[..., Path]) -> None:
    as_gptq(tiny_checkpoint)
    result = CliRunner().invoke(cli, ["plan", str(recipe_file()), "--json"])
    assert result.exit_code == 0, result.output
    planned = json.loads(result.stdout)
    assert planned["scheme"]["weights"] == "int4"
    assert planned["notes"][0].endswith("(GPTQ, int4 in groups of 32); its codes are taken as they are")
    result = CliRunner().invoke(cli, ["plan", str(tiny_checkpoint), "--target", "h200", "--json"])
    assert "its weights are dequantized, unless" in json.loads(result.stdout)["notes"][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quantization_config": GPTQ}, "the reference is quantized, too"),
        ({"hidden_size": 128}, "hidden_size is 128, and 64 in the checkpoint"),
    ],
)
def test_references_that_are_none(
    tiny_checkpoint: Path, tmp_path: Path, recipe_file: Callable[..., Path], change: dict[str, Any], said: str
) -> None:
    as_gptq(tiny_checkpoint)
    other = tmp_path / "other"
    shutil.copytree(tiny_checkpoint, other)
    settings = json.loads((other / "config.json").read_text())
    del settings["quantization_config"]
    (other / "config.json").write_text(json.dumps(settings | change))
    quality = {"data": "text.jsonl", "context": 64, "reference": str(other)}
    with pytest.raises(CheckpointError, match=said):
        preflight.check(Recipe.load(recipe_file(validation={"quality": quality})))
