"""`llmforge doctor`: what it finds, measures and writes; GPUs stand in as what their drivers print."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from llmforge import native, targets
from llmforge.base import versions
from llmforge.base.errors import EnvironmentLacks, UnsupportedError, UsageError, VersionMismatch
from llmforge.cli import cli
from llmforge.doctor import environment, machine, render
from llmforge.doctor.environment import Check
from llmforge.measure import ceilings, gpus
from llmforge.measure.ceilings import CpuCeilings, KernelRates
from llmforge.measure.gpus import Gpu
from llmforge.measure.machine import Machine, OthersMeter
from llmforge.passes.cpu_kernels import CpuKernels
from llmforge.recipe import Recipe
from llmforge.rewrite.pass_base import Budget, Context

ROOT = Path(__file__).parents[2]
HERE = Machine(
    cpu="AMD EPYC", cores=2, usable_cpus=4, isa=("avx2",), memory_bytes=25_000_000_000, os="Linux", python="3.11"
)
MEASURED = CpuCeilings(
    bandwidth={1: 20.123456e9, 2: 39e9},
    rates={"fp32": 0.2e12, "int8": 0.9e12},
    kernels={"fp32": "ONNX Runtime's MatMul", "int8": "llmforge.cpu's Linear"},
    quantized={
        "onnxruntime": {"int4": KernelRates(0.3e12, 17e9)},
        "llmforge": {"int4": KernelRates(0.9e12, 30e9)},
    },
    threads=2,
)
H200 = Gpu(0, "NVIDIA H200", "90", 143771 << 20)


def invoke(*args: str | Path) -> Result:
    result = CliRunner().invoke(cli, ["doctor", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find", list)


def checks(**found: Any) -> dict[str, Check]:
    listed = environment.checklist(HERE, found.get("gpus", []), ROOT)
    return {check.name: check for check in listed}


# the checklist


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_a_gpu() -> None:
    result = invoke()
    assert result.exit_code == 0
    assert "run on the CPU" in result.stdout
    assert "no NVIDIA GPU found" in result.stdout
    found = checks()
    assert found["build"].state == "yes"
    assert found["CPU"].found.startswith(f"AMD EPYC: target {targets.local().name}, 2 cores, 4 usable CPUs, 25.0 GB")
    assert found["run on CUDA"].state == "optional"
    assert all(check.hint for check in found.values() if check.state == "no")


def test_a_busy_machine_is_not_verified(tmp_path: Path) -> None:
    busy = replace(MEASURED, others=1.26)
    target = machine.of_cpu("here", HERE, busy, "2026-11-23")
    assert target.bandwidth_gbs is not None
    figures = [target.bandwidth_gbs, *target.rates.values()]
    figures += [figure for kernels in target.kernels.values() for each in kernels.values()
                for figure in (each.rate, each.read_gbs)]  # fmt: skip
    assert not any(figure.verified for figure in figures)
    assert "while others took 1.3 cores" in target.bandwidth_gbs.source
    quiet = machine.of_cpu("here", HERE, MEASURED, "2026-11-23")
    assert quiet.bandwidth_gbs is not None
    assert quiet.bandwidth_gbs.verified
    console = Console(file=StringIO(), width=120)
    console.print(render.measured(busy))
    assert "other processes used 1.3 cores meanwhile" in console.file.getvalue()  # type: ignore[attr-defined]


def test_others_are_other_processes() -> None:
    spin = "import time\nend = time.time() + 1\nwhile time.time() < end: pass"
    meter = OthersMeter()
    end = time.perf_counter() + 0.5
    while time.perf_counter() < end:
        pass
    before = meter.cores()
    other = subprocess.Popen([sys.executable, "-c", spin])
    try:
        time.sleep(0.7)
        taken = meter.cores()
    finally:
        other.wait()
    assert before >= 0
    assert taken > 0.15  # of its own, 0.5 s are not counted


@pytest.mark.usefixtures("no_gpu")
def test_json_says_the_same() -> None:
    facts = json.loads(invoke("--json").stdout)
    assert facts["packages"]["onnxruntime"]
    assert facts["gpus"] == []
    assert {check["name"] for check in facts["checks"]} >= {"CPU", "disk", "build", "run on the CPU", "TensorRT"}
    assert "ceilings" not in facts


def test_what_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatch() -> None:
        raise VersionMismatch("torch 1 is installed", hint="pip install 'torch==2'")

    monkeypatch.setattr(versions, "check", mismatch)
    monkeypatch.setattr(native, "library", lambda: None)
    real = environment.importlib.util.find_spec
    absent = {"starlette", "llguidance", "tensorrt_rtx", "tensorrt"}
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None if name in absent else real(name))
    found = checks()
    assert (found["build"].state, found["build"].hint) == ("no", "pip install 'torch==2'")
    assert found["CPU kernels"].hint is not None
    assert "C compiler" in found["CPU kernels"].hint
    assert found["serve"].found == "starlette missing: needed for llmforge serve"
    assert found["serve"].hint == "pip install 'llmforge[serve]'"
    assert found["TensorRT-RTX"].hint == "pip install 'llmforge[tensorrt-rtx]'"


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: SimpleNamespace(free=2_000_000_000))
    assert checks()["disk"].state == "no"


def test_a_gpu_and_the_providers_that_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    without = checks(gpus=[H200])["run on CUDA"]
    assert without.state == "no"
    assert without.hint is not None
    assert "llmforge[cuda]" in without.hint
    monkeypatch.setattr(targets, "onnxruntime_providers", lambda extra: ["CUDAExecutionProvider"])
    assert checks(gpus=[H200])["run on CUDA"].state == "yes"
    b200 = Gpu(0, "NVIDIA B200", "100", 192 << 30)
    assert "no code for SM 100" in checks(gpus=[b200])["run on CUDA"].found


def test_without_a_runtime_it_is_said_once_for_each_device_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(extra: str) -> list[str]:
        raise EnvironmentLacks("onnxruntime is not installed", hint=f"pip install 'llmforge[{extra}]'")

    monkeypatch.setattr(targets, "onnxruntime_providers", nothing)
    without, beside = checks(), checks(gpus=[H200])
    assert without["run on the CPU"].hint == "pip install 'llmforge[cpu]'"
    assert without["run on CUDA"].state == "optional"
    assert beside["run on CUDA"].hint == "pip install 'llmforge[cuda]'"


# GPUs


def test_the_driver_is_read() -> None:
    found = gpus.parse(
        "NVIDIA H200, 9.0, 143771\nNVIDIA GeForce RTX 4090, 8.9, 24564\n[Unknown Error], [N/A], [N/A]\n\n"
    )
    assert found == [H200, Gpu(1, "NVIDIA GeForce RTX 4090", "89", 24564 << 20)]
    assert gpus.parse("No devices were found\n") == []


@pytest.mark.parametrize(
    ("title", "sm", "mib", "target"),
    [
        ("NVIDIA H200", "90", 143771, "h200"),
        ("NVIDIA H100 80GB HBM3", "90", 81559, "h100-sxm"),
        ("NVIDIA H100 PCIe", "90", 81559, "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "80", 81920, "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "80", 40960, "a100-40"),
        ("NVIDIA A10G", "86", 23028, "a10g"),
        ("Tesla T4", "75", 15360, "t4"),
        ("NVIDIA L4", "89", 23034, "l4"),
        ("NVIDIA L40S", "89", 46068, "l40s"),
        ("NVIDIA GeForce RTX 4090", "89", 24564, "rtx-4090"),
        ("NVIDIA GeForce RTX 5090", "120", 32607, "rtx-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "120", 97887, "rtx-pro-6000"),
        ("NVIDIA B200", "100", 183359, "b200"),
        ("NVIDIA GB200", "100", 189471, "gb200"),
        ("NVIDIA GeForce RTX 3090", "86", 24576, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "89", 16376, None),
    ],
)
def test_a_device_is_known_by_its_name_and_memory(title: str, sm: str, mib: int, target: str | None) -> None:
    assert Gpu(0, title, sm, mib << 20).target == target


def test_a_driver_that_fails_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    script.chmod(0o755)
    monkeypatch.setattr(gpus.shutil, "which", lambda name: str(script))
    assert gpus.find() == []
    script.write_text("#!/bin/sh\necho 'NVIDIA L4, 8.9, 23034'\n")
    assert [gpu.target for gpu in gpus.find()] == ["l4"]


class FakeRuntime:
    """The CUDA runtime as cuda.bindings gives it: an error code, then results; a copy takes a millisecond."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDeviceToDevice=3)  # noqa: N815

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.copied: list[int] = []
        self.freed: list[int] = []

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            if name == self.failing:
                return (2,)
            if name == "cudaMemcpyAsync":
                self.copied.append(arguments[2])
            if name == "cudaFree":
                self.freed.append(arguments[0])
            properties = SimpleNamespace(major=9, minor=0, name=b"NVIDIA H200", totalGlobalMem=143771 << 20)
            results = {
                "cudaMalloc": (4096,),
                "cudaEventCreate": ("event",),
                "cudaEventElapsedTime": (20.0,),
                "cudaGetDeviceCount": (1,),
                "cudaGetDeviceProperties": (properties,),
            }
            return (0, *results.get(name, ()))

        return call


