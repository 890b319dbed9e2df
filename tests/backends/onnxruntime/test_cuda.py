"""The engine for ONNX Runtime on a GPU: what is lowered, what is refused, and what a session is told, without a GPU."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.backends import engines
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime.cuda import builder as cuda
from llmforge.backends.onnxruntime.cuda import graphs as cuda_graphs
from llmforge.backends.onnxruntime.cuda import operators as cuda_operators
from llmforge.backends.onnxruntime.cuda.session import DeviceSession
from llmforge.backends.onnxruntime.session import Session
from llmforge.base.errors import EnvironmentLacks, ForgeError, RunFailed, UnsupportedError, VerificationError
from llmforge.ir import dialect, graph, query_key_norms
from llmforge.ir.operators import contrib
from llmforge.passes import (
    FlashAttention,
    FuseExperts,
    FuseNorms,
    LowerPrecision,
    PackQkv,
    QuantizeKvCache,
    QuantizeWeights,
)
from llmforge.quantization.statistics import KvRange, Statistics
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Budget, Changes, Context, Pass
from llmforge.runtime.config import FILE, Capture, GraphPlan, RuntimeConfig, SessionConfig
from llmforge.runtime.interface import StepInputs

from ...fakes.host_device import HostDevice
from ...models import graphs
from ...models.graphs import Llama

H100 = targets.load("h100-sxm")
SPEC = EngineSpec(max_context=64, max_batch=4, kv_cache="slots")
BUDGET = Budget(kld_mean=5)
FORM = Llama(hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=64, vocabulary=128, bias=True)
NORMED = dataclasses.replace(FORM, query_norm=True)
FAST = QuantizeWeights(BUDGET, method="rtn", symmetric=True, embedding_bits=16, accuracy_level=0)
PEAKS = np.full((FORM.kv_heads, FORM.head_dim), 4, np.float32)
RANGES = Statistics(0, 0, {}, {layer: KvRange(PEAKS, PEAKS) for layer in range(FORM.layers)})


def prepared(*more: Pass, form: Llama = FORM, dtype: str | None = "fp16", target: str = "h100-sxm") -> ir.Model:
    """Run the passes of a recipe for a GPU over a canonical graph."""
    model, context = graphs.llama(form), Context(targets.load(target), RANGES)
    last = [LowerPrecision(BUDGET, dtype)] if dtype else []
    for step in (FuseNorms(), PackQkv(), FlashAttention(), *more, *last):
        step.run(model, context)
    return model


def lower(model: ir.Model, spec: EngineSpec = SPEC, target: str = "h100-sxm") -> tuple[ir.Model, Changes]:
    return cuda.lower(model, targets.load(target), spec)


def logits(model: ir.Model) -> np.ndarray:
    """Read two prompts of different lengths, then generate two tokens: logits [2, 3, V] of every step's last rows."""
    session = Session(ir.to_proto(model).SerializeToString(), SessionConfig(1, optimize=False))
    cache, rng = session.allocate(2, 32), np.random.default_rng(5)
    past = np.zeros(2, np.int32)
    found = []
    for count in (6, 1, 1):
        ids = rng.integers(0, 96, (2, count))
        for row in range(2):  # a step of several tokens is one of a row
            found.append(
                session.step(StepInputs(ids[row : row + 1], past[row : row + 1]), cache.rows(row, row + 1))[:, -1]
            )
        past = past + np.array([count, count], np.int32)
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("more", "form", "tolerance"),
    [
        ((), FORM, 5e-3),
        ((FAST,), FORM, 5e-3),
        ((dataclasses.replace(FAST, symmetric=False),), FORM, 5e-3),
        ((QuantizeKvCache(BUDGET),), FORM, 3e-2),  # a number of a cache may round to its neighbour
        ((), NORMED, 5e-3),
    ],
    ids=["dense", "int4, biases apart", "int4 with zero points", "int8 cache", "norms inside attention"],
)
def test_what_is_lowered_in_fp16_computes_what_the_graph_did(
    more: tuple[Pass, ...], form: Llama, tolerance: float
) -> None:
    wanted = logits(dialect.expand(prepared(*more, dtype=None, form=form)))
    lowered, _ = lower(prepared(*more, form=form))
    got = logits(query_key_norms.expand(lowered))
    assert np.abs(wanted).max() > 1
    assert np.abs(got - wanted).max() < tolerance * np.abs(wanted).max()


