"""The program that verifies a GPU, where there is none: every step's logic, on the CPU and with stubs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llmforge.base.errors import EnvironmentLacks, UsageError
from llmforge.runtime.backends.device import CudaDevice

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
    assert "tensorrt …" in again.stderr  # what did not go well is tried again


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_whole_dry_run_goes_well(tmp_path):
    done = verify("--dry-run", "--work", str(tmp_path))
    steps = json.loads((tmp_path / "gpu-evidence.json").read_text())["steps"]
    assert done.returncode == 0, done.stderr
    assert {name for name, step in steps.items() if step["status"] != "ok"} == {"tensorrt", "tensorrt-rtx"}
    assert {name.partition(":")[0] for name in steps} >= {"attention", "parity", "capture", "shape", "build", "speed"}
    page = (tmp_path / "gpu-evidence.md").read_text()
    for subject in ("torch-eager", "torch-compile", "llmforge-int8", "llmforge-int4"):
        assert f"| {subject} | 2 |" in page


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
    from .. import zoo

    names = [step.name for step in program["checks"].plan(program["scale"].GPU)]
    assert {f"parity:{name}" for name in zoo.ZOO} <= set(names)
    speed = [name for name in names if name.startswith("speed:")]
    assert speed[:5] == [
        "speed:1:torch-eager",
        "speed:1:llmforge-bf16",
        "speed:1:llmforge-int8",
        "speed:1:llmforge-int4",
        "speed:1:torch-compile",
    ]
    assert len(speed) == 15
    assert len(set(names)) == len(names)


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
        "packages": {"torch": "2"},
    }
    outcomes = {
        "environment": outcome("ok", 1, machine),
        "build:bf16": outcome("ok", 1, {"weight_bytes_per_token": 16_000_000_000, "kv_bytes_per_token": 0}),
        "speed:2:llmforge-bf16": outcome("failed", 1, None, "a | b\nc"),
    }
    for number, step_s in ((1, 0.010), (3, 0.016)):
        steps = {"step_s": {"1": step_s, "8": 0.02, "64": 0.032}}
        outcomes[f"speed:{number}:llmforge-bf16"] = outcome("ok", 1, steps)
    page = program["evidence"].render(outcomes, scale)
    assert "DRY RUN" not in page
    assert "| llmforge-bf16 | 1 | 13.00 | 77 | 62% | 2 |" in page
    assert "| llmforge-bf16 | 64 | 32.00 | 2000 | 25% | 2 |" in page
    assert "| speed:2:llmforge-bf16 | failed | a \\| b c |" in page
    assert "## Decoding, 32 layers of hidden size 4096" in page
