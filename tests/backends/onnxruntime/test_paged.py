"""GroupQueryAttention over rows becomes PagedAttention over blocks: what it computes, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from llmforge import targets
from llmforge.backends import engines
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime.cuda import builder as cuda
from llmforge.backends.onnxruntime.cuda import graphs as cuda_graphs
from llmforge.backends.onnxruntime.cuda import operators as cuda_operators
from llmforge.backends.onnxruntime.cuda import paged as cuda_paged
from llmforge.backends.onnxruntime.cuda.paged import PagedSession, Piece
from llmforge.backends.onnxruntime.session import Session
from llmforge.base.errors import InputError, RunFailed, UnsupportedError
from llmforge.compile.stages import engine as engine_stage
from llmforge.ir import dialect, graph, interface, paged
from llmforge.ir.operators import contrib
from llmforge.passes import QuantizeKvCache
from llmforge.recipe import EngineSpec, Recipe
from llmforge.rewrite import paged_attention
from llmforge.rewrite.pass_base import Pass
from llmforge.runtime.config import Capture, GraphPlan, RuntimeConfig, SessionConfig
from llmforge.runtime.interface import StepInputs

from ...fakes.host_device import HostDevice
from ...fakes.recorder import Recorder
from ...models import attention_kernels as cuda_attention
from ...models import graphs
from ...models.decoder_graph import decoder
from .test_cuda import BUDGET, FAST, FORM, H100, prepared

BLOCK = 16
SPEC = EngineSpec(max_context=64, max_batch=4, kv_cache="paged")


def session_of(model: ir.Model, **options: object) -> PagedSession:
    """Open the reference of a graph over blocks on the CPU, over 12 blocks."""
    serialized = ir.to_proto(paged.expand(model)).SerializeToString()
    return PagedSession(serialized, SessionConfig(1, optimize=False), HostDevice(), blocks=12, **options)


def largest_difference(rows: ir.Model, blocks: ir.Model, vocabulary: int) -> float:
    """Run two texts in ragged steps over rows, each alone, and over blocks together: prompts, both ways, and decoding.

    The blocks lie in no order and hold large numbers first, which must not matter.
    """
    one = Session(ir.to_proto(rows).SerializeToString(), SessionConfig(1, optimize=False))
    cache = one.allocate(2, 64)
    many = session_of(blocks)
    pool = many.allocate(2, 64)
    for name, tensor in pool.store.memory.tensors.items():
        dtype = np.dtype(many.signature.cache_types[name]).type
        many.device.write(tensor.buffer, 0, np.full(tensor.buffer.size // dtype().itemsize, 99, dtype))
    random = np.random.default_rng(0)
    texts = [random.integers(0, vocabulary, size).tolist() for size in (25, 45)]
    tables, past, worst = [pool.pool.open(()) for _ in texts], [0, 0], 0.0
    for counts in ((7, 30), (1, 0), (12, 1), (1, 1), (0, 6), (1, 1)):
        pieces = []
        for text, table, begin, count in zip(texts, tables, past, counts, strict=True):
            if count:
                assert pool.pool.grow(table, begin, begin + count) == []
                pieces.append(Piece(text[begin : begin + count], begin, table, wanted=True))
        out = np.empty((len(pieces), vocabulary), np.float32)
        many.run(pieces, pool, out)
        places = [row for row, count in enumerate(counts) if count]
        for row, got in zip(places, out, strict=True):
            ids = np.array([texts[row][past[row] : past[row] + counts[row]]])
            wanted = one.step(StepInputs(ids, np.array([past[row]], np.int32)), cache.rows(row, row + 1))[0, 0]
            worst = max(worst, float(np.abs(got - wanted).max()))
            past[row] += counts[row]
    return worst


NORMED = dataclasses.replace(FORM, query_norm=True)
FORMS: dict[str, Callable[[], ir.Model]] = {
    "rotary inside, packed": decoder,
    "bias": lambda: prepared(dtype=None),
    "window, soft cap": lambda: prepared(dtype=None, form=dataclasses.replace(FORM, window=9, softcap=5.0)),
    "sinks": lambda: prepared(dtype=None, form=dataclasses.replace(FORM, sinks=True)),
    "one KV head": lambda: prepared(dtype=None, form=dataclasses.replace(FORM, kv_heads=1)),
    "norms": lambda: prepared(dtype=None, form=NORMED),
    "int8 by channel": lambda: prepared(QuantizeKvCache(BUDGET), dtype=None),
    "int8 by tensor, norms": lambda: prepared(
        QuantizeKvCache(BUDGET, granularity="per_tensor"), dtype=None, form=NORMED
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_over_blocks_a_graph_computes_what_it_does_over_rows(name: str) -> None:
    rows = dialect.expand(FORMS[name]())
    blocks = rows.clone()
    assert paged_attention.reason_against(blocks) is None
    inside, _ = cuda_operators.take_norms(blocks, blocks=True)
    assert len(inside) == 2 * ("norms" in name)
    rewritten = paged_attention.lower(blocks, BLOCK)
    assert [each.what for each in rewritten] == [f"PagedAttention over blocks of {BLOCK} tokens"] * 2
    assert not contrib.GroupQueryAttention.all(blocks)
    assert {layer.q_norm_weight is not None for layer in contrib.PagedAttention.all(blocks)} == {"norms" in name}
    assert {layer.k_scale is not None for layer in contrib.PagedAttention.all(blocks)} == {"int8" in name}
    assert largest_difference(rows, blocks, graph.width(graph.output_named(rows, interface.LOGITS))) < 2e-5


@pytest.mark.parametrize(
    ("more", "tolerance"),
    [((), 2e-2), ((QuantizeKvCache(BUDGET),), 0.1)],  # a number of a cache may round to its neighbour
    ids=["16 bits", "int8"],
)
def test_what_is_lowered_in_fp16_computes_what_the_graph_did(more: tuple[Pass, ...], tolerance: float) -> None:
    lowered, changes = cuda.lower(prepared(*more, form=NORMED), H100, SPEC)
    done = {each.what for each in changes.rewritten}
    assert {
        "PagedAttention over blocks of 256 tokens",
        "norms inside attention of queries and keys, which are packed",
    } <= done
    assert largest_difference(dialect.expand(prepared(*more, dtype=None, form=NORMED)), lowered, 128) < tolerance


@pytest.mark.parametrize(
    ("head_dim", "tokens", "int8_cache"),
    [*((d, n, False) for d, n in [(16, 256), (64, 256), (96, 128), (128, 128), (256, 64)]), (256, 128, True)],
)
def test_blocks_are_of_a_size_that_attention_reads_in_place(head_dim: int, tokens: int, int8_cache: bool) -> None:
    model = decoder(int8_cache=int8_cache)
    for layer in contrib.GroupQueryAttention.all(model):
        layer.past_key.shape = ir.Shape(["batch", 2, "capacity", head_dim])
    assert cuda.block_size(model) == tokens


def test_graphs_that_cannot_read_blocks_are_refused_with_the_reason() -> None:
    packed = prepared()
    for layer in contrib.GroupQueryAttention.all(packed):
        layer.past_key.type = ir.TensorType(ir.DataType.UINT8)
    for model, reason in (
        (packed, "l0_attention: blocks of int4 are not written"),
        (graphs.llama(FORM), "it has no GroupQueryAttention"),
    ):
        with pytest.raises(UnsupportedError, match=reason) as caught:
            cuda.lower(model, H100, SPEC)
        assert caught.value.message.startswith("engine.kv_cache is paged, and the graph cannot read blocks: ")
        assert "kv_cache: slots" in (caught.value.hint or "")
    model = decoder()
    model.graph.inputs.append(ir.val(interface.ADAPTER_IDS, ir.DataType.INT64, ["batch"]))
    assert paged_attention.reason_against(model) == "it takes adapter_ids, which is given by row"
    model = decoder()
    [first, _] = contrib.GroupQueryAttention.all(model)
    graph.insert(first.node, "Identity", [graph.input_named(model, interface.SEQLENS_K)], name="peek")
    assert paged_attention.reason_against(model) == "Identity peek reads seqlens_k"
    model = decoder()
    model.graph.inputs.pop()
    assert paged_attention.reason_against(model) == "it gives every token logits, and takes no logits_rows"
    model = decoder()
    [first, _] = contrib.GroupQueryAttention.all(model)
    graph.insert(first.node, "Identity", [first.past_key], name="peek")
    assert paged_attention.reason_against(model) == f"{first.past_key.name} is not the cache of one GroupQueryAttention"


def _half_the_angles(layer: contrib.GroupQueryAttention) -> None:
    assert layer.cos_cache is not None
    layer.cos_cache = ir.val("cos_of_half", ir.DataType.FLOAT, [256, 4])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda layer: setattr(layer, "attention_bias", layer.past_key), "takes neither biases nor positions"),
        (lambda layer: setattr(layer, "position_ids", layer.past_key), "takes neither biases nor positions"),
        (lambda layer: setattr(layer, "smooth_softmax", 1), "no smooth softmax without sinks"),
        (lambda layer: setattr(layer, "causal", 0), "no attention both ways"),
        (lambda layer: setattr(layer, "sliding_window_cache", 1), "no rolling cache"),
        (_half_the_angles, "only 8 of 16 channels of a head are rotated"),
    ],
)
def test_an_attention_that_blocks_have_no_kernel_for_says_why(
    spoil: Callable[[contrib.GroupQueryAttention], None], reason: str
) -> None:
    model = decoder()
    layer = contrib.GroupQueryAttention.all(model)[1]
    assert paged_attention._layer_reason(layer) is None
    spoil(layer)
    assert reason in (paged_attention._layer_reason(layer) or "")


CHOSEN = SPEC.model_copy(update={"kv_cache": None})


def test_where_no_recipe_says_so_a_graph_reads_blocks_if_it_can_and_else_slots_with_the_reason() -> None:
    lowered, changes = cuda.lower(prepared(), H100, CHOSEN)
    assert (len(contrib.PagedAttention.all(lowered)), changes.notes) == (2, [])
    assert [attention.paged for _, attention in cuda_attention.of(lowered)] == [True] * 2
    assert cuda.configure(BuildRequest(lowered, Path(), CHOSEN, H100, (3,), None)).kv_blocks == 4
    t4 = targets.load("t4")
    wide = dataclasses.replace(FORM, head_dim=512)
    for model, target, reason in (
        (prepared(QuantizeKvCache(BUDGET)), H100, "over int8 blocks each step with prompts copies all its texts"),
        (prepared(), t4, "FlashAttention, which reads blocks in place, needs SM 8.0"),
        (prepared(form=wide), H100, "heads have 512 channels, and FlashAttention, which reads blocks in place, up to"),
    ):
        lowered, changes = cuda.lower(model, target, CHOSEN)
        assert len(contrib.GroupQueryAttention.all(lowered)) == 2
        [note] = changes.notes
        assert note.startswith(f"KV cache in slots, not in blocks: {reason}")
        assert cuda.configure(BuildRequest(lowered, Path(), CHOSEN, target, (3,), None)).kv_blocks is None
    for model, target in ((prepared(), t4), (prepared(QuantizeKvCache(BUDGET)), H100)):
        assert contrib.PagedAttention.all(cuda.lower(model, target, SPEC)[0])  # which may be asked for
    lowered, changes = cuda.lower(prepared(), H100, CHOSEN.model_copy(update={"kv_cache": "slots"}))
    assert (len(contrib.GroupQueryAttention.all(lowered)), changes.notes) == (2, [])


def test_products_are_tuned_for_steps_of_any_length() -> None:
    lowered, _ = cuda.lower(prepared(FAST), H100, SPEC)
    entries = cuda.session_options(lowered, (1, 3)).entries
    assert entries[cuda.FAST_ROWS_ENTRY] == "1,2,3,4,8,16,32,64,128,256,512,1024"


def test_a_recipe_that_drafts_has_slots(tmp_path: Path) -> None:
    def recipe(**engine: object) -> Recipe:
        said = {
            "schema": 1, "name": "drafts", "checkpoint": str(tmp_path), "target": "h100-sxm", "passes": [],
            "engine": {"max_context": 64, **engine}, "serving": {"speculation": "prompt-lookup"},
        }  # fmt: skip
        return Recipe.model_validate_json(json.dumps(said), context=tmp_path)

    spec, notes = engine_stage.placed(recipe(), H100)
    assert spec.kv_cache == "slots"
    why = "serving.speculation is prompt-lookup, and no device has verified drafts over blocks"
    assert notes == [f"lowering: KV cache in slots, not in blocks: {why}"]
    assert engine_stage.placed(recipe(), targets.load("cpu-avx2"))[1] == []
    assert engine_stage.placed(recipe(kv_cache="slots"), H100)[1] == []
    assert engine_stage.placed(recipe(kv_cache="paged"), H100)[0].kv_cache == "paged"


def test_ranks_of_one_model_have_no_blocks() -> None:
    spec = SPEC.model_copy(update={"tensor_parallel": 2})
    with pytest.raises(UnsupportedError, match="ranks of one model have slots alone"):
        engines.refuse_paged(spec, H100)


@pytest.mark.parametrize(("backend", "target"), [("onnxruntime", "cpu-avx2"), ("tensorrt", "h200")])
def test_engines_without_attention_over_blocks_refuse_them(backend: str, target: str) -> None:
    spec = EngineSpec(max_context=64, backend=backend, kv_cache="paged")
    with pytest.raises(UnsupportedError, match=f"{backend} on {target} does not support it"):
        engines.refuse_paged(spec, targets.load(target))
    engines.refuse_paged(spec.model_copy(update={"kv_cache": "slots"}), targets.load(target))


def test_what_is_written_says_how_many_blocks_fit(tmp_path: Path) -> None:
    lowered, _ = cuda.lower(prepared(), H100, SPEC)
    config, _ = cuda.write(BuildRequest(lowered, tmp_path, SPEC, H100, (3,), None))
    assert RuntimeConfig.read(tmp_path / "runtime.json") == config
    assert config.kv_blocks == 4  # one of 256 tokens for each text of 64
    assert [(cache.kv_heads, cache.head_dim) for cache in config.caches] == [(2, 16)] * 4
    block = 2 * 2 * 256 * 2 * 16 * 2  # layers, keys and values, tokens, heads, channels, bytes
    assert cuda_graphs.block_bytes(lowered) == block
    plan = cuda_graphs.plan(lowered, SPEC)
    assert cuda_graphs.memory(lowered, SPEC, plan, 4).caches == 5 * block
    # Where slots have no room, a pool takes what is left, and one text is the least that it must hold.
    large = EngineSpec(max_context=64 * 256, max_batch=4096, kv_cache="paged", cuda_graphs="off")
    empty, beside = GraphPlan("off", ()), cuda_graphs.memory(lowered, large, GraphPlan("off", ())).total
    room = (beside + 1000.5 * block) / cuda_graphs.POOL_PART
    assert cuda_graphs.pool_blocks(lowered, large, empty, room) == 1000
    assert cuda_graphs.pool_blocks(lowered, large, empty, 0) == 64
    config_text = (tmp_path / "runtime.json").read_text()
    (tmp_path / "runtime.json").write_text(config_text.replace('"kv_blocks": 4', '"kv_blocks": 0'))
    with pytest.raises(InputError, match="kv_blocks is 0; expected 1 to"):
        RuntimeConfig.read(tmp_path / "runtime.json")


def test_a_pool_fills_the_memory_of_the_target() -> None:
    lowered, _ = cuda.lower(prepared(), H100, SPEC)
    large, off = EngineSpec(max_context=1 << 20, max_batch=4096, kv_cache="paged"), GraphPlan("off", ())
    blocks = cuda._pool_blocks(lowered, H100, large, off)
    assert blocks == cuda_graphs.pool_blocks(lowered, large, off, 80e9)
    assert blocks > 2 * cuda_graphs.pool_blocks(lowered, large, off, 20e9)


def test_the_first_row_of_a_step_gets_logits_where_it_is_asked_for() -> None:
    """Of several texts: row 0 of one is not the one behind its last."""
    rows, blocks = decoder(), decoder()
    paged_attention.lower(blocks, BLOCK)
    ids, past = np.random.default_rng(0).integers(0, 97, (2, 5)), np.zeros(2, np.int32)
    asked = StepInputs(ids, past, np.array([0, 4, -2]))
    one, many = Session(ir.to_proto(rows).SerializeToString(), SessionConfig(1, optimize=False)), session_of(blocks)
    wanted = np.concatenate([
        one.step(StepInputs(ids[row : row + 1], past[:1], np.array([0, 4, 3])), one.allocate(1, 64)) for row in (0, 1)
    ])  # fmt: skip
    np.testing.assert_allclose(many.step(asked, many.allocate(2, 64)), wanted, atol=2e-5)


def test_a_pool_is_no_larger_than_what_the_device_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    paged_attention.lower(model, BLOCK)
    session = session_of(model)
    assert session.block_bytes == 2 * 2 * BLOCK * 2 * 16 * 4
    assert (session.allocate(4, 96).pool.blocks, session.notes) == (12, ())
    assert session.allocate(1, 96).pool.blocks == 6
    assert session.allocate(1, 96 * 4).pool.blocks == 24  # one text is the least
    free = 10 * session.block_bytes / 0.9
    monkeypatch.setattr(HostDevice, "memory", lambda self: (int(free) + 1, 1 << 30))
    assert session.allocate(4, 96).pool.blocks == 9  # and the one of padding
    assert session.notes == ("a KV cache of 9 blocks instead of 12: 0.0 GB of the device were free",)


def test_room_is_left_for_what_a_step_with_a_prompt_gathers_of_int8_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered, _ = cuda.lower(prepared(QuantizeKvCache(BUDGET)), H100, SPEC)
    channels = FORM.kv_heads * FORM.head_dim
    gathered = 2 * 2 * SPEC.max_context * channels  # keys and values of one layer and one text in 16 bits
    plain, _ = cuda.lower(prepared(), H100, SPEC)
    off = GraphPlan("off", ())
    wanted, without = (cuda_graphs.memory(model, SPEC, off).activations for model in (lowered, plain))
    assert wanted - without == gathered
    model = decoder(int8_cache=True)
    paged_attention.lower(model, BLOCK)
    session = session_of(model)
    free = (10 * session.block_bytes + 2 * 2 * 96 * 2 * 16) / 0.9
    monkeypatch.setattr(HostDevice, "memory", lambda self: (int(free) + 1, 1 << 30))
    assert session.allocate(4, 96).pool.blocks == 9


def test_over_int8_blocks_prompts_of_several_rows_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(int8_cache=True)
    paged_attention.lower(model, BLOCK)
    session, ran = session_of(model), []
    prepare = session._prepare
    monkeypatch.setattr(session, "_prepare", lambda pieces, *rest: ran.append(len(pieces)) or prepare(pieces, *rest))
    step = StepInputs(np.arange(12).reshape(2, 6), np.zeros(2, np.int32), np.array([-1, 2]))
    got = session.step(step, session.allocate(2, 96))
    assert ran == [1, 1]
    for row in (0, 1):
        alone = StepInputs(step.ids[row : row + 1], step.past_lengths[:1], step.rows)
        np.testing.assert_array_equal(got[row : row + 1], session.step(alone, session.allocate(1, 96)))


def test_attention_is_told_how_long_the_longest_text_is_at_least() -> None:
    model = decoder()
    paged_attention.lower(model, BLOCK)
    [layer, _] = contrib.PagedAttention.all(model)
    assert layer.attention_metadata is not None
    assert graph.static(layer.attention_metadata) == (3,)
    captures = tuple(Capture(i + 1, 2, length) for i, length in enumerate([96, 32]))
    session = session_of(model, buckets=(2,), graphs=GraphPlan("allow", captures))
    assert [session._at_least(longest) for longest in (32, 96, 40)] == [1, 33, 33]
    assert session_of(model)._at_least(64) == 33  # bounds of steps that are not captured are powers of two


def test_steps_that_are_not_captured_have_few_bounds() -> None:
    """From SM 90 on cuDNN keeps a plan for each bound of a step that only decodes."""
    model = decoder()
    paged_attention.lower(model, BLOCK)
    session = session_of(model, buckets=(2,))
    cache, out = session.allocate(2, 96), np.empty((1, 97), np.float32)
    table = cache.pool.open(())
    cache.pool.grow(table, 0, 96)
    given, bounds = session._feeds, []

    def watched(*args: object) -> object:
        bounds.append(args[4])
        return given(*args)

    session._feeds = watched
    for past in range(90):
        session.run([Piece([1], past, table, True)], cache, out)
    assert set(bounds) == {1, 2, 4, 8, 16, 32, 64, 128}


def test_on_a_device_prompts_of_each_power_of_two_run_once_before_any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    paged_attention.lower(model, BLOCK)
    session = session_of(model, buckets=(1, 2))
    ran = []
    prepare = session._prepare
    monkeypatch.setattr(
        session, "_prepare", lambda pieces, cache: ran.append(len(pieces[0].tokens)) or prepare(pieces, cache)
    )
    session.allocate(2, 96)
    assert ran == []  # the host times nothing
    monkeypatch.setattr(HostDevice, "memory", lambda self: (1 << 30, 1 << 30))
    cache = session.allocate(2, 96)
    assert ran == [64, 32, 16, 8, 4, 2, 1, 1, 1]  # and decode steps of each bucket, which cuDNN may refuse
    assert cache.pool.available == cache.pool.blocks


class Gpu(HostDevice):
    """The host's memory, under the capability of a GPU."""

    sm = 90

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[tuple[str | None, int]]]:
    """Let decode steps of sessions that may use cuDNN fail in an operator; give what was opened.

    For each session: which attention it was told to use, and how many others there were still.
    """

    def fail(operator: str) -> list[tuple[str | None, int]]:
        opened: list[tuple[str | None, int]] = []
        sessions: list[weakref.ref[Any]] = []
        open_on, run_bound = cuda_paged.open_on, cuda_paged.run_bound

        def watched(device: Any, model: Any, config: Any, options: Any, *rest: Any, **named: Any) -> Any:
            session = open_on(device, model, config, options, *rest, **named)
            opened.append((options.get("sdpa_kernel"), sum(each() is not None for each in sessions)))
            sessions.append(weakref.ref(session))
            return session

        def run(session: Any, binding: Any, options: Any) -> None:
            if opened[-1][0] is None and session.runs == 7:  # behind the prompts
                raise RunFailed(f"status code returned while running {operator} node. Name:'x' Status Message: no plan")
            session.runs += 1
            run_bound(session, binding, options)

        monkeypatch.setattr(onnxruntime.InferenceSession, "runs", 0, raising=False)
        monkeypatch.setattr(cuda_paged, "open_on", watched)
        monkeypatch.setattr(cuda_paged, "run_bound", run)
        return opened

    return fail