def test_attention_norms_queries_and_keys_itself() -> None:
    lowered, changes = lower(prepared(form=NORMED))
    layers = contrib.GroupQueryAttention.all(lowered)
    assert [(len(layer.projections), graph.dims(layer.q_norm_weight)) for layer in layers] == [(1, (16,))] * 2
    assert not any("norm" in str(node.inputs[1]) for node in lowered.graph if node.op_type == "Reshape")
    what = "norms inside attention of queries and keys, which are packed"
    assert [each.node for each in changes.rewritten if each.what == what] == ["l0_attention", "l1_attention"]
    plain, _ = lower(prepared(form=FORM))
    assert graph.nodes(lowered) == graph.nodes(plain)  # no Split, no Reshape and no norm is left


def test_over_int8_rows_norms_stay_in_front() -> None:
    lowered, changes = lower(prepared(QuantizeKvCache(BUDGET), form=NORMED))
    assert all(layer.q_norm_weight is None for layer in contrib.GroupQueryAttention.all(lowered))
    said = [each.reason for each in changes.skipped if each.node.endswith("_attention")]
    assert said == ["norms of queries and keys stay: with them XQA reads no int8 cache"] * 2


def test_norms_that_differ_or_that_something_else_reads_stay_in_front() -> None:
    for spoil in (_another_epsilon, _another_reader):
        model = prepared(form=NORMED)
        spoil(model)
        rewritten, _ = cuda_operators.take_norms(model, blocks=False)
        assert [each.node for each in rewritten] == ["l1_attention"]


def _another_epsilon(model: ir.Model) -> None:
    [norm, *_] = (node for node in model.graph if node.name == "l0_q_normed_node")
    norm.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.5)


def _another_reader(model: ir.Model) -> None:
    [norm, *_] = (node for node in model.graph if node.name == "l0_k_normed_node")
    [seen] = graph.insert(norm, "Identity", [norm.outputs[0]], name="peek")
    model.graph.outputs.append(seen)


def test_the_builder_of_gpus_is_found() -> None:
    assert engines.for_target("onnxruntime", H100) is cuda


def test_a_graph_in_fp32_is_told_what_to_add() -> None:
    found = r"GroupQueryAttention: no kernel with .*T float,.* it has .*T: bfloat16"
    with pytest.raises(UnsupportedError, match=found) as caught:
        lower(prepared(dtype=None))
    assert "lower-precision" in (caught.value.hint or "")
    assert "(node l0_attention)" in caught.value.message


def test_an_operator_without_a_kernel_is_named_with_a_node() -> None:
    model = prepared()
    [node] = [node for node in model.graph if node.op_type == "Gather" and node.inputs[1].name == "input_ids"]
    ids = node.inputs[1]
    unique = graph.insert(node, "Unique", [ids], outputs=4)  # of all tokens: nothing that a decoder would do
    node.replace_input_with(1, unique[0])
    with pytest.raises(UnsupportedError, match=r"cannot run 1 nodes .*ai\.onnx::Unique: no kernel"):
        lower(model)


@pytest.mark.parametrize(("name", "code"), [("t4", 75), ("a10g", 86), ("l4", 89), ("h200", 90), ("rtx-5090", 120)])
def test_devices_with_machine_code(name: str, code: int) -> None:
    target = targets.load(name)
    assert target.require_engine("onnxruntime").builder == cuda.__name__
    assert target.require_gpu().sm == str(code)


@pytest.mark.parametrize("name", ["b200", "gb200"])
def test_devices_without_machine_code_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"neither code for SM 10\.0 nor PTX") as caught:
        lower(prepared(), target=name)
    assert caught.value.exit_code == 6
    assert "tensorrt" in (caught.value.hint or "")


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="is a cpu; this engine runs on GPUs"):
        lower(prepared(), target="cpu-avx2")


