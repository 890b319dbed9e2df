"""Artifacts of several ranks, from the recipe to the server: the texts of one rank, and what happens when one ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from llmforge import targets
from llmforge.artifact import Artifact, staging
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder as engine
from llmforge.base.errors import Unavailable
from llmforge.compile.pipeline import build
from llmforge.parallel.split import split
from llmforge.passes import FlashAttention, FuseNorms, PackGateUp, PackQkv
from llmforge.recipe import EngineSpec, Recipe
from llmforge.serving import EngineProcess, Request, Runner, Sampling, load

from ..models import graphs, zoo
from ..models.small_engines import prompt
from ..samples import stored

VOCABULARY, SLOTS, CONTEXT = 8192, 4, 4096
TEN = Sampling(temperature=0.0, max_tokens=10, ignore_eos=True)
ENDLESS = Sampling(ignore_eos=True)
SOON_S = 10.0

pytestmark = pytest.mark.thorough


def publish(out: Path, checkpoint: Path, degree: int) -> Artifact:
    """Publish a small model of random weights with the sample checkpoint's tokenizer."""
    model = graphs.llama(
        graphs.Llama(hidden=64, heads=8, kv_heads=4, mlp=128, vocabulary=VOCABULARY, positions=CONTEXT)
    )
    for step in (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention()):
        step.run(model, graphs.CPU)
    target = targets.local()
    spec = EngineSpec(max_context=CONTEXT, max_batch=SLOTS, threads=degree, tensor_parallel=degree)
    lowered = [engine.lower(each, target, spec)[0] for each in split(model, degree).ranks]
    with staging(out, f"ranks{degree}") as folder:
        ranks = lowered if degree > 1 else ()
        engine.build(BuildRequest(lowered[0], folder / "engine", spec, target, [5], 0, ranks=ranks))
        (folder / "tokenizer").mkdir()
        for name in ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json"):
            shutil.copy(checkpoint / name, folder / "tokenizer" / name)
        return stored.publish(folder, recipe={"name": f"ranks{degree}"}, target="local", latency=None)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Artifact:
    return publish(tmp_path_factory.mktemp("ranks"), sample_checkpoint, 2)


def batch(runner: Runner) -> list[list[int | None]]:
    """Go on from four prompts of different lengths together, greedily."""
    prompts = [prompt(5 + 20 * i, seed=i) for i in range(SLOTS)]
    return [list(step.token_ids) for step in runner.generate_batch(prompts, [TEN] * SLOTS)]


def ranks_of(process: int) -> list[psutil.Process]:
    """Find the ranks among what a process started, directly or not."""
    children = psutil.Process(process).children(recursive=True)
    return [each for each in children if "llmforge.backends.ranks.worker" in each.cmdline()]


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, SOON_S)
    assert not [each for each in left if each.status() != psutil.STATUS_ZOMBIE]


def test_texts_are_those_of_one_rank(two: Artifact, tmp_path: Path, sample_checkpoint: Path) -> None:
    alone = load(publish(tmp_path, sample_checkpoint, 1).path)
    wanted = batch(alone)
    several = load(two.path)
    assert batch(several) == wanted
    with EngineProcess(two.path) as served:
        streams = [served.stream(Request(prompt(5 + 20 * i, seed=i), TEN)) for i in range(SLOTS)]
        left = served.stream(Request(prompt(9), ENDLESS))  # waits for a slot, and leaves
        left.close()
        found = [[chunk.token_id for chunk in stream if chunk.token_id is not None] for stream in streams]
    assert found == [[row[i] for row in wanted] for i in range(SLOTS)]


def test_a_killed_rank_ends_all_requests(two: Artifact) -> None:
    with EngineProcess(two.path) as served:
        streams = [served.stream(Request(prompt(5, seed=i), ENDLESS)) for i in range(SLOTS + 1)]  # one waits
        next(streams[0])
        ranks = ranks_of(served.process_id)
        ranks[1].kill()
        for stream in streams:
            with pytest.raises(Unavailable, match=r"rank \d of 2 ended: its process was killed \(SIGKILL\)"):
                list(stream)
        wait_until_gone(ranks)
        end = time.monotonic() + SOON_S
        while served.alive:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_rank_that_ends_while_nothing_runs_is_noticed(two: Artifact) -> None:
    with EngineProcess(two.path) as served:
        assert list(served.stream(Request(prompt(5), TEN)))
        ranks_of(served.process_id)[0].kill()
        end = time.monotonic() + SOON_S
        while served.alive:
            assert time.monotonic() < end
            time.sleep(0.01)
        with pytest.raises(Unavailable, match=r"rank 0 of 2 ended: its process was killed \(SIGKILL\)"):
            served.stream(Request(prompt(5), TEN))


def test_ranks_end_with_an_engine_that_is_killed(two: Artifact) -> None:
    served = EngineProcess(two.path)
    stream = served.stream(Request(prompt(5), ENDLESS))
    next(stream)
    ranks = ranks_of(served.process_id)
    assert len(ranks) == 2
    os.kill(served.process_id, signal.SIGKILL)
    with pytest.raises(Unavailable, match="its process was killed"):
        list(stream)
    wait_until_gone(ranks)
    served.close()


