from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation
from transformers.integrations.moe import ExpertsInterface

from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import dialect, graph
from llmforge.trace import trace
from llmforge.trace.canonicalize import token_axes
from llmforge.trace.hooks import experts, internals

from ..models import zoo


def traced(folder: Path) -> ir.Model:
    return trace(Checkpoint.open(folder))


def moes(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if (node.domain, node.op_type) == ("llmforge", "MoE")]


def attributes(node: ir.Node) -> dict[str, object]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


# The canonical graph -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ir.Model]:
    """Two layers of four experts, each in tensors of its own; nobody may change it."""
    folder = tmp_path_factory.mktemp("mixtral")
    zoo.write("mixtral", folder, torch.bfloat16)
    return folder, traced(folder)


SILU = {"activation": "silu", "gated": 1, "interleaved": 0, "alpha": 1.0, "beta": 0.0, "limit": 0.0}


def test_experts_are_one_node_a_layer_and_nothing_computes_with_shapes(mixtral: tuple[Path, ir.Model]) -> None:
    _, model = mixtral
    first, second = moes(model)
    assert first.name == "model.layers.0.mlp.experts/MoE"
    assert attributes(first) == attributes(second) == SILU
    assert not {node.op_type for node in model.graph} & {"Shape", "Gemm", "Unsqueeze", "Expand", "Cast"}
    tokens, ids, weights = (graph.dims(value) for value in first.inputs[:3] if value is not None)
    assert tokens == ("batch", "sequence", 64)
    assert ids == weights == ("batch", "sequence", 2)
    assert graph.dims(first.outputs[0]) == ("batch", "sequence", 64)


def test_a_router_is_plain_operators_on_batch_and_sequence(mixtral: tuple[Path, ir.Model]) -> None:
    _, model = mixtral
    router = [node.op_type for node in model.graph if (node.name or "").startswith("model.layers.1.mlp.gate/")]
    assert router == ["MatMul", "Softmax", "TopK", "ReduceSum", "Div"]


def test_matrices_of_experts_lie_as_those_of_linear_layers(mixtral: tuple[Path, ir.Model]) -> None:
    folder, model = mixtral
    up = model.graph.initializers["model.layers.0.mlp.experts.gate_up_proj"]
    assert graph.dims(up) == (4, 64, 192)
    assert graph.sources(up) == ["model.layers.0.mlp.experts.gate_up_proj"]
    tensor = up.const_value
    assert isinstance(tensor, ir.LazyTensor)
    expected = zoo.reference(folder).get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    np.testing.assert_array_equal(tensor.numpy(), expected.detach().numpy().swapaxes(1, 2))


@pytest.mark.thorough
def test_the_matrices_of_experts_are_read_one_expert_at_a_time(tmp_path: Path) -> None:
    """Beside the result, [8, 64, 2·96] fp32, there is room for one expert and its conversion, not for all."""
    zoo.write("mixtral", tmp_path, num_local_experts=8, intermediate_size=512, hidden_size=256, num_hidden_layers=1)
    tensor = traced(tmp_path).graph.initializers["model.layers.0.mlp.experts.down_proj"].const_value
    assert tensor is not None
    tensor.numpy()  # imports
    gc.collect()
    tracemalloc.start()
    array = tensor.numpy()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert array.nbytes == 8 * 512 * 256 * 4
    assert peak < 1.5 * array.nbytes


@pytest.mark.thorough
def test_gates_with_limits_biases_and_matrices_as_they_lie(tmp_path: Path) -> None:
    zoo.write("gpt-oss", tmp_path)
    model = traced(tmp_path)
    for node in moes(model):
        form = attributes(node)
        assert form.pop("alpha") == pytest.approx(1.702)
        assert form == {"activation": "silu", "gated": 1, "interleaved": 1, "beta": 1.0, "limit": 7.0}
        assert len(node.inputs) == 7
        assert graph.dims(node.inputs[5]) == (4, 192)  # type: ignore[arg-type]
    stored = model.graph.initializers["model.layers.0.mlp.experts.gate_up_proj"].const_value
    assert isinstance(stored, ir.ExternalTensor)  # [K, N] in the checkpoint already: the file's bytes
    windows = [node.attributes.get_int("window") for node in model.graph if node.op_type == "Attention"]
    assert windows == [7, 0]
    assert all(len(node.inputs) == 7 for node in model.graph if node.op_type == "Attention")  # sinks


