from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from llmforge.base.errors import VerificationError
from llmforge.ir import dialect, graph

BATCH, CAPACITY, HEADS, KV_HEADS, DIM, VALUE_DIM, VOCABULARY = 3, 11, 4, 2, 8, 8, 16

# One layer, small enough to read: embedding → attention → row selection → tied head.
TEXT = f"""
<ir_version: 10, opset_import: ["" : 24, "llmforge" : 1]>
decoder (
    int64[batch, sequence] input_ids, int32[batch] past_lengths, int64[rows] logits_rows,
    float[batch, {KV_HEADS}, capacity, {DIM}] "past_key_values.0.key",
    float[batch, {KV_HEADS}, capacity, {DIM}] "past_key_values.0.value"
) => (
    float[batch, rows, {VOCABULARY}] logits,
    float[batch, {KV_HEADS}, capacity, {DIM}] "present.0.key",
    float[batch, {KV_HEADS}, capacity, {DIM}] "present.0.value"
)
<float[batch, sequence, 32] x>
{{
    [embed] x = Gather <axis = 0> (embedding, input_ids)
    [q_proj] q = MatMul (x, wq)
    [k_proj] k = MatMul (x, wk)
    [v_proj] v = MatMul (x, wv)
    [attention] y, "present.0.key", "present.0.value" = llmforge.Attention <
        num_heads = {HEADS}, kv_num_heads = {KV_HEADS}, scale = 0.25, softcap = 0.0, window = 0, layer = 0
    > (q, k, v, "past_key_values.0.key", "past_key_values.0.value", past_lengths)
    [rows] chosen = Gather <axis = 1> (y, logits_rows)
    [tied] head = Transpose <perm = [1, 0]> (embedding)
    [lm_head] logits = MatMul (chosen, head)
}}
"""


FREE = {"embedding": (VOCABULARY, 32), "wq": (32, 32), "wk": (32, 16), "wv": (32, 16)}  # weights of TEXT


def decoder(text: str = TEXT) -> ir.Model:
    """Parse a graph and give every name that it leaves open a tensor: random floats, or zeros of another dtype."""
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    shapes = {name: (np.dtype(np.float32), shape) for name, shape in FREE.items()} | SERVED_WEIGHTS
    made = {name for member in proto.graph.node for name in member.output}
    made |= {value.name for value in proto.graph.input} | {tensor.name for tensor in proto.graph.initializer} | {""}
    for name in sorted({name for member in proto.graph.node for name in member.input} - made):
        dtype, shape = shapes[name]
        proto.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(dtype), name))
    model = ir.from_proto(proto)
    rows = next(value for value in model.graph.inputs if value.name == "logits_rows")
    rows.const_value = ir.tensor(np.array([-1]), name="logits_rows")
    model.graph.register_initializer(rows)
    return model


def node(model: ir.Model, name: str) -> ir.Node:
    return next(node for node in model.graph if node.name == name)


def session(model: ir.Model, *, optimize: bool) -> ort.InferenceSession:
    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # errors: TensorScatter warns whenever past and present are not one buffer
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])


def attention_model(*, window: int, softcap: float, sinks: bool, value_dim: int) -> ir.Model:
    """Only an Attention node, with every tensor an input."""
    shapes: dict[str, tuple[ir.DataType, list[int | str]]] = {
        "input_ids": (ir.DataType.INT64, ["batch", "sequence"]),
        "q": (ir.DataType.FLOAT, ["batch", "sequence", HEADS * DIM]),
        "k": (ir.DataType.FLOAT, ["batch", "sequence", KV_HEADS * DIM]),
        "v": (ir.DataType.FLOAT, ["batch", "sequence", KV_HEADS * value_dim]),
        "past_key_values.0.key": (ir.DataType.FLOAT, ["batch", KV_HEADS, "capacity", DIM]),
        "past_key_values.0.value": (ir.DataType.FLOAT, ["batch", KV_HEADS, "capacity", value_dim]),
        "past_lengths": (ir.DataType.INT32, ["batch"]),
        "sinks": (ir.DataType.FLOAT, [HEADS]),
    }
    values = {
        name: ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims))
        for name, (dtype, dims) in shapes.items()
        if sinks or name != "sinks"
    }
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "scale": 0.3, "softcap": softcap}
    attention = ir.node(
        "Attention",
        [value for name, value in values.items() if name != "input_ids"],
        {**attributes, "window": window, "layer": 0},
        domain="llmforge",
        num_outputs=3,
        name="attention",
    )
    for value, name, like in zip(
        attention.outputs, ("y", "present.0.key", "present.0.value"), ("q", "k", "v"), strict=True
    ):
        value.name, value.dtype = name, values[like].dtype
    made = ir.Graph(
        list(values.values()), list(attention.outputs), nodes=[attention], opset_imports={"": 24, "llmforge": 1}
    )
    return ir.Model(made, ir_version=10)