def test_a_copy_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(gpus, "_runtime", lambda: runtime)
    assert gpus.copy_bandwidth(H200) == pytest.approx(2 * 20 * (1 << 30) / 0.02)
    assert len(runtime.copied) == 21  # one warms up
    assert len(runtime.freed) == 2


def test_memory_is_freed_where_cuda_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(failing="cudaMemcpyAsync")
    monkeypatch.setattr(gpus, "_runtime", lambda: runtime)
    with pytest.raises(EnvironmentLacks, match="CUDA call cudaMemcpyAsync failed on NVIDIA H200: error 2"):
        gpus.copy_bandwidth(H200)
    assert len(runtime.freed) == 2


def test_the_runtime_finds_devices_where_there_is_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus.shutil, "which", lambda name: None)
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(gpus, "_runtime", FakeRuntime)
    assert gpus.find() == [H200]
    monkeypatch.setattr(gpus, "_runtime", lambda: FakeRuntime(failing="cudaGetDeviceCount"))
    assert gpus.find() == []


def test_no_bindings_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(EnvironmentLacks) as caught:
        gpus.copy_bandwidth(H200)
    assert caught.value.hint == "pip install 'llmforge[cuda]'"


def test_products_on_a_gpu_need_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentLacks, match="no CUDA execution provider"):
        gpus.matrix_rates(H200, lambda dtype, options: 1.0)
    monkeypatch.setattr(targets, "onnxruntime_providers", lambda extra: ["CUDAExecutionProvider"])
    assert gpus.matrix_rates(H200, lambda dtype, options: 0.001) == {
        "fp16": 2 * 8192**3 / 0.001,
        "bf16": 2 * 8192**3 / 0.001,
    }
    turing = Gpu(1, "Tesla T4", "75", 16 << 30)
    assert list(gpus.matrix_rates(turing, lambda dtype, options: 1.0)) == ["fp16"]