def test_a_step_reads_the_experts_that_its_tokens_choose(mixtral: tuple[Path, ir.Model]) -> None:
    """Experts that no token chooses may hold anything: infinite matrices would make every product NaN."""
    _, model = mixtral
    poisoned = model.clone()
    for node in moes(poisoned):
        _, ids, _, up, *_ = node.inputs
        assert ids is not None
        assert up is not None
        assert up.const_value is not None
        up.const_value = ir.tensor(
            np.concatenate([up.const_value.numpy()[:2], np.full((2, 64, 192), np.inf)]).astype(np.float32), name=up.name
        )
        zero = graph.initializer(poisoned, "two_experts", np.array([[[0, 1]]], np.int64))
        shifted = graph.insert(node, "Mul", [ids, graph.initializer(poisoned, "nought", np.array([0], np.int64))])[0]
        node.replace_input_with(1, graph.insert(node, "Add", [shifted, zero])[0])
        for value in (shifted, node.inputs[1]):
            assert value is not None
            value.shape, value.dtype = ids.shape, ids.dtype
    session = zoo.standard_session(dialect.expand(poisoned))
    feeds: dict[str, Any] = {
        "input_ids": np.arange(6).reshape(2, 3),
        "position_ids": np.arange(3)[None].repeat(2, 0),
        "past_lengths": np.zeros(2, np.int32),
    }
    for value in session.get_inputs():
        if value.name.startswith("past_key_values."):
            feeds[value.name] = np.zeros((2, value.shape[1], 8, value.shape[3]), np.float32)
    assert np.isfinite(session.run(["logits"], feeds)[0]).all()


@pytest.mark.thorough
def test_the_trace_leaves_no_implementation_of_experts_behind(mixtral: tuple[Path, ir.Model]) -> None:
    assert experts.NAME not in ExpertsInterface().valid_keys()


# What a module of experts computes ---------------------------------------------------------------------------------


def module(
    gate: Callable[[nn.Module, Tensor], Tensor] | None = None, act: str = "silu", *, extra: bool = False, **marks: Any
) -> Any:
    """Make a module of five experts of width 6, hidden size 8, with the decorator of transformers."""

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.limit, self.alpha = 2.5, 1.25
            wide = 12 if marks.get("has_gate", True) else 6
            name = "gate_up_proj" if marks.get("has_gate", True) else "up_proj"
            shapes = {name: (5, wide, 8), "down_proj": (5, 8, 6)}
            for parameter, shape in shapes.items():
                lies = (shape[0], shape[2], shape[1]) if marks.get("is_transposed") else shape
                self.register_parameter(parameter, nn.Parameter(torch.zeros(lies)))
                if marks.get("has_bias"):
                    self.register_parameter(f"{parameter}_bias", nn.Parameter(torch.zeros(shape[:2])))
            if extra:
                self.temperature = nn.Parameter(torch.ones(5))
            self.act_fn = ACT2FN[act]

        def forward(self, x: Tensor, ids: Tensor, mixing: Tensor) -> Tensor:
            y = torch.zeros_like(x)
            for token in range(len(x)):
                for place in range(ids.shape[1]):
                    expert = ids[token, place]
                    h = self.product("gate_up_proj" if self.has_gate else "up_proj", x[token], expert)
                    h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
                    y[token] += mixing[token, place] * self.product("down_proj", h, expert)
            return y

        def product(self, name: str, x: Tensor, expert: Tensor) -> Tensor:
            matrix = self.get_parameter(name)[expert]
            y = x @ matrix if self.is_transposed else matrix @ x
            return y + self.get_parameter(f"{name}_bias")[expert] if self.has_bias else y

    if gate is not None:
        Experts._apply_gate = gate  # type: ignore[attr-defined]
    return use_experts_implementation(Experts, **marks)(SimpleNamespace(_experts_implementation="eager"))


def clamped(self: Any, h: Tensor) -> Tensor:
    gate, up = h[..., ::2].clamp(max=self.limit), h[..., 1::2].clamp(-self.limit, self.limit)
    return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


def limited(self: Any, h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (module(), SILU),
        (module(act="gelu"), {**SILU, "activation": "gelu"}),
        (module(act="gelu_pytorch_tanh"), {**SILU, "activation": "gelu_tanh"}),
        (module(act="relu"), {**SILU, "activation": "relu"}),
        (module(act="quick_gelu"), {**SILU, "alpha": 1.702}),
        (module(is_transposed=True, has_bias=True), SILU),
        (module(act="relu2", has_gate=False), {**SILU, "activation": "relu2", "gated": 0}),
        (
            module(clamped, is_concatenated=False, is_transposed=True, has_bias=True),
            {**SILU, "interleaved": 1, "alpha": 1.25, "beta": 1.0, "limit": 2.5},
        ),
        (module(limited), {**SILU, "limit": 2.5}),
    ],
)
def test_experts_are_recognized_by_what_they_compute(made: nn.Module, expected: dict[str, object]) -> None:
    assert vars(experts.probe(made)) == expected


