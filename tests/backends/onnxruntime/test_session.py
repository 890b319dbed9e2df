"""One session: caches in place, views, ragged batches, continuations, and what is refused."""

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import onnx_ir as ir
import psutil
import pytest
from onnx import TensorProto, helper

from llmforge import targets
from llmforge.backends import loading
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder as onnxruntime
from llmforge.backends.onnxruntime.session import PROVIDER, Session, open_graph, run, session_options
from llmforge.base.errors import InputError, RunFailed, UnsupportedError, UsageError
from llmforge.ir import graph
from llmforge.ir.operators import contrib
from llmforge.passes.flash_attention import FlashAttention
from llmforge.recipe import EngineSpec
from llmforge.rewrite import cpu_attention
from llmforge.runtime.config import RuntimeConfig, SessionConfig
from llmforge.runtime.interface import StepInputs

from ...models import graphs
from ...models.decoder_graph import decoder

ONE_THREAD = SessionConfig(threads=1)
CAPACITY = 64


def serialized(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString()


def session(**options) -> Session:
    return Session(serialized(decoder(**options)), ONE_THREAD)


def tokens(length: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 97, (1, length))


def lengths(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def all_logits(s: Session, ids: np.ndarray) -> np.ndarray:
    """[S, V] in one step over an empty cache."""
    return s.step(StepInputs(ids, lengths(0), np.arange(ids.shape[1])), s.allocate(1, CAPACITY))[0]


# int8 too: a prefill attends to keys and values as the cache holds them, rounded: evaluation sees what decoding sees.
@pytest.mark.parametrize("int8_cache", [False, True])
def test_decoding_token_by_token_gives_the_logits_of_one_prefill(int8_cache):
    s = session(int8_cache=int8_cache)
    ids = tokens(24)
    wanted = all_logits(s, ids)
    cache = s.allocate(1, CAPACITY)
    assert {buffer.dtype for buffer in cache.buffers.values()} == {np.dtype("int8" if int8_cache else "float32")}
    got = [s.step(StepInputs(ids[:, :5], lengths(0), np.arange(5)), cache)[0]]
    got += [s.step(StepInputs(ids[:, i : i + 1], lengths(i)), cache)[0] for i in range(5, 24)]
    np.testing.assert_allclose(np.concatenate(got), wanted, atol=2e-5)
    forgetful = np.concatenate([all_logits(s, ids[:, i : i + 1]) for i in range(24)])
    assert np.abs(forgetful - wanted).max() > 1  # the cache decides


def test_a_prompt_in_chunks_gives_the_logits_of_one_prefill():
    s = session()
    ids = tokens(40)
    cache = s.allocate(1, CAPACITY)
    got = [
        s.step(StepInputs(ids[:, i : i + 13], lengths(i), np.arange(len(ids[0, i : i + 13]))), cache)[0]
        for i in (0, 13, 26, 39)
    ]
    np.testing.assert_allclose(np.concatenate(got), all_logits(s, ids), atol=1e-5)


def test_a_ragged_batch_decodes_like_its_rows_alone():
    s = session()
    prompts = [tokens(n, seed=n) for n in (3, 11, 7)]
    cache = s.allocate(4, CAPACITY)
    for b, prompt in enumerate(prompts):
        s.step(StepInputs(prompt, lengths(0)), cache.rows(b, b + 1))
    live = cache.rows(0, 3)
    for step in range(4):
        new = np.array([[5 + step], [6 + step], [7 + step]])
        got = s.step(StepInputs(new, lengths(3 + step, 11 + step, 7 + step)), live)
        prompts = [np.concatenate([prompt, new[b : b + 1]], 1) for b, prompt in enumerate(prompts)]
        for b, prompt in enumerate(prompts):
            np.testing.assert_allclose(got[b, 0], all_logits(s, prompt)[-1], atol=1e-5)


def test_a_right_padded_prefill_and_a_batched_continuation_agree_with_single_rows():
    s = session()
    long, short = tokens(20, seed=2), tokens(20, seed=3)
    batch = np.concatenate([long, short])
    cache = s.allocate(2, CAPACITY)
    first = s.step(StepInputs(batch[:, :12], lengths(0, 0), np.arange(12)), cache)
    np.testing.assert_allclose(first[1, :8], all_logits(s, short[:, :8]), atol=1e-5)
    # The second row holds 8 valid tokens and 4 of padding, which its continuation overwrites.
    continued = np.concatenate([long[:, 12:17], short[:, 8:13]])
    got = s.step(StepInputs(continued, lengths(12, 8), np.arange(5)), cache)
    np.testing.assert_allclose(got[0], all_logits(s, long[:, :17])[12:], atol=1e-5)
    np.testing.assert_allclose(got[1], all_logits(s, short[:, :13])[8:], atol=1e-5)


def test_steps_write_into_the_allocated_buffers_and_nowhere_else():
    s = session()
    cache = s.allocate(3, CAPACITY)
    s.step(StepInputs(tokens(6), lengths(0)), cache.rows(1, 2))
    for name in ("past_key_values.0.key", "past_key_values.1.value"):
        buffer = cache.buffers[name]
        assert np.abs(buffer[1, :, :6]).min(axis=-1).max() > 0
        assert not buffer[1, :, 6:].any()
        assert not buffer[0].any()
        assert not buffer[2].any()
    assert cache.size_bytes == 4 * 3 * 2 * CAPACITY * 16 * 4


def test_views_are_one_object_and_share_memory():
    cache = session().allocate(3, 8)
    assert cache.rows(0, 3) is cache
    assert cache.rows(0, 2) is cache.rows(0, 2)
    assert np.shares_memory(cache.rows(2, 3).buffers["past_key_values.0.key"], cache.buffers["past_key_values.0.key"])
    with pytest.raises(ValueError, match="rows 2:4 of a cache of 3 rows"):
        cache.rows(2, 4)


def test_allocation_takes_no_memory_until_tokens_arrive():
    s = session()
    before = psutil.Process().memory_info().rss
    cache = s.allocate(64, 1 << 16)
    s.step(StepInputs(tokens(4), lengths(0)), cache.rows(5, 6))
    assert cache.size_bytes == 2 << 30
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_a_cache_that_nobody_holds_is_freed():
    s = session()
    cache = s.allocate(2, 8)
    s.step(StepInputs(tokens(4), lengths(0)), cache.rows(0, 1))
    buffer = weakref.ref(cache.buffers["past_key_values.0.key"])
    del cache
    gc.collect()
    assert buffer() is None


def test_rows_select_logits_and_default_to_the_last():
    s = session()
    ids = tokens(9)
    wanted = all_logits(s, ids)
    cache = s.allocate(1, CAPACITY)
    np.testing.assert_allclose(
        s.step(StepInputs(ids, lengths(0), np.array([4, -1, 0])), cache)[0], wanted[[4, 8, 0]], atol=1e-5
    )
    # The default comes back after a step that overrode it.
    np.testing.assert_allclose(s.step(StepInputs(ids, lengths(0)), cache)[0, 0], wanted[8], atol=1e-5)


def test_out_receives_the_logits_and_a_fresh_array_survives_the_next_step():
    s = session()
    cache = s.allocate(1, CAPACITY)
    out = np.empty((1, 1, s.vocabulary), np.float32)
    first = s.step(StepInputs(tokens(4), lengths(0)), cache)
    kept = first.copy()
    assert s.step(StepInputs(np.array([[7]]), lengths(4)), cache, out=out) is out
    again = s.step(StepInputs(np.array([[7]]), lengths(4)), cache)
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(first, kept)
    assert np.abs(first - out).max() > 0.1
    with pytest.raises(ValueError, match=r"out is float32 \(1, 2, 97\)"):
        s.step(StepInputs(np.array([[7]]), lengths(4)), cache, out=np.empty((1, 2, 97), np.float32))


def test_a_step_beyond_the_capacity_is_refused_before_it_runs():
    s = session()
    cache = s.allocate(2, 8)
    with pytest.raises(UsageError, match=r"3 tokens after \[0, 6\] does not fit into a cache of 8 tokens"):
        s.step(StepInputs(np.zeros((2, 3), np.int64), lengths(0, 6)), cache)
    assert not any(buffer.any() for buffer in cache.buffers.values())
    with pytest.raises(UsageError, match="does not fit"):
        s.step(StepInputs(np.zeros((2, 1), np.int64), lengths(0, -1)), cache)
    with pytest.raises(ValueError, match="cache of 2 rows"):
        s.step(StepInputs(np.zeros((1, 1), np.int64), lengths(0)), cache)


def test_initializers_come_from_memory_without_a_file(tmp_path):
    model = decoder()
    values = {}
    for name, initializer in model.graph.initializers.items():
        if initializer.const_value.nbytes < 1024:
            continue
        tensor = initializer.const_value
        values[name] = tensor.numpy() * (2 if name == "head" else 1)
        initializer.const_value = ir.ExternalTensor(
            "absent", 0, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=name, base_dir=tmp_path
        )
    doubled = Session(serialized(model), ONE_THREAD, initializers=values)
    np.testing.assert_allclose(all_logits(doubled, tokens(5)), 2 * all_logits(session(), tokens(5)), atol=1e-4)


def test_options_reach_the_session():
    optimized = session()
    plain = Session(
        serialized(decoder()), SessionConfig(1, optimize=False, entries={"session.set_denormal_as_zero": "1"})
    )
    options = plain._session.get_session_options()
    assert options.intra_op_num_threads == 1
    assert options.get_session_config_entry("session.set_denormal_as_zero") == "1"
    assert options.graph_optimization_level != optimized._session.get_session_options().graph_optimization_level
    np.testing.assert_allclose(all_logits(plain, tokens(5)), all_logits(optimized, tokens(5)), atol=1e-5)


def test_what_is_no_decoder_is_refused(tmp_path):
    with pytest.raises(InputError, match="a file is missing"):
        Session(tmp_path / "absent.onnx", ONE_THREAD)
    with pytest.raises(UnsupportedError, match="refuses the graph"):
        Session(b"\x08garbage", ONE_THREAD)
    model = decoder()
    model.graph.outputs[0].name = "scores"
    with pytest.raises(InputError, match="not a decoder graph: it needs the input input_ids and the output logits"):
        Session(serialized(model), ONE_THREAD)
    model = decoder()
    next(v for v in model.graph.inputs if v.name == "seqlens_k").name = "token_type_ids"
    with pytest.raises(InputError, match="unknown inputs: token_type_ids"):
        Session(serialized(model), ONE_THREAD)
    model = decoder()
    next(v for v in model.graph.outputs if v.name == "present.1.key").name = "elsewhere"
    with pytest.raises(InputError, match=r"cache input past_key_values\.1\.key .* no output present\.1\.key"):
        Session(serialized(model), ONE_THREAD)


def test_a_step_that_fails_and_a_bug_of_ours_are_told_apart(monkeypatch):
    s = session()
    cache = s.allocate(1, CAPACITY)
    beyond = np.array([[1_000_000]])
    fed = r"ids 1000000 to 1000000, \[1, 1\]: "
    with pytest.raises(RunFailed, match=rf"ONNX Runtime .* failed to run the graph: {fed}.*idx=1000000 must be within"):
        s.step(StepInputs(beyond, lengths(0)), cache)
    with pytest.raises(RunFailed, match=rf"failed to run the graph: {fed}"):
        s.read(["logits"], StepInputs(beyond, lengths(0), np.arange(1)), cache)
    s.step(StepInputs(tokens(3), lengths(0)), cache)

    def buggy(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(StepInputs, "feeds", buggy)
    with pytest.raises(RuntimeError, match="a bug"):
        s.step(StepInputs(tokens(1), lengths(3)), cache)


@pytest.mark.parametrize(("own", "steady_from"), [(0, 2), (1, 9), (2, 9)], ids=["none", "mixed", "all"])
def test_one_attention_of_our_own_decides_how_many_tokens_are_steady(own, steady_from, tmp_path):
    """Also beside ONNX Runtime's, whose inputs the graph then has."""
    target = targets.local()
    model = graphs.llama()
    FlashAttention().run(model, graphs.CPU)
    for attention in contrib.GroupQueryAttention.all(model)[:own]:
        cpu_attention.lower(attention)
        model.graph.remove(attention.node, safe=True)
    graph.drop_unused(model)
    lowered, _ = onnxruntime.lower(model, target)
    spec = EngineSpec(max_context=64, max_batch=1, threads=1)
    onnxruntime.build(BuildRequest(lowered, tmp_path, spec, target, (5,), 0))
    opened = loading.open_engine(tmp_path, RuntimeConfig.read(tmp_path / "runtime.json"))
    assert ("total_sequence_length" in opened.signature.inputs) == (own < 2)
    assert opened.signature.steady_from == steady_from


def test_codes_in_fp8_are_fed_as_they_are() -> None:
    """numpy has no fp8, and ONNX Runtime takes no arrays of another package's."""
    cast = helper.make_node("Cast", ["codes"], ["numbers"], to=TensorProto.FLOAT)
    codes = helper.make_tensor_value_info("codes", TensorProto.FLOAT8E4M3FN, ["n"])
    numbers = helper.make_tensor_value_info("numbers", TensorProto.FLOAT, ["n"])
    made, opset = helper.make_graph([cast], "cast", [codes], [numbers]), helper.make_opsetid("", 21)
    model = helper.make_model(made, opset_imports=[opset], ir_version=10).SerializeToString()
    opened = open_graph(model, session_options(ONE_THREAD), [PROVIDER], "the test's graph")
    given = np.array([0.5, -3.5, 448, 0], ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(run(opened, None, {"codes": given})[0], given.astype(np.float32))
