"""Depth stamping: the graph of a few layers, copied, is the graph of all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx_ir as ir
import psutil
import pytest
import torch

from llmforge.checkpoint import Checkpoint
from llmforge.ir import dialect, graph
from llmforge.trace import trace
from llmforge.trace.export import capture, pattern, replicate_layers
from llmforge.trace.export.pattern import Irregular, Pattern

from ..models import zoo
from ..models.checkpoints import write_checkpoint

SLIDING, FULL = "sliding_attention", "full_attention"
REPEATED: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {  # case → zoo, changes, (lead, period)
    "llama": ("llama", {"num_hidden_layers": 6}, (0, 1)),
    "qwen2: leading layers without a window": (
        "qwen2-mixed-windows",
        {"num_hidden_layers": 6, "max_window_layers": 2},
        (2, 1),
    ),
    "gemma2: windows alternate": ("gemma2", {"num_hidden_layers": 7}, (0, 2)),  # … and the last period is cut short
    "gemma3: two rotary tables": (
        "gemma3",
        {"num_hidden_layers": 8, "layer_types": [SLIDING, SLIDING, FULL] * 2 + [SLIDING, SLIDING]},
        (0, 3),
    ),
    "gpt-neox: nodes that a rewriter made": ("gpt-neox", {"num_hidden_layers": 4}, (0, 1)),
}
SLOW = {case for case in REPEATED if case != "llama"}


def both(folder: Path) -> tuple[ir.Model, ir.Model]:
    """Trace with copied layers, and all of them."""
    checkpoint = Checkpoint.open(folder)
    return trace(checkpoint), trace(checkpoint, shorten=False)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in REPEATED]
)
def test_a_replicated_graph_is_the_full_one(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes, (lead, period) = REPEATED[case]
    zoo.write(name, tmp_path, torch.bfloat16, **changes)
    exported: list[int] = []
    original = capture._export
    monkeypatch.setattr(
        capture, "_export", lambda t, shapes, *rest: (exported.append(len(shapes)), original(t, shapes, *rest))[1]
    )
    short, full = both(tmp_path)
    depth = changes["num_hidden_layers"]
    assert exported == [lead + 2 * period, depth]
    found = pattern.recorded(short)
    assert found is not None
    assert (found.depth, found.lead, found.period) == (depth, lead, period)
    assert pattern.recorded(full) is None
    assert graph.fingerprint(short) == graph.fingerprint(full)
    assert [node.name for node in short.graph] == [node.name for node in full.graph]
    outputs = [[value.name for node in model.graph for value in node.outputs] for model in (short, full)]
    assert outputs[0] == outputs[1]
    for value, other in zip(short.graph.initializers.values(), full.graph.initializers.values(), strict=True):
        assert graph.sources(short.graph.initializers[str(other.name)]) == graph.sources(other)
        assert value.const_value is not None


def test_copies_read_the_weights_of_their_own_layer(tmp_path: Path) -> None:
    zoo.write("llama", tmp_path, num_hidden_layers=4)
    model = trace(Checkpoint.open(tmp_path))
    assert pattern.recorded(model) is not None
    assert zoo.largest_difference(dialect.expand(model), zoo.reference(tmp_path), zoo.SCHEDULES["ragged"]) <= 1e-5


@pytest.mark.thorough
def test_layers_that_do_not_repeat_are_all_traced_and_the_graph_says_why(tmp_path: Path) -> None:
    types = [SLIDING, FULL, FULL, SLIDING]
    zoo.write("qwen2", tmp_path, num_hidden_layers=4, use_sliding_window=True, sliding_window=7, layer_types=types)
    model = trace(Checkpoint.open(tmp_path))
    assert pattern.recorded(model) is None
    reason = json.loads(model.metadata_props[pattern.LAYERS])["irregular"]
    assert reason == "2 kinds of layer, which do not repeat within 4 layers"
    windows = [node.attributes.get_int("window") for node in model.graph if node.op_type == "Attention"]
    assert windows == [7, 0, 0, 7]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in a layer", "between layers", "behind the layers"])
def test_what_depends_on_the_depth_in_code_alone_is_seen(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No configuration tells: the model's code looks at the number of a layer, or at how many there are."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

    write_checkpoint(tmp_path, num_hidden_layers=5)
    layer_forward, model_forward = LlamaDecoderLayer.forward, LlamaModel.forward

    def scaled(self: Any, hidden_states: torch.Tensor, **rest: Any) -> Any:
        index = self.self_attn.layer_idx
        if where == "in a layer" and index == 4:
            hidden_states = hidden_states * 2
        return layer_forward(self, hidden_states, **rest)

    def around(self: Any, *args: Any, **kwargs: Any) -> Any:
        hooks = []
        if where == "between layers":
            hooks = [
                layer.register_forward_hook(lambda module, given, output: output * 2, prepend=True)
                for layer in self.layers[3:4]
            ]
        output = model_forward(self, *args, **kwargs)
        for hook in hooks:
            hook.remove()
        if where == "behind the layers":
            output.last_hidden_state = output.last_hidden_state * len(self.layers)
        return output

    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    monkeypatch.setattr(LlamaModel, "forward", around)
    short, full = both(tmp_path)
    assert pattern.recorded(short) is None
    assert graph.fingerprint(short) == graph.fingerprint(full)
    assert sum(node.op_type == "Mul" for node in full.graph) == 5 * 2 + 1


@pytest.mark.slow
def test_layers_that_share_a_weight_are_not_copied_with_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    write_checkpoint(tmp_path, num_hidden_layers=4)
    construct = LlamaDecoderLayer.__init__
    first: list[Any] = []

    def init(self: Any, config: Any, layer_idx: int) -> None:
        construct(self, config, layer_idx)
        if layer_idx == 0:
            first[:] = [self.mlp]
        self.mlp = first[0]

    monkeypatch.setattr(LlamaDecoderLayer, "__init__", init)
    short, full = both(tmp_path)
    assert graph.fingerprint(short) == graph.fingerprint(full)
    assert "model.layers.3.mlp.up_proj.weight" not in short.graph.initializers


# The graph alone ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ir.Model:
    """A full trace of 4 layers; nobody may change it."""
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(folder, num_hidden_layers=4)
    return trace(Checkpoint.open(folder), shorten=False)


WHOLE = Pattern("model.layers", 4, 0, 1)


def test_a_cut_graph_holds_the_first_layers_and_shares_tensors(llama: ir.Model) -> None:
    before = graph.fingerprint(llama)
    short = replicate_layers.some_layers(llama, WHOLE, [0, 1])
    assert graph.fingerprint(llama) == before
    dialect.check(short)
    assert sum(node.op_type == "Attention" for node in short.graph) == 2
    assert {str(value.name) for value in short.graph.outputs} == {
        "logits",
        *(f"present.{layer}.{part}" for layer in (0, 1) for part in ("key", "value")),
    }
    assert not any(name.startswith(("model.layers.2", "model.layers.3")) for name in short.graph.initializers)
    for name, value in short.graph.initializers.items():
        assert value.const_value is llama.graph.initializers[name].const_value


def test_a_cut_graph_grows_back(llama: ir.Model) -> None:
    """All but the tensors, which a trace binds afterwards."""
    short = replicate_layers.some_layers(llama, WHOLE, [0, 1])
    replicate_layers.replicate(short, WHOLE)
    expected = llama.clone()
    for model in (short, expected):
        for value in model.graph.initializers.values():
            value.const_value = None
    assert graph.fingerprint(short) == graph.fingerprint(expected)


def _other_epsilon(model: ir.Model) -> None:
    node = next(node for node in model.graph if node.name == "model.layers.1.input_layernorm/RMSNormalization")
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.5)


def _other_operator(model: ir.Model) -> None:
    node = next(node for node in model.graph if node.name == "model.layers.1.mlp/Mul")
    node.op_type = "Add"


def _other_order(model: ir.Model) -> None:
    node = next(node for node in model.graph if node.name == "model.layers.1.mlp/Mul")
    a, b = node.inputs
    node.replace_input_with(0, b)
    node.replace_input_with(1, a)


def _other_weight(model: ir.Model) -> None:
    node = next(node for node in model.graph if node.name == "model.layers.1.mlp.up_proj/MatMul")
    node.replace_input_with(1, model.graph.initializers["model.layers.0.mlp.up_proj.weight"])


def _skip_connection(model: ir.Model) -> None:
    node = next(node for node in model.graph if node.name == "model.layers.1/Add")
    early = next(node for node in model.graph if node.name == "model.layers.0/Add")
    node.replace_input_with(1, early.outputs[0])


def _foreign_cache(model: ir.Model) -> None:
    node = next(node for node in model.graph if node.name == "model.layers.1.self_attn/Attention")
    node.attributes["layer"] = ir.AttrInt64("layer", 3)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_other_epsilon, "epsilon of model.layers.0.input_layernorm/RMSNormalization is"),
        (_other_operator, "model.layers.0.mlp/Mul is Mul, model.layers.1.mlp/Mul Add"),
        (_other_order, "model.layers.0.mlp/Mul reads"),
        (_other_weight, "one reads model.layers.0.mlp.up_proj.weight, the other model.layers.0.mlp.up_proj.weight"),
        (_skip_connection, "layer 0 exchanges more than hidden states"),
        (_foreign_cache, r"caches of layers 0 and 1 are numbered \[1, 3\] apart"),
    ],
)
def test_layers_that_differ_in_the_graph_are_not_copied(llama: ir.Model, spoil: Any, reason: str) -> None:
    short = replicate_layers.some_layers(llama, WHOLE, [0, 1])
    spoil(short)
    before = graph.fingerprint(short)
    with pytest.raises(Irregular, match=reason):
        replicate_layers.replicate(short, WHOLE)
    assert graph.fingerprint(short) == before


@pytest.mark.slow
def test_a_graph_that_cannot_be_grown_is_traced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, num_hidden_layers=4)

    def refuse(*_: object) -> None:
        raise Irregular("for this test")

    monkeypatch.setattr(replicate_layers, "replicate", refuse)
    model = trace(Checkpoint.open(tmp_path))
    assert json.loads(model.metadata_props[pattern.LAYERS]) == {"irregular": "for this test"}
    assert sum(node.op_type == "Attention" for node in model.graph) == 4


# Cost --------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_trace_of_70_billion_parameters_is_small_and_quick(tmp_path: Path, tiny_checkpoint: Path) -> None:
    from .test_trace import LARGE, write_hollow

    trace(Checkpoint.open(tiny_checkpoint))  # what a first trace imports is not counted
    size = write_hollow(tmp_path, **{**LARGE, "num_hidden_layers": 80})
    process = psutil.Process()
    resident, cpu = process.memory_info().rss, sum(process.cpu_times()[:2])
    model = trace(Checkpoint.open(tmp_path))
    assert size > 1.4e11
    assert sum(process.cpu_times()[:2]) - cpu < 20
    assert process.memory_info().rss - resident < 5e8
    assert sum(node.op_type == "Attention" for node in model.graph) == 80
