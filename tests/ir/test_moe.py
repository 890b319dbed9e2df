from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from llmforge.base.errors import VerificationError
from llmforge.ir import dialect, graph
from llmforge.ir.operators.canonical import MOE_ACTIVATIONS

from ..samples import references
from .test_dialect import decoder, node

BATCH, SEQUENCE, HIDDEN, INNER, EXPERTS, TOP = 2, 3, 32, 6, 5, 2
TEXT = f"""
<ir_version: 10, opset_import: ["" : 24, "llmforge" : 1]>
experts (float[batch, sequence, {HIDDEN}] x, int64[batch, sequence, {TOP}] ids, float[batch, sequence, {TOP}] mixing)
    => (float[batch, sequence, {HIDDEN}] y)
{{
    [experts] y = llmforge.MoE <
        activation = "silu", gated = 1, interleaved = 0, alpha = 1.0, beta = 0.0, limit = 0.0
    > (x, ids, mixing)
}}
"""
FORM: dict[str, Any] = {"activation": "silu", "gated": 1, "interleaved": 0, "alpha": 1.0, "beta": 0.0, "limit": 0.0}
Weights = dict[str, NDArray[np.float32]]


def matrices(*, gated: int, biases: bool) -> Weights:
    rng = np.random.default_rng(0)
    wide = INNER * (1 + gated)
    shapes = {"up": (EXPERTS, HIDDEN, wide), "down": (EXPERTS, INNER, HIDDEN)}
    shapes |= {"up_bias": (EXPERTS, wide), "down_bias": (EXPERTS, HIDDEN)} if biases else {}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def model(form: dict[str, Any], weights: Weights) -> ir.Model:
    made = ir.from_onnx_text(TEXT)
    member = made.graph[0]
    values = [graph.initializer(made, name, array) for name, array in weights.items()]
    inputs = [*member.inputs, *values]
    (y,) = graph.insert(member, "MoE", inputs, form, domain="llmforge", name="made")
    graph.replace_value(member.outputs[0], y)
    graph.drop_unused(made)
    return made


def session(made: ir.Model) -> ort.InferenceSession:
    return ort.InferenceSession(ir.to_proto(made).SerializeToString(), providers=["CPUExecutionProvider"])


def step(batch: int, sequence: int, *, scale: float = 1.0) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(1)
    tokens = batch * sequence
    ids = np.stack([rng.permutation(EXPERTS)[:TOP] for _ in range(tokens)])
    return {
        "x": scale * rng.standard_normal((batch, sequence, HIDDEN)).astype(np.float32),
        "ids": ids.reshape(batch, sequence, TOP),
        "mixing": rng.random((batch, sequence, TOP)).astype(np.float32),
    }


FORMS = [
    *({**FORM, "activation": activation} for activation in MOE_ACTIVATIONS),
    *({**FORM, "activation": activation, "gated": 0} for activation in MOE_ACTIVATIONS),
    {**FORM, "alpha": 1.702},
    {**FORM, "interleaved": 1, "alpha": 1.702, "beta": 1.0, "limit": 2.0},
    {**FORM, "activation": "gelu", "limit": 1.5},
]


@pytest.mark.parametrize(("form", "biases"), list(product(FORMS, (False, True))))
def test_the_expansion_computes_what_the_reference_does(form: dict[str, Any], biases: bool) -> None:
    weights = matrices(gated=form["gated"], biases=biases)
    expanded = dialect.expand(model(form, weights))
    assert {member.domain for member in expanded.graph.all_nodes()} == {""}
    run = session(expanded)
    for batch, sequence in ((BATCH, SEQUENCE), (1, 1), (1, 7)):
        feeds = step(batch, sequence)
        expected = references.moe(*feeds.values(), *weights.values(), **form)
        (got,) = run.run(None, feeds)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_limits_hold_far_beyond_them() -> None:
    form = {**FORM, "interleaved": 1, "limit": 1.0, "beta": 1.0}
    weights = matrices(gated=1, biases=False)
    feeds = step(1, 2, scale=1e4)
    (got,) = session(dialect.expand(model(form, weights))).run(None, feeds)
    np.testing.assert_allclose(got, references.moe(*feeds.values(), *weights.values(), **form), rtol=0, atol=1e-4)
    assert np.abs(got).max() < 100  # at most 2·I·top_k times a weight


