"""Plans: what is checked before one runs, and steps by a stand-in for TensorRT against the session of the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.backends.loading import open_engine
from llmforge.backends.onnxruntime import builder as standard
from llmforge.backends.onnxruntime.session import Session
from llmforge.backends.ranks import worker
from llmforge.backends.tensorrt.lower import rewrite
from llmforge.backends.tensorrt.plan import bucket_sizes, open_plan
from llmforge.backends.tensorrt.session import PlanSession
from llmforge.base.errors import (
    EnvironmentLacks,
    InputError,
    RunFailed,
    UnsupportedError,
    UsageError,
    VerificationError,
    VersionMismatch,
)
from llmforge.checkpoint import Checkpoint
from llmforge.ir import logits_rows
from llmforge.ir.interface import HEAD, mass_blocks
from llmforge.native import nccl
from llmforge.recipe import EngineSpec
from llmforge.rewrite.topk_outputs import add_topk_outputs
from llmforge.runtime.config import (
    DeviceFacts,
    GraphPlan,
    PlanFacts,
    ProfileFacts,
    RuntimeConfig,
    SessionConfig,
    SessionOptions,
)
from llmforge.runtime.device.cuda import CudaDevice
from llmforge.runtime.interface import StepInputs
from llmforge.serving import EngineOptions, Request, Sampling
from llmforge.serving.scheduler import SlotScheduler
from llmforge.trace import trace

from ...fakes.fake_cuda import FakeCuda, fake_cuda
from ...fakes.fake_tensorrt import MEMORY_BYTES, FakeEngine, fake_api
from ...models import graphs
from ...models.decoder_graph import decoder
from ...models.small_engines import VOCABULARY, Received, prompt, small_runner

CAPACITY, ROWS, CHUNK = 64, 4, 8
PROFILES = (ProfileFacts("prefill", 1, CHUNK), ProfileFacts("decode", ROWS, 1))


def serialized() -> bytes:
    return ir.to_proto(decoder()).SerializeToString()


def config(**changes) -> RuntimeConfig:
    rtx = changes.pop("rtx", False)
    return dataclasses.replace(
        RuntimeConfig(
            format=3,
            onnxruntime=None,
            kernels=None,
            max_context=CAPACITY,
            max_batch=ROWS,
            vocabulary=97,
            eos_token_ids=(1,),
            bos_token_id=None,
            caches=Session(serialized(), SessionConfig(1)).signature.caches,
            session=SessionOptions(None, True, {}),
            provider="tensorrt-rtx" if rtx else "tensorrt",
            device=DeviceFacts(89, 1 << 20),
            plan=PlanFacts("tensorrt_rtx" if rtx else "tensorrt", "11.4.0", "model.plan", PROFILES),
        ),
        **changes,
    )


@dataclasses.dataclass
class Bench:
    """A fake GPU with a fake engine for it, and the folder of its plan."""

    cuda: FakeCuda
    engine: FakeEngine
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def load(self, **changes) -> PlanSession:
        wanted = config(**changes)
        rtx = wanted.provider == "tensorrt-rtx"
        self.monkeypatch.setitem(sys.modules, wanted.plan.module, fake_api(self.engine, rtx=rtx))
        return open_engine(self.folder, wanted)


@pytest.fixture
def bench(tmp_path, monkeypatch) -> Bench:
    cuda = fake_cuda(monkeypatch)
    (tmp_path / "model.plan").write_bytes(b"plan")
    return Bench(cuda, FakeEngine(serialized(), cuda, CAPACITY, ((1, CHUNK), (ROWS, 1))), tmp_path, monkeypatch)


def tokens(length: int, seed: int = 1, rows: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 97, (rows, length))


def lengths(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


STEPS = [
    (tokens(8), lengths(0), (0, 1), None),  # a piece of a prompt
    (tokens(7, 2), lengths(0), (2, 3), None),
    (tokens(5, 3), lengths(8), (0, 1), np.arange(5)),  # its second piece, all logits
    (tokens(1, 4, rows=4), lengths(13, 0, 7, 0), (0, 4), None),  # decoding, with idle rows
    (tokens(1, 5, rows=2), lengths(14, 1), (0, 2), None),
    (tokens(4, 6), lengths(14), (0, 1), np.arange(4)),  # guesses
    (tokens(1, 7), lengths(16), (0, 1), None),
    (tokens(1, 8, rows=3), lengths(17, 2, 8), (0, 3), None),  # no bucket
    (tokens(1, 9, rows=2), lengths(2, 9), (1, 3), None),  # not the first rows
    (tokens(3, 10, rows=2), lengths(18, 3), (0, 2), None),  # rows of several tokens, one at a time
]


@pytest.mark.parametrize("rtx", [False, True])
def test_every_kind_of_step_gives_the_bits_of_the_session_of_the_cpu(bench, rtx):
    session, reference = bench.load(rtx=rtx), Session(serialized(), SessionConfig(1))
    caches = [each.allocate(ROWS, CAPACITY) for each in (session, reference)]
    for ids, past, (start, stop), rows in STEPS:
        got, wanted = (
            each.step(StepInputs(ids, past, rows), cache.rows(start, stop))
            for each, cache in zip((session, reference), caches, strict=True)
        )
        np.testing.assert_array_equal(got, wanted)
    assert (session.buckets, session.longest_step) == ((1, 2, 4), CHUNK)
    assert bench.cuda.launches == (0 if rtx else 3 * (3 + 5) + 3)


def with_heads(vocabulary: int = VOCABULARY, *, by_row: bool = False) -> bytes:
    model = decoder(vocabulary)
    if by_row:
        logits_rows.choose_by_row(model)
    add_topk_outputs(model)
    return ir.to_proto(model).SerializeToString()


@pytest.mark.parametrize("rtx", [False, True])
def test_a_decode_step_copies_heads_and_waits_once(bench, rtx):
    bench.engine = FakeEngine(with_heads(), bench.cuda, CAPACITY, ((1, CHUNK), (ROWS, 1)))
    session, cuda = bench.load(rtx=rtx, vocabulary=VOCABULARY), bench.cuda
    assert session.decodes_ahead
    assert session._host_inputs == {"total_sequence_length"}  # where the plan says so
    cache = session.allocate(ROWS, CAPACITY)
    temperatures = np.array([1, 0.5, 2, 1], np.float32)
    head, (_, size) = 4 * (2 * HEAD + mass_blocks(VOCABULARY)[0]), mass_blocks(VOCABULARY)
    for rows in (4, 3):  # a bucket, whose step is recorded, and no bucket
        ids, past, view = tokens(1, rows, rows), lengths(*range(rows)), cache.rows(0, rows)
        logits = session.step(StepInputs(ids, past), view)[:, 0]
        cuda.copies, cuda.waits, launches = 0, 0, cuda.launches
        cuda.fetched.clear()
        run = session.begin_decode(StepInputs(ids, past, temperatures=temperatures[:rows]), view)
        assert (cuda.copies, cuda.waits) == (1, 0)  # all inputs in one; the step runs beside the host
        heads = run.top_logits()
        assert (cuda.copies, cuda.waits, cuda.fetched) == (2, 1, [rows * head])
        assert cuda.launches - launches == (rows == 4 and not rtx)
        np.testing.assert_array_equal(heads.ids, np.argsort(-logits, axis=1, kind="stable")[:, :HEAD])
        np.testing.assert_array_equal(heads.logits, np.take_along_axis(logits, heads.ids, 1))
        np.testing.assert_array_equal(run.logits(1), logits[1])
        np.testing.assert_array_equal(run.blocks([1, 0], [3, 4])[0], logits[1, 3 * size : 4 * size])
        assert cuda.fetched[1:] == [4 * VOCABULARY, 4 * size, 4 * size]
    with pytest.raises(ValueError, match="top logits of one token a row"):
        session.begin_decode(StepInputs(tokens(2), lengths(0), temperatures=temperatures[:1]), cache.rows(0, 1))
    other = session.allocate(1, CAPACITY - 1)  # whose rows do not lie as the plan wants them
    with pytest.raises(ValueError, match="and caches of"):
        session.begin_decode(StepInputs(tokens(1), lengths(0), temperatures=temperatures[:1]), other)


def test_heads_of_a_small_vocabulary_lie_where_tensorrt_takes_them(bench):
    bench.engine = FakeEngine(with_heads(97), bench.cuda, CAPACITY, ((1, CHUNK), (ROWS, 1)))
    session = bench.load()
    view = session.allocate(ROWS, CAPACITY).rows(0, 3)  # whose address is checked by the stand-in
    ids, past = tokens(1, 1, 3), lengths(0, 1, 2)
    logits = session.step(StepInputs(ids, past), view)[:, 0]
    heads = session.begin_decode(StepInputs(ids, past, temperatures=np.ones(3, np.float32)), view).top_logits()
    assert heads.whole
    np.testing.assert_array_equal(heads.logits, -np.sort(-logits, axis=1))


@pytest.mark.parametrize("rtx", [False, True])
def test_several_prompts_run_in_a_profile_of_their_own(bench, rtx, tmp_path_factory, sample_checkpoint):
    profiles = ((1, 64), (ROWS, 1), (ROWS, 64))
    facts = PlanFacts(
        "tensorrt_rtx" if rtx else "tensorrt",
        "11.4.0",
        "model.plan",
        (ProfileFacts("prefill", 1, 64), PROFILES[1], ProfileFacts("prompts", ROWS, 64)),
    )
    bench.engine = FakeEngine(with_heads(by_row=True), bench.cuda, 128, profiles)
    session = bench.load(rtx=rtx, vocabulary=VOCABULARY, max_context=128, plan=facts)
    assert session.prompt_shapes == ((2, 64), (4, 64))
    contexts = bench.engine.contexts
    assert [context.profile for context in contexts] == [0, 1, 2]
    runner = small_runner(tmp_path_factory.mktemp("small"), sample_checkpoint)
    requests = [Request(prompt(5 + 9 * i, seed=i), Sampling(max_tokens=5)) for i in range(ROWS)]
    long = Request(prompt(90, seed=9), Sampling(max_tokens=3))  # in two chunks, of which the other slots see neither

    def texts(backend) -> list[list[int]]:
        options = EngineOptions(prefix_cache_bytes=0)
        scheduled = SlotScheduler(backend, backend.allocate(ROWS, 128), runner.samplers, options, chunk=64)
        before = [context.enqueued for context in contexts]
        if rtx and backend is session:
            assert [context.compiled for context in contexts] == [1, 3, 2]  # at load
        answers = [Received() for _ in range(ROWS + 1)]
        for request, received in zip([*requests, long], answers, strict=True):
            scheduled.add(request, received.receive)
        while scheduled.step():
            pass
        if backend is session:
            ran = [context.enqueued - each for context, each in zip(contexts, before, strict=False)]
            assert (ran[0], ran[2]) == (2, 1)
        return [each.tokens for each in answers]

    assert texts(session) == texts(runner.session)


def test_prompts_go_on_together_behind_what_their_slots_hold(bench):
    profiles = (ProfileFacts("prefill", 1, 64), PROFILES[1], ProfileFacts("prompts", ROWS, 64))
    facts = PlanFacts("tensorrt", "11.4.0", "model.plan", profiles)
    model = loaded(rewrite(graphs.llama(graphs.Llama(positions=128)), 128)[0])
    shapes = [(each.max_batch, each.max_sequence) for each in profiles]
    bench.engine = FakeEngine(model, bench.cuda, 128, shapes)
    caches = Session(model, SessionConfig(1)).signature.caches
    session = bench.load(vocabulary=96, max_context=128, caches=caches, plan=facts)
    cache = session.allocate(ROWS, 128)
    ids, past, own = tokens(64, 3, ROWS) % 96, lengths(0, 5, 17, 40), lengths(9, 64, 3, 30)
    every = tokens(64, 4, ROWS) % 96
    for row in range(ROWS):  # what they hold
        session.step(StepInputs(every[row : row + 1], lengths(0)), cache.rows(row, row + 1))
    wanted = [
        session.step(StepInputs(ids[row : row + 1, : own[row]], past[row : row + 1]), cache.rows(row, row + 1))[0, 0]
        for row in range(ROWS)
    ]
    prompts = bench.engine.contexts[2].enqueued
    got = session.step(StepInputs(ids, past, (own - 1).astype(np.int64)[:, None], lengths=own), cache)
    assert bench.engine.contexts[2].enqueued == prompts + 1
    np.testing.assert_allclose(got[:, 0], wanted, atol=1e-5)


def test_a_plan_with_heads_serves_the_texts_of_whole_rows(bench, tmp_path_factory, sample_checkpoint):
    runner = small_runner(tmp_path_factory.mktemp("small"), sample_checkpoint)
    bench.engine = FakeEngine(with_heads(), bench.cuda, 128, ((1, CHUNK), (ROWS, 1)))
    session = bench.load(vocabulary=VOCABULARY, max_context=128)
    assert session.decodes_ahead
    samplings = [
        Sampling(max_tokens=9),
        Sampling(temperature=1.0, seed=1, max_tokens=9),
        Sampling(temperature=0.3, top_p=0.9, seed=2, max_tokens=12),
        Sampling(repetition_penalty=1.3, max_tokens=7),
        Sampling(temperature=0.8, top_k=40, seed=3, max_tokens=8),
    ]

    def texts(backend) -> list[list[int]]:
        scheduled = SlotScheduler(
            backend, backend.allocate(ROWS, 128), runner.samplers, EngineOptions(prefix_cache_bytes=0)
        )
        answers = [Received() for _ in samplings]
        for i, (sampling, received) in enumerate(zip(samplings, answers, strict=True)):
            scheduled.add(Request(prompt(5 + 3 * i, seed=i), sampling), received.receive)
        while scheduled.step():
            pass
        return [each.tokens for each in answers]

    assert texts(session) == texts(runner.session)


def test_all_contexts_share_one_memory_and_have_the_profile_of_their_steps(bench):
    bench.load().allocate(ROWS, CAPACITY)
    contexts = bench.engine.contexts
    assert [context.profile for context in contexts] == [0, 1, 1, 1, 1]  # prefill, decode, and one a bucket
    assert len({context.memory for context in contexts}) == 1
    assert contexts[0].memory[1] == MEMORY_BYTES


def test_the_contexts_of_a_rank_have_its_communicator(bench, monkeypatch):
    """As the real bindings take it: a capsule of the address."""
    monkeypatch.setattr(nccl, "_joined", [nccl.Communicator(0x5EED, rank=1, ranks=2)])
    bench.load(graphs=GraphPlan("off", ())).allocate(ROWS, CAPACITY)
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    assert [address(context.communicator, None) for context in bench.engine.contexts] == [0x5EED, 0x5EED]
    real = pytest.importorskip("tensorrt_rtx").IExecutionContext.set_communicator.__doc__
    assert "communicator: typing_extensions.CapsuleType) -> bool" in real
    assert worker._graphs(config(ranks=2)) == GraphPlan("off", ())


def test_profiles_are_found_in_any_order(bench):
    bench.engine.profiles.reverse()
    facts = config().plan
    session = bench.load(plan=dataclasses.replace(facts, profiles=facts.profiles[::-1]))
    assert [context.profile for context in bench.engine.contexts] == [1, 0]
    assert session.longest_step == CHUNK


def test_a_step_is_recorded_once_for_each_bucket_and_proved(bench):
    session = bench.load()
    session.allocate(ROWS, CAPACITY)
    assert [(each.capture.batch, each.reason) for each in session.capture_results] == [(4, None), (2, None), (1, None)]
    assert session.notes == ()
    # Each bucket's context runs its step once as it is, and once while it is recorded.
    assert [context.enqueued for context in bench.engine.contexts[2:]] == [2, 2, 2]


def test_tensorrt_rtx_is_told_to_record_decode_steps_by_itself(bench):
    bench.load(rtx=True).allocate(ROWS, CAPACITY)
    assert [context.strategy for context in bench.engine.contexts] == ["disabled", "whole"]
    with pytest.raises(UnsupportedError, match="TensorRT-RTX records steps by itself and does not say which"):
        bench.load(rtx=True, graphs=GraphPlan("require", ()))
    bench.engine.contexts.clear()
    assert bench.load(rtx=True, graphs=GraphPlan("off", ())).buckets == ()
    assert [context.strategy for context in bench.engine.contexts] == ["disabled", "disabled"]


def test_tensorrt_rtx_compiles_its_kernels_once_for_all_starts(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    record = bench.folder / "plan.json"
    record.write_text(json.dumps({"sha256": "ab" * 32}))
    kept = tmp_path / "caches/llmforge/tensorrt-rtx-kernels" / f"{'ab' * 32}.cache"

    def compiled() -> list[int]:
        bench.engine.contexts.clear()
        bench.load(rtx=True).allocate(ROWS, CAPACITY)
        return [context.compiled for context in bench.engine.contexts]

    assert compiled() == [1, 3]  # a piece of a prompt; a decode step of 1, 2 and 4 rows
    assert [context.specialization for context in bench.engine.contexts] == ["lazy", "eager"]
    assert compiled() == [0, 0]
    kept.write_bytes(b"of another driver")
    assert compiled() == [1, 3]
    assert kept.read_bytes().startswith(b"kernels")
    for damaged in ('{"sha256": "../../x"}', "[]", "{"):  # nothing says what the plan is: nothing is kept
        record.write_text(damaged)
        assert compiled() == [1, 3]
    assert list(kept.parent.iterdir()) == [kept]


def test_a_step_that_cannot_be_recorded_is_noted_or_refused(bench, monkeypatch):
    def refuse(*_) -> tuple:
        return bench.cuda.real.cudaError_t.cudaErrorStreamCaptureUnsupported, None

    monkeypatch.setattr(type(bench.cuda), "_cudaStreamEndCapture", refuse)
    monkeypatch.setattr(type(bench.cuda), "_cudaStreamBeginCapture", lambda self, *rest: None)
    session = bench.load()
    session.allocate(ROWS, CAPACITY)
    assert len(session.notes) == 3
    assert "cudaErrorStreamCaptureUnsupported" in session.notes[0]
    with pytest.raises(VerificationError, match="with 4 rows of up to 64 tokens run without CUDA graph"):
        bench.load(graphs=GraphPlan("require", ())).allocate(ROWS, CAPACITY)


def test_writes_beyond_a_row_are_refused_before_they_run(bench):
    session = bench.load(graphs=GraphPlan("off", ()))
    cache = session.allocate(2, CAPACITY)
    with pytest.raises(UsageError, match=r"4 tokens after \[61\] does not fit into a cache of 64 tokens"):
        session.step(StepInputs(tokens(4), lengths(61)), cache.rows(0, 1))
    with pytest.raises(ValueError, match="takes 4 rows, 8 tokens of one, and caches of 64"):
        session.step(StepInputs(tokens(9), lengths(0)), cache.rows(0, 1))
    with pytest.raises(ValueError, match="a cache of 32 tokens"):
        session.step(StepInputs(tokens(1), lengths(0)), session.allocate(1, 32))
    assert all(context.enqueued == 0 for context in bench.engine.contexts)


def test_a_call_that_fails_says_what_the_library_said(bench):
    session = bench.load(graphs=GraphPlan("off", ()))
    cache = session.allocate(1, CAPACITY)
    bench.engine.contexts[0].fails = True
    with pytest.raises(RunFailed, match="TensorRT: a step: it gives no reason"):
        session.step(StepInputs(tokens(2), lengths(0)), cache)


def test_a_plan_that_copies_a_cache_is_refused(bench):
    bench.engine.copied.add("present.1.value")
    with pytest.raises(UnsupportedError, match=r"present\.1\.value is not past_key_values\.1\.value in place"):
        bench.load()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_context": 128}, r"past_key_values\.0\.key has 64 slots, and its artifact says 128"),
        ({"max_batch": 5}, "decodes 4 rows at once, and its artifact promises 5"),
        ({"vocabulary": 98}, "does not match model.plan"),
        (
            {"plan": PlanFacts("tensorrt", "11.4.0", "model.plan", (PROFILES[0], ProfileFacts("decode", 8, 1)))},
            r"profile decode takes ids of up to \(4, 1\), and its artifact says \(8, 1\)",
        ),
        (
            {"plan": PlanFacts("tensorrt", "11.4.0", "model.plan", PROFILES[:1])},
            r"has 2 profiles, its artifact lists \['prefill'\]",
        ),
        ({"plan": PlanFacts("tensorrt", "11.4.0", "other.plan", PROFILES)}, r"other\.plan is missing"),
    ],
)
def test_a_plan_that_is_not_what_its_artifact_says_is_refused(bench, changes, message):
    with pytest.raises(InputError, match=message):
        bench.load(**changes)


def test_another_version_and_another_gpu_are_refused_in_plain_words(bench):
    with pytest.raises(VersionMismatch, match=r"built with TensorRT 11\.5\.0, but 11\.4\.0 is installed"):
        bench.load(plan=dataclasses.replace(config().plan, version="11.5.0"))
    with pytest.raises(VersionMismatch, match=r"compute capability 12\.0, but Fake GPU \(device 0\) has 8\.9"):
        bench.load(device=DeviceFacts(120, 1))


def test_where_several_gpus_are_those_that_would_do_are_named(bench, monkeypatch):
    def attribute(self, which, index):
        major = which == self.real.cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor
        return (8 if major else 9) if index == 1 else (7 if major else 5)

    monkeypatch.setattr(type(bench.cuda), "_cudaDeviceGetAttribute", attribute)
    with pytest.raises(VersionMismatch, match=r"8\.9, but Fake GPU \(device 0\) has 7\.5") as caught:
        bench.load()
    assert "of the 2 devices here, 1 would do" in caught.value.hint
    assert "serving: {triton: {gpus: [1]}}" in caught.value.hint


def test_a_device_without_the_memory_is_told_what_would_fit(bench, monkeypatch, caplog):
    caches = config().caches
    token = sum(each.kv_heads * each.head_dim * np.dtype(each.dtype).itemsize for each in caches)
    weights = (bench.folder / "model.plan").stat().st_size

    def free(bytes_):
        monkeypatch.setattr(
            type(bench.cuda), "_cudaMemGetInfo",
            lambda self: (self.real.cudaError_t.cudaSuccess, int(bytes_), 80_000_000_000),
        )  # fmt: skip

    free(weights + 2 * CAPACITY * token)
    with pytest.raises(EnvironmentLacks, match=r"0\.00 GB free of 80\.00; .* \(4 rows of 64 tokens\)") as caught:
        bench.load()
    assert caught.value.hint == "free memory on the device, or build with engine.max_batch: 2"
    free(weights + 1.5 * CAPACITY * ROWS * 128 * token)
    with pytest.raises(EnvironmentLacks) as caught:
        bench.load(max_context=128 * 128)
    assert caught.value.hint.endswith("build with engine.max_batch: 3 or engine.max_context: 12288")
    free(weights)
    with pytest.raises(EnvironmentLacks, match="free of 80") as caught:
        bench.load()
    assert "its weights alone do not fit" in caught.value.hint
    free(weights + ROWS * CAPACITY * token)
    caplog.clear()
    bench.load(device=DeviceFacts(89, weights + ROWS * CAPACITY * token + 1))
    assert "may take up to" in caplog.text


def test_without_the_library_its_extra_is_named(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(EnvironmentLacks, match=r"needs TensorRT 11\.4\.0, which cannot be imported") as caught:
        open_plan(bench.folder / "model.plan", config().plan)
    assert "llmforge[tensorrt]" in caught.value.hint


def test_a_plan_that_the_library_refuses_says_why(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", fake_api(None, rtx=False, complaint="of another compute capability"))
    with pytest.raises(VersionMismatch, match="cannot load it on this device: of another compute capability"):
        open_plan(bench.folder / "model.plan", config().plan)


def test_rows_at_addresses_that_tensorrt_does_not_take_are_refused(monkeypatch, tmp_path):
    cuda = fake_cuda(monkeypatch)
    (tmp_path / "model.plan").write_bytes(b"plan")
    odd = FakeEngine(serialized(), cuda, 63, ((1, CHUNK), (ROWS, 1)))
    monkeypatch.setitem(sys.modules, "tensorrt", fake_api(odd, rtx=False))
    session = open_engine(tmp_path, config(max_context=63))
    with pytest.raises(
        UnsupportedError, match="has 8064 bytes, and TensorRT takes addresses that are multiples of 256"
    ):
        session.allocate(2, 63)
    session.allocate(1, 63)


def test_no_device_is_said_before_a_plan_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    for rtx in (False, True):
        try:
            CudaDevice()
        except EnvironmentLacks:
            with pytest.raises(EnvironmentLacks, match="no CUDA device"):
                open_engine(tmp_path, config(rtx=rtx))


def test_buckets_are_powers_of_two_and_the_most():
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(6) == (1, 2, 4, 6)
    assert bucket_sizes(8) == (1, 2, 4, 8)


USED = {
    "Runtime": ["deserialize_cuda_engine"],
    "ICudaEngine": [
        "num_io_tensors",
        "num_optimization_profiles",
        "device_memory_size_v2",
        "get_tensor_name",
        "get_tensor_dtype",
        "get_tensor_mode",
        "get_tensor_location",
        "get_tensor_shape",
        "get_tensor_profile_shape",
        "get_aliased_input_tensor",
        "create_runtime_config",
        "create_execution_context",
    ],
    "IRuntimeConfig": [
        "set_execution_context_allocation_strategy",
        "cuda_graph_strategy",
        "dynamic_shapes_kernel_specialization_strategy",
        "create_runtime_cache",
        "set_runtime_cache",
    ],
    "IRuntimeCache": ["deserialize", "serialize"],
    "DynamicShapesKernelSpecializationStrategy": ["EAGER", "LAZY"],
    "IExecutionContext": [
        "set_device_memory",
        "set_optimization_profile_async",
        "set_input_shape",
        "set_tensor_address",
        "get_tensor_shape",
        "infer_shapes",
        "execute_async_v3",
    ],
    "ILogger": ["ERROR", "INTERNAL_ERROR", "WARNING"],
    "TensorIOMode": ["INPUT"],
    "TensorLocation": ["HOST"],
    "ExecutionContextAllocationStrategy": ["USER_MANAGED"],
    "CudaGraphStrategy": ["DISABLED", "WHOLE_GRAPH_CAPTURE"],
    "DataType": ["FLOAT", "HALF", "BF16", "INT8", "UINT8", "FP8", "INT32", "INT64"],
}


def test_the_installed_bindings_have_every_name_that_is_used():
    api = pytest.importorskip("tensorrt_rtx")
    assert [
        f"{kind}.{name}" for kind, names in USED.items() for name in names if not hasattr(getattr(api, kind), name)
    ] == []
    faked = {name for name in dir(FakeEngine) if name.startswith(("get_", "num_", "create_"))}
    assert faked <= set(USED["ICudaEngine"])


def test_a_plan_of_a_traced_model_decodes_like_the_engine_of_the_cpu(tiny_checkpoint, tmp_path, monkeypatch):
    """The graph that TensorRT is given, behind the stand-in: what it takes is what is fed to it."""
    model = trace(Checkpoint.open(tiny_checkpoint))
    plain, _ = standard.lower(model, targets.local(), EngineSpec(max_context=CAPACITY))
    lowered, _ = rewrite(model, CAPACITY)
    reference, engine = (
        made
        for made in (
            Session(loaded(plain), SessionConfig(1)),
            FakeEngine(loaded(lowered), fake_cuda(monkeypatch), CAPACITY, ((1, CHUNK), (ROWS, 1))),
        )
    )
    (tmp_path / "model.plan").write_bytes(b"plan")
    monkeypatch.setitem(sys.modules, "tensorrt", fake_api(engine, rtx=False))
    vocabulary = reference.vocabulary
    session = open_engine(tmp_path, config(vocabulary=vocabulary, caches=reference.signature.caches))
    caches = [each.allocate(ROWS, CAPACITY) for each in (session, reference)]
    assert [each.reason for each in session.capture_results] == [None, None, None]
    for ids, past, (start, stop), rows in STEPS:
        got, wanted = (
            each.step(StepInputs(ids % vocabulary, past, rows), cache.rows(start, stop))
            for each, cache in zip((session, reference), caches, strict=True)
        )
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def loaded(model: ir.Model) -> bytes:
    """Serialize a model with its weights inside."""
    whole = model.clone()
    for name, value in whole.graph.initializers.items():
        value.const_value = ir.tensor(value.const_value.numpy(), name=name)
    return ir.to_proto(whole).SerializeToString()
