"""quantize-channels: int8 and fp8 weights with one scale an output feature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmforge import targets
from llmforge.base.errors import DataError, UnsupportedError
from llmforge.ir import graph
from llmforge.ir.operators.standard import MatMul
from llmforge.passes import LowerPrecision, PackGateUp, PackQkv, QuantizeChannels, QuantizeWeights
from llmforge.quantization import channels
from llmforge.quantization.smoothing import choose
from llmforge.quantization.statistics import InputRange, InputRangeDemand, Smoothing, Statistics
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.verification import probe
from llmforge.verification.verifier import Verifier

from ..models import graphs

LOOSE = Budget(kld_mean=1.0)
RTX_4090 = targets.load("rtx-4090")
RTX = Context(RTX_4090)
FP8 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
POINTS = {"int8": np.arange(-127, 128, dtype=np.float32), "fp8": np.unique(FP8[np.isfinite(FP8)])}


def quantize(**changes: Any) -> QuantizeChannels:
    return QuantizeChannels(**{"budget": LOOSE, "dtype": "int8", **changes})


# --- arithmetic ------------------------------------------------------------------------------------------------------


def dequantized(weight: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    kind = {"int8": channels.INT8, "fp8": channels.FP8}[dtype]
    codes: NDArray[Any] = channels.CODES[kind]([weight])
    return codes.astype(np.float32) * channels.SCALES[kind]([weight])


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@settings(max_examples=30, deadline=None)
@given(
    k=st.integers(1, 9),
    n=st.integers(1, 5),
    scale=st.sampled_from([1e-6, 0.02, 1.0, 1e5]),
    seed=st.integers(0, 1000),
    zero_column=st.booleans(),
)
def test_every_weight_becomes_the_nearest_point(
    dtype: str, k: int, n: int, scale: float, seed: int, zero_column: bool
) -> None:
    weight = (scale * np.random.default_rng(seed).standard_normal((k, n))).astype(np.float32)
    if zero_column:
        weight[:, 0] = 0
    made = dequantized(weight, dtype)
    for column, own in zip(weight.T, made.T, strict=True):
        step = np.float64(np.abs(column).max()) / POINTS[dtype].max()
        nearest = np.abs(column.astype(np.float64)[:, None] - POINTS[dtype] * step).min(1)
        assert (np.abs(own - column) <= nearest + 1e-5 * np.abs(column).max()).all()
        assert np.isfinite(own).all()


@pytest.mark.parametrize("dtype", [channels.INT8, channels.FP8])
def test_the_largest_magnitude_gets_the_largest_code(dtype: ir.DataType) -> None:
    weight = np.array([[0.5, -8.0], [-0.25, 4.0]], np.float32)
    codes: NDArray[Any] = channels.CODES[dtype]([weight])
    assert np.abs(codes.astype(np.float32)).max(0).tolist() == [channels.LARGEST[dtype]] * 2


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        channels.CODES[channels.INT8]([np.array([[np.nan]], np.float32)])


# --- graph -----------------------------------------------------------------------------------------------------------


def test_decoder_as_text() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    before = graphs.lines(model, ["MatMul"])
    assert quantize().run(model, RTX)
    after = graphs.lines(model, ["MatMul", "DequantizeLinear"])
    assert len(before) == 8  # q, k, v, o, gate, up, down, head
    assert len(after) == 16
    weights = graphs.find(model, "DequantizeLinear")
    assert [graph.dims(node.inputs[0]) for node in weights if node.inputs[0]] == [
        *((48, 64), (48, 32), (48, 32), (64, 48), (48, 56), (48, 56), (56, 48)),
        (48, 96),  # the tied head: codes of its own, [K, V]
    ]
    assert {node.attributes.get_int("axis") for node in weights} == {1}
    assert not graphs.find(model, "Transpose")
    names = graphs.find(model, "Gather")
    assert names[0].inputs[0] is not None
    assert names[0].inputs[0].name == "model.embed_tokens.weight"
    assert graph.sources(weights[0].inputs[0]) == ["model.layers.0.self_attn.q_proj.weight"]


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_the_verifier_measures_it(dtype: str, tmp_path: Path) -> None:
    model = graphs.llama()
    texts = [np.random.default_rng(0).integers(0, 96, 24)]
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=texts, threads=1)
    step = quantize(dtype=dtype)
    proof = verifier.check(step, model, step.run(model, RTX))
    assert proof.kld_mean is not None
    assert 0 < proof.kld_mean < (0.001 if dtype == "int8" else 0.02)


def test_what_exceeds_a_budget_is_measured(tmp_path: Path) -> None:
    model = graphs.llama()
    texts = [np.random.default_rng(0).integers(0, 96, 24)]
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=texts, threads=1)
    step = quantize(budget=Budget(kld_mean=1e-9))
    proof = verifier.check(step, model, step.run(model, RTX))
    assert proof.kld_mean is not None
    assert proof.kld_mean > 1e-9


def test_the_graph_computes_with_the_dequantized_weights() -> None:
    """Against the same decoder whose matrices were replaced by hand."""
    model, by_hand = graphs.llama(graphs.Llama(layers=1)), graphs.llama(graphs.Llama(layers=1))
    quantize(head=False).run(model, RTX)
    for name, value in by_hand.graph.initializers.items():
        if ".layers." in name and value.const_value is not None and len(value.const_value.shape) == 2:
            value.const_value = ir.Tensor(dequantized(value.const_value.numpy(), "int8"), name=name)
    [run, *_] = probe.random_runs(96)
    a, b = (
        [out.logits for out in probe.drive(probe.open_session(each, probe.InitializerArrays(), 1), run, caches=False)]
        for each in (model, by_hand)
    )
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_second_run_changes_nothing() -> None:
    model = graphs.llama()
    quantize().run(model, RTX)
    before = graph.fingerprint(model)
    assert not quantize().run(model, RTX)
    assert graph.fingerprint(model) == before


def test_what_stays_says_why() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    changes = quantize(head=False, exclude=("*.o_proj.weight",)).run(model, RTX)
    assert {each.node: each.reason for each in changes.skipped} == {
        "l0_o_node": "model.layers.0.self_attn.o_proj.weight is excluded by '*.o_proj.weight'",
        "logits_node": "output head, and `head` is false",
    }
    assert len(changes.rewritten) == 6


def test_packed_layers_are_one_matrix() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    PackQkv().run(model, RTX)
    quantize().run(model, RTX)
    first = graphs.find(model, "DequantizeLinear")[0].inputs[0]
    assert first is not None
    assert graph.dims(first) == (48, 128)
    assert len(graph.sources(first)) == 3


def test_other_quantized_layers_are_left_alone() -> None:
    model = graphs.llama()
    QuantizeWeights(budget=LOOSE, symmetric=True, method="rtn", embedding_bits=16).run(model, RTX)
    changes = quantize().run(model, RTX)
    assert [each.node for each in changes.rewritten] == ["logits_node"]


# --- what the layers read --------------------------------------------------------------------------------------------


def measured(model: ir.Model, text: NDArray[np.int64], wanted: Smoothing | None = None) -> dict[str, InputRange]:
    """Return what each linear of a layer reads on `text`, by parameter name."""
    linears: dict[str, str] = {}
    weights: dict[str, list[Any]] = {}  # by what they read
    for product in MatMul.all(model):
        if names := graph.sources(product.w):
            linears |= dict.fromkeys(names, str(product.x.name))
            weights.setdefault(str(product.x.name), []).append(graph.tensor(product.w).numpy().T)
    run = probe.schedule("text", [text], [(len(text),)])
    session = probe.open_session(model, probe.InitializerArrays(), 1, expose=list(linears.values()))
    read = probe.observe(session, run, 0, sorted(set(linears.values())))
    ranges = {}
    for x, own in weights.items():
        tokens = read[x].reshape(-1, read[x].shape[-1])
        peaks = np.abs(tokens).max(0)
        ranges[x] = InputRange(peaks, None if wanted is None else choose(tokens, peaks, own, wanted))
    return {parameter: ranges[x] for parameter, x in linears.items()}


def with_ranges(inputs: dict[str, InputRange]) -> Context:
    return Context(RTX_4090, Statistics(samples=1, tokens=1, linears={}, kv={}, inputs=inputs))


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_inputs_are_rounded_once_for_all_their_readers(dtype: str, tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    text = np.random.default_rng(0).integers(0, 96, 24)
    peaks = measured(model, text)
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[text], threads=1)
    step = quantize(dtype=dtype, activations="static")
    changes = step.run(model, with_ranges(peaks))
    proof = verifier.check(step, model, changes)
    assert proof.kld_mean is not None
    assert 0 < proof.kld_mean < 0.02
    # read by: q, k and v; o; gate and up; down. The head reads what it read.
    assert len(graphs.find(model, "QuantizeLinear")) == 4
    scales = {node.inputs[1].const_value.numpy().item() for node in graphs.find(model, "QuantizeLinear")}  # type: ignore[union-attr]
    largest = 127 if dtype == "int8" else 448
    assert scales == {np.float32(float(each.peaks.max()) / largest).item() for each in peaks.values()}
    said = {change.node: change.what for change in changes.rewritten}
    assert said["l0_q_node"].endswith(", inputs static")
    assert not said["logits_node"].endswith(", inputs static")


def test_half_precision_leaves_no_cast_between_codes_and_product() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    quantize(activations="static").run(model, with_ranges(measured(model, np.arange(24))))
    LowerPrecision(budget=LOOSE, dtype="fp16").run(model, RTX)
    for product in graphs.find(model, "MatMul")[:-1]:
        makers = [value.producer() for value in product.inputs if value is not None]
        assert [maker.op_type for maker in makers if maker] == ["DequantizeLinear"] * 2
    assert {node.inputs[1].dtype for node in graphs.find(model, "QuantizeLinear") if node.inputs[1]} == {
        ir.DataType.FLOAT16
    }


def test_inputs_that_are_always_0_have_no_scale() -> None:
    context = with_ranges({"model.layers.0.self_attn.q_proj.weight": InputRange(np.zeros(48, np.float32))})
    with pytest.raises(DataError, match="ranges to 0 on the calibration text"):
        quantize(activations="static").run(graphs.llama(), context)


def test_calibration_is_asked_for_ranges_only_where_they_are_used() -> None:
    assert quantize().demands() == ()
    assert quantize(activations="static", smooth=False).demands() == (InputRangeDemand(),)
    assert quantize(activations="per_token", smooth=False).demands() == ()
    wanted = Smoothing("fp8", per_token=True, alpha=0.5)
    assert quantize(dtype="fp8", activations="per_token", alpha=0.5).demands() == (InputRangeDemand(wanted),)
    with pytest.raises(ValueError, match="alpha goes with smooth: true"):
        quantize(alpha=0.5)


def rounded(x: NDArray[np.float64], largest: int, axis: int) -> NDArray[np.float64]:
    """Round to multiples of the largest magnitude along an axis, over 127."""
    steps = np.abs(x).max(axis, keepdims=True) / largest
    return np.rint(x / steps) * steps


def test_each_token_is_rounded_by_its_own_range(tmp_path: Path) -> None:
    """One layer alone, against numpy in fp64: tokens of all sizes, and one of zeros."""
    x, w = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["b", "s", 48])), None
    random = np.random.default_rng(0)
    weight = random.standard_normal((48, 20)).astype(np.float32)
    model = ir.Model(ir.Graph([x], [], nodes=[], opset_imports={"": 24}), ir_version=11)
    w = graph.initializer(model, "layers.0.weight", weight, ["layers.0.weight"])
    product = ir.node("MatMul", [x, w], name="product")
    model.graph.append(product)
    model.graph.outputs.append(product.outputs[0])
    product.outputs[0].name, product.outputs[0].type = "y", x.type
    tokens = (random.standard_normal((2, 99, 48)) * 10.0 ** random.integers(-3, 4, (2, 99, 1))).astype(np.float32)
    tokens[1, 2] = 0
    changes = quantize(activations="per_token", smooth=False).run(model, RTX)
    assert [change.what for change in changes.rewritten] == ["int8, one scale per output feature, inputs per_token"]
    model.graph.sort()
    [scale] = [value for node in model.graph for value in node.outputs if value.name == "x.int8.scale"]
    model.graph.outputs.append(scale)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")  # else products saturate without VNNI
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    made, scales = session.run(None, {"x": tokens})
    assert (scales == np.maximum(np.abs(tokens).max(-1, keepdims=True) / np.float32(127), 2.0**-24)).all()  # every bit
    with np.errstate(invalid="ignore"):
        read = np.nan_to_num(rounded(tokens.astype(np.float64), 127, -1))
    expected = read @ rounded(weight.astype(np.float64), 127, 0)
    size = np.abs(expected).max(-1, keepdims=True) + 1e-30
    assert np.abs((made - expected) / size).max() < 1e-5
    assert not made[1, 2].any()


def alone(weight: NDArray[np.float32]) -> ir.Model:
    """One linear layer [K, N] of tokens ["b", "s", K]."""
    k = len(weight)
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["b", "s", k]))
    model = ir.Model(ir.Graph([x], [], nodes=[], opset_imports={"": 24}), ir_version=11)
    product = ir.node("MatMul", [x, graph.initializer(model, "w", weight, ["layers.0.weight"])], name="product")
    model.graph.append(product)
    model.graph.outputs.append(product.outputs[0])
    product.outputs[0].name, product.outputs[0].type = "y", x.type
    return model


def nearest_fp8(numbers: NDArray[np.float64], scales: NDArray[np.float64]) -> NDArray[np.float64]:
    rounded: NDArray[np.float64] = (numbers / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales
    return rounded


@pytest.mark.parametrize("n", [128, 200])
def test_squares_of_weights_and_groups_of_a_token_have_scales_of_their_own(n: int) -> None:
    """One layer alone, against a loop in fp64: squares and groups of all sizes, a square and a token of zeros."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((256, n)).astype(np.float32)
    weight[:128] *= 100
    weight[128:, :128] = 0
    tokens = (random.standard_normal((2, 5, 256)) * 10.0 ** random.integers(-3, 4, (2, 5, 1))).astype(np.float32)
    tokens[..., 128:] *= 50
    tokens[1, 2] = 0
    model = alone(weight)
    step = quantize(dtype="fp8", activations="per_token", granularity="block", head=False)
    [change] = step.run(model, RTX).rewritten
    assert change.what == "fp8, one scale per 128 × 128 weights, inputs per_token, in groups of 128"
    [made] = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, {"x": tokens})

    expected = np.zeros((2, 5, n))
    for i in range(0, 256, 128):
        part = tokens[..., i : i + 128].astype(np.float64)
        read = nearest_fp8(part, np.maximum(np.abs(part).max(-1, keepdims=True) / 448, 2.0**-24))
        for j in range(0, n, 128):
            square = weight[i : i + 128, j : j + 128].astype(np.float64)
            expected[..., j : j + 128] += read @ nearest_fp8(square, np.asarray(np.abs(square).max() / 448 or 1.0))
    size = np.abs(expected).max(-1, keepdims=True) + 1e-30
    assert np.abs((made - expected) / size).max() < 2e-3  # of quotients in fp32, a few fall to the neighbour of a tie
    assert not made[1, 2].any()