def test_an_expert_chosen_twice_counts_twice() -> None:
    weights = matrices(gated=1, biases=True)
    feeds = step(1, 2)
    feeds["ids"][:] = 3
    (got,) = session(dialect.expand(model(FORM, weights))).run(None, feeds)
    once = {**feeds, "ids": feeds["ids"][..., :1], "mixing": feeds["mixing"].sum(-1, keepdims=True)}
    np.testing.assert_allclose(got, references.moe(*once.values(), *weights.values(), **FORM), rtol=0, atol=1e-4)


def test_the_expansion_survives_cloning_and_keeps_names_apart() -> None:
    expanded = dialect.expand(model(FORM, matrices(gated=1, biases=False)))
    again = expanded.clone()
    assert graph.fingerprint(again) == graph.fingerprint(expanded)
    feeds = step(2, 2)
    np.testing.assert_array_equal(session(again).run(None, feeds)[0], session(expanded).run(None, feeds)[0])
    names = [value.name for member in expanded.graph.all_nodes() for value in member.outputs]
    assert len(set(names)) == len(names)


def test_weights_of_the_expansion_are_shared_not_copied() -> None:
    canonical = model(FORM, matrices(gated=1, biases=False))
    expanded = dialect.expand(canonical)
    assert expanded.graph.initializers["up"].const_value is canonical.graph.initializers["up"].const_value


# The verifier ------------------------------------------------------------------------------------------------------


def checked(form: dict[str, Any], weights: Weights) -> ir.Model:
    """A decoder of one layer whose attention's output goes through experts, chosen by the model's own ids."""
    made = decoder()
    chosen = node(made, "rows")
    y = chosen.inputs[0]
    assert y is not None
    y.shape = ir.Shape(["batch", "sequence", HIDDEN])
    axis = graph.initializer(made, "axis", np.array([-1], np.int64))
    ids = next(value for value in made.graph.inputs if value.name == "input_ids")
    (each,) = graph.insert(chosen, "Unsqueeze", [ids, axis], name="each")
    (part,) = graph.insert(chosen, "ReduceSum", [y, axis], name="part")
    each.name, part.name = "each", "part"
    for value, kind, size in ((each, ir.DataType.INT64, 1), (part, ir.DataType.FLOAT, 1)):
        value.dtype, value.shape = kind, ir.Shape(["batch", "sequence", size])
    values = [graph.initializer(made, name, array) for name, array in weights.items()]
    (out,) = graph.insert(chosen, "MoE", [y, each, part, *values], form, domain="llmforge", name="experts")
    out.name = "mixed"
    chosen.replace_input_with(0, out)
    return made


@pytest.mark.parametrize("biases", [False, True])
def test_check_accepts_experts_and_no_attribute_of_none(biases: bool) -> None:
    made = checked(FORM, matrices(gated=1, biases=biases))
    dialect.check(made)
    node(made, "experts").attributes["gates"] = ir.AttrInt64("gates", 1)
    with pytest.raises(VerificationError, match="attribute 'gates' is unknown"):
        dialect.check(made)


@pytest.mark.parametrize(
    ("form", "change", "reason"),
    [
        ({"activation": "mish"}, {}, "activation 'mish' is unknown; known are silu, gelu, gelu_tanh, relu, relu2"),
        ({"gated": 2}, {}, "gated, interleaved must be 0 or 1"),
        ({"limit": -1.0}, {}, "limit must not be negative"),
        ({"gated": 0, "beta": 1.0}, {"up": (EXPERTS, HIDDEN, INNER)}, "limit and beta are of gates"),
        ({}, {"up": (EXPERTS, HIDDEN, INNER)}, "up has size 6 along axis 2, must have 12"),
        ({}, {"up": (EXPERTS, HIDDEN - 1, 2 * INNER)}, "x has size 32 along axis -1, must have 31"),
        ({}, {"down": (EXPERTS + 1, INNER, HIDDEN)}, "down has size 6 along axis 0, must have 5"),
        ({}, {"up": (HIDDEN, 2 * INNER)}, r"input 'up': has shape \[32, 12\], must have rank 3"),
        ({}, {"up_bias": (EXPERTS, 2 * INNER)}, "one of two biases is missing"),
    ],
)
def test_check_refuses_experts_that_do_not_fit(
    form: dict[str, Any], change: dict[str, tuple[int, ...]], reason: str
) -> None:
    weights = matrices(gated=1, biases=False)
    weights |= {name: np.zeros(shape, np.float32) for name, shape in change.items()}
    with pytest.raises(VerificationError, match=rf"node 'experts': .*{reason}"):
        dialect.check(checked({**FORM, **form}, weights))
