"""quantize-fp4: NVFP4 weights and activations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.base.errors import DataError, UnsupportedError
from llmforge.ir import graph, operators
from llmforge.ir.operators.canonical import Fp4Linear
from llmforge.passes import LowerPrecision, QuantizeFp4
from llmforge.quantization.statistics import InputRange, InputRangeDemand, Statistics
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.verification.verifier import Verifier

from ..models import graphs
from .test_quantize_channels import measured

LOOSE = Budget(kld_mean=1.0)
RTX_5090 = targets.load("rtx-5090")
SIZES = graphs.Llama(layers=1, mlp=64)
TEXT = np.random.default_rng(0).integers(0, 96, 24)


def context(inputs: dict[str, InputRange], target: targets.Target = RTX_5090) -> Context:
    return Context(target, Statistics(samples=1, tokens=1, linears={}, kv={}, inputs=inputs))


def quantize(**changes: object) -> QuantizeFp4:
    return QuantizeFp4(**{"budget": LOOSE, **changes})  # type: ignore[arg-type]


def test_every_layer_that_was_measured_is_rewritten() -> None:
    model = graphs.llama(SIZES)
    step = quantize(exclude=("*.down_proj.*",))
    assert step.demands() == (InputRangeDemand(),)
    ranges = measured(model, TEXT)
    changes = step.run(model, context(ranges))
    assert len(changes.rewritten) == 6
    assert {each.node: each.reason for each in changes.skipped} == {
        "l0_down_node": "model.layers.0.mlp.down_proj.weight is excluded by '*.down_proj.*'"
    }
    first = Fp4Linear.all(model)[0]
    assert first.codes.dtype == ir.DataType.FLOAT4E2M1
    assert graph.dims(first.codes) == (48, 64)
    assert graph.dims(first.scales) == (3, 64)
    assert graph.sources(first.codes) == ["model.layers.0.self_attn.q_proj.weight"]
    peak = ranges["model.layers.0.self_attn.q_proj.weight"].peaks.max()
    assert graph.tensor(first.input_scale).numpy() == pytest.approx(peak / 6 / 448)
    query, key, value, *_ = layers = Fp4Linear.all(model)
    assert query.weight_scale is key.weight_scale is value.weight_scale
    assert query.input_scale is key.input_scale is value.input_scale
    assert len({layer.weight_scale for layer in layers}) == 3  # q, k and v; o; gate and up
    before = graph.fingerprint(model)
    assert not step.run(model, context(ranges))
    assert graph.fingerprint(model) == before


def test_the_verifier_measures_it(tmp_path: Path) -> None:
    losses = []
    for budget in (1.0, 1e-7):
        model = graphs.llama(SIZES)
        verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[TEXT], threads=1)
        step = quantize(budget=Budget(kld_mean=budget))
        changes = step.run(model, context(measured(model, TEXT)))
        losses.append(verifier.check(step, model, changes).kld_mean)
    for loss in losses:  # above the second budget, too, of which the build decides
        assert loss is not None
        assert 1e-5 < loss < 0.2


def test_half_precision_keeps_scales_in_fp32(tmp_path: Path) -> None:
    model = graphs.llama(SIZES)
    quantize().run(model, context(measured(model, TEXT)))
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[TEXT], threads=1)
    step = LowerPrecision(budget=Budget(kld_mean=0.05), dtype="fp16")
    verifier.check(step, model, step.run(model, context({})))
    operators.complete_dtypes(model)
    for layer in Fp4Linear.all(model):
        assert layer.x.dtype == layer.output.dtype == ir.DataType.FLOAT16
        assert layer.weight_scale.dtype == layer.input_scale.dtype == ir.DataType.FLOAT


def test_widths_without_blocks_and_inputs_without_ranges() -> None:
    model = graphs.llama(graphs.Llama(layers=1))  # mlp: 56
    ranges = measured(model, TEXT)
    skipped = {each.node: each.reason for each in quantize().run(model.clone(), context(ranges)).skipped}
    assert skipped == {"l0_down_node": "its 56 input features are not a multiple of 16"}
    assert not quantize().run(model.clone(), context({}))
    ranges["model.layers.0.self_attn.o_proj.weight"] = InputRange(np.zeros(64, np.float32))
    with pytest.raises(DataError, match="ranges to 0 on the calibration text"):
        quantize().run(model, context(ranges))


@pytest.mark.parametrize(
    ("target", "reason"),
    [("rtx-4090", "does not compute in fp4"), ("cpu-avx2", "no CPU multiplies fp4")],
)
def test_devices_without_fp4_are_refused(target: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason) as caught:
        quantize().run(graphs.llama(SIZES), context({}, targets.load(target)))
    assert caught.value.hint
