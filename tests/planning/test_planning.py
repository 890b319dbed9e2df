"""Plans: schemes, bytes, the roofline's properties, what fits, what pays, what a build takes."""

import itertools
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmforge import targets
from llmforge.backends import PROVIDERS
from llmforge.backends.tensorrt import refusals
from llmforge.base.errors import UnsupportedError, UsageError
from llmforge.calibration import gradients
from llmforge.measure import chat_answers
from llmforge.measure.rates import MachineRates
from llmforge.metrics.units import significant, step_time
from llmforge.passes import ALL
from llmforge.planning import advice, building, deployment, families, memory, roofline, scheme, work
from llmforge.planning.deployment import DeploymentPlan
from llmforge.planning.roofline import Placement, Workload
from llmforge.planning.scheme import DtypeScheme
from llmforge.quantization.formats import SLOTS4_KV, KvFormat, SlotFormat
from llmforge.recipe import Recipe
from llmforge.rewrite.traits import Storage
from llmforge.targets import Target

from ..models.shapes import LLAMA, PUBLIC

BF16 = DtypeScheme("bf16", "bf16", "bf16", "bf16", "bf16")
GPUS = [name for name in targets.names() if not name.startswith("cpu-")]
SHAPES = {name: families.shape(name, data) for name, data in PUBLIC.items()}
A100 = targets.load("a100-80")
SAMPLE = Path(__file__).resolve().parents[1] / "data" / "docs-llama-7m"
KV_K8V4 = KvFormat(SlotFormat("int8", "token"), SlotFormat("int4", "token"))


def planned(name: str = "llama-3.1-8b", target: str | Target = "h200", **changes: Any) -> DeploymentPlan:
    device = targets.load(target) if isinstance(target, str) else target
    backend = changes.pop("backend", device.engines[0])
    workload = Workload(changes.pop("prompt", 1024), changes.pop("output", 256), changes.pop("batch", 1))
    dtypes = {key: changes.pop(key) for key in ("compute", "weights", "kv", "product") if key in changes}
    shape = SHAPES[name]
    chosen = scheme.choose(device, backend, shape.dtype, Storage(**dtypes))
    return deployment.make(shape, device, backend, chosen, workload, **changes)


# schemes


def test_bits_of_a_weight() -> None:
    gpu = DtypeScheme("fp16", "int4", "fp16", "fp16", "fp16", block=128)
    assert gpu.weight_bits("int4") == 4 + 16 / 128
    assert replace(gpu, symmetric=False).weight_bits("int4") == 4 + 20 / 128
    assert DtypeScheme("fp32", "int8", "fp32", "int8", "int8", block=32).weight_bits("int8") == 9
    assert gpu.weight_bits("fp4") == 4.5  # NVFP4
    assert (gpu.weight_bits("fp8"), gpu.weight_bits("bf16")) == (8, 16)


def test_weights_are_every_parameter_once() -> None:
    shape = SHAPES["llama-3.1-8b"]
    assert BF16.weight_bytes(shape) == 2 * shape.parameters
    tied = families.shape("t", {**LLAMA, "tie_word_embeddings": True})
    assert BF16.weight_bytes(tied) == 2 * tied.parameters
    halves = BF16.weight_bytes(shape, 2)
    assert halves == pytest.approx(shape.parameters, rel=1e-4)
    assert 2 * halves > BF16.weight_bytes(shape)  # norms stand on each


def test_a_tied_head_in_another_dtype_is_a_matrix_of_its_own() -> None:
    tied = families.shape("t", {**LLAMA, "tie_word_embeddings": True})
    shared = DtypeScheme("fp16", "int8", "fp16", "fp16", "fp16", block=0)
    own = replace(shared, head="int8")
    assert own.weight_bytes(tied) - shared.weight_bytes(tied) == tied.head_matrix
    assert own.head_bytes(tied) == tied.head_matrix == shared.head_bytes(tied) / 2
    assert shared.weight_bits("int8") == 8


def test_caches_split_by_heads_until_there_is_one_for_each() -> None:
    shape = SHAPES["qwen3-30b-a3b"]  # 4 heads of keys
    whole = BF16.kv_bytes_per_token(shape)
    assert [whole / BF16.kv_bytes_per_token(shape, ranks) for ranks in (1, 2, 4, 8)] == [1, 2, 4, 4]


@pytest.mark.parametrize(
    ("target", "backend", "checkpoint", "compute", "product"),
    [
        ("h200", "tensorrt", "bf16", "bf16", "bf16"),
        ("t4", "onnxruntime", "bf16", "fp16", "fp16"),  # no bf16 there
        ("cpu-avx2", "onnxruntime", "bf16", "fp32", "fp32"),
    ],
)
def test_dtypes_that_are_not_given(target: str, backend: Any, checkpoint: str, compute: str, product: str) -> None:
    chosen = scheme.choose(targets.load(target), backend, checkpoint)
    assert (chosen.compute, chosen.weights, chosen.kv, chosen.product) == (compute, compute, compute, product)


def test_caches_of_slots_are_counted_with_their_scales() -> None:
    shape, device = SHAPES["llama-3.1-8b"], targets.load("cpu-avx2")  # 32 layers, 8 KV heads of 128 channels
    chosen = {form: scheme.choose(device, "onnxruntime", "bf16", Storage(cache=form)) for form in (None, KV_K8V4)}
    assert chosen[None].kv_bytes_per_token(shape) == 32 * 8 * 2 * 128 * 4
    assert chosen[KV_K8V4].kv_bytes_per_token(shape) == 32 * 8 * ((128 + 2) + (64 + 4))
    assert chosen[KV_K8V4].kv_bytes_per_token(shape, 4) == 32 * 2 * (130 + 68)
    assert "cache int8-token keys, int4-token values" in chosen[KV_K8V4].words()
    four = scheme.choose(device, "onnxruntime", "bf16", Storage(kv="int4"))
    assert four.cache == SLOTS4_KV
    assert four.kv_bytes_per_token(shape) == 32 * 8 * 2 * (64 + 4)
    fp32, slots = (replace(BF16, cache=form) for form in (None, KV_K8V4))
    steps = [Placement(shape, A100, each).decode(1, 4096).seconds for each in (fp32, slots)]
    assert steps[1] < steps[0]


