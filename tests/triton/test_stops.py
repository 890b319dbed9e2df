"""Servers that are stopped under load: nothing of them is left, neither processes nor shared memory.

Each ends LLMFORGE_TRITON_STOPS times (20 unless said otherwise) in each way.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from llmforge.artifact import Artifact
from llmforge.recipe import ServingSpec

from ..samples import published
from ..servers.triton_server import Server, environment_or_skip, launched

pytestmark = [pytest.mark.xdist_group("triton"), pytest.mark.slow]

STOPS = int(os.environ.get("LLMFORGE_TRITON_STOPS", "20"))
TOKENS = 800  # of an answer; some tenths of a second
GONE_S = 3.0  # in which everything has ended after the server has
LOAD_S = 1.5


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Artifact:
    folder = tmp_path_factory.mktemp("artifacts")
    serving = ServingSpec(max_queue=32)
    return published.random_decoder(folder, sample_checkpoint, max_context=4096, max_batch=8, serving=serving)


@contextlib.contextmanager
def load(server: Server) -> Iterator[None]:
    """Ask for all that keeps a server busy, from several threads, until the block ends or nobody answers."""
    done = threading.Event()
    message = json.dumps([{"role": "user", "content": "What is a symlink? " * 20}])
    guided = json.dumps({"guided_regex": "[a-z ]{20,60}", "max_tokens": 64})

    def stream() -> None:
        server.generate_stream("random", text_input="Tell me", max_tokens=TOKENS, ignore_eos=True)

    def leave() -> None:
        body = {"text_input": "a", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        with server.open("/v2/models/random/generate_stream", body) as response:
            assert response is not None
            response.readline()

    asks: list[Callable[[], object]] = [
        stream,
        stream,
        stream,
        leave,
        lambda: server.generate("random", messages=message, max_tokens=20),
        lambda: server.generate("random", text_input="a", sampling_parameters=guided),
        lambda: server.generate("random", text_input="long " * 20_000, max_tokens=1),
        lambda: server.request("/metrics", port=server.metrics_port),
    ]

    def repeat(ask: Callable[[], object]) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # the server has ended
            while not done.is_set():
                ask()

    threads = [threading.Thread(target=repeat, args=[ask], daemon=True) for ask in asks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join(60)


def has_ended(process: psutil.Process) -> bool:
    """Say whether a process has ended; one whose parent has ended, too, may stay a zombie until it is collected."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.timeout(60 + 40 * STOPS)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_server(artifact: Artifact, tmp_path: Path, how: signal.Signals) -> None:
    env, when = environment_or_skip(), random.Random(0)
    ended: list[float] = []
    for number in range(STOPS):
        with launched(env, artifact.path, tmp_path / f"repository{number}") as server, load(server):
            time.sleep(when.uniform(0.3, LOAD_S))
            family = psutil.Process(server.process.pid).children(recursive=True)
            assert len(family) >= 2  # the model's process and the engine's
            assert server.shared_files()
            server.process.send_signal(how)
            began = time.monotonic()
            status = server.process.wait(60)
            _, alive = psutil.wait_procs(family, timeout=GONE_S)
            ended.append(time.monotonic() - began)
            assert [process.cmdline() for process in alive] == [], f"stop {number}, after {GONE_S} s"
            assert server.shared_files() == [], f"stop {number}"
            assert status == (0 if how is signal.SIGTERM else -how), server.log.read_text()[-4000:]
    print(f"{STOPS} stops by {how.name}: {max(ended):.2f} s at most")
