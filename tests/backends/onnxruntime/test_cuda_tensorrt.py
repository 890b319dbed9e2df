"""ONNX Runtime's TensorRT provider before its CUDA provider: what is chosen, refused, and said to ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from llmforge import targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder as standard
from llmforge.backends.onnxruntime.cuda import builder as cuda
from llmforge.backends.onnxruntime.cuda import session, tensorrt
from llmforge.base.errors import EnvironmentLacks, UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.passes import FlashAttention, FuseNorms, LowerPrecision, PackQkv, QuantizeChannels, QuantizeWeights
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Budget, Context, Pass
from llmforge.runtime.config import FILE, RuntimeConfig, SessionConfig
from llmforge.trace import trace

from ...models import zoo

BUDGET = Budget(kld_mean=5)
SPEC = EngineSpec(max_context=64, max_batch=2, cuda_graphs="off", tensorrt=True)
TARGET = targets.load("h100-sxm")


def lowered(folder: Path, *steps: Pass, dtype: str = "fp16", seed: int = 1) -> Any:
    zoo.write("llama", folder, seed=seed)
    model = trace(Checkpoint.open(folder))
    for step in (FuseNorms(), PackQkv(), FlashAttention(), *steps, LowerPrecision(BUDGET, dtype)):
        step.run(model, Context(TARGET))
    return cuda.lower(model, TARGET, SPEC)[0]


@pytest.mark.parametrize(
    ("steps", "dtype", "on"),
    [
        ((), "fp16", {"fp16"}),
        ((), "bf16", {"bf16"}),
        ((QuantizeChannels(BUDGET, dtype="int8", activations="none"),), "fp16", {"fp16", "int8"}),
    ],
)
def test_settings_follow_the_recipe_and_are_written_down(tmp_path: Path, steps: Any, dtype: str, on: set[str]):
    model = lowered(tmp_path / "checkpoint", *steps, dtype=dtype)
    cuda.write(BuildRequest(model, tmp_path / "engine", SPEC, TARGET, (0,), 0))
    own, rest = tensorrt.split(RuntimeConfig.read(tmp_path / "engine" / FILE).provider_options)
    assert {name for name in ("fp16", "bf16", "int8") if own[f"trt_{name}_enable"] == "True"} == on
    assert own["trt_engine_cache_enable"] == own["trt_timing_cache_enable"] == "True"
    assert rest == cuda.provider_options(graphs=False)


@pytest.mark.thorough
def test_plans_of_other_weights_have_another_name(tmp_path: Path):
    """The provider names plans by the graph alone, and would take those of another checkpoint."""
    names = []
    for number, seed in enumerate((1, 1, 2)):
        model = lowered(tmp_path / f"checkpoint{number}", seed=seed)
        config, _ = cuda.write(BuildRequest(model, tmp_path / f"engine{number}", SPEC, TARGET, (0,), 0))
        names.append(config.provider_options["trt_engine_cache_prefix"])
    assert names[0] == names[1] != names[2]


def test_products_that_tensorrt_has_no_operator_for_are_refused(tmp_path: Path):
    with pytest.raises(UnsupportedError, match=r"parser has no MatMulNBits \(node .*/MatMul") as caught:
        lowered(tmp_path / "checkpoint", QuantizeWeights(BUDGET, method="rtn"))
    assert "quantize-channels" in str(caught.value.hint)


@pytest.mark.parametrize("changes", [{"cuda_graphs": "require"}, {"backend": "tensorrt"}, {"tensor_parallel": 2}])
def test_what_does_not_go_with_it_is_refused_in_the_recipe(changes: dict[str, Any]):
    with pytest.raises(ValidationError, match="tensorrt goes with backend: onnxruntime, cuda_graphs: off"):
        EngineSpec(**{"max_context": 64, "cuda_graphs": "off", "tensorrt": True, **changes})


def test_a_cpu_has_none(tmp_path: Path):
    with pytest.raises(UnsupportedError, match="is a CPU"):
        standard.lower(Any, targets.local(), SPEC)  # type: ignore[arg-type]


def test_it_is_built_where_the_gpu_is():
    with pytest.raises(EnvironmentLacks) as caught:
        cuda.require_host(TARGET, SPEC)
    assert "--finish" in str(caught.value.hint)


def test_a_gpu_without_its_libraries_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before a weight is read, and not when the engine is opened, after passes and calibration."""

    def lacks(name: str, _: int) -> None:
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(cuda, "require_device", lambda *_: None)
    monkeypatch.setattr(tensorrt.ctypes, "CDLL", lacks)
    with pytest.raises(EnvironmentLacks, match=r"wants TensorRT 10 beside onnxruntime: libnvinfer.so.10") as caught:
        cuda.require_host(TARGET, SPEC)
    assert "tensorrt-cu13" in str(caught.value.hint)
    cuda.require_host(TARGET, SPEC.model_copy(update={"tensorrt": False}))


