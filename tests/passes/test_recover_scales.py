"""recover-scales: trained scales in the place of those that quantize-weights chose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph
from llmforge.ir.operators.contrib import MatMulNBits
from llmforge.ir.operators.cpu import CpuLinear
from llmforge.ir.operators.standard import MatMul
from llmforge.passes import PackQkv, QuantizeWeights, RecoverScales
from llmforge.quantization.grid import Grid, Scale
from llmforge.quantization.grids import QuantizedMatrix, dequantize, round_to_nearest, stored
from llmforge.quantization.initializers import arrange
from llmforge.quantization.statistics import RecoveryDemand, Statistics
from llmforge.rewrite.pass_base import Budget, Changes, Context
from llmforge.verification import probe
from llmforge.verification.verifier import Verifier

from ..models import graphs

LOOSE = Budget(kld_mean=20.0)
TEXT = np.random.default_rng(0).integers(0, 96, 24)
FORM = graphs.Llama(layers=1, hidden=64, mlp=96)
STEP = RecoverScales(budget=LOOSE)


def trained(bits: int = 4, scale: Scale = "fp32") -> Statistics:
    """What calibration might find: codes, and scales a little larger."""
    model, grid = graphs.llama(FORM), Grid(bits, 32, symmetric=False, scale=scale)
    matrices: dict[str, QuantizedMatrix] = {}
    for product in MatMul.all(model):
        if graph.is_constant(product.w) and graph.sources(product.w) and "head" not in graph.sources(product.w)[0]:
            matrices[graph.sources(product.w)[0]] = round_to_nearest(graph.tensor(product.w).numpy().T, grid)
    more = {name: replace(each, scales=stored(each.scales * np.float32(1.25), grid)) for name, each in matrices.items()}
    return Statistics(1, 1, matrices, {}, recovered=more)


def quantized(statistics: Statistics, bits: int = 4, scale: Scale = "fp32", *, packed: bool = False) -> ir.Model:
    model = graphs.llama(FORM)
    if packed:
        assert PackQkv().run(model, graphs.CPU)
    step = QuantizeWeights(budget=LOOSE, method="gptq", bits=bits, scales=scale, embedding_bits=16)  # type: ignore[call-arg]
    assert step.run(model, Context(graphs.TARGET, statistics))
    return model


def recovered(statistics: Statistics, model: ir.Model) -> Changes:
    return STEP.run(model, Context(graphs.TARGET, statistics))


def logits(model: ir.Model) -> np.ndarray:
    session = probe.open_session(model, probe.InitializerArrays(), 1)
    return np.concatenate(
        [made.reshape(-1, 96) for run in probe.random_runs(96) for made in probe.logits(session, run)]
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scale", ["fp32", "fp16"])
def test_the_graph_is_that_of_the_trained_scales(scale: Scale, packed: bool) -> None:
    """Held to the fp32 graph of weights written out."""
    statistics = trained(scale=scale)
    model = quantized(statistics, scale=scale, packed=packed)
    codes = {layer.name: graph.tensor(layer.b).numpy() for layer in MatMulNBits.all(model)}
    changes = recovered(statistics, model)
    assert len(changes.rewritten) == (5 if packed else 7)
    for layer in MatMulNBits.all(model):
        np.testing.assert_array_equal(graph.tensor(layer.b).numpy(), codes[layer.name])
        layer.accuracy_level = 0  # fp32 activations, as the graph that it is held to has
    expected = graphs.llama(FORM)
    for product in MatMul.all(expected):
        if (names := graph.sources(product.w)) and names[0] in statistics.recovered:
            whole = dequantize(statistics.recovered[names[0]])
            product.w = graph.initializer(expected, f"{names[0]}.whole", np.ascontiguousarray(whole.T))
    wanted = logits(expected)
    np.testing.assert_allclose(logits(model), wanted, atol=1e-4)
    plain = quantized(statistics, scale=scale)
    assert np.abs(logits(plain) - wanted).max() > 0.01


def test_groups_of_the_cpu_kernels_are_those_of_the_trained_scales() -> None:
    statistics = trained(3, "int8")
    model = quantized(statistics, 3, "int8")
    changes = recovered(statistics, model)
    assert len(changes.rewritten) == 7
    for layer in CpuLinear.all(model):
        [name] = graph.sources(layer.weights)
        np.testing.assert_array_equal(graph.tensor(layer.weights).numpy(), arrange(statistics.recovered[name]))


def test_it_is_verified_within_its_budget(tmp_path: Path) -> None:
    statistics = trained()
    model = quantized(statistics)
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[TEXT], threads=1)
    after = model.clone()
    proof = verifier.check(STEP, after, recovered(statistics, after))
    assert proof.kld_mean is not None
    assert proof.kld_mean > 0
    assert proof.budget == 20.0


def test_a_second_run_changes_nothing() -> None:
    statistics = trained()
    model = quantized(statistics)
    assert recovered(statistics, model)
    before = graph.fingerprint(model)
    again = recovered(statistics, model)
    assert not again
    assert {each.reason for each in again.skipped} == {"its scales are trained already"}
    assert graph.fingerprint(model) == before


def test_what_was_not_trained_stays() -> None:
    statistics = trained()
    few = {name: each for name, each in statistics.recovered.items() if "down" not in name}
    model = quantized(statistics)
    [left] = recovered(replace(statistics, recovered=few), model).skipped
    assert "calibration did not train model.layers.0.mlp.down_proj.weight" in left.reason
    before = graph.fingerprint(model)
    assert not recovered(replace(statistics, recovered={}), model)
    assert graph.fingerprint(model) == before


def test_it_demands_what_its_options_say() -> None:
    step = RecoverScales(budget=LOOSE, tokens=1024, least=0.1, exclude=("*.0.*",))
    assert step.demands() == (RecoveryDemand(1024, 0.1, ("*.0.*",)),)


def test_targets_without_onnxruntime_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="recover-scales"):
        STEP.run(graphs.llama(), Context(targets.load("b200"), None))
