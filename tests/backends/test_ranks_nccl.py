"""Ranks on GPUs, with the memory of the host as their devices and tests/fakes/fake_nccl.c in the place of NCCL.

What is proved: the operators' C code and numbers, the process of a rank, its session and captures, the driver, and what
becomes of ranks that end. What is not: NCCL, and ONNX Runtime's CUDA provider
(tests/backends/onnxruntime/test_cuda_ranks.py has its host code).
"""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from llmforge import native, targets
from llmforge.backends import loading, onnx_file, signatures
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder as standard
from llmforge.backends.onnxruntime.cuda import operators as cuda_collectives
from llmforge.backends.onnxruntime.cuda.session import DeviceSession
from llmforge.backends.ranks import session as rank_session
from llmforge.backends.ranks.session import LIMIT_VARIABLE, RankSession
from llmforge.base.errors import EnvironmentLacks, RunFailed, Unavailable, VerificationError
from llmforge.base.progress import Silent
from llmforge.native import nccl
from llmforge.parallel.split import split
from llmforge.passes import FlashAttention, FuseNorms, PackGateUp, PackQkv
from llmforge.recipe import EngineSpec
from llmforge.rewrite import topk_outputs
from llmforge.runtime.config import FILE, Capture, DeviceFacts, GraphPlan, RuntimeConfig
from llmforge.runtime.device import cuda as devices
from llmforge.runtime.interface import StepInputs
from llmforge.runtime.prefill_shapes import SHAPES
from llmforge.serving import EngineOptions, Request, Sampling
from llmforge.serving.scheduler import SlotScheduler

from ..fakes.host_device import HostDevice
from ..models import graphs
from ..models.small_engines import VOCABULARY, Received, prompt, small_runner
from .test_ranks import SOON_S, WIDE, alive, steps

CAPACITY = 64
FAKE = Path(__file__).parents[1] / "fakes/fake_nccl.c"
COUNTERS = 1 + 4 * 8  # joined; by rank: meetings, sums, gathers, calls on a stream


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sys.path with the fake where pip's package puts NCCL."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("packages")
    target = folder / "nvidia" / "nccl" / "lib" / nccl.LIBRARY
    target.parent.mkdir(parents=True)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(target), str(FAKE)], check=True)
    return folder


