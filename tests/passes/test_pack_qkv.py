"""pack-qkv: the projections of query, key and value become one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmforge.ir import graph
from llmforge.passes.flash_attention import FlashAttention
from llmforge.passes.pack_qkv import PackQkv

from ..models import graphs

ATTENTION = "model.layers.0.self_attn"


def weights(model: ir.Model, *names: str) -> list[np.ndarray]:
    tensors = [model.graph.initializers[name].const_value for name in names]
    return [tensor.numpy() for tensor in tensors if tensor is not None]


def test_decoder_as_text(tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    before = np.concatenate(weights(model, *(f"{ATTENTION}.{p}_proj.weight" for p in "qkv")), axis=1)
    changes, _ = graphs.prove(PackQkv(), model, tmp_path)
    assert graphs.lines(model, ["MatMul", "Split", "RotaryEmbedding"])[:4] == [
        f"{ATTENTION}.qkv_proj = MatMul(l0_normed, {ATTENTION}.qkv_proj.weight)",
        f"l0_q, l0_k, l0_v = Split({ATTENTION}.qkv_proj, split_64_32_32)",
        "l0_q_rotary = RotaryEmbedding(l0_q, cos, sin, position_ids)",
        "l0_k_rotary = RotaryEmbedding(l0_k, cos, sin, position_ids)",
    ]
    assert [change.node for change in changes.rewritten] == ["l0_q_node"]
    packed = model.graph.initializers[f"{ATTENTION}.qkv_proj.weight"]
    assert graph.sources(packed) == [f"{ATTENTION}.{p}_proj.weight" for p in "qkv"]
    assert graph.dims(packed) == (48, 128)
    assert not [name for name in model.graph.initializers if name.endswith(("q_proj.weight", "v_proj.bias"))]
    np.testing.assert_array_equal(weights(model, f"{ATTENTION}.qkv_proj.weight")[0], before)


def test_nothing_is_read() -> None:
    model = graphs.llama(graphs.Llama(layers=1))

    def read() -> ir.TensorProtocol:
        raise AssertionError("a weight was read")

    for name in [f"{ATTENTION}.{p}_proj.weight" for p in "qkv"]:
        value = model.graph.initializers[name]
        assert value.shape is not None
        value.const_value = ir.LazyTensor(read, ir.DataType.FLOAT, value.shape, name=name)
    assert PackQkv().run(model, graphs.CPU)
    with pytest.raises(AssertionError, match="a weight was read"):
        weights(model, f"{ATTENTION}.qkv_proj.weight")


@pytest.mark.parametrize(
    "spec",
    [graphs.Llama(bias=True), graphs.Llama(query_norm=True), graphs.Llama(rotary_dim=0), graphs.Llama(value_dim=8)],
    ids=["bias", "norm per head", "no rotary", "narrow values"],
)
def test_variants_are_packed(spec: graphs.Llama, tmp_path: Path) -> None:
    model = graphs.llama(spec)
    changes, _ = graphs.prove(PackQkv(), model, tmp_path)
    assert len(changes.rewritten) == spec.layers
    assert len(graphs.find(model, "Split")) == spec.layers


def test_biases_are_stacked() -> None:
    model = graphs.llama(graphs.Llama(layers=1, bias=True))
    before = np.concatenate(weights(model, *(f"{ATTENTION}.{p}_proj.bias" for p in "qkv")))
    PackQkv().run(model, graphs.CPU)
    np.testing.assert_array_equal(weights(model, f"{ATTENTION}.qkv_proj.bias")[0], before)
    assert graphs.lines(model, ["MatMul", "Add", "Split"])[:3] == [
        f"{ATTENTION}.qkv_proj.product = MatMul(l0_normed, {ATTENTION}.qkv_proj.weight)",
        f"{ATTENTION}.qkv_proj = Add({ATTENTION}.qkv_proj.product, {ATTENTION}.qkv_proj.bias)",
        f"l0_q, l0_k, l0_v = Split({ATTENTION}.qkv_proj, split_64_32_32)",
    ]


def test_group_query_attention_is_packed_too(tmp_path: Path) -> None:
    model = graphs.llama()
    FlashAttention().run(model, graphs.CPU)
    changes, _ = graphs.prove(PackQkv(), model, tmp_path)
    assert len(changes.rewritten) == 2


def rewire(model: ir.Model, node: str, index: int, value: str) -> None:
    """Let input `index` of `node` read the value of that name."""
    values = {v.name: v for n in model.graph for v in n.outputs} | dict(model.graph.initializers)
    next(n for n in model.graph if n.name == node).replace_input_with(index, values[value])


@pytest.mark.parametrize(
    ("node", "index", "value", "reason"),
    [
        ("l0_v_node", 0, "embedded", "they read different tensors: l0_normed, l0_normed, embedded"),
        ("l0_attention", 2, "l0_k", "two of them are the same MatMul"),
        ("l0_v_node", 1, f"{ATTENTION}.k_proj.weight", f"initializer {ATTENTION}.k_proj.weight has other readers"),
        ("l0_attention", 2, "l0_normed", "value comes from Gather embedded_node, not from a MatMul"),
    ],
)
def test_non_matches_say_why(node: str, index: int, value: str, reason: str) -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    rewire(model, node, index, value)
    fingerprint = graph.fingerprint(model)
    changes = PackQkv().run(model, graphs.CPU)
    assert not changes
    assert graph.fingerprint(model) == fingerprint
    [skipped] = changes.skipped
    assert skipped.node == "l0_attention"
    assert reason in skipped.reason


def test_what_is_packed_has_a_type_where_products_under_a_bias_have_none() -> None:
    """As torch.onnx writes them; attention without rotary embedding reads the packed value itself."""
    model = graphs.llama(graphs.Llama(layers=1, bias=True))
    for node in graphs.find(model, "MatMul")[:3]:
        node.outputs[0].type = node.outputs[0].shape = None
    PackQkv().run(model, graphs.CPU)
    [split] = graphs.find(model, "Split")
    packed = split.inputs[0]
    assert packed is not None
    assert packed.dtype == ir.DataType.FLOAT
    assert graph.dims(packed) == ("batch", "sequence", 128)


def test_one_bias_of_three_is_left_alone() -> None:
    model = graphs.llama(graphs.Llama(layers=1, bias=True))
    rewire(model, "l0_attention", 2, "l0_v_product")
    changes = PackQkv().run(model, graphs.CPU)
    assert not changes
    assert "some have a bias and some have none" in changes.skipped[0].reason


def test_taken_name_is_left_alone() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    graph.initializer(model, f"{ATTENTION}.qkv_proj.weight", np.zeros((48, 128), np.float32))
    changes = PackQkv().run(model, graphs.CPU)
    assert not changes
    assert changes.skipped[0].reason == f"an initializer is named {ATTENTION}.qkv_proj.weight already"


def test_packed_attention_is_skipped_with_a_reason() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    PackQkv().run(model, graphs.CPU)
    assert PackQkv().run(model, graphs.CPU).skipped[0].reason == "query is already packed (comes from a Split)"
    FlashAttention().run(model, graphs.CPU)
    assert PackQkv().run(model, graphs.CPU).skipped[0].reason == "key is part of a packed query"