@contextmanager
def serving(artifact: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start `llmforge serve`, and give its address and process."""
    command = [sys.executable, "-m", "llmforge", "serve", str(artifact), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            yield next(match[1] for line in server.stderr if (match := re.search(r"http://(\S+)/v1", line))), server
        finally:
            server.kill()


def ask(address: str, found: list[str], begun: threading.Event) -> None:
    """Stream a long completion, and keep the lines that come until it ends."""
    connection = http.client.HTTPConnection(address, timeout=60)
    body = {"prompt": "once", "max_tokens": 4000, "stream": True, "temperature": 0, "logit_bias": {"5": -100}}
    connection.request("POST", "/v1/completions", json.dumps({"model": "ranks2", **body}))
    answer = connection.getresponse()
    with contextlib.suppress(http.client.HTTPException, ConnectionError):
        while line := answer.readline():
            found.append(line.decode())
            begun.set()
    connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "engine", "server"])
def test_a_server_ends_with_its_ranks(two: Artifact, victim: str) -> None:
    with serving(two.path) as (address, server):
        answers: list[list[str]] = [[] for _ in range(3)]
        begun = [threading.Event() for _ in answers]
        asking = [threading.Thread(target=ask, args=(address, *each)) for each in zip(answers, begun, strict=True)]
        for thread in asking:
            thread.start()
        assert all(event.wait(SOON_S) for event in begun)
        children = psutil.Process(server.pid).children(recursive=True)
        [engine_process] = [each for each in children if "llmforge.serving.engine_worker" in each.cmdline()]
        ranks = ranks_of(server.pid)
        assert len(ranks) == 2
        chosen = {"rank": ranks[0].pid, "engine": engine_process.pid, "server": server.pid}
        os.kill(chosen[victim], signal.SIGKILL)
        for thread in asking:
            thread.join(SOON_S)
            assert not thread.is_alive()
        code = server.wait(SOON_S)
        wait_until_gone(children)
    assert code == (-signal.SIGKILL if victim == "server" else 9)
    if victim != "server":
        for lines in answers:
            assert not any("[DONE]" in line for line in lines)
            assert any('"error"' in line for line in lines), lines[-3:]


@pytest.mark.slow
def test_a_command_whose_rank_is_killed_ends_with_9(two: Artifact) -> None:
    command = [sys.executable, "-m", "llmforge", "run", str(two.path), "once", "--max-tokens", "4000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.read(1)
        ranks = ranks_of(run.pid)
        ranks[1].kill()
        _, said = run.communicate(timeout=SOON_S)
    assert run.returncode == 9
    assert b"error: rank 1 of 2 ended: its process was killed (SIGKILL)" in said
    wait_until_gone(ranks)


def greedy(artifact: Path) -> list[list[int | None]]:
    """Go on from four prompts together."""
    runner = load(artifact)
    prompts = [prompt(5 + 9 * i, seed=i) for i in range(4)]
    prompts = [[token % runner.config.vocabulary for token in ids] for ids in prompts]
    sampling = Sampling(temperature=0.0, max_tokens=32, ignore_eos=True)
    return [list(step.token_ids) for step in runner.generate_batch(prompts, [sampling] * 4)]


INT4 = (
    "quantize-weights: {bits: 4, block_size: 32, method: rtn, accuracy_level: 0, embedding_bits: 4, "
    "budget: {kld_mean: 9}}"
)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [[], [INT4]], ids=["fp32", "int4"])
@pytest.mark.parametrize("name", ["llama-tied", "mixtral"])
def test_builds_give_the_texts_of_one_rank(name: str, steps: list[str], tmp_path: Path, data: Path) -> None:
    """From the recipe on, with the quality measured through the ranks."""
    config = {"intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    zoo.write(name, tmp_path / "checkpoint", **config)
    found = {}
    for degree in (1, 2, 4):
        path = tmp_path / f"ranks{degree}.yaml"
        passes = "".join(
            f"  - {step}\n" for step in ["fuse-norms", "pack-qkv", "pack-gate-up", "flash-attention", *steps]
        )
        path.write_text(
            f"schema: 1\nname: ranks{degree}\ncheckpoint: checkpoint\ntarget: local\n"
            f"engine: {{max_context: 96, max_batch: 4, tensor_parallel: {degree}}}\npasses:\n{passes}"
            f"validation:\n  quality: {{data: {data / 'evaluation.jsonl'}, context: 64, max_tokens: 512}}\n"
        )
        built = build(Recipe.load(path), tmp_path / "artifacts")
        quality = built.report.quality
        assert quality is not None
        found[degree] = greedy(built.path), quality.kld_mean.value
    for degree in (2, 4):
        assert found[degree][0] == found[1][0]
        assert found[degree][1] == pytest.approx(found[1][1], rel=1e-3, abs=1e-9)
