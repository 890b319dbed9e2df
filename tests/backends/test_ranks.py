"""Ranks as processes: they compute what one session does, and none of them is waited for when it ends or hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import psutil
import pytest

from llmforge import targets
from llmforge.backends import loading, onnx_file
from llmforge.backends.engines import BuildRequest, BuiltEngine
from llmforge.backends.onnxruntime import builder as onnxruntime
from llmforge.backends.ranks import group
from llmforge.backends.ranks.session import LIMIT_VARIABLE, RankCache, RankSession
from llmforge.base.errors import EnvironmentLacks, ForgeError, InputError, Unavailable, UsageError
from llmforge.base.progress import Silent
from llmforge.parallel.split import split
from llmforge.passes import FlashAttention, FuseNorms, PackGateUp, PackQkv
from llmforge.recipe import EngineSpec
from llmforge.runtime.config import FILE, RuntimeConfig
from llmforge.runtime.interface import Decoder, StepInputs

from ..models import graphs

WIDE = graphs.Llama(hidden=64, heads=8, kv_heads=4, head_dim=32, mlp=128, vocabulary=96)
CAPACITY = 64
SOON_S = 5.0  # a loaded machine counted in


def build(folder: Path, degree: int, spec: graphs.Llama = WIDE) -> BuiltEngine:
    """Build the engine of a small model, of `degree` ranks."""
    model, target = graphs.llama(spec), targets.load("cpu-generic")
    for step in (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention()):
        step.run(model, graphs.CPU)
    wanted = EngineSpec(max_context=CAPACITY, max_batch=4, threads=degree, tensor_parallel=degree)
    lowered = [onnxruntime.lower(each, target, wanted)[0] for each in split(model, degree).ranks]
    request = BuildRequest(lowered[0], folder, wanted, target, [0], 0, ranks=lowered if degree > 1 else ())
    return onnxruntime.build(request)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of two ranks."""
    made = tmp_path_factory.mktemp("ranks") / "engine"
    build(made, 2)
    return made


def opened(folder: Path) -> RankSession:
    session = loading.open_engine(folder, RuntimeConfig.read(folder / FILE))
    assert isinstance(session, RankSession)
    return session


@pytest.fixture
def two(folder: Path) -> Iterator[RankSession]:
    session = opened(folder)
    yield session
    session.close()
    assert not alive(session.processes)


def alive(processes: Sequence[int]) -> list[int]:
    return [each for each in processes if psutil.pid_exists(each) and psutil.Process(each).status() != "zombie"]


def wait_until_gone(processes: Sequence[int]) -> None:
    end = time.monotonic() + SOON_S
    while alive(processes) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(processes)


def segments() -> list[str]:
    return sorted(os.listdir("/dev/shm"))  # noqa: PTH208


def steps(session: Decoder) -> list[np.ndarray]:
    """Run prefills, decode steps, a ragged continuation over copied tokens, and rows of every token."""
    random = np.random.default_rng(0)
    ids, past = random.integers(0, 96, (4, 9)), np.array([0, 0, 0, 0], np.int32)
    cache = session.allocate(4, CAPACITY)
    found = [session.step(StepInputs(ids, past), cache)]
    found += [session.step(StepInputs(ids[:, t : t + 1], past + 9 + t), cache) for t in range(4)]
    row, other = cache.rows(1, 2), session.allocate(2, CAPACITY)
    row.copy(0, 0, cache.rows(2, 4), 1, 0, 13)
    found.append(session.step(StepInputs(ids[:1, :5], np.array([13], np.int32), np.arange(5)), row))
    other.copy(1, 0, row, 0, 0, 18)
    found.append(session.step(StepInputs(ids[:1, :1], np.array([18], np.int32)), other.rows(1, 2)))
    return found


