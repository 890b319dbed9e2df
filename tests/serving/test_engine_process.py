"""An engine in a process of its own: the same texts, and what happens when one of the two processes ends."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from llmforge.artifact import Artifact
from llmforge.base.errors import ForgeError, InputError, Unavailable, UsageError
from llmforge.serving import Chunk, Constraint, EngineOptions, EngineProcess, Request, Runner, Sampling, load
from llmforge.serving.interface import Stream

from ..models.small_engines import prompt
from ..samples.small_artifact import publish_small

TEN = Sampling(max_tokens=10, ignore_eos=True)
ENDLESS = Sampling(ignore_eos=True)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Artifact:
    return publish_small(tmp_path_factory.mktemp("engine"), sample_checkpoint)


@pytest.fixture(scope="module")
def runner(small: Artifact) -> Runner:
    return load(small.path)


@pytest.fixture(scope="module")
def shared(small: Artifact) -> Iterator[EngineProcess]:
    with EngineProcess(small.path, EngineOptions(max_queue=2)) as engine:
        yield engine


@pytest.fixture
def engine(small: Artifact) -> Iterator[EngineProcess]:
    with EngineProcess(small.path) as engine:
        yield engine


def eventually(true: object, seconds: float = 60) -> None:
    assert callable(true)
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def text(engine: EngineProcess, request: Request) -> str:
    return "".join(chunk.text for chunk in engine.stream(request))


def test_texts_are_those_of_the_engine_itself(shared: EngineProcess, runner: Runner) -> None:
    requests = [Request(prompt(5 + i, seed=i), TEN) for i in range(4)]
    texts: dict[int, str] = {}
    threads = [threading.Thread(target=lambda i=i: texts.update({i: text(shared, requests[i])})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = ["".join(chunk.text for chunk in runner.generate(request.prompt, TEN)) for request in requests]
    assert [texts[i] for i in range(4)] == alone
    eventually(lambda: shared.stats().finished["length"] == 4)
    assert (shared.stats().running, shared.stats().output_tokens) == (0, 40)


def test_what_the_engine_refuses_is_raised(shared: EngineProcess) -> None:
    for request, why in (
        (Request(()), "the prompt is empty"),
        (Request((1,), Sampling(constraint=Constraint("regex", "("))), "regex"),
    ):
        with pytest.raises(UsageError, match=why):
            shared.submit(request, print)
    held: list[Stream] = []
    ended = sum(shared.stats().finished.values())
    with pytest.raises(Unavailable, match="the queue is full: 2 requests"):
        _hold(shared, held)
    for stream in held:
        stream.close()
    eventually(lambda: sum(shared.stats().finished.values()) == ended + len(held))  # what came last, too


def _hold(engine: EngineProcess, held: list[Stream]) -> None:
    for i in range(1000):
        held.append(engine.stream(Request(prompt(4, seed=i), ENDLESS)))


def test_a_cancelled_request_ends(shared: EngineProcess) -> None:
    def ended() -> bool:
        items: queue.SimpleQueue[Chunk | ForgeError] = queue.SimpleQueue()
        ticket = shared.submit(Request(prompt(3), ENDLESS), items.put)
        first = items.get(timeout=60)
        assert isinstance(first, Chunk)
        shared.cancel(ticket)
        while (chunk := items.get(timeout=60)).finish_reason is None:  # type: ignore[union-attr]
            pass
        shared.cancel(ticket)  # changes nothing
        return chunk.finish_reason == "cancelled"  # type: ignore[union-attr]

    eventually(ended)  # on a busy machine the whole text may be there before the cancellation


def test_a_killed_process_ends_every_request_with_an_error(engine: EngineProcess) -> None:
    streams = [engine.stream(Request(prompt(3, seed=i), ENDLESS)) for i in range(6)]
    next(streams[0])
    os.kill(engine.process_id, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(Unavailable, match=r"its process was killed \(SIGKILL\)"):
            list(stream)
    assert not engine.alive
    with pytest.raises(Unavailable, match="SIGKILL"):
        engine.submit(Request((1,)), print)
    engine.close()


def test_what_runs_is_finished_and_what_comes_later_refused(engine: EngineProcess) -> None:
    stream = engine.stream(Request(prompt(3), Sampling(max_tokens=100, ignore_eos=True)))
    engine.close(drain=True)
    assert list(stream)[-1].finish_reason == "length"
    with pytest.raises(Unavailable, match="shutting down"):
        engine.submit(Request((1,)), print)


def test_a_grace_period_ends(engine: EngineProcess) -> None:
    streams = [engine.stream(Request(prompt(3, seed=i), ENDLESS)) for i in range(30)]  # 7,500 steps
    engine.close(drain=True, timeout_s=0.05)
    assert [list(stream) for stream in streams][-1][-1].finish_reason == "cancelled"


def test_errors_of_loading_are_those_of_the_engine(small: Artifact, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no draft artifact"):
        EngineProcess(small.path, EngineOptions(speculation="draft"))
    with pytest.raises(InputError):
        EngineProcess(tmp_path)


@pytest.mark.parametrize("hangs", [False, True])
def test_no_process_and_no_file_outlives_the_server(small: Artifact, tmp_path: Path, hangs: bool) -> None:
    """The server's death ends the process that serves from it, even one that holds its interpreter, and the engine."""
    file = tmp_path / "shared"
    file.touch()
    serving = f"""
import ctypes, os, sys
from pathlib import Path
from llmforge.serving import EngineProcess
engine = EngineProcess(Path({str(small.path)!r}), server=os.getppid(), files=(Path({str(file)!r}), Path("/no/such")))
print(os.getpid(), engine.process_id, flush=True)
{"ctypes.PyDLL(None).pause()" if hangs else "sys.stdin.read()"}
"""
    starting = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {serving!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", starting], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        assert server.stdout is not None
        left = [psutil.Process(int(number)) for number in server.stdout.readline().split()]
        assert len(left) == 2
        assert file.exists()
        server.kill()
        assert psutil.wait_procs(left, timeout=60)[1] == []
        assert not file.exists()
