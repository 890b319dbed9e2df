"""Adapters on GPUs: lowered to operators that every engine has, and equal to the canonical graph on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.backends.onnxruntime.cuda import builder as cuda
from llmforge.backends.onnxruntime.session import Session
from llmforge.backends.tensorrt import lower, profiles
from llmforge.base.errors import UnsupportedError
from llmforge.ir import dialect, interface
from llmforge.ir.operators.canonical import LowRankAdapter
from llmforge.parallel import shard_plan
from llmforge.passes import AddAdapters, FlashAttention, FuseNorms, LowerPrecision, PackGateUp, PackQkv, QuantizeWeights
from llmforge.recipe import EngineSpec
from llmforge.rewrite import emulation
from llmforge.rewrite.pass_base import Budget, Context, Pass
from llmforge.runtime.config import SessionConfig
from llmforge.runtime.interface import StepInputs

from ..models import graphs
from ..passes.test_add_adapters import adapter

FORM = graphs.Llama(hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=64, vocabulary=128, bias=True)
BUDGET = Budget(kld_mean=5.0)
INT4 = QuantizeWeights(BUDGET, method="rtn", symmetric=True, embedding_bits=16, accuracy_level=0, block_size=32)
HALF = LowerPrecision(BUDGET, "fp16")


def prepared(folder: Path, target: str, *steps: Pass) -> ir.Model:
    """Run passes over a decoder with two adapters."""
    sizes = {"self_attn.q_proj": (64, 64, 3), "self_attn.v_proj": (64, 32, 2), "mlp.gate_proj": (64, 64, 4)}
    modules = {f"model.layers.{layer}.{name}": size for layer in range(2) for name, size in sizes.items()}
    own = [adapter(folder, modules, name, lora_alpha=0.5) for name in ("one", "other")]
    model, context = graphs.llama(FORM), Context(targets.load(target), adapters=own)
    for step in steps:
        assert step.run(model, context).rewritten
    return model


def logits(model: ir.Model) -> np.ndarray:
    """Read three prompts with different adapters, then a token of each together: [3, 2, V]."""
    session = Session(ir.to_proto(model).SerializeToString(), SessionConfig(1, optimize=False))
    cache, rng, found = session.allocate(3, 40), np.random.default_rng(5), []
    chosen, past = np.array([2, 0, 1]), np.zeros(3, np.int32)
    rows = [
        session.step(
            StepInputs(rng.integers(0, 128, (1, 6)), past[:1], adapters=chosen[row : row + 1]), cache.rows(row, row + 1)
        )
        for row in range(3)
    ]
    found.append(np.concatenate(rows))
    found.append(session.step(StepInputs(rng.integers(0, 128, (3, 1)), past + np.int32(6), adapters=chosen), cache))
    return np.concatenate(found, 1)


def test_the_lowering_for_tensorrt_computes_the_same(tmp_path: Path) -> None:
    spec = EngineSpec(backend="tensorrt-rtx", max_context=40, max_batch=4)
    model = prepared(tmp_path, "rtx-4090", PackQkv(), PackGateUp(), AddAdapters(), INT4, HALF)
    assert len(LowRankAdapter.all(model)) == 4
    assert {layer.output.dtype for layer in LowRankAdapter.all(model)} == {ir.DataType.FLOAT16}
    lowered, changes = lower.lower(model, targets.load("rtx-4090"), spec)
    assert "LowRankAdapter to Gather and MatMul, which no GPU has run" in {each.what for each in changes.rewritten}
    assert not [node for node in lowered.graph if node.domain]
    decode = profiles.of(lowered, spec)[1]
    assert decode.shapes[interface.ADAPTER_IDS] == ((1,), (4,), (4,))
    exact = prepared(tmp_path, "rtx-4090", PackQkv(), PackGateUp(), AddAdapters(), INT4)
    wanted = logits(dialect.expand(exact))
    halved = emulation.emulate(lowered).clone()
    for name, value in halved.graph.initializers.items():
        if isinstance(value.const_value, ir.ExternalTensor | ir.LazyTensor):
            value.const_value = ir.Tensor(value.const_value.numpy().copy(), name=name)
    assert np.abs(logits(halved) - wanted).max() < 5e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("quantized", [False, True])
def test_the_lowering_for_cuda_computes_the_same(tmp_path: Path, *, quantized: bool) -> None:
    spec, more = EngineSpec(max_context=64, max_batch=4), [INT4] if quantized else []
    before = [FuseNorms(), PackQkv(), FlashAttention(), AddAdapters(), *more]
    lowered, _ = cuda.lower(prepared(tmp_path, "h100-sxm", *before, HALF), targets.load("h100-sxm"), spec)
    assert not [node for node in lowered.graph if node.domain == "llmforge"]
    wanted = logits(dialect.expand(prepared(tmp_path, "h100-sxm", *before)))
    assert np.abs(logits(lowered) - wanted).max() < 1e-2 * np.abs(wanted).max()


def test_adapters_are_not_divided_among_ranks(tmp_path: Path) -> None:
    model = prepared(tmp_path, "h100-sxm", PackQkv(), AddAdapters())
    with pytest.raises(UnsupportedError, match="adapters that requests choose are not divided"):
        shard_plan.plan(model, 2)
