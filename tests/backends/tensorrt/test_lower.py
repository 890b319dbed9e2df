"""The lowering for TensorRT: equal to the canonical graph on the CPU, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.backends.onnxruntime.session import Session
from llmforge.backends.tensorrt import lower, refusals
from llmforge.backends.tensorrt.refusals import Feature
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph, interface
from llmforge.ir.operators import canonical
from llmforge.passes import (
    AcceptEmbeddings,
    FlashAttention,
    FuseNorms,
    LowerPrecision,
    PackGateUp,
    PackQkv,
    QuantizeChannels,
    QuantizeWeights,
)
from llmforge.recipe import EngineSpec
from llmforge.rewrite import emulation, pass_base
from llmforge.rewrite.pass_base import Budget, Context, Pass
from llmforge.runtime.config import SessionConfig
from llmforge.runtime.interface import StepInputs
from llmforge.trace import trace
from llmforge.verification import probe

from ...models import graphs, zoo, zoo_classic

CAPACITY = 40  # of the lowered graphs: more than a run fills, so that slots stay empty
LOOSE = Budget(kld_mean=5.0)
TARGET = targets.load("rtx-4090")
RTX = Context(TARGET)
SPEC = EngineSpec(backend="tensorrt-rtx", max_context=CAPACITY, max_batch=4)
HALF = LowerPrecision(budget=LOOSE, dtype="fp16")


def int4(**changes: Any) -> QuantizeWeights:
    known: dict[str, Any] = {"block_size": 32, "symmetric": True, "method": "rtn", "embedding_bits": 4}
    return QuantizeWeights(budget=LOOSE, accuracy_level=0, **{**known, **changes})


def after(model: ir.Model, *steps: Pass) -> ir.Model:
    model = model.clone()
    for step in steps:
        pass_base.run(step, model, RTX)
    return model


def standard(model: ir.Model) -> Session:
    """Load a lowered graph as it is written, its weights inside."""
    loaded = emulation.emulate(model).clone()
    for name, value in loaded.graph.initializers.items():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = ir.Tensor(value.const_value.numpy().copy(), name=name)
    return Session(ir.to_proto(loaded).SerializeToString(), SessionConfig(threads=1, optimize=False))


def outcomes(session: Session, run: probe.Run, capacity: int) -> Iterator[probe.StepOutcome]:
    """Run the steps of `run`, all rows getting logits; slots that no token was written to hold garbage."""
    cache = session.allocate(run.batch, capacity)
    for buffer in cache.buffers.values():
        buffer.fill(7)
    for step in run.steps:
        rows = np.arange(step.ids.shape[1])
        logits = session.step(
            StepInputs(step.ids, step.past, rows, lengths=step.lengths, text_lengths=step.text_lengths), cache
        )
        filled = step.past + step.lengths
        caches = {name: tuple(probe.real(name, buffer, filled)) for name, buffer in cache.buffers.items()}
        yield probe.StepOutcome(logits[step.valid], caches)


def largest_difference(model: ir.Model, lowered: ir.Model) -> float:
    """Compare logits and caches over prefill, decode, continuation and a ragged batch, in deviations of the logits."""
    vocabulary = next(graph.dims(value) for value in model.graph.outputs if value.name == interface.LOGITS)[-1]
    before, made = probe.open_session(model, probe.InitializerArrays(), 1), standard(lowered)
    worst, deviation = 0.0, 0.0
    for run in probe.random_runs(int(str(vocabulary))):
        for a, b in zip(outcomes(before, run, run.capacity), outcomes(made, run, CAPACITY), strict=True):
            deviation = max(deviation, float(a.logits.std()))
            worst = max(worst, float(np.abs(a.logits - b.logits).max()))
            for name, rows in a.caches.items():
                worst = max(worst, *(float(np.abs(x - y).max()) for x, y in zip(rows, b.caches[name], strict=True)))
    return worst / deviation


def kinds(model: ir.Model) -> dict[str, int]:
    counted: dict[str, int] = {}
    for node in model.graph.all_nodes():
        counted[node.op_type] = counted.get(node.op_type, 0) + 1
    return counted


# --- equal -----------------------------------------------------------------------------------------------------------

DECODERS = {
    "grouped queries": graphs.Llama(),
    "window": graphs.Llama(window=7),
    "chunks": graphs.Llama(chunk=5),
    "query norm, biases": graphs.Llama(query_norm=True, bias=True),
    "partial rotary": graphs.Llama(rotary_dim=8),
    "interleaved rotary": graphs.Llama(interleaved=1),
    "no positions": graphs.Llama(rotary_dim=0),
    "soft cap": graphs.Llama(softcap=2.0, window=7),
    "sinks": graphs.Llama(sinks=True, window=7),
    "soft cap and sinks": graphs.Llama(sinks=True, softcap=2.0),
    "values of another width": graphs.Llama(value_dim=12),
    "wide heads": graphs.Llama(head_dim=264),
}


@pytest.mark.parametrize("name", DECODERS)
def test_the_lowered_graph_computes_the_same(name: str) -> None:
    model = graphs.llama(DECODERS[name])
    lowered, _ = lower.rewrite(model, CAPACITY)
    assert largest_difference(model, lowered) < 1e-5
    assert {node.domain for node in lowered.graph.all_nodes()} == {""}


def test_passes_before_it_are_lowered_too() -> None:
    model = after(graphs.llama(), PackQkv(), PackGateUp(), FuseNorms())
    assert kinds(model)["SkipSimplifiedLayerNormalization"] == 4
    lowered, changes = lower.rewrite(model, CAPACITY)
    assert largest_difference(model, lowered) < 1e-5
    assert "SkipSimplifiedLayerNormalization to Add and RMSNormalization" in {
        change.what for change in changes.rewritten
    }


@pytest.mark.parametrize("block_size", [32, 64])
def test_int4_weights_are_those_of_the_quantized_graph(block_size: int) -> None:
    model = after(graphs.llama(graphs.Llama(hidden=64, mlp=128)), int4(block_size=block_size))
    lowered, _ = lower.rewrite(model, CAPACITY)
    assert largest_difference(model, lowered) < 1e-4  # sums in another order
    weights = [node for node in lowered.graph if node.op_type == "DequantizeLinear"]
    assert {node.inputs[0].dtype for node in weights if node.inputs[0] is not None} == {ir.DataType.INT4}
    # 7 matrices a layer, the embedding, and the head, which dequantizes the embedding's codes for itself
    assert len(weights) == 16
    assert len({node.inputs[0] for node in weights}) == 15


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_eight_bit_weights_are_those_of_the_quantized_graph(dtype: Any) -> None:
    model = after(graphs.llama(), QuantizeChannels(budget=LOOSE, dtype=dtype))
    lowered, _ = lower.rewrite(model, CAPACITY)
    assert largest_difference(model, lowered) < 1e-5


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_activations_by_token_are_those_of_the_quantized_graph(dtype: Any) -> None:
    """Attention sums in another order, so that a number beside a border may take the other code: a step, of few."""
    step = QuantizeChannels(budget=LOOSE, dtype=dtype, activations="per_token", smooth=False)
    model = after(graphs.llama(), step)
    lowered, _ = lower.rewrite(model, CAPACITY)
    assert largest_difference(model, lowered) < (2**-6 if dtype == "int8" else 2**-3)


@pytest.mark.parametrize("name", ["grouped queries", "sinks", "soft cap"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_rounds_as_the_graph_before_it(name: str, dtype: Any) -> None:
    """Both in fp32 that rounds as the graph does; the order of sums, and so single roundings, differ."""
    model = after(graphs.llama(DECODERS[name]), LowerPrecision(budget=LOOSE, dtype=dtype))
    lowered, _ = lower.rewrite(model, CAPACITY)
    epsilon = 2.0**-10 if dtype == "fp16" else 2.0**-7
    assert largest_difference(model, lowered) < 8 * epsilon


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3", pytest.param("bloom", marks=[pytest.mark.slow])])
def test_traced_architectures_compute_the_same(name: str, tmp_path: Path) -> None:
    _holds(name, tmp_path)


RECURRENT = {"qwen3-5", "lfm2", "olmo-hybrid", "qwen3-next"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted((zoo.ZOO.keys() | zoo_classic.ZOO.keys()) - RECURRENT))
def test_every_architecture_computes_the_same(name: str, tmp_path: Path) -> None:
    _holds(name, tmp_path)


def _holds(name: str, folder: Path) -> None:
    (zoo if name in zoo.ZOO else zoo_classic).write(name, folder)
    model = trace(Checkpoint.open(folder))
    lowered, _ = lower.rewrite(model, CAPACITY)
    assert largest_difference(model, lowered) < 1e-5
    lower.check_operators(lower.rewrite(after(model, HALF), CAPACITY)[0])


def test_truths_are_reduced_as_numbers() -> None:
    """As routers of groups of experts do; the parser's ReduceMax takes no bool."""
    model = graphs.llama(graphs.Llama(layers=1))
    normed = next(node.outputs[0] for node in graphs.find(model, "RMSNormalization"))
    after_it = normed.consumers()[0]

    def add(operator: str, inputs: list[ir.Value], dtype: ir.DataType, **attributes: Any) -> ir.Value:
        [made] = graph.insert(after_it, operator, inputs, attributes, name=f"{operator}_of_truths")
        made.name, made.type = f"{operator}_of_truths", ir.TensorType(dtype)
        return made

    zero, axis = graph.initializer(model, "zero", np.float32([1])), graph.initializer(model, "last", np.array([-1]))
    above = add("Greater", [normed, zero], ir.DataType.BOOL)
    some = add("ReduceMax", [above, axis], ir.DataType.BOOL, keepdims=1)
    chosen = add("Where", [some, normed, zero], ir.DataType.FLOAT)
    chosen.shape = normed.shape
    for node, index in list(normed.uses()):
        if node.op_type == "MatMul":
            node.replace_input_with(index, chosen)
    lowered, changes = lower.rewrite(model, CAPACITY)
    assert "ReduceMax of bool to one of numbers" in {change.what for change in changes.rewritten}
    assert largest_difference(model, lowered) < 1e-5
    lower.check_operators(lower.rewrite(after(model, HALF), CAPACITY)[0])