def test_the_fast_product_gets_no_bias() -> None:
    model = prepared(FAST)
    with_bias = [node for node in model.graph if node.op_type == "MatMulNBits" and len(node.inputs) > 5]
    assert with_bias
    lowered, changes = lower(model)
    assert not any(len(node.inputs) > 3 for node in lowered.graph if node.op_type == "MatMulNBits")
    apart = [change.node for change in changes.rewritten if "moved to a separate Add" in change.what]
    assert apart == [node.name for node in with_bias]
    assert not changes.skipped
    entries = cuda.session_options(lowered, (1, 2)).entries
    assert entries[cuda.FAST_ENTRY] == "1"
    assert entries[cuda.FAST_ROWS_ENTRY] == "1,2,64,128,256,512"
    assert "MatMulNBitsFusion" in entries["optimization.disable_specified_optimizers"]  # it would put biases back


@pytest.mark.parametrize(
    ("step", "dtype", "form", "reason"),
    [
        (dataclasses.replace(FAST, symmetric=False), "fp16", FORM, "takes no zero points; runs on a slower"),
        (dataclasses.replace(FAST, block_size=64), "fp16", FORM, "takes blocks of 32, not 64"),
        (dataclasses.replace(FAST, symmetric=False, block_size=64), "bf16", FORM, "takes blocks of 32, not 64"),
        (FAST, "fp16", dataclasses.replace(FORM, mlp=96), r"multiples of 64 outputs and 64 inputs, not \[96, 64\]"),
    ],
)
def test_slower_products_are_listed_with_the_reason(step: Pass, dtype: str, form: Llama, reason: str) -> None:
    _, changes = lower(prepared(step, form=form, dtype=dtype))
    assert changes.skipped
    assert any(re.search(reason, skip.reason) for skip in changes.skipped)


def test_a_product_that_is_not_the_fast_one_says_why() -> None:
    lowered, _ = lower(prepared(FAST))
    product = contrib.MatMulNBits.all(lowered)[0]
    assert cuda_operators.slow_reason(product) is None
    product.bits = 2
    assert cuda_operators.slow_reason(product) == "the fast kernel takes 4 and 8 bits, not 2"
    product.bits = 4
    product.bias = product.scales
    assert cuda_operators.slow_reason(product) == "the fast kernel takes no bias"
    assert cuda_operators.slow_reason(product, without_bias=True) is None
    product.scales.type = ir.TensorType(ir.DataType.FLOAT)
    product.scales.const_value = None
    assert cuda_operators.slow_reason(product) == "the fast kernel takes fp16 and bf16, not FLOAT"


def test_norms_of_queries_and_keys_that_are_not_packed_move_into_attention_too() -> None:
    model = graphs.llama(NORMED)
    for step in (FuseNorms(), FlashAttention(), LowerPrecision(BUDGET, "fp16")):
        step.run(model, Context(H100))
    rewritten, skipped = cuda_operators.take_norms(model, blocks=False)
    assert [each.what for each in rewritten] == ["norms inside attention of queries and keys"] * 2
    assert not skipped
    assert {len(layer.projections) for layer in contrib.GroupQueryAttention.all(model)} == {3}
    assert {graph.width(layer.key) for layer in contrib.GroupQueryAttention.all(model)} == {2 * 16}


def test_without_a_fast_product_nothing_is_said_of_it() -> None:
    lowered, _ = lower(prepared(dataclasses.replace(FAST, block_size=64)))
    assert cuda.FAST_ENTRY not in cuda.session_options(lowered, (1,)).entries


def test_what_the_fast_product_fails_at_is_kept_from_it_by_a_bias() -> None:
    """96 inputs: ONNX Runtime takes them, and has no tactic for more than 8 tokens (test_cuda_wheel.py)."""
    form = dataclasses.replace(FORM, mlp=96, bias=False)
    graph_of = prepared(FAST, form=form)
    lowered, changes = lower(graph_of)
    kept = {product.K for product in contrib.MatMulNBits.all(lowered) if product.bias is not None}
    assert kept == {96}
    assert {product.K for product in contrib.MatMulNBits.all(lowered) if product.bias is None} == {64}
    what = "a bias of zeros: the fast kernel has no tactic for 96 inputs"
    assert len([each for each in changes.rewritten if each.what == what]) == form.layers
    wanted = logits(dialect.expand(prepared(FAST, form=form, dtype=None)))
    assert np.abs(logits(lowered) - wanted).max() < 5e-3 * np.abs(wanted).max()