def test_products_of_quantized_weights() -> None:
    def chosen(target: str, weights: Any, product: Any = None) -> DtypeScheme:
        device = targets.load(target)
        return scheme.choose(device, device.engines[0], "bf16", Storage(weights=weights, product=product))

    assert chosen("h200", "int4").product == "bf16"  # widened
    assert chosen("h200", "fp8").product == "bf16"
    assert chosen("h200", "fp8", "fp8").product == "fp8"
    assert chosen("b200", "fp4", "fp4").product == "fp4"
    assert chosen("cpu-avx512-vnni", "int4").product == "int8"
    assert (chosen("h200", "int4").embedding, chosen("cpu-avx2", "int4").embedding) == ("bf16", "int8")


@pytest.mark.parametrize(
    ("target", "dtypes", "says"),
    [
        ("t4", {"compute": "bf16"}, "no bf16 arithmetic, which came with SM 8.0"),
        ("t4", {"weights": "int4"}, "refuses int4 weights on SM 7.5"),
        ("a100-80", {"weights": "fp8"}, "SM 8.0 has no fp8 arithmetic, which came with SM 8.9"),
        ("h200", {"weights": "fp4"}, "SM 9.0 has no fp4 arithmetic, which came with SM 10.0"),
        ("h200", {"compute": "fp32"}, "fused attention takes fp16 and bf16"),
        ("h200", {"kv": "int8"}, "caches keys and values as bf16, fp16"),
        ("h200", {"product": "fp4"}, "cannot multiply in fp4: SM 9.0 has no fp4 arithmetic"),
        ("cpu-avx2", {"compute": "bf16"}, "compute in fp32"),
        ("cpu-avx2", {"kv": "fp8"}, "caches keys and values as fp32, int4, int8"),
        ("h200", {"cache": KV_K8V4}, "does not support caches of int8-token keys, int4-token values: llmforge's CPU"),
    ],
)
def test_dtypes_that_an_engine_does_not_take(target: str, dtypes: Any, says: str) -> None:
    device = targets.load(target)
    with pytest.raises(UnsupportedError) as caught:
        scheme.choose(device, device.engines[0], "bf16", Storage(**dtypes))
    assert says in caught.value.message
    assert caught.value.hint is not None
    assert "supported: " in caught.value.hint


@pytest.mark.parametrize("sm", ["75", "80", "86", "89", "90", "100", "120"])
def test_what_tensorrt_takes_is_what_its_builder_refuses_the_rest_of(sm: str) -> None:
    taken = PROVIDERS["tensorrt"].support(sm)
    rules = {"bf16": refusals.Feature.BF16, "int4": refusals.Feature.INT4, "fp8": refusals.Feature.FP8,
             "fp4": refusals.Feature.FP4}  # fmt: skip
    for dtype, feature in rules.items():
        assert (dtype in taken.weights) is not feature.value.refuses(sm)  # type: ignore[comparison-overlap]
    assert not taken.kv & {"int8", "fp8"}  # Feature.QUANTIZED_UPDATE


# the roofline


def test_a_decode_step_by_hand() -> None:
    shape = SHAPES["llama-2-7b"]
    step = Placement(shape, A100, BF16).decode(4, 1000)
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    vectors = 32 * 2 * 4096 + 4096
    head = 32000 * 4096
    weights = 2 * (matrices + vectors + head)
    token = 2 * 32 * 4096 * 2
    assert step.bytes == weights + 4 * 1001 * token
    assert step.operations == 4 * (2 * (matrices + head) + 32 * 2 * 32 * 256 * 1001)
    assert step.memory_s == pytest.approx(step.bytes / (2039e9 * 0.85))
    assert step.compute_s == pytest.approx(step.operations / (312e12 * 0.65))
    assert step.overhead_s == pytest.approx(32 * 60e-6)
    assert step.links_s == 0
    assert step.seconds == pytest.approx(step.memory_s + step.overhead_s)
    assert step.bound == "memory"
    assert step.mbu == pytest.approx(step.bytes / step.seconds / 2039e9)


def test_a_prompt_by_hand() -> None:
    shape = SHAPES["llama-2-7b"]
    step = Placement(shape, A100, BF16).prefill(512)
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    pairs = 512 * 513 / 2
    assert step.operations == 512 * 2 * matrices + 2 * 32000 * 4096 + 32 * 2 * 32 * 256 * pairs
    assert step.bound == "compute"


def test_an_all_reduce_by_hand() -> None:
    shape = SHAPES["llama-2-70b"]
    step = Placement(shape, A100, BF16, ranks=4).decode(16, 100)
    each = 2 * 3 / 4 * (16 * 8192 * 2) / (300e9 * 0.8) + 10e-6
    assert step.links_s == pytest.approx(2 * 80 * each)


def test_experts_are_read_as_far_as_tokens_choose_them() -> None:
    shape = SHAPES["mixtral-8x7b"]
    expert = 3 * 4096 * 14336 * 2 * 32
    placed = Placement(shape, A100, BF16)
    one = placed.weights_read(1)
    rest = 2 * (shape.parameters - shape.embedding) - 8 * expert
    assert one == pytest.approx(rest + 2 * expert)
    assert placed.weights_read(2) == pytest.approx(rest + (8 - 8 * 0.75**2) * expert)
    assert placed.weights_read(10_000) == pytest.approx(rest + 8 * expert)


def test_windows_bound_what_is_read_and_not_what_is_kept() -> None:
    shape = families.shape("w", {**LLAMA, "model_type": "mistral", "sliding_window": 256})
    windowed, full = Placement(shape, A100, BF16), Placement(SHAPES["llama-2-7b"], A100, BF16)
    steps = [windowed.decode(1, context) for context in (256, 4000)]
    assert steps[0].bytes == steps[1].bytes
    assert windowed.prefill(4000).operations < full.prefill(4000).operations
    assert memory.of(windowed, Workload(3000, 1000)) == memory.of(full, Workload(3000, 1000))