# --- form ------------------------------------------------------------------------------------------------------------


def test_inputs_are_what_an_engine_takes() -> None:
    lowered, _ = lower.rewrite(graphs.llama(graphs.Llama(rotary_dim=0)), CAPACITY)
    shapes = {value.name: graph.dims(value) for value in lowered.graph.inputs}
    assert shapes["position_ids"] == ("batch", "sequence")  # of the mask: this model reads none
    assert shapes["past_key_values.0.key"] == ("batch", 2, CAPACITY, 16)
    assert interface.LOGITS_ROWS in shapes
    assert interface.LOGITS_ROWS not in lowered.graph.initializers  # an engine's inputs have no defaults
    assert graph.dims(next(v for v in lowered.graph.outputs if v.name == "present.1.value")) == (
        "batch",
        2,
        CAPACITY,
        16,
    )


def test_rows_below_0_count_from_the_end() -> None:
    session = standard(lower.rewrite(graphs.llama(), CAPACITY)[0])
    ids, past = np.array([[5, 9, 31, 7]]), np.zeros(1, np.int32)
    every = session.step(StepInputs(ids, past, np.arange(4)), session.allocate(1, CAPACITY))
    chosen = session.step(StepInputs(ids, past, np.array([-1, 0, -3])), session.allocate(1, CAPACITY))
    np.testing.assert_array_equal(chosen, every[:, [3, 0, 1]])


