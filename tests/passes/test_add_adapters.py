"""add-adapters: linear layers take the adapter that each row of a batch chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from llmforge.base.errors import CheckpointError, UnsupportedError, VerificationError
from llmforge.checkpoint.adapters import Adapter, AdapterSource
from llmforge.ir import dialect, graph, interface
from llmforge.ir.operators.canonical import LowRankAdapter
from llmforge.passes.add_adapters import AddAdapters
from llmforge.passes.pack_gate_up import PackGateUp
from llmforge.passes.pack_qkv import PackQkv
from llmforge.rewrite.pass_base import Context
from llmforge.verification import adapter_proof, probe

from ..models import graphs
from ..models.adapters import MLP, PREFIX, write_adapter

TARGET = graphs.TARGET
GATE, UP = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"


def adapter(folder: Path, parts: dict[str, tuple[int, int, int]], name: str = "one", **settings: Any) -> Adapter:
    """Write and open an adapter of modules of (K, N, rank)."""
    rng = np.random.default_rng(len(name))
    more = {}
    for module, (k, n, rank) in parts.items():
        more[f"{PREFIX}{module}.lora_A.weight"] = rng.standard_normal((rank, k)).astype(np.float32)
        more[f"{PREFIX}{module}.lora_B.weight"] = rng.standard_normal((n, rank)).astype(np.float32)
    return written(folder / name, more, **settings)


def written(folder: Path, more: dict[str, Any], **settings: Any) -> Adapter:
    base = Path(__file__).parents[1] / "data" / "docs-llama-7m"
    return Adapter.open(
        AdapterSource(folder.name, write_adapter(folder, base, targets=(), more=more, settings=settings))
    )


def lora(base: Any, x: Any, ids: Any, a: Any, b: Any, widths: list[int]) -> Any:
    """Compute `llmforge::LowRankAdapter` row by row, as docs/dialect.md defines it."""
    y, rank = base.astype(np.float64).copy(), b.shape[1]
    for row, number in enumerate(ids):
        at = 0
        for part, width in enumerate(widths):
            h = x[row].astype(np.float64) @ a[number][:, part * rank : (part + 1) * rank]
            y[row, :, at : at + width] += h @ b[number][:, at : at + width]
            at += width
    return y


@pytest.mark.parametrize("widths", [[7], [4, 3], [2, 4, 1]])
def test_the_expansion_is_the_reference(widths: list[int]) -> None:
    rng = np.random.default_rng(0)
    k, n, rank, count = 5, sum(widths), 2, 3
    a = rng.standard_normal((count + 1, k, rank * len(widths))).astype(np.float32)
    b = rng.standard_normal((count + 1, rank, n)).astype(np.float32)
    a[0], b[0] = 0, 0
    text = f"""<ir_version: 12, opset_import: ["" : 24, "llmforge" : 1]>
    g (float[batch, sequence, {n}] base, float[batch, sequence, {k}] x, int64[batch] adapter_ids) =>
      (float[batch, sequence, {n}] y) {{
      y = llmforge.LowRankAdapter<widths: ints = [{",".join(map(str, widths))}]>(base, x, adapter_ids, a, b)
    }}"""
    model = graphs.parse(text, {"a": a, "b": b})
    ids = np.array([2, 0, 3, 1])
    fed = {
        "base": rng.standard_normal((4, 6, n)).astype(np.float32),
        "x": rng.standard_normal((4, 6, k)).astype(np.float32),
    }
    session = ort.InferenceSession(ir.serde.serialize_model(dialect.expand(model)).SerializeToString())
    [y] = session.run(None, {**fed, "adapter_ids": ids})
    np.testing.assert_allclose(y, lora(**fed, ids=ids, a=a, b=b, widths=widths), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(y[1], fed["base"][1])  # to the bit


def test_packed_layers_have_parts(tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    graphs.prove(PackGateUp(), model, tmp_path / "pack")
    one = adapter(tmp_path, {GATE: (48, 56, 2)}, lora_alpha=4)
    two = adapter(tmp_path, {GATE: (48, 56, 1), UP: (48, 56, 3)}, "two", lora_alpha=3)
    changes, _ = graphs.prove(AddAdapters(), model, tmp_path / "add", Context(TARGET, adapters=[one, two]))
    dialect.check(model)
    [layer] = LowRankAdapter.all(model)
    assert (layer.rank, list(layer.widths)) == (3, [56, 56])
    assert [change.what for change in changes.rewritten] == [f"2 adapters of {GATE}.weight, {UP}.weight"]
    a, b = (graph.tensor(value).numpy() for value in (layer.a, layer.b))
    assert not a[0].any()
    assert not b[0].any()
    for number, (opened, module, part) in enumerate([(one, GATE, 0), (two, GATE, 0), (two, UP, 1)]):
        low_rank = opened.low_rank[module]
        which = min(number, 1) + 1
        columns = slice(part * 56, part * 56 + 56)
        product = a[which][:, part * 3 : part * 3 + 3] @ b[which][:, columns]
        first, second = (tensor_of(entry) for entry in (low_rank.a, low_rank.b))
        np.testing.assert_allclose(product, low_rank.scale * (second @ first).T, atol=1e-5)
    assert not b[1][:, 56:].any()
    assert AddAdapters().run(graphs.llama(), Context(TARGET)).rewritten == []


def tensor_of(entry: Any) -> Any:
    return np.fromfile(entry.file, np.float32, int(np.prod(entry.shape)), offset=entry.offset).reshape(entry.shape)


def test_a_linear_layer_keeps_its_name_and_its_bias_comes_first(tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(layers=1, bias=True))
    query = "model.layers.0.self_attn.q_proj"
    own = adapter(tmp_path, {query: (48, 64, 2)})
    graphs.prove(AddAdapters(), model, tmp_path, Context(TARGET, adapters=[own]))
    [layer] = LowRankAdapter.all(model)
    producer = layer.base.producer()
    assert producer is not None
    assert producer.op_type == "Add"
    assert str(layer.base.name) == f"{layer.output.name}.base"
    assert model.graph.inputs[-1].name == interface.ADAPTER_IDS


@pytest.mark.parametrize("layers", [1])
def test_refuses_what_it_cannot_add(tmp_path: Path, layers: int) -> None:
    model = graphs.llama(graphs.Llama(layers=layers))
    query = "model.layers.0.self_attn.q_proj"

    def refused(own: Adapter) -> str:
        with pytest.raises((CheckpointError, UnsupportedError)) as raised:
            AddAdapters().run(model, Context(TARGET, adapters=[own]))
        return str(raised.value)

    other = "model.layers.7.self_attn.q_proj"
    assert f"no linear layer of the graph multiplies by '{other}.weight'" in refused(
        adapter(tmp_path, {other: (48, 64, 2)})
    )
    assert "its product is [63, 48]" in refused(adapter(tmp_path, {query: (48, 63, 2)}))
    matrices = {f"{PREFIX}{query}.lora_A.weight": np.ones((2, 48), np.float32)}
    matrices[f"{PREFIX}{query}.lora_B.weight"] = np.ones((64, 2), np.float32)
    saved = {**matrices, f"{PREFIX}lm_head.weight": np.ones((3, 3), np.float32)}
    assert "replaces 'lm_head.weight'" in refused(written(tmp_path / "saved", saved))
    dora = {**matrices, f"{PREFIX}{query}.lora_magnitude_vector": np.ones(64, np.float32)}
    assert "by DoRA" in refused(written(tmp_path / "dora", dora, use_dora=True))
    bias = {**matrices, f"{PREFIX}{query}.lora_B.bias": np.ones(64, np.float32)}
    assert "a bias" in refused(written(tmp_path / "bias", bias, lora_bias=True))


def test_rows_with_adapters_are_proven_and_wrong_ones_found(tmp_path: Path) -> None:
    before = graphs.llama(graphs.Llama(layers=2))
    graphs.prove(PackQkv(), before, tmp_path / "pack")
    after = before.clone()
    modules = {f"model.layers.{layer}.{part}": (48, 56, 2) for layer in range(2) for part in MLP[:2]}
    modules |= {f"model.layers.{layer}.self_attn.v_proj": (48, 32, 3) for layer in range(2)}
    own = [adapter(tmp_path, modules, name) for name in ("one", "other", "another")]
    AddAdapters().run(after, Context(TARGET, adapters=own))
    note = adapter_proof.prove(before, after, own, vocabulary=96, threads=1)
    assert "rows with one, other, another" in note
    assert "3 of 3 adapters" in note
    layer = LowRankAdapter.all(after)[-1]
    numbers = graph.tensor(layer.b).numpy().copy()
    numbers[2] *= 1.001
    layer.b.const_value = ir.Tensor(numbers, name=layer.b.name)
    with pytest.raises(VerificationError, match=r"adapter other: logits are .* from those of merged weights"):
        adapter_proof.prove(before, after, own, vocabulary=96, threads=1)


def test_probes_have_rows_with_and_without_an_adapter() -> None:
    assert [run.steps[0].adapters.tolist() for run in probe.random_runs(96)] == [[0], [0, 1]]