CASES = [
    pytest.param(window, softcap, sinks, value_dim, id=f"window{window}-softcap{softcap:.0f}-sinks{sinks}-v{value_dim}")
    for window, softcap, sinks, value_dim in (
        *product((0, 4), (0.0, 5.0), (False, True), (DIM,)),
        (0, 0.0, False, 6),
        (0, 0.0, True, 6),
        (1, 0.0, False, DIM),
    )
]


@pytest.mark.parametrize("optimize", [False, True], ids=["plain", "optimized"])
@pytest.mark.parametrize(("window", "softcap", "sinks", "value_dim"), CASES)
@pytest.mark.parametrize(
    ("sequence", "past"),
    [(5, (0, 0, 0)), (1, (4, 7, 0)), (3, (2, 8, 5))],
    ids=["prefill", "ragged decode", "ragged continuation"],
)
def test_expanded_attention_equals_the_reference(
    sequence: int,
    past: tuple[int, ...],
    window: int,
    softcap: float,
    sinks: bool,
    value_dim: int,
    optimize: bool,
) -> None:
    rng = np.random.default_rng(1)

    def random(*shape: int) -> NDArray[np.float32]:
        return 3 * rng.standard_normal(shape).astype(np.float32)

    feeds: dict[str, NDArray[np.generic]] = {
        "q": random(BATCH, sequence, HEADS * DIM),
        "k": random(BATCH, sequence, KV_HEADS * DIM),
        "v": random(BATCH, sequence, KV_HEADS * value_dim),
        "past_key_values.0.key": random(BATCH, KV_HEADS, CAPACITY, DIM),
        "past_key_values.0.value": random(BATCH, KV_HEADS, CAPACITY, value_dim),
        "past_lengths": np.array(past, np.int32),
    }
    if sinks:
        feeds["sinks"] = random(HEADS)
    expected = dialect.attention(*feeds.values(), form=dialect.AttentionForm(HEADS, KV_HEADS, 0.3, softcap, window))
    model = attention_model(window=window, softcap=softcap, sinks=sinks, value_dim=value_dim)
    expanded = dialect.expand(model)
    assert {node.domain for node in expanded.graph} == {""}
    ids = np.zeros((BATCH, sequence), np.int64)
    got = session(expanded, optimize=optimize).run(None, {"input_ids": ids, **feeds})
    for name, a, b in zip(("y", "present key", "present value"), got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6, err_msg=name)


def test_the_reference_keeps_other_slots_and_reads_none_of_them() -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 1, 8)).astype(np.float32) for _ in range(3))
    garbage = np.full((1, 1, 4, 8), 1e6, np.float32)
    y, present_key, present_value = dialect.attention(
        q, k, v, garbage, garbage, np.array([0], np.int32), form=dialect.AttentionForm(1, 1, 1)
    )
    np.testing.assert_array_equal(y, v)
    np.testing.assert_array_equal(present_key[0, 0, 0], k[0, 0])
    np.testing.assert_array_equal(present_value[0, 0, 0], v[0, 0])
    assert (present_key[0, 0, 1:] == 1e6).all()


def test_expand_shares_tensors_keeps_the_interface_and_leaves_the_model_alone() -> None:
    model = decoder()
    before = graph.fingerprint(model)
    expanded = dialect.expand(model)
    assert graph.fingerprint(model) == before
    assert expanded.graph.initializers["wq"].const_value is model.graph.initializers["wq"].const_value
    assert [value.name for value in expanded.graph.inputs] == [value.name for value in model.graph.inputs]
    assert [value.name for value in expanded.graph.outputs] == [value.name for value in model.graph.outputs]
    assert dict(expanded.opset_imports) == {"": 24}
    cache = np.zeros((2, KV_HEADS, CAPACITY, DIM), np.float32)
    feeds = {"input_ids": np.ones((2, 3), np.int64), "past_lengths": np.zeros(2, np.int32)}
    feeds |= {"past_key_values.0.key": cache, "past_key_values.0.value": cache}
    run = session(expanded, optimize=True)
    last = run.run(["logits"], feeds)[0]
    every = run.run(["logits"], {**feeds, "logits_rows": np.array([0, 1, 2])})[0]
    assert last.shape == (2, 1, VOCABULARY)
    np.testing.assert_array_equal(every[:, 2:], last)