def test_the_turning_batch_is_where_compute_takes_over() -> None:
    placed = Placement(SHAPES["llama-2-7b"], A100, BF16)
    batch = placed.turning_batch(16)
    assert batch is not None
    assert placed.decode(batch, 16).bound == "compute"
    assert placed.decode(batch - 1, 16).bound == "memory"
    assert placed.turning_batch(4000) is None  # half a byte of cache for each operation


contexts = st.integers(1, 100_000)
batches = st.integers(1, 512)
names = st.sampled_from(sorted(SHAPES))
devices = st.sampled_from(GPUS)


@settings(max_examples=60, deadline=None)
@given(names, devices, batches, contexts, st.floats(1.01, 10))
def test_more_bandwidth_is_never_slower(name: str, device: str, batch: int, context: int, factor: float) -> None:
    target = targets.load(device)
    chosen = scheme.choose(target, target.engines[0], "bf16")
    figure = target.require_gpu().bandwidth_gbs
    more = figure.model_copy(update={"value": figure.value * factor})
    faster = target.model_copy(update={"bandwidth_gbs": more})
    old, new = (Placement(SHAPES[name], each, chosen).decode(batch, context) for each in (target, faster))
    assert new.seconds <= old.seconds
    assert (new.seconds < old.seconds) is (old.memory_s > old.compute_s)


@settings(max_examples=60, deadline=None)
@given(names, batches, contexts, st.integers(1, 64), st.integers(0, 4096))
def test_more_work_is_never_faster(name: str, batch: int, context: int, more: int, longer: int) -> None:
    placed = Placement(SHAPES[name], A100, BF16)
    step = placed.decode(batch, context)
    assert placed.decode(batch + more, context).seconds > step.seconds
    assert placed.decode(batch, context + longer).seconds >= step.seconds
    wider = placed.decode(batch + more, context)
    assert wider.seconds / (batch + more) < step.seconds / batch  # a token of a larger batch is cheaper
    assert 0 < step.mbu < 1
    assert 0 < step.mfu < 1


@settings(max_examples=40, deadline=None)
@given(names, st.integers(1, 8192), st.integers(1, 8192))
def test_longer_prompts_are_never_faster(name: str, tokens: int, more: int) -> None:
    placed = Placement(SHAPES[name], A100, BF16)
    first, second = (placed.prefill(each) for each in (tokens, tokens + more))
    assert second.seconds > first.seconds


@settings(max_examples=40, deadline=None)
@given(names, devices, st.integers(1, 100_000))
def test_the_largest_batch_fits_and_one_more_does_not(name: str, device: str, context: int) -> None:
    target, shape = targets.load(device), SHAPES[name]
    chosen = scheme.choose(target, target.engines[0], "bf16")
    placed = Placement(shape, target, chosen)
    batch = memory.largest_batch(placed, context)
    assert batch == 0 or memory.of(placed, Workload(context, 0, batch)).fits
    assert not memory.of(placed, Workload(context, 0, batch + 1)).fits


def test_larger_caches_leave_less_room() -> None:
    placed = Placement(SHAPES["llama-3.1-8b"], targets.load("rtx-4090"), BF16)
    rooms = [memory.largest_batch(placed, context) for context in (1024, 4096, 16384, 131072)]
    assert rooms == sorted(rooms, reverse=True)
    assert rooms[-1] == 0


# plans


def test_twelve_devices_and_four_models_take_no_time() -> None:
    """0.45 CPU-seconds on one core of an AMD EPYC (Zen 4), three quarters of them for reading the targets' YAML."""
    devices = ["t4", "a10g", "a100-40", "a100-80", "l4", "l40s", "rtx-4090", "rtx-5090", "rtx-pro-6000", "h100-sxm",
               "h200", "b200"]  # fmt: skip
    models = ["llama-2-7b", "llama-2-70b", "mixtral-8x7b", "qwen3-30b-a3b"]
    began = time.process_time()
    plans = []
    for device, model in itertools.product(devices, models):
        target = targets.load(device)
        shape = families.shape(model, PUBLIC[model])
        chosen = scheme.choose(target, target.engines[0], shape.dtype)
        made = deployment.make(shape, target, target.engines[0], chosen, Workload())
        plans.append((made, advice.advise(made), building.predict(shape, chosen, made.backend)))
    assert time.process_time() - began < 2
    assert len(plans) == 48
    assert sum(made.asked.memory.fits for made, _, _ in plans) == 12 + 2 + 3 + 5


def test_a_plan_holds_together() -> None:
    plan = planned(batch=3)
    assert plan.asked.memory.fits
    expected = Placement(plan.shape, plan.target, plan.scheme).decode(3, 1024 + 128)
    assert plan.asked.decode.step.seconds == expected.seconds
    assert [each.ranks for each in plan.degrees] == [1, 2, 4, 8]
    steps = [each.decode.step.seconds for each in plan.degrees]
    assert steps == sorted(steps, reverse=True)
    assert [each.batch for each in plan.decodes] == [1, 2, 3, 4, 8, 16, 32, 64, 128, 256]
    assert plan.largest[0][0] == 1024


def test_cost_is_price_times_time() -> None:
    plan = planned(batch=8, usd_per_hour=3.6)
    assert plan.cost is not None
    assert plan.cost.source == "given"
    assert plan.cost.per_million_in == pytest.approx(plan.asked.prefill.seconds / 1024 * 1e6 / 1000)
    assert plan.cost.per_million_out == pytest.approx(plan.asked.decode.step.seconds / 8 * 1e6 / 1000)
    assert planned(batch=8, usd_per_hour=3.6, ranks=2).cost.usd_per_hour == 7.2  # type: ignore[union-attr]
    assert planned(target="gb200").cost is None
    own = planned().cost
    assert own is not None
    assert own.usd_per_hour == targets.load("h200").usd_per_hour.value  # type: ignore[union-attr]


