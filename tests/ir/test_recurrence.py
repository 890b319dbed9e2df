"""Operators that keep a state: their expansion against a naive loop, and what the verifier says about wrong ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from llmforge.base.errors import VerificationError
from llmforge.ir import dialect, graph
from llmforge.ir.operators.canonical import LinearAttention
from llmforge.ir.recurrence import Recurrence

from ..samples import references

BATCH, CHANNELS, TAPS = 4, 6, 4
NUM_HEADS, HEADS, WIDTH, VALUE_WIDTH = 2, 4, 3, 5
DTYPES = {"past_lengths": ir.DataType.INT32, "lengths": ir.DataType.INT32, "input_ids": ir.DataType.INT64}
CONV = {
    "x": ["batch", "sequence", CHANNELS],
    "weight": [CHANNELS, 1, TAPS],
    "past_key_values.0.conv": ["batch", TAPS - 1, CHANNELS],
    "past_lengths": ["batch"],
    "lengths": ["batch"],
    "bias": [CHANNELS],
}
LINEAR = {
    "q": ["batch", "sequence", NUM_HEADS * WIDTH],
    "k": ["batch", "sequence", NUM_HEADS * WIDTH],
    "v": ["batch", "sequence", HEADS * VALUE_WIDTH],
    "decay": ["batch", "sequence", HEADS],
    "past_key_values.0.recurrent": ["batch", HEADS, WIDTH, VALUE_WIDTH],
    "past_lengths": ["batch"],
    "lengths": ["batch"],
    "beta": ["batch", "sequence", HEADS],
}
# Rows: a fresh one, one with a past, a padded one with a past, and one that gets no token in this step.
PAST = np.array([0, 9, 9, 9], np.int32)


def value(name: str, dims: Sequence[int | str]) -> ir.Value:
    dtype = DTYPES.get(name, ir.DataType.FLOAT)
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(dims)))


def single(op_type: str, shapes: Mapping[str, list[Any]], state: str, **attributes: Any) -> ir.Model:
    """Only one node, with every tensor an input."""
    ids = value("input_ids", ["batch", "sequence"])
    values = {name: value(name, dims) for name, dims in shapes.items()}
    node = ir.node(
        op_type, list(values.values()), {**attributes, "layer": 0}, domain="llmforge", num_outputs=2, name="one"
    )
    for made, name in zip(node.outputs, ("y", f"present.0.{state}"), strict=True):
        made.name, made.dtype = name, ir.DataType.FLOAT
    node.outputs[1].shape = values[f"past_key_values.0.{state}"].shape
    opsets = {"": 24, "llmforge": 1}
    return ir.Model(
        ir.Graph([ids, *values.values()], list(node.outputs), nodes=[node], opset_imports=opsets, name="g"),
        ir_version=10,
    )


def conv(activation: str = "silu", *, bias: bool = True) -> ir.Model:
    shapes = CONV if bias else {name: dims for name, dims in CONV.items() if name != "bias"}
    return single("CausalConv", shapes, "conv", activation=activation)


def linear(num_heads: int = NUM_HEADS, rule: str = "gated_delta", *, by_channel: bool = False) -> ir.Model:
    shapes = {**LINEAR, "q": ["batch", "sequence", num_heads * WIDTH], "k": ["batch", "sequence", num_heads * WIDTH]}
    if by_channel:
        shapes["decay"] = ["batch", "sequence", HEADS * WIDTH]
    if rule == "gated":
        del shapes["beta"]
    return single("LinearAttention", shapes, "recurrent", num_heads=num_heads, update_rule=rule, scale=0.4)


def without_rate() -> ir.Model:
    model = linear(rule="gated")
    model.graph[0].attributes["update_rule"] = ir.AttrString("update_rule", "gated_delta")
    return model


def narrow() -> ir.Model:
    model = linear()
    next(given for given in model.graph.inputs if given.name == "decay").shape = ir.Shape(["batch", "sequence", 5])
    return model


def run(model: ir.Model, feeds: Mapping[str, NDArray[Any]], *, kernel: bool = False) -> list[NDArray[Any]]:
    expanded = model.clone()
    if kernel:
        [layer] = LinearAttention.all(expanded)
        Recurrence(expanded).call_kernel(layer)
    expanded = dialect.expand(expanded)
    assert {node.domain for node in expanded.graph} == ({"", "com.microsoft"} if kernel else {""})
    session = ort.InferenceSession(ir.to_proto(expanded).SerializeToString(), providers=["CPUExecutionProvider"])
    names = {given.name for given in session.get_inputs()}
    outputs: list[NDArray[Any]] = session.run(None, {name: array for name, array in feeds.items() if name in names})
    return outputs


def draw(model: ir.Model, sequence: int, lengths: Sequence[int]) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(sequence)
    feeds: dict[str, NDArray[Any]] = {}
    for given in model.graph.inputs:
        known = {"batch": BATCH, "sequence": sequence}
        shape = [known[dim] if isinstance(dim, str) else dim for dim in graph.dims(given) or ()]
        feeds[str(given.name)] = rng.standard_normal(shape).astype(np.float32)
    feeds["input_ids"] = np.zeros((BATCH, sequence), np.int64)
    feeds |= {"past_lengths": PAST, "lengths": np.array(lengths, np.int32)}
    if "decay" in feeds:
        feeds["decay"] = -np.abs(feeds["decay"])
    if "beta" in feeds:
        feeds["beta"] = 1 / (1 + np.exp(-feeds["beta"]))
    return feeds


def operands(model: ir.Model, feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    return [feeds[str(given.name)] for given in model.graph.inputs if given.name != "input_ids"]


STEPS = [(1, (1, 1, 1, 0)), (2, (2, 2, 1, 0)), (7, (7, 7, 2, 0))]  # sequence, real tokens of each row


@pytest.mark.parametrize(("sequence", "lengths"), STEPS)
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("bias", [False, True])
def test_an_expanded_convolution_computes_what_the_reference_does(
    sequence: int, lengths: tuple[int, ...], activation: str, bias: bool
) -> None:
    model = conv(activation, bias=bias)
    feeds = draw(model, sequence, lengths)
    feeds["past_key_values.0.conv"][0] = np.nan  # a fresh row must not read its state
    y, present = run(model, feeds)
    expected_y, expected = references.causal_conv(*operands(model, feeds), activation=activation)
    for row, count in enumerate(lengths):
        np.testing.assert_allclose(y[row, :count], expected_y[row, :count], atol=1e-6)
    np.testing.assert_allclose(present, expected, atol=1e-6)
    np.testing.assert_array_equal(present[3], feeds["past_key_values.0.conv"][3])


@pytest.mark.parametrize(("sequence", "lengths"), STEPS)
@pytest.mark.parametrize("num_heads", [1, 2, 4])
@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("kernel", [False, True])
def test_a_linear_attention_that_is_lowered_computes_what_the_reference_does(
    sequence: int, lengths: tuple[int, ...], num_heads: int, rule: str, by_channel: bool, kernel: bool
) -> None:
    model = linear(num_heads, rule, by_channel=by_channel)
    feeds = draw(model, sequence, lengths)
    feeds["past_key_values.0.recurrent"][0] = np.nan
    for name in feeds.keys() & {"q", "k", "v", "decay", "beta"}:  # what stands in padded places is not read
        for row, count in enumerate(lengths):
            feeds[name][row, count:] = np.where(name == "decay", 1e4, 1.0)
    y, present = run(model, feeds, kernel=kernel)
    expected_y, expected = references.linear_attention(*operands(model, feeds), num_heads=num_heads, scale=0.4)
    for row, count in enumerate(lengths):
        np.testing.assert_allclose(y[row, :count], expected_y[row, :count], atol=1e-5)
    np.testing.assert_allclose(present, expected, atol=1e-5)
    np.testing.assert_array_equal(present[3], feeds["past_key_values.0.recurrent"][3])


def test_a_prompt_in_two_steps_leaves_the_state_of_one() -> None:
    model = linear()
    whole = draw(model, 7, (7, 7, 7, 7))
    _, wanted = run(model, whole)
    first, second = dict(whole), dict(whole)
    for name in ("q", "k", "v", "decay", "beta", "input_ids"):
        first[name], second[name] = whole[name][:, :4], whole[name][:, 4:]
    counts = [np.full(BATCH, count, np.int32) for count in (4, 3)]
    _, between = run(model, {**first, "lengths": counts[0]})
    _, after = run(
        model,
        {**second, "lengths": counts[1], "past_lengths": PAST + 4, "past_key_values.0.recurrent": between},
    )
    np.testing.assert_allclose(after, wanted, atol=1e-6)


def complete(model: ir.Model, width: int) -> ir.Model:
    """Make a decoder of `model`, whose y becomes the logits, so that the verifier takes it."""
    node = model.graph[0]
    rows = value("logits_rows", ["rows"])
    rows.dtype = ir.DataType.INT64
    rows.const_value = ir.tensor(np.array([-1]), name="logits_rows")
    model.graph.inputs.append(rows)
    model.graph.register_initializer(rows)
    chosen = ir.node("Gather", [node.outputs[0], rows], {"axis": 1}, name="rows")
    chosen.outputs[0].name, chosen.outputs[0].dtype = "logits", ir.DataType.FLOAT
    chosen.outputs[0].shape = ir.Shape(["batch", "rows", width])
    model.graph.append(chosen)
    model.graph.outputs[0] = chosen.outputs[0]
    for name in ("x", "weight", "bias", "q", "k", "v", "decay", "beta"):
        for given in [given for given in model.graph.inputs if given.name == name]:
            dims = [2 if isinstance(dim, str) else dim for dim in graph.dims(given) or ()]
            model.graph.inputs.remove(given)
            given.const_value = ir.tensor(np.zeros(dims, np.float32), name=name)
            given.shape = ir.Shape(dims)
            model.graph.register_initializer(given)
    return model


@pytest.mark.parametrize(
    ("model", "width"),
    [(conv(), CHANNELS), (linear(), HEADS * VALUE_WIDTH), (linear(rule="gated", by_channel=True), HEADS * VALUE_WIDTH)],
)
def test_the_verifier_takes_layers_with_the_state_of_their_number(model: ir.Model, width: int) -> None:
    made = complete(model, width)
    dialect.check(made)
    made.graph[0].attributes["layer"] = ir.AttrInt64("layer", 1)
    with pytest.raises(VerificationError, match=r"layer 1 must read past_key_values\.1\."):
        dialect.check(made)


@pytest.mark.parametrize(
    ("model", "width", "attributes", "reason"),
    [
        (conv("tanh"), CHANNELS, {}, "activation is 'tanh', must be none, silu"),
        (conv(), CHANNELS, {"layer": 1}, "layer 1 must read past_key_values.1.conv, past_lengths, lengths"),
        (linear(), HEADS * VALUE_WIDTH, {"num_heads": 3}, "3 heads of keys cannot serve 4 of values"),
        (linear(), HEADS * VALUE_WIDTH, {"num_heads": 4}, "q is 6 wide, must be 12 for"),
        (linear(), HEADS * VALUE_WIDTH, {"layer": 1}, "layer 1 must read past_key_values.1.recurrent"),
        (linear(rule="delta"), HEADS * VALUE_WIDTH, {}, "update_rule is 'delta', must be gated, gated_delta"),
        (without_rate(), HEADS * VALUE_WIDTH, {}, "beta is of gated_delta, the rule is gated_delta"),
        (narrow(), HEADS * VALUE_WIDTH, {}, "decay is 5 wide, must be 4 or 12 for"),
    ],
)
def test_a_wrong_layer_is_refused(model: ir.Model, width: int, attributes: Mapping[str, int], reason: str) -> None:
    for name, number in attributes.items():
        model.graph[0].attributes[name] = ir.AttrInt64(name, number)
    with pytest.raises(VerificationError, match=rf"node 'one': .*{reason}"):
        dialect.check(complete(model, width))


def test_a_kernel_that_does_not_fit_its_state_is_refused() -> None:
    model = conv()
    next(given for given in model.graph.inputs if given.name == "weight").shape = ir.Shape([CHANNELS, 1, TAPS + 1])
    with pytest.raises(VerificationError, match=r"do not fit a kernel \[6, 1, 5\]"):
        dialect.check(complete(model, CHANNELS))


@pytest.mark.parametrize("kernel", [False, True])
def test_a_rate_that_is_tiny_is_as_precise_as_a_large_one(*, kernel: bool) -> None:
    """Sigmoid(-14) is 8e-7, and what a first token makes of it as small: a norm would magnify what is lost of it."""
    model = linear()
    [node] = model.graph
    rate = graph.input_named(model, "beta")
    sigmoid = ir.node("Sigmoid", [rate], num_outputs=1, name="rate")
    made = sigmoid.outputs[0]
    made.name, made.type, made.shape = "rate", rate.type, rate.shape
    model.graph.insert_before(node, sigmoid)
    node.replace_input_with(list(node.inputs).index(rate), made)
    feeds = draw(model, 1, [1, 1, 1, 1])
    feeds["past_lengths"][:] = 0
    logits = np.float32(-14) - np.arange(feeds["beta"].size, dtype=np.float32).reshape(feeds["beta"].shape) / 8
    exact = 1 / (1 + np.exp(-logits.astype(np.float64)))
    y, _ = run(model, {**feeds, "beta": logits}, kernel=kernel)
    given = operands(linear(), {**feeds, "beta": exact.astype(np.float32)})
    wanted, _ = references.linear_attention(*given, num_heads=NUM_HEADS, scale=0.4)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-12)
