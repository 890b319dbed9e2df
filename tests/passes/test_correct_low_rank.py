"""correct-low-rank: products of low rank beside quantized layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph
from llmforge.ir.operators.contrib import MatMulNBits
from llmforge.ir.operators.standard import MatMul
from llmforge.passes import CorrectLowRank, PackQkv, QuantizeWeights
from llmforge.quantization import low_rank
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import QuantizedMatrix, dequantize, round_to_nearest
from llmforge.quantization.low_rank import LowRankCorrection
from llmforge.quantization.statistics import LowRankDemand, Statistics
from llmforge.rewrite.pass_base import Budget, Changes, Context
from llmforge.verification import probe
from llmforge.verification.verifier import Verifier

from ..models import graphs

LOOSE = Budget(kld_mean=20.0)
TEXT = np.random.default_rng(0).integers(0, 96, 24)
FORM = graphs.Llama(layers=1, hidden=64, mlp=96)
GRID = Grid(4, 32, symmetric=False)
QUANTIZE = QuantizeWeights(budget=LOOSE, method="gptq", embedding_bits=16)  # type: ignore[call-arg]


def calibrated(rank: int = 5, dtype: low_rank.Dtype = "fp32") -> tuple[Statistics, dict[str, np.ndarray]]:
    """What calibration might find, and the weight [N, K] that codes and correction of each linear stand for."""
    model, random = graphs.llama(FORM), np.random.default_rng(0)
    groups: dict[ir.Value, list[MatMul]] = {}
    for product in MatMul.all(model):
        if graph.is_constant(product.w) and graph.sources(product.w) and "head" not in graph.sources(product.w)[0]:
            groups.setdefault(product.x, []).append(product)
    matrices: dict[str, QuantizedMatrix] = {}
    corrections: dict[str, LowRankCorrection] = {}
    for products in groups.values():
        names = [graph.sources(product.w)[0] for product in products]
        weights = [graph.tensor(product.w).numpy().T for product in products]
        own = [round_to_nearest(weight, GRID) for weight in weights]
        moments = np.diag(random.uniform(0.5, 2, weights[0].shape[1])).astype(np.float32)
        codes = np.concatenate([dequantize(each) for each in own])
        found = low_rank.compute_correction(np.concatenate(weights), codes, moments, rank, dtype, GRID)
        starts = np.cumsum([0, *map(len, weights)])
        for name, matrix, first, last in zip(names, own, starts, starts[1:], strict=False):
            matrices[name] = matrix
            corrections[name] = LowRankCorrection(
                found.a, found.b[:, first:last], names[0], found.before, found.after, found.codes
            )
    whole = {name: dequantize(matrix) + corrections[name].product() for name, matrix in matrices.items()}
    return Statistics(1, 1, matrices, {}, low_rank=corrections), whole


def corrected(statistics: Statistics, step: CorrectLowRank, *, packed: bool = False) -> tuple[ir.Model, Changes]:
    model = graphs.llama(FORM)
    if packed:
        assert PackQkv().run(model, graphs.CPU)
    context = Context(graphs.TARGET, statistics)
    assert QUANTIZE.run(model, context)
    return model, step.run(model, context)


def logits(model: ir.Model) -> np.ndarray:
    session = probe.open_session(model, probe.InitializerArrays(), 1)
    return np.concatenate(
        [made.reshape(-1, 96) for run in probe.random_runs(96) for made in probe.logits(session, run)]
    )


@pytest.mark.parametrize("packed", [False, True])
def test_the_graph_is_that_of_the_corrected_weights(packed: bool) -> None:
    """Held to the fp32 graph whose weights are codes and products written out."""
    statistics, whole = calibrated()
    step = CorrectLowRank(budget=LOOSE, bits=4.0)
    model, changes = corrected(statistics, step, packed=packed)
    assert len(changes.rewritten) == (5 if packed else 7)
    for layer in MatMulNBits.all(model):
        layer.accuracy_level = 0  # fp32 activations, as the graph that it is held to has
    expected = graphs.llama(FORM)
    for product in MatMul.all(expected):
        if (names := graph.sources(product.w)) and names[0] in whole:
            product.w = graph.initializer(expected, f"{names[0]}.whole", np.ascontiguousarray(whole[names[0]].T))
    plain = graphs.llama(FORM)
    QUANTIZE.run(plain, Context(graphs.TARGET, statistics))
    for layer in MatMulNBits.all(plain):
        layer.accuracy_level = 0
    wanted = logits(expected)
    np.testing.assert_allclose(logits(model), wanted, atol=1e-4)
    assert np.abs(logits(plain) - wanted).max() > 0.01


def test_layers_that_read_the_same_share_a_product() -> None:
    statistics, _ = calibrated()
    model, _ = corrected(statistics, CorrectLowRank(budget=LOOSE, bits=4.0))
    first = [product for product in MatMul.all(model) if str(product.w.name).endswith("low_rank_a")]
    assert len(first) == 4  # of q, k and v; o; gate and up; down
    assert all(graph.static(product.w)[1] == 5 for product in first)


def test_factors_in_int8_are_matmulnbits() -> None:
    statistics, _ = calibrated(32, "int8")
    model, changes = corrected(statistics, CorrectLowRank(budget=LOOSE, bits=16.0, dtype="int8"))
    own = [layer for layer in MatMulNBits.all(model) if "low_rank" in layer.name]
    assert len(own) == 4 + 7
    assert {layer.bits for layer in own} == {8}
    assert len(changes.rewritten) == 7
    found = round_to_nearest(next(iter(statistics.low_rank.values())).a.T, low_rank.INT8)
    codes = next(graph.tensor(layer.b).numpy() for layer in own if layer.name.endswith("_a"))
    np.testing.assert_array_equal(codes.reshape(found.codes.shape), found.codes)


def test_it_is_verified_and_attributed_within_its_budget(tmp_path: Path) -> None:
    statistics, _ = calibrated()
    model, context = graphs.llama(FORM), Context(graphs.TARGET, statistics)
    assert QUANTIZE.run(model, context)
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[TEXT], threads=1)
    step = CorrectLowRank(budget=Budget(kld_mean=1e-9), bits=4.0)
    after = model.clone()
    changes = step.run(after, context)
    proof = verifier.check(step, after, changes)
    assert proof.kld_mean is not None
    assert proof.kld_mean > 1e-9
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[TEXT], threads=1)
    proof = verifier.check(CorrectLowRank(budget=LOOSE, bits=4.0), after, changes)
    assert proof.kld_mean is not None
    assert proof.kld_mean > 0


def test_a_second_run_changes_nothing() -> None:
    statistics, _ = calibrated()
    step = CorrectLowRank(budget=LOOSE, bits=4.0)
    model, _ = corrected(statistics, step)
    before = graph.fingerprint(model)
    again = step.run(model, Context(graphs.TARGET, statistics))
    assert not again
    assert {each.reason for each in again.skipped} == {"it is corrected already"}
    assert graph.fingerprint(model) == before


def test_what_was_not_corrected_stays() -> None:
    statistics, _ = calibrated()
    few = {name: each for name, each in statistics.low_rank.items() if "down" not in name}
    statistics = Statistics(1, 1, statistics.linears, {}, low_rank=few)
    _, changes = corrected(statistics, CorrectLowRank(budget=LOOSE, bits=4.0))
    [left] = changes.skipped
    assert "calibration did not correct model.layers.0.mlp.down_proj.weight" in left.reason


def test_the_note_says_what_the_bytes_would_buy_in_the_codes() -> None:
    statistics, _ = calibrated()
    _, changes = corrected(statistics, CorrectLowRank(budget=LOOSE, bits=4.0))
    [note] = changes.notes
    assert "bits a weight leave" in note
    assert "it does not pay, a larger format, or method: auto, does" in note  # rank 5 of 64 at 4 bits
    assert CorrectLowRank(budget=LOOSE, bits=4.0).demands() == (LowRankDemand(4.0, "fp32", 0.01, ()),)


def test_targets_without_onnxruntime_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="correct-low-rank"):
        CorrectLowRank(budget=LOOSE, bits=1.0).run(graphs.llama(), Context(targets.load("b200"), None))
