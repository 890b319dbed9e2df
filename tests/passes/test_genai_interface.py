"""genai-interface: lengths that follow from a mask, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from llmforge.backends.onnxruntime.session import Session
from llmforge.base.errors import UnsupportedError
from llmforge.ir import dialect, graph, interface
from llmforge.passes import FlashAttention, GenaiInterface, PackQkv, QuantizeKvCache
from llmforge.quantization.statistics import KvRange, Statistics
from llmforge.rewrite.pass_base import Budget, Changes, Context, Pass
from llmforge.runtime.interface import StepInputs, feeds
from llmforge.verification.probe import InitializerArrays, open_session

from ..models import graphs

LENGTHS = "seqlens_k, total_sequence_length"


def lowered(spec: graphs.Llama | None = None) -> ir.Model:
    model = graphs.llama(spec)
    FlashAttention().run(model, graphs.CPU)
    return model


def open_(model: ir.Model) -> Session:
    return open_session(model, InitializerArrays(), 1)


def standard(model: ir.Model) -> onnxruntime.InferenceSession:
    """Open `model` as a runtime of others does."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # fatal
    serialized = ir.to_proto(dialect.expand(model)).SerializeToString()
    return onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])


def inputs(model: ir.Model) -> dict[str, tuple[int | str | None, ...] | None]:
    values = {str(value.name): graph.dims(value) for value in model.graph.inputs}
    return {name: dims for name, dims in values.items() if not name.startswith("past_key_values.")}


