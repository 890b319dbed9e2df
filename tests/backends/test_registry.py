"""The builder of an engine is chosen by backend and target, and a choice that nobody builds is refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from llmforge import targets
from llmforge.backends import engines
from llmforge.backends.onnxruntime import builder as onnxruntime
from llmforge.backends.onnxruntime.cuda import builder as cuda
from llmforge.backends.tensorrt import builder as engine
from llmforge.backends.tensorrt import library
from llmforge.base.errors import EnvironmentLacks, UnsupportedError
from llmforge.recipe import EngineSpec


def spec(backend: str) -> EngineSpec:
    return EngineSpec(backend=backend, max_context=64)


def test_onnxruntime_on_a_cpu_has_its_builder() -> None:
    assert engines.for_target("onnxruntime", targets.load("cpu-avx2")) is onnxruntime


def test_a_device_that_cannot_load_an_engine_gets_none() -> None:
    with pytest.raises(UnsupportedError, match="cannot load engines of tensorrt") as caught:
        engines.for_target("tensorrt", targets.load("cpu-avx2"))
    assert "backend: onnxruntime" in (caught.value.hint or "")


@pytest.mark.parametrize(("backend", "module"), [("onnxruntime", cuda), ("tensorrt", engine), ("tensorrt-rtx", engine)])
def test_each_backend_of_a_gpu_has_its_builder(backend: str, module: object) -> None:
    assert engines.for_target(backend, targets.load("l4")) is module


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
def test_what_is_built_on_its_gpu_names_the_other_way(backend: str) -> None:
    with pytest.raises(EnvironmentLacks, match="no CUDA device here") as caught:
        engines.for_target(backend, targets.load("l4")).require_host(targets.load("l4"), spec(backend))
    assert caught.value.exit_code == 8
    assert "--finish" in (caught.value.hint or "")


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize("lack", ["bindings", "device"])
def test_finishing_names_what_its_host_needs(backend: str, lack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lack == "bindings":
        monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    else:
        monkeypatch.setattr(engines, "CudaDevice", lambda: SimpleNamespace(name="NVIDIA H100", sm=90))
    l4 = targets.load("l4")
    with pytest.raises(EnvironmentLacks) as caught:
        engines.for_target(backend, l4).require_host(l4, spec(backend).model_copy(update={"deferred": True}))
    assert "--defer" not in (caught.value.hint or "")
    assert "on a host with an NVIDIA L4" in (caught.value.hint or "")
    assert f"pip install 'llmforge[{'cuda' if backend == 'onnxruntime' else 'tensorrt'}]'" in (caught.value.hint or "")


@pytest.mark.usefixtures("no_device")
def test_tensorrt_rtx_builds_without_a_gpu() -> None:
    pytest.importorskip("tensorrt_rtx")
    l4 = targets.load("l4")
    engines.for_target("tensorrt-rtx", l4).require_host(l4, spec("tensorrt-rtx"))
    assert engines.why_not_run(l4) == "no CUDA device here"


def test_another_gpu_does_not_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "CudaDevice", lambda: SimpleNamespace(name="NVIDIA H100", sm=90))
    assert engines.why_not_run(targets.load("h100-sxm")) is None
    reason = engines.why_not_run(targets.load("l4"))
    assert reason is not None
    assert "NVIDIA H100 is SM90" in reason


def test_a_cpu_runs_what_is_built_for_it() -> None:
    assert engines.why_not_run(targets.local()) is None


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_a_missing_library_names_the_extra(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentLacks, match="is not installed") as caught:
        assert library.of_backend(backend).api
    assert caught.value.hint == f"pip install 'llmforge[{backend}]'"
