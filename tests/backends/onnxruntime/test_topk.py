"""The largest logits of rows: the kernels that the wheel takes for them, and that slices change no bit of them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from llmforge import targets
from llmforge.backends.onnxruntime.cuda import topk
from llmforge.ir.graph import nodes
from llmforge.ir.interface import HEAD
from llmforge.recipe import EngineSpec
from llmforge.rewrite.next_ids import feed_back
from llmforge.rewrite.topk_outputs import add_topk_outputs

from ...models.decoder_graph import decoder

GPUS = [
    name
    for name in targets.built_in()
    if (target := targets.load(name)).kind == "gpu" and "onnxruntime" in target.engines
]
VOCABULARIES = (32_000, 128_256, 151_936, 262_144)
# Rows of each of VOCABULARIES whose largest are taken at once, on a device of every SM; the slow tests ask the wheel.
AT_ONCE = {
    "t4": (40, 17, 17, 8),
    "a100-80": (432, 92, 92, 43),
    "a10g": (240, 57, 57, 26),
    "l4": (174, 41, 41, 19),
    "h100-sxm": (660, 113, 113, 52),
    "rtx-5090": (510, 121, 121, 56),
}
CUDA_PAGE = Path(__file__).parents[3] / "docs" / "cuda.md"


def test_a_device_of_every_sm_holds_so_many_rows_of_one_topk_at_once() -> None:
    assert {int(targets.load(name).require_gpu().sm) for name in AT_ONCE} == set(topk._MULTIPROCESSORS)
    for name, wanted in AT_ONCE.items():
        gpu = targets.load(name).require_gpu()
        assert tuple(topk.rows_at_once(each, int(gpu.sm), gpu.multiprocessors) for each in VOCABULARIES) == wanted


def test_the_docs_say_how_many_rows_are_taken_at_once() -> None:
    page = CUDA_PAGE.read_text(encoding="utf-8")
    for title, name in (("H100 SXM, H200", "h100-sxm"), ("A100", "a100-80"), ("L4", "l4"), ("T4", "t4")):
        small, large, same, largest = AT_ONCE[name]
        assert large == same
        assert f"| {title} | {small} | {large} | {largest} |" in page
    h200 = targets.load("h200").require_gpu()
    assert [topk.rows_at_once(each, 90, h200.multiprocessors) for each in VOCABULARIES] == [*AT_ONCE["h100-sxm"]]


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_no_bucket_leaves_the_fast_kernel(name: str, vocabulary: int) -> None:
    """Of up to 256 rows; also where a target does not say how many multiprocessors it has."""
    gpu = targets.load(name).require_gpu()
    for most in (1, 8, 16, 64, 128, 256):
        for processors in (gpu.multiprocessors, 0):
            starts = topk.slices(most, vocabulary, int(gpu.sm), processors)
            ends = [0, *starts, most]
            widest = max(np.diff(ends))
            assert 0 < widest <= topk.rows_at_once(vocabulary, int(gpu.sm), gpu.multiprocessors)
            if processors:
                assert len(starts) < -(-most // AT_ONCE["t4"][VOCABULARIES.index(vocabulary)])


def test_all_rows_are_taken_at_once_where_that_is_fast() -> None:
    assert topk.slices(64, 128_256, 90, 132) == ()
    assert topk.slices(256, 128_256, 90, 132) == (113, 226)
    assert topk.slices(256, 8_000, 90, 132) == ()  # one block a row, whatever is sliced
    assert topk.slices(10_000, 8_191, 90, 132) == () != topk.slices(10_000, 8_192, 90, 132)
    assert topk.rows_at_once(256 * 3328 + 1, 90, 132) == 0  # more partitions than any kernel merges
    assert topk.slices(256, 256 * 3328 + 1, 90, 132) == ()
    assert topk.rows_at_once(256 * 3328, 90, 132) > 0


def test_a_lowered_graph_takes_the_largest_in_slices_where_its_target_wants_them() -> None:
    from .test_cuda import FORM, lower, prepared

    form = dataclasses.replace(FORM, vocabulary=16_384)
    for most, count in ((16, 1), (2048, 2)):
        lowered, changes = lower(prepared(form=form), EngineSpec(max_context=64, max_batch=most, kv_cache="slots"))
        assert sum(node.op_type == "TopK" for node in lowered.graph) == count
        assert any("2 slices of rows" in each.what for each in changes.rewritten) is (count == 2)


@pytest.mark.parametrize(("kv_cache", "dims"), [("slots", 2), ("paged", 1)])
def test_rows_of_a_step_over_slots_choose_their_own_logits(kv_cache: str, dims: int) -> None:
    """So that prompts of several sequences are one step; over blocks all tokens are one row."""
    from .test_cuda import lower, prepared

    lowered, _ = lower(prepared(), EngineSpec(max_context=64, max_batch=2, kv_cache=kv_cache))
    [rows] = [value for value in lowered.graph.inputs if value.name == "logits_rows"]
    assert rows.shape is not None
    assert len(rows.shape) == dims


def graph(vocabulary: int, slices: tuple[int, ...]) -> ort.InferenceSession:
    """Give the largest of `logits` [batch, rows, vocabulary]."""
    logits = ir.Value(name="in", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", "rows", vocabulary]))
    node = ir.Node("", "Identity", [logits], name="identity")
    [given] = node.outputs
    given.name, given.type, given.shape = "logits", logits.type, logits.shape
    model = ir.Model(ir.Graph([logits], [given], nodes=[node], opset_imports={"": 21}), ir_version=10)
    add_topk_outputs(model, slices)
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("slices", [(), (1,), (3, 6), (7,), (2, 9)], ids=str)
def test_slices_give_the_bits_of_numpys_top_k(slices: tuple[int, ...]) -> None:
    """With ties at every border, rows of few numbers, and rows of -inf; empty slices, and rows behind the last."""
    vocabulary = 3_001
    random = np.random.default_rng(vocabulary)
    rows = 3 * random.standard_normal((7, vocabulary)).astype(np.float32)
    rows[1] = np.round(rows[1])
    rows[2] = 2.5
    rows[3, : vocabulary - 5] = -np.inf
    rows[4] = -np.inf
    rows[5] = np.sort(rows[5])
    order = np.argsort(-rows, axis=1, kind="stable")[:, :HEAD]
    names = ["top_logits", "top_ids", "masses"]
    feeds = {"in": rows[:, None], "temperatures": np.full(7, 0.7, np.float32)}
    top, ids, masses = graph(vocabulary, slices).run(names, feeds)
    assert ids.tobytes() == order.astype(np.int32).tobytes()
    assert top.tobytes() == np.take_along_axis(rows, order, 1).tobytes()
    assert masses.tobytes() == graph(vocabulary, ()).run(names, feeds)[2].tobytes()


def test_heads_pass_over_each_logit_as_often_as_is_said() -> None:
    """In bytes an id, of fp32 logits, as docs/cuda.md counts; the cast from 16 bits is not in this graph."""
    vocabulary = 128_256
    logits = ir.Value(name="logits", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 1, vocabulary]))
    node = ir.Node("", "Identity", [logits], name="identity")
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "given", logits.type, logits.shape
    logits.name, node.outputs[0].name = "in", "logits"
    model = ir.Model(ir.Graph([logits], [node.outputs[0]], nodes=[node], opset_imports={"": 21}), ir_version=10)
    add_topk_outputs(model)
    counted = {}
    for made in list(model.graph)[1:]:
        values = {id(value): value for value in (*made.inputs, *made.outputs) if value is not None}.values()
        wide = [
            value
            for value in values
            if value.shape is not None and math.prod(dim for dim in value.shape if isinstance(dim, int)) >= vocabulary
        ]
        counted[made.op_type] = counted.get(made.op_type, 0) + sum(int(value.dtype.itemsize) for value in wide)
    moved = {
        op: size for op, size in counted.items() if size and op not in ("Gather", "Reshape")
    }  # of one row each, and views
    assert moved == {"TopK": 4, "Sub": 8, "Div": 8, "Exp": 8, "Greater": 5, "Where": 9, "ReduceSum": 4}
    assert 6 + sum(moved.values()) == 52
    said = CUDA_PAGE.read_text(encoding="utf-8")
    assert (
        "52 bytes an id (cast 6, TopK 4, the difference to the largest, its division and exp 8 each, comparison 5,"
        in said
    )


def test_the_docs_count_the_nodes_of_a_guess() -> None:
    model = decoder(8192)
    add_topk_outputs(model)
    before = nodes(model)
    feed_back(model)
    page = CUDA_PAGE.read_text(encoding="utf-8")
    assert f"The guess is {nodes(model) - before} small nodes" in page