def test_operators_without_a_kernel_for_bf16_compute_in_fp32() -> None:
    model = prepared(dtype="bf16")
    [softmaxed] = [node for node in model.graph if node.op_type == "SkipSimplifiedLayerNormalization"][:1]
    [old] = softmaxed.outputs[:1]
    readers = list(old.uses())
    floor = ir.Node("", "Floor", [old], name="floor")
    floor.outputs[0].type, floor.outputs[0].shape = old.type, old.shape
    model.graph.insert_after(softmaxed, floor)
    for node, index in readers:
        node.replace_input_with(index, floor.outputs[0])
    lowered, changes = lower(model)
    [floor] = [node for node in lowered.graph if node.op_type == "Floor"]
    assert floor.inputs[0].producer().attributes.get_int("to") == ir.DataType.FLOAT
    [(back, _)] = floor.outputs[0].uses()
    assert (back.op_type, back.attributes.get_int("to")) == ("Cast", ir.DataType.BFLOAT16)
    assert any(change.what == "Floor in float: no kernel for bfloat16" for change in changes.rewritten)


def experts(count: int = 4, hidden: int = 64, inner: int = 64) -> ir.Model:
    """Put experts behind the first norm of a decoder: every token gets the first two."""
    model = graphs.llama(dataclasses.replace(FORM, hidden=hidden))
    norm = next(node for node in model.graph if node.op_type == "RMSNormalization")
    x, readers = norm.outputs[0], list(norm.outputs[0].uses())
    rng = np.random.default_rng(2)
    up = graph.initializer(model, "up", (rng.standard_normal((count, hidden, 2 * inner)) / 8).astype(np.float32))
    down = graph.initializer(model, "down", (rng.standard_normal((count, inner, hidden)) / 8).astype(np.float32))
    router = graph.initializer(model, "router", rng.standard_normal((hidden, count)).astype(np.float32))
    two = graph.initializer(model, "two", np.array([2], np.int64))
    anchor = readers[0][0]
    [scores] = graph.insert(anchor, "MatMul", [x, router], name="scores")
    scores.shape = ir.Shape(["batch", "sequence", count])
    scores.type = ir.TensorType(ir.DataType.FLOAT)
    [shares] = graph.insert(anchor, "Softmax", [scores], {"axis": -1}, name="shares")
    weights, ids = graph.insert(anchor, "TopK", [shares, two], outputs=2, name="top")
    for value, dtype in ((shares, ir.DataType.FLOAT), (weights, ir.DataType.FLOAT), (ids, ir.DataType.INT64)):
        value.type = ir.TensorType(dtype)
        value.shape = ir.Shape(["batch", "sequence", count if value is shares else 2])
    attributes = {"activation": "silu", "gated": 1, "interleaved": 0, "alpha": 1.0, "beta": 0.0, "limit": 0.0}
    [y] = graph.insert(anchor, "MoE", [x, ids, weights, up, down], attributes, domain="llmforge", name="experts")
    y.type, y.shape = x.type, x.shape
    for node, index in readers:
        node.replace_input_with(index, y)
    return model


def of_experts(*steps: Pass, **sizes: int) -> ir.Model:
    model = experts(**sizes)
    for step in (FlashAttention(), *steps, LowerPrecision(BUDGET, "fp16")):
        step.run(model, Context(H100))
    return model


def test_quantized_experts_say_that_they_are_not_reordered() -> None:
    lowered, _ = lower(of_experts(FAST))
    [node] = [node for node in lowered.graph if node.op_type == "QMoE"]
    assert node.attributes.get_int("weights_prepacked") == 0


@pytest.mark.parametrize(
    ("step", "sizes", "reason"),
    [
        (FAST, {"inner": 96}, "the inner width of its experts is 96, not a multiple of 64"),
        (FAST, {"hidden": 96}, "the hidden width of its experts is 96"),
        (dataclasses.replace(FAST, symmetric=False), {"inner": 64, "hidden": 192, "block_size": 16}, ""),
    ],
)
def test_experts_that_the_kernel_refuses(step: Pass, sizes: dict[str, int], reason: str) -> None:
    sizes = {key: value for key, value in sizes.items() if key != "block_size"}
    model = of_experts(step, **sizes)
    if not reason:  # a block that QMoE takes with zero points, until it is too small
        lower(model)
        [node] = [node for node in model.graph if node.op_type == "QMoE"]
        node.attributes["block_size"] = ir.AttrInt64("block_size", 16)
        reason = "zero points need blocks of 32 or more, not 16"
    with pytest.raises(UnsupportedError, match=reason) as caught:
        lower(model)
    assert "fuse-experts" in (caught.value.hint or "")


