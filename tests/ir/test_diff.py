"""Graphs as files, in numbers, and against each other; the commands `trace` and `diff-graph`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result

from llmforge.base.errors import InputError, UsageError
from llmforge.checkpoint import Checkpoint
from llmforge.cli import cli
from llmforge.ir import diff, graph, onnx_file, summary
from llmforge.trace import trace

from ..models import zoo
from ..models.checkpoints import write_checkpoint

pytestmark = pytest.mark.xdist_group("graph_diff")  # its fixtures take seconds: they are made once


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, dtype="bfloat16", num_hidden_layers=3)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> ir.Model:
    """A canonical graph of 3 layers; nobody may change it."""
    return trace(Checkpoint.open(folder))


def invoke(*args: str | Path) -> Result:
    result = CliRunner().invoke(cli, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_facts_are_counted(folder: Path, model: ir.Model) -> None:
    facts = summary.facts(model)
    checkpoint = Checkpoint.open(folder)
    assert facts.nodes == len(model.graph) == sum(facts.operators.values())
    assert facts.operators["llmforge::Attention"] == 3
    assert next(iter(facts.operators)) == "MatMul"
    assert facts.parameters == facts.active_parameters == checkpoint.parameters
    assert facts.weight_bytes > 4 * facts.parameters  # fp32, and the rotary tables
    assert facts.caches == 2 * 3
    assert facts.cache_bytes_per_token == 3 * 2 * checkpoint.config.num_key_value_heads * checkpoint.config.head_dim * 4


@pytest.mark.thorough
def test_a_token_uses_the_experts_that_it_chooses(tmp_path: Path) -> None:
    zoo.write("mixtral", tmp_path)  # two layers of four experts, of which it chooses two
    checkpoint = Checkpoint.open(tmp_path)
    facts = summary.facts(trace(checkpoint))
    assert facts.parameters == checkpoint.parameters
    assert facts.active_parameters == facts.parameters - 2 * 2 * (64 * 192 + 96 * 64)
    printed = invoke("trace", tmp_path).stdout
    assert f"{facts.parameters:,}, {facts.active_parameters:,} active per token" in printed


def test_a_written_graph_is_the_graph(model: ir.Model, tmp_path: Path) -> None:
    files = onnx_file.save(model, tmp_path / "deep" / "graph.onnx")
    assert [file.name for file in files] == ["graph.onnx", "graph.onnx.data"]
    loaded = onnx_file.load(files[0])
    assert not diff.diff(model, loaded)
    for name, value in model.graph.initializers.items():
        ours, theirs = value.const_value, loaded.graph.initializers[name].const_value
        assert ours is not None
        assert theirs is not None
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


def test_a_graph_without_weights_is_small_and_compares(model: ir.Model, tmp_path: Path) -> None:
    before = graph.fingerprint(model)
    (file,) = onnx_file.save(model, tmp_path / "graph.onnx", weights=False)
    assert file.stat().st_size < 100_000
    assert graph.fingerprint(model) == before
    assert not diff.diff(model, onnx_file.load(file))


def test_files_that_are_no_graphs_are_refused(model: ir.Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must end in \.onnx"):
        onnx_file.save(model, tmp_path / "graph.bin")
    with pytest.raises(InputError, match="no such file"):
        onnx_file.load(tmp_path / "absent.onnx")
    for content in (b"", b"not a graph at all", b"\x00" * 64):
        (tmp_path / "wrong.onnx").write_bytes(content)
        with pytest.raises(InputError, match="not an ONNX model"):
            onnx_file.load(tmp_path / "wrong.onnx")


def test_a_diff_names_everything_that_differs(model: ir.Model) -> None:
    other = model.clone()
    nodes = {node.name: node for node in other.graph}
    nodes["model.layers.0.input_layernorm/RMSNormalization"].attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.5)
    nodes["model.layers.1.mlp/Mul"].op_type = "Add"
    nodes["model.layers.2/Add"].name = "renamed"
    norm = other.graph.initializers["model.norm.weight"]
    norm.const_value = ir.tensor(np.full(norm.shape.numpy(), 3, np.float32), name=norm.name)  # type: ignore[union-attr]
    graph.initializer(other, "extra", np.zeros(2, np.float32))
    found = diff.diff(model, other)
    assert found
    adds, muls = found.operators["Add"], found.operators["Mul"]
    assert (adds[1] - adds[0], muls[1] - muls[0]) == (1, -1)
    assert found.nodes_removed == ("model.layers.2/Add (Add)",)
    assert found.nodes_added == ("renamed (Add)",)
    assert found.nodes_changed["model.layers.1.mlp/Mul"] == ("Mul → Add",)
    (epsilon,) = found.nodes_changed["model.layers.0.input_layernorm/RMSNormalization"]
    assert epsilon.startswith("epsilon: ")
    assert epsilon.endswith("→ 0.5")
    assert found.initializers_added == ("extra",)
    assert found.initializers_changed == {"model.norm.weight": "other numbers"}
    assert found.interface == {}
    lines = diff.text(found)
    assert "+ initializer extra" in lines
    assert "~ node model.layers.1.mlp/Mul: Mul → Add" in lines
    assert diff.text(diff.diff(model, model)) == ["no difference"]
    assert diff.summary(diff.diff(model, model)) == ["no difference"]
    assert [line for line in diff.summary(found) if "node " in line or "initializer " in line] == []
    counts = diff.summary(found)[-1]
    assert counts.startswith("nodes only in A: 1; nodes only in B: 1; nodes changed: ")
    assert counts.endswith("initializers only in B: 1; initializers changed: 1")


def test_the_commands(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "graph.onnx"
    result = invoke("trace", folder, "-o", file, "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["files"] == [str(file), f"{file}.data"]
    assert facts["layers"] == {"stack": "model.layers", "depth": 3, "lead": 0, "period": 1}
    assert facts["operators"]["llmforge::Attention"] == 3
    shown = invoke("trace", folder)
    assert shown.exit_code == 0
    assert "3: 2 traced, 1 copied (period 1)" in shown.stdout
    assert f"{facts['cache_bytes_per_token']:,} bytes per token in 6 tensors" in shown.stdout
    same = invoke("diff-graph", file, file)
    assert (same.exit_code, same.stdout) == (0, "no difference\n")
    other = onnx_file.load(file)
    next(node for node in other.graph if node.op_type == "Sigmoid").op_type = "Tanh"
    onnx_file.save(other, tmp_path / "other.onnx", weights=False)
    differs = invoke("diff-graph", file, tmp_path / "other.onnx")
    assert (differs.exit_code, differs.stderr) == (7, "")
    lines = differs.stdout.splitlines()
    assert "~ Sigmoid: 3 → 2 nodes" in lines
    assert "~ node model.layers.0.mlp.act_fn/Sigmoid: Sigmoid → Tanh" in lines
    as_data = json.loads(invoke("diff-graph", file, tmp_path / "other.onnx", "--json").stdout)
    assert as_data["operators"]["Tanh"] == [0, 1]
    assert invoke("trace", folder, "--no-weights").exit_code == 2
    assert invoke("diff-graph", file, tmp_path / "absent.onnx").exit_code == 5
    assert invoke("trace", tmp_path / "absent").exit_code == 5