def off(self: Any, h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return self.act_fn(gate) * up * 1.0003


def swapped(self: Any, h: Tensor) -> Tensor:
    up, gate = h.chunk(2, -1)
    return self.act_fn(gate) * up


def late(self: Any, h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (module(off), "Experts computes with its experts something that llmforge::MoE does not know"),
        (module(swapped), "does not know"),
        (module(late), "does not know"),
        (module(act="mish"), "does not know"),
        (module(clamped), "does not know"),  # its marks say that gates come first
        (module(has_post_expert_norm=True), "normalizes the output of each expert"),
        (module(extra=True), "has parameters down_proj, gate_up_proj, temperature"),
    ],
)
def test_other_experts_are_refused(made: nn.Module, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        experts.probe(made)


def test_experts_that_take_more_than_tokens_are_refused() -> None:
    made = module()
    x = torch.zeros(2, 8)

    def forward(self: Any, x: Tensor, ids: Tensor, mixing: Tensor, capacity: int) -> Tensor:
        raise AssertionError

    type(made).forward = forward
    with pytest.raises(UnsupportedError, match="takes self, x, ids, mixing, capacity: more than tokens"):
        experts.ExpertsHook()(made, x, torch.zeros(2, 1), torch.zeros(2, 1), 3)


def test_a_model_without_the_registry_is_refused(tmp_path: Path) -> None:
    config = transformers.JetMoeConfig(
        **{**zoo.BASE, "kv_channels": 16, "num_local_experts": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    zoo.write_tokenizer(tmp_path)
    with pytest.raises(UnsupportedError, match="architecture 'JetMoe"):
        traced(tmp_path)


def test_only_experts_that_are_stacked_are_converted_in_pieces() -> None:
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

    keys = ("e.0.a", "e.0.b", "e.1.a", "e.1.b")
    patterns = ("e.*.a", "e.*.b", "e.*.a", "e.*.b")

    def group(*operations: Any) -> internals.ConversionGroup:
        return internals.ConversionGroup(
            "e", keys, patterns, WeightConverter(["e.*.a", "e.*.b"], "e", operations=[*operations])
        )

    first, second = group(MergeModulelist(dim=0), Concatenate(dim=1)).pieces()
    assert (first.keys, second.keys) == (("e.0.a", "e.0.b"), ("e.1.a", "e.1.b"))
    assert first.patterns == ("e.*.a", "e.*.b")
    for operations in (
        [MergeModulelist(dim=1), Concatenate(dim=1)],
        [MergeModulelist(dim=0), Concatenate(dim=0)],
        [MergeModulelist(dim=0), Transpose(dim0=0, dim1=1)],
    ):
        whole = group(*operations)
        assert whole.pieces() == [whole]


# Tokens in one axis ------------------------------------------------------------------------------------------------

HEAD = """
<ir_version: 12, opset_import: ["" : 24]>
flat (float[batch, sequence, 8] x, float[8, 4] w) => (float[batch, sequence, N] y)
<int64[2] flat = {-1, 8}, int64[1] axis = {1}, int64[1] zero = {0}, float[T, 8] t>
"""


def flattened(body: str, width: int, shapes: dict[str, tuple[Any, ...]]) -> ir.Model:
    """Parse a graph over tokens `t` that were flattened to [T, 8], and note the shapes of its values."""
    model = ir.from_onnx_text(HEAD.replace("N]", f"{width}]") + "{ t = Reshape (x, flat) " + body + " }")
    values = {value.name: value for node in model.graph for value in node.outputs}
    for name, shape in shapes.items():
        values[name].shape, values[name].dtype = ir.Shape(shape), values[name].dtype or ir.DataType.FLOAT
    return model


def test_operators_on_tokens_work_with_two_axes_in_front() -> None:
    body = """
        scores = MatMul (t, w)
        p = Softmax <axis = 1> (scores)
        s = ReduceSum <keepdims = 1> (p, axis)
        q = Div (p, s)
        shape = Shape (x)
        four = Constant <value = int64[1] {4}> ()
        ends = Slice (shape, zero, axis)
        y = Reshape (q, shape)
    """
    shapes: dict[str, tuple[Any, ...]] = dict.fromkeys(("scores", "p", "q"), ("T", 4))
    model = flattened(body, 4, {**shapes, "t": ("T", 8), "s": ("T", 1), "y": ("batch", "sequence", 4)})
    token_axes.restore(model)
    by_output = {value.name: node for node in model.graph for value in node.outputs}
    assert by_output["p"].attributes.get_int("axis") == 2
    axes = by_output["s"].inputs[1]
    assert axes is not None
    assert axes.const_value is not None
    assert axes.const_value.numpy().tolist() == [2]
    assert graph.dims(by_output["q"].outputs[0]) == ("batch", "sequence", 4)
    target = by_output["y"].inputs[1]
    assert target is not None
    assert target.const_value is not None
    assert target.const_value.numpy().tolist() == [0, 0, 4]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("s = Softmax <axis = 0> (t) y = Reshape (s, flat)", "Softmax, which mixes the tokens"),
        ("s = Softmax <axis = -2> (t) y = Reshape (s, flat)", "Softmax, which mixes the tokens"),
        ("s = CumSum (t, axis) y = Reshape (s, flat)", "CumSum, whose operator is not known"),
        ("u = Transpose <perm = [1, 0]> (t) s = MatMul (t, u) y = Reshape (s, flat)", "moves the axis of tokens"),
        ("s = ReduceSum <keepdims = 1> (t, zero) y = Add (t, s)", "ReduceSum, which mixes the tokens"),
    ],
)
def test_an_operator_that_mixes_tokens_is_refused(body: str, reason: str) -> None:
    model = flattened(body, 8, {"t": ("T", 8), "s": ("T", 8), "y": ("batch", "sequence", 8)} if "s =" in body else {})
    with pytest.raises(UnsupportedError, match=reason):
        token_axes.restore(model)
