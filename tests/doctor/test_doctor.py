"""`llmforge doctor`: what it finds, measures and writes; GPUs stand in as what their drivers print."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from llmforge import native, targets
from llmforge.base.errors import EnvironmentLacks, UnsupportedError, UsageError, VersionMismatch
from llmforge.checkpoint import versions
from llmforge.cli import cli
from llmforge.doctor import environment, machine, render
from llmforge.doctor.environment import Check
from llmforge.measure import ceilings, gpus
from llmforge.measure.ceilings import CpuCeilings, KernelRates
from llmforge.measure.gpus import Gpu
from llmforge.measure.machine import Machine, OthersMeter
from llmforge.recipe import Recipe

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
        (("--threads", "1"), 2, "requires --measure"),
        (("--prove-transformers", "--measure"), 2, "--measure cannot be used with --prove-transformers"),
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
