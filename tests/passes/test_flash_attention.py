"""flash-attention: llmforge::Attention becomes GroupQueryAttention."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph
from llmforge.passes.flash_attention import FlashAttention
from llmforge.passes.fuse_norms import FuseNorms
from llmforge.passes.pack_gate_up import PackGateUp
from llmforge.passes.pack_qkv import PackQkv
from llmforge.rewrite.pass_base import Context

from ..models import graphs

GQA = "GroupQueryAttention"
CACHE = "past_key_values.0.key, past_key_values.0.value, seqlens_k, total_sequence_length"


def inputs(model: ir.Model) -> set[str | None]:
    return {value.name for value in model.graph.inputs if not str(value.name).startswith("past_key_values.")}


def test_decoder_as_text(tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    changes, _ = graphs.prove(FlashAttention(), model, tmp_path)
    assert graphs.lines(model, [GQA, "RotaryEmbedding"]) == [
        f"l0_attended, present.0.key, present.0.value = {GQA}(l0_q, l0_k, l0_v, {CACHE}, cos, sin)"
    ]
    assert [(c.node, c.what) for c in changes.rewritten] == [
        ("l0_attention", "GroupQueryAttention, rotary embedding inside")
    ]
    assert inputs(model) == {"input_ids", "logits_rows", "seqlens_k", "total_sequence_length"}
    assert "llmforge" not in model.opset_imports
    [attention] = graphs.find(model, GQA)
    attributes = {name: attribute.value for name, attribute in attention.attributes.items()}
    assert attributes == {
        "num_heads": 4,
        "kv_num_heads": 2,
        "scale": 0.25,
        "do_rotary": 1,
        "rotary_interleaved": 0,
    }


def test_packed_projection_is_passed_unsplit(tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    PackQkv().run(model, graphs.CPU)
    changes, _ = graphs.prove(FlashAttention(), model, tmp_path)
    assert graphs.lines(model, [GQA, "Split"]) == [
        "l0_attended, present.0.key, present.0.value = "
        f"{GQA}(model.layers.0.self_attn.qkv_proj, _, _, {CACHE}, cos, sin)"
    ]
    assert changes.rewritten[0].what == "GroupQueryAttention, packed query, key and value, rotary embedding inside"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        graphs.Llama(bias=True),
        graphs.Llama(interleaved=1),
        graphs.Llama(window=5),
        graphs.Llama(softcap=2.0),
        graphs.Llama(sinks=True),
        graphs.Llama(rotary_dim=0),
        graphs.Llama(head_dim=32, rotary_dim=16),
        graphs.Llama(query_norm=True),
        graphs.Llama(heads=4, kv_heads=4),
        graphs.Llama(heads=4, kv_heads=1),
        graphs.Llama(rotary_dim=8),
        graphs.Llama(head_dim=24),
    ],
    ids=[
        "bias",
        "interleaved",
        "window",
        "softcap",
        "sinks",
        "no rotary",
        "partial rotary",
        "norm per head",
        "one group",
        "one KV head",
        "narrow rotary",
        "odd heads",
    ],
)
def test_variants_keep_their_numbers(spec: graphs.Llama, packed: bool, tmp_path: Path) -> None:
    model = graphs.llama(spec)
    if packed:
        PackQkv().run(model, graphs.CPU)
    changes, _ = graphs.prove(FlashAttention(), model, tmp_path)
    assert len(changes.rewritten) == spec.layers
    assert not graphs.find(model, "Attention")


@pytest.mark.parametrize(
    ("spec", "attribute", "value"),
    [(graphs.Llama(window=5), "local_window_size", 5), (graphs.Llama(softcap=2.0), "softcap", 2.0)],
)
def test_attributes_are_carried_over(spec: graphs.Llama, attribute: str, value: float) -> None:
    model = graphs.llama(spec)
    FlashAttention().run(model, graphs.CPU)
    assert {node.attributes[attribute].value for node in graphs.find(model, GQA)} == {value}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (graphs.Llama(rotary_dim=8), "a rotary cache is (64, 4); the kernel needs a multiple of 8 columns, at most 8"),
        (graphs.Llama(head_dim=24), "heads have 24 channels; with rotary the kernel needs a multiple of 16"),
    ],
)
def test_rotary_that_the_kernel_cannot_do_stays_in_front(spec: graphs.Llama, reason: str) -> None:
    model = graphs.llama(spec)
    changes = FlashAttention().run(model, graphs.CPU)
    assert len(graphs.find(model, "RotaryEmbedding")) == 4
    assert [skipped.node for skipped in changes.skipped][:2] == ["l0_q_rotary_node", "l0_k_rotary_node"]
    assert {skipped.reason for skipped in changes.skipped} == {reason}
    assert inputs(model) == {"input_ids", "logits_rows", "position_ids", "seqlens_k", "total_sequence_length"}


@pytest.mark.parametrize(
    ("of_key", "attribute", "reason"),
    [
        ("sin", None, "query and key have different rotary caches or positions"),
        ("cos", "interleaved", "one of query and key is interleaved and the other is not"),
    ],
)
def test_unequal_rotary_stays_in_front(of_key: str, attribute: str | None, reason: str) -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    key = next(node for node in model.graph if node.name == "l0_k_rotary_node")
    key.replace_input_with(1, model.graph.initializers[of_key])
    if attribute is not None:
        key.attributes[attribute] = ir.AttrInt64(attribute, 1)
    changes = FlashAttention().run(model, graphs.CPU)
    assert len(graphs.find(model, "RotaryEmbedding")) == 2
    assert {skipped.reason for skipped in changes.skipped} == {reason}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (graphs.Llama(value_dim=8), "key heads have 16 channels and value heads 8"),
        (graphs.Llama(head_dim=12), "heads have 12 channels; GroupQueryAttention needs a multiple of 8"),
        (graphs.Llama(heads=4, kv_heads=3), "4 query heads are not a multiple of 3 KV heads"),
    ],
)
def test_what_the_kernel_cannot_do_stays_canonical(spec: graphs.Llama, reason: str) -> None:
    model = graphs.llama(spec)
    fingerprint = graph.fingerprint(model)
    changes = FlashAttention().run(model, graphs.CPU)
    assert not changes
    assert graph.fingerprint(model) == fingerprint
    assert [skipped.node for skipped in changes.skipped] == ["l0_attention", "l1_attention"]
    assert all(reason in skipped.reason for skipped in changes.skipped)


def test_a_graph_may_be_half_lowered(tmp_path: Path) -> None:
    model = graphs.llama()
    for index in (3, 4):  # the first layer's caches: of unknown head size
        value = next(node for node in model.graph if node.name == "l0_attention").inputs[index]
        assert value is not None
        value.shape = ir.Shape(["batch", 2, "capacity", "width"])
    changes = FlashAttention().run(model, graphs.CPU)
    assert [change.node for change in changes.rewritten] == ["l1_attention"]
    assert changes.skipped[0].reason == "the head size of the cache is unknown"
    assert inputs(model) == {
        "input_ids",
        "logits_rows",
        "position_ids",
        "past_lengths",
        "seqlens_k",
        "total_sequence_length",
    }


def test_all_passes_leave_27_nodes() -> None:
    model = graphs.llama()
    assert graph.nodes(model) == 39
    for change in (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention()):
        assert change.run(model, graphs.CPU)
    assert graph.nodes(model) == 27
    assert graphs.operators(model) == {
        "Gather": 2,
        "RMSNormalization": 1,
        "MatMul": 9,
        GQA: 2,
        "SkipSimplifiedLayerNormalization": 4,
        "Split": 2,
        "Sigmoid": 2,
        "Mul": 4,
        "Transpose": 1,
    }


def test_target_without_onnxruntime_is_refused() -> None:
    target = graphs.TARGET.model_copy(update={"engines": ("tensorrt",)})
    with pytest.raises(UnsupportedError, match=r"flash-attention: target cpu-avx2 runs tensorrt") as error:
        FlashAttention().run(graphs.llama(), Context(target=target))
    assert error.value.hint == "leave flash-attention out of the recipe"
