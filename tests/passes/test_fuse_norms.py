"""fuse-norms: residual Add and RMSNormalization become SkipSimplifiedLayerNormalization."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from llmforge import targets
from llmforge.base.errors import UnsupportedError
from llmforge.passes.fuse_norms import FuseNorms
from llmforge.rewrite.pass_base import Context, Numerics

from ..models import graphs

HIDDEN = 16


def block(body: str, terms: str = "float[batch, sequence, 16]", extra: str = "") -> ir.Model:
    """Write a graph around `body`, which makes `y` of the graph inputs `residual` and `branch`."""
    shape = "float[batch, sequence, 16]"
    return graphs.parse(
        '<ir_version: 11, opset_import: ["" : 24]>\n'
        f"block ({shape} residual, {terms} branch) => ({shape} y)\n"
        f"<{shape} total, {shape} normed{extra}>\n{{\n{body}\n}}",
        {name: np.ones(HIDDEN, np.float32) for name in ("weight", "bias") if name in body},
    )


NORM = "[norm] normed = RMSNormalization <epsilon: float = 0.01> (total, weight)\n"


def test_decoder_as_text(tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    ops = ["Add", "RMSNormalization", "SkipSimplifiedLayerNormalization"]
    assert graphs.lines(model, ops) == [
        "l0_normed = RMSNormalization(embedded, model.layers.0.input_layernorm.weight)",
        "l0_sum = Add(embedded, l0_o)",
        "l0_normed2 = RMSNormalization(l0_sum, model.layers.0.post_attention_layernorm.weight)",
        "l0_sum2 = Add(l0_sum, l0_down)",
        "normed = RMSNormalization(l0_sum2, model.norm.weight)",
    ]
    changes, verification = graphs.prove(FuseNorms(), model, tmp_path)
    skip = "SkipSimplifiedLayerNormalization"
    assert graphs.lines(model, ops) == [
        "l0_normed = RMSNormalization(embedded, model.layers.0.input_layernorm.weight)",
        f"l0_normed2, _, _, l0_sum = {skip}(embedded, l0_o, model.layers.0.post_attention_layernorm.weight)",
        f"normed = {skip}(l0_sum, l0_down, model.norm.weight)",
    ]
    assert [change.node for change in changes.rewritten] == ["l0_normed2_node", "normed_node"]
    assert [(skipped.node, skipped.reason) for skipped in changes.skipped] == [
        ("l0_normed_node", "it normalizes the output of Gather embedded_node, not a sum")
    ]
    assert model.opset_imports["com.microsoft"] == 1
    assert verification.numerics is Numerics.ROUNDING


def test_epsilon_is_kept() -> None:
    model = block(f"[add] total = Add (residual, branch)\n{NORM}y = Add (normed, total)")
    assert FuseNorms().run(model, graphs.CPU)
    [fused] = graphs.find(model, "SkipSimplifiedLayerNormalization")
    assert fused.attributes.get_float("epsilon") == pytest.approx(0.01)


def test_default_epsilon_of_onnx_is_written_out() -> None:
    model = block("[add] total = Add (residual, branch)\n[norm] y = RMSNormalization (total, weight)")
    assert FuseNorms().run(model, graphs.CPU)
    [fused] = graphs.find(model, "SkipSimplifiedLayerNormalization")
    assert fused.attributes.get_float("epsilon") == pytest.approx(1e-5)
    assert graphs.lines(model, [fused.op_type]) == [
        "y = SkipSimplifiedLayerNormalization(residual, branch, weight)"  # nothing else reads the sum
    ]


def test_of_two_norms_of_one_sum_the_first_is_fused() -> None:
    model = block(
        f"[add] total = Add (residual, branch)\n{NORM}"
        "[second] other = RMSNormalization (total, weight)\ny = Add (normed, other)",
        extra=", float[batch, sequence, 16] other",
    )
    changes = FuseNorms().run(model, graphs.CPU)
    assert [change.node for change in changes.rewritten] == ["norm"]
    assert [(skipped.node, skipped.reason) for skipped in changes.skipped] == [
        ("second", "its sum is already merged into norm")
    ]


@pytest.mark.parametrize(
    ("body", "terms", "reason"),
    [
        ("[add] total = Add (residual, bias)", "float[16]", "add adds an initializer, not a residual"),
        ("[add] total = Add (residual, branch)", "float[1, 1, 16]", "expected the same known shape of rank 3"),
        ("[add] total = Add (residual, branch)", "float[sequence, 16]", "expected the same known shape of rank 3"),
        ("[mul] total = Mul (residual, branch)", "float[batch, sequence, 16]", "the output of Mul mul, not a sum"),
    ],
)
def test_non_matches_say_why(body: str, terms: str, reason: str) -> None:
    model = block(f"{body}\n{NORM}y = Identity (normed)", terms)
    changes = FuseNorms().run(model, graphs.CPU)
    assert not changes
    [skipped] = changes.skipped
    assert skipped.node == "norm"
    assert reason in skipped.reason


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [("axis: int = 1", "from axis 1 on"), ("stash_type: int = 10", "with stash_type 10; expected fp32")],
)
def test_other_normalizations_stay(attributes: str, reason: str) -> None:
    model = block(f"[add] total = Add (residual, branch)\n[norm] y = RMSNormalization <{attributes}> (total, weight)")
    changes = FuseNorms().run(model, graphs.CPU)
    assert not changes
    assert reason in changes.skipped[0].reason


def test_target_without_onnxruntime_is_refused() -> None:
    target = graphs.TARGET.model_copy(update={"engines": ("tensorrt",)})
    with pytest.raises(UnsupportedError, match=r"fuse-norms: target cpu-avx2 runs tensorrt") as error:
        FuseNorms().run(graphs.llama(), Context(target=target))
    assert error.value.hint == "leave fuse-norms out of the recipe"
    assert targets.load("cpu-avx2").engines == ("onnxruntime",)


LAYER_NORM = "[norm] y = LayerNormalization <epsilon: float = 0.01> (total, weight, shift)\n"


def layer_norm(body: str) -> ir.Model:
    """Write a graph around `body` with vectors of different numbers."""
    shape = "float[batch, sequence, 16]"
    vectors = {"weight": 0.5, "shift": -1.0, "bias": 2.0}
    return graphs.parse(
        '<ir_version: 11, opset_import: ["" : 24]>\n'
        f"block ({shape} residual, {shape} branch) => ({shape} y, {shape} other)\n"
        f"<{shape} total, {shape} biased>\n{{\n{body}\n}}",
        {name: np.linspace(at, at + 1, HIDDEN, dtype=np.float32) for name, at in vectors.items() if name in body},
    )


def run(model: ir.Model) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 3, HIDDEN)).astype(np.float32) for name in ("residual", "branch")}
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(value) for value in session.run(None, feeds)]


@pytest.mark.parametrize(
    ("body", "written"),
    [
        (
            '["sum"] total = Add (residual, branch)\n' + LAYER_NORM + '["after"] other = Relu (total)',
            "y, _, _, total = SkipLayerNormalization(residual, branch, weight, shift)",
        ),
        (
            '["biasing"] biased = Add (branch, bias)\n["sum"] total = Add (residual, biased)\n'
            + LAYER_NORM
            + '["after"] other = Relu (total)',
            "y, _, _, total = SkipLayerNormalization(residual, branch, weight, shift, bias)",
        ),
        (
            '["biasing"] biased = Add (bias, residual)\n["sum"] total = Add (biased, branch)\n'
            + LAYER_NORM.replace(", shift", "")
            + '["after"] other = Relu (total)',
            "y, _, _, total = SkipLayerNormalization(residual, branch, weight, _, bias)",
        ),
        (
            '["biasing"] biased = Add (branch, bias)\n["sum"] total = Add (residual, biased)\n'
            "[norm] y = RMSNormalization <epsilon: float = 0.01> (total, weight)\n"
            '["after"] other = Relu (total)',
            "y, _, _, total = SkipSimplifiedLayerNormalization(residual, branch, weight, bias)",
        ),
        (  # something else reads the biased branch
            '["biasing"] biased = Add (branch, bias)\n["sum"] total = Add (residual, biased)\n'
            + LAYER_NORM
            + '["after"] other = Relu (biased)',
            "y = SkipLayerNormalization(residual, biased, weight, shift)",
        ),
    ],
    ids=["layer-norm", "bias", "bias-of-the-residual", "bias-rms", "shared-bias"],
)
def test_layer_norms_and_biases_are_taken_in(body: str, written: str) -> None:
    model = layer_norm(body)
    expected = run(model)
    assert FuseNorms().run(model, graphs.CPU)
    assert graphs.lines(model, ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"]) == [written]
    for got, wanted in zip(run(model), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)
    assert not FuseNorms().run(model, graphs.CPU)


def test_a_shift_of_another_width_is_left_alone() -> None:
    model = layer_norm('["sum"] total = Add (residual, branch)\n' + LAYER_NORM + '["after"] other = Relu (total)')
    value = model.graph.initializers["shift"]
    value.shape = ir.Shape([1])
    changes = FuseNorms().run(model, graphs.CPU)
    assert [skipped.reason for skipped in changes.skipped] == ["its shift is (1,); expected (16,)"]
