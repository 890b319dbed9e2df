"""fuse-experts: experts as ONNX Runtime's own kernel, and what that kernel really computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from llmforge import targets
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import dialect, graph
from llmforge.passes.fuse_experts import FuseExperts
from llmforge.rewrite.pass_base import Context
from llmforge.trace import trace

from ..ir.test_moe import EXPERTS, FORM, HIDDEN, INNER, TOP, Weights, matrices, model, step
from ..models import graphs, zoo
from ..samples import references

FUSED = [
    FORM,
    {**FORM, "alpha": 1.702},
    {**FORM, "interleaved": 1, "alpha": 1.702, "beta": 1.0, "limit": 2.0},
    *({**FORM, "activation": activation, "gated": 0} for activation in ("silu", "gelu_tanh", "relu")),
]


def routed(form: dict[str, Any], weights: Weights) -> ir.Model:
    """Experts whose weights are provably not negative, and whose tokens nothing else reads: as behind a norm."""
    made = model(form, weights)
    [node] = made.graph
    for index, (op_type, name) in ((0, ("Neg", "minus")), (0, ("Neg", "tokens")), (2, ("Abs", "sizes"))):
        [value] = graph.insert(node, op_type, [node.inputs[index]], name=f"{name}_node")
        like = node.inputs[index]
        assert like is not None
        value.name, value.type, value.shape = name, like.type, like.shape
        node.replace_input_with(index, value)
    return made


def run(made: ir.Model, feeds: dict[str, NDArray[Any]], *, optimize: bool = True, threads: int = 1) -> NDArray[Any]:
    loaded = made.clone()
    for name, value in loaded.graph.initializers.items():
        assert value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy(), name=name)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(loaded).SerializeToString(), options, providers=["CPUExecutionProvider"])
    result: NDArray[Any] = session.run(None, feeds)[0]
    return result


def fused(form: dict[str, Any], weights: Weights) -> ir.Model:
    made = routed(form, weights)
    assert FuseExperts().run(made, graphs.CPU)
    return made


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("form", FUSED)
def test_the_kernel_computes_what_the_reference_does(form: dict[str, Any], biases: bool, optimize: bool) -> None:
    weights = matrices(gated=form["gated"], biases=biases)
    made = fused(form, weights)
    for batch, sequence in ((2, 3), (1, 1), (1, 40)):
        feeds = step(batch, sequence)
        expected = references.moe(*feeds.values(), *weights.values(), **form)
        for threads in (1, 2):
            got = run(made, feeds, optimize=optimize, threads=threads)
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_weights_need_not_add_up_to_one_and_may_be_tiny_or_zero() -> None:
    weights = matrices(gated=1, biases=True)
    made = fused(FORM, weights)
    feeds = step(1, 4)
    feeds["mixing"] = np.array([[[3.0, 2.0], [1e-6, 1.0], [0.0, 0.5], [0.0, 0.0]]], np.float32)
    expected = references.moe(*feeds.values(), *weights.values(), **FORM)
    np.testing.assert_allclose(run(made, feeds), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert not run(made, feeds)[0, 3].any()


def test_an_expert_chosen_twice_counts_twice() -> None:
    weights = matrices(gated=1, biases=True)
    feeds = step(1, 2)
    feeds["ids"][:] = 3
    expected = references.moe(*feeds.values(), *weights.values(), **FORM)
    np.testing.assert_allclose(run(fused(FORM, weights), feeds), expected, rtol=0, atol=1e-4)


def test_limits_hold_far_beyond_them() -> None:
    form = {**FORM, "interleaved": 1, "limit": 1.0, "beta": 1.0}
    weights, feeds = matrices(gated=1, biases=False), step(1, 2, scale=1e4)
    expected = references.moe(*feeds.values(), *weights.values(), **form)
    np.testing.assert_allclose(run(fused(form, weights), feeds), expected, rtol=0, atol=1e-4)


def test_the_graph_as_text() -> None:
    made = fused(FORM, matrices(gated=1, biases=False))
    assert graphs.lines(made, [node.op_type for node in made.graph])[3:] == [
        "made/ids = Unsqueeze(ids, moe.last)",
        "made/weights = Unsqueeze(sizes, moe.last)",
        f"made/Equal = Equal(made/ids, moe.of_{EXPERTS})",
        "made/Where = Where(made/Equal, made/weights, moe.zero)",
        "made/ReduceSum = ReduceSum(made/Where, moe.top_k)",
        f"made/Reshape = Reshape(made/ReduceSum, moe.tokens_of_{EXPERTS})",
        "made/total = ReduceSum(sizes, moe.last)",
        "made/Max = Max(made/Reshape, moe.tiny)",
        "made/Log = Log(made/Max)",
        "made/MoE = MoE(tokens, made/Log, up.rows, _, down.rows)",
        "made/keep = Where(moe.always, made/MoE, tokens)",
        "y = Mul(made/keep, made/total)",
    ]
    [kernel] = graphs.find(made, "MoE")
    assert kernel.domain == "com.microsoft"
    assert {name: attribute.value for name, attribute in kernel.attributes.items()} == {
        "k": TOP,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
    }
    assert graph.dims(made.graph.initializers["up.rows"]) == (EXPERTS, 2 * INNER, HIDDEN)
    assert {"up", "down"}.isdisjoint(made.graph.initializers)


def test_without_the_second_reader_the_kernel_would_overwrite_its_input() -> None:
    """The flaw of onnxruntime 1.31.1 that `keep` is for; when this fails, the flaw is gone and so can `keep` be."""
    weights = matrices(gated=1, biases=False)
    made, feeds = fused(FORM, weights), step(1, 3)
    right = run(made, feeds, optimize=False)
    [keep] = [node for node in made.graph if node.name == "made/keep"]
    graph.replace_uses(keep.outputs[0], keep.inputs[1])  # type: ignore[arg-type]
    graph.drop_unused(made)
    assert np.abs(run(made, feeds, optimize=False) - right).max() > 0.1 * np.abs(right).max()


def test_nothing_is_read_before_writing() -> None:
    made = routed(FORM, matrices(gated=1, biases=True))

    def unread() -> ir.TensorProtocol:
        raise AssertionError("a weight was read")

    for name in ("up", "down", "up_bias"):
        value = made.graph.initializers[name]
        assert value.shape is not None
        value.const_value = ir.LazyTensor(unread, ir.DataType.FLOAT, value.shape, name=name)
    assert FuseExperts().run(made, graphs.CPU)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"activation": "gelu"}, "its gate activation is gelu; the kernel has only SiLU"),
        (
            {"activation": "relu2", "gated": 0},
            "its activation is relu2 (alpha 1); the kernel has relu, silu, gelu_tanh",
        ),
        ({"activation": "gelu", "gated": 0}, "its activation is gelu"),
        ({"alpha": 1.5, "gated": 0}, "its activation is silu (alpha 1.5)"),
    ],
)
def test_other_activations_stay_a_loop(form: dict[str, Any], reason: str) -> None:
    given = {**FORM, **form}
    made = routed(given, matrices(gated=given["gated"], biases=False))
    changes = FuseExperts().run(made, graphs.CPU)
    assert not changes
    [skip] = changes.skipped
    assert skip.node == "made"
    assert skip.reason.startswith(reason)
    assert skip.reason.endswith("; experts stay a Loop")


def test_weights_that_may_be_negative_and_shared_matrices_stay_a_loop() -> None:
    weights = matrices(gated=1, biases=False)
    made = model(FORM, weights)  # its weights are an input of the graph
    [skip] = FuseExperts().run(made, graphs.CPU).skipped
    assert skip.reason.startswith("router weights may be negative; the kernel drops such experts")
    made = routed(FORM, weights)
    [node] = graphs.find(made, "MoE")
    graph.insert(node, "Neg", [node.inputs[4]])
    [skip] = FuseExperts().run(made, graphs.CPU).skipped
    assert skip.reason.startswith("down is not an initializer of this node only")


def test_targets_without_the_kernel_are_refused() -> None:
    rtx = targets.load("l4").model_copy(update={"name": "rtx", "engines": ("tensorrt-rtx",)})
    with pytest.raises(UnsupportedError, match="fuse-experts: target rtx runs tensorrt-rtx; MoE is"):
        FuseExperts().run(routed(FORM, matrices(gated=1, biases=False)), Context(rtx))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "gpt-oss",
        "glm4-moe",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "qwen2-moe", "granitemoe")),
    ],
)
def test_traced_models_stay_within_rounding(name: str, tmp_path: Path) -> None:
    """Routers of five makes: softmax before and after the choice, sigmoid with groups and a correction, shared ones."""
    zoo.write(name, tmp_path / "checkpoint")
    made = trace(Checkpoint.open(tmp_path / "checkpoint"))
    layers = sum(node.op_type == "MoE" for node in made.graph)
    changes, proof = graphs.prove(FuseExperts(), made, tmp_path)
    assert len(changes.rewritten) == layers > 0
    assert 0 < proof.largest_difference <= (proof.allowed or 0)
    assert not [node for node in made.graph if (node.domain, node.op_type) == ("llmforge", "MoE")]
    dialect.check(made)