def test_one_mask_serves_all_layers_of_a_window() -> None:
    lowered, _ = lower.rewrite(graphs.llama(graphs.Llama(layers=3, window=7)), CAPACITY)
    counted = kinds(lowered)
    assert (counted["Attention"], counted["LessOrEqual"], counted["And"]) == (3, 1, 1)
    assert counted["TensorScatter"] == 6
    assert "Range" not in counted


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (graphs.Llama(softcap=2.0), "its scores are capped"),
        (graphs.Llama(sinks=True), "it has sinks"),
        (graphs.Llama(value_dim=12), "its keys are 16 wide and its values 12"),
        (graphs.Llama(head_dim=264), "its heads are 264 wide"),
        (graphs.Llama(head_dim=8), "its heads are 8 wide"),
    ],
)
def test_attention_that_no_kernel_computes_is_written_out_and_said_so(spec: graphs.Llama, reason: str) -> None:
    lowered, changes = lower.lower(after(graphs.llama(spec), HALF), TARGET, SPEC)
    assert "Attention" not in kinds(lowered)
    assert [change.what for change in changes.rewritten if reason in change.what and "written out" in change.what]


def test_the_model_is_left_alone() -> None:
    model = after(graphs.llama(), HALF)
    before = graph.fingerprint(model)
    lower.lower(model, TARGET, SPEC)
    assert graph.fingerprint(model) == before


# --- refused ---------------------------------------------------------------------------------------------------------