def test_ranks_give_the_logits_of_one_session(folder: Path, two: RankSession, tmp_path: Path) -> None:
    build(tmp_path / "engine", 1)
    alone = loading.open_engine(tmp_path / "engine", RuntimeConfig.read(tmp_path / "engine" / FILE))
    wanted, found = steps(alone), steps(two)
    unit = max(np.abs(each).max() for each in wanted)
    for one, both in zip(wanted, found, strict=True):
        assert np.abs(one - both).max() < 1e-5 * unit
        assert np.array_equal(one.argmax(-1), both.argmax(-1))
    again = steps(two)  # sums are made in one order, whoever comes first
    assert all(np.array_equal(first, second) for first, second in zip(found, again, strict=True))
    assert two.allocate(4, CAPACITY).size_bytes == alone.allocate(4, CAPACITY).size_bytes
    config = RuntimeConfig.read(folder / FILE)
    assert (config.ranks, {cache.kv_heads for cache in config.caches}) == (2, {2})
    stored = sum(file.stat().st_size for file in folder.glob("*.data"))
    assert stored < 1.1 * (tmp_path / "engine" / "model.onnx.data").stat().st_size  # nothing is stored twice


def test_inputs_are_checked_before_ranks_see_them(two: RankSession) -> None:
    cache = two.allocate(1, 8)
    with pytest.raises(UsageError, match="does not fit into a cache of 8 tokens"):
        two.step(StepInputs(np.zeros((1, 5), np.int64), np.array([4], np.int32)), cache)
    with pytest.raises(ValueError, match="a cache of 0 rows"):
        two.allocate(0, 8)
    assert two.step(StepInputs(np.zeros((1, 5), np.int64), np.array([0], np.int32)), cache).shape == (1, 1, 96)


def go_on(session: RankSession, ids: np.ndarray, past: np.ndarray, cache: RankCache) -> None:
    end = time.monotonic() + SOON_S
    while time.monotonic() < end:
        session.step(StepInputs(ids, past), cache)


def test_a_killed_rank_ends_the_session_at_once(two: RankSession) -> None:
    before, cache = segments(), two.allocate(4, CAPACITY)
    ids, past = np.zeros((4, 1), np.int64), np.zeros(4, np.int32)
    two.step(StepInputs(ids, past), cache)
    threading.Timer(0.1, os.kill, [two.processes[1], signal.SIGKILL]).start()
    with pytest.raises(Unavailable, match=r"rank 1 of 2 ended: its process was killed \(SIGKILL\)") as caught:
        go_on(two, ids, past, cache)
    assert caught.value.exit_code == 9
    assert not alive(two.processes)
    with pytest.raises(Unavailable, match="rank 1 of 2 ended"):
        two.step(StepInputs(ids, past), cache)
    with pytest.raises(Unavailable, match="rank 1 of 2 ended"):
        two.allocate(1, 8)
    assert segments() == before