# measuring a CPU


def test_ceilings_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small and few, so that it takes a fraction of a second; that the kernels run is what counts."""
    monkeypatch.setattr(ceilings, "ROWS", 64)
    monkeypatch.setattr(ceilings, "INNER", 256)
    monkeypatch.setattr(ceilings, "COLUMNS", 128)
    monkeypatch.setattr(ceilings, "WORKING_SET_BYTES", 1 << 20)
    monkeypatch.setattr(ceilings, "LAYER_BYTES", 1 << 18)
    told: list[str] = []
    found = ceilings.measure(2, told.append)
    assert list(found.bandwidth) == [1, 2]
    assert all(rate > 1e8 for rate in found.bandwidth.values())
    assert set(found.rates) == {"fp32", "int8"}
    assert all(1e8 < rate < 1e14 for rate in found.rates.values())
    assert told[0] == "Memory bandwidth, 1 thread"
    assert ("llmforge" in told[-1]) is (native.library() is not None)
    assert set(found.quantized) == {"onnxruntime", *(["llmforge"] if native.library() is not None else [])}
    assert found.rates["int8"] == max(each["int8"].rate for each in found.quantized.values())
    assert all(set(each) == {"int8", "int4"} for each in found.quantized.values())
    assert all(1e8 < layers.read < 1e13 for each in found.quantized.values() for layers in each.values())


def test_products_of_a_cpu_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "ROWS", 64)
    monkeypatch.setattr(ceilings, "INNER", 256)
    monkeypatch.setattr(ceilings, "COLUMNS", 128)
    rates, whose = ceilings.products(2)
    assert set(rates) == {"fp32", "int8"}
    assert all(1e8 < rate < 1e14 for rate in rates.values())
    assert whose.startswith("fp32: ONNX Runtime's MatMul; int8: ")


@pytest.mark.skipif(native.library() is None, reason="the kernels are not compiled here")
@pytest.mark.parametrize("bits", [4, 8])
def test_our_kernels_compute_the_product_that_is_timed(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "ROWS", 3)
    monkeypatch.setattr(ceilings, "INNER", 256)
    monkeypatch.setattr(ceilings, "COLUMNS", 64)
    x = np.random.default_rng(2).standard_normal((1, 3, 256), np.float32)
    results = []
    model = ceilings._quantized(3, 64, bits)
    for operator in ("MatMulNBits", "Linear"):
        assert [node.op_type for node in model.graph] == [operator]
        session = ceilings._session(model, 1, ["CPUExecutionProvider"])
        results.append(session.run(None, {"x": x})[0])
        if operator == "MatMulNBits":
            CpuKernels(budget=Budget(kld_mean=1.0)).run(model, Context(targets.local(), None))
    assert results[0].std() > 0.5
    np.testing.assert_allclose(results[1], results[0], atol=0.02 * results[0].std())


# target files


def test_what_was_measured_is_a_target_that_plans_take(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    machine.write(machine.of_cpu("here", HERE, MEASURED, "2026-11-21"), path)
    target = targets.find(str(path))
    assert target.name == "here"
    assert (target.kind, target.isa, target.cores, target.catalog_name) == (
        "cpu", targets.local().isa, 2, targets.local().name,
    )  # fmt: skip
    assert target.bandwidth_gbs is not None
    assert target.bandwidth_gbs.value == 39
    assert target.bandwidth_gbs.verified
    assert target.bandwidth_gbs.source == "measured by llmforge doctor on 2026-11-21, 2 threads reading"
    assert target.rates["int8"].value == 0.9
    assert target.notes == ("1 thread reads 20.1 GB/s", "2 threads read 39.0 GB/s")
    shown = CliRunner().invoke(cli, ["targets", str(path)]).stdout
    assert "cores  2" in shown
    assert "bandwidth  39 GB/s\n    measured by llmforge doctor on 2026-11-21" in shown
    planned = CliRunner().invoke(
        cli, ["plan", str(ROOT / "recipes" / "quickstart.yaml"), "--target", str(path), "--json"]
    )
    assert planned.exit_code == 0, planned.stderr
    assert json.loads(planned.stdout)["target"] == "here"
    kernels = next(each for each in json.loads(planned.stdout)["passes"] if each["change"] == "cpu-kernels")
    assert kernels["verdict"] == "pays"
    assert "measured by llmforge doctor on 2026-11-21" in kernels["basis"]
    assert "int4 layers, onnxruntime kernels  0.3 TOP/s\n    measured by llmforge doctor" in shown
    assert "int4 layers, llmforge kernels, one row  30 GB/s of weights" in shown


def test_a_gpu_keeps_what_was_not_measured() -> None:
    target = machine.of_gpu("here", H200, 4.3e12, {"fp16": 788e12, "bf16": 788e12}, "2026-11-21")
    known = targets.load("h200")
    assert target.catalog_name == "h200"
    assert target.rates["bf16"].value == 788
    assert target.rates["fp8"] == known.rates["fp8"]
    assert target.memory_gb is not None
    assert target.memory_gb.value == 150.8
    assert target.share("bandwidth").value == pytest.approx(0.85 * 4800 / 4300, abs=1e-3)
    assert target.share("matrix_16").value == pytest.approx(0.65 * 989 / 788, abs=1e-3)
    assert "of what was measured" in target.share("bandwidth").source
    with pytest.raises(UnsupportedError, match="matches no target"):
        machine.of_gpu("x", Gpu(0, "NVIDIA GeForce RTX 3090", "86", 24 << 30), 1.0, {}, "2026-11-21")


def test_a_target_file_has_a_suffix_and_a_folder(tmp_path: Path) -> None:
    target = machine.of_cpu("here", HERE, MEASURED, "2026-11-21")
    with pytest.raises(UsageError, match=r"written as \.yaml"):
        machine.write(target, tmp_path / "here.json")
    with pytest.raises(UsageError, match="cannot be written"):
        machine.write(target, tmp_path / "absent" / "here.yaml")


@pytest.mark.usefixtures("no_gpu")
def test_the_command_measures_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "measure", lambda threads, told: MEASURED)
    path = tmp_path / "here.yaml"
    result = invoke("--measure", "--write", path, "--threads", "2")
    assert result.exit_code == 0
    assert "memory, 2 threads" in result.stdout
    assert "900 Gop/s" in result.stdout
    assert "30.0 GB/s" in result.stdout
    assert result.stdout.splitlines()[-1] == str(path)
    assert targets.read(path).bandwidth_gbs is not None
    facts = json.loads(invoke("--measure", "--write", path, "--json").stdout)
    assert facts["ceilings"]["bandwidth"] == {"1": 20.123456e9, "2": 39e9}


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--write", "here.yaml"), 2, "requires --measure"),
        (("--measure", "--device", "cuda:0"), 8, "there is no NVIDIA GPU cuda:0"),
        (("--device", "cuda:0"), 2, "requires --measure"),
        (("--measure", "--device", "gpu"), 2, "expected cpu or cuda:N"),
    ],
)
def test_mistakes_of_the_command(options: tuple[str, ...], code: int, says: str) -> None:
    result = invoke(*options)
    assert result.exit_code == code
    assert says in result.stderr
    assert result.stdout == ""


def test_a_gpu_is_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find", lambda: [H200])
    monkeypatch.setattr(gpus, "copy_bandwidth", lambda gpu: 4.3e12)
    monkeypatch.setattr(gpus, "matrix_rates", lambda gpu, product: {"fp16": 788e12})
    path = tmp_path / "gpu.yaml"
    assert invoke("--measure", "--device", "cuda:0", "--write", path).exit_code == 0
    target = targets.read(path)
    assert target.catalog_name == "h200"
    assert target.bandwidth_gbs is not None
    assert target.bandwidth_gbs.value == 4300


# recipes


def recipe(tmp_path: Path, target: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"schema: 1\nname: sample\ncheckpoint: {ROOT / 'tests' / 'data' / 'docs-llama-7m'}\ntarget: {target}\n"
        "engine: {max_context: 64}\npasses: []\n"
    )
    return path


def test_a_recipe_takes_the_file_of_a_machine(tmp_path: Path) -> None:
    machine.write(machine.of_cpu("here", HERE, MEASURED, "2026-11-21"), tmp_path / "here.yaml")
    loaded = Recipe.load(recipe(tmp_path, "here.yaml"))
    assert loaded.target == str(tmp_path / "here.yaml")
    assert targets.find(loaded.target).catalog_name == targets.local().name
    resolved = loaded.resolved()["target"]
    assert resolved["name"] == "here.yaml"
    assert len(resolved["sha256"]) == 64
    assert str(tmp_path) not in json.dumps(loaded.resolved()["target"])


def test_a_recipe_names_a_target_in_any_case(tmp_path: Path) -> None:
    assert Recipe.load(recipe(tmp_path, "CPU-AVX2")).target == "cpu-avx2"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("title: x\nkind: cpu\nisa: avx2\nengines: [onnxruntime]\n", "has no `like`"),
        (
            "title: x\nlike: cpu-avx9\nkind: cpu\nisa: avx2\nengines: [onnxruntime]\n",
            "like: no target is named 'cpu-avx9'",
        ),
        (
            "title: x\nlike: h100\nkind: gpu\nengines: [onnxruntime]\n",
            "like: 'h100' is ambiguous: h100-pcie",
        ),
        ("title: x\nlike: local\nkind: cpu\nisa: avx2\nengines: [onnxruntime]\n", "`like` is 'local'; expected one of"),
        ("title: x\n", "not a target"),
    ],
)
def test_a_file_that_is_no_machine_is_refused_with_its_place(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "odd.yaml").write_text(content)
    with pytest.raises(UsageError) as caught:
        Recipe.load(recipe(tmp_path, "odd.yaml"))
    assert says in caught.value.message
    assert "recipe.yaml:4:1" in caught.value.message