def test_expand_builds_a_mask_once_for_every_window() -> None:
    model = attention_model(window=0, softcap=0.0, sinks=False, value_dim=DIM)
    first = node(model, "attention")
    for window in (0, 4, 4):
        attributes = {name: attribute.value for name, attribute in first.attributes.items()} | {"window": window}
        graph.insert(first, "Attention", first.inputs, attributes, domain="llmforge", outputs=3)
    for index, member in enumerate(list(model.graph)[:3]):
        for value in member.outputs:
            value.name = f"{value.name}_{index}"
            model.graph.outputs.append(value)
    expanded = dialect.expand(model)
    kinds = [member.op_type for member in expanded.graph]
    assert (kinds.count("Attention"), kinds.count("LessOrEqual"), kinds.count("Greater")) == (4, 2, 1)


def rename(model: ir.Model, old: str, new: str) -> None:
    every = [*model.graph.inputs, *model.graph.initializers.values(), *(v for n in model.graph for v in n.outputs)]
    next(value for value in every if value.name == old).name = new


def swap_first_nodes(model: ir.Model) -> None:
    member = node(model, "embed")
    model.graph.remove(member)
    model.graph.insert_after(node(model, "q_proj"), member)


def read_foreign_value(model: ir.Model) -> None:
    node(model, "q_proj").replace_input_with(0, ir.Value(name="foreign"))


def insert_unknown(model: ir.Model) -> None:
    (y,) = graph.insert(node(model, "q_proj"), "Hardmax", [node(model, "embed").outputs[0]], name="odd")
    y.name = "odd"


def insert_norm_of_no_epsilon(model: ir.Model) -> None:
    """ONNX has a default; models differ in the number."""
    scale = graph.initializer(model.graph, "gamma", np.ones(32, np.float32))
    graph.insert(
        node(model, "q_proj"), "RMSNormalization", [graph.operand(node(model, "q_proj"), 0), scale], name="odd"
    )


def set_attribute(name: str, value: int | float | None) -> Callable[[ir.Model], None]:
    def change(model: ir.Model) -> None:
        attributes = node(model, "attention").attributes
        if value is None:
            del attributes[name]
        else:
            attributes[name] = ir.convenience.convert_attribute(name, value)

    return change


def shorten_tensor(model: ir.Model) -> None:
    value = model.graph.initializers["wq"]
    value.const_value = ir.tensor(np.zeros((32, 8), np.float32), name="wq")


def drop_output(model: ir.Model) -> None:
    del model.graph.outputs[2]


def retype_input(model: ir.Model) -> None:
    model.graph.inputs[1].dtype = ir.DataType.INT64


def drop_default(model: ir.Model) -> None:
    del model.graph.initializers["logits_rows"]


def reshape_present(model: ir.Model) -> None:
    model.graph.outputs[1].shape = ir.Shape(["batch", KV_HEADS, "capacity", DIM + 1])


def extra_input(model: ir.Model) -> None:
    model.graph.inputs.append(ir.Value(name="token_type_ids", type=ir.TensorType(ir.DataType.INT64)))


def later_opset(model: ir.Model) -> None:
    model.opset_imports[""] = 25


