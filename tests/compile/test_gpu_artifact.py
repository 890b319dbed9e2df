"""An artifact for a GPU on a machine without one, through the commands that load it; and the session over the wheel."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmforge.artifact import Artifact
from llmforge.base.errors import EnvironmentLacks
from llmforge.cli import cli
from llmforge.recipe import ServingSpec
from llmforge.runtime.config import DeviceFacts, PlanFacts, RuntimeConfig
from llmforge.runtime.device.cuda import CudaDevice
from llmforge.serving import Engine, load

from ..samples import published, stored

ROOT = Path(__file__).resolve().parents[2]


def has_cuda() -> bool:
    try:
        CudaDevice()
    except EnvironmentLacks:
        return False
    return True


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Artifact:
    out = tmp_path_factory.mktemp("gpu")
    return published.random_decoder(out, sample_checkpoint, max_context=64, max_batch=2, serving=ServingSpec())


@pytest.fixture(params=["cuda", "cuda with TensorRT", "tensorrt", "tensorrt-rtx"])
def for_gpu(request: pytest.FixtureRequest, artifact: Artifact, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(artifact.path, tmp_path / "artifact"))
    path = copy / "engine" / "runtime.json"
    path.chmod(0o644)
    config = RuntimeConfig.read(path)
    provider, _, more = request.param.partition(" ")
    changes = {"provider": provider, "device": DeviceFacts(89, 1 << 30)}
    if provider == "cuda":
        changes |= {"onnxruntime": "1.31.1", "plan": None}
        changes |= {"provider_options": {"trt_fp16_enable": "True"}} if more else {}
    else:
        module = request.param.replace("-", "_")
        changes |= {"onnxruntime": None, "plan": PlanFacts(module, "11.4.0", "model.plan", ())}
    path.write_text(dataclasses.replace(config, **changes).to_json())
    stored.reseal(copy)
    return copy


@pytest.mark.skipif(has_cuda(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    "command",
    [["run", "", "once"], ["bench", "", "--quiet", "--prompt-tokens", "8", "--output-tokens", "4"], ["serve", ""]],
    ids=lambda command: command[0],
)
def test_every_command_ends_with_exit_code_8_and_one_helpful_line(for_gpu: Path, command: list[str]) -> None:
    done = CliRunner().invoke(cli, [argument or str(for_gpu) for argument in command])
    assert done.exit_code == 8
    error, hint = done.stderr.splitlines()
    assert "no CUDA device" in error
    assert f"llmforge[{RuntimeConfig.read(for_gpu / 'engine' / 'runtime.json').provider}]" in hint


@pytest.mark.skipif(has_cuda(), reason="there is a CUDA device")
def test_so_does_the_runtime(for_gpu: Path) -> None:
    for opens in (load, Engine.load):
        with pytest.raises(EnvironmentLacks, match="no CUDA device") as caught:
            opens(for_gpu)
        assert caught.value.exit_code == 8


def rehearsed(monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    """Run the session over the wheel's host code (benchmarks/cuda_session.py)."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import cuda_wheel

    wheel = Path(os.environ.get("LLMFORGE_CUDA_WHEEL", cuda_wheel.CACHE))
    if not (wheel / "onnxruntime").is_dir():
        pytest.skip(f"{cuda_wheel.WHEEL} is not in {wheel} (LLMFORGE_CUDA_WHEEL)")
    command = [sys.executable, str(ROOT / "benchmarks" / "cuda_session.py"), *options, "--wheel", str(wheel)]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("cudnn", ["accept", "refuse", "fail"])
def test_attention_is_cudnns_where_that_takes_it_and_nobody_elses_fault_where_not(
    cudnn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over blocks on SM 90: ONNX Runtime goes on by itself where cuDNN refuses, the session where it fails."""
    found = rehearsed(monkeypatch, "--kv-cache", "paged", "--cudnn", cudnn)
    notes = [note for note in found["notes"] if "attention runs without cuDNN" in note]
    if cudnn == "accept":
        assert found["cudnn"] > 6  # layers
    else:
        assert found["cudnn"] == (0 if cudnn == "refuse" else 1)
    assert len(notes) == (cudnn == "fail")
    assert all("while running PagedAttention node" in note for note in notes)
    assert [each["captured_and_replayed"][1:] for each in found["captures"]] == [[[1, 1], [1, 2], [1, 3]]] * 4
    assert found["forbidden"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache", ["slots", "paged"])
def test_the_wheels_own_host_code_records_and_replays_as_the_session_wants(
    kv_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime's CUDA provider over a device that computes nothing: what it makes of what is bound to it."""
    found = rehearsed(monkeypatch, "--kv-cache", kv_cache)
    assert found["providers"][0] == "CUDAExecutionProvider"
    assert found["caches_as_configured"] is True
    lengths = "total_sequence_length" if kv_cache == "slots" else "attention_metadata"
    assert found["read_on_host"] == [f"{lengths}: Cpu"]
    # Recorded by the first run of an id, replayed in it and in those that follow, wherever inputs are bound.
    wanted = [[0, 0], [1, 1], [1, 2], [1, 3]]
    assert [each["captured_and_replayed"] for each in found["captures"]] == [wanted] * 4
    three = [0, 0] if kv_cache == "slots" else [0, 1]  # rows of padding come from the scheduler, or the session
    assert found["decode"] == {"1": [0, 1], "2": [0, 1], "3": three, "4": [0, 1], "8": [0, 1]}
    assert (found["prefill"], found["forbidden"]) == ([0, 0], 0)
    if (
        kv_cache == "slots"
    ):  # a step that begins behind another one, on one stream, and the only wait: for the other one
        calls = [tuple(each) for each in found["calls"]]
        assert calls.count(("cudaEventSynchronize", "0", "0")) == 1
        rows, vocabulary, head = 8, 8192, 4 * (2 * 256 + 64)
        assert [each for each in calls if "Synchronize" not in each[0]] == [
            ("cudaMemcpyAsync", "1", str(4 * rows * vocabulary)),  # the other one's logits, aside
            ("cudaEventRecord", "1", "0"),
            ("cudaMemcpyAsync", "1", "1536"),  # inputs, of 256 bytes each
            ("cudaGraphLaunch", "1", "0"),
            ("cudaMemcpyAsync", "1", str(256 + rows * head)),  # guesses and heads
            ("cudaEventRecord", "1", "0"),
        ]
