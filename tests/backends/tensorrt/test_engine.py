"""Real TensorRT-RTX plans without a GPU: architectures, precisions and compute capabilities, or their refusal."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import onnx_ir as ir
import pytest

from llmforge import passes, targets
from llmforge.backends import engines, signatures
from llmforge.backends.tensorrt import builder as engine
from llmforge.backends.tensorrt import compile_plan, plan_cache
from llmforge.backends.tensorrt.plan_cache import PlanRecord
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.recipe import EngineSpec
from llmforge.rewrite import pass_base
from llmforge.rewrite.pass_base import Budget, Context, Pass
from llmforge.runtime.config import PLAN_FILE, RuntimeConfig
from llmforge.targets import Target
from llmforge.trace import trace

from ...models import zoo

pytest.importorskip("tensorrt_rtx")

SPEC = EngineSpec(backend="tensorrt-rtx", max_context=64, max_batch=4)
LOOSE = Budget(kld_mean=5.0)  # of random weights
KNOWN = {cls.name: cls for cls in passes.ALL}
MIXED = {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}


def make(name: str, **options: object) -> Pass:
    return KNOWN[name](**options)


def steps(form: str) -> list[Pass]:
    match form:
        case "fp16" | "bf16":
            return [make("lower-precision", dtype=form, budget=LOOSE)]
        case "int8" | "fp8":
            return [make("quantize-channels", dtype=form, budget=LOOSE), *steps("fp16")]
        case "int4" | "int4, experts excluded":
            quantize = make(
                "quantize-weights",
                bits=4,
                block_size=128,
                symmetric=True,
                embedding_bits=16,
                method="rtn",
                exclude=("*.experts.*",) if "excluded" in form else (),
                budget=LOOSE,
            )
            return [quantize, *steps("fp16")]
    raise AssertionError(form)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@functools.cache
def traced(name: str, folder: Path) -> ir.Model:
    changes = MIXED if name == "qwen2-mixed-windows" else {}
    zoo.write(name, folder / name, hidden_size=128, intermediate_size=128, head_dim=32, **changes)
    return trace(Checkpoint.open(folder / name))


def lowered(model: ir.Model, form: str, target: Target) -> ir.Model:
    model = model.clone()
    for step in steps(form):
        pass_base.run(step, model, Context(target))
    return engines.for_target("tensorrt-rtx", target).lower(model, target, SPEC)[0]


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMFORGE_CACHE", str(tmp_path / "cache"))


def build(model: ir.Model, target: Target, folder: Path) -> engines.BuiltEngine:
    return engine.build(engines.BuildRequest(model, folder, SPEC, target, [0], None))


# (architecture, form) → the targets that it is built for, and those of which a refusal says what
WINDOWS, EXPERTS = "qwen2-mixed-windows", "mixtral"
ALL = ("t4", "a100-80", "a10g", "rtx-4090", "rtx-5090")
CELLS: dict[tuple[str, str], tuple[tuple[str, ...], dict[str, str]]] = {
    (WINDOWS, "fp16"): (ALL, {}),
    (WINDOWS, "int8"): (("t4",), {}),
    (WINDOWS, "int4"): (("a10g", "rtx-5090"), {"t4": "int4 weights"}),
    (WINDOWS, "fp8"): (("rtx-4090", "rtx-5090"), {"a10g": "does not compute in fp8"}),
    (WINDOWS, "bf16"): (("a100-80",), {"t4": "does not compute in bf16"}),
    (EXPERTS, "fp16"): (ALL[1:], {"t4": "fp32 matrix product"}),
    (EXPERTS, "int4"): ((), {"rtx-4090": "the parser has no quantized experts"}),
    (EXPERTS, "int4, experts excluded"): (ALL[1:], {}),
}
DEFAULT = {(WINDOWS, "int8"), (WINDOWS, "int4"), (WINDOWS, "fp8")}  # the others are slow tests


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "form"), [pytest.param(*cell, marks=[pytest.mark.slow] * (cell not in DEFAULT)) for cell in CELLS]
)
def test_plans_are_built_without_a_gpu(name: str, form: str, folder: Path, tmp_path: Path) -> None:
    built, refused = CELLS[name, form]
    model = traced(name, folder)
    for target in map(targets.load, built):
        graph = lowered(model, form, target)
        made = build(graph, target, tmp_path / target.name / "engine")
        nodes = Counter(node.op_type for node in graph.graph)
        record = PlanRecord.read(made.folder / plan_cache.FILE)
        assert record.source.sm == target.sm
        assert record.layers["ATTENTION_INPUT"] == nodes["Attention"] == 2
        assert record.layers["ATTENTION_INPUT with lengths"] == 2  # which read the text, and not the capacity
        assert record.layers["KV_CACHE_UPDATE"] == 4
        assert record.layers["TOPK"] == nodes["TopK"] >= 1  # heads of rows; experts choose by others
        assert not any("heads" in note for note in made.notes)
        assert record.layers.get("DEQUANTIZE", 0) == nodes["DequantizeLinear"]
        assert (nodes["DequantizeLinear"] > 0) is (form not in ("fp16", "bf16"))
        assert (made.folder / PLAN_FILE).stat().st_size == record.size_bytes > 100_000
    for target_name, reason in refused.items():
        with pytest.raises(UnsupportedError, match=reason) as caught:
            lowered(model, form, targets.load(target_name))
        assert caught.value.hint


def test_an_engine_says_what_it_is_and_is_reused(folder: Path, tmp_path: Path) -> None:
    target = targets.load("l4")
    graph = lowered(traced(WINDOWS, folder), "fp16", target)
    first, again = (build(graph, target, tmp_path / name / "engine") for name in ("first", "again"))
    config = RuntimeConfig.read(first.folder / "runtime.json")
    assert config.provider == "tensorrt-rtx"
    assert config.onnxruntime is None
    assert config.requires == {"tensorrt-rtx": engine.library.of_backend("tensorrt-rtx").version}
    assert config.device is not None
    assert config.device.sm == 89
    assert config.device.memory_bytes > sum((first.folder / name).stat().st_size for name in (PLAN_FILE,))
    assert config.plan is not None
    assert [(each.name, each.max_batch, each.max_sequence) for each in config.plan.profiles] == [
        ("prefill", 1, 64),
        ("decode", 4, 1),
        ("prompts", 4, 64),
    ]
    assert [(cache.dtype, cache.kv_heads, cache.head_dim) for cache in config.caches] == [("float16", 2, 32)] * 4
    assert config.vocabulary == zoo.VOCABULARY
    assert first.facts["attention"] == (
        "2 in fused kernels, none that the builder took apart; 2 read the text and not the capacity"
    )
    assert first.notes == ()
    assert again.notes == ("plan reused from an earlier build with the same key",)
    assert sorted(file.name for file in first.folder.iterdir()) == ["model.plan", "plan.json", "runtime.json"]
    assert list(first.folder.parent.iterdir()) == [first.folder], "the ONNX file is gone"
    for file in first.folder.iterdir():
        assert file.read_bytes() == (again.folder / file.name).read_bytes()


def test_a_plan_is_built_without_heads_where_the_builder_refuses_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = targets.load("l4")
    graph = lowered(traced(WINDOWS, folder), "fp16", target)
    build_plan = compile_plan.build

    def refuse(
        library: object, onnx_file: Path, model: ir.Model, *rest: object, **options: object
    ) -> compile_plan.CompiledPlan:
        if any(node.op_type == refused for node in model.graph):
            raise UnsupportedError("no TopK today")
        return build_plan(library, onnx_file, model, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(compile_plan, "build", refuse)
    refused = "TopK"
    made = build(graph, target, tmp_path / "without" / "engine")
    assert made.notes[0] == "steps give whole rows of logits and no heads of them: no TopK today"
    layers = PlanRecord.read(made.folder / plan_cache.FILE).layers
    assert layers.get("TOPK", 0) == 0
    assert layers["ATTENTION_INPUT with lengths"] == 2
    refused = "Attention"  # in any case
    monkeypatch.setenv("LLMFORGE_CACHE", str(tmp_path / "another cache"))
    with pytest.raises(UnsupportedError, match="no TopK today"):
        build(graph, target, tmp_path / "refused" / "engine")


def test_a_context_beyond_the_rotary_table_is_refused(folder: Path) -> None:
    target = targets.load("l4")
    graph = lowered(traced(WINDOWS, folder), "fp16", target)
    with pytest.raises(UnsupportedError, match="has 128 positions"):
        signatures.check_context(graph, 4096)


@pytest.mark.slow
def test_what_has_no_way_through_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="recurrent state") as caught:
        lowered(traced("qwen3-5", folder), "fp16", targets.load("rtx-4090"))
    assert caught.value.exit_code == 6
    assert caught.value.hint