@pytest.fixture
def meetings(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the fake's ranks meet; the fake is found, and the host counts as two GPUs."""
    with tempfile.TemporaryDirectory(prefix="nccl") as folder:  # an id of 127 characters names a file in it
        monkeypatch.setenv("FAKE_NCCL", folder)
        monkeypatch.syspath_prepend(str(library))
        monkeypatch.setattr(devices, "count", lambda extra: 2)
        monkeypatch.setattr(rank_session, "_WORKER", "tests.fakes.nccl_worker")
        find = nccl.find
        find.cache_clear()
        yield Path(folder)
        find.cache_clear()


def counted(folder: Path, ranks: int = 2) -> list[list[int]]:
    """By rank: sums, gathers, and how many of both were on a stream."""
    [file] = folder.iterdir()
    found = struct.unpack(f"{COUNTERS}I", file.read_bytes()[: 4 * COUNTERS])
    return [[found[1 + 8 * kind + rank] for kind in (1, 2, 3)] for rank in range(ranks)]


def write(folder: Path, degree: int, spec: graphs.Llama = WIDE, graph_plan: GraphPlan | None = None) -> RuntimeConfig:
    """Write the engine of a small model as for a GPU, in fp32 and with the CPU's attention."""
    model, target = graphs.llama(spec), targets.load("h100-sxm")
    for step in (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention()):
        step.run(model, graphs.CPU)
    lowered = []
    for each in split(model, degree).ranks if degree > 1 else [model]:
        meeting = each.clone()
        cuda_collectives.write_collectives(meeting)
        made, _ = standard.expand(meeting)
        topk_outputs.add_topk_outputs(made)
        lowered.append(made)
    wanted = EngineSpec(max_context=CAPACITY, max_batch=4, threads=1, tensor_parallel=degree)
    folder.mkdir()
    request = BuildRequest(lowered[0], folder, wanted, target, [0], 0)
    config = replace(
        signatures.config(request, standard.session_options(1)),
        onnxruntime=ort.__version__,
        kernels=native.VERSION,
        provider="cuda",
        device=DeviceFacts(90, 1),
        buckets=(1, 2, 4),
        graphs=graph_plan,
        ranks=degree,
    )
    if degree > 1:
        onnx_file.write_ranks(lowered, folder, Silent())
    else:
        onnx_file.write(lowered[0], folder, Silent())
    (folder / FILE).write_text(config.to_json(), encoding="utf-8")
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of two ranks."""
    made = tmp_path_factory.mktemp("ranks") / "engine"
    write(made, 2)
    return made


def opened(folder: Path) -> RankSession:
    session = loading.open_engine(folder, RuntimeConfig.read(folder / FILE))
    assert isinstance(session, RankSession)
    return session


@pytest.fixture
def two(folder: Path, meetings: Path) -> Iterator[RankSession]:
    session = opened(folder)
    yield session
    session.close()
    assert not alive(session.processes)


def test_ranks_give_the_logits_and_heads_of_one_session(two: RankSession, meetings: Path, tmp_path: Path) -> None:
    config = write(tmp_path / "engine", 1)
    alone = DeviceSession(
        tmp_path / "engine" / "model.onnx", config.session.resolve(), HostDevice(), buckets=(1, 2, 4), shapes=(64,)
    )
    assert (two.buckets, two.longest_step, two.decodes_ahead) == ((1, 2, 4), max(SHAPES), True)
    wanted, found = steps(alone), steps(two)
    unit = max(np.abs(each).max() for each in wanted)
    for one, both in zip(wanted, found, strict=True):
        assert np.abs(one - both).max() < 1e-5 * unit
        assert np.array_equal(one.argmax(-1), both.argmax(-1))
    ids, past = np.array([[3], [5], [7], [9]]), np.zeros(4, np.int32)
    runs = [
        each.begin_decode(StepInputs(ids, past, temperatures=np.ones(4, np.float32)), each.allocate(4, CAPACITY))
        for each in (alone, two)
    ]
    one, both = (run.top_logits() for run in runs)
    assert np.array_equal(one.ids[:, 0], both.ids[:, 0])
    assert np.abs(one.logits - both.logits).max() < 1e-5 * unit
    for row in (3, 0):
        assert np.abs(runs[0].logits(row) - runs[1].logits(row)).max() < 1e-5 * unit
    fetched = [run.blocks([3, 1], [0, 2]) for run in runs]
    assert fetched[0].shape == fetched[1].shape
    kept = np.isfinite(fetched[0])
    assert np.abs(fetched[0][kept] - fetched[1][kept]).max() < 1e-5 * unit
    assert np.abs(one.masses - both.masses).max() < 1e-3
    sums, gathers, on_streams = counted(meetings)[0]
    assert counted(meetings)[1] == [sums, gathers, on_streams]
    assert sums == 5 * gathers > 0  # of a step: the embedding, and two in each of two layers
    assert on_streams == 0  # the CPU's provider has none


def test_a_scheduler_serves_the_texts_of_one_session(meetings: Path, tmp_path: Path, sample_checkpoint: Path) -> None:
    """Prompts that join while others decode, by heads: greedy, and sampled by a seed."""
    runner = small_runner(tmp_path, sample_checkpoint)
    spec = replace(WIDE, vocabulary=VOCABULARY)
    config = write(tmp_path / "alone", 1, spec)
    write(tmp_path / "ranks", 2, spec)
    session = opened(tmp_path / "ranks")
    alone = DeviceSession(
        tmp_path / "alone" / "model.onnx", config.session.resolve(), HostDevice(), buckets=(1, 2, 4), shapes=SHAPES
    )
    found = []
    for each in (alone, session):
        scheduler = SlotScheduler(
            each, each.allocate(4, CAPACITY), runner.samplers, EngineOptions(prefix_cache_bytes=1 << 20)
        )
        answers = [Received() for _ in range(6)]
        for i, received in enumerate(answers):
            sampling = Sampling(temperature=i % 2, seed=i, max_tokens=8 + i)
            scheduler.add(Request(prompt(5 + 6 * i, seed=i), sampling), received.receive)
            if i % 3 == 2:
                scheduler.step()
        while scheduler.step():
            pass
        found.append([each.tokens for each in answers])
    assert found[0] == found[1]
    session.close()


def test_ranks_capture_all_of_them_or_none(meetings: Path, tmp_path: Path) -> None:
    """Nothing is captured over the host's memory; one device alone would go on without."""
    write(tmp_path / "engine", 2, graph_plan=GraphPlan("allow", (Capture(1, 4, CAPACITY), Capture(2, 1, CAPACITY))))
    session = opened(tmp_path / "engine")
    assert session.allocate(1, CAPACITY).size_bytes == 2 * 2 * 2 * CAPACITY * 2 * 32 * 4  # no step is planned for it
    assert (session.notes, session.spare_bytes) == ((), None)
    with pytest.raises(
        VerificationError, match=r"rank . of 2: decode steps with 4 rows .* without CUDA graph"
    ) as caught:
        session.allocate(4, CAPACITY)
    assert "captured by all of them or by none" in str(caught.value.hint)
    assert not alive(session.processes)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all(two: RankSession, rank: int) -> None:
    cache = two.allocate(1, 8)
    os.kill(two.processes[rank], signal.SIGKILL)
    with pytest.raises(Unavailable, match=rf"rank {rank} of 2 ended: its process was killed") as caught:
        two.begin_decode(
            StepInputs(np.zeros((1, 1), np.int64), np.zeros(1, np.int32), temperatures=np.ones(1, np.float32)), cache
        ).top_logits()
    assert caught.value.exit_code == 9
    assert not alive(two.processes)


def test_a_rank_that_stops_is_named(folder: Path, meetings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "1.5")
    session = opened(folder)
    cache = session.allocate(1, 8)
    os.kill(session.processes[1], signal.SIGSTOP)
    run = session.begin_decode(
        StepInputs(np.zeros((1, 1), np.int64), np.zeros(1, np.int32), temperatures=np.ones(1, np.float32)), cache
    )
    with pytest.raises(Unavailable, match=r"rank 1 of 2 does not respond: no progress for 1\.5 s"):
        run.top_logits()
    assert not alive(session.processes)


def test_a_rank_that_never_joins_is_not_waited_for(
    folder: Path, meetings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0.5")
    monkeypatch.setenv("FAKE_NCCL_ABSENT", "1")
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"rank . of 2: NCCL found not all 2 ranks within 1 s"):
        opened(folder)
    assert time.monotonic() - began < 2 * SOON_S


_RANK = """
import sys
import numpy as np
import onnxruntime as ort
from llmforge import native
from llmforge.native import nccl
sys.path.insert(0, sys.argv[1])
rank, model, name = int(sys.argv[2]), sys.argv[3], sys.argv[4]
unique_id = nccl.make_id() if rank == 0 else bytes.fromhex(sys.stdin.readline())
if rank == 0:
    print(unique_id.hex(), flush=True)
nccl.join(unique_id, rank, 2, "CPUExecutionProvider")
options = ort.SessionOptions()
native.register(options)
session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
x = np.load(name)[rank]
print(*(np.asarray(y).tobytes().hex() for y in session.run(None, {"x": x})))
"""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_operators_sum_and_gather_in_every_dtype(dtype: str, library: Path, meetings: Path, tmp_path: Path) -> None:
    kind, numpy = ir.DataType[dtype.upper().replace("32", "")], getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", 5]))
    narrow = ir.node("Cast", [x], {"to": int(kind)})
    reduced = ir.Node("llmforge.cuda", "AllReduce", narrow.outputs, ir.convenience.convert_attributes({"ranks": 2}))
    gathered = ir.Node("llmforge.cuda", "AllGather", narrow.outputs, ir.convenience.convert_attributes({"ranks": 2}))
    outputs = [ir.node("Cast", each.outputs, {"to": 1}) for each in (reduced, gathered)]
    for node, name, dims in zip(outputs, ("sum", "all"), (["n", 5], [2, "n", 5]), strict=True):
        node.outputs[0].name = name
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(dims)
    made = [each.outputs[0] for each in outputs]
    graph = ir.Graph([x], made, nodes=[narrow, reduced, gathered, *outputs], opset_imports={"": 21, "llmforge.cuda": 1})
    model = ir.Model(graph, ir_version=10)
    (tmp_path / "model.onnx").write_bytes(ir.to_proto(model).SerializeToString())
    values = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)
    np.save(tmp_path / "x.npy", values)
    arguments = [str(tmp_path / "model.onnx"), str(tmp_path / "x.npy")]
    command = [sys.executable, "-c", _RANK, str(library)]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "0", *arguments], stdout=pipe, text=True) as first:
        assert first.stdout is not None
        name = first.stdout.readline()
        second = subprocess.run([*command, "1", *arguments], input=name, stdout=pipe, text=True, check=True)
        said = [first.stdout.read().split(), second.stdout.split()]
    rounded = values.astype(numpy)
    wanted = [(rounded[0].astype(np.float32) + rounded[1].astype(np.float32)).astype(numpy), rounded]
    for rank in said:
        for found, expected in zip(rank, wanted, strict=True):
            got = np.frombuffer(bytes.fromhex(found), np.float32).reshape(expected.shape)
            assert np.array_equal(got, expected.astype(np.float32))
    assert [each[:2] for each in counted(meetings)] == [[1, 1], [1, 1]]


