"""pack-gate-up: the gate and up projections of a gated MLP become one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmforge.ir import graph, operators
from llmforge.ir.operators.record import Stage
from llmforge.passes import pack_gate_up
from llmforge.passes.pack_gate_up import PackGateUp

from ..models import graphs

MLP = "model.layers.0.mlp"


def weight(model: ir.Model, name: str) -> np.ndarray:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()


def test_decoder_as_text(tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    before = np.concatenate([weight(model, f"{MLP}.{part}_proj.weight") for part in ("gate", "up")], axis=1)
    changes, _ = graphs.prove(PackGateUp(), model, tmp_path)
    assert graphs.lines(model, ["Split", "Sigmoid", "Mul"]) == [
        f"l0_gate, l0_up = Split({MLP}.gate_up_proj, split_56_56)",
        "l0_sigmoid = Sigmoid(l0_gate)",
        "l0_active = Mul(l0_gate, l0_sigmoid)",
        "l0_gated = Mul(l0_active, l0_up)",
    ]
    assert graphs.lines(model, ["MatMul"])[4] == f"{MLP}.gate_up_proj = MatMul(l0_normed2, {MLP}.gate_up_proj.weight)"
    assert [change.node for change in changes.rewritten] == ["l0_gate_node"]
    assert graph.sources(model.graph.initializers[f"{MLP}.gate_up_proj.weight"]) == [
        f"{MLP}.gate_proj.weight",
        f"{MLP}.up_proj.weight",
    ]
    np.testing.assert_array_equal(weight(model, f"{MLP}.gate_up_proj.weight"), before)


@pytest.mark.parametrize("activation", ["Gelu", "Relu", "Tanh"])
def test_other_activations_are_packed(activation: str, tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(activation=activation))
    changes, _ = graphs.prove(PackGateUp(), model, tmp_path)
    assert len(changes.rewritten) == 2


def test_factors_may_stand_the_other_way_round(tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    gated = next(node for node in model.graph if node.name == "l0_gated_node")
    active, up = gated.inputs
    gated.replace_input_with(0, up)
    gated.replace_input_with(1, active)
    graphs.prove(PackGateUp(), model, tmp_path)
    assert graphs.lines(model, ["Split"]) == [f"l0_gate, l0_up = Split({MLP}.gate_up_proj, split_56_56)"]


@pytest.mark.parametrize(
    ("node", "index", "value", "reason"),
    [
        ("l0_up_node", 0, "embedded", "they read different tensors: l0_normed2, embedded"),
        ("l0_up_node", 1, f"{MLP}.gate_proj.weight", f"initializer {MLP}.gate_proj.weight has other readers"),
        ("l0_gated_node", 1, "l0_sigmoid", "l0_sigmoid does not come from a linear layer"),
    ],
)
def test_non_matches_say_why(node: str, index: int, value: str, reason: str) -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    values = {v.name: v for n in model.graph for v in n.outputs} | dict(model.graph.initializers)
    next(n for n in model.graph if n.name == node).replace_input_with(index, values[value])
    changes = PackGateUp().run(model, graphs.CPU)
    assert not changes
    assert [(skipped.node, skipped.reason) for skipped in changes.skipped] == [("l0_gated_node", reason)]


def test_a_packed_mlp_is_skipped_with_a_reason() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    PackGateUp().run(model, graphs.CPU)
    changes = PackGateUp().run(model, graphs.CPU)
    assert not changes
    assert changes.skipped[0].reason == "l0_gate does not come from a linear layer"


@pytest.mark.parametrize("activation", ["silu", "Gelu", "Relu", "Sigmoid", "Softplus", "Tanh"])
@pytest.mark.parametrize("how", ["com.microsoft", "my.domain", "two inputs"])
def test_what_only_has_the_name_of_an_activation_is_left_alone(activation: str, how: str) -> None:
    model = graphs.llama(graphs.Llama(layers=1, activation=activation))
    [node] = graphs.find(model, "Sigmoid" if activation == "silu" else activation)
    if how == "two inputs":
        node.resize_inputs(2)
        node.replace_input_with(1, node.inputs[0])
    else:
        node.domain = how
    before = graph.fingerprint(model)
    changes = PackGateUp().run(model, graphs.CPU)
    assert changes.rewritten == []
    assert graph.fingerprint(model) == before


def test_the_dialect_has_every_activation_that_is_looked_for() -> None:
    for activation in pack_gate_up.ACTIVATIONS:
        assert operators.TABLE[activation.identity] is activation
        assert activation.stage is Stage.DIALECT
        assert [field.name for field in activation.inputs] == ["x"]