def test_squares_need_whole_blocks_of_inputs() -> None:
    step = quantize(dtype="fp8", activations="per_token", granularity="block", head=False)
    model = graphs.llama(graphs.Llama(layers=1, hidden=128, head_dim=32, mlp=56))
    changes = step.run(model, RTX)
    assert {each.node: each.reason for each in changes.skipped} == {
        "l0_down_node": "its 56 input features are not a multiple of 128",
        "logits_node": "output head, and `head` is false",
    }
    assert len(changes.rewritten) == 6
    assert not step.run(model, RTX)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "int8", "activations": "per_token", "head": False},
            "goes with dtype: fp8 and activations: per_token",
        ),
        ({"dtype": "fp8", "head": False}, "goes with dtype: fp8 and activations: per_token"),
        ({"dtype": "fp8", "activations": "per_token"}, "goes with method: rtn and head: false"),
        ({"dtype": "fp8", "activations": "per_token", "head": False, "alpha": 0.5}, "without alpha"),
    ],
)
def test_squares_go_with_what_servers_read(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(granularity="block", **options)
    assert quantize(dtype="fp8", activations="per_token", granularity="block", head=False).demands() == ()


OUTLIERS = graphs.Llama(layers=1)


def with_outliers() -> ir.Model:
    """A decoder whose norms make features 64 times as large as others, and its inner features, too."""
    model = graphs.llama(OUTLIERS)
    for name, value in model.graph.initializers.items():
        if "layernorm" in name or name.endswith("up_proj.weight"):
            numbers = graph.tensor(value).numpy().copy()
            numbers[..., 3] *= 64
            value.const_value = ir.Tensor(numbers, name=name)
    return model


@pytest.mark.parametrize("activations", ["static", "per_token"])
@pytest.mark.parametrize("packed", [False, True])
def test_smoothed_inputs_lose_less(activations: str, packed: bool, tmp_path: Path) -> None:
    text = np.random.default_rng(0).integers(0, 96, 24)
    lost = {}
    for smooth in (False, True):
        model = with_outliers()
        if packed:
            PackQkv().run(model, RTX)
            PackGateUp().run(model, RTX)
        ranges = measured(model, text, Smoothing("int8", activations == "per_token"))
        verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[text], threads=1)
        step = quantize(activations=activations, smooth=smooth)
        changes = step.run(model, with_ranges(ranges))
        lost[smooth] = verifier.check(step, model, changes).kld_mean
        said = [change.what for change in changes.rewritten]
        assert sum("smoothed by alpha" in what for what in said) == (0 if not smooth else 3 if packed else 6)
    assert lost[False] is not None
    assert lost[True] is not None
    assert lost[True] < lost[False] / 4


def test_a_device_that_gains_nothing_is_refused_with_the_figures() -> None:
    slow = RTX_4090.model_copy(update={"rates": {**RTX_4090.rates, "int8": RTX_4090.rates["fp16"]}})
    with pytest.raises(
        UnsupportedError, match=r"does not pay on target rtx-4090 .*int8 take 1\.25 of the time of fp16"
    ) as caught:
        quantize(activations="per_token", smooth=False).run(graphs.llama(), Context(slow))
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("set `activations: none`")
    assert quantize().run(graphs.llama(), Context(slow))
    assert quantize(activations="per_token", smooth=False).run(graphs.llama(), graphs.CPU)  # has no figures


def test_a_device_without_the_dtype_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="does not compute in fp8; supported"):
        quantize(dtype="fp8").run(graphs.llama(), Context(targets.load("a10g")))