def test_over_blocks_too_attention_that_fails_runs_without_cudnn(
    failing: Callable[[str], list[tuple[str | None, int]]],
) -> None:
    opened, model = failing("PagedAttention"), decoder()
    paged_attention.lower(model, BLOCK)
    plain = session_of(model, provider_options={"sdpa_kernel": "1"})
    opened.clear()
    serialized = ir.to_proto(paged.expand(model)).SerializeToString()
    session = PagedSession(serialized, SessionConfig(1, optimize=False), Gpu(), blocks=12, buckets=(1, 2))
    cache, other = session.allocate(2, 96), plain.allocate(2, 96)
    assert opened == [(None, 1), ("1", 1)]  # the plain one is there; of two sessions the first ends first
    [note] = [note for note in session.notes if "without cuDNN" in note]
    assert "no plan" in note
    step = StepInputs(np.array([[3, 4, 5]]), np.zeros(1, np.int32))
    wanted, got = plain.step(step, other.rows(0, 1)), session.step(step, cache.rows(0, 1))
    np.testing.assert_array_equal(got, wanted)


def test_a_product_that_fails_is_not_attentions_fault(failing: Callable[[str], list[tuple[str | None, int]]]) -> None:
    opened, model = failing("MatMulNBits"), decoder()
    paged_attention.lower(model, BLOCK)
    serialized = ir.to_proto(paged.expand(model)).SerializeToString()
    session = PagedSession(serialized, SessionConfig(1, optimize=False), Gpu(), blocks=12, buckets=(1, 2))
    with pytest.raises(RunFailed, match="while running MatMulNBits node"):
        session.allocate(2, 96)
    assert [options for options, _ in opened] == [None]


