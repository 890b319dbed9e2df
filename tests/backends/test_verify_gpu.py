"""The program that verifies a GPU, where there is none: every step's logic, on the CPU and with stubs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmforge.base.errors import EnvironmentLacks, UsageError
from llmforge.runtime.device.cuda import CudaDevice

ROOT = Path(__file__).resolve().parents[2]


def verify(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.verify_gpu", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def program(monkeypatch) -> Any:
    """The package, as it is imported from the root of the repository."""
    monkeypatch.syspath_prepend(str(ROOT))
    import benchmarks.verify_gpu.__main__ as main
    from benchmarks.verify_gpu import checks, evidence, runner, scale

    return {"main": main, "checks": checks, "evidence": evidence, "runner": runner, "scale": scale}


def test_without_a_gpu_it_ends_with_exit_code_8_and_says_what_is_missing(tmp_path):
    try:
        CudaDevice()
    except EnvironmentLacks:
        done = verify("--work", str(tmp_path / "work"))
        assert done.returncode == 8
        error, hint = done.stderr.splitlines()
        assert error.startswith("error: no CUDA device")
        assert "llmforge[cuda]" in hint
        assert not (tmp_path / "work").exists()
    else:
        pytest.skip("there is a CUDA device")


def test_a_dry_run_writes_its_tables_marks_them_and_goes_on_where_it_was(tmp_path):
    options = ["--dry-run", "--work", str(tmp_path), "--only", "environment,tensorrt"]
    done = verify(*options)
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.strip()).read_text()
    assert "**DRY RUN** on a CPU" in page
    assert "| device | host memory" in page
    assert "| tensorrt | not run | exit 8: error: a plan is loaded on a CUDA device alone |" in page
    told = json.loads((tmp_path / "gpu-evidence.json").read_text())
    assert told["dry_run"] is True
    assert told["steps"]["environment"]["result"]["copy_gb_per_s"] > 0
    again = verify(*options)
    assert "environment: ok, done before" in again.stderr
    assert "tensorrt …" in again.stderr  # what was not run is tried again


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_whole_dry_run_goes_well(tmp_path):
    done = verify("--dry-run", "--work", str(tmp_path))
    steps = json.loads((tmp_path / "gpu-evidence.json").read_text())["steps"]
    assert done.returncode == 0, done.stderr
    lacking = {name for name, step in steps.items() if step["status"] != "ok"}
    assert lacking == {"tensorrt", "tensorrt-rtx", "speed:1:tiny:vllm", "speed:2:tiny:vllm"}
    kinds = {
        "environment",
        "parity",
        "capture",
        "shape",
        "build",
        "speed",
        "profile",
        "attention",
        "ranks",
        "calibration",
    }
    assert {name.partition(":")[0] for name in steps} >= kinds | {"calibration"}
    assert {f"parity:{each}:llama" for each in ("fp32", "int8", "int4", "int8-kv")} <= set(steps)
    page = (tmp_path / "gpu-evidence.md").read_text()
    for subject in ("torch-eager", "torch-compile", "llmforge-int8", "llmforge-int4"):
        assert f"| {subject} | 2 |" in page
    served = page[page.index("## TPOT through the scheduler") :]
    assert "| llmforge-int4 | 2 |" in served
    assert "torch" not in served[: served.index("##", 4)]
    for part in ("step", "sampling", "copies"):
        assert f"| {part} | " in page
    assert "rank 1 of 2 ended: its process was killed" in page[page.index("## Two ranks") :]


STUB = """
import json, sys, time
from pathlib import Path
name, folder = sys.argv[-1], Path(sys.argv[1])
print("says", name)
if name == "slow":
    time.sleep(60)
if name in ("refused", "lacks", "broken"):
    raise SystemExit({"refused": 6, "lacks": 8, "broken": 1}[name])
