"""What a graph says of its routers: which nodes they are, and that their weights are not negative."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import onnx_ir as ir
import pytest

from llmforge.ir import graph, routing

HEAD = """
<ir_version: 12, opset_import: ["" : 24, "llmforge" : 1]>
layer (float[batch, sequence, 8] h, float[8, 4] w, float[4, 8, 6] up, float[4, 3, 8] down)
    => (float[batch, sequence, 8] y)
<int64[1] k = {2}, int64[1] last = {-1}, float half = {0.5}, float minus = {-0.5}, float nought = {0}>
"""
EXPERTS = """
    [experts] y = llmforge.MoE <
        activation = "silu", gated = 1, interleaved = 0, alpha = 1.0, beta = 0.0, limit = 0.0
    > (x, ids, mixing, up, down)
"""


def parse(body: str) -> ir.Model:
    return ir.from_onnx_text(HEAD + "{" + body + "}")


def test_a_router_is_what_only_ids_and_weights_depend_on() -> None:
    model = parse(
        """
        [before] p = MatMul (h, w)
        [norm] x = Relu (h)
        [deep] a = MatMul (x, w)
        [gate] s = Softmax <axis = -1> (a)
        [top] values, ids = TopK (s, k)
        [total] sum = ReduceSum (values, last)
        [share] mixing = Div (values, sum)
        """
        + EXPERTS
    )
    found = routing.routers(model)
    assert [node.name for node in model.graph if node in found] == ["deep", "gate", "top", "total", "share"]
    assert {node.name for node in found.values()} == {"experts"}


def test_a_router_may_read_something_else_than_the_experts_do() -> None:
    model = parse(
        """
        [norm] x = Relu (h)
        [own_norm] z = Tanh (h)
        [gate] a = MatMul (z, w)
        [top] mixing, ids = TopK (a, k)
        """
        + EXPERTS
    )
    assert {node.name for node in routing.routers(model)} == {"own_norm", "gate", "top"}


@pytest.mark.parametrize(
    ("body", "certain"),
    [
        ("v = Softmax <axis = -1> (h)", True),
        ("a = Sigmoid (h) v, i = TopK (a, k)", True),
        ("a = Sigmoid (h) b = Mul (a, half) v = Add (b, nought)", True),
        ("a = Sigmoid (h) b = Mul (a, minus) v = Add (b, half)", False),
        ("a = Sigmoid (h) v = Sub (a, half)", False),
        ("v = Mul (h, h)", True),
        ("v = Max (h, nought)", True),
        ("v = Max (h, minus)", False),
        ("v = Clip (h, nought, half)", True),
        ("a = Sigmoid (h) v = Clip (a, , minus)", False),
        ("c = Greater (h, nought) a = Sigmoid (h) v = Where (c, a, nought)", True),
        ("c = Greater (h, nought) a = Sigmoid (h) v = Where (c, a, h)", False),
        ("v, i = TopK (h, k)", False),
        ("a = Softmax <axis = -1> (h) v = MatMul (a, w)", False),
        ("v = Identity (h)", False),
    ],
)
def test_signs(body: str, certain: bool) -> None:
    model = ir.from_onnx_text(HEAD.replace("y)", "v)") + "{" + body + "}")
    assert routing.never_negative(model.graph.outputs[0]) is certain


def test_large_and_missing_constants_are_not_looked_at() -> None:
    model = parse("[norm] y = Relu (h)")
    big = graph.initializer(model, "big", np.ones(routing._READ_AT_MOST + 1, np.float32))
    assert not routing.never_negative(big)
    assert routing.never_negative(graph.initializer(model, "small", np.ones(4, np.float32)))
    assert not routing.never_negative(model.graph.inputs[0])
    assert not routing.never_negative(None)


@pytest.mark.parametrize(
    ("operator", "index", "k", "share"),
    [
        (("llmforge", "MoE"), 3, None, Fraction(2, 8)),
        (("llmforge", "MoE"), 6, None, Fraction(2, 8)),
        (("com.microsoft", "MoE"), 2, 3, Fraction(3, 8)),
        (("com.microsoft", "QMoE"), 12, 3, Fraction(3, 8)),
        (("com.microsoft", "QMoE"), 6, 9, Fraction(1)),
        (("com.microsoft", "QMoE"), 14, 3, Fraction(1)),
        (("", "MatMul"), 3, None, Fraction(1)),
    ],
)
def test_a_token_reads_the_experts_that_it_chooses(
    operator: tuple[str, str], index: int, k: int | None, share: Fraction
) -> None:
    weight = ir.val("weight", ir.DataType.FLOAT, [8, 4, 4])
    inputs: list[ir.Value | None] = [None] * 15
    inputs[index], inputs[1] = weight, ir.val("ids", ir.DataType.INT64, ["batch", "sequence", 2])
    node = ir.Node(*operator, inputs, ir.convenience.convert_attributes({} if k is None else {"k": k}))
    assert routing.share_read(weight) == share
    ir.Node("", "Neg", [weight])  # reads all of it
    assert routing.share_read(weight) == 1
    assert node.inputs[index] is weight
