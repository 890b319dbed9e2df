"""quantize-weights on experts: codes are those of the numpy reference, and the kernel computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph
from llmforge.passes.fuse_experts import FuseExperts
from llmforge.passes.quantize_weights import QuantizeWeights
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import Packed, QuantizedMatrix, dequantize, round_to_nearest, stack, unpack
from llmforge.quantization.statistics import Statistics
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.trace import trace

from ..ir import test_moe
from ..ir.test_moe import FORM, Weights
from ..models import graphs, zoo
from ..samples import references
from .test_fuse_experts import routed, run

EXPERTS, HIDDEN, INNER = test_moe.EXPERTS, 64, 48
BUDGET = Budget(kld_mean=5.0)
INTERLEAVED = {**FORM, "interleaved": 1, "alpha": 1.702, "beta": 1.0, "limit": 2.0}
UNGATED = {**FORM, "gated": 0, "activation": "relu"}
EXACT = {"method": "rtn", "accuracy_level": 0, "embedding_bits": 16}


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let graphs of test_moe have widths that blocks of 16 divide."""
    monkeypatch.setattr(test_moe, "HIDDEN", HIDDEN)
    monkeypatch.setattr(test_moe, "INNER", INNER)
    monkeypatch.setattr(test_moe, "TEXT", test_moe.TEXT.replace("32]", f"{HIDDEN}]"))


def scaled(*, gated: int, biases: bool) -> Weights:
    """Random experts whose products have a standard deviation of about one."""
    made = test_moe.matrices(gated=gated, biases=biases)
    return {name: values / np.float32(8) for name, values in made.items()}


def dequantized(weights: Weights, grid: Grid) -> Weights:
    """Round each expert's matrices [K, N] along K with the reference."""
    rounded = {
        name: np.stack(
            [dequantize(round_to_nearest(np.ascontiguousarray(matrix.T), grid)).T for matrix in weights[name]]
        )
        for name in ("up", "down")
    }
    return {**weights, **rounded}


def held(model: ir.Model, name: str) -> NDArray[Any]:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return np.array(tensor.numpy())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("form", [FORM, INTERLEAVED, UNGATED], ids=["halves", "interleaved", "no gates"])
def test_4_bits_compute_with_the_rounded_weights(form: dict[str, Any], biases: bool, symmetric: bool) -> None:
    weights = scaled(gated=form["gated"], biases=biases)
    model = routed(form, weights)
    changes = QuantizeWeights(BUDGET, symmetric=symmetric, block_size=128, **EXACT).run(model, graphs.CPU)
    assert len(changes.rewritten) == 1
    assert not changes.skipped
    rounded = dequantized(weights, Grid(4, 16, symmetric))
    for batch, sequence in ((2, 3), (1, 1), (1, 40)):
        feeds = test_moe.step(batch, sequence)
        expected = references.moe(*feeds.values(), *rounded.values(), **form)
        plain = references.moe(*feeds.values(), *weights.values(), **form)
        for threads in (1, 2):
            got = run(model, feeds, threads=threads)
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        assert np.abs(got - plain).max() > 0.01 * np.abs(plain).max()


@pytest.mark.parametrize(
    "given",
    [{"scales": "fp16"}, {"scales": "int8"}, {"scales": "int8", "codes": "trellis", "symmetric": True}],
    ids=["fp16", "int8", "trellis"],
)
def test_narrow_scales_of_experts_are_fp16(given: dict[str, Any]) -> None:
    weights = scaled(gated=1, biases=True)
    model = routed(FORM, weights)
    step = QuantizeWeights(BUDGET, method="rtn", embedding_bits=16, **given)
    assert len(step.run(model, graphs.CPU).rewritten) == 1
    assert held(model, "up.scales").dtype == np.float16
    feeds = test_moe.step(1, 40)
    rounded = dequantized(weights, Grid(4, 16, step.symmetric, "fp16"))
    expected = references.moe(*feeds.values(), *rounded.values(), **FORM)
    for optimize in (True, False):
        difference = run(model, feeds, optimize=optimize) - expected
        assert 0 < difference.std() < 0.02 * expected.std()


