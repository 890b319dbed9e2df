"""Artifacts in onnxruntime-genai, optimum-onnx, OpenVINO and llama-cpp-python's server, each in its own environment.

LLMFORGE_TEST_ENVIRONMENTS names a folder that keeps the environments between runs; else they are made anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML

from llmforge.base.progress import Silent
from llmforge.checkpoint import Checkpoint
from llmforge.compile import pipeline
from llmforge.gates.decision import Verdict
from llmforge.measure import runtimes
from llmforge.metrics.agreement import RuntimeName
from llmforge.recipe import Recipe
from llmforge.serving import Runner, Sampling, load

from ..farm.nodes import free_port
from ..models.runtimes import RUNTIMES, environment

RECIPES = Path(__file__).parents[2] / "recipes"
PROMPTS = (
    "The configuration file",
    "To install the package, run",
    "def main(",
    "This function returns the",
    "Errors are raised when a value of another type is given, or where",
)
TOKENS = 64  # of each answer, as in tests/runtimes/*.py

FUSED = ["fuse-norms", "pack-qkv", "pack-gate-up"]
INT4 = {"quantize-weights": {"bits": 4, "block_size": 32, "method": "rtn", "budget": {"kld_mean": 0.08}}}
INT8_KV = {"quantize-kv-cache": {"bits": 8, "budget": {"kld_mean": 0.005}}}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def genai(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment("genai", tmp_path_factory.mktemp("environments"))


@pytest.fixture(scope="module")
def optimum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment("optimum", tmp_path_factory.mktemp("environments"))


def build(folder: Path, data: Path, passes: list[Any], backend: str = "onnxruntime") -> Path:
    """Build the sample checkpoint with `passes`, measuring nothing."""
    lossy = any(isinstance(step, dict) and "budget" in next(iter(step.values())) for step in passes)
    recipe: dict[str, Any] = {
        "schema": 1,
        "name": "interop",
        "checkpoint": str(data / "docs-llama-7m"),
        "target": "local",
        "engine": {"backend": backend, "max_context": 256, "max_batch": 8, "threads": 1},
        "passes": passes,
    }
    if lossy:
        recipe["calibration"] = {"data": str(data / "calibration.jsonl"), "samples": 8, "length": 256, "seed": 0}
    folder.mkdir(exist_ok=True)
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe))  # JSON is YAML
    return pipeline.build(Recipe.load(file), folder, Silent()).path


def answers(runner: Runner) -> list[list[int]]:
    """Continue each prompt greedily through llmforge's own runtime."""
    sampling = Sampling(max_tokens=TOKENS)
    made = []
    for prompt in PROMPTS:
        steps = runner.generate_batch([runner.tokenizer.encode(prompt).ids], [sampling])
        made.append([token for step in steps for token in step.token_ids if token is not None])
    return made


def export_format(python: Path, script: str, artifact: Path) -> dict[str, Any]:
    """Run the prompts through tests/runtimes/`script` in the environment of `python`."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(artifact), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [python, RUNTIMES / script, artifact / "engine"],
        input=json.dumps(PROMPTS),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


def compare(theirs: dict[str, Any], artifact: Path, *, batched: int = TOKENS) -> None:
    """Hold tokens and text of another runtime against our own: one by one, and `batched` tokens of a padded batch."""
    runner = load(artifact)
    ours = answers(runner)
    assert sum(len(row) == TOKENS for row in ours) >= 3  # the others end before
    assert len({tuple(row) for row in ours}) == len(PROMPTS)  # the model answers the prompt
    assert theirs["ids"] == [runner.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    assert theirs["alone"] == ours
    assert theirs["texts"] == [runner.tokenizer.decode(row) for row in ours]
    cut = [own[:batched] for own in ours]
    assert [row[: len(own)] for row, own in zip(theirs["batch"], cut, strict=True)] == cut  # then padding


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of recipes/portable.yaml, as it ships; its measurements, which change no byte of it, left out."""
    folder = tmp_path_factory.mktemp("portable")
    recipe = YAML(typ="safe").load(RECIPES / "portable.yaml")
    del recipe["validation"], recipe["gates"]
    recipe["checkpoint"] = str(RECIPES / recipe["checkpoint"])
    recipe["calibration"]["data"] = str(RECIPES / recipe["calibration"]["data"])
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return pipeline.build(Recipe.load(folder / "recipe.yaml"), folder, Silent()).path