def test_tokens_of_a_row_are_copied_to_places_of_another_whatever_blocks_they_lie_in() -> None:
    """From the middle of a block to the middle of one; a text of which a part was copied goes on like the other."""
    model = decoder()
    paged_attention.lower(model, BLOCK)
    session = session_of(model)
    cache = session.allocate(2, 64)
    with pytest.raises(ValueError, match="row 0 does not hold tokens 0 … 1"):
        cache.copy(1, 0, cache, 0, 0, 1)
    ids = np.random.default_rng(0).integers(0, 97, (1, 41))
    for begin, end in ((0, 7), (7, 8), (8, 40)):  # the first step is the other row's, too: bits depend on its length
        session.step(StepInputs(ids[:, begin:end], np.full(1, begin, np.int32)), cache.rows(0, 1))
    with pytest.raises(ValueError, match="row 0 does not hold tokens 20 … 49"):
        cache.copy(1, 0, cache, 0, 20, 29)
    session.step(StepInputs(ids[:, :7], np.zeros(1, np.int32)), cache.rows(1, 2))
    cache.copy(1, 7, cache, 0, 7, 20)
    cache.copy(1, 27, cache, 0, 27, 13)
    last = [StepInputs(ids[:, 40:], np.full(1, 40, np.int32))] * 2
    one, other = (session.step(each, cache.rows(row, row + 1)) for row, each in enumerate(last))
    np.testing.assert_array_equal(one, other)
    assert cache.size_bytes == cache.pool.blocks * session.block_bytes + session.block_bytes


