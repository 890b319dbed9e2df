"""sparsify-weights: 2:4 weights by SparseGPT."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmforge import targets
from llmforge.backends.onnxruntime.cuda import builder as cuda
from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph
from llmforge.ir.operators.standard import DequantizeLinear, MatMul
from llmforge.passes import PackQkv, QuantizeChannels, Sparsify
from llmforge.quantization import sparsity
from llmforge.quantization.sparsity import SparseMatrix
from llmforge.quantization.statistics import SparsityDemand, Statistics
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.verification.verifier import Verifier

from ..models import graphs

LOOSE = Budget(kld_mean=20.0)
RTX = targets.load("rtx-4090")
TEXT = np.random.default_rng(0).integers(0, 96, 24)


def pruned() -> dict[str, SparseMatrix]:
    """What calibration might find for a decoder of `graphs.llama`."""
    model = graphs.llama(graphs.Llama(layers=1))
    return {
        graph.sources(product.w)[0]: sparsity.magnitude(graph.tensor(product.w).numpy().T)
        for product in MatMul.all(model)
        if graph.is_constant(product.w)
    }


def context(found: dict[str, SparseMatrix], target: str = "rtx-4090") -> Context:
    return Context(targets.load(target), Statistics(samples=1, tokens=1, linears={}, kv={}, sparse=found))


@pytest.mark.parametrize("packed", [False, True])
def test_pruned_layers_become_weights(packed: bool, tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    if packed:
        PackQkv().run(model, Context(RTX))
    found = pruned()
    step = Sparsify(budget=LOOSE)
    assert step.demands() == (SparsityDemand(0.01, ()),)
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[TEXT], threads=1)
    changes = step.run(model, context(found))
    assert len(changes.rewritten) == (5 if packed else 7)
    proof = verifier.check(step, model, changes)
    assert proof.kld_mean is not None
    assert proof.kld_mean > 0
    assert model.metadata_props[graph.SPARSITY] == "2:4"
    for product in MatMul.all(model)[:-1]:
        expected = np.concatenate([found[name].dense() for name in graph.sources(product.w)]).T
        np.testing.assert_array_equal(graph.tensor(product.w).numpy(), expected)
        assert sparsity.is_sparse(expected)
    before = graph.fingerprint(model)
    again = step.run(model, context(found))
    assert not again
    assert {each.reason for each in again.skipped} == {"it is pruned already"}
    assert graph.fingerprint(model) == before


def test_what_was_not_pruned_stays() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    found = {name: matrix for name, matrix in pruned().items() if "down" not in name}
    changes = Sparsify(budget=LOOSE).run(model, context(found))
    assert {each.node: each.reason for each in changes.skipped} == {
        "l0_down_node": "calibration did not prune model.layers.0.mlp.down_proj.weight"
    }


def test_channels_behind_keep_the_zeros() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    Sparsify(budget=LOOSE).run(model, context(pruned()))
    assert QuantizeChannels(budget=LOOSE, dtype="int8", head=False).run(model, Context(RTX))
    codes = [view.codes for view in DequantizeLinear.all(model)]
    assert len(codes) == 7
    assert all(sparsity.is_sparse(graph.tensor(value).numpy()) for value in codes)


def test_what_exceeds_a_budget_is_measured(tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[TEXT], threads=1)
    step = Sparsify(budget=Budget(kld_mean=1e-6))
    proof = verifier.check(step, model, step.run(model, context(pruned())))
    assert proof.kld_mean is not None
    assert proof.kld_mean > 1e-6


@pytest.mark.parametrize(
    ("target", "figure"),
    [("t4", "SM75 has 65 TFLOP/s for both; sparse tensor cores begin with SM80"), ("cpu-avx2", "no CPU kernel")],
)
def test_devices_without_sparse_products_are_refused_with_the_figure(target: str, figure: str) -> None:
    with pytest.raises(UnsupportedError, match=f"does not pay on target {target}.*{figure}") as caught:
        Sparsify(budget=LOOSE).run(graphs.llama(), context({}, target))
    assert caught.value.hint


def test_onnxruntime_is_refused_as_an_engine_of_such_weights() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    Sparsify(budget=LOOSE).run(model, context(pruned()))
    spec = EngineSpec(backend="onnxruntime", max_context=64, max_batch=1)
    with pytest.raises(UnsupportedError, match="no kernels for 2:4 weights"):
        cuda.lower(model, RTX, spec)