(folder / f"{name}.result.json").write_text(json.dumps({"of": name}))
"""


def test_a_step_that_fails_is_recorded_and_the_others_go_on(program, tmp_path):
    step, record = program["checks"].Step, program["runner"].Record(tmp_path)
    steps = [
        step("broken", 60, None),
        step("lacks", 60, None),
        step("refused", 60, None),
        step("slow", 0.5, None),
        step("good", 60, None, (), lambda result, log: {**result, "log": log.strip()}),
        step("behind-broken", 60, None, ("good", "broken")),
        step("behind-good", 60, None, ("good",)),
    ]
    command = [sys.executable, "-c", STUB, str(tmp_path)]
    program["runner"].run(steps, record, command, deadline=time.monotonic() + 60)
    outcomes = {each.name: record.read(each.name) for each in steps}
    assert {name: outcome.status for name, outcome in outcomes.items()} == {
        "broken": "failed",
        "lacks": "not run",
        "refused": "refused",
        "slow": "failed",
        "good": "ok",
        "behind-broken": "not run",
        "behind-good": "ok",
    }
    assert outcomes["good"].result == {"of": "good", "log": "says good"}
    assert outcomes["broken"].reason == "exit 1: says broken"
    assert outcomes["slow"].reason == "it took more than 0 s and was ended"
    assert outcomes["slow"].seconds < 30
    assert outcomes["behind-broken"].reason == "broken did not go well"


def test_what_failed_is_run_again_only_if_that_is_asked_for(program, tmp_path):
    steps, record = [program["checks"].Step(name, 60, None) for name in ("broken", "good")], None
    command, told = [sys.executable, "-c", STUB, str(tmp_path)], []
    for again in (False, False, True):
        record = program["runner"].Record(tmp_path)
        for step in steps:
            record.path(step.name, "log").unlink(missing_ok=True)
        deadline = time.monotonic() + 60
        program["runner"].run(steps, record, command, deadline=deadline, again=again, after_each=lambda: told.append(0))
        told.append([step.name for step in steps if record.path(step.name, "log").exists()])
    assert told == [0, 0, ["broken", "good"], [], 0, ["broken"]]


KILLED = """
import sys, time
from pathlib import Path
from benchmarks.verify_gpu import checks, runner
folder = Path(sys.argv[1])
steps = [checks.Step(name, 60, None) for name in ("good", "hangs", "behind")]
stub = "import os, sys, time; from pathlib import Path; folder, name = Path(sys.argv[1]), sys.argv[2]; "
stub += "(folder / f'{name}.{os.getpid()}.pid').touch(); time.sleep(60 if name == 'hangs' else 0); "
stub += "(folder / f'{name}.result.json').write_text('{}')"
runner.run(steps, runner.Record(folder), [sys.executable, "-c", stub, str(folder)], deadline=time.monotonic() + 60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a process dies with its parent on Linux alone")
def test_a_run_that_is_killed_leaves_no_process_and_goes_on_behind_what_it_was_doing(program, tmp_path):
    """An orphan, or the same step once more, would hold the GPU."""

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )

    first, until = start(), time.monotonic() + 120
    while not (begun := list(tmp_path.glob("hangs.*.pid"))) and time.monotonic() < until:
        time.sleep(0.05)
    second = start()
    assert "are being run" in second.communicate(timeout=120)[1]  # no second run beside it
    assert second.returncode
    first.kill()  # -9
    first.communicate(timeout=60)
    pid = int(begun[0].name.split(".")[1])
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < until, "the step lives on"
        time.sleep(0.05)
    third = start()
    assert "hangs: failed, done before" in third.communicate(timeout=120)[1]
    assert third.returncode == 0
    record = program["runner"].Record(tmp_path)
    assert record.read("hangs").reason == "the whole run was ended while it ran"
    assert (record.read("good").status, record.read("behind").status) == ("ok", "ok")
    assert len(list(tmp_path.glob("*.pid"))) == 3  # each was begun once