@pytest.mark.parametrize(("batch", "capacity"), [(0, 8), (1, 0)])
def test_a_pool_for_nothing_is_refused(batch: int, capacity: int) -> None:
    model = decoder()
    paged_attention.lower(model, BLOCK)
    with pytest.raises(ValueError, match=f"a cache of {batch} rows of {capacity} tokens"):
        session_of(model).allocate(batch, capacity)


def test_a_graph_over_rows_is_no_engine_over_blocks() -> None:
    with pytest.raises(InputError, match="its caches are no blocks of a pool"):
        PagedSession(ir.to_proto(decoder()).SerializeToString(), SessionConfig(1), HostDevice(), blocks=4)


def test_decode_steps_are_captured_and_replayed_with_rows_of_padding() -> None:
    model = decoder()
    paged_attention.lower(model, BLOCK)
    plain = session_of(model)
    captures = tuple(Capture(i + 1, b, n) for i, (b, n) in enumerate([(4, 96), (4, 32), (2, 96), (2, 32)]))
    session = session_of(model, buckets=(2, 4), graphs=GraphPlan("require", captures))
    session._session = recorder = Recorder(session._session)
    recorder.session = session
    pools = [each.allocate(4, 96) for each in (plain, session)]
    assert [result.reason for result in session.capture_results] == [None] * 4
    recorder.replays.clear()
    out = [np.empty((3, 97), np.float32) for _ in pools]
    tables = [[pool.pool.open(()) for _ in range(3)] for pool in pools]
    for place in range(40):
        for each, pool, own, logits in zip((plain, session), pools, tables, out, strict=True):
            rows = 1 if place < 10 else 3
            for table in own[:rows]:
                pool.pool.grow(
                    table, place if table is own[0] else place - 10, place + 1 if table is own[0] else place - 9
                )
            pieces = [Piece([place + r], place if r == 0 else place - 10, own[r], wanted=True) for r in range(rows)]
            each.run(pieces, pool, logits[:rows])
        np.testing.assert_allclose(out[0][:rows], out[1][:rows], atol=1e-5)
    assert {captures[number - 1].length for number in recorder.replays} == {32, 96}
    assert {captures[number - 1].batch for number in recorder.replays} == {2, 4}