def test_a_rank_that_hangs_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "1")
    session = opened(folder)
    cache = session.allocate(1, 8)
    os.kill(session.processes[1], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(Unavailable, match="rank 1 of 2 does not respond: no progress for 1 s"):
        session.step(StepInputs(np.zeros((1, 1), np.int64), np.zeros(1, np.int32)), cache)
    assert 0.9 < time.monotonic() - began < SOON_S
    assert not alive(session.processes)
    monkeypatch.setenv(LIMIT_VARIABLE, "soon")
    with pytest.raises(UsageError, match=f"{LIMIT_VARIABLE} is 'soon'; expected a number of seconds"):
        opened(folder)


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_a_rank_that_does_not_load_says_why(folder: Path, tmp_path: Path) -> None:
    damaged, children = copied(folder, tmp_path / "engine"), psutil.Process().children()
    graph = damaged / "model.rank1.onnx"
    graph.write_bytes(graph.read_bytes()[:-200])
    with pytest.raises(InputError, match=r"rank 1 of 2: .*model\.rank1\.onnx: ONNX Runtime .* refuses the graph"):
        opened(damaged)
    assert psutil.Process().children() == children
    graph.unlink()
    with pytest.raises(InputError, match=r"model\.rank1\.onnx is missing"):
        opened(damaged)


def test_ranks_of_different_models_do_not_meet(folder: Path, tmp_path: Path) -> None:
    """They have the same caches and vocabulary, and rows of another width."""
    mixed = copied(folder, tmp_path / "engine")
    model = graphs.llama(graphs.Llama(hidden=128, heads=8, kv_heads=4, head_dim=32, mlp=128, vocabulary=96))
    for step in (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention()):
        step.run(model, graphs.CPU)
    target, spec = targets.load("cpu-generic"), EngineSpec(max_context=CAPACITY)
    other = tmp_path / "other"
    other.mkdir()
    ranks = [onnxruntime.lower(each, target, spec)[0] for each in split(model, 2).ranks]
    onnx_file.write_ranks(ranks, other, Silent())
    for name in ("model.rank1.onnx", "model.rank1.onnx.data"):
        (mixed / name).write_bytes((other / name).read_bytes())
    if (other / "model.onnx.data").stat().st_size:
        (mixed / "model.onnx.data").write_bytes((other / "model.onnx.data").read_bytes() + bytes(1 << 16))
    session = opened(mixed)
    cache = session.allocate(1, 8)
    with pytest.raises(ForgeError, match="ranks came to different collectives"):
        session.step(StepInputs(np.zeros((1, 1), np.int64), np.zeros(1, np.int32)), cache)
    assert not alive(session.processes)


_DRIVER = """
import sys
from pathlib import Path
import numpy as np
from llmforge.backends import loading
from llmforge.runtime.config import FILE, RuntimeConfig
from llmforge.runtime.interface import StepInputs
folder = Path(sys.argv[1])
session = loading.open_engine(folder, RuntimeConfig.read(folder / FILE))
cache = session.allocate(1, 64)
print(*session.processes, flush=True)
while True:
    session.step(StepInputs(np.zeros((1, 1), np.int64), np.zeros(1, np.int32)), cache)
"""


def test_ranks_end_with_a_driver_that_is_killed(folder: Path) -> None:
    before = segments()
    with subprocess.Popen([sys.executable, "-c", _DRIVER, str(folder)], stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        processes = [int(each) for each in driver.stdout.readline().split()]
        assert len(alive(processes)) == 2
        driver.kill()
    wait_until_gone(processes)
    assert segments() == before


def test_ranks_end_with_a_session_that_nobody_has(folder: Path) -> None:
    session = opened(folder)
    processes = session.processes
    cache = session.allocate(1, 8)
    del session, cache
    assert not alive(processes)


def test_other_engines_run_alone(folder: Path, tmp_path: Path) -> None:
    text = (folder / FILE).read_text(encoding="utf-8")
    (tmp_path / FILE).write_text(text.replace('"ranks": 2', '"ranks": 65'), encoding="utf-8")
    with pytest.raises(InputError, match="ranks is 65; expected 1 to 64"):
        RuntimeConfig.read(tmp_path / FILE)
    changed = {**json.loads(text), "provider": "gguf", "onnxruntime": None}
    (tmp_path / FILE).write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(InputError, match="ranks is 2, and engines of provider gguf run alone"):
        RuntimeConfig.read(tmp_path / FILE)


def test_a_system_without_such_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    group._library.cache_clear()
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(EnvironmentLacks, match="ranks on a CPU meet in shared memory of Linux"):
        group.require()
    group._library.cache_clear()


def test_collectives_outside_of_a_group_are_refused(folder: Path) -> None:
    from llmforge.backends.onnxruntime.session import Session
    from llmforge.runtime.config import SessionConfig

    session = Session(folder / "model.rank0.onnx", SessionConfig(threads=1))
    with pytest.raises(ForgeError, match="this process is no rank of such a group"):
        session.step(StepInputs(np.zeros((1, 1), np.int64), np.zeros(1, np.int32)), session.allocate(1, 8))
    assert isinstance(ir.load(folder / "model.rank0.onnx"), ir.Model)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [4, 8])
def test_more_ranks(degree: int, tmp_path: Path) -> None:
    build(tmp_path / "whole", 1)
    build(tmp_path / "engine", degree)
    session = opened(tmp_path / "engine")
    alone = loading.open_engine(tmp_path / "whole", RuntimeConfig.read(tmp_path / "whole" / FILE))
    for one, all_ in zip(steps(alone), steps(session), strict=True):
        assert np.abs(one - all_).max() < 1e-5 * np.abs(one).max()
    session.close()