def test_no_step_is_begun_when_the_time_is_over(program, tmp_path):
    record = program["runner"].Record(tmp_path)
    program["runner"].run([program["checks"].Step("late", 60, None)], record, ["false"], deadline=time.monotonic() - 1)
    assert record.read("late").reason == "the time for the whole run was used up"


def test_results_of_a_gpu_and_of_a_dry_run_are_kept_apart(program, tmp_path):
    program["main"]._same_kind(tmp_path / "scale.json", dry=True)
    program["main"]._same_kind(tmp_path / "scale.json", dry=True)
    with pytest.raises(UsageError, match="holds a dry run's results"):
        program["main"]._same_kind(tmp_path / "scale.json", dry=False)


def test_kernels_are_read_off_what_onnxruntime_prints(program):
    log = (
        "noise\n== PREFILL\nOperator=GroupQueryAttention Node=a DataType=fp16 SdpaKernel=FLASH_ATTENTION\n"
        "== DECODE\nOperator=GroupQueryAttention Node=a DataType=fp16 SdpaKernel=XQA EffectiveKvLengthBound=128\n"
    )
    expected = {"prefill": ["FLASH_ATTENTION"], "decode": ["XQA"]}
    found = program["checks"].read_attention({"expected": expected}, log)
    assert found["found"] == expected
    assert found["as_expected"] is True
    assert program["checks"].read_attention({"expected": expected}, "")["as_expected"] is False
    wrong = program["checks"].read_attention({"expected": {**expected, "decode": ["FLASH_ATTENTION"]}}, log)
    assert wrong["as_expected"] is False


def test_the_plan_of_a_gpu_has_every_model_and_takes_turns(program):
    from ..models import zoo

    names = [step.name for step in program["checks"].plan(program["scale"].GPU)]
    assert {f"parity:fp16:{name}" for name in zoo.ZOO} <= set(names)
    assert {f"parity:{each}:llama" for each in ("bf16", "int8", "int4", "int8-kv")} <= set(names)
    speed = [name for name in names if name.startswith("speed:")]
    assert speed[:6] == [
        "speed:1:1b:torch-eager",
        "speed:1:1b:llmforge-bf16",
        "speed:1:1b:llmforge-int8",
        "speed:1:1b:llmforge-int4",
        "speed:1:1b:torch-compile",
        "speed:1:1b:vllm",
    ]
    assert len(speed) == 36
    assert len(set(names)) == len(names)


def test_a_lease_settles_parity_of_every_precision_before_it_measures_one_round(program):
    names = [step.name for step in program["checks"].plan(program["scale"].LEASE)]
    kinds = list(dict.fromkeys(name.partition(":")[0] for name in names))
    order = [
        "environment",
        "parity",
        "capture",
        "calibration",
        "shape",
        "build",
        "speed",
        "profile",
        "tensorrt",
        "tensorrt-rtx",
        "ranks",
    ]
    assert kinds == order
    assert {name.split(":")[1] for name in names if name.startswith("parity:")} == {
        "fp16", "bf16", "int8", "int4", "int8-kv", "fp16-slots",
    }  # fmt: skip
    assert {name.split(":")[1] for name in names if name.startswith("speed:")} == {"1"}
    assert program["main"]._minutes("40m") == 40
    assert program["main"]._minutes("1.5h") == 90
    with pytest.raises(argparse.ArgumentTypeError, match="such as 40m"):
        program["main"]._minutes("40")