@pytest.mark.parametrize("step", [FAST, FuseExperts()])
def test_experts_of_an_old_device_are_refused(step: Pass) -> None:
    lower(of_experts(step))
    with pytest.raises(
        UnsupportedError, match=r"MoE .* on CUDA: products of experts need SM 80 or above, not SM 75"
    ) as caught:
        lower(of_experts(step), target="t4")
    assert caught.value.hint == "choose another target"


def test_sinks_over_blocks_of_an_old_device_are_refused() -> None:
    form, spec = dataclasses.replace(FORM, sinks=True), EngineSpec(max_context=64, max_batch=4, kv_cache="paged")
    lower(prepared(form=form), spec)
    with pytest.raises(UnsupportedError, match=r"sinks over blocks need SM 80 .*, not SM 75 and 16") as caught:
        lower(prepared(form=form, target="t4"), spec, "t4")
    assert "kv_cache: slots" in (caught.value.hint or "")


def test_experts_that_stay_a_loop_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"ai\.onnx::Unique: no kernel"):
        lower(of_experts())


def test_int8_caches_of_an_old_device_are_refused() -> None:
    model = prepared(QuantizeKvCache(BUDGET), target="t4")
    with pytest.raises(UnsupportedError, match="int8 caches need SM 80 or above, not SM 75") as caught:
        lower(model, target="t4")
    assert "quantize-kv-cache" in (caught.value.hint or "")
    lower(prepared(target="t4"), target="t4")


@pytest.mark.parametrize(
    ("changes", "batches"),
    [
        ({"max_batch": 1}, (1,)),
        ({"max_batch": 8}, (1, 2, 4, 8)),
        ({"max_batch": 6}, (1, 2, 4, 6)),
        ({"max_batch": 64, "decode_batches": (1, 16, 64)}, (1, 16, 64)),
    ],
)
def test_decode_batches(changes: dict[str, object], batches: tuple[int, ...]) -> None:
    assert cuda_graphs.decode_batches(EngineSpec(max_context=64, **changes)) == batches


@pytest.mark.parametrize(
    ("context", "classes"), [(64, (64,)), (1024, (1024,)), (4097, (1024, 4096, 4097)), (8192, (1024, 4096, 8192))]
)
def test_length_classes_end_at_the_context(context: int, classes: tuple[int, ...]) -> None:
    assert cuda_graphs.lengths(context) == classes


def test_the_largest_step_is_captured_first() -> None:
    lowered, _ = lower(prepared())
    plan = cuda_graphs.plan(lowered, EngineSpec(max_context=2048, max_batch=2))
    assert plan == GraphPlan(
        "require", (Capture(1, 2, 2048), Capture(2, 2, 1024), Capture(3, 1, 2048), Capture(4, 1, 1024))
    )


def test_what_cannot_be_captured_is_refused_or_left() -> None:
    lowered, _ = lower(prepared())
    nonzero = ir.Node("", "NonZero", [lowered.graph.inputs[0]], name="find")
    lowered.graph.append(nonzero)
    with pytest.raises(UnsupportedError, match="NonZero find: the shape of its result depends on numbers") as caught:
        cuda_graphs.require(lowered, SPEC)
    assert "cuda_graphs: allow" in (caught.value.hint or "")
    for mode in ("allow", "off"):
        spec = EngineSpec(max_context=64, cuda_graphs=mode)
        cuda_graphs.require(lowered, spec)
        assert cuda_graphs.plan(lowered, spec) == GraphPlan("off", ())


def test_a_product_with_group_indices_is_never_captured() -> None:
    lowered, _ = lower(prepared(FAST))
    product = contrib.MatMulNBits.all(lowered)[0]
    product.g_idx = graph.initializer(lowered, "groups", np.zeros(product.K, np.int32))
    with pytest.raises(UnsupportedError, match="the host reads its group indices"):
        cuda_graphs.require(lowered, SPEC)


