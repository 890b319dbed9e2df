"""Factors of activations, moved into weights: no bit of what a graph computes moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx_ir as ir
import pytest

from llmforge.base.errors import VerificationError
from llmforge.ir import graph
from llmforge.ir.derived import Derived
from llmforge.ir.operators.standard import MatMul
from llmforge.passes import FuseNorms, PackGateUp, PackQkv
from llmforge.rewrite import smoothing
from llmforge.rewrite.pass_base import Changes, Context, Numerics, Pass, Rewritten
from llmforge.verification import probe
from llmforge.verification.verifier import Verifier

from ..models import graphs


@dataclass(frozen=True)
class Smooth(Pass):
    """Smooth what every linear layer of a layer reads by random factors; `spoil` then does something wrong."""

    name: ClassVar[str] = "smooth"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    spoil: Callable[[ir.Model], None] = lambda model: None

    def run(self, model: ir.Model, context: Context) -> Changes:
        changes, random = Changes(), np.random.default_rng(3)
        for product in MatMul.all(model):
            x = product.x
            if graph.is_constant(product.w) and not str(x.name).endswith((".smoothed", "selected")):
                exponents = random.integers(-6, 12, graph.static(product.w)[0]).astype(np.int8)
                if smoothing.smooth(model, x, exponents) is None:
                    changes.rewritten.append(Rewritten(str(product.node.name), "smoothed"))
        self.spoil(model)
        graph.drop_unused(model)
        return changes


def proved(model: ir.Model, step: Smooth, folder: Path) -> Changes:
    verifier = Verifier(model, promises=graphs.PROMISES, folder=folder, texts=[np.arange(24)], threads=1)
    changes = step.run(model, graphs.CPU)
    verifier.check(step, model, changes)
    return changes


@pytest.mark.parametrize(
    ("spec", "before", "places"),
    [
        (graphs.Llama(), (), 6),  # of two layers: query, key and value; gate and up; down
        (graphs.Llama(bias=True), (), 6),
        (graphs.Llama(), (PackQkv(), PackGateUp()), 6),
        (graphs.Llama(experts=4), (), 2),  # experts read what the router reads, and take no factors
    ],
    ids=["plain", "biases", "packed", "experts"],
)
def test_no_bit_moves(spec: graphs.Llama, before: tuple[Pass, ...], places: int, tmp_path: Path) -> None:
    model = graphs.llama(spec)
    for step in before:
        step.run(model, graphs.CPU)
    assert len(proved(model, Smooth(), tmp_path).rewritten) == places


def test_no_bit_moves_behind_fused_norms() -> None:
    """Which the proof of passes cannot show: a sum is made by the node whose gain differs."""
    [run, *_] = probe.random_runs(96)
    made = []
    for step in (None, Smooth()):
        model = graphs.llama()
        FuseNorms().run(model, graphs.CPU)
        if step is not None:
            assert len(step.run(model, graphs.CPU).rewritten) == 6
        session = probe.open_session(model, probe.InitializerArrays(), 1)
        made.append([outcome.logits.tobytes() for outcome in probe.drive(session, run, caches=False)])
    assert made[0] == made[1]


def test_weights_stay_unread_and_hold_the_factors() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    product = MatMul.all(model)[0]
    weight, gain = graph.tensor(product.w).numpy(), model.graph.initializers["model.layers.0.input_layernorm.weight"]
    exponents = np.arange(48).astype(np.int8) % 7
    assert smoothing.smooth(model, product.x, exponents) is None
    assert isinstance(product.w.const_value, ir.LazyTensor)
    np.testing.assert_array_equal(graph.tensor(product.w).numpy(), weight * 2.0 ** exponents[:, None])
    norm = product.x.producer()
    assert norm is not None
    assert norm.inputs[1] is not None
    np.testing.assert_array_equal(graph.tensor(norm.inputs[1]).numpy(), graph.tensor(gain).numpy() / 2.0**exponents)


def test_what_takes_no_factors_stays_as_it_was() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    before = graph.fingerprint(model)
    named = {str(product.name): product.x for product in MatMul.all(model)}
    ones = np.ones(64, np.int8)
    reason = smoothing.smooth(model, named["l0_o_node"], ones)
    assert reason == "l0_attended is made by Attention, which takes no factors"
    assert graph.fingerprint(model) == before
    experts = graphs.llama(graphs.Llama(layers=1, experts=4))
    router = next(product for product in MatMul.all(experts) if product.name == "l0_routed_node")
    assert smoothing.smooth(experts, router.x, np.ones(48, np.int8)) == "MoE l0_experts_node reads l0_normed2, too"


def _one_side(model: ir.Model) -> None:
    """Leave the factors out of one reader."""
    product = next(each for each in MatMul.all(model) if str(each.w.name).endswith("gate_proj.weight.smoothed"))
    tensor = graph.tensor(product.w)
    assert isinstance(tensor, Derived)
    name = str(tensor.operands[0].name)
    product.w = graph.initializer(model, name, tensor.operands[0], [name])


def _another_feature(model: ir.Model) -> None:
    """Take the factors of one reader in another order."""
    product = next(each for each in MatMul.all(model) if str(each.w.name).endswith("k_proj.weight.smoothed"))
    tensor = graph.tensor(product.w)
    assert isinstance(tensor, ir.LazyTensor)
    values = tensor.numpy().copy()
    values[[0, 1]] *= np.exp2([[1], [-1]])
    product.w = graph.initializer(model, "moved", values.astype(np.float32))


@pytest.mark.parametrize("spoil", [_one_side, _another_feature])
def test_factors_on_one_side_are_caught(spoil: Callable[[ir.Model], None], tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="pass smooth declares exact"):
        proved(graphs.llama(), Smooth(spoil), tmp_path)
