"""Tensor parallelism: the graphs of all ranks compute together what the whole graph computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import native, passes, targets
from llmforge.backends import engines
from llmforge.backends.tensorrt.plan_cache import PlanRecord
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.compile import dry_run
from llmforge.ir import dialect, graph
from llmforge.ir.derived import Stored
from llmforge.parallel.split import RANK, split
from llmforge.passes import CpuKernels, FlashAttention, FuseExperts, FuseNorms, PackGateUp, PackQkv, QuantizeWeights
from llmforge.passes.lower_precision import LowerPrecision
from llmforge.recipe import EngineSpec, Recipe
from llmforge.rewrite.pass_base import Budget, Context, Pass
from llmforge.runtime.config import FILE, RuntimeConfig, plan_record
from llmforge.trace import trace
from llmforge.verification import probe

from ..fakes import ranks
from ..models import graphs, zoo

LOOSE = Budget(kld_mean=5.0)
FUSED: tuple[Pass, ...] = (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention())
INT4 = QuantizeWeights(LOOSE, method="rtn", accuracy_level=0, embedding_bits=4)
WIDE = graphs.Llama(hidden=64, heads=8, kv_heads=4, head_dim=32, mlp=128, vocabulary=96)


def after(model: ir.Model, steps: Sequence[Pass]) -> ir.Model:
    for step in steps:
        step.run(model, graphs.CPU)
    return model


def equal(model: ir.Model, degree: int, vocabulary: int = 96, tolerance: float = 1e-5) -> None:
    """Split `model`, run all ranks in prefill, decode, continuation and a ragged batch, and compare each one's logits.

    `tolerance` is relative to the largest logit.
    """
    made = split(model, degree)
    for number, own in enumerate(made.ranks):
        dialect.check(own)
        assert own.metadata_props[RANK] == f"{number}/{degree}"
    runs = probe.random_runs(vocabulary)
    wanted = ranks.whole(model, runs)
    unit = float(np.abs(np.concatenate(wanted)).max())
    for step, found in zip(wanted, ranks.logits(made, runs), strict=True):
        for logits in found:
            assert logits.shape == step.shape
            assert np.abs(logits - step).max() <= tolerance * unit


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("steps", [(), FUSED, (*FUSED, INT4)], ids=["canonical", "fused", "int4"])
def test_ranks_equal_the_whole(degree: int, steps: tuple[Pass, ...]) -> None:
    spec = WIDE if degree < 8 or INT4 not in steps else graphs.Llama(**{**vars(WIDE), "mlp": 256})
    equal(after(graphs.llama(spec), steps), degree)


@pytest.mark.parametrize(
    "spec",
    [
        graphs.Llama(bias=True, activation="Gelu"),
        graphs.Llama(query_norm=True, window=5),
        graphs.Llama(sinks=True, softcap=3.0),
        graphs.Llama(kv_heads=1, value_dim=8),
        graphs.Llama(interleaved=1, rotary_dim=8),
    ],
    ids=["biases", "head norms", "sinks", "one KV head, narrow values", "partial rotary"],
)
def test_variants_of_attention(spec: graphs.Llama) -> None:
    equal(graphs.llama(spec), 4)
    equal(after(graphs.llama(spec), FUSED), 2)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    "name", ["qwen3", "phi3", "mistral-window", "gemma2", "gpt-neox", "deepseek-v2", "mixtral", "gpt-oss", "glm4-moe"]
)
def test_models_of_the_zoo(name: str, degree: int, tmp_path: Path) -> None:
    if name == "phi3":
        import transformers

        zoo.save(transformers.Phi3Config(**{**zoo.BASE, "pad_token_id": 0}), tmp_path)
    else:
        zoo.write(name, tmp_path)
    model = trace(Checkpoint.open(tmp_path))
    equal(model, degree, zoo.VOCABULARY)
    equal(after(model, FUSED), degree, zoo.VOCABULARY)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_experts_and_biases_are_divided(interleaved: int) -> None:
    model = graphs.llama(graphs.Llama(experts=4, interleaved_gates=interleaved))
    equal(model, 2)
    equal(after(model.clone(), FUSED), 4)
    made = split(model, 2)
    assert [*made.whole] == ["l0_routed_node", "l1_routed_node"]
    for own in made.ranks:
        for node in graphs.find(own, "MoE"):
            dims = [graph.dims(value) for value in node.inputs[3:] if value is not None]
            assert dims == [(4, 48, 56), (4, 28, 48), (4, 56), (4, 48)]
    fused = model.clone()
    FuseExperts().run(fused, graphs.CPU)
    equal(fused, 2)
    [up, *_] = [
        graph.dims(value) for node in graphs.find(split(fused, 2).ranks[1], "MoE") for value in node.inputs[2:3]
    ]
    assert up == (4, 56, 48)


@pytest.mark.parametrize("symmetric", [False, True])
def test_quantized_experts_are_divided_by_blocks(symmetric: bool) -> None:
    spec = graphs.Llama(**{**vars(WIDE), "experts": 4})
    step = QuantizeWeights(LOOSE, method="rtn", accuracy_level=0, embedding_bits=4, symmetric=symmetric)
    model = after(graphs.llama(spec), (step,))
    assert graphs.find(model, "QMoE")
    equal(model, 2)
    with pytest.raises(UnsupportedError, match=r"experts of .* are 128 wide, no multiple of it in blocks of \d+"):
        split(model, 8)


def test_sample_checkpoint(sample_graph: ir.Model) -> None:
    fused = after(sample_graph.clone(), FUSED)
    equal(fused, 4, 8192)
    made = split(fused, 4)
    assert len(collectives(made.ranks[0])) == 1 + 2 * 6 + 1
    size = graph.weight_bytes(fused)
    assert all(graph.weight_bytes(own) < 0.26 * size for own in made.ranks)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
def test_sample_checkpoint_canonical_and_int4(degree: int, sample_graph: ir.Model) -> None:
    equal(sample_graph, degree, 8192)
    equal(after(sample_graph.clone(), (*FUSED, INT4)), degree, 8192)


def test_half_precision_is_divided() -> None:
    model = after(graphs.llama(WIDE), FUSED)
    LowerPrecision(LOOSE, "bf16").run(model, Context(targets.load("h100-sxm")))
    made = split(model, 2)
    runs = probe.random_runs(96)
    wanted = ranks.whole(model, runs)
    unit = float(np.concatenate(wanted).std())
    for step, found in zip(wanted, ranks.logits(made, runs), strict=True):
        assert max(np.abs(logits - step).max() for logits in found) < 0.2 * unit  # partial sums are rounded
    [reduced, *_] = graphs.find(made.ranks[0], "AllReduce")
    assert reduced.outputs[0].dtype == ir.DataType.BFLOAT16


def test_a_rank_reads_its_part_of_a_stored_weight(bf16_llama: tuple[Checkpoint, ir.Model]) -> None:
    checkpoint, traced = bf16_llama
    model = traced.clone()
    PackQkv().run(model, graphs.CPU)
    own = split(model, 2).ranks[1].graph.initializers
    down = own["model.layers.0.mlp.down_proj.weight"].const_value  # [96, 64], stored as [64, 96]
    assert isinstance(down, Stored)
    stored = checkpoint.tensor("model.layers.0.mlp.down_proj.weight").numpy()
    assert down.stored().shape == (64, 48)
    assert down.stored().base is not None  # a view of the mapped file
    np.testing.assert_array_equal(down.numpy(), stored.astype(np.float32).T[48:])
    packed = own["model.layers.0.self_attn.qkv_proj.weight"].const_value
    assert isinstance(packed, ir.LazyTensor)
    parts = [checkpoint.tensor(f"model.layers.0.self_attn.{part}_proj.weight").numpy() for part in "qkv"]
    wanted = np.concatenate([part[len(part) // 2 :].astype(np.float32).T for part in parts], axis=-1)
    np.testing.assert_array_equal(packed.numpy(), wanted)
    caches = [value for value in split(model, 2).ranks[0].graph.inputs if str(value.name).startswith("past_key_values")]
    assert {graph.dims(value)[1] for value in caches} == {1}  # type: ignore[index]


def collectives(own: ir.Model) -> list[tuple[str, int]]:
    """List where a rank meets the others, in the order of a step, and what they make: elements of a token or row."""
    nodes = [node for node in own.graph if node.op_type in ("AllReduce", "AllGather")]
    return [(node.op_type, graph.width(node.outputs[0])) for node in nodes]


def test_ranks_meet_twice_a_layer_and_for_the_vocabulary() -> None:
    model = graphs.llama(WIDE)
    wanted = [*[("AllReduce", 64)] * 5, ("AllGather", 96)]  # the tied embedding, two a layer, and the head
    assert [collectives(own) for own in split(model, 4).ranks] == [wanted] * 4
    assert collectives(split(model, 1).ranks[0]) == []


@pytest.mark.parametrize(
    ("spec", "steps", "degree", "message"),
    [
        (graphs.Llama(), (), 3, r"attention l0_attention has 4 query heads and 2 KV heads.*\n.*allowed are 1, 2, 4$"),
        (
            graphs.Llama(heads=8, kv_heads=8, mlp=36),
            (),
            8,
            r"l0_down_node reads 36 features.*\n.*allowed are 1, 2, 3, 4, ",
        ),
        (WIDE, (INT4,), 8, r"l0_down_node reads 128 features, in blocks of 32.*\n.*allowed are 1, 2, 4$"),
        (graphs.Llama(hidden=64, mlp=64), (INT4,), 4, r"l0_attention .* within a block of 32.*\n.*allowed are 1, 2$"),
    ],
    ids=["heads", "features", "blocks", "blocks of heads"],
)
def test_degrees_that_do_not_fit_are_refused(
    spec: graphs.Llama, steps: tuple[Pass, ...], degree: int, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        split(after(graphs.llama(spec), steps), degree)
    assert f"tensor_parallel is {degree}" in caught.value.message


def test_recurrent_layers_are_refused_by_name(tmp_path: Path) -> None:
    zoo.write("lfm2", tmp_path)
    with pytest.raises(
        UnsupportedError, match=r"CausalConv model\.layers\.0.* the state of a convolution is not divided"
    ):
        split(trace(Checkpoint.open(tmp_path)), 2)


def test_vocabularies_that_do_not_fit_stay_whole() -> None:
    model = graphs.llama(graphs.Llama(vocabulary=97))
    made = split(model, 2)
    assert made.whole["logits_node"] == "the vocabulary has 97 entries, no multiple of 2"
    equal(model, 2, 97)


def test_standard_onnx_has_no_collectives() -> None:
    with pytest.raises(UnsupportedError, match=r"AllReduce .* standard ONNX has no operator"):
        dialect.expand(split(graphs.llama(), 2).ranks[0])


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt", "tensorrt-rtx"])
def test_engines_for_gpus_have_ranks_where_their_collectives_run(backend: str) -> None:
    engines.refuse_ranks(backend, 2, targets.load("rtx-4090" if backend == "tensorrt-rtx" else "h100-sxm"))
    t4 = targets.load("t4")
    engines.refuse_ranks(backend, 1, t4)
    if backend == "onnxruntime":
        engines.refuse_ranks(backend, 2, t4)
        return
    with pytest.raises(
        UnsupportedError, match=rf"{backend} has collectives from compute capability 8\.0 on, and t4 has"
    ):
        engines.refuse_ranks(backend, 2, t4)


def test_files_for_others_are_not_divided() -> None:
    with pytest.raises(UnsupportedError, match="tensor_parallel is 2; gguf does not support it on cpu-avx2"):
        engines.refuse_ranks("gguf", 2, targets.load("cpu-avx2"))


def test_ranks_have_slots() -> None:
    gpu = targets.load("h100-sxm")
    engines.refuse_paged(EngineSpec(max_context=64, kv_cache="paged"), gpu)
    with pytest.raises(UnsupportedError, match="ranks of one model have slots alone"):
        engines.refuse_paged(EngineSpec(max_context=64, kv_cache="paged", tensor_parallel=2), gpu)


def test_what_cpu_kernels_packed_is_refused() -> None:
    model = after(graphs.llama(WIDE), (*FUSED, INT4, CpuKernels(LOOSE)))
    with pytest.raises(UnsupportedError, match="leave cpu-kernels out of the recipe"):
        split(model, 2)


def test_a_recipe_is_refused_when_it_is_planned(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"schema: 1\nname: tiny\ncheckpoint: {tiny_checkpoint}\ntarget: local\n"
        "engine: {max_context: 64, tensor_parallel: 2}\npasses: [fuse-norms]\n"
    )
    recipe = Recipe.load(path)
    checkpoint = Checkpoint.open(tiny_checkpoint)
    model = graphs.llama()
    arguments = {"target": targets.load("cpu-avx2"), "checkpoint": checkpoint}
    steps = recipe.instantiate(passes.ALL)
    dry_run.run(model, steps, spec=recipe.engine, **arguments)  # type: ignore[arg-type]
    gpu = {**arguments, "target": targets.load("t4")}
    spec = recipe.engine.model_copy(update={"backend": "tensorrt-rtx"})
    with pytest.raises(UnsupportedError, match="tensorrt-rtx has collectives from compute capability"):
        dry_run.run(model, steps, spec=spec, **gpu)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="which 3 ranks cannot share evenly"):
        dry_run.run(model, steps, spec=EngineSpec(max_context=64, tensor_parallel=3), **arguments)  # type: ignore[arg-type]


def test_a_plan_of_each_rank_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-RTX builds a rank's plan without a GPU, with every collective in it."""
    pytest.importorskip("tensorrt_rtx")
    monkeypatch.setenv("LLMFORGE_CACHE", str(tmp_path / "cache"))
    target = targets.load("rtx-4090")
    model = after(graphs.llama(WIDE), (FuseNorms(), PackQkv(), PackGateUp()))
    LowerPrecision(LOOSE, "fp16").run(model, Context(target))
    spec = EngineSpec(backend="tensorrt-rtx", max_context=64, max_batch=2, tensor_parallel=2)
    builder = engines.for_target("tensorrt-rtx", target)
    lowered = []
    for own in split(model, 2).ranks:
        made, changes = builder.lower(own, target, spec)
        assert sum("DistCollective of 2 ranks" in change.what for change in changes.rewritten) == 6
        lowered.append(made)
    folder = tmp_path / "engine"
    built = builder.build(engines.BuildRequest(lowered[0], folder, spec, target, [0], None, ranks=lowered))
    assert "6 DIST_COLLECTIVE" in built.facts["layers"]
    assert {cache.kv_heads for cache in built.config.caches} == {2}
    assert (built.config.ranks, built.config.kernels) == (2, native.VERSION)
    assert {*built.config.rank_files} < {file.name for file in folder.iterdir()}
    records = [PlanRecord.read(folder / plan_record(name)) for name in built.config.rank_files]
    assert records[0].sha256 != records[1].sha256
    assert RuntimeConfig.read(folder / FILE) == built.config
