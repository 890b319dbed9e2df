"""A decoder over device memory, with the host's memory as the device: the same bits as the session of the CPU.

What is not proved here is what ONNX Runtime's CUDA provider does with the calls.
"""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from llmforge.backends.onnxruntime.cuda.session import DeviceSession
from llmforge.backends.onnxruntime.session import Session
from llmforge.base.errors import UnsupportedError, UsageError, VerificationError
from llmforge.runtime.config import Capture, GraphPlan, SessionConfig
from llmforge.runtime.device.graph_capture import verify_capture
from llmforge.runtime.device.inputs import InputBuffers
from llmforge.runtime.interface import StepInputs

from ..fakes.host_device import HostDevice
from ..fakes.recorder import Recorder
from ..models.decoder_graph import decoder

ONE_THREAD = SessionConfig(threads=1)
CAPACITY = 64
PLAN = GraphPlan(
    "require", tuple(Capture(i + 1, b, n) for i, (n, b) in enumerate([(64, 4), (64, 2), (16, 4), (16, 2)]))
)


def serialized(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString()


def both(**options) -> tuple[Session, DeviceSession]:
    model = serialized(decoder(**options))
    return Session(model, ONE_THREAD), DeviceSession(model, ONE_THREAD, HostDevice())


def tokens(length: int, seed: int = 1, rows: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 97, (rows, length))


def lengths(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize("int8_cache", [False, True])
def test_every_kind_of_step_gives_the_bits_of_the_session_of_the_cpu(int8_cache):
    sessions = both(int8_cache=int8_cache)
    caches = [session.allocate(3, CAPACITY) for session in sessions]
    assert caches[0].size_bytes == caches[1].size_bytes
    steps = [
        (tokens(12), lengths(0), (0, 1), None),  # a prompt
        (tokens(7, 2), lengths(0), (2, 3), None),
        (tokens(20, 3), lengths(12), (0, 1), np.arange(20)),  # its second piece, all logits
        (tokens(1, 4, rows=3), lengths(32, 0, 7), (0, 3), None),  # decoding, with an idle row
        (tokens(1, 5, rows=2), lengths(33, 1), (0, 2), None),
        (tokens(4, 6), lengths(33), (0, 1), np.arange(4)),  # guesses, of which two are taken
        (tokens(1, 7), lengths(35), (0, 1), None),
        (tokens(5, 8, rows=3), lengths(36, 2, 8), (0, 3), np.array([4, 0])),  # several rows behind a past
    ]
    for ids, past, (start, stop), rows in steps:
        wanted, got = (
            session.step(StepInputs(ids, past, rows), cache.rows(start, stop))
            for session, cache in zip(sessions, caches, strict=True)
        )
        np.testing.assert_array_equal(got, wanted)
    for name, array in caches[0].buffers.items():
        buffer = caches[1].memory.tensors[name].buffer
        np.testing.assert_array_equal(buffer.memory.view(array.dtype).reshape(array.shape), array)


def test_copied_tokens_go_on_like_those_they_were_copied_from():
    _, session = both()
    cache, pool = session.allocate(3, CAPACITY), session.allocate(2, 8)
    ids = tokens(12)
    session.step(StepInputs(ids[:, :8], lengths(0)), cache.rows(1, 2))
    pool.copy(1, 0, cache, 1, 0, 8)
    cache.copy(2, 0, pool, 1, 0, 8)
    wanted = session.step(StepInputs(ids[:, 8:], lengths(8)), cache.rows(1, 2))
    np.testing.assert_array_equal(session.step(StepInputs(ids[:, 8:], lengths(8)), cache.rows(2, 3)), wanted)


def test_a_device_of_its_own_memory_says_what_is_left(monkeypatch):
    cpu, session = both()
    assert cpu.spare_bytes is None
    assert session.spare_bytes is None  # it is the host's memory
    for free, spare in ((4000, 3900), (50, 0)):
        monkeypatch.setattr(HostDevice, "memory", lambda _, free=free: (free, 2000))
        assert session.spare_bytes == spare


def test_copies_beyond_a_row_are_refused():
    _, session = both()
    cache = session.allocate(2, 8)
    for row, start, count in ((2, 0, 1), (0, 7, 2), (-1, 0, 1), (0, -1, 1)):
        with pytest.raises(ValueError, match="of a cache of 2 rows of 8 tokens"):
            cache.copy(row, start, cache, 0, 0, count)
        with pytest.raises(ValueError, match="of a cache of 2 rows of 8 tokens"):
            cache.copy(0, 0, cache, row, start, count)


def test_a_cache_for_nothing_is_refused():
    _, session = both()
    for batch, capacity in ((0, 8), (1, 0)):
        with pytest.raises(ValueError, match=f"a cache of {batch} rows of {capacity} tokens"):
            session.allocate(batch, capacity)


def test_an_input_that_has_no_place_or_no_room_is_refused():
    buffers = InputBuffers(HostDevice(), ("a", "b"), ("b",), 100)
    assert buffers.each_bytes == 256
    bound = buffers.upload({"a": np.ones(64, np.float32), "b": np.ones((2, 3), np.int64)})
    assert [(each.onnx, each.shape, each.on_host) for each in bound.values()] == [(1, (64,), False), (7, (2, 3), True)]
    for feeds in ({"c": np.ones(1, np.float32)}, {"a": np.ones(65, np.float32)}):
        with pytest.raises(ValueError, match=r"room for 256 each: \['a', 'b'\]"):
            buffers.upload(feeds)


def test_a_step_whose_logits_tell_no_token_from_another_is_not_taken_for_a_captured_one():
    found = verify_capture(PLAN.captures[0], lambda token, **_: np.ones((4, 1, 97), np.float32), lambda: 7)
    assert found.reason is not None
    assert "two tokens have the same logits" in found.reason
    assert (found.replay_ms, found.memory_bytes) == (None, 0)


def test_views_have_the_address_of_the_whole_and_equal_ones_are_one():
    _, session = both()
    cache = session.allocate(3, 8)
    name = "past_key_values.0.key"
    assert cache.rows(0, 3) is cache
    assert cache.rows(0, 2) is cache.rows(0, 2)
    assert cache.rows(0, 2).address(name) == cache.address(name)
    assert cache.rows(0, 2).shape(name) == (2, 2, 8, 16)
    assert cache.rows(1, 3).rows(1, 2).address(name) == cache.address(name) + 2 * 2 * 8 * 16 * 4
    with pytest.raises(ValueError, match="rows 2:4 of a cache of 3 rows"):
        cache.rows(2, 4)


def test_steps_beyond_the_cache_are_refused_before_they_run():
    _, session = both()
    cache = session.allocate(2, 8)
    with pytest.raises(UsageError, match=r"3 tokens after \[0, 6\] does not fit into a cache of 8 tokens"):
        session.step(StepInputs(np.zeros((2, 3), np.int64), lengths(0, 6)), cache)
    with pytest.raises(ValueError, match="cache of 2 rows"):
        session.step(StepInputs(np.zeros((1, 1), np.int64), lengths(0)), cache)
    assert not any(part.buffer.memory.any() for part in cache.memory.tensors.values())


def test_a_cache_that_nobody_holds_is_freed():
    _, session = both()
    cache = session.allocate(2, 8)
    session.step(StepInputs(tokens(4), lengths(0)), cache.rows(0, 1))
    memory = weakref.ref(cache.memory)
    del cache
    gc.collect()
    assert memory() is None


def recording(plan: GraphPlan = PLAN, buckets=(2, 4)) -> tuple[Session, DeviceSession, Recorder]:
    model = serialized(decoder())
    session = DeviceSession(model, ONE_THREAD, HostDevice(), buckets=buckets, graphs=plan)
    session._session = recorder = Recorder(session._session)
    return Session(model, ONE_THREAD), session, recorder


def test_steps_are_recorded_in_the_order_of_the_plan_and_proved():
    _, session, recorder = recording()
    session.allocate(4, CAPACITY)
    assert [each.capture for each in session.capture_results] == list(PLAN.captures)
    assert list(recorder.recorded) == [1, 2, 3, 4]
    assert all(each.reason is None and each.replay_ms > 0 for each in session.capture_results)
    assert session.buckets == (2, 4)
    assert session.notes == ()


def test_a_decode_step_is_replayed_by_its_rows_and_the_length_of_its_longest_text():
    reference, session, recorder = recording()
    caches = [each.allocate(4, CAPACITY) for each in (reference, session)]
    for part in caches[1].memory.tensors.values():  # what the proofs wrote, for here pasts are not written first
        part.buffer.memory[:] = 0
    random = np.random.default_rng(0)
    recorder.replays.clear()
    wanted_ids = []
    # In between, unrecorded steps of the same cache: prompts, guesses, one row, three rows.
    for past, stop, number in [
        ([0, 0, 0, 0], 4, 3),
        ([15, 3, 0, 1], 4, 3),
        ([16, 3, 0, 1], 4, 1),
        ([2, 14], 2, 4),
        ([63, 5], 2, 2),
        ([3], 1, None),
        ([4, 4, 4], 3, None),
    ]:
        ids = random.integers(0, 97, (len(past), 1))
        wanted, got = (
            each.step(StepInputs(ids, np.array(past, np.int32)), cache.rows(0, stop))
            for each, cache in zip((reference, session), caches, strict=True)
        )
        np.testing.assert_array_equal(got, wanted)
        wanted_ids += [] if number is None else [number]
        assert recorder.replays == wanted_ids
    piece = random.integers(0, 97, (1, 5))
    np.testing.assert_array_equal(
        session.step(StepInputs(piece, lengths(1)), caches[1].rows(1, 2)),
        reference.step(StepInputs(piece, lengths(1)), caches[0].rows(1, 2)),
    )
    assert recorder.replays == wanted_ids


def test_rows_that_do_not_begin_the_cache_and_other_caches_are_not_replayed():
    _, session, recorder = recording()
    cache, small = session.allocate(5, CAPACITY), session.allocate(2, 8)
    recorder.replays.clear()
    session.step(StepInputs(tokens(1, rows=2), lengths(0, 0)), cache.rows(1, 3))
    session.step(StepInputs(tokens(1, rows=2), lengths(0, 0)), small)
    assert recorder.replays == []
    session.step(StepInputs(tokens(1, rows=2), lengths(0, 0)), cache.rows(0, 4).rows(0, 2))
    assert recorder.replays == [4]


def test_each_cache_gets_recordings_of_its_own():
    reference, session, recorder = recording()
    caches = [session.allocate(4, CAPACITY) for _ in range(2)]
    assert list(recorder.recorded) == [1, 2, 3, 4, 5, 6, 7, 8]
    session.step(StepInputs(tokens(3), lengths(0)), caches[0].rows(0, 1))
    wanted = reference.allocate(4, CAPACITY)
    reference.step(StepInputs(tokens(3), lengths(0)), wanted.rows(0, 1))
    got = session.step(StepInputs(tokens(1, rows=2), lengths(3, 0)), caches[0].rows(0, 2))
    np.testing.assert_array_equal(got, reference.step(StepInputs(tokens(1, rows=2), lengths(3, 0)), wanted.rows(0, 2)))
    session.step(StepInputs(tokens(1, rows=2), lengths(0, 0)), caches[1].rows(0, 2))
    assert recorder.replays[-2:] == [4, 8]


def test_a_step_that_is_silently_not_recorded_is_found_out():
    _, session, recorder = recording()
    recorder.silent = True
    with pytest.raises(
        VerificationError, match="with 4 rows of up to 64 tokens run without CUDA graph: the step ran again"
    ):
        session.allocate(4, CAPACITY)


def test_a_recording_that_reads_another_place_is_found_out():
    _, session, recorder = recording()

    def frozen(binding, options) -> None:
        """Replay the first result."""
        number = int(options.get_run_config_entry("gpu_graph_id"))
        if number == -1 or (
            recorder.recorded.setdefault(number, binding) is binding and number not in recorder.replays
        ):
            recorder._session.run_with_iobinding(binding)
        recorder.replays.append(number)

    recorder.run_with_iobinding = frozen
    with pytest.raises(VerificationError, match="a recorded step gives other logits than an unrecorded one"):
        session.allocate(4, CAPACITY)


def test_a_recording_that_keeps_the_lengths_of_its_first_run_is_found_out():
    _, session, recorder = recording()
    inputs, kept = session._decode_inputs, {}
    replay = recorder.run_with_iobinding

    def stale(binding, options) -> None:
        number = int(options.get_run_config_entry("gpu_graph_id"))
        at = inputs._offsets["seqlens_k"]
        lengths_now = inputs._buffer.memory[at : at + inputs.each_bytes]
        if number != -1:
            lengths_now[:] = kept.setdefault(number, lengths_now.copy())
        replay(binding, options)

    recorder.run_with_iobinding = stale
    with pytest.raises(VerificationError, match="a recorded step gives other logits than an unrecorded one"):
        session.allocate(4, CAPACITY)


def test_what_cannot_be_recorded_runs_unrecorded_where_the_plan_allows_it():
    reference, session, recorder = recording(GraphPlan("allow", PLAN.captures))
    recorder.error = RuntimeError("Error in execution: Graph capture did not complete")  # as `run_with_iobinding` does
    caches = [each.allocate(4, CAPACITY) for each in (reference, session)]
    assert len(session.notes) == 4
    assert session.notes[0] == (
        "decode steps with 4 rows of up to 64 tokens run without CUDA graph: "
        f"ONNX Runtime {onnxruntime.__version__} failed to run the graph: "
        "Error in execution: Graph capture did not complete"
    )
    ids, past = tokens(1, rows=4), lengths(0, 0, 0, 0)
    np.testing.assert_array_equal(
        session.step(StepInputs(ids, past), caches[1]), reference.step(StepInputs(ids, past), caches[0])
    )


def test_nothing_is_recorded_where_the_plan_says_so():
    _, session, recorder = recording(GraphPlan("off", PLAN.captures))
    session.allocate(4, CAPACITY)
    assert recorder.recorded == {}
    assert session.capture_results == ()


def test_logits_arrive_in_an_array_of_the_devices_choice():
    _, session = both()
    cache = session.allocate(1, CAPACITY)
    out = session.logits_array((1, 1, session.vocabulary))
    assert session.step(StepInputs(tokens(3), lengths(0)), cache, out=out) is out
    assert np.isfinite(out).all()
    with pytest.raises(ValueError, match=r"out is float32 \(1, 2, 97\)"):
        session.step(StepInputs(tokens(1), lengths(3)), cache, out=session.logits_array((1, 2, 97)))


def test_all_runs_are_made_by_one_thread():
    _, session = both()
    threads = set()
    real = session._session

    class Watching:
        def __getattr__(self, name):
            return getattr(real, name)

        def run_with_iobinding(self, binding, options) -> None:
            threads.add(threading.current_thread().name)
            real.run_with_iobinding(binding, options)

    session._session = Watching()
    cache = session.allocate(1, CAPACITY)
    session.step(StepInputs(tokens(3), lengths(0)), cache)
    other = threading.Thread(target=lambda: session.step(StepInputs(tokens(1), lengths(3)), cache))
    other.start()
    other.join()
    assert len(threads) == 1
    assert "llmforge-cpu" in threads.pop()


def test_caches_that_grow_are_refused():
    model = decoder()
    for name in [f"present.{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")]:
        value = next(each for each in model.graph.outputs if each.name == name)
        value.shape = ir.Shape(["batch", 2, "grown", 16])
    with pytest.raises(UnsupportedError, match="its caches grow in every step"):
        DeviceSession(serialized(model), ONE_THREAD, HostDevice())
