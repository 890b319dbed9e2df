"""genai-interface: lengths that follow from a mask, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from llmforge import dialect, graph, interface
from llmforge.errors import UnsupportedError
from llmforge.passes import FlashAttention, GenaiInterface, PackQkv, QuantizeKvCache
from llmforge.probe import Weights, open_session
from llmforge.runtime.session import Session
from llmforge.statistics import KvRange, Statistics
from llmforge.transform import Budget, Changes, Pass

from . import graphs

LENGTHS = "seqlens_k, total_sequence_length"


def lowered(spec: graphs.Llama | None = None) -> ir.Model:
    model = graphs.llama(spec)
    FlashAttention().run(model, graphs.CPU)
    return model


def open_(model: ir.Model) -> Session:
    return open_session(model, Weights(), 1)


def inputs(model: ir.Model) -> dict[str, tuple[int | str | None, ...] | None]:
    values = {str(value.name): graph.dims(value) for value in model.graph.inputs}
    return {name: dims for name, dims in values.items() if not name.startswith("past_key_values.")}


def test_lengths_follow_from_the_mask(tmp_path: Path) -> None:
    model = lowered(graphs.Llama(layers=1))
    changes, verification = graphs.prove(GenaiInterface(), model, tmp_path)
    assert verification.max_abs_difference == 0.0
    assert graphs.lines(model, ["CacheLengths", "GroupQueryAttention"]) == [
        f"{LENGTHS} = CacheLengths(attention_mask)",
        "l0_attended, present.0.key, present.0.value = GroupQueryAttention("
        f"l0_q, l0_k, l0_v, past_key_values.0.key, past_key_values.0.value, {LENGTHS}, cos, sin)",
    ]
    assert [(change.node, change.what) for change in changes.rewritten] == [
        ("selected_node", "logits of every token"),
        ("cache_lengths", "seqlens_k and total_sequence_length follow from attention_mask"),
    ]
    assert inputs(model) == {
        "input_ids": ("batch", "sequence"),
        "attention_mask": ("batch", "total_sequence_length"),
    }
    assert graph.dims(model.graph.outputs[0]) == ("batch", "sequence", 96)
    assert len(graphs.find(model, "Gather")) == 1  # of the embedding


def test_logits_of_the_last_token_are_declared_so(tmp_path: Path) -> None:
    model = lowered()
    graphs.prove(GenaiInterface(logits="last"), model, tmp_path)
    assert inputs(model).keys() == {"input_ids", "logits_rows", "attention_mask"}
    assert graph.dims(model.graph.outputs[0]) == ("batch", 1, 96)
    assert len(graphs.find(model, "Gather")) == 2


@pytest.mark.parametrize(
    "spec",
    [
        graphs.Llama(window=5),
        graphs.Llama(softcap=3.0, sinks=True, bias=True),
        graphs.Llama(head_dim=8, query_norm=True),  # rotary embedding stays outside: position_ids is an input
        graphs.Llama(rotary_dim=0),
    ],
)
@pytest.mark.parametrize("logits", ["all", "last"])
def test_variants_keep_every_bit(spec: graphs.Llama, logits: str, tmp_path: Path) -> None:
    model = lowered(spec)
    _, verification = graphs.prove(GenaiInterface(logits=logits), model, tmp_path)  # type: ignore[arg-type]
    assert verification.max_abs_difference == 0.0
    assert ("position_ids" in inputs(model)) == (spec.head_dim == 8)


def test_caches_of_int8_keep_every_bit(tmp_path: Path) -> None:
    model = lowered()
    peaks = {layer: KvRange(np.full((2, 16), 9.0, np.float32), np.full((2, 16), 9.0, np.float32)) for layer in (0, 1)}
    context = replace(graphs.CPU, statistics=Statistics(samples=1, tokens=1, linears={}, kv=peaks))
    assert QuantizeKvCache(budget=Budget(kld_mean=1.0)).run(model, context)
    graphs.prove(GenaiInterface(), model, tmp_path)
    assert {cache.dtype for cache in open_(model).caches} == {"int8"}


@pytest.mark.parametrize("logits", ["all", "last"])
@pytest.mark.parametrize("rows", [None, [-1], [0], [2, 0], [0, 1, 2, 3]])
def test_a_session_gives_the_rows_that_are_asked_for(logits: str, rows: list[int] | None) -> None:
    model = lowered()
    before = open_(model)
    GenaiInterface(logits=logits).run(model, graphs.CPU)  # type: ignore[arg-type]
    after = open_(model)
    wanted = None if rows is None else np.array(rows)
    ids, none = np.array([[5, 6, 7, 8], [9, 1, 2, 3]]), np.zeros(2, np.int32)
    caches = before.allocate(2, 8), after.allocate(2, 8)
    answers = [s.step(ids, none, c, wanted) for s, c in zip((before, after), caches, strict=True)]
    assert answers[0].tobytes() == answers[1].tobytes()
    assert answers[0].shape == (2, len(rows or [0]), 96)
    # Row 0 ended: it runs on as a row of one token, as the runner does it.
    steps = [s.step(ids[:, :1], np.array([0, 4], np.int32), c) for s, c in zip((before, after), caches, strict=True)]
    assert steps[0].tobytes() == steps[1].tobytes()


def test_a_mask_of_a_ragged_batch_counts_each_row() -> None:
    fed = interface.feeds([interface.ATTENTION_MASK], np.zeros((3, 2), np.int64), np.array([3, 0, 1], np.int32))
    assert fed[interface.ATTENTION_MASK].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    assert fed[interface.ATTENTION_MASK].dtype == np.int64


def test_cache_lengths_are_what_the_mask_says() -> None:
    model = graphs.parse(
        '<ir_version: 11, opset_import: ["" : 24, "llmforge" : 1]>\n'
        "lengths (int64[batch, total] attention_mask) => (int32[batch] seqlens_k, int32 total_sequence_length)\n"
        '{\n["lengths"] seqlens_k, total_sequence_length = llmforge.CacheLengths (attention_mask)\n}',
        {},
    )
    session = onnxruntime.InferenceSession(
        ir.to_proto(dialect.expand(model)).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    lengths, total = session.run(None, {"attention_mask": np.array([[1, 1, 1, 0, 1], [1, 0, 0, 0, 0]])})
    assert (lengths.tolist(), lengths.dtype) == ([3, 0], np.int32)
    assert (total.tolist(), total.dtype) == (5, np.int32)


def test_other_attention_is_refused_by_name() -> None:
    model = lowered(graphs.Llama(head_dim=12))
    with pytest.raises(UnsupportedError, match="node l0_attention, Attention, was not lowered") as caught:
        GenaiInterface().run(model, graphs.CPU)
    assert "report of flash-attention" in str(caught.value.hint)


def test_state_of_another_kind_is_refused_by_name() -> None:
    model = lowered()
    state = ir.Value(name="state.0", shape=ir.Shape(["batch", 4]), type=ir.TensorType(ir.DataType.FLOAT))
    model.graph.inputs.append(state)
    with pytest.raises(UnsupportedError, match=r"has the input state\.0; onnxruntime-genai feeds"):
        GenaiInterface().run(model, graphs.CPU)


def test_without_flash_attention_it_is_refused() -> None:
    model = graphs.llama()
    for node in graphs.find(model, "Attention"):
        node.op_type, node.domain = "PagedAttention", "com.microsoft"
    with pytest.raises(UnsupportedError, match="the graph has no GroupQueryAttention"):
        GenaiInterface().run(model, graphs.CPU)


def test_rows_that_something_else_selects_are_refused() -> None:
    model = lowered()
    selection = next(node for node in model.graph if node.name == "selected_node")
    selection.attributes["axis"] = ir.AttrInt64("axis", 0)
    with pytest.raises(UnsupportedError, match=r"logits_rows is read by selected_node \(Gather\)"):
        GenaiInterface().run(model, graphs.CPU)


def test_another_default_than_the_last_row_is_refused() -> None:
    model = lowered()
    model.graph.initializers["logits_rows"].const_value = ir.Tensor(np.array([0]), name="logits_rows")
    with pytest.raises(UnsupportedError, match=r"default of logits_rows is not \[-1\]"):
        GenaiInterface(logits="last").run(model, graphs.CPU)


def test_target_without_onnxruntime_is_refused() -> None:
    target = graphs.CPU.target.model_copy(update={"engines": ("tensorrt",)})
    with pytest.raises(UnsupportedError, match="onnxruntime-genai runs ONNX Runtime's engines"):
        GenaiInterface().run(lowered(), replace(graphs.CPU, target=target))


@pytest.mark.parametrize("first", [PackQkv(), GenaiInterface()])
def test_order_with_other_passes_does_not_matter(first: Pass, tmp_path: Path) -> None:
    model = lowered()
    steps: list[Pass] = [first, GenaiInterface() if isinstance(first, PackQkv) else PackQkv()]
    for step in steps:
        changes, _ = graphs.prove(step, model, tmp_path)
        assert isinstance(changes, Changes)
        assert changes
    assert inputs(model).keys() == {"input_ids", "attention_mask"}
