"""Emulated half precision: fp32 arithmetic, rounded where the graph rounds."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.ir import operators
from llmforge.passes.lower_precision import LowerPrecision
from llmforge.rewrite import emulation
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.verification import probe

from ..models import graphs

GPU = Context(targets.load("h100-sxm"))


def halved(dtype: str) -> ir.Model:
    model = graphs.llama(graphs.Llama(layers=1))
    LowerPrecision(Budget(kld_mean=1.0), dtype).run(model, GPU)  # type: ignore[arg-type]
    return model


def test_fp32_is_left_alone() -> None:
    model = graphs.llama()
    assert not emulation.is_half(model)
    assert emulation.emulate(model) is model


@pytest.mark.parametrize(("dtype", "numpy"), [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_every_value_is_one_of_the_dtype(dtype: str, numpy: type) -> None:
    model = halved(dtype)
    twin = emulation.emulate(model)
    operators.complete_dtypes(twin)
    held = [*twin.graph.inputs, *twin.graph.initializers.values(), *twin.graph.outputs]
    assert not {value.dtype for value in held} & emulation.HALVES
    names = [
        str(value.name)
        for node in twin.graph
        for value in node.outputs
        if value.dtype == ir.DataType.FLOAT and not str(value.name).endswith(".exact") and value.name != "head"
    ]
    assert len(names) > 20
    run = probe.random_runs(96)[0]
    seen = probe.observe(probe.open_session(model, probe.InitializerArrays(), 1, names), run, 0, names)
    for name, array in seen.items():
        np.testing.assert_array_equal(array, array.astype(numpy).astype(np.float32), err_msg=name)


@pytest.mark.parametrize(("dtype", "numpy"), [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_a_product_sums_in_fp32_and_rounds_once(dtype: str, numpy: type) -> None:
    model = halved(dtype)
    names = ["l0_normed", "l0_q"]
    seen = probe.observe(
        probe.open_session(model, probe.InitializerArrays(), 1, names), probe.random_runs(96)[0], 0, names
    )
    weight = model.graph.initializers["model.layers.0.self_attn.q_proj.weight"].const_value
    assert weight is not None
    assert weight.numpy().dtype == numpy
    exact = seen["l0_normed"].astype(np.float64) @ weight.numpy().astype(np.float64)
    step = np.spacing(np.abs(exact).astype(np.float16)).astype(np.float64) * (8 if dtype == "bf16" else 1)
    assert (np.abs(seen["l0_q"] - exact) <= 0.5 * step + 1e-6).all()  # fp32 sums round, too
    assert (seen["l0_q"] != exact.astype(np.float32)).mean() > 0.9


def test_weights_are_read_once_however_often_a_graph_is_loaded() -> None:
    model = halved("bf16")
    value = model.graph.initializers["model.layers.0.self_attn.q_proj.weight"]
    tensor, reads = value.const_value, []
    assert tensor is not None

    def read() -> ir.TensorProtocol:
        reads.append(1)
        return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name)

    value.const_value = ir.LazyTensor(read, tensor.dtype, ir.Shape(tensor.shape.numpy()), name=value.name)
    weights = probe.InitializerArrays()
    for _ in range(3):
        probe.open_session(model, weights, 1)
    assert len(reads) == 1
    weights.keep(model)
    probe.open_session(model, weights, 1)
    assert len(reads) == 1
