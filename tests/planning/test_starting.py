"""Recipes that `llmforge init` writes: for every target, engine, goal and shape they load, and say what was planned."""

import itertools
import json
from pathlib import Path
from typing import get_args

import pytest

from llmforge import backends, native, passes, targets
from llmforge.base.errors import UnsupportedError
from llmforge.planning import scheme, starting
from llmforge.recipe import Recipe
from llmforge.rewrite.traits import Goal
from llmforge.targets import SourcedFigure, Target

from ..models.shapes import PUBLIC

GOALS = get_args(Goal)
SHAPES = ("llama-3.1-8b", "mixtral-8x7b") if "mixtral-8x7b" in PUBLIC else tuple(PUBLIC)[:3]


def measured(target: Target, factor: float = 1.0) -> Target:
    """Give a CPU figures, `factor` times those of a machine."""
    if target.bandwidth_gbs is not None:
        return target
    figures = {name: SourcedFigure(value=factor * value, source="made up", verified=False) for name, value in
               {"bandwidth": 40.0, "fp32": 0.3, "int8": 0.9, "memory": 64.0}.items()}  # fmt: skip
    return target.model_copy(
        update={
            "memory_gb": figures["memory"],
            "bandwidth_gbs": figures["bandwidth"],
            "rates": {"fp32": figures["fp32"], "int8": figures["int8"]},
        }
    )


def start(folder: Path, target: str, goal: Goal, shape: str, **more: object) -> Recipe:
    checkpoint = folder / shape
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "config.json").write_text(json.dumps(PUBLIC[shape]))
    given = {"checkpoint": shape, "target": target, "calibration": "a.jsonl", "evaluation": "b.jsonl"}
    made = starting.write(checkpoint, measured(targets.load(target)), goal, name="m", given=given, **more)  # type: ignore[arg-type]
    path = folder / "recipe.yaml"
    path.write_text(made.yaml)
    assert max(map(len, made.yaml.splitlines())) <= 140
    recipe = Recipe.load(path)
    recipe.instantiate(passes.ALL)
    return recipe


@pytest.mark.thorough
@pytest.mark.parametrize("name", targets.names())
def test_every_target_has_a_recipe_for_every_goal(name: str, tmp_path: Path) -> None:
    written, too_large = 0, list[UnsupportedError]()
    for goal, shape, backend in itertools.product(GOALS, SHAPES, targets.load(name).engines):
        try:
            recipe = start(tmp_path, name, goal, shape, backend=backend)
        except UnsupportedError as error:
            too_large.append(error)
            continue
        written += 1
        assert recipe.engine.backend == backend
        assert recipe.engine.max_context == 4096
    assert written
    assert all("needs" in error.message and error.hint for error in too_large)


@pytest.mark.parametrize("backend", backends.BUILT_IN)
def test_every_target_and_backend_give_a_recipe_or_a_reason(backend: str, tmp_path: Path) -> None:
    """Every backend that can be had on a target; of the others the message names those that can."""
    everywhere = backends.BUILT_IN[backend].export_format is not None
    for name in targets.names():
        if everywhere or backend in targets.load(name).engines:
            assert start(tmp_path, name, "latency", "llama-2-7b", backend=backend).engine.backend == backend
        else:
            with pytest.raises(UnsupportedError, match=f"cannot load engines of {backend}"):
                start(tmp_path, name, "latency", "llama-2-7b", backend=backend)


def test_what_has_no_recipe_for_the_runtimes_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = {
        **PUBLIC["llama-3.1-8b"],
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    }
    monkeypatch.setitem(PUBLIC, "quantized", quantized)
    with pytest.raises(UnsupportedError, match="is quantized already, and gguf takes") as refused:
        start(tmp_path, "h200", "latency", "quantized", backend="gguf")
    assert "choose another --engine" in str(refused.value)
    monkeypatch.setattr(starting, "plugin_of", lambda name: name)
    with pytest.raises(UnsupportedError, match="--engine mine is of a plug-in") as refused:
        start(tmp_path, "h200", "latency", "llama-3.1-8b", backend="mine")
    assert "without --engine" in str(refused.value)


def test_a_checkpoint_in_bf16_is_planned_on_a_cpu_that_has_no_rate_for_it() -> None:
    target = measured(targets.load("cpu-avx2"))
    assert scheme.choose(target, "compressed-tensors", "bf16").compute == "fp32"
    assert scheme.choose(targets.load("h200"), "compressed-tensors", "bf16").compute == "bf16"


def chosen(recipe: Recipe) -> list[str]:
    return [step.name for step in recipe.passes]


def options(recipe: Recipe, name: str) -> dict[str, object]:
    return next(dict(step.options) for step in recipe.passes if step.name == name)


def test_a_context_as_short_as_an_answer_has_room_for_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PUBLIC, "short", {**PUBLIC["llama-3.1-8b"], "max_position_embeddings": 32})  # type: ignore[arg-type]
    recipe = start(tmp_path, "cpu-avx2", "latency", "short")
    latency = recipe.validation.latency
    assert latency is not None
    assert max(latency.prompt_tokens) + latency.output_tokens <= recipe.engine.max_context == 32


def test_goals_differ_on_a_cpu(tmp_path: Path) -> None:
    small, fast, many, good = (start(tmp_path, "cpu-avx2", goal, "llama-3.1-8b") for goal in
                               ("size", "latency", "throughput", "quality"))  # fmt: skip
    assert options(small, "quantize-weights")["bits"] == 4
    assert options(small, "quantize-weights")["method"] == "gptq"
    assert options(fast, "quantize-weights")["bits"] == 6  # to calibrate so many parameters takes hours
    assert options(fast, "quantize-weights")["method"] == "importance"
    assert options(good, "quantize-weights")["bits"] == 8
    assert "quantize-kv-cache" not in chosen(good)
    assert many.engine.max_batch > fast.engine.max_batch
    assert good.calibration is None
    assert fast.calibration is not None
    assert small.calibration is not None
    assert fast.calibration.samples < small.calibration.samples


