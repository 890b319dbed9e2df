"""The builder of plans: what it asserts, what it refuses, what it reuses, and that it is deterministic."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest

from llmforge.backends import onnx_file
from llmforge.backends.tensorrt import compile_plan, layers, library, plan_cache, profiles
from llmforge.backends.tensorrt.compile_plan import BuildLog
from llmforge.backends.tensorrt.plan_cache import PlanCache, PlanRecord, PlanSource
from llmforge.base.errors import InputError, UnsupportedError, VerificationError
from llmforge.base.progress import Silent
from llmforge.ir import interface
from llmforge.recipe import EngineSpec
from llmforge.runtime.config import DATA_FILE, MODEL_FILE, ProfileFacts

from ...fakes import tensorrt_graphs

pytest.importorskip("tensorrt_rtx")

RTX = library.of_backend("tensorrt-rtx")


def written(model: ir.Model, folder: Path) -> Path:
    onnx_file.write(model, folder, Silent())
    return folder / MODEL_FILE


def build(model: ir.Model, folder: Path, sm: str = "89", name: str = "a.plan") -> compile_plan.CompiledPlan:
    return compile_plan.build(RTX, written(model, folder), model, folder / name, sm=sm, profiles=())


@pytest.mark.parametrize("make", [tensorrt_graphs.attention, partial(tensorrt_graphs.product, tensorrt_graphs.F16)])
def test_two_builds_give_the_same_bytes(make: Callable[[], ir.Model], tmp_path: Path) -> None:
    """With one output: TensorRT-RTX 1.7.1 lists several of them now in one order, now in another."""
    for name in ("a.plan", "b.plan"):
        build(make(), tmp_path, name=name)
    assert (tmp_path / "a.plan").read_bytes() == (tmp_path / "b.plan").read_bytes()


def test_layers_are_counted_and_held_against_the_graph(tmp_path: Path) -> None:
    model = tensorrt_graphs.attention(updated=True)
    counted = build(model, tmp_path).layers
    assert counted["ATTENTION_INPUT"] == counted["ATTENTION_OUTPUT"] == 1
    assert counted["KV_CACHE_UPDATE"] == 2
    assert "SOFTMAX" not in counted
    with pytest.raises(VerificationError, match="1 nodes Attention, but TensorRT's network 0 layers ATTENTION_INPUT"):
        layers.check({**counted, "ATTENTION_INPUT": 0}, [], model)
    with pytest.raises(VerificationError, match="0 nodes Softmax, but TensorRT's network 1 layers SOFTMAX"):
        layers.check({**counted, "SOFTMAX": 1}, [], model)
    with pytest.raises(VerificationError, match="would not prove a fused kernel"):
        layers.check(counted, ["attention"], model)


def test_quantized_weights_reach_the_builder_quantized(tmp_path: Path) -> None:
    assert build(tensorrt_graphs.GRAPHS["int4 weights, blocks of 128"][0](), tmp_path).layers["DEQUANTIZE"] == 1


def test_an_input_that_the_parser_drops_ends_the_build(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="Unused Input: lengths") as caught:
        build(tensorrt_graphs.attention(masked=False, lengths=True), tmp_path)
    assert caught.value.exit_code == 7


def test_a_node_that_the_parser_rejects_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"rejects node attention \(Attention\): .*softcap") as caught:
        build(tensorrt_graphs.attention(softcap=30.0), tmp_path)
    assert caught.value.exit_code == 6
    assert caught.value.hint


def test_attention_without_a_fused_kernel_is_refused_in_plain_words(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no fused kernel exists"):
        build(tensorrt_graphs.attention(channels=264), tmp_path)


def test_what_the_device_lacks_is_told_with_the_node(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"cannot build an engine for SM75, node product: .*FP32 GEMM"):
        build(tensorrt_graphs.product(tensorrt_graphs.F32), tmp_path, sm="75")


def test_a_device_that_the_library_has_no_code_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"does not support SM90; supported: .*SM89") as caught:
        build(tensorrt_graphs.product(tensorrt_graphs.F16), tmp_path, sm="90")
    assert "backend: tensorrt" in (caught.value.hint or "")


@pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX")
def test_a_library_that_times_kernels_is_given_its_timings(tmp_path: Path) -> None:
    """TensorRT itself is not available: TensorRT-RTX, whose timing cache does nothing, takes its place."""
    timing = dataclasses.replace(RTX, provider=dataclasses.replace(RTX.provider, needs_device="it times kernels"))
    model = tensorrt_graphs.product(tensorrt_graphs.F16)
    first = compile_plan.build(
        timing, written(model, tmp_path), model, tmp_path / "a.plan", sm="89", profiles=(), timings=b""
    )
    assert first.timings
    again = compile_plan.build(
        timing, tmp_path / MODEL_FILE, model, tmp_path / "b.plan", sm="89", profiles=(), timings=first.timings
    )
    assert again.timings
    other = compile_plan.build(
        timing, tmp_path / MODEL_FILE, model, tmp_path / "c.plan", sm="89", profiles=(), timings=b"of another build"
    )
    assert other.timings  # which was refused, and timed anew
    assert build(model, tmp_path).timings is None


def test_timings_that_the_library_refuses_are_made_anew() -> None:
    class Config:
        set = b""

        def create_timing_cache(self, content: bytes) -> bytes:
            return content or b"new"

        def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
            self.set = cache
            return cache == b"new" and not ignore_mismatch

    timing = dataclasses.replace(RTX, provider=dataclasses.replace(RTX.provider, needs_device="it times kernels"))
    assert compile_plan._timing_cache(timing, Config(), b"of another device") == b"new"

    class Never(Config):
        def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
            return False

    with pytest.raises(UnsupportedError, match="takes no timing cache"):
        compile_plan._timing_cache(timing, Never(), b"")


def test_an_attention_that_drops_the_lengths_of_its_texts_ends_the_build() -> None:
    tensors = {name: SimpleNamespace(name=name) for name in (interface.INPUT_IDS, interface.PAST_LENGTHS)}

    class Layer:  # of the shape, the slice, the casts and the sum
        def __init__(self, *_: object) -> None:
            self.made = SimpleNamespace(name="")

        def get_output(self, _: int) -> SimpleNamespace:
            return self.made

    class Attention:
        name, key_value_lengths = "attention", property(lambda _: None, lambda *_: None)

    class InputLayer:
        type, attention = SimpleNamespace(name="ATTENTION_INPUT"), Attention()

    made = dict.fromkeys(("add_shape", "add_slice", "add_cast", "add_elementwise"), Layer)
    network = SimpleNamespace(
        num_inputs=2, get_input=list(tensors.values()).__getitem__, num_layers=1, get_layer=[InputLayer()].__getitem__,
        **made,
    )  # fmt: skip
    api = SimpleNamespace(IAttentionInputLayer=InputLayer, int32=None, ElementWiseOperation=SimpleNamespace(SUM=None))
    with pytest.raises(VerificationError, match="attention did not keep the lengths"):
        layers.set_lengths(network, api)
    tensors.popitem()
    network.num_inputs = 1
    assert layers.set_lengths(network, api) == 0  # no decoder


def test_warnings_are_kept_but_for_noise() -> None:
    log = BuildLog(
        [
            ("WARNING", "ModelImporter.cpp:1071: Make sure input input_ids has Int64 binding."),
            ("WARNING", "ModelImporter.cpp:9: something new"),
            ("WARNING", "ModelImporter.cpp:9: something new"),
            ("INFO", "quiet"),
            ("ERROR", "IBuilder::buildSerializedNetwork: Error Code 1: it broke"),
        ]
    )
    assert log.warnings == ("something new",)
    assert log.errors == ["it broke"]
    assert log.fatal_warnings == []


def decoder(**dims: object) -> ir.Model:
    """A graph with the inputs of a decoder."""
    rows = {"input_ids": ("batch", "sequence"), "past_lengths": ("batch",), "logits_rows": ("batch", "rows")}
    caches = {"past_key_values.0.key": ("batch", 2, 64, 32)}
    inputs = [
        ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.INT64))
        for name, shape in {**rows, **caches, **dims}.items()  # type: ignore[dict-item]
    ]
    return ir.Model(ir.Graph(inputs, [], nodes=[], opset_imports={"": 24}), ir_version=11)


def test_three_profiles_cover_prefill_decode_and_several_prompts() -> None:
    prefill, decode, prompts = profiles.of(decoder(), EngineSpec(max_context=1024, max_batch=8))
    assert prefill.shapes["input_ids"] == ((1, 1), (1, 512), (1, 512))
    assert prefill.shapes["logits_rows"] == ((1, 1), (1, 1), (1, 256))
    assert prefill.shapes["past_key_values.0.key"] == ((1, 2, 64, 32),) * 3
    assert decode.shapes["input_ids"] == ((1, 1), (8, 1), (8, 1))
    assert decode.shapes["past_lengths"] == ((1,), (8,), (8,))
    assert decode.shapes["past_key_values.0.key"] == ((1, 2, 64, 32), (8, 2, 64, 32), (8, 2, 64, 32))
    assert prompts.shapes["input_ids"] == ((2, 64), (8, 128), (8, 128))
    assert prompts.shapes["logits_rows"] == ((2, 1), (8, 1), (8, 1))
    assert prompts.facts == ProfileFacts("prompts", 8, 128)
    assert (prefill.facts.max_sequence, decode.facts.max_batch, decode.facts.max_sequence) == (512, 8, 1)


def test_a_short_context_bounds_the_prefill() -> None:
    assert len(profiles.of(decoder(), EngineSpec(max_context=64, max_batch=2))) == 3  # 2 rows of 64 tokens just fit
    assert len(profiles.of(decoder(), EngineSpec(max_context=63, max_batch=2))) == 2
    assert len(profiles.of(decoder(), EngineSpec(max_context=64, max_batch=1))) == 2
    prefill, _ = profiles.of(decoder(), EngineSpec(max_context=48))
    assert prefill.shapes["input_ids"][2] == (1, 48)
    assert prefill.shapes["logits_rows"][2] == (1, 48)


def test_prompts_have_no_more_rows_than_the_engine_and_no_more_tokens_than_the_context() -> None:
    *_, prompts = profiles.of(decoder(), EngineSpec(max_context=100, max_batch=6))
    assert prompts.facts == ProfileFacts("prompts", 4, 64)
    assert len(profiles.of(decoder(), EngineSpec(max_context=1024, max_batch=1))) == 2


def test_a_dimension_of_unknown_size_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="input extra has the dimension 'more'"):
        profiles.of(decoder(extra=("batch", "more")), EngineSpec(max_context=64))


def record(folder: Path, *, sm: str = "89", content: bytes = b"plan") -> tuple[PlanRecord, Path]:
    plan = folder / f"{sm}.plan"
    plan.write_bytes(content)
    source = PlanSource(
        "tensorrt_rtx", "1.7.1", sm, "NVIDIA L4", ("-TF32",), {"decode": {"x": ((1,), (2,), (2,))}}, "ab" * 32
    )
    made = PlanRecord(
        format=plan_cache.FORMAT,
        key=source.key,
        source=source,
        layers={"ATTENTION_INPUT": 1},
        warnings=(),
        sha256=plan_cache.file_digest(plan),
        size_bytes=len(content),
    )
    return made, plan


def variants(source: PlanSource) -> Iterator[PlanSource]:
    """Change one thing at a time."""
    yield dataclasses.replace(source, module="tensorrt")
    yield dataclasses.replace(source, version="1.7.2")
    yield dataclasses.replace(source, sm="86")
    yield dataclasses.replace(source, device="NVIDIA L40S")
    yield dataclasses.replace(source, flags=())
    yield dataclasses.replace(source, profiles={"decode": {"x": ((1,), (2,), (4,))}})
    yield dataclasses.replace(source, onnx_sha256="cd" * 32)


def test_a_key_changes_with_everything_that_decides_a_plan(tmp_path: Path) -> None:
    made, _ = record(tmp_path)
    keys = {source.key for source in variants(made.source)}
    assert len(keys) == 7
    assert made.key not in keys


def test_a_record_is_read_as_it_was_written_and_not_when_edited(tmp_path: Path) -> None:
    made, _ = record(tmp_path)
    file = tmp_path / "plan.json"
    file.write_text(made.to_json())
    assert PlanRecord.read(file) == made
    data = json.loads(made.to_json())
    data["source"]["sm"] = "86"
    file.write_text(json.dumps(data))
    with pytest.raises(InputError, match="or edited"):
        PlanRecord.read(file)
    with pytest.raises(InputError, match="is missing"):
        PlanRecord.read(tmp_path / "none.json")


def test_a_plan_is_taken_from_the_cache_where_it_is_whole(tmp_path: Path) -> None:
    made, plan = record(tmp_path)
    cache = PlanCache(tmp_path / "cache")
    target = tmp_path / "taken.plan"
    assert cache.take(made.key, target) is None
    cache.keep(made, plan)
    assert cache.take(made.key, target) == made
    assert target.read_bytes() == b"plan"
    target.unlink()
    kept = next((tmp_path / "cache/plans").glob("*.plan"))
    kept.unlink()
    kept.write_bytes(b"brok")
    assert cache.take(made.key, target) is None
    assert not target.exists()


def test_the_oldest_plans_go(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path / "cache", limit_bytes=10)
    made = [record(tmp_path, sm=sm, content=sm.encode() * 2) for sm in ("80", "86", "89")]
    for age, each in enumerate(made):
        cache.keep(*each)
        os.utime(tmp_path / f"cache/plans/{each[0].key}.json", (age, age))  # file systems tell times coarsely
    kept = [cache.take(each.key, tmp_path / f"{i}.taken") is not None for i, (each, _) in enumerate(made)]
    assert kept == [False, True, True]
    huge = record(tmp_path, sm="120", content=b"x" * 11)
    cache.keep(*huge)
    assert cache.take(huge[0].key, tmp_path / "huge.taken") is None


def test_timings_are_kept_by_version_and_device(tmp_path: Path) -> None:
    cache, source = PlanCache(tmp_path), record(tmp_path)[0].source
    assert cache.timings(source) == b""
    cache.keep_timings(source, b"times")
    assert cache.timings(dataclasses.replace(source, flags=(), onnx_sha256="cd" * 32)) == b"times"
    for change in ({"version": "11.5"}, {"sm": "90"}, {"device": "NVIDIA L40S"}):
        assert cache.timings(dataclasses.replace(source, **change)) == b""


def test_the_cache_lies_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(plan_cache.ENVIRONMENT, str(tmp_path))
    assert plan_cache.default_folder() == tmp_path
    monkeypatch.delenv(plan_cache.ENVIRONMENT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert plan_cache.default_folder() == tmp_path / "xdg" / "llmforge"


def test_a_digest_tells_names_and_contents_apart(tmp_path: Path) -> None:
    for name in (MODEL_FILE, DATA_FILE):
        (tmp_path / name).write_bytes(b"x")
    first = plan_cache.digest(tmp_path / MODEL_FILE, tmp_path / DATA_FILE)
    (tmp_path / DATA_FILE).write_bytes(b"y")
    assert first != plan_cache.digest(tmp_path / MODEL_FILE, tmp_path / DATA_FILE)


class Computed(SimpleNamespace):
    """What a layer of a network gives, as numbers; it is its own output."""

    def get_output(self, index: int) -> Computed:
        assert index == 0
        return self


class Network:
    """The calls of INetworkDefinition that lengths are made with, computed by numpy."""

    def add_shape(self, of: Computed) -> Computed:
        return Computed(values=np.array(of.values.shape, np.int64))

    def add_slice(self, of: Computed, start: tuple[int], shape: tuple[int], stride: tuple[int]) -> Computed:
        places = start[0] + stride[0] * np.arange(shape[0])
        return Computed(values=of.values[places])

    def add_cast(self, of: Computed, dtype: type) -> Computed:
        return Computed(values=of.values.astype(dtype))

    def add_elementwise(self, a: Computed, b: Computed, operation: np.ufunc) -> Computed:
        assert a.values.dtype == b.values.dtype
        return Computed(values=operation(a.values, b.values))


def test_lengths_of_keys_are_the_past_of_each_row_and_the_tokens_of_the_step() -> None:
    api = SimpleNamespace(int32=np.int32, ElementWiseOperation=SimpleNamespace(SUM=np.add))
    past, ids = Computed(values=np.array([0, 7, 30], np.int32)), Computed(values=np.zeros((3, 5), np.int64))
    total = layers._lengths(Network(), api, past, ids)
    assert (total.values.tolist(), total.values.dtype, total.name) == ([5, 12, 35], np.int32, "key_value_lengths")