def _fallback() -> ir.Model:
    model = after(graphs.llama(), HALF)
    model.metadata_props[interface.FALLBACK] = "its masks cannot be hooked"
    return model


REFUSED: dict[str, tuple[Callable[[], ir.Model], str]] = {
    "fp32": (graphs.llama, "IAttention has kernels for fp16 and bf16 only, not fp32"),
    "fallback": (_fallback, "its attention was traced from the model's own code: its masks cannot be hooked"),
    "embeddings": (lambda: after(graphs.llama(), AcceptEmbeddings(), HALF), "TensorRT has no inputs that may be left"),
    "GroupQueryAttention": (lambda: after(graphs.llama(), FlashAttention(), HALF), "GroupQueryAttention"),
    "zero points": (lambda: after(graphs.llama(), int4(symmetric=False), HALF), "its weights have zero points"),
    "blocks of 8 bits": (
        lambda: after(graphs.llama(), QuantizeWeights(budget=LOOSE, bits=8, symmetric=True, method="rtn"), HALF),
        "blocks of 8 bits are dequantized into memory in every step",
    ),
    "odd blocks": (
        lambda: after(graphs.llama(), int4(embedding_bits=16), HALF),
        "its 48 input features are not a multiple of block_size, 32",
    ),
    "small blocks": (lambda: after(graphs.llama(), int4(), HALF), "its blocks are 16 wide; 32, 64, 128 are supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_way_through_is_refused_by_name(name: str) -> None:
    make, reason = REFUSED[name]
    model = make()
    assert any(reason in each.reason for each in lower.unsupported(model))
    with pytest.raises(UnsupportedError, match="TensorRT for target rtx-4090 does not support") as caught:
        lower.lower(model, TARGET, SPEC)
    assert caught.value.hint
    more = len(lower.unsupported(model)) - 3
    assert caught.value.message.endswith(f"; and {more} more") if more > 0 else " more" not in caught.value.message


def _experts(count: int, top_k: int) -> canonical.MoE:
    def value(name: str, *shape: int) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT16), shape=ir.Shape(shape))

    inputs = [value("x", 1, 2, 8), value("ids", 1, 2, top_k), value("weights", 1, 2, top_k)]
    inputs += [value("up", count, 8, 8), value("down", count, 4, 8)]
    return canonical.MoE(ir.node("MoE", inputs, domain="llmforge"))


def test_experts_are_all_computed_up_to_a_measure() -> None:
    assert lower.experts_reason(_experts(8, 2)) is None
    assert "2 of 16 experts; the lowering computes all of them, and reads 8 times" in str(
        lower.experts_reason(_experts(16, 2))
    )


@pytest.mark.parametrize(
    ("target", "steps", "feature"),
    [
        ("t4", (LowerPrecision(budget=LOOSE, dtype="fp16"),), None),
        ("t4", (int4(embedding_bits=16), HALF), Feature.INT4),
        ("a10g", (int4(embedding_bits=16), HALF), None),
        ("rtx-4090", (QuantizeChannels(budget=LOOSE, dtype="fp8"), HALF), None),
        ("a10g", (QuantizeChannels(budget=LOOSE, dtype="fp8"), HALF), Feature.FP8),
        ("t4", (QuantizeChannels(budget=LOOSE, dtype="int8"), HALF), None),
    ],
)
def test_refusals_of_a_compute_capability(target: str, steps: tuple[Pass, ...], feature: Feature | None) -> None:
    lowered, _ = lower.rewrite(after(graphs.llama(graphs.Llama(hidden=64, mlp=64)), *steps), CAPACITY)
    sm = targets.load(target).require_gpu().sm
    found = {each for each, _ in refusals.features(lowered) if each.value.refuses(sm)}
    assert found == ({feature} if feature else set())


def test_an_operator_that_was_never_seen_is_refused() -> None:
    model = after(graphs.llama(), HALF)
    lowered, _ = lower.rewrite(model, CAPACITY)
    last = lowered.graph[-1]
    rows = ir.node("CumSum", [last.inputs[0], graph.initializer(lowered, "axis", np.array(1))], name="running_sum")
    lowered.graph.insert_before(last, rows)
    with pytest.raises(UnsupportedError, match="is not known to build CumSum, node running_sum"):
        lower.check_operators(lowered)
    rows.op_type = "And"
    with pytest.raises(UnsupportedError, match="is not known to build And of FLOAT16, INT64, node running_sum"):
        lower.check_operators(lowered)