@pytest.mark.parametrize("op_type", ["If", "Loop", "Scan"])
def test_control_flow_is_never_captured(op_type: str) -> None:
    lowered, _ = lower(prepared())
    body = ir.AttrGraph("body", ir.Graph([], [], nodes=[]))
    lowered.graph.append(ir.Node("", op_type, [lowered.graph.inputs[0]], [body], name="step"))
    with pytest.raises(UnsupportedError, match=f"{op_type} step: control flow"):
        cuda_graphs.require(lowered, SPEC)


def test_an_operator_that_no_record_knows_is_never_captured() -> None:
    lowered, _ = lower(prepared())
    lowered.graph.append(ir.Node("", "Compress", [lowered.graph.inputs[0]], name="few"))
    with pytest.raises(UnsupportedError, match="Compress few: the operator is unknown"):
        cuda_graphs.require(lowered, SPEC)


def test_memory_counts_weights_and_caches() -> None:
    lowered, _ = lower(prepared())
    spec = EngineSpec(max_context=64, max_batch=4)
    found = cuda_graphs.memory(lowered, spec, cuda_graphs.plan(lowered, spec))
    assert found.caches == 2 * 2 * 4 * 2 * 64 * 16 * 2  # layers, keys and values, rows, heads, slots, channels, bytes
    assert found.weights == graph.weight_bytes(lowered)
    assert found.graphs == cuda_graphs.LAUNCH_BYTES * cuda_graphs.LAUNCHES_A_NODE * graph.nodes(lowered) * 3
    assert found.total == found.weights + found.caches + found.activations + found.graphs


def configure(model: ir.Model, spec: EngineSpec = SPEC, target: str = "h100-sxm") -> RuntimeConfig:
    return cuda.configure(BuildRequest(model, Path(), spec, targets.load(target), (3,), None))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    lowered, _ = lower(prepared(QuantizeKvCache(BUDGET), dtype="bf16"))
    config, _ = cuda.write(BuildRequest(lowered, tmp_path, SPEC, H100, (3,), None))
    assert config == configure(lowered)
    assert RuntimeConfig.read(tmp_path / "runtime.json") == config
    assert (tmp_path / "model.onnx.data").stat().st_size > 0
    assert config.provider == "cuda"
    assert config.onnxruntime == "1.31.1"
    assert config.device is not None
    assert config.device.sm == 90
    assert config.buckets == (1, 2, 4)
    assert config.vocabulary == 128
    assert [cache.dtype for cache in config.caches] == ["int8"] * 4
    assert config.provider_options["enable_cuda_graph"] == "1"
    assert config.provider_options == cuda.provider_options(graphs=True)
    assert config.session.entries["session.disable_cpu_ep_fallback"] == "1"
    plain, _ = lower(prepared(dtype="bf16"))
    assert {cache.dtype for cache in configure(plain).caches} == {"bfloat16"}


def test_without_graphs_the_provider_is_told_so() -> None:
    lowered, _ = lower(prepared())
    config = configure(lowered, EngineSpec(max_context=64, cuda_graphs="off"))
    assert config.graphs == GraphPlan("off", ())
    assert config.provider_options["enable_cuda_graph"] == "0"


def test_attention_in_standard_operators_computes_shapes_on_the_host() -> None:
    model = graphs.llama(dataclasses.replace(FORM, value_dim=24))  # GroupQueryAttention has one width of heads
    LowerPrecision(BUDGET, "fp16").run(model, Context(H100))
    lowered, _ = lower(model)
    assert cuda.session_options(lowered, (1,)).entries["session.disable_cpu_ep_fallback"] == "0"


def test_an_engine_beyond_the_memory_of_the_device_is_refused() -> None:
    spec = EngineSpec(max_context=2**24, max_batch=64, kv_cache="slots")
    with pytest.raises(
        UnsupportedError, match=r"needs about .* GB \(weights .* GB, caches .* GB.* has 80 GB"
    ) as caught:
        lower(prepared(), spec)
    assert "max_context" in (caught.value.hint or "")


def test_without_the_gpu_the_build_says_so_and_writes_nothing(tmp_path: Path) -> None:
    lowered, _ = lower(prepared())
    with pytest.raises(EnvironmentLacks, match="CUDA provider is verified on the GPU that runs it") as caught:
        cuda.build(BuildRequest(lowered, tmp_path / "engine", SPEC, H100, (3,), None))
    assert caught.value.exit_code == 8
    assert "--defer" in (caught.value.hint or "")
    assert not (tmp_path / "engine").exists()