def test_validation_runs_the_artifact_in_both(genai: Path, optimum: Path, data: Path, tmp_path: Path) -> None:
    """The evidence of `validation.runtimes`: the same kernels give the same logits, bit by bit."""
    recipe: dict[str, Any] = {
        "schema": 1,
        "name": "interop",
        "checkpoint": str(data / "docs-llama-7m"),
        "target": "local",
        "engine": {"backend": "onnxruntime", "max_context": 256, "max_batch": 8, "threads": 1},
        "passes": [*FUSED, "flash-attention", INT4, {"genai-interface": {"logits": "last"}}],
        "validation": {
            "quality": {"data": str(data / "evaluation.jsonl"), "context": 128, "max_tokens": 2048},
            "runtimes": ["onnxruntime-genai", "optimum"],
        },
        "gates": {f"runtime.{name}.agreement": {"min": 0.99} for name in ("onnxruntime-genai", "optimum")},
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe))  # JSON is YAML
    pythons: dict[RuntimeName, Path] = {
        "onnxruntime-genai": genai,
        "optimum": optimum,
    }
    report = pipeline.build(Recipe.load(file), tmp_path, Silent(), pythons=pythons).report
    assert [run.failure for run in report.runtimes] == [None, None]
    for run in report.runtimes:
        assert run.figures is not None
        assert len(run.prompts) == 16
        assert run.figures.agreement.value == run.figures.same_answers.value == 1.0
        assert run.figures.logit_difference_max == 0.0
        assert run.versions["onnxruntime"] == "1.31.1"
    assert report.verdict is Verdict.PASS


def test_the_portable_artifact_gives_the_same_text_in_onnxruntime_genai(portable: Path, genai: Path) -> None:
    compare(export_format(genai, "answer_with_genai.py", portable), portable)


def test_the_portable_artifact_gives_the_same_text_in_optimum(portable: Path, optimum: Path) -> None:
    compare(export_format(optimum, "answer_with_optimum.py", portable), portable)


@pytest.mark.parametrize(
    ("quantized", "logits"),
    [([], "all"), ([INT4], "all"), ([INT4, INT8_KV], "all"), ([INT4], "last")],
    ids=["fp32", "int4", "int4-int8kv", "int4-last"],
)
def test_onnxruntime_genai_gives_the_same_text(
    quantized: list[Any], logits: str, genai: Path, data: Path, tmp_path: Path
) -> None:
    passes = [*FUSED, "flash-attention", *quantized, {"genai-interface": {"logits": logits}}]
    artifact = build(tmp_path / "build", data, passes)
    compare(export_format(genai, "answer_with_genai.py", artifact), artifact)


@pytest.mark.parametrize(
    ("quantized", "logits"), [([], "all"), ([INT4], "all"), ([INT4], "last")], ids=["fp32", "int4", "int4-last"]
)
def test_optimum_gives_the_same_text(
    quantized: list[Any], logits: str, optimum: Path, data: Path, tmp_path: Path
) -> None:
    artifact = build(tmp_path / "build", data, [*FUSED, *quantized, {"optimum-interface": {"logits": logits}}])
    theirs = export_format(optimum, "answer_with_optimum.py", artifact)
    # A row that is padded attends over other slots, in another order of sums; under int4 activations are rounded again,
    # and after some tens of tokens of a text that repeats itself two candidates come to within that.
    compare(theirs, artifact, batched=32)
    assert theirs["logits"] == [1, len(theirs["ids"][0]) if logits == "all" else 1, 8192]