class Opened:
    """Stands for a session of ONNX Runtime, and for the module."""

    def __init__(self, *providers: str) -> None:
        self.given: Any = None
        self.providers = list(providers)

    def get_providers(self) -> list[str]:
        return self.providers

    def open(self, model: Any, entries: Any, providers: Any, where: str) -> Opened:
        self.given = providers
        return self


def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: Opened, options: dict[str, str]) -> Any:
    monkeypatch.setenv("LLMFORGE_CACHE", str(tmp_path))
    monkeypatch.setattr(session, "_preload", lambda: "it says why")
    monkeypatch.setattr(session.ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(session, "open_graph", made.open)
    device = SimpleNamespace(kind="cuda", index=1, stream=7, name="GPU")
    return session.open_on(device, b"", SessionConfig(threads=1), options, "here", graphs=False)  # type: ignore[arg-type]


def test_onnxruntime_is_given_both_providers_each_with_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tensorrt, "require_here", lambda: None)
    made = Opened(tensorrt.PROVIDER, "CUDAExecutionProvider")
    assert opened(monkeypatch, tmp_path, made, {"trt_fp16_enable": "True", "use_tf32": "0"}) is made
    cache = tmp_path / "onnxruntime-tensorrt"
    assert cache.is_dir()
    places = {"trt_engine_cache_path": str(cache), "trt_timing_cache_path": str(cache)}
    where = {"device_id": "1", "user_compute_stream": "7"}
    assert made.given == [
        (tensorrt.PROVIDER, {"trt_fp16_enable": "True", **places, **where}),
        ("CUDAExecutionProvider", {**where, "enable_cuda_graph": "0", "use_tf32": "0"}),
    ]
    opened(monkeypatch, tmp_path, made, {"use_tf32": "0"})
    assert [name for name, _ in made.given] == ["CUDAExecutionProvider"]


def test_a_provider_that_is_left_out_ends_the_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tensorrt, "require_here", lambda: None)
    with pytest.raises(EnvironmentLacks, match="could not load its TensorrtExecutionProvider: it says why"):
        opened(monkeypatch, tmp_path, Opened("CUDAExecutionProvider"), {"trt_fp16_enable": "True"})


def test_libraries_are_those_of_pip_or_of_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    loaded: list[str] = []
    monkeypatch.setattr(tensorrt.ctypes, "CDLL", lambda name, _: loaded.append(name))
    (tmp_path / "tensorrt_libs").mkdir()
    (tmp_path / "tensorrt_libs" / "__init__.py").touch()
    (tmp_path / "tensorrt_libs" / "libnvinfer.so.10").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    tensorrt.require_here()
    assert loaded == [str(tmp_path / "tensorrt_libs" / "libnvinfer.so.10"), "libnvonnxparser.so.10"]

    def lacks(name: str, _: int) -> None:
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(tensorrt.ctypes, "CDLL", lacks)
    with pytest.raises(EnvironmentLacks, match="wants TensorRT 10 beside onnxruntime") as caught:
        tensorrt.require_here()
    assert "tensorrt-cu13" in str(caught.value.hint)