def session(model: ir.Model, config: RuntimeConfig, mode: str) -> DeviceSession:
    """Open the engine over the host's memory, on the CPU provider, which captures nothing."""
    assert config.graphs is not None
    plan = GraphPlan(mode, config.graphs.captures)  # type: ignore[arg-type]
    data = ir.to_proto(model).SerializeToString()
    return DeviceSession(data, SessionConfig(1), HostDevice(), buckets=config.buckets, graphs=plan)


def test_a_step_that_must_be_captured_and_is_not_fails_the_build() -> None:
    lowered, _ = lower(prepared())
    config = configure(lowered)
    with pytest.raises(VerificationError, match="decode steps with 4 rows of up to 64 tokens run without CUDA graph"):
        cuda.prove(session(lowered, config, "require"), config)
    notes = cuda.prove(session(lowered, config, "allow"), config)
    assert len(notes) == 3
    assert cuda.prove(session(lowered, config, "off"), config) == ()


def test_logits_that_are_not_finite_fail_the_build() -> None:
    lowered, _ = lower(prepared())
    head = next(node for node in reversed(lowered.graph) if node.op_type == "MatMul").inputs[1]
    broken = head.const_value.numpy().copy()
    broken[0, 0] = np.nan
    head.const_value = ir.tensor(broken, name=head.name)
    config = configure(lowered)
    with pytest.raises(VerificationError, match="NaN or infinite"):
        cuda.prove(session(lowered, config, "off"), config)


def test_an_engine_is_proven_at_every_width_that_kernels_are_chosen_by() -> None:
    lowered, _ = lower(prepared())
    config = replace(configure(lowered), max_context=64)
    opened, widths = session(lowered, config, "off"), []
    step = opened.step
    opened.step = lambda inputs, *rest: (widths.append(inputs.ids.shape[1]), step(inputs, *rest))[1]  # type: ignore[method-assign]
    cuda.prove(opened, config)
    assert widths == [2, 1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert cuda.PROVED_TOKENS[-1] == 512


@pytest.mark.parametrize("failure", [RunFailed("no tactic for m = 24"), VerificationError("NaN logits")])
def test_where_the_fast_product_does_not_run_the_engine_does_without(failure: ForgeError, tmp_path: Path) -> None:
    lowered, _ = lower(prepared())
    config = configure(lowered)
    fast = {cuda.FAST_ENTRY: "1", cuda.FAST_ROWS_ENTRY: "1,2", cuda.FUSIONS_ENTRY: "MatMulNBitsFusion"}
    entries = {**config.session.entries, **fast}
    opened = []

    def open_session(chosen: RuntimeConfig) -> DeviceSession:
        opened.append(chosen)
        if cuda.FAST_ENTRY in chosen.session.entries:
            raise failure
        return session(lowered, chosen, "off")

    with_fast = replace(config, session=replace(config.session, entries=entries))
    found, notes = cuda.open_and_prove(tmp_path, with_fast, open_session)
    assert opened == [with_fast, config]
    assert found == config == RuntimeConfig.read(tmp_path / FILE)
    assert failure.message in notes[0]
    opened.clear()

    def never(_: RuntimeConfig) -> DeviceSession:
        raise failure

    with pytest.raises(type(failure)):  # which is not the fast product's doing
        cuda.open_and_prove(tmp_path, config, never)


def test_attention_that_fails_is_not_blamed_on_the_fast_product(tmp_path: Path) -> None:
    config = configure(lower(prepared())[0])
    entries = {**config.session.entries, cuda.FAST_ENTRY: "1"}
    with_fast, opened = replace(config, session=replace(config.session, entries=entries)), []

    def open_session(chosen: RuntimeConfig) -> DeviceSession:
        opened.append(chosen)
        raise RunFailed("Non-zero status code returned while running PagedAttention node. Name:'l0' no plan")

    with pytest.raises(RunFailed, match="PagedAttention"):
        cuda.open_and_prove(tmp_path, with_fast, open_session)
    assert opened == [with_fast]
