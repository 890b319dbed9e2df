"""The ONNX Runtime engine: what is lowered, what is refused, and the bytes that are written."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from llmforge import targets
from llmforge.backends.engines import BuildRequest, BuiltEngine
from llmforge.backends.onnxruntime import builder as engine
from llmforge.backends.onnxruntime.session import Session
from llmforge.base.errors import UnsupportedError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import onnx_file
from llmforge.recipe import EngineSpec
from llmforge.runtime.config import SessionConfig
from llmforge.runtime.interface import StepInputs

from ...models.decoder_graph import HIDDEN, decoder

CPU = targets.local()
SPEC = EngineSpec(max_context=64, max_batch=3, threads=1)


def build(model: ir.Model, folder: Path, spec: EngineSpec = SPEC, **options) -> BuiltEngine:
    return engine.build(BuildRequest(model, folder, spec, CPU, (3, 5), 1, **options))


def last_logits(session: Session) -> np.ndarray:
    ids = np.array([[7, 1, 9, 4]])
    return session.step(StepInputs(ids, np.zeros(1, np.int32)), session.allocate(1, 16))


def node_ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def test_a_tied_head_reads_the_embedding_itself(tmp_path):
    model = decoder(vocabulary=400, tied_head=True)
    before = Session(ir.to_proto(model).SerializeToString(), SessionConfig(1, optimize=False))
    lowered, changes = engine.lower(model, CPU)
    assert [change.what for change in changes.rewritten] == ["MatMul and Transpose of embedding fused into FusedMatMul"]
    assert "Transpose" in node_ops(model)  # the given model is left alone
    assert "Transpose" not in node_ops(lowered)
    assert node_ops(lowered)[-1] == "FusedMatMul"
    built = build(lowered, tmp_path)
    np.testing.assert_allclose(
        last_logits(Session(tmp_path / "model.onnx", SessionConfig(1))), last_logits(before), atol=1e-5
    )
    weights = sum(value.const_value.nbytes for value in model.graph.initializers.values())
    assert weights / 3 < 400 * HIDDEN * 4
    assert built.size_bytes < weights + 8000  # the embedding once


def test_a_lowered_graph_is_lowered_already():
    lowered, _ = engine.lower(decoder(tied_head=True), CPU)
    again, changes = engine.lower(lowered, CPU)
    assert not changes
    assert node_ops(again) == node_ops(lowered)


def test_an_operator_without_a_kernel_is_refused_by_name():
    model = decoder()
    node = next(node for node in model.graph if node.op_type == "Tanh")
    node.op_type, node.domain = "PagedAttention", "com.microsoft"  # CUDA only
    with pytest.raises(
        UnsupportedError, match=rf"no CPU kernel for com\.microsoft::PagedAttention \(opset 1\), node {node.name}"
    ):
        engine.check_operators(model)
    node.op_type, node.domain = "Tahn", ""
    with pytest.raises(UnsupportedError, match=r"no CPU kernel for ai\.onnx::Tahn \(opset 24\)"):
        engine.lower(model, CPU)


def test_an_operator_that_decomposes_is_accepted(tmp_path):
    model = decoder()
    next(node for node in model.graph if node.op_type == "Tanh").op_type = "Swish"  # no kernel in ONNX Runtime
    build(model, tmp_path)
    assert "Swish" in node_ops(ir.load(tmp_path / "model.onnx"))
    other = last_logits(Session(tmp_path / "model.onnx", SessionConfig(1)))
    build(decoder(), tmp_path / "tanh")
    assert not np.array_equal(other, last_logits(Session(tmp_path / "tanh" / "model.onnx", SessionConfig(1))))


def test_a_gpu_is_refused():
    with pytest.raises(UnsupportedError, match="target l4 is a gpu; this engine runs on CPUs"):
        engine.lower(decoder(), targets.load("l4"))


def test_two_builds_write_the_same_bytes_and_nothing_of_where_or_how(tmp_path):
    first, second = decoder(), decoder()
    second.producer_name, second.doc_string = "torch", "made today"
    second.metadata_props["host"] = "build-machine"
    for node in second.graph:
        node.metadata_props["pkg.torch.onnx.stack_trace"] = "/home/someone/model.py"
    next(iter(second.graph.initializers.values())).metadata_props["llmforge.sources"] = "[]"
    build(first, tmp_path / "a")
    build(second, tmp_path / "elsewhere" / "b")
    for name in ("model.onnx", "model.onnx.data", "runtime.json"):
        content = (tmp_path / "a" / name).read_bytes()
        assert content == (tmp_path / "elsewhere" / "b" / name).read_bytes()
        assert str(tmp_path).encode() not in content
    assert (second.producer_name, len(second.graph[0].metadata_props)) == ("torch", 1)  # the model keeps its own


def test_large_tensors_lie_aligned_in_the_order_of_their_names_and_small_ones_in_the_model(tmp_path):
    model = decoder(vocabulary=6000)
    build(model, tmp_path)
    written = {
        tensor.name: tensor for tensor in onnx.load(tmp_path / "model.onnx", load_external_data=False).graph.initializer
    }
    external = {name: tensor for name, tensor in written.items() if tensor.external_data}
    assert written.keys() - external.keys() == {"logits_rows"}
    places = {name: {entry.key: entry.value for entry in tensor.external_data} for name, tensor in external.items()}
    assert {place["location"] for place in places.values()} == {"model.onnx.data"}
    offsets = {name: int(place["offset"]) for name, place in places.items()}
    assert sorted(offsets, key=offsets.__getitem__) == sorted(offsets)
    assert all(offset % 64 == 0 for offset in offsets.values())
    assert offsets["embedding"] % 4096 == offsets["head"] % 4096 == 0  # 6000 · 48 · 4 bytes
    data = (tmp_path / "model.onnx.data").read_bytes()
    for name, place in places.items():
        expected = model.graph.initializers[name].const_value.tobytes()
        assert data[offsets[name] : offsets[name] + int(place["length"])] == expected


def test_small_tensors_of_the_checkpoint_are_written_into_the_model(tmp_path, monkeypatch):
    """They are ranges of a file elsewhere, whose path must not get into the artifact."""
    monkeypatch.setattr(onnx_file, "INLINE_BELOW_BYTES", 1 << 20)
    model = decoder()
    cos = model.graph.initializers["cos"]
    held, file = cos.const_value.numpy(), tmp_path / "model.safetensors"
    file.write_bytes(held.tobytes())
    cos.const_value = ir.ExternalTensor(str(file), 0, held.nbytes, cos.dtype, shape=cos.shape, name="cos", base_dir="")
    build(model, tmp_path / "engine")
    assert str(file).encode() not in (tmp_path / "engine" / "model.onnx").read_bytes()
    file.unlink()
    assert np.isfinite(last_logits(Session(tmp_path / "engine" / "model.onnx", SessionConfig(1)))).all()


def test_runtime_json_says_how_to_run(tmp_path):
    built = build(decoder(int8_cache=True), tmp_path)
    data = json.loads((tmp_path / "runtime.json").read_text())
    assert data["format"] == 3
    assert data["kernels"] is None
    assert data["onnxruntime"] == onnxruntime.__version__
    assert (data["max_context"], data["max_batch"], data["vocabulary"]) == (64, 3, 97)
    assert (data["eos_token_ids"], data["bos_token_id"]) == ([3, 5], 1)
    assert data["caches"][1] == {"name": "past_key_values.0.value", "dtype": "int8", "kv_heads": 2, "head_dim": 16}
    assert data["session"]["threads"] == 1
    assert data["session"]["optimize"] is True
    assert data["session"]["entries"]["session.intra_op.allow_spinning"] == "1"
    assert built.nodes == len(decoder().graph)
    assert built.size_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def stage(self, title: str) -> None:
        raise AssertionError(title)

    def advance(self, done: int, total: int) -> None:
        self.seen.append((done, total))


def lazy_chain(tensors: int, width: int) -> ir.Model:
    """A decoder whose hidden states pass through many large matrices that exist only while they are written."""
    model = decoder()
    node = next(node for node in model.graph if node.op_type == "Tanh")
    for i in range(tensors):
        name = f"lazy.{i:02}"
        rows = np.eye(HIDDEN, width, dtype=np.float32)

        def evaluate(rows: np.ndarray = rows, name: str = name) -> ir.Tensor:
            return ir.Tensor(rows + 0, name=name)

        shape = ir.Shape([HIDDEN, width])
        tensor = ir.LazyTensor(evaluate, dtype=ir.DataType.FLOAT, shape=shape, name=name)
        weight = ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.FLOAT), const_value=tensor)
        model.graph.register_initializer(weight)
        wide = ir.node("MatMul", [node.inputs[0], weight])
        back = ir.node("MatMul", [wide.outputs[0], weight], {"transB": 1}, domain="com.microsoft")
        back.op_type = "FusedMatMul"
        model.graph.insert_before(node, [wide, back])
        node.replace_input_with(0, back.outputs[0])
        rows.setflags(write=False)
    return model


def test_writing_holds_one_tensor_at_a_time(tmp_path):
    width, tensors = 20_000, 12
    model = lazy_chain(tensors, width)
    progress = Recorder()
    tracemalloc.start()
    build(model, tmp_path, progress=progress)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    one = HIDDEN * width * 4
    assert peak < 2 * one
    assert (tmp_path / "model.onnx.data").stat().st_size > tensors * one
    assert progress.seen[-1][0] == progress.seen[-1][1] > tensors * one
    assert progress.seen == sorted(progress.seen)
    assert len(progress.seen) > tensors


def test_a_tensor_that_is_not_what_it_declares_is_refused(tmp_path):
    model = decoder()
    head = model.graph.initializers["head"]
    wrong = ir.Tensor(np.zeros((HIDDEN, 96), np.float32))
    head.const_value = ir.LazyTensor(lambda: wrong, dtype=ir.DataType.FLOAT, shape=ir.Shape([HIDDEN, 97]), name="head")
    with pytest.raises(VerificationError, match=r"initializer head declares FLOAT \[48,97\] and wrote 18432 bytes"):
        build(model, tmp_path)


def test_logits_that_are_not_finite_fail_the_build(tmp_path):
    model = decoder()
    head = model.graph.initializers["head"].const_value.numpy().copy()
    head[3, 4] = np.nan
    model.graph.initializers["head"].const_value = ir.tensor(head, name="head")
    with pytest.raises(VerificationError, match="NaN or infinite logits"):
        build(model, tmp_path)


def test_a_context_beyond_the_rotary_tables_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match=r"max_context is 64; the rotary table cos of node \S+ has 63 positions"):
        build(decoder(capacity=63), tmp_path)
    assert not list(tmp_path.iterdir())


def test_tokenizer_files_are_copied_as_content(tmp_path, sample_checkpoint):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in sample_checkpoint.iterdir():
        (snapshot / path.name).symlink_to(path.resolve())
    engine.write_tokenizer(Checkpoint.open(snapshot), tmp_path / "tokenizer")
    written = sorted((tmp_path / "tokenizer").iterdir())
    assert [path.name for path in written] == [
        "chat_template.jinja",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for path in written:
        assert not path.is_symlink()
        assert path.read_bytes() == (sample_checkpoint / path.name).read_bytes()