def test_a_gpu_that_is_elsewhere_gets_its_engine_later(tmp_path: Path) -> None:
    there = start(tmp_path, "h200", "latency", "llama-3.1-8b", backend="tensorrt")
    here = start(tmp_path, "h200", "latency", "llama-3.1-8b", backend="tensorrt", has_device=True)
    assert (there.engine.deferred, here.engine.deferred) == (True, False)
    anywhere = start(tmp_path, "rtx-4090", "size", "llama-3.1-8b", backend="tensorrt-rtx")
    assert not anywhere.engine.deferred
    assert options(anywhere, "quantize-weights")["bits"] == 4


@pytest.mark.parametrize("target", ["h100-sxm", "h100-pcie", "h200"])
def test_for_many_requests_on_a_hopper_gpu_a_checkpoint_for_vllm_is_proposed(tmp_path: Path, target: str) -> None:
    """In fp8 by fp8, with a scale a token, which vLLM, SGLang and TensorRT-LLM load; else the target's own engines."""
    many = start(tmp_path, target, "throughput", "llama-3.1-8b")
    assert many.engine.backend == "compressed-tensors"
    [step] = many.passes
    assert step.name == "quantize-channels"
    wanted = {"dtype": "fp8", "activations": "per_token", "head": False, "smooth": False}
    assert {name: step.options[name] for name in wanted} == wanted
    assert many.calibration is None
    assert not many.engine.deferred
    said = (tmp_path / "recipe.yaml").read_text()
    assert "# Not an engine of llmforge: for many requests at once vLLM is faster on this GPU" in said
    assert "`--goal latency`, `--engine tensorrt` or `--engine onnxruntime`" in said
    for goal, backend in (("latency", None), ("throughput", "onnxruntime")):
        own = start(tmp_path, target, goal, "llama-3.1-8b", backend=backend)
        assert own.engine.backend == (backend or "tensorrt")
        assert "vLLM" not in (tmp_path / "recipe.yaml").read_text()
    assert start(tmp_path, "l4", "throughput", "llama-3.1-8b").engine.backend == "tensorrt"


@pytest.mark.parametrize(("names", "wanted"), [(None, True), ("mlp.experts.0.up_proj", True), ("mlp.experts", False)])
def test_experts_are_written_in_fp8_where_each_has_its_own_tensors(
    names: str | None, wanted: bool, tmp_path: Path
) -> None:
    if names is not None:
        (tmp_path / "qwen3-30b-a3b").mkdir()
        index = {"weight_map": {f"model.layers.0.{names}.weight": "model-00001.safetensors"}}
        (tmp_path / "qwen3-30b-a3b" / "model.safetensors.index.json").write_text(json.dumps(index))
    many = start(tmp_path, "h200", "throughput", "qwen3-30b-a3b")
    assert many.engine.backend == "compressed-tensors"
    assert [step.name for step in many.passes] == ["quantize-channels", *["quantize-experts"] * wanted]
    if wanted:
        assert options(many, "quantize-experts")["format"] == "fp8"


def test_batches_fit(tmp_path: Path) -> None:
    recipe = start(tmp_path, "l4", "throughput", "llama-3.1-8b")
    assert 1 <= recipe.engine.max_batch < 64


@pytest.mark.parametrize(
    ("said", "target", "backend", "wanted"),
    [
        ({"bits": 4, "group_size": 128, "sym": True}, "local", "onnxruntime", {"method": "stored"}),
        ({"bits": 3, "group_size": 128}, "local", "onnxruntime", {"method": "stored"}),
        (
            {"bits": 4, "group_size": 128, "sym": True},
            "h100-sxm",
            "tensorrt",
            {"method": "stored", "embedding_bits": 16},
        ),
        ({"bits": 4, "group_size": 128, "sym": False}, "h100-sxm", "tensorrt", None),
        ({"bits": 4, "group_size": 24}, "local", "onnxruntime", None),
    ],
)
def test_a_checkpoint_that_comes_quantized_keeps_its_codes(
    tmp_path: Path, said: dict[str, object], target: str, backend: str, wanted: dict[str, object] | None
) -> None:
    """Or its dequantized weights, where the target has no kernels for them; others where a CPU's kernels read those."""
    checkpoint = tmp_path / "quantized"
    checkpoint.mkdir()
    config = {**PUBLIC["llama-3.1-8b"], "quantization_config": {"quant_method": "gptq", **said}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    given = {"checkpoint": "quantized", "target": target, "calibration": "a.jsonl", "evaluation": "b.jsonl"}
    known = measured(targets.find(target))
    if target == "h100-sxm":  # whose codes no export takes
        own = starting.write(checkpoint, known, "throughput", name="m", given=given)
        assert "backend: tensorrt," in own.yaml
    for goal in GOALS:
        made = starting.write(checkpoint, known, goal, name="m", given=given, backend=backend)  # type: ignore[arg-type]
        (tmp_path / "recipe.yaml").write_text(made.yaml)
        recipe = Recipe.load(tmp_path / "recipe.yaml")
        steps = recipe.instantiate(passes.ALL)
        requantizes = target == "local" and wanted is None and native.library() is not None
        assert recipe.requantize is requantizes
        assert bool([step.name for step in steps if step.chooses_codes()]) is requantizes
        assert ("quantize-weights" in chosen(recipe)) is (wanted is not None or requantizes)
        if wanted is not None:
            found = options(recipe, "quantize-weights")
            assert {name: found[name] for name in wanted} == wanted