# A table in 16 bits: OpenVINO (2026.4.1) wants the scales of a quantized one to be constants, which they are not where
# they are cast or shaped first.
PLAIN_TABLE = {"quantize-weights": {**INT4["quantize-weights"], "embedding_bits": 16}}


def in_openvino(artifact: Path, tmp_path: Path, prompts: list[list[int]]) -> subprocess.CompletedProcess[str]:
    python = environment("openvino", tmp_path)
    command = [python, RUNTIMES / "answer_with_openvino.py", artifact / "engine"]
    return subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("quantized", "equal"), [([], 5), ([PLAIN_TABLE], 4)], ids=["fp32", "int4"])
def test_openvino_gives_the_same_answers(quantized: list[Any], equal: int, data: Path, tmp_path: Path) -> None:
    """From the ONNX model itself; in int4 it dequantizes, where ONNX Runtime rounds activations as well."""
    artifact = build(tmp_path / "build", data, [*FUSED, *quantized, {"optimum-interface": {"logits": "last"}}])
    runner = load(artifact)
    done = in_openvino(artifact, tmp_path, [runner.tokenizer.encode(prompt).ids for prompt in PROMPTS])
    assert done.returncode == 0, done.stderr[-2000:]
    theirs, ours = json.loads(done.stdout)["answers"], answers(runner)
    same = [own == other[: len(own)] for own, other in zip(ours, theirs, strict=True)]
    print(f"{sum(same)} of {len(same)} answers are equal")
    assert sum(same) >= equal


def test_openvino_refuses_a_quantized_table(data: Path, tmp_path: Path) -> None:
    artifact = build(tmp_path / "build", data, [*FUSED, INT4, {"optimum-interface": {"logits": "last"}}])
    done = in_openvino(artifact, tmp_path, [[1]])
    assert done.returncode != 0
    assert "GatherBlockQuantized: 'scales' must be a constant" in done.stderr


def test_the_server_of_llama_cpp_gives_the_same_answers(data: Path, tmp_path: Path) -> None:
    """Over HTTP, as it comes; its cache is fp16, and that of the evidence fp32."""
    int8 = {"quantize-weights": {**INT4["quantize-weights"], "bits": 8, "symmetric": True, "scales": "fp16"}}
    artifact = build(tmp_path / "build", data, [int8], backend="gguf")
    checkpoint, python = Checkpoint.open(data / "docs-llama-7m"), environment("llama_cpp", tmp_path)
    vocabulary = checkpoint.geometry.vocabulary
    [found] = runtimes.find(["llama-cpp"], {"llama-cpp": python})
    with runtimes.opened(artifact, vocabulary, found) as other:
        prompts = [np.array(checkpoint.tokenizer.encode(prompt).ids) for prompt in PROMPTS]
        expected = [checkpoint.tokenizer.decode(other.answer(ids, TOKENS)) for ids in prompts]
    port = free_port()
    options = ["--model", artifact / "engine" / "model.gguf", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen([python, "-m", "llama_cpp.server", *options, "--n_ctx", "256"]) as server:
        try:
            said = [_complete(port, prompt) for prompt in PROMPTS]
        finally:
            server.terminate()
    same = sum(one == other for one, other in zip(said, expected, strict=True))
    print(f"{same} of {len(said)} answers are equal")
    assert same >= 4, list(zip(said, expected, strict=True))


def _complete(port: int, prompt: str) -> str:
    """Ask for a greedy completion; the first time, until the server is there."""
    body = json.dumps({"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "repeat_penalty": 1.0}).encode()
    headers = {"Content-Type": "application/json"}
    until = time.monotonic() + 300
    while True:
        try:
            with urllib.request.urlopen(
                urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers), timeout=300
            ) as reply:
                text: str = json.load(reply)["choices"][0]["text"]
                return text
        except urllib.error.URLError:
            if time.monotonic() > until:
                raise
            time.sleep(1)
