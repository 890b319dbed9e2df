"""Weights that are sliced, turned and put together are one tensor, which is read when it is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph, moved_weights
from llmforge.passes import FuseExperts, QuantizeWeights
from llmforge.rewrite.pass_base import Budget

from ..models import graphs
from ..passes.test_fuse_experts import routed, run
from ..samples import references
from .test_moe import FORM, matrices, step


def apart(weights: dict[str, Any]) -> ir.Model:
    """Hold experts as DBRX does: gate and up as rows of a matrix each, down with rows that belong to none."""
    made = routed(FORM, weights)
    [layer] = graphs.find(made, "MoE")
    up, down = (np.asarray(weights[name], np.float32) for name in ("up", "down"))  # [E, H, 2·I], [E, I, H]
    count, hidden, wide = up.shape
    held = {
        "gate.weight": up[..., : wide // 2].transpose(0, 2, 1).reshape(-1, hidden),
        "up.weight": up[..., wide // 2 :].transpose(0, 2, 1).reshape(-1, hidden),
        "down.weight": np.concatenate([down, np.ones((2, *down.shape[1:]), np.float32)]),
    }
    values = {name: graph.initializer(made, name, array.copy(), [name]) for name, array in held.items()}

    def add(op_type: str, inputs: list[ir.Value], shape: tuple[int, ...], **attributes: Any) -> ir.Value:
        [value] = graph.insert(layer, op_type, inputs, attributes)
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
        return value

    def numbers(*given: int) -> ir.Value:
        return graph.initializer(made, "numbers", np.array(given, np.int64))

    rows = (count, wide // 2, hidden)
    parts = [add("Reshape", [values[name], numbers(*rows)], rows) for name in ("gate.weight", "up.weight")]
    whole = add("Concat", parts, (count, wide, hidden), axis=1)
    layer.replace_input_with(3, add("Transpose", [whole], up.shape, perm=(0, 2, 1)))
    bounds = [numbers(0), numbers(count), numbers(0)]
    layer.replace_input_with(4, add("Slice", [values["down.weight"], *bounds], down.shape))
    graph.drop_unused(made)
    return made


def test_experts_are_fused_and_quantized_as_if_they_were_held_as_usual() -> None:
    weights = matrices(gated=1, biases=False)
    feeds = step(2, 3)
    expected = references.moe(*feeds.values(), *weights.values(), **FORM)
    made = apart(weights)
    changes = FuseExperts().run(made, graphs.CPU)
    assert not changes.skipped
    assert not graphs.find(made, "Concat")
    np.testing.assert_allclose(run(made, feeds), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_nothing_is_left_of_a_layer_that_stays() -> None:
    made = apart(matrices(gated=1, biases=False))
    before = graph.fingerprint(made)
    quantize = QuantizeWeights(budget=Budget(kld_mean=1), method="rtn", bits=3)
    changes = quantize.run(made, graphs.CPU)
    assert not changes.rewritten
    assert graph.fingerprint(made) == before
    [note] = changes.notes
    assert "million weights: QMoE has 4 and 8 bits, not 3" in note


def test_other_nodes_are_not_computed() -> None:
    made = apart(matrices(gated=1, biases=False))
    [layer] = graphs.find(made, "MoE")
    up = layer.inputs[3]
    assert up is not None
    found = moved_weights.held(up)
    assert found is not None
    tensor, sources = found
    assert sources == ["gate.weight", "up.weight"]
    assert tensor.numpy().shape == graph.dims(up)
    assert moved_weights.held(made.graph.initializers["up.weight"]) is None
    [turned] = graph.insert(layer, "Neg", [up])
    turned.type, turned.shape = up.type, up.shape
    assert moved_weights.held(turned) is None
