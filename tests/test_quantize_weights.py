"""quantize-weights: linear layers, embedding and head in 4 or 8 bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from llmforge import graph, options, probe, targets
from llmforge.errors import CheckpointError, UnsupportedError
from llmforge.passes.flash_attention import FlashAttention
from llmforge.passes.pack_gate_up import PackGateUp
from llmforge.passes.pack_qkv import PackQkv
from llmforge.passes.quantize_weights import QuantizeWeights
from llmforge.quantization import Grid, QuantizedMatrix, dequantize, pack, rtn
from llmforge.statistics import Statistics, WeightDemand
from llmforge.transform import Budget, Context
from llmforge.verify import Verifier

from . import graphs

BUDGET = Budget(kld_mean=5.0)
EXACT = {"bits": 4, "embedding_bits": 4, "accuracy_level": 0}  # kernels that do not round activations


def array(model: ir.Model, name: str) -> NDArray[np.float32]:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return np.array(tensor.numpy())


def matrices(model: ir.Model, grid: Grid, noise: float = 0.0) -> dict[str, QuantizedMatrix]:
    """Round the decoder's weights as a calibration would return them; `noise` tells them from plain rounding."""
    random = np.random.default_rng(0)
    return {
        name: rtn(array(model, name).T + noise * random.standard_normal(array(model, name).T.shape, np.float32), grid)
        for name in model.graph.initializers
        if name.endswith("_proj.weight")
    }


def context(linears: dict[str, QuantizedMatrix]) -> Context:
    return replace(graphs.CPU, statistics=Statistics(samples=1, tokens=1, linears=linears, kv={}))


def logits(model: ir.Model) -> list[NDArray[np.float32]]:
    session = probe.open_session(model, probe.Weights(), threads=1)
    return [out.logits for run in probe.random_runs(96) for out in probe.drive(session, run, caches=False)]


def with_weights(model: ir.Model, weights: dict[str, NDArray[np.float32]]) -> ir.Model:
    """Give initializers other values."""
    for name, values in weights.items():
        model.graph.initializers[name].const_value = ir.Tensor(np.ascontiguousarray(values), name=name)
    return model


def test_decoder_as_text() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    changes = QuantizeWeights(BUDGET, method="rtn").run(model, graphs.CPU)
    assert graphs.lines(model, ["MatMulNBits", "GatherBlockQuantized", "Reshape", "MatMul", "Transpose", "Gather"]) == [
        "model.embed_tokens.weight.scales.rows = Reshape(model.embed_tokens.weight.scales, "
        "model.embed_tokens.weight.scales.shape)",
    ]
    assert not changes.skipped


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_rtn_computes_with_the_rounded_weights(block_size: int, symmetric: bool) -> None:
    spec = graphs.Llama(bias=True)
    model, reference = graphs.llama(spec), graphs.llama(spec)
    grid = Grid(4, block_size, symmetric)
    rounded = {name: dequantize(matrix).T for name, matrix in matrices(reference, grid).items()}
    embedding = "model.embed_tokens.weight"
    rounded[embedding] = dequantize(rtn(array(reference, embedding), Grid(4, 16, True)))
    step = QuantizeWeights(BUDGET, block_size=block_size, symmetric=symmetric, method="rtn", **EXACT)
    changes = step.run(model, graphs.CPU)
    assert len(changes.rewritten) == 7 * spec.layers + 2
    assert not graphs.find(model, "MatMul")
    for got, want in zip(logits(model), logits(with_weights(reference, rounded)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)