def test_experts_stay_where_their_kernel_has_not_so_many_bits() -> None:
    model = routed(FORM, scaled(gated=1, biases=True))
    [skip] = QuantizeWeights(BUDGET, method="rtn", bits=5).run(model, graphs.CPU).skipped
    assert skip.reason == "QMoE has 4 and 8 bits, not 5; its matrices stay fp32"


@pytest.mark.parametrize("bits", [4, 8])
def test_int8_activations_stay_near(bits: int) -> None:
    """Activations in int8 move the result by 4 % of its deviation at most; the codes are the same."""
    weights = scaled(gated=1, biases=True)
    model = routed(INTERLEAVED, weights)
    assert QuantizeWeights(BUDGET, bits=bits, method="rtn").run(model, graphs.CPU)
    feeds = test_moe.step(1, 40)
    expected = references.moe(*feeds.values(), *dequantized(weights, Grid(bits, 16, False)).values(), **INTERLEAVED)
    difference = run(model, feeds) - expected
    assert 0 < difference.std() < 0.02 * expected.std()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_are_those_of_the_reference(bits: int, symmetric: bool) -> None:
    weights = scaled(gated=1, biases=False)
    model = routed(FORM, weights)
    graph.set_sources(model.graph.initializers["up"], ["experts.gate_up_proj"])
    QuantizeWeights(BUDGET, bits=bits, symmetric=symmetric, method="rtn").run(model, graphs.CPU)
    grid = Grid(bits, 16, symmetric)
    turns = np.arange(2 * INNER).reshape(2, INNER).T.reshape(-1)  # gate, up, gate, up, …
    for name, k, order in (("up", HIDDEN, turns), ("down", INNER, np.arange(HIDDEN))):
        codes, scales = held(model, f"{name}.codes"), held(model, f"{name}.scales")
        assert codes.shape == (EXPERTS, len(order), k * bits // 8)
        assert scales.shape == (EXPERTS, len(order), k // 16)
        for expert in range(EXPERTS):
            points = None if symmetric else held(model, f"{name}.zero_points")[expert]
            packed = codes[expert].reshape(len(order), k // 16, -1)
            got = dequantize(unpack(Packed(packed, scales[expert], points), grid, k))
            expected = dequantize(round_to_nearest(np.ascontiguousarray(weights[name][expert].T[order]), grid))
            np.testing.assert_array_equal(got, expected)
    assert graph.sources(model.graph.initializers["up.codes"]) == ["experts.gate_up_proj"]
    assert {"up", "down"}.isdisjoint(model.graph.initializers)


def test_the_graph_as_text() -> None:
    model = routed(FORM, scaled(gated=1, biases=True))
    changes = QuantizeWeights(BUDGET, method="rtn").run(model, graphs.CPU)
    assert graphs.lines(model, ["QMoE"]) == [
        "y = QMoE(tokens, made/Reshape, up.codes, up.scales, up_bias.rows, down.codes, down.scales, down_bias, "
        "_, _, _, up.zero_points, down.zero_points, _, made/Reshape)"
    ]
    [kernel] = graphs.find(model, "QMoE")
    assert {name: attribute.value for name, attribute in kernel.attributes.items()} == {
        "k": 2,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
        "expert_weight_bits": 4,
        "block_size": 16,
        "accuracy_level": 4,
    }
    [change] = changes.rewritten
    assert change.what == "rtn, 4 bits, blocks of 16, asymmetric, 5 experts, top 2, [96, 64] each"


def test_calibrated_matrices_are_put_in_the_kernels_order() -> None:
    """Calibration hands over rows as the model has them, gates first; its noise tells them from plain rounding."""
    weights, grid = scaled(gated=1, biases=False), Grid(4, 16, False)
    model, random = routed(FORM, weights), np.random.default_rng(5)
    linears: dict[str, QuantizedMatrix] = {}
    moved = dict(weights)
    for name in ("up", "down"):
        noisy = weights[name] + 0.05 * random.standard_normal(weights[name].shape).astype(np.float32)
        linears[name] = stack([round_to_nearest(np.ascontiguousarray(matrix.T), grid) for matrix in noisy])
        moved[name] = dequantize(linears[name]).reshape(EXPERTS, noisy.shape[2], -1).swapaxes(1, 2)
    context = Context(graphs.TARGET, Statistics(samples=1, tokens=1, linears=linears, kv={}))
    changes = QuantizeWeights(BUDGET, accuracy_level=0, embedding_bits=16).run(model, context)
    assert changes.rewritten[0].what.startswith("gptq, 4 bits")
    feeds = test_moe.step(1, 6)
    expected = references.moe(*feeds.values(), *moved.values(), **FORM)
    np.testing.assert_allclose(run(model, feeds), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_each_matrix_is_computed_once_and_nothing_before_writing() -> None:
    model, reads = routed(FORM, scaled(gated=1, biases=False)), []
    for name in ("up", "down"):
        value = model.graph.initializers[name]
        tensor = value.const_value
        assert tensor is not None

        def read(name: str = name, tensor: ir.TensorProtocol = tensor) -> ir.TensorProtocol:
            reads.append(name)
            return tensor

        value.const_value = ir.LazyTensor(read, tensor.dtype, ir.Shape(tensor.shape.numpy()), name=name)
    QuantizeWeights(BUDGET, method="rtn").run(model, graphs.CPU)
    assert reads == []
    for name in ("up", "down"):
        for part in ("codes", "scales", "zero_points"):
            assert held(model, f"{name}.{part}").size
    assert reads == ["up", "down"]


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ({}, {"activation": "gelu"}, "its gate activation is gelu; the kernel has only SiLU; its matrices stay fp32"),
        ({"exclude": ("do*",)}, {}, "down is excluded by 'do*'"),
        ({"method": "gptq"}, {}, "calibration has no result for up"),
    ],
)
def test_what_stays_says_why(options: dict[str, Any], change: dict[str, Any], reason: str) -> None:
    model = routed({**FORM, **change}, scaled(gated=1, biases=False))
    changes = QuantizeWeights(BUDGET, **{"method": "rtn", **options}).run(model, graphs.CPU)
    assert not changes
    assert [(skip.node, skip.reason) for skip in changes.skipped] == [("made", reason)]


def test_widths_that_no_block_divides_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_moe, "INNER", 40)
    model = routed(FORM, scaled(gated=1, biases=False))
    [skip] = QuantizeWeights(BUDGET, method="rtn").run(model, graphs.CPU).skipped
    assert skip.reason == "its widths, 64 and 40, are not divisible into blocks of 16 or more"


def test_fused_experts_come_too_late() -> None:
    model = routed(FORM, scaled(gated=1, biases=False))
    FuseExperts().run(model, graphs.CPU)
    [skip] = QuantizeWeights(BUDGET, method="rtn").run(model, graphs.CPU).skipped
    assert skip.reason == "already fused in fp32; put quantize-weights before fuse-experts"


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    weights = scaled(gated=1, biases=False)
    weights["down"][2, 3, 4] = np.nan
    model = routed(FORM, weights)
    QuantizeWeights(BUDGET, method="rtn").run(model, graphs.CPU)
    with pytest.raises(CheckpointError, match="parameter down cannot be quantized: the matrix holds NaN or infinity"):
        held(model, "down.codes")


# Whole models ------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_routers_stay_unless_they_are_asked_for(tmp_path: Path) -> None:
    zoo.write("mixtral", tmp_path)
    for routers in (False, True):
        model = trace(Checkpoint.open(tmp_path))
        changes = QuantizeWeights(BUDGET, method="rtn", routers=routers).run(model, graphs.CPU)
        gates = [node for node in model.graph if (node.name or "").endswith("mlp.gate/MatMul")]
        assert [node.op_type for node in gates] == 2 * ["MatMulNBits" if routers else "MatMul"]
        expected = [
            (f"model.layers.{n}.mlp.gate/MatMul", f"router of model.layers.{n}.mlp.experts/MoE") for n in range(2)
        ]
        reasons = [(skip.node, skip.reason.partition(";")[0]) for skip in changes.skipped]
        assert reasons == ([] if routers else expected)
        assert all(node.op_type != "MatMul" for node in model.graph if node not in gates)