def test_lengths_follow_from_the_mask(tmp_path: Path) -> None:
    model = lowered(graphs.Llama(layers=1))
    changes, verification = graphs.prove(GenaiInterface(), model, tmp_path)
    assert verification.largest_difference == 0.0
    assert graphs.lines(model, ["CacheLengths", "TokenOrder", "GatherElements", "GatherND", "GroupQueryAttention"]) == [
        "token_order, token_order.back = TokenOrder(attention_mask, input_ids)",
        "input_ids.ordered = GatherElements(input_ids, token_order)",
        f"{LENGTHS} = CacheLengths(attention_mask)",
        "l0_attended, present.0.key, present.0.value = GroupQueryAttention("
        f"l0_q, l0_k, l0_v, past_key_values.0.key, past_key_values.0.value, {LENGTHS}, cos, sin)",
        "tokens = GatherND(normed, token_places)",
    ]
    assert [(change.node, change.what) for change in changes.rewritten] == [
        ("cache_lengths", "seqlens_k and total_sequence_length computed from attention_mask"),
        ("token_order", "padded rows aligned to the left"),
        ("selected_node", "logits of every token"),
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
    assert graphs.lines(model, ["RowPlaces", "GatherND"]) == [
        "row_places = RowPlaces(logits_rows, attention_mask, input_ids)",
        "selected = GatherND(normed, token_places)",
    ]


def padded(rows: list[list[int]], side: str, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pad `rows` to `width` as a runtime of others does; return ids and mask [batch, width]."""
    ids, mask = np.zeros((2, len(rows), width), np.int64)
    for b, row in enumerate(rows):
        real = slice(width - len(row), None) if side == "left" else slice(len(row))
        ids[b, real], mask[b, real] = row, 1
    return ids, mask


@pytest.mark.parametrize("logits", ["all", "last"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("spec", [graphs.Llama(), graphs.Llama(head_dim=8)], ids=["folded", "position_ids"])
def test_a_batch_may_be_padded_on_either_side(spec: graphs.Llama, side: str, logits: str) -> None:
    """A ragged prompt and a decode step over caches that grow, as transformers feeds them, beside each row alone."""
    model = lowered(spec)
    before = open_(model)
    GenaiInterface(logits=logits).run(model, graphs.CPU)  # type: ignore[arg-type]
    session = standard(model)
    names = [value.name for value in session.get_inputs()]
    rows = [[5, 6, 7, 8, 9], [9, 1], [3, 4, 8]]
    ids, mask = padded(rows, side, 5)
    past = {name: np.zeros((3, 2, 0, spec.head_dim), np.float32) for name in names if name.startswith("past")}
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0), **past}
    first, *presents = session.run(None, {name: feeds[name] for name in names})
    mask = np.concatenate([mask, np.ones((3, 1), np.int64)], 1)
    feeds = {"input_ids": np.array([[11], [12], [13]]), "attention_mask": mask}
    feeds |= {"position_ids": np.array([[5], [2], [3]]), **dict(zip(past, presents, strict=True))}
    second, *_ = session.run(None, {name: feeds[name] for name in names})
    for b, row in enumerate(rows):
        cache = before.allocate(1, 8)
        alone = before.step(StepInputs(np.array([row]), np.zeros(1, np.int32), np.arange(len(row))), cache)[0]
        got = first[b, mask[b, :5] == 1] if logits == "all" else first[b]
        np.testing.assert_allclose(got, alone if logits == "all" else alone[-1:], rtol=0, atol=1e-5)
        then = before.step(StepInputs(np.array([[11 + b]]), np.array([len(row)], np.int32)), cache)[0]
        np.testing.assert_allclose(second[b], then, rtol=0, atol=1e-5)


def test_a_continuation_of_a_row_that_was_padded_on_the_left() -> None:
    """The mask still begins with padding, and the step has none."""
    model = lowered()
    before = open_(model)
    GenaiInterface(logits="last").run(model, graphs.CPU)
    session = standard(model)
    names = [value.name for value in session.get_inputs() if value.name.startswith("past")]
    past = {name: np.zeros((1, 2, 0, 16), np.float32) for name in names}
    ids, mask = padded([[5, 6, 7]], "left", 5)
    _, *presents = session.run(None, {"input_ids": ids, "attention_mask": mask, **past})
    feeds = {"input_ids": np.array([[8, 9, 10]]), "attention_mask": np.array([[0, 0, 1, 1, 1, 1, 1, 1]])}
    logits, *_ = session.run(None, {**feeds, **dict(zip(names, presents, strict=True))})
    alone = before.step(StepInputs(np.array([[5, 6, 7, 8, 9, 10]]), np.zeros(1, np.int32)), before.allocate(1, 8))
    np.testing.assert_allclose(logits, alone, rtol=0, atol=1e-5)


def test_a_row_of_padding_alone_ends_with_an_error_and_not_with_the_process() -> None:
    model = lowered()
    GenaiInterface(logits="last").run(model, graphs.CPU)
    session = standard(model)
    names = [value.name for value in session.get_inputs() if value.name.startswith("past")]
    past = {name: np.zeros((2, 2, 0, 16), np.float32) for name in names}
    ids, mask = padded([[5, 6], []], "right", 2)
    with pytest.raises(ort_errors.InvalidArgument, match="seqlens_k"):
        session.run(None, {"input_ids": ids, "attention_mask": mask, **past})


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
    assert verification.largest_difference == 0.0
    assert ("position_ids" in inputs(model)) == (spec.head_dim == 8)


def test_caches_of_int8_keep_every_bit(tmp_path: Path) -> None:
    model = lowered()
    peaks = {layer: KvRange(np.full((2, 16), 9.0, np.float32), np.full((2, 16), 9.0, np.float32)) for layer in (0, 1)}
    context = Context(graphs.TARGET, Statistics(samples=1, tokens=1, linears={}, kv=peaks))
    assert QuantizeKvCache(budget=Budget(kld_mean=1.0)).run(model, context)
    graphs.prove(GenaiInterface(), model, tmp_path)
    assert {cache.dtype for cache in open_(model).signature.caches} == {"int8"}


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
    answers = [s.step(StepInputs(ids, none, wanted), c) for s, c in zip((before, after), caches, strict=True)]
    assert answers[0].tobytes() == answers[1].tobytes()
    assert answers[0].shape == (2, len(rows or [0]), 96)
    # Row 0 ended: it runs on as a row of one token, as the runner does it.
    steps = [
        s.step(StepInputs(ids[:, :1], np.array([0, 4], np.int32)), c)
        for s, c in zip((before, after), caches, strict=True)
    ]
    assert steps[0].tobytes() == steps[1].tobytes()


def test_a_mask_of_a_ragged_batch_counts_each_row() -> None:
    fed = feeds([interface.ATTENTION_MASK], StepInputs(np.zeros((3, 2), np.int64), np.array([3, 0, 1], np.int32)))
    assert fed[interface.ATTENTION_MASK].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    assert fed[interface.ATTENTION_MASK].dtype == np.int64


def test_cache_lengths_are_what_the_mask_says() -> None:
    model = graphs.parse(
        '<ir_version: 11, opset_import: ["" : 24, "llmforge" : 1]>\n'
        "lengths (int64[batch, total] attention_mask) => (int32[batch] seqlens_k, int32 total_sequence_length)\n"
        '{\n["lengths"] seqlens_k, total_sequence_length = llmforge.CacheLengths (attention_mask)\n}',
        {},
    )
    session = standard(model)
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
    target = graphs.TARGET.model_copy(update={"engines": ("tensorrt",)})
    with pytest.raises(UnsupportedError, match="onnxruntime-genai runs ONNX Runtime's engines"):
        GenaiInterface().run(lowered(), Context(target))


@pytest.mark.parametrize("first", [PackQkv(), GenaiInterface()])
def test_order_with_other_passes_does_not_matter(first: Pass, tmp_path: Path) -> None:
    model = lowered()
    steps: list[Pass] = [first, GenaiInterface() if isinstance(first, PackQkv) else PackQkv()]
    for step in steps:
        changes, _ = graphs.prove(step, model, tmp_path)
        assert isinstance(changes, Changes)
        assert changes
    assert inputs(model).keys() == {"input_ids", "attention_mask"}