def other_cache(model: ir.Model) -> None:
    node(model, "attention").replace_input_with(3, model.graph.inputs[4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: rename(m, "q", "k"), "value 'k': two values have this name"),
        (swap_first_nodes, "node 'q_proj': reads 'x' before it is made, or from another graph"),
        (read_foreign_value, "node 'q_proj': reads 'foreign' before it is made, or from another graph"),
        (insert_unknown, "node 'odd': operator ai.onnx::Hardmax is not in the dialect"),
        (insert_norm_of_no_epsilon, "node 'odd': attribute 'epsilon' is missing"),
        (set_attribute("window", None), "node 'attention': attribute 'window' is missing"),
        (set_attribute("scale", 1), "node 'attention': attribute 'scale' is INT, must be float"),
        (set_attribute("causal", 1), "node 'attention': attribute 'causal' is unknown; known are num_heads,"),
        (set_attribute("kv_num_heads", 3), "node 'attention': 4 heads cannot share 3 KV heads"),
        (set_attribute("layer", 1), "node 'attention': layer 1 must read past_key_values.1.key,"),
        (set_attribute("window", -1), "node 'attention': window, chunk and softcap must not be negative"),
        (other_cache, "node 'attention': layer 0 must read past_key_values.0.key,"),
        (shorten_tensor, r"initializer 'wq': is declared \[32, 32\], its tensor is \[32, 8\]"),
        (drop_output, "graph input 'past_key_values.0.value': has no output 'present.0.value'"),
        (reshape_present, r"graph input 'past_key_values.0.key': is \[batch, 2, capacity, 8\], its present is"),
        (retype_input, "graph input 'past_lengths': is INT64, must be one of INT32"),
        (drop_default, "graph input 'logits_rows': has no default"),
        (extra_input, "graph input 'token_type_ids': is unknown; known are input_ids,"),
        (later_opset, "opset import 'ai.onnx': version is 25, must be 24"),
        (lambda m: m.opset_imports.pop("llmforge"), "opset import 'llmforge': nodes use the domain"),
        (
            lambda m: rename(m, "past_key_values.0.key", "past_key_values.1.key"),
            "'past_key_values.1.key': has no output",
        ),
    ],
)
def test_check_names_the_place_and_the_reason(change: Callable[[ir.Model], object], message: str) -> None:
    model = decoder()
    dialect.check(model)
    change(model)
    with pytest.raises(VerificationError, match=message):
        dialect.check(model)


# The same layer as passes leave it: an int8 cache, 4-bit weights, a fused norm, the inputs of the served graph.
SERVED = f"""
<ir_version: 12, opset_import: ["" : 24, "com.microsoft" : 1]>
decoder (
    int64[batch, sequence] input_ids, int32[batch] seqlens_k, int32 total_sequence_length, int64[rows] logits_rows,
    int8[batch, {KV_HEADS}, capacity, {DIM}] "past_key_values.0.key",
    int8[batch, {KV_HEADS}, capacity, {DIM}] "past_key_values.0.value"
) => (
    float[batch, rows, 2] logits,
    int8[batch, {KV_HEADS}, capacity, {DIM}] "present.0.key",
    int8[batch, {KV_HEADS}, capacity, {DIM}] "present.0.value"
)
{{
    [embed] x = Gather <axis = 0> (packed, input_ids)
    [attention] y, "present.0.key", "present.0.value" = com.microsoft.GroupQueryAttention <
        num_heads = {HEADS}, kv_num_heads = {KV_HEADS}, k_quant_type = "PER_TENSOR", v_quant_type = "PER_TENSOR"
    > (x, , , "past_key_values.0.key", "past_key_values.0.value", seqlens_k, total_sequence_length,
       , , , , , k_scale, v_scale)
    [norm] normed, "", "", sum = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-5> (y, y, gamma)
    [rows] chosen = Gather <axis = 1> (normed, logits_rows)
    [lm_head] logits = com.microsoft.MatMulNBits <K = 32, N = 2, bits = 4, block_size = 32> (chosen, codes, scales)
}}
"""
SERVED_WEIGHTS = {
    "packed": (np.dtype(np.float32), (VOCABULARY, 64)),
    "k_scale": (np.dtype(np.float32), ()),
    "v_scale": (np.dtype(np.float32), ()),
    "gamma": (np.dtype(np.float32), (32,)),
    "codes": (np.dtype(np.uint8), (2, 1, 16)),
    "scales": (np.dtype(np.float32), (2, 1)),
}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seqlens_k, total_sequence_length,\n", ", total_sequence_length,\n", "input 'seqlens_k' is missing"),
        ("codes, scales)\n}", "codes, scales, codes, gamma, gamma, gamma)\n}", "has 7 inputs, at most 6"),
        ("(chosen, codes, scales)", "(chosen, scales, codes)", "input 'b': is FLOAT, must be one of UINT8"),
        ("N = 2, ", "", "node 'lm_head': attribute 'N' is missing"),
        ("epsilon", "eps", "node 'norm': attribute 'eps' is unknown; known are epsilon"),
        ("SkipSimplified", "SkipGroup", "operator com.microsoft::SkipGroupLayerNormalization is not in the dialect"),
    ],
)
def test_check_knows_their_inputs_and_attributes(old: str, new: str, message: str) -> None:
    assert old in SERVED
    dialect.check(decoder(SERVED))
    with pytest.raises(VerificationError, match=message):
        dialect.check(decoder(SERVED.replace(old, new)))
