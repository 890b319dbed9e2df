"""lower-precision: what computes in half precision, what stays fp32, and that no number is lost in silence."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from click.testing import CliRunner
from pydantic import ValidationError

from llmforge import targets
from llmforge.backends.onnxruntime import builder as engines
from llmforge.backends.onnxruntime.session import Session
from llmforge.base.errors import CheckpointError, RecipeError, UnsupportedError, VerificationError
from llmforge.checkpoint import Checkpoint, documents
from llmforge.cli import cli
from llmforge.compile import texts
from llmforge.ir import derived, graph
from llmforge.metrics.tokens import mean_kld
from llmforge.passes import ALL, FlashAttention, FuseExperts, FuseNorms, GenaiInterface, PackGateUp, PackQkv
from llmforge.passes.lower_precision import LowerPrecision
from llmforge.passes.quantize_kv_cache import QuantizeKvCache
from llmforge.passes.quantize_weights import QuantizeWeights
from llmforge.quantization.statistics import KvRange, Statistics
from llmforge.recipe import Recipe
from llmforge.rewrite import options
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.runtime.config import SessionConfig
from llmforge.runtime.interface import StepInputs
from llmforge.serving import load as load_runner
from llmforge.trace import trace
from llmforge.verification import probe
from llmforge.verification.verifier import Verifier

from ..models import graphs, zoo

GPU = Context(targets.load("h100-sxm"))
LOOSE = Budget(kld_mean=1.0)
TIGHT = {"kld_mean": 1e-4}
FLOAT, FP16, BF16, INT8 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.INT8
TEXTS = [np.random.default_rng(7).integers(0, 96, length) for length in (48, 40, 33)]


def lower(
    model: ir.Model,
    dtype: Literal["fp16", "bf16"],
    head: Literal["same", "fp32"] = "same",
    context: Context = GPU,
) -> LowerPrecision:
    change = LowerPrecision(LOOSE, dtype, head)
    assert change.run(model, context)
    return change


def fuse(model: ir.Model) -> None:
    for change in (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention()):
        change.run(model, graphs.CPU)


def dtypes(model: ir.Model) -> dict[str, ir.DataType | None]:
    held = [*model.graph.inputs, *model.graph.initializers.values(), *(x for node in model.graph for x in node.outputs)]
    return {str(value.name): value.dtype for value in held if value.name}


def test_decoder_as_text() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    lower(model, "bf16")
    assert graphs.lines(model, ["Cast"]) == ["logits = Cast(logits.bf16)"]
    found = dtypes(model)
    assert found.pop("logits") == FLOAT
    assert {dtype for dtype in found.values() if dtype in (FLOAT, FP16, BF16)} == {BF16}
    assert all(node.attributes.get_int("stash_type", 1) == 1 for node in graphs.find(model, "RMSNormalization"))


@pytest.mark.parametrize(("dtype", "largest"), [("bf16", 1e-3), ("fp16", 1e-5)])
@pytest.mark.parametrize("fused", [False, True])
def test_costs_what_rounding_costs(dtype: Literal["fp16", "bf16"], largest: float, fused: bool, tmp_path: Path) -> None:
    model = graphs.llama()
    if fused:
        fuse(model)
    check = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=TEXTS)
    change = LowerPrecision(LOOSE, dtype)
    found = check.check(change, model, change.run(model, GPU))
    assert found.kld_mean is not None
    assert largest / 100 < found.kld_mean < largest
    again = change.run(model, GPU)
    assert not again
    assert "already" in again.skipped[0].reason


def test_weights_of_a_bf16_checkpoint_are_its_bits_and_lazy(bf16_llama: tuple[Checkpoint, ir.Model]) -> None:
    checkpoint, traced = bf16_llama
    model = traced.clone()
    PackQkv().run(model, graphs.CPU)
    lower(model, "bf16")
    compared = 0
    for value in model.graph.initializers.values():
        names, tensor = graph.sources(value), value.const_value
        if not names:
            continue
        assert isinstance(tensor, ir.LazyTensor)
        stored = np.concatenate([checkpoint.tensor(name).numpy().view(np.uint16) for name in names])
        made = tensor.numpy()
        assert made.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(made.view(np.uint16), stored.T if "_proj" in names[0] else stored)
        compared += 1
    assert compared == 16
    packed = model.graph.initializers["model.layers.0.self_attn.qkv_proj.weight"].const_value
    assert packed is not None
    assert derived.is_stored(packed)


def test_sample_checkpoint_loses_what_transformers_loses(sample_checkpoint: Path, sample_graph: ir.Model) -> None:
    checkpoint = Checkpoint.open(sample_checkpoint)
    found = documents.read_documents(sample_checkpoint.parent / "evaluation.jsonl")
    windows = texts.windows_of(checkpoint, found, 96)[:3]
    model = sample_graph.clone()

    def logits(of: ir.Model) -> np.ndarray:
        session, made = probe.open_session(of, probe.InitializerArrays(), 1), []
        for window in windows:
            cache = session.allocate(1, len(window.ids))
            rows = np.arange(len(window.ids))
            made.append(session.step(StepInputs(window.ids[None], np.zeros(1, np.int32), rows), cache)[0].copy())
        return np.concatenate(made)

    def original(dtype: torch.dtype) -> np.ndarray:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(sample_checkpoint, dtype=dtype).eval()
        with torch.no_grad():
            made = [loaded(torch.from_numpy(window.ids[None])).logits[0].float().numpy() for window in windows]
        return np.concatenate(made)

    whole = logits(model)
    fuse(model)
    for dtype, theirs in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        lowered = model.clone()
        lower(lowered, dtype)  # type: ignore[arg-type]
        ratio = mean_kld(whole, logits(lowered)) / mean_kld(whole, original(theirs))
        assert 0.2 < ratio < 1.5, dtype


def test_routers_stay_fp32(tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(layers=1, experts=4))
    check = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=TEXTS)
    change = LowerPrecision(LOOSE, "bf16")
    changes = change.run(model, GPU)
    check.check(change, model, changes)
    [experts] = graphs.find(model, "MoE")
    assert [value.dtype for value in experts.inputs if value is not None] == [BF16, ir.DataType.INT64, *[BF16] * 5]
    assert {node.inputs[0].dtype for node in graphs.find(model, "Softmax") if node.inputs[0] is not None} == {FLOAT}
    assert dtypes(model)["model.layers.0.mlp.router.weight"] == FLOAT
    assert f"router of {experts.name}" in {skipped.reason for skipped in changes.skipped}
    with pytest.raises(UnsupportedError, match="becomes a Loop that adds in fp16"):
        LowerPrecision(LOOSE, "fp16").run(graphs.llama(graphs.Llama(layers=1, experts=4)), graphs.CPU)


def test_fused_experts_read_what_their_guard_reads(tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(experts=4, interleaved_gates=1))
    fuse(model)
    assert FuseExperts().run(model, graphs.CPU)
    check = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=TEXTS)
    change = LowerPrecision(LOOSE, "fp16")
    found = check.check(change, model, change.run(model, GPU))
    assert found.kld_mean is not None
    assert found.kld_mean < 1e-4
    for experts in graphs.find(model, "MoE"):
        [(guard, _)] = experts.outputs[0].uses()
        assert guard.op_type == "Where"
        assert guard.inputs[2] is experts.inputs[0]
    for fused in graphs.find(model, "SkipSimplifiedLayerNormalization"):
        assert {value.dtype for value in fused.inputs if value is not None} == {FP16}


@pytest.mark.slow
def test_states_and_rates_stay_fp32(tmp_path: Path) -> None:
    zoo.write("qwen3-5", tmp_path)
    model = trace(Checkpoint.open(tmp_path))
    check = Verifier(
        model, promises=graphs.PROMISES, folder=tmp_path / "failed", texts=[ids % zoo.VOCABULARY for ids in TEXTS]
    )
    change = LowerPrecision(LOOSE, "bf16")
    changes = change.run(model, GPU)
    found = check.check(change, model, changes)
    assert found.kld_mean is not None
    assert found.kld_mean < 1e-3
    kinds = dtypes(model)
    assert kinds["past_key_values.0.recurrent"] == kinds["present.0.recurrent"] == FLOAT
    assert kinds["past_key_values.0.conv"] == kinds["past_key_values.1.key"] == BF16
    [recurrent] = graphs.find(model, "LinearAttention")
    counts = recurrent.inputs[5:7]  # of tokens: those before, and those of the step
    assert [value.dtype for value in recurrent.inputs if value is not None and value not in counts] == [FLOAT] * 6
    assert f"it makes a rate of {recurrent.name}" in {skipped.reason for skipped in changes.skipped}


def test_scales_follow_activations_and_int8_caches_stay(tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(hidden=64, mlp=64))
    fuse(model)
    QuantizeWeights(LOOSE, method="rtn").run(model, graphs.CPU)
    ones = KvRange(np.full((2, 16), 4.0, np.float32), np.full((2, 16), 4.0, np.float32))
    statistics = Statistics(samples=1, tokens=1, linears={}, kv={0: ones, 1: ones})
    QuantizeKvCache(LOOSE).run(model, Context(graphs.TARGET, statistics))
    check = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=TEXTS)
    change = LowerPrecision(LOOSE, "fp16")
    check.check(change, model, change.run(model, GPU))
    for node in graphs.find(model, "MatMulNBits"):
        assert [value.dtype for value in node.inputs if value is not None][:3] == [FP16, ir.DataType.UINT8, FP16]
    for node in graphs.find(model, "GroupQueryAttention"):
        kinds = [None if value is None else value.dtype for value in node.inputs]
        assert kinds[0] == kinds[7] == FP16
        assert kinds[3] == kinds[4] == INT8
        assert kinds[12] == kinds[13] == FLOAT


def test_head_may_stay_fp32() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    lower(model, "bf16", "fp32")
    [head] = [node for node in graphs.find(model, "MatMul") if node.outputs[0].name == "logits"]
    assert [value.dtype for value in head.inputs if value is not None] == [FLOAT, FLOAT]
    # The embedding is tied: its table is kept once, and the rows that are looked up are cast.
    assert dtypes(model)["model.embed_tokens.weight"] == dtypes(model)["embedded"] == FLOAT
    assert {str(node.inputs[0].name) for node in graphs.find(model, "Cast") if node.inputs[0] is not None} == {
        "embedded",
        "selected",
    }


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_runs_in_the_cpu_engine(fused: bool) -> None:
    model = graphs.llama(graphs.Llama(query_norm=True, sinks=True, softcap=3.0, window=5))
    if fused:
        fuse(model)
    lower(model, "fp16", context=graphs.CPU)
    twin = probe.open_session(model, probe.InitializerArrays(), 1)
    lowered, _ = engines.lower(model, graphs.TARGET)
    arrays = {name: tensor.numpy() for name, tensor in probe.strip(lowered).items()}
    serialized = ir.serde.serialize_model(lowered).SerializeToString()
    session = Session(serialized, SessionConfig(threads=1), initializers=arrays)
    assert {cache.dtype for cache in session.signature.caches} == {"float16"}
    for run in probe.random_runs(96):
        pairs = zip(probe.drive(twin, run, caches=False), probe.drive(session, run, caches=False), strict=True)
        for emulated, real in pairs:
            assert np.abs(emulated.logits - real.logits).max() < 0.01 * emulated.logits.std()


def test_a_weight_beyond_fp16_is_refused_by_name() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    weight = model.graph.initializers["model.layers.0.mlp.up_proj.weight"]
    assert weight.const_value is not None
    array = weight.const_value.numpy().copy()
    array[3, 4] = -70000
    weight.const_value = ir.Tensor(array, name=weight.name)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: it holds 70000; fp16 ends at 65504"):
        LowerPrecision(LOOSE, "fp16").run(model, GPU)
    lower(graphs.llama(graphs.Llama(layers=1)), "bf16")


def test_an_activation_beyond_fp16_is_an_error_that_names_it(tmp_path: Path) -> None:
    def loud() -> ir.Model:
        model = graphs.llama()
        for name in ("gate_proj", "up_proj"):
            weight = model.graph.initializers[f"model.layers.1.mlp.{name}.weight"]
            assert weight.const_value is not None
            weight.const_value = ir.Tensor(weight.const_value.numpy() * np.float32(500), name=weight.name)
        return model

    model = loud()
    check = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=TEXTS)
    change = LowerPrecision(LOOSE, "fp16")
    with pytest.raises(VerificationError, match=r"first diverging tensor: l1_gated, by inf .* fp16 ends at 65504"):
        check.check(change, model, change.run(model, GPU))
    model = loud()
    check = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=TEXTS)
    change = LowerPrecision(LOOSE, "bf16")
    check.check(change, model, change.run(model, GPU))


@pytest.mark.parametrize("whole_bytes", [0, 1 << 30])
def test_exact_passes_may_follow(whole_bytes: int, tmp_path: Path) -> None:
    model = graphs.llama()
    fuse(model)
    lower(model, "fp16", context=graphs.CPU)
    check = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, whole_bytes=whole_bytes)
    change = GenaiInterface()
    assert check.check(change, model, change.run(model, graphs.CPU)).largest_difference == 0


def test_refused_where_the_dtype_does_not_run() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    with pytest.raises(UnsupportedError, match=r"t4 .* does not compute in bf16"):
        LowerPrecision(LOOSE, "bf16").run(model, Context(targets.load("t4")))
    with pytest.raises(UnsupportedError, match="no kernels for bf16 on a CPU"):
        LowerPrecision(LOOSE, "bf16").run(model, graphs.CPU)
    lower(model, "fp16")
    with pytest.raises(UnsupportedError, match="computes in FLOAT16 already, not in bf16"):
        LowerPrecision(LOOSE, "bf16").run(model, GPU)


def test_options_are_checked() -> None:
    with pytest.raises(ValidationError, match="'fp16' or 'bf16'"):
        options.make(LowerPrecision, {"budget": {"kld_mean": 0.1}, "dtype": "fp8"})
    with pytest.raises(ValidationError, match="budget"):
        options.make(LowerPrecision, {"dtype": "fp16"})


def test_passes_that_are_proven_in_fp32_stand_in_front(tmp_path: Path, tiny_checkpoint: Path) -> None:
    lines = [
        "schema: 1",
        "name: tiny",
        f"checkpoint: {tiny_checkpoint}",
        "target: h100-sxm",
        "engine: {max_context: 64, max_batch: 1}",
        "passes:",
        "  - lower-precision: {dtype: bf16, budget: {kld_mean: 0.1}}",
        "  - fuse-norms",
    ]
    path = tmp_path / "recipe.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(RecipeError, match=r"fuse-norms.*follows a pass that lowers the precision"):
        Recipe.load(path).instantiate(ALL)


def test_budget_of_a_model_that_is_never_run_whole(tmp_path: Path) -> None:
    found = []
    for whole_bytes in (0, 1 << 30):
        model = graphs.llama()
        fuse(model)
        check = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=TEXTS, whole_bytes=whole_bytes)
        change = LowerPrecision(LOOSE, "bf16")
        found.append(check.check(change, model, change.run(model, GPU)).kld_mean)
    in_pieces, whole = found
    assert in_pieces is not None
    assert whole is not None
    assert 0.3 < in_pieces / whole < 3  # other tokens of the same text


@pytest.mark.slow
def test_an_fp16_artifact_is_built_measured_and_run(tmp_path: Path, tiny_checkpoint: Path) -> None:
    words = ["graph", "engine", "pass", "weight", "scale", "token", "cache", "layer", "head", "probe", "gate", "report"]
    rng = random.Random(0)
    lines = [json.dumps({"id": str(i), "text": " ".join(rng.choices(words, k=30))}) for i in range(10)]
    (tmp_path / "evaluation.jsonl").write_text("\n".join(lines))
    recipe = {
        "schema": 1,
        "name": "tiny",
        "checkpoint": str(tiny_checkpoint),
        "target": "local",
        "engine": {"max_context": 128, "max_batch": 2, "threads": 1},
        "passes": [
            "fuse-norms",
            "pack-qkv",
            "flash-attention",
            {"lower-precision": {"dtype": "fp16", "budget": TIGHT}},
        ],
        "validation": {"quality": {"data": "evaluation.jsonl", "context": 64}},
        "gates": {"kld_mean": {"max": 1e-4}},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    result = CliRunner().invoke(
        cli, ["build", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "out"), "--quiet"]
    )
    assert result.exit_code == 0, result.output
    runner = load_runner(Path(result.stdout.strip().splitlines()[-1]), threads=1)
    assert {cache.dtype for cache in runner.config.caches} == {"float16"}
    logits = runner.logits([1, 2, 3, 4, 5])
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()
