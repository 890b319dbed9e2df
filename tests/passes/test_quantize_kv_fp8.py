"""quantize-kv-fp8: keys and values in fp8, as servers cache them."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from llmforge.base.errors import DataError
from llmforge.ir import graph
from llmforge.ir.operators.canonical import Attention
from llmforge.ir.operators.standard import DequantizeLinear, QuantizeLinear
from llmforge.passes import FlashAttention, QuantizeKvFp8
from llmforge.quantization.statistics import KvRange, KvRangeDemand, Statistics
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.verification.verifier import Verifier

from ..models import graphs
from .test_quantize_kv_cache import context, outcomes, ranges

STEP = QuantizeKvFp8(budget=Budget(kld_mean=1.0))


def test_caches_hold_what_fp8_does() -> None:
    model = graphs.llama()
    peaks, before = ranges(model), outcomes(model)
    assert STEP.demands() == (KvRangeDemand(),)
    changes = STEP.run(model, context(peaks))
    assert len(changes.rewritten) == len(peaks)
    after = outcomes(model)
    for part in ("key", "value"):  # later layers read what rounding already moved
        scale = np.float32(getattr(peaks[0], part).max()) / np.float32(448)
        name = f"past_key_values.0.{part}"
        for one, other in zip(before, after, strict=True):
            for plain, rounded in zip(one.caches[name], other.caches[name], strict=True):
                codes = np.clip(plain / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
                assert np.array_equal(rounded, codes.astype(np.float32) * scale)
                assert not np.array_equal(rounded, plain)


def test_keys_are_rounded_behind_their_rotary_embedding() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    kv = {0: KvRange(np.full((2, 8), 3.0, np.float32), np.full((2, 8), 5.0, np.float32))}
    STEP.run(model, context(kv))
    [attention] = Attention.all(model)
    for value, peak in ((attention.k, 3), (attention.v, 5)):
        back = DequantizeLinear.made(value)
        assert back is not None
        assert graph.tensor(back.scales).numpy() == np.float32(peak) / np.float32(448)
        assert (codes := QuantizeLinear.made(back.codes)) is not None
        assert (codes.x.name or "").endswith("k_rotary" if peak == 3 else "v")
    before = graph.fingerprint(model)
    assert [each.reason for each in STEP.run(model, context(kv)).skipped] == ["its keys are rounded already"]
    assert graph.fingerprint(model) == before


def test_what_it_leaves_alone() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    [skipped] = STEP.run(model, Context(graphs.TARGET, Statistics(samples=1, tokens=1, linears={}, kv={}))).skipped
    assert skipped.reason == "calibration has no ranges for layer 0"
    FlashAttention().run(model, graphs.CPU)
    [skipped] = STEP.run(model, context(ranges(model, 1))).skipped
    assert skipped.reason == "lowered to GroupQueryAttention already; put quantize-kv-fp8 before flash-attention"


@pytest.mark.parametrize("peak", [0.0, np.inf, np.nan])
def test_a_layer_without_a_range_is_refused(peak: float) -> None:
    empty = np.full((2, 8), peak, np.float32)
    with pytest.raises(DataError, match="quantize-kv-fp8: layer 0: a key ranges to") as caught:
        STEP.run(graphs.llama(graphs.Llama(layers=1)), context({0: KvRange(empty, empty)}))
    assert "more calibration text" in (caught.value.hint or "")


def test_the_numerics_hold(tmp_path: Path) -> None:
    model = graphs.llama()
    text = np.random.default_rng(0).integers(0, 96, 40)
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[text])
    changes = STEP.run(model, context(ranges(model)))
    verifier.check(STEP, model, changes)
    lowered = FlashAttention()
    verifier.check(lowered, model, lowered.run(model, graphs.CPU))
