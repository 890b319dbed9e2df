"""quantize-kv-cache: int8 keys and values with calibrated scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from llmforge import native, targets
from llmforge.base.errors import DataError, EnvironmentLacks, UnsupportedError
from llmforge.ir import graph
from llmforge.passes.flash_attention import FlashAttention
from llmforge.passes.pack_qkv import PackQkv
from llmforge.passes.quantize_kv_cache import QuantizeKvCache
from llmforge.quantization import kv_cache
from llmforge.quantization.statistics import KvRange, KvRangeDemand, Statistics
from llmforge.rewrite import options
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.verification import probe
from llmforge.verification.verifier import Verifier

from ..models import graphs

needs_kernels = pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not compiled here")
BUDGET = Budget(kld_mean=0.01)
RUNS = probe.random_runs(96)


def lowered(spec: graphs.Llama | None = None, *, packed: bool = False) -> ir.Model:
    model = graphs.llama(spec)
    if packed:
        PackQkv().run(model, graphs.CPU)
    FlashAttention().run(model, graphs.CPU)
    return model


def outcomes(model: ir.Model, runs: Sequence[probe.Run] = RUNS) -> list[probe.StepOutcome]:
    session = probe.open_session(model, probe.InitializerArrays(), threads=1)
    return [outcome for run in runs for outcome in probe.drive(session, run, caches=True)]


def ranges(model: ir.Model, layers: int = 2, runs: Sequence[probe.Run] = RUNS) -> dict[int, KvRange]:
    """Measure what `runs` put into the caches of an fp32 graph."""
    seen = outcomes(model, runs)
    peaks = {
        name: np.max([np.abs(row).max(1) for out in seen for row in out.caches[name]], 0)
        for name in [f"past_key_values.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
    }
    return {
        layer: KvRange(peaks[f"past_key_values.{layer}.key"], peaks[f"past_key_values.{layer}.value"])
        for layer in range(layers)
    }


def context(kv: dict[int, KvRange]) -> Context:
    return Context(graphs.TARGET, Statistics(samples=1, tokens=1, linears={}, kv=kv))


def test_decoder_as_text() -> None:
    model = lowered(graphs.Llama(layers=1))
    peaks = ranges(model, 1)
    changes = QuantizeKvCache(BUDGET).run(model, context(peaks))
    assert graphs.lines(model, ["GroupQueryAttention"]) == [
        "l0_attended, present.0.key, present.0.value = GroupQueryAttention(l0_q, l0_k, l0_v, past_key_values.0.key, "
        "past_key_values.0.value, seqlens_k, total_sequence_length, cos, sin, _, _, _, "
        "past_key_values.0.key.scale, past_key_values.0.value.scale)"
    ]
    [attention] = graphs.find(model, "GroupQueryAttention")
    assert attention.attributes.get_string("k_quant_type") == "PER_CHANNEL"
    assert attention.attributes.get_string("v_quant_type") == "PER_CHANNEL"
    assert attention.attributes.get_int("kv_cache_bit_width") == 8
    caches = [value for value in (*model.graph.inputs, *model.graph.outputs) if ".0." in str(value.name)]
    assert [value.dtype for value in caches] == [ir.DataType.INT8] * 4
    scale = model.graph.initializers["past_key_values.0.key.scale"].const_value
    assert scale is not None
    np.testing.assert_allclose(scale.numpy(), peaks[0].key[None, :, None, :] / 127, rtol=1e-6)
    assert len(changes.rewritten) == 1
    assert not changes.skipped


@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
@pytest.mark.parametrize("packed", [True, False])
def test_caches_hold_the_rounded_keys_and_values(granularity: str, packed: bool) -> None:
    model = lowered(packed=packed)
    peaks, before = ranges(model), outcomes(model)
    step = options.make(QuantizeKvCache, {"budget": {"kld_mean": 0.01}, "granularity": granularity})
    assert step.run(model, context(peaks))
    after = outcomes(model)
    for layer, part in ((0, "key"), (0, "value")):  # later layers read what rounding already moved
        peak = getattr(peaks[layer], part)
        scale = (peak if granularity == "per_channel" else np.full_like(peak, peak.max()))[:, None] / 127
        name = f"past_key_values.{layer}.{part}"
        for one, other in zip(before, after, strict=True):
            for fp32, int8 in zip(one.caches[name], other.caches[name], strict=True):
                assert int8.dtype == np.int8
                error = np.abs(fp32 - int8 * scale)
                assert (error <= 0.501 * scale).all()
                assert error.max() > 0


def worst(model: ir.Model, expected: list[NDArray[np.float32]]) -> float:
    got = [out.logits for out in outcomes(model)]
    return max(float(np.abs(a - b).max()) for a, b in zip(got, expected, strict=True))


def test_channels_are_finer_than_tensors() -> None:
    peaks, expected = ranges(lowered()), [out.logits for out in outcomes(lowered())]
    errors = {}
    for granularity in ("per_channel", "per_tensor"):
        model = lowered()
        options.make(QuantizeKvCache, {"budget": {"kld_mean": 1.0}, "granularity": granularity}).run(
            model, context(peaks)
        )
        errors[granularity] = worst(model, expected)
    assert 0 < errors["per_channel"] < errors["per_tensor"] < 0.2


@pytest.mark.parametrize(
    "spec", [graphs.Llama(window=6), graphs.Llama(rotary_dim=0, bias=True)], ids=["window", "plain"]
)
def test_the_numerics_hold_and_a_second_run_changes_nothing(spec: graphs.Llama, tmp_path: Path) -> None:
    model = lowered(spec, packed=True)
    text = np.random.default_rng(0).integers(0, 96, 40)
    given = context(ranges(model, runs=[*RUNS, *probe.text_runs([text], 96)]))
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[text])
    step = QuantizeKvCache(BUDGET)
    changes = step.run(model, given)
    assert (verifier.check(step, model, changes).kld_mean or 0) > 0
    before = graph.fingerprint(model)
    again = step.run(model, given)
    assert graph.fingerprint(model) == before
    assert not again
    assert [skipped.reason for skipped in again.skipped] == [
        f"cache past_key_values.{layer}.key is INT8, not fp32" for layer in range(2)
    ]


def test_attention_keeps_its_sinks() -> None:
    model = lowered(graphs.Llama(layers=1, sinks=True))
    peaks, expected = ranges(model, 1), [out.logits for out in outcomes(model)]
    assert QuantizeKvCache(BUDGET).run(model, context(peaks))
    [attention] = graphs.find(model, "GroupQueryAttention")
    assert attention.inputs[11] is not None
    assert attention.inputs[11].name == "model.layers.0.self_attn.sinks"
    assert worst(model, expected) < 0.1


def test_what_stays_says_why() -> None:
    canonical = QuantizeKvCache(BUDGET).run(graphs.llama(), graphs.CPU)
    assert [skipped.reason for skipped in canonical.skipped] == ["not lowered to GroupQueryAttention"] * 2
    model = lowered()
    [first, *_] = [skipped.reason for skipped in QuantizeKvCache(BUDGET).run(model, graphs.CPU).skipped]
    assert first == "calibration has no ranges for cache past_key_values.0.key"
    peaks = ranges(model)
    [cache] = [value for value in model.graph.inputs if value.name == "past_key_values.0.value"]
    graph.insert(next(iter(model.graph)), "Identity", [cache])
    changes = QuantizeKvCache(BUDGET).run(model, context(peaks))
    assert len(changes.rewritten) == 1
    [skipped] = changes.skipped
    assert skipped.reason == "cache past_key_values.0.value is not an input of the graph that nothing else reads"


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_a_range_without_a_scale_is_refused(bad: float) -> None:
    model = lowered()
    peaks = ranges(model)
    peaks[1].value[1, 3] = bad
    with pytest.raises(DataError, match="layer 1, value, channel 3 of KV head 1 ranges to"):
        QuantizeKvCache(BUDGET).run(model, context(peaks))


def test_options() -> None:
    step = QuantizeKvCache(BUDGET)
    assert step.demands() == (KvRangeDemand(),)
    assert step.requires == FlashAttention.provides
    for bad in ({"bits": 2}, {"granularity": "per_head"}, {"value_bits": 16}, {"budget": {"kld_mean": 0.0}}):
        with pytest.raises(ValidationError):
            options.make(QuantizeKvCache, {"budget": {"kld_mean": 0.1}, **bad})
    with pytest.raises(ValidationError, match="is for scales per token"):
        options.make(QuantizeKvCache, {"budget": {"kld_mean": 0.1}, "rotation": "hadamard"})
    assert not QuantizeKvCache(BUDGET, granularity="per_token").demands()
    assert QuantizeKvCache(BUDGET, value_bits=4).demands() == (KvRangeDemand(),)
    assert QuantizeKvCache(BUDGET, bits=4, value_bits=8).format.name == "int4-token keys, int8-channel values"
    turned = QuantizeKvCache(BUDGET, value_bits=4, rotation="hadamard").format
    assert (turned.keys.hadamard, turned.values.hadamard) == (False, True)
    with pytest.raises(ValidationError, match="budget"):
        options.make(QuantizeKvCache, {})


WIDE = graphs.Llama(head_dim=32)
SLOTS: list[tuple[dict[str, Any], float]] = [
    ({"granularity": "per_token"}, 0.3),
    ({"granularity": "per_token", "rotation": "hadamard"}, 0.3),
    ({"value_bits": 4}, 2.5),
    ({"value_bits": 4, "granularity": "per_tensor"}, 2.5),
    ({"bits": 4, "rotation": "hadamard"}, 2.5),
    ({"bits": 4, "value_bits": 8}, 2.5),
]


@needs_kernels
@pytest.mark.parametrize(("given", "allowed"), SLOTS, ids=str)
@pytest.mark.parametrize("packed", [True, False])
def test_slots_hold_keys_and_values_with_the_scales_of_tokens(
    given: dict[str, Any], allowed: float, packed: bool
) -> None:
    model = lowered(WIDE, packed=packed)
    peaks, before = ranges(model), outcomes(model)
    step = QuantizeKvCache(BUDGET, **given)
    changes = step.run(model, context(peaks))
    assert [rewritten.node for rewritten in changes.rewritten] == ["l0_attention", "l1_attention"]
    assert "bits per number of keys" in changes.rewritten[0].what
    after = outcomes(model)
    assert 0 < worst(model, [out.logits for out in before]) < allowed
    for part, form in (("key", step.format.keys), ("value", step.format.values)):
        name = f"past_key_values.0.{part}"
        scale = model.graph.initializers.get(f"{name}.scale")
        assert (scale is not None) == form.portable
        scales = None if scale is None else graph.tensor(scale).numpy()[0] if scale.shape != (1,) else None
        if form.portable and scales is None:
            continue
        for one, other in zip(before, after, strict=True):
            for fp32, slots in zip(one.caches[name], other.caches[name], strict=True):
                assert slots.shape == (*fp32.shape[:-1], form.bytes_per_slot(32))
                differing = (slots != kv_cache.write(fp32, form, scales)).mean()
                assert differing < 0.01  # keys behind another rotary embedding: the border between two codes
    assert not step.run(model, context(peaks))
    assert [node.domain for node in graphs.find(model, "GroupQueryAttention")] == []


@needs_kernels
def test_the_numerics_of_slots_hold(tmp_path: Path) -> None:
    model = lowered(replace(WIDE, window=6), packed=True)
    text = np.random.default_rng(0).integers(0, 96, 40)
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[text])
    step = QuantizeKvCache(Budget(kld_mean=0.1), bits=4, rotation="hadamard")
    changes = step.run(model, context({}))
    assert (verifier.check(step, model, changes).kld_mean or 0) > 0


@needs_kernels
def test_a_budget_that_4_bits_break_is_told(tmp_path: Path) -> None:
    model = lowered(WIDE, packed=True)
    text = np.random.default_rng(0).integers(0, 96, 40)
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[text])
    step = QuantizeKvCache(Budget(kld_mean=1e-9), bits=4)
    changes = step.run(model, context({}))
    found = verifier.check(step, model, changes)
    assert found.kld_mean is not None
    assert found.kld_mean > found.budget == 1e-9


@needs_kernels
def test_heads_that_slots_cannot_hold_stay_and_say_why() -> None:
    def reason(head_dim: int, **given: Any) -> str:
        changes = QuantizeKvCache(BUDGET, **given).run(lowered(graphs.Llama(head_dim=head_dim)), context({}))
        assert not changes.rewritten
        return changes.skipped[0].reason

    assert reason(16, bits=4) == "heads have 16 channels; 4 bits need a multiple of 32"
    assert reason(32, value_bits=4) == "calibration has no ranges for cache past_key_values.0.key"


def test_slots_are_refused_where_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="quantize-kv-cache with int4-token: target l4 runs no ONNX Runtime on"):
        QuantizeKvCache(BUDGET, bits=4).run(lowered(WIDE), Context(target=targets.load("l4")))
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(EnvironmentLacks, match="are not compiled in this installation"):
        QuantizeKvCache(BUDGET, granularity="per_token").run(lowered(WIDE), graphs.CPU)


def test_targets_without_the_kernel_are_refused() -> None:
    rtx = targets.load("l4").model_copy(update={"name": "rtx", "engines": ("tensorrt-rtx",)})
    with pytest.raises(UnsupportedError, match="quantize-kv-cache: target rtx runs tensorrt-rtx; int8 caches are"):
        QuantizeKvCache(BUDGET).run(lowered(), Context(target=rtx))