def test_what_is_longer_than_the_model_is_refused() -> None:
    with pytest.raises(UsageError, match="exceed the context of llama-2-7b, 4096"):
        planned("llama-2-7b", prompt=4000, output=200)


def test_a_split_that_heads_do_not_allow_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="cannot be split over 3"):
        planned(ranks=3)
    odd = replace(SHAPES["llama-2-7b"], layers=families.shape("o", {**LLAMA, "num_attention_heads": 36,
                  "num_key_value_heads": 36, "hidden_size": 4608}).layers)  # fmt: skip
    assert list(roofline.degrees(odd, A100)) == [1, 2, 4]


@pytest.mark.parametrize(
    ("change", "says"),
    [({"head_dim": 264}, "16 to 256 channels"), ({"head_dim": 20}, "in multiples of 8")],
)
def test_heads_without_a_kernel_of_tensorrt_are_refused(change: dict[str, int], says: str) -> None:
    shape = families.shape("odd", {**LLAMA, **change})
    with pytest.raises(UnsupportedError, match="channels per key head") as caught:
        deployment.make(shape, A100, "tensorrt", BF16, Workload())
    assert says in caught.value.message
    assert deployment.make(shape, A100, "onnxruntime", BF16, Workload()).asked.memory.fits


def test_the_wheels_quantized_products_have_sm80s_rate_on_sm90() -> None:
    """So few rows are faster in int4, and many in 16 bits; cuBLAS and TensorRT have all instructions."""
    told = {"target": "h100-sxm", "backend": "onnxruntime", "prompt": 200, "output": 200}
    steps = {
        (weights, batch): planned(**told, weights=weights, batch=batch).asked.decode.step
        for weights in ("int4", "bf16")
        for batch in (1, 64, 256)
    }
    for batch in (1, 64, 256):
        assert steps["int4", batch].compute_s > 1.5 * steps["bf16", batch].compute_s
    assert steps["int4", 1].seconds < 0.6 * steps["bf16", 1].seconds
    assert steps["int4", 256].compute_s > steps["int4", 256].memory_s
    assert steps["int4", 256].seconds > steps["bf16", 256].seconds
    said = "the wheel multiplies quantized weights by SM80's instructions on SM90: at 50% of its rate"
    for target, backend, weights, slower in (
        ("h100-sxm", "onnxruntime", "int4", True),
        ("h100-sxm", "onnxruntime", "bf16", False),
        ("h100-sxm", "tensorrt", "int4", False),
        ("a100-80", "onnxruntime", "int4", False),
    ):
        notes = planned(target=target, backend=backend, weights=weights).notes
        assert any(said in note for note in notes) is slower


def test_the_docs_give_the_planned_times_of_an_h100_and_the_rates_of_the_expected_ones() -> None:
    """In docs/cuda.md, of texts of 300 tokens; tokens a second are rows over the expected time, to two digits."""
    page = (Path(__file__).parents[2] / "docs" / "cuda.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (bf16|int4) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d,]+)(?: – ([\d,]+))? \|$", page, re.M)
    assert [(weights, batch) for weights, batch, *_ in rows] == list(
        itertools.product(("bf16", "int4"), ("1", "64", "256"))
    )
    told = {"target": "h100-sxm", "backend": "onnxruntime", "prompt": 200, "output": 200}
    for weights, batch, plan_ms, expected_ms, least, most in rows:
        step = planned(**told, weights=weights, batch=int(batch)).asked.decode.step
        assert f"{step.seconds * 1e3:.1f}" == plan_ms
        assert float(expected_ms) >= float(plan_ms)  # which counts no heads
        low, high = (int(each.replace(",", "")) for each in (least, most or least))
        assert 0.93 * low <= int(batch) / float(expected_ms) * 1e3 <= 1.07 * high
    others = {**told, "backend": "compressed-tensors"}
    int4 = planned(**others, weights="int4", batch=64).asked.decode.step.seconds
    fp8 = planned(**others, weights="fp8", product="fp8", batch=256).asked.decode.step.seconds
    assert f"{int4 * 1e3:.1f} ms a step in int4 at 64 rows" in page
    assert f"{fp8 * 1e3:.1f} ms in fp8 by fp8 at 256, {round(256 / fp8, -3):,.0f} tokens a second" in page
    [ours] = (float(expected) for weights, batch, _, expected, *_ in rows if (weights, batch) == ("bf16", "256"))
    comparison = (Path(__file__).parents[2] / "docs" / "comparison.md").read_text(encoding="utf-8")
    assert f"{ours / 1e3 / fp8:.1f} times as fast with fp8 at 256 rows" in comparison


def test_a_cpu_without_figures_says_how_to_get_them() -> None:
    with pytest.raises(UsageError, match="no memory bandwidth") as caught:
        planned(target="cpu-avx2")
    assert caught.value.hint is not None
    assert "llmforge doctor --measure --write" in caught.value.hint


def test_latent_attention_and_unverified_figures_are_noted() -> None:
    latent = families.shape("d", {
        "model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 4, "vocab_size": 264, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "attention_bias": False, "q_lora_rank": None, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 24, "first_k_dense_replace": 2, "dtype": "bfloat16",
    })  # fmt: skip
    half = DtypeScheme("fp16", "fp16", "fp16", "fp16", "fp16")
    plan = deployment.make(latent, targets.load("t4"), "onnxruntime", half, Workload(100, 100))
    assert any("its latents are cached, not keys and values" in note for note in plan.notes)
    assert plan.scheme.kv_bytes_per_token(latent) == 2 * (24 + 8) * 2
    rounded = replace(plan.scheme, kv="int8")
    assert rounded.kv_bytes_per_token(latent) == 2 * (24 + 8) * 2
    assert any("unverified figures of t4: bandwidth, fp16" in note for note in plan.notes)