def test_a_host_that_cannot_run_them_says_why(folder: Path, meetings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RuntimeConfig.read(folder / FILE)
    with pytest.raises(
        EnvironmentLacks, match="has 2 ranks, which take one GPU each from device 1 on; this process sees"
    ):
        loading.open_engine(folder, config, device=1)
    monkeypatch.setattr(devices, "count", lambda extra: 1)
    with pytest.raises(EnvironmentLacks, match="which take one GPU each; this process sees 1") as caught:
        loading.open_engine(folder, config)
    assert "tensor_parallel: 1" in str(caught.value.hint)
    monkeypatch.setattr(devices, "count", lambda extra: 2)
    monkeypatch.setattr(nccl, "find", lambda: None)
    with pytest.raises(EnvironmentLacks, match=r"libnccl\.so\.2 is not found") as caught:
        loading.open_engine(folder, config)
    assert "nvidia-nccl-cu13" in str(caught.value.hint)


def test_nccl_itself_refuses(meetings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nccl.version() == "2.28.3"
    monkeypatch.delenv("FAKE_NCCL")
    with pytest.raises(RunFailed, match="NCCL: an id: unhandled system error") as caught:
        nccl.make_id()
    assert "NCCL_DEBUG" in str(caught.value.hint)
    with pytest.raises(RunFailed, match="NCCL: rank 0 of 2: unhandled system error"):
        nccl.join(b"/nowhere".ljust(nccl.ID_BYTES, b"\0"), 0, 2)
    assert nccl.joined() is None