@pytest.mark.parametrize(
    ("title", "sm", "gib", "target"),
    [("NVIDIA H100 80GB HBM3", 90, 80, "h100-sxm"), ("NVIDIA H100 PCIe", 90, 80, "h100-pcie"),
     ("NVIDIA GeForce RTX 4090", 89, 24, "rtx-4090"), ("NVIDIA L4", 89, 23, "l4"), ("NVIDIA A30", 80, 24, None)],
)  # fmt: skip
def test_devices_are_named_as_doctor_names_them(program, monkeypatch, title, sm, gib, target):
    from benchmarks.verify_gpu import place

    device = SimpleNamespace(index=0, name=title, sm=sm, memory=lambda: (0, gib << 30))
    monkeypatch.setattr(place.devices, "CudaDevice", lambda: device)
    if target is None:
        with pytest.raises(EnvironmentLacks, match="no target is NVIDIA A30 of compute capability 80"):
            place.target(program["scale"].GPU, None)
    else:
        assert place.target(program["scale"].GPU, None).name == target
    assert place.target(program["scale"].GPU, "l40s").name == "l40s"


def test_gaps_are_those_while_all_requests_decode(program):
    from benchmarks.verify_gpu import speed

    assert speed.gap([[0.0, 1.0, 2.0, 2.1, 2.2, 5.0], [2.0, 2.1, 2.2]]) == pytest.approx(0.1)
    assert speed.gap([[0.0, 0.5], [1.0, 1.3]]) == pytest.approx(0.4)  # they never decode together


def test_ranges_time_what_they_watch_and_leave_it_as_it_was(program):
    from benchmarks.verify_gpu.ranges import Ranges

    class Worker:
        def work(self, x):
            if x < 0:
                raise ValueError("below 0")
            return x + 1

    worker, ranges, plain = Worker(), Ranges(), Worker.work
    with ranges.watch({"class": [(Worker, "work")], "one": [(worker, "work")]}):
        assert worker.work(1) == 2
        with pytest.raises(ValueError, match="below 0"):
            worker.work(-1)
    assert {name: part["calls"] for name, part in ranges.table().items()} == {"class": 2, "one": 2}
    assert Worker.work is plain
    assert vars(worker) == {}


def test_throughput_and_bandwidth_are_medians_over_the_rounds(program):
    scale, outcome = program["scale"].GPU, program["runner"].Outcome
    machine = {
        "device": "GPU",
        "sm": 90,
        "memory_bytes": 80 << 30,
        "driver": "1",
        "target": "h100",
        "python": "3",
        "copy_gb_per_s": 2000.0,
        "data_sheet_gb_per_s": 3350.0,
        "packages": {"torch": "2"},
    }
    outcomes = {
        "environment": outcome("ok", 1, machine),
        "build:8b:bf16": outcome("ok", 1, {"weight_bytes_per_token": 16_000_000_000, "kv_bytes_per_token": 0}),
        "speed:2:8b:llmforge-bf16": outcome("failed", 1, None, "a | b\nc"),
    }
    for number, step_s in ((1, 0.010), (3, 0.016)):
        steps = {"1": step_s, "8": 0.02, "64": 0.032}
        served = {"greedy": {"1": step_s, "8": 0.025, "64": 0.04}, "sampled": {"1": 0.02, "8": 0.03, "64": 0.064}}
        found = {"step_s": steps, "ttft_s": {"512": 0.05, "2048": 0.2}, "tpot_s": served}
        outcomes[f"speed:{number}:8b:llmforge-bf16"] = outcome("ok", 1, found)
    page = program["evidence"].render(outcomes, scale)
    assert "DRY RUN" not in page
    assert "| llmforge-bf16 | 1 | 13.00 | 77 | 62% | 37% | 2 |" in page
    assert "| llmforge-bf16 | 64 | 32.00 | 2000 | 25% | 15% | 2 |" in page
    assert "| llmforge-bf16 | 64 | 40.00 | 64.00 | 1600 | 1000 | 20% | 12% | 2 |" in page
    assert "| llmforge-bf16 | 50.0 | 200.0 | 2 |" in page
    assert "| speed:2:8b:llmforge-bf16 | failed | a \\| b c |" in page
    assert "## Decode steps alone, 8b: 32 layers of hidden size 4096" in page
