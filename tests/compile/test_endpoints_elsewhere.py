"""`llmforge judge` of vLLM's and llama-cpp-python's servers: bounds contain what they tell when they tell all."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmforge import targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.gguf import builder as gguf
from llmforge.base.http_server import HttpServer
from llmforge.base.progress import Silent
from llmforge.checkpoint import Checkpoint
from llmforge.compile import endpoints, export_proxy
from llmforge.compile.endpoints import EndpointQuestion, ServedModel
from llmforge.gates.endpoint import EndpointJudgement
from llmforge.metrics.served_quality import ServedQuality
from llmforge.passes import QuantizeWeights
from llmforge.recipe import EngineSpec, GateSpec
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.trace import trace

from ..models.runtimes import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

STARTS_S = 1200  # a server on a busy machine
FP32 = 1e-4  # how far sums over a token of two requests in fp32 may lie apart


@contextmanager
def server(command: list[Any], log: Path) -> Iterator[str]:
    """Start a server, whose port is put behind `command`, and give its address when it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        process = subprocess.Popen([*map(str, command), "--port", str(port)], stdout=out, stderr=out, cwd=log.parent)
    try:
        for _ in range(STARTS_S):
            assert process.poll() is None, log.read_text()[-2000:]
            try:
                with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(300)  # vLLM waits for its engine, on a busy machine
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("vllm")
    python = environment("vllm", tmp_path_factory.mktemp("environments"))
    served = write_rounded(data / "docs-llama-7m", folder / "model")
    # in fp32, so that a place has the same numbers whatever is read together
    options = ["--dtype", "float32", "--max-logprobs", "-1", "--max-model-len", "256", "--enforce-eager"]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", served]
    with server(
        ["env", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_NO_USAGE_STATS=1", *command, *options], folder / "log"
    ) as url:
        yield url


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Iterator[str]:
    pytest.importorskip("gguf", reason="pip install gguf==0.19.0")
    folder = tmp_path_factory.mktemp("llama-cpp")
    python = environment("llama_cpp", tmp_path_factory.mktemp("environments"))
    file = write_gguf(Checkpoint.open(data / "docs-llama-7m"), folder)
    command = [python, "-m", "llama_cpp.server", "--model", file, "--n_ctx", "256", "--logits_all", "true"]
    with server(command, folder / "log") as url:
        yield url


def write_rounded(checkpoint: Path, folder: Path) -> Path:
    """Write a checkpoint in fp32 whose layers have weights in 4 bits, rounded to nearest in blocks of 32."""
    shutil.copytree(checkpoint, folder)
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, tensor in weights.items():
        if ".layers." in name and tensor.ndim == 2:
            blocks = tensor.reshape(-1, 32)
            scales = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12) / 7
            weights[name] = (torch.round(blocks / scales) * scales).reshape(tensor.shape)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_gguf(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write a checkpoint in 4 bits, rounded to nearest."""
    local, traced = targets.local(), trace(checkpoint)
    model = traced.clone()
    step = QuantizeWeights(
        budget=Budget(kld_mean=1.0), bits=4, block_size=32, symmetric=True, scales="fp16", method="rtn"
    )
    assert step.run(model, Context(local))
    exported = export_proxy.exported(model, traced, checkpoint)
    spec = EngineSpec(backend="gguf", max_context=256)
    gguf.build(BuildRequest(model, folder / "engine", spec, local, checkpoint.eos_token_ids, 0, exported=exported))
    [file] = (folder / "engine").glob("*.gguf")
    return file


def question(url: str, data: Path) -> EndpointQuestion:
    checkpoint = Checkpoint.open(data / "docs-llama-7m")
    return EndpointQuestion(
        ServedModel(HttpServer(url), None), checkpoint, checkpoint, data / "evaluation.jsonl",
        context=24, tokens=240, answers=2, answer_tokens=8, limits={"kld_mean": GateSpec(max=1.0)},
    )  # fmt: skip


def require_within(bounded: ServedQuality, exact: ServedQuality, slack_of_a_token: float) -> None:
    """Hold the sums of each document between the bounds of it; batches of other lengths differ a little."""
    assert [each.document for each in bounded.per_document] == [each.document for each in exact.per_document]
    for one, other in zip(bounded.per_document, exact.per_document, strict=True):
        for name in one.low:
            slack = 1.0 if name == "same_top" else slack_of_a_token * one.tokens
            assert one.low[name] - slack <= other.high[name], (name, one, other)
            assert other.low[name] <= one.high[name] + slack, (name, one, other)


def judged(asked: EndpointQuestion) -> tuple[EndpointJudgement, ServedQuality]:
    made = endpoints.judge(asked, Silent())
    assert made.quality is not None
    kld = made.quality.figures["kld_mean"]
    within = f"{kld.at_least.value:.3g} … {kld.at_most.value:.3g}, {kld.estimate.low} – {kld.estimate.high}"
    print(
        f"{made.quality.way}, {made.quality.listed} listed, {made.quality.tokens} tokens: KLD {within}; "
        f"{made.equal_answers} of {asked.answers} answers are equal; {made.verdict.value}"
    )
    assert made.latency is not None
    assert made.latency.completed == asked.answers
    return made, made.quality


def test_vllm(vllm: str, data: Path) -> None:
    asked = question(vllm, data)
    _, exact = judged(asked)
    assert (exact.way, exact.listed) == ("prompt_logprobs", 8192)
    assert exact.figures["kld_mean"].is_exact
    kld = exact.figures["kld_mean"].at_least.value
    assert 0.01 < kld < 1.0  # 4 bits, rounded to nearest
    _, bounded = judged(replace(asked, top=20))
    assert bounded.listed == 20
    require_within(bounded, exact, FP32)
    within = bounded.figures["kld_mean"]
    assert 0.5 * kld < within.at_least.value <= kld + FP32
    assert kld - FP32 <= within.at_most.value
    assert bounded.figures["perplexity"].is_exact  # vLLM tells the true token
    assert bounded.figures["perplexity"].at_least.value == pytest.approx(
        exact.figures["perplexity"].at_least.value, rel=FP32
    )
    _, drawn = judged(replace(asked, top=20, one_by_one=True))
    assert drawn.way == "logprobs"
    require_within(drawn, exact, FP32)
    found = drawn.figures["kld_mean"].estimate
    assert found.low is not None
    assert found.high is not None
    assert found.low <= kld <= found.high
    assert drawn.kld_truncated is not None
    assert 0.5 * kld < drawn.kld_truncated.at_least.value <= kld + FP32


def test_llama_cpp_python(llama_cpp: str, data: Path) -> None:
    asked = question(llama_cpp, data)
    _, all_told = judged(asked)  # but for names that several tokens share
    assert all_told.way == "echo"
    assert all_told.told_share > 0.98  # 168 of 8,192 tokens are parts of characters, whose names are alike
    kld = all_told.figures["kld_mean"]
    assert 0.01 < kld.at_least.value < 1.0  # 4 bits, rounded to nearest
    _, bounded = judged(replace(asked, top=20))
    require_within(bounded, all_told, 0.02)  # its cache is in fp16, its activations are in int8
    assert bounded.figures["kld_mean"].at_least.value <= kld.at_most.value + 1e-6
    assert bounded.figures["kld_mean"].at_most.value >= kld.at_least.value