def test_blocks_of_a_paged_cache_are_counted_where_they_are_offered() -> None:
    shape = families.shape("odd", {**LLAMA, "head_dim": 128})
    plan = deployment.make(shape, A100, "onnxruntime", BF16, Workload())
    [note] = [note for note in plan.notes if "KV cache in" in note]
    block = 128 * plan.scheme.kv_bytes_per_token(shape)
    held = plan.asked.memory
    blocks = (held.capacity - held.needed + held.cache) // block
    assert note == (
        f"KV cache in blocks of 128 tokens (unverified), {block / 1e6:.1f} MB each, of which {blocks} fit: "
        f"{blocks * 128} tokens of any sequences"
    )


@pytest.mark.parametrize(
    ("target", "backend", "changes", "kv", "reason"),
    [
        ("a100-80", "tensorrt", {}, "bf16", "only ONNX Runtime's CUDA provider has attention over blocks"),
        ("t4", "onnxruntime", {}, "fp16", "FlashAttention, which reads blocks in place, needs SM 8.0"),
        ("a100-80", "onnxruntime", {}, "int8", "over int8 blocks each step with prompts copies"),
        ("a100-80", "onnxruntime", {"head_dim": 512}, "bf16", "heads have 512 channels; blocks are of one width"),
    ],
)
def test_slots_are_said_with_their_reason(target: str, backend: str, changes: dict, kv: str, reason: str) -> None:
    shape, compute = families.shape("odd", {**LLAMA, **changes}), "fp16" if kv == "fp16" else "bf16"
    scheme = replace(BF16, kv=kv, compute=compute, weights=compute, product=compute, embedding=compute)
    plan = deployment.make(shape, targets.load(target), backend, scheme, Workload())
    [note] = [note for note in plan.notes if "KV cache in" in note]
    assert note.startswith(f"KV cache in slots of max_context tokens: {reason}")
    told = deployment.make(shape, A100, "onnxruntime", BF16, Workload(), slots="the recipe says so")
    assert "KV cache in slots of max_context tokens: the recipe says so" in told.notes


# what pays


def verdicts(plan: DeploymentPlan) -> dict[str, str]:
    return {each.change: each.verdict for each in advice.advise(plan)}


def ratios(plan: DeploymentPlan, change: str) -> tuple[float, float]:
    """TPOT and TTFT with a change over those without it."""
    found = next(each for each in advice.advise(plan) if each.change == change)
    assert found.tpot is not None
    assert found.ttft is not None
    return found.tpot, found.ttft


def cpu(**reached: tuple[float, float]) -> Target:
    """Make a CPU of 40 GB/s; `reached` gives rate (TOP/s) and reading (GB/s) of each library's quantized layers."""

    def figure(value: float) -> targets.SourcedFigure:
        return targets.SourcedFigure(value=value, source="measured here", verified=True)

    rate = max((rate for rate, _ in reached.values()), default=0.8)
    return targets.load("cpu-avx2").model_copy(
        update={
            "name": "here",
            "memory_gb": figure(64),
            "bandwidth_gbs": figure(40),
            "rates": {"fp32": figure(0.4), "int8": figure(rate)},
            "kernels": {
                name: {"int4": targets.QuantizedLayers(rate=figure(rate), read_gbs=figure(read))}
                for name, (rate, read) in reached.items()
            },
        }
    )


def test_the_cpu_kernels_are_judged_by_what_was_measured_on_the_machine() -> None:
    fast = cpu(onnxruntime=(0.3, 17), llmforge=(0.8, 30))
    tpot, ttft = ratios(planned(target=fast, weights="int4"), "cpu-kernels")
    assert 17 / 30 < tpot < 0.75
    assert 0.3 / 0.8 < ttft < 0.6
    assert verdicts(planned(target=fast, weights="int4"))["cpu-kernels"] == "pays"
    other = ratios(planned("qwen3-30b-a3b", target=fast, weights="int4", prompt=8192), "cpu-kernels")
    assert other != (tpot, ttft)
    equal = cpu(onnxruntime=(0.8, 30), llmforge=(0.8, 30))
    assert ratios(planned(target=equal, weights="int4"), "cpu-kernels") == (1, 1)
    slow = planned(target=cpu(onnxruntime=(0.8, 30), llmforge=(0.1, 2)), weights="int4")
    assert min(ratios(slow, "cpu-kernels")) > 2
    assert verdicts(slow)["cpu-kernels"] == "does not pay"
    assert verdicts(planned(target=fast))["cpu-kernels"] == "refused"  # fp32 weights: nothing to compute


def test_what_was_not_measured_is_not_known() -> None:
    found = {each.change: each for each in advice.advise(planned(target=cpu(), weights="int4"))}["cpu-kernels"]
    assert found.verdict == "not known"
    assert (found.tpot, found.ttft, found.tokens_per_second) == (None, None, None)
    assert "`llmforge doctor --measure --write" in found.reason


def test_every_figure_says_what_it_rests_on() -> None:
    measured = planned(target=cpu(onnxruntime=(0.3, 17), llmforge=(0.8, 30)), weights="int4")
    for plan in (planned(), planned(weights="int8"), measured):
        for each in advice.advise(plan):
            assert (each.tpot is None) is (each.ttft is None) is (each.tokens_per_second is None)
            assert bool(each.basis) is (each.tpot is not None) is (each.verdict in ("pays", "does not pay"))
    found = {each.change: each.basis for each in advice.advise(measured)}
    assert "measured here" in found["cpu-kernels"]
    assert "measured here" in found["quantize-kv-cache, bits: 8"]
    assert "4.5 µs for each kernel" in found["fuse-norms"]
    assert "docs/performance.md" in found["fuse-norms"]


