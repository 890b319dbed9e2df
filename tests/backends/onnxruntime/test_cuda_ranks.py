"""Graphs of ranks for ONNX Runtime's CUDA provider: collectives, what is written, what waits for a host with GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import onnx_ir as ir
import pytest

from llmforge import native, targets
from llmforge.backends import engines, pending
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import kernels
from llmforge.backends.onnxruntime.cuda import builder as cuda
from llmforge.backends.onnxruntime.cuda import operators as cuda_collectives
from llmforge.base.errors import EnvironmentLacks, UnsupportedError
from llmforge.base.progress import Silent
from llmforge.ir import graph
from llmforge.ir.operators import canonical
from llmforge.ir.operators import cuda as collectives
from llmforge.native import nccl
from llmforge.parallel.split import split
from llmforge.passes import FlashAttention, FuseNorms, LowerPrecision, PackGateUp, PackQkv
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.runtime.config import FILE, RuntimeConfig
from llmforge.runtime.device import cuda as devices

from ...models import graphs

H100 = targets.load("h100-sxm")
SPEC = EngineSpec(max_context=64, max_batch=2, tensor_parallel=2)
WIDE = graphs.Llama(hidden=64, heads=8, kv_heads=4, head_dim=32, mlp=128, vocabulary=96)


def lowered(target: targets.Target = H100, spec: EngineSpec = SPEC, dtype: str = "fp16") -> list[ir.Model]:
    model = graphs.llama(WIDE)
    for step in (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention(), LowerPrecision(Budget(kld_mean=9), dtype)):
        step.run(model, Context(target))
    return [cuda.lower(each, target, spec)[0] for each in split(model, 2).ranks]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_collectives_are_those_of_the_library(dtype: str) -> None:
    for model in lowered(dtype=dtype):
        assert not any(node.domain == "llmforge" for node in model.graph)
        sums, [gathered] = collectives.CudaAllReduce.all(model), collectives.CudaAllGather.all(model)
        assert len(sums) == 5
        assert {view.ranks for view in (*sums, gathered)} == {2}
        assert model.opset_imports["llmforge.cuda"] == 1
        dtypes = kernels.infer(model)
        wanted = "FLOAT16" if dtype == "fp16" else "BFLOAT16"
        assert {dtypes[view.output].name for view in (*sums, gathered)} == {wanted}
        turned = graph.only_reader(gathered.output)
        assert turned is not None
        assert turned.attributes.get_ints("perm") == (1, 2, 0, 3)


def test_a_step_of_a_rank_may_be_captured() -> None:
    graph_plan = cuda.cuda_graphs.plan(lowered()[0], SPEC)
    assert graph_plan.mode == "require"
    assert [capture.batch for capture in graph_plan.captures] == [2, 1]


def test_only_the_last_axis_is_gathered() -> None:
    model = split(graphs.llama(WIDE), 2).ranks[0]
    [view] = canonical.AllGather.all(model)
    view.axis = 1
    with pytest.raises(UnsupportedError, match=r"AllGather logits_node/AllGather: only the last axis"):
        cuda_collectives.write_collectives(model)
    for last in (2, -1):
        counted = split(graphs.llama(WIDE), 2).ranks[0]
        [view] = canonical.AllGather.all(counted)
        view.axis = last
        assert any("AllGather" in each.what for each in cuda_collectives.write_collectives(counted))


def test_integers_are_not_summed() -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.INT64))
    node = ir.Node("llmforge.cuda", "AllReduce", [x], ir.convenience.convert_attributes({"ranks": 2}))
    model = ir.Model(ir.Graph([x], node.outputs, nodes=[node], opset_imports={"llmforge.cuda": 1}), ir_version=10)
    [(_, why)] = kernels.missing(model, kernels.cuda(), kernels.infer(model))
    assert why == "it takes fp16, bf16 and fp32"


def test_an_engine_of_ranks_says_so(tmp_path: Path) -> None:
    models = lowered()
    config, _ = cuda.write(BuildRequest(models[0], tmp_path / "engine", SPEC, H100, (0,), 0, ranks=models))
    assert RuntimeConfig.read(tmp_path / "engine" / FILE) == config
    assert (config.ranks, config.kernels, config.provider) == (2, native.VERSION, "cuda")
    assert config.provider_options["sdpa_kernel"] == "19"  # all but cuDNN
    assert {cache.kv_heads for cache in config.caches} == {2}
    for name in config.rank_files:
        assert (tmp_path / "engine" / name).is_file()
    one, _ = cuda.write(BuildRequest(models[0], tmp_path / "one", SPEC, H100, (0,), 0))
    assert "sdpa_kernel" not in one.provider_options
    l4 = targets.load("l4")
    models = lowered(l4)
    config, _ = cuda.write(BuildRequest(models[0], tmp_path / "l4", SPEC, l4, (0,), 0, ranks=models))
    assert "sdpa_kernel" not in config.provider_options  # cuDNN is not asked there


def test_a_deferred_engine_waits_with_all_its_graphs(tmp_path: Path) -> None:
    models = lowered()
    folder = tmp_path / "engine"
    request = BuildRequest(models[0], folder, SPEC, H100, (0,), 0, ranks=models)
    counted = {"weight_bytes_per_token": 1, "kv_bytes_per_token": 1, "multiply_adds_per_token": 3}
    pending.write(request, **counted, head_multiply_adds=2)
    read = pending.read(folder)
    assert (read.multiply_adds_per_token, read.head_multiply_adds) == (3, 2)
    again = read.request(folder, tmp_path / "built", H100, Silent())
    file = folder / "pending.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in written.items() if "multiply_adds" not in name}))
    older = pending.read(folder)
    assert (older.multiply_adds_per_token, older.head_multiply_adds) == (None, 0)
    assert len(again.ranks) == 2
    for before, after in zip(models, again.ranks, strict=True):
        assert [node.op_type for node in before.graph] == [node.op_type for node in after.graph]
    assert again.model is again.ranks[0]


def test_a_host_of_one_gpu_does_not_build_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count", lambda extra: 1)
    with pytest.raises(EnvironmentLacks, match="has 2 ranks, which take one GPU each; this process sees 1") as caught:
        cuda.require_host(H100, SPEC)
    assert "--defer" in str(caught.value.hint)
    monkeypatch.setattr(devices, "count", lambda extra: 2)
    monkeypatch.setattr(nccl, "find", lambda: None)
    with pytest.raises(EnvironmentLacks, match="ranks on GPUs meet through NCCL"):
        engines.require_device(H100, SPEC)
