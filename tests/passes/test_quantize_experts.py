"""quantize-experts: int8, fp8 and NVFP4 experts for servers of others: what becomes of a graph, and by what ranges."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.backends.exported_parameters import check_passes
from llmforge.base.errors import DataError, UnsupportedError
from llmforge.ir import graph
from llmforge.ir.operators.canonical import LowPrecisionMoE, MoE
from llmforge.passes import ALL, QuantizeExperts
from llmforge.quantization.low_precision_experts import FORMATS, FormatOfExperts
from llmforge.quantization.statistics import ExpertRangeDemand, InputRange, Statistics
from llmforge.rewrite.pass_base import Budget, Context

from ..ir.test_low_precision_moe import matrices
from ..ir.test_moe import FORM, TEXT
from ..models import graphs

LOOSE = Budget(kld_mean=1.0)
NAMES = ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj")


def made(**form: object) -> ir.Model:
    """One layer of 3 experts, 256 features and 128 inner ones, by the names of a checkpoint."""
    model = ir.from_onnx_text(TEXT.replace("[batch, sequence, 32]", "[batch, sequence, 256]"))
    member = model.graph[0]
    values = [
        graph.initializer(model, name, array, [name])
        for name, array in zip(NAMES, matrices({**FORM, **form}).values(), strict=True)
    ]
    (y,) = graph.insert(member, "MoE", [*member.inputs, *values], {**FORM, **form}, domain="llmforge", name="made")
    graph.replace_value(member.outputs[0], y)
    graph.drop_unused(model)
    return model


def ranges(up: float, down: float) -> Context:
    peaks = dict(zip(NAMES, (up, down), strict=True))
    seen = {name: InputRange(np.array([peak / 2, peak], np.float32), None) for name, peak in peaks.items()}
    return Context(targets.local(), Statistics(0, 0, {}, {}, seen))


@pytest.mark.parametrize("name", FORMATS)
def test_every_layer_is_rewritten_once(name: FormatOfExperts) -> None:
    model, step = made(), QuantizeExperts(budget=LOOSE, format=name)
    changes = step.run(model, ranges(2.0, 8.0))
    assert [each.what for each in changes.rewritten] == [f"{name}, 3 experts, inputs too"]
    [layer] = LowPrecisionMoE.all(model)
    layer.check()
    assert not MoE.all(model)
    assert (layer.group, layer.up.dtype) == (FORMATS[name].group, FORMATS[name].dtype)
    assert [graph.sources(value) for value in (layer.up, layer.down)] == [[each] for each in NAMES]
    assert graph.dims(layer.down_scales) == (3, 128 // layer.group if layer.group else 1, 256)
    if name == "nvfp4":
        assert layer.up_input_scale is not None
        assert layer.down_input_scale is not None
        scales = [graph.tensor(each).numpy() for each in (layer.up_input_scale, layer.down_input_scale)]
        np.testing.assert_allclose(scales, np.array([2.0, 8.0]) / (6 * 448), rtol=1e-6)
    before = graph.fingerprint(model)
    assert not step.run(model, ranges(2.0, 8.0))
    assert graph.fingerprint(model) == before


def test_nvfp4_asks_for_what_both_products_read() -> None:
    assert QuantizeExperts(budget=LOOSE, format="nvfp4").demands() == (ExpertRangeDemand(),)
    assert not QuantizeExperts(budget=LOOSE).demands()


@pytest.mark.parametrize("seen", [ranges(2.0, 0.0), ranges(2.0, float("inf")), graphs.CPU])
def test_nvfp4_needs_a_range(seen: Context) -> None:
    with pytest.raises(DataError, match=r"what made reads ranges to \S+ on the calibration text"):
        QuantizeExperts(budget=LOOSE, format="nvfp4").run(made(), seen)


def test_what_stays_says_why() -> None:
    reasons = [
        QuantizeExperts(budget=LOOSE, format="fp8-block").run(made(interleaved=1), graphs.CPU),
        QuantizeExperts(budget=LOOSE, exclude=("*.experts.down_proj",)).run(made(), graphs.CPU),
    ]
    assert [each.skipped[0].reason for each in reasons] == [
        f"squares of 128 do not divide {NAMES[0]} by gate and by column",
        f"{NAMES[1]} is excluded by '*.experts.down_proj'",
    ]
    model = made()
    model.graph.outputs.append(MoE.all(model)[0].down)
    [skipped] = QuantizeExperts(budget=LOOSE).run(model, graphs.CPU).skipped
    assert skipped.reason == f"{NAMES[1]} has other readers"


def test_engines_of_our_own_do_not_take_it() -> None:
    with pytest.raises(UnsupportedError, match="quantize-experts: only servers of others compute as it says"):
        check_passes("onnxruntime", [QuantizeExperts], ALL)
    check_passes("compressed-tensors", [QuantizeExperts], ALL)
    with pytest.raises(UnsupportedError, match="quantize-experts"):
        check_passes("gguf", [QuantizeExperts], ALL)