def test_quantization_pays_where_weights_are_what_is_read() -> None:
    at_one = {each.change: each for each in advice.advise(planned())}
    assert at_one["quantize-weights, bits: 4"].verdict == "pays"
    int4, int8 = (ratios(planned(), f"quantize-{each}") for each in ("weights, bits: 4", "channels, dtype: int8"))
    assert int4[0] < int8[0] < 1
    weights, all_of_it = (
        ratios(planned(), f"quantize-channels, dtype: fp8{each}") for each in ("", ", activations: static")
    )
    assert weights[0] == all_of_it[0]
    assert all_of_it[1] < weights[1] == pytest.approx(1)
    assert "bound by memory" in at_one["quantize-weights, bits: 4"].reason
    crowded = planned(batch=256, prompt=4096)
    assert ratios(crowded, "quantize-weights, bits: 4")[0] > 0.9  # caches are most of what is read
    assert verdicts(crowded)["quantize-kv-cache, bits: 8"] == "refused"  # by TensorRT
    onnx = planned(batch=64, prompt=4096, backend="onnxruntime")
    assert verdicts(onnx)["quantize-kv-cache, bits: 8"] == "pays"
    assert ratios(onnx, "quantize-kv-cache, bits: 8")[0] < 0.7


def test_quantization_that_makes_it_fit_pays() -> None:
    found = {each.change: each for each in advice.advise(planned("llama-2-70b", "h100-sxm"))}
    assert found["quantize-channels, dtype: int8"].reason == "makes the model fit"
    assert verdicts(planned("llama-2-70b", "h100-sxm"))["quantize-weights, bits: 4"] == "pays"


def test_what_is_done_or_refused_says_so() -> None:
    found = verdicts(planned(weights="int8"))
    assert found["quantize-channels, dtype: int8"] == "done"
    assert found["quantize-fp4"] == "refused"
    assert verdicts(planned(target="b200"))["quantize-fp4"] == "pays"
    assert found["quantize-channels, dtype: int8, activations: static"] != "done"
    rounded = verdicts(planned(weights="fp8", product="fp8"))
    assert rounded["quantize-channels, dtype: fp8, activations: static"] == "done"
    reasons = {each.change: each.reason for each in advice.advise(planned("llama-2-7b", "t4", backend="tensorrt"))}
    assert "no fp8 arithmetic" in reasons["quantize-channels, dtype: fp8"]
    assert "quantize-weights, bits: 8" in verdicts(planned(backend="onnxruntime"))


def test_flash_attention_pays_more_the_longer_the_prompt() -> None:
    def ttft(prompt: int) -> float:
        return ratios(planned(prompt=prompt), "flash-attention")[1]

    assert ttft(16384) < ttft(4096) < ttft(256) <= 1
    assert ttft(16384) < 0.6


# builds


def test_a_build_grows_with_the_model_and_calibration() -> None:
    small, large = SHAPES["llama-2-7b"], SHAPES["llama-2-70b"]
    int4 = DtypeScheme("bf16", "int4", "bf16", "bf16", "bf16")
    proven = building.BuildWork(budget_tokens=4096)
    rtn = building.predict(small, int4, "onnxruntime", proven)
    gptq = building.predict(small, int4, "onnxruntime", calibration_tokens=32768)
    assert building.predict(small, BF16, "onnxruntime").cpu_s < rtn.cpu_s < gptq.cpu_s
    assert building.predict(large, int4, "onnxruntime", proven).cpu_s == pytest.approx(10 * rtn.cpu_s, rel=0.2)
    trained = building.predict(small, int4, "onnxruntime", building.BuildWork(trained_tokens=65536))
    [recover] = [stage for stage in trained.stages if stage.title == "Recover"]
    assert recover.cpu_s == pytest.approx(building.TRAIN_S_PER_TOKEN * small.active_parameters * 65536)
    assert rtn.disk_bytes == int4.weight_bytes(small)
    assert building.predict(small, int4, "tensorrt").disk_bytes == 2 * rtn.disk_bytes
    assert rtn.checkpoint_bytes == 2 * small.parameters


# CPU seconds of all processes, of the recipes that `init` writes, at the rates of reference.
BUILT = {
    "docs-llama-7m": ({
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192, "tie_word_embeddings": True,
    }, {"Calibrate": 11.9, "Measure quality": 16.2, "Measure latency": 6.5, "Answer chats": 5.3}, 57.8),
    "docs-moe-12m": ({
        "model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8,
        "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [0], "vocab_size": 8192,
        "tie_word_embeddings": True,
    }, {"Calibrate": 16.4, "Measure quality": 19.0, "Measure latency": 7.7, "Answer chats": 5.2}, 71.9),
    "smollm2-135m": ({
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    }, {"Measure quality": 95.3, "Measure latency": 60.1, "Answer chats": 22.7}, 225.8),
}  # fmt: skip


@pytest.mark.parametrize("name", BUILT)
def test_a_build_is_predicted_within_a_factor_of_one_and_a_half(name: str) -> None:
    config, measured, whole = BUILT[name]
    shape = families.shape(name, {"max_position_embeddings": 1024, "torch_dtype": "bfloat16", **config})
    int4 = DtypeScheme("bf16", "int4", "fp32", "int8", "int8", block=32)
    asked = work.of_start(shape.parameters, 8192 if "Calibrate" in measured else 0, has_chats=True)
    build = building.predict(shape, int4, "onnxruntime", asked)
    assert 1 / 1.5 < build.cpu_s / whole < 1.5
    stages = {stage.title: stage.cpu_s for stage in build.stages}
    for title, seconds in measured.items():
        assert 1 / 1.5 < stages[title] / seconds < 1.5, title
    assert build.cpu_s / 2 < build.seconds(2) < build.seconds(1) == build.cpu_s


# CPU seconds of calibrations (python -m benchmarks.calibration), at the rates of reference: tokens, and layers of them.
CALIBRATED = {
    "smollm2-135m": (BUILT["smollm2-135m"][0], 8192, 30, 125),
    "qwen3-0.6b": ({
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    }, 16384, 28, 839),
    "qwen3-30b-a3b": ({
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
        "tie_word_embeddings": False,
    }, 8192, 2, 648),
}  # fmt: skip


@pytest.mark.parametrize("name", CALIBRATED)
def test_a_calibration_is_predicted_within_a_fifth(name: str) -> None:
    config, tokens, depth, measured = CALIBRATED[name]
    given = {"max_position_embeddings": 4096, "torch_dtype": "bfloat16", **config, "num_hidden_layers": depth}
    assert building.calibration_s(families.shape(name, given), tokens) == pytest.approx(measured, rel=0.2)


def test_as_many_tokens_have_a_loss_as_gradients_are_taken_of() -> None:
    ours = building.LOSS_TOKENS, building.LOSS_TOKENS_PER_OUTPUT, building.MOST_LOSS_TOKENS
    assert ours == (gradients.TOKENS, gradients.PER_OUTPUT, gradients.MOST_TOKENS)


def test_a_machine_half_as_fast_takes_twice_as_long() -> None:
    config, _, _ = BUILT["smollm2-135m"]
    shape = families.shape("s", {"max_position_embeddings": 1024, "torch_dtype": "bfloat16", **config})
    int4, asked = (
        DtypeScheme("bf16", "int4", "fp32", "int8", "int8", block=32),
        building.BuildWork(8192, 0, 4096, 15_360),
    )
    known = building.REFERENCE
    slow = MachineRates(known.products / 2, known.python / 2)
    here, there = (building.predict(shape, int4, "onnxruntime", asked, rates=each) for each in (known, slow))
    assert there.cpu_s == pytest.approx(2 * here.cpu_s)
    assert there.seconds(2) == pytest.approx(2 * here.seconds(2))
    assert here.speed == (1.0, 1.0)
    assert there.speed == (0.5, 0.5)
    narrow = building.predict(shape, int4, "onnxruntime", asked, rates=MachineRates(known.products / 2, known.python))
    for before, after in zip(here.stages, narrow.stages, strict=True):
        assert after.cpu_s == pytest.approx(before.cpu_s * (2 if before.spreads else 1)), before.title


def test_workers_take_what_carries_the_text_through_the_layers() -> None:
    config, _, _ = BUILT["smollm2-135m"]
    shape = families.shape("s", {"max_position_embeddings": 1024, "torch_dtype": "bfloat16", **config})
    int4 = DtypeScheme("bf16", "int4", "fp32", "int8", "int8", block=32)

    def calibration(workers: int, rate: float = 1.0) -> building.StageCost:
        asked = building.BuildWork(calibration_tokens=8192, workers=workers)
        rates = MachineRates(rate * building.REFERENCE.products, building.REFERENCE.python)
        build = building.predict(shape, int4, "onnxruntime", asked, rates=rates)
        [stage] = [each for each in build.stages if each.title == "Calibrate"]
        return stage

    alone, one, four = map(calibration, (0, 1, 4))
    assert alone.cpu_s == one.cpu_s == four.cpu_s
    assert 0 < four.carried_s < four.cpu_s
    assert one.seconds(2) - four.seconds(2) == pytest.approx(0.75 * four.carried_s)
    assert four.seconds(2) < alone.seconds(2)
    assert calibration(4, rate=0.5).seconds(2) == pytest.approx(2 * four.seconds(2))


def test_formats_that_are_chosen_take_a_stage_in_front_of_calibration() -> None:
    config, _, _ = BUILT["docs-llama-7m"]
    shape = families.shape("s", {"max_position_embeddings": 1024, "torch_dtype": "bfloat16", **config})
    int4 = DtypeScheme("bf16", "int4", "fp32", "int8", "int8", block=32)
    asked = building.BuildWork(calibration_tokens=8192, chooses_formats=True)
    stages = building.predict(shape, int4, "onnxruntime", asked).stages
    titles = [stage.title for stage in stages]
    at = titles.index("Choose formats")
    assert titles[at - 1 : at + 2] == ["Calibrate", "Choose formats", "Calibrate"]
    assert stages[at - 1].cpu_s == 0 < stages[at].cpu_s


def test_this_machine_is_measured_in_a_moment() -> None:
    """In a process of its own: what is measured is kept, and torch is not imported."""
    code = (
        "import sys, time; from llmforge.measure import rates; began = time.process_time(); found = rates.measure();"
        "assert rates.measure() is found; assert 'torch' not in sys.modules;"
        "print(time.process_time() - began, found.products, found.python)"
    )
    took, products, python = map(
        float, subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert took < 1
    assert 1e9 < products < 1e13
    assert 1e5 < python < 1e9


def test_chats_that_the_checkpoint_answers_are_predicted() -> None:
    """SmolLM2-135M: 30 s of CPU time for the 64 that ship, and 23 for 24, of which the proof of the trace took 4."""
    config, _, _ = BUILT["smollm2-135m"]
    shape = families.shape("s", {"max_position_embeddings": 1024, "torch_dtype": "bfloat16", **config})
    int4 = DtypeScheme("bf16", "int4", "fp32", "int8", "int8", block=32)

    def answers(asked: building.BuildWork) -> dict[str, float]:
        build = building.predict(shape, int4, "onnxruntime", asked)
        return {stage.title: stage.cpu_s for stage in build.stages if "chats" in stage.title}

    both, one, none = (
        work.of_start(shape.parameters, tokens, has_chats=chats)
        for tokens, chats in ((8192, True), (0, True), (8192, False))
    )
    assert (both.answered_tokens, one.answered_tokens) == (64 * 48, 24 * 48)
    assert 1 / 1.3 < both.asked_tokens / 6592 < 1.3
    assert 1 / 1.3 < one.asked_tokens / 2424 < 1.3
    assert 1 / 1.3 < answers(both)["Answer chats"] / 30.0 < 1.3
    assert 1 / 1.3 < answers(one)["Answer chats"] / 18.7 < 1.3
    assert answers(none) == {}
    large = replace(shape, layers=tuple((20 * count, layer) for count, layer in shape.layers))
    stages = building.predict(large, int4, "onnxruntime", both).stages
    assert "Answer chats" not in {stage.title for stage in stages}  # it would take too long to answer


def test_chats_are_counted_as_the_build_answers_them(tmp_path: Path) -> None:
    assert (work.ANSWER_TOKENS, work.ANSWER_BATCH) == (chat_answers.MOST_TOKENS, chat_answers.BATCH)
    assert building.MOST_ASKED_BYTES == chat_answers.MOST_BYTES
    asked, said = {"role": "user", "content": "What is a norm?"}, {"role": "assistant", "content": "A length."}
    lines = [{"messages": [asked]}, {"messages": [asked, said]}, {"text": "What is a norm?"}]
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "Another text."}))
    passes = "[fuse-norms, {quantize-weights: {method: METHOD, budget: {kld_mean: 1}}}]"
    text = f"""\
schema: 1
name: m
checkpoint: {SAMPLE}
target: local
engine: {{backend: onnxruntime, max_context: 64}}
calibration: {{data: mixed.jsonl, samples: 1, length: 32}}
passes: {passes}
validation: {{quality: {{data: text.jsonl, context: 32}}}}
"""
    for method, chats in (("gptq", 1), ("rtn", 0)):  # what is not calibrated reads no calibration text
        path = tmp_path / f"{method}.yaml"
        path.write_text(text.replace("METHOD", method))
        recipe = Recipe.load(path)
        found = work.of_recipe(recipe, recipe.instantiate(ALL))
        assert found.answered_tokens == 48 * chats
        assert found.asked_tokens == (work.TEMPLATE_TOKENS + 15 // 4) * chats


def test_a_build_without_calibration_or_validation_is_predicted_too() -> None:
    qwen = families.shape("q", {
        **PUBLIC["qwen3-30b-a3b"], "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024,
        "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    })  # fmt: skip
    assert qwen.parameters == 596_049_920
    int4 = DtypeScheme("fp32", "int4", "fp32", "int8", "int8", block=128)
    asked = building.BuildWork(budget_tokens=8 * 256 // 3)
    build = building.predict(qwen, int4, "onnxruntime", asked)
    assert 1 / 1.5 < build.cpu_s / 59.6 < 1.5  # benchmarks/build.py --method rtn --kernels, beside other processes
    assert build.memory_bytes == pytest.approx(1.495e9, rel=0.2)


def test_rounded_activations_do_not_pay_where_weights_alone_give_as_much() -> None:
    """One row and short prompts wait for bytes of weights, which are the same; long prompts for products."""
    name = "quantize-channels, dtype: int8, activations: static"
    one = {each.change: each for each in advice.advise(planned(prompt=1, output=512))}
    assert one["quantize-channels, dtype: int8"].verdict == "pays"
    assert one[name].verdict == "does not pay"
    assert one[name].reason.startswith("weights alone give TPOT × 0.")
    long = {each.change: each for each in advice.advise(planned(prompt=4096, output=64, batch=16))}
    assert long[name].verdict == "pays"


def test_what_is_not_supported_is_noted_with_what_it_would_bring() -> None:
    plan = planned(target="a100-80", batch=8)
    step, first = plan.asked.decode.step.seconds, plan.asked.prefill.seconds
    [pipeline, offload, apart] = [note for note in plan.notes if "is not supported" in note]
    one = Placement(plan.shape, plan.target, plan.scheme)
    hidden = 4 * 4096 * 2 / plan.ceilings.link + plan.ceilings.collective_s  # of four sequences, in bf16
    turn = one.decode(4, plan.workload.mean_context).seconds + 2 * hidden
    tensor = replace(one, ranks=2).decode(8, plan.workload.mean_context).seconds
    assert f"would decode {significant(step / turn)} times the tokens per second of 1" in pipeline
    assert (
        f"a TPOT of {step_time(turn)} instead of {step_time(step)} (tensor_parallel: 2: {step_time(tensor)})"
        in pipeline
    )
    memory = plan.asked.memory
    held = {
        devices: int((devices * (80e9 - memory.reserve - memory.activations) - memory.weights) / (memory.cache / 8))
        for devices in (1, 2)
    }
    assert pipeline.endswith(f"hold {held[2]} sequences of 1280 tokens instead of {held[1]}")
    assert held[1] == pytest.approx(dict(plan.largest)[1024] * 1024 / 1280, rel=0.05)
    cache = plan.workload.prompt * plan.scheme.kv_bytes_per_token(plan.shape, 1)
    host = 32e9 * plan.target.share("link").value  # PCIe 4.0 x16, and not NVLink
    assert (
        f"1024 tokens, {cache / 1e6:.1f} MB, would come back in {step_time(cache / host)}, at 25.6 GB/s, and are read "
        f"again in {step_time(first)}" in offload
    )
    writing = plan.workload.output * step / 8
    assert f"would serve {significant((first + writing) / max(first, writing) / 2)} times" in apart
    assert f"as many where {significant(writing / first)} generate for each that reads prompts" in apart
    assert f"would not wait {step_time(one.prefill(512).seconds)} for a piece of 512 tokens" in apart
    assert f"a cache would pass in {step_time(cache / plan.ceilings.link)}" in apart
    assert not [
        note for note in planned(target=A100.model_copy(update={"interconnect": None})).notes if "is not" in note
    ]


def test_more_devices_hold_what_one_does_not() -> None:
    """Llama 3.3 70B in bf16 has 141 GB of weights: two of 80 GB hold them, and one holds no sequence."""
    plan = planned("llama-3.3-70b", target="h100-sxm", ranks=1)
    [pipeline] = [note for note in plan.notes if note.startswith("pipeline")]
    assert re.search(r"hold [1-9]\d+ sequences of 1280 tokens", pipeline)
    assert pipeline.endswith("instead of 0")
    four = planned("llama-3.3-70b", target="h100-sxm", ranks=2)
    assert any("4 devices would decode" in note and "tokens per second of 2," in note for note in four.notes)


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_a_link_to_its_host(name: str) -> None:
    """NVLink joins devices alone, so a target with it says how fast the host's memory is reached."""
    target = targets.load(name)
    assert target.interconnect is not None
    assert (target.host_gbs is None) == (target.interconnect.kind == "pcie")
    assert target.host_gbs is None or target.host_gbs.value < target.interconnect.gbs.value
