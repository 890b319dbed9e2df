"""Latent attention and layers with a state, from transformers to a served session."""

from __future__ import annotations

import functools
import inspect
import math
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

from llmforge import targets
from llmforge.backends.onnxruntime import builder as engine
from llmforge.backends.onnxruntime.session import Session
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import dialect, graph, interface
from llmforge.ir.operators import canonical
from llmforge.passes import FlashAttention, FuseNorms, PackGateUp, PackQkv
from llmforge.rewrite.pass_base import Context
from llmforge.runtime.config import SessionConfig
from llmforge.runtime.interface import StepInputs
from llmforge.trace import trace
from llmforge.trace.canonicalize import tokenwise
from llmforge.trace.export import capture, reference
from llmforge.trace.hooks import indexers, linear_attention, norms, recurrent, rotary, state_spaces
from llmforge.trace.hooks.attention import AttentionHook, CacheLayer
from llmforge.verification import probe

from ..models import zoo
from ..models.checkpoints import write_tokenizer

TARGET = targets.load("cpu-avx2")
CPU = Context(TARGET)


def traced(name: str, folder: Path, **changes: Any) -> ir.Model:
    zoo.write(name, folder, **changes)
    return trace(Checkpoint.open(folder))


def served(model: ir.Model) -> Session:
    weights = probe.InitializerArrays()
    return probe.open_session(engine.lower(model, TARGET)[0], weights, 1)


# The graph ---------------------------------------------------------------------------------------------------------


def test_latent_attention_caches_its_latents(tmp_path: Path) -> None:
    model = traced("deepseek-v3", tmp_path, num_hidden_layers=1)
    (attention,) = canonical.LatentAttention.all(model)
    assert (attention.num_heads, attention.rank, attention.rotary) == (4, 24, 8)
    assert (attention.plain, attention.value_dim) == (16, 12)
    caches = {value.name: graph.dims(value) for value in model.graph.inputs if "past_key" in str(value.name)}
    assert caches == {"past_key_values.0.latent": ("batch", 1, "capacity", 32)}
    assert graph.sources(attention.up) == ["model.layers.0.self_attn.kv_b_proj.weight"]
    assert not {"ScatterND", "Range", "Shape", "ConstantOfShape", "Expand"} & {node.op_type for node in model.graph}
    changes = FlashAttention().run(model, CPU)
    assert not changes
    assert changes.skipped[0].reason == "it caches latents, and GroupQueryAttention reads keys and values"


@pytest.mark.thorough
def test_keys_and_values_that_are_smaller_than_their_latents_are_cached(tmp_path: Path) -> None:
    model = traced("deepseek-v3", tmp_path, num_hidden_layers=1, kv_lora_rank=200)
    (attention,) = canonical.Attention.all(model)
    assert (attention.num_heads, attention.kv_num_heads) == (4, 4)
    caches = {value.name: graph.dims(value) for value in model.graph.inputs if "past_key" in str(value.name)}
    assert caches == {
        "past_key_values.0.key": ("batch", 4, "capacity", 24),  # 16 without rotary embedding, 8 with it
        "past_key_values.0.value": ("batch", 4, "capacity", 12),
    }
    changes = FlashAttention().run(model, CPU)
    assert not changes
    assert "GroupQueryAttention needs the same size" in changes.skipped[0].reason


def test_a_layer_with_a_state_has_states_instead_of_keys_and_values(tmp_path: Path) -> None:
    model = traced("qwen3-5", tmp_path)
    inputs = {value.name: graph.dims(value) for value in model.graph.inputs}
    assert inputs == {
        "input_ids": ("batch", "sequence"),
        "position_ids": ("batch", "sequence"),
        "past_lengths": ("batch",),
        "lengths": ("batch",),
        "logits_rows": ("rows",),
        "past_key_values.0.conv": ("batch", 3, 80),  # 2 · 2 · 8 + 4 · 12 channels
        "past_key_values.0.recurrent": ("batch", 4, 8, 12),
        "past_key_values.1.key": ("batch", 2, "capacity", 16),
        "past_key_values.1.value": ("batch", 2, "capacity", 16),
    }
    by_kind = {node.op_type: node for node in model.graph}
    assert by_kind["CausalConv"].attributes.get_string("activation") == "silu"
    weight = by_kind["CausalConv"].inputs[1]
    assert weight is not None
    assert graph.sources(weight) == ["model.layers.0.linear_attn.conv1d.weight"]
    assert by_kind["LinearAttention"].attributes.get_int("num_heads") == 2
    assert by_kind["LinearAttention"].attributes.get_float("scale") == pytest.approx(8**-0.5)


def test_a_model_without_a_state_takes_no_lengths(tmp_path: Path) -> None:
    model = traced("llama", tmp_path, num_hidden_layers=1)
    assert "lengths" not in {value.name for value in model.graph.inputs}


# Passes and sessions -----------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["qwen3-5", "bamba", *(pytest.param(name, marks=[pytest.mark.slow]) for name in ("jamba", "minicpm3"))]
)
def test_passes_keep_what_the_model_computes(name: str, tmp_path: Path) -> None:
    model = traced(name, tmp_path)
    session = served(model)
    for step in (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention()):
        step.run(model, CPU)
        dialect.check(model)
    assert model.opset_imports["com.microsoft"] == 1
    after = served(model)
    for run in probe.random_runs(zoo.VOCABULARY):
        for before, now in zip(
            probe.drive(session, run, caches=True), probe.drive(after, run, caches=True), strict=True
        ):
            np.testing.assert_allclose(now.logits, before.logits, atol=1e-5)
            assert now.caches.keys() == before.caches.keys()
            for cache, rows in before.caches.items():
                for expected, found in zip(rows, now.caches[cache], strict=True):
                    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.thorough
def test_a_session_reuses_a_row_and_pads_without_touching_its_state(tmp_path: Path) -> None:
    model = traced("qwen3-5", tmp_path)
    session = served(model)
    assert [(state.name, state.dims) for state in session.signature.states] == [
        ("past_key_values.0.conv", (3, 80)),
        ("past_key_values.0.recurrent", (4, 8, 12)),
    ]
    assert [cache.name for cache in session.signature.caches] == ["past_key_values.1.key", "past_key_values.1.value"]
    rng = np.random.default_rng(0)
    ids = rng.integers(3, zoo.VOCABULARY, (2, 6))
    cache = session.allocate(2, 16)
    for buffer in cache.buffers.values():
        buffer[...] = 5.0  # what an earlier sequence left
    counts, none = np.array([6, 4]), np.zeros(2, np.int32)
    session.step(StepInputs(ids, none, lengths=counts), cache)
    token = ids[:, :1]
    together = session.step(StepInputs(token, counts.astype(np.int32)), cache)
    for row, count in enumerate(counts):
        alone = session.allocate(1, 16)
        session.step(StepInputs(ids[row : row + 1, :count], none[:1]), alone)
        wanted = session.step(StepInputs(token[row : row + 1], np.array([count], np.int32)), alone)
        np.testing.assert_allclose(together[row], wanted[0], atol=1e-5)
    padded = session.allocate(2, 16)
    session.step(StepInputs(ids, none), padded)  # without lengths the padding counts, and shows
    assert np.abs(session.step(StepInputs(token, counts.astype(np.int32)), padded) - together)[1].max() > 1e-3


def test_the_engine_writes_and_loads_a_model_with_a_state(tmp_path: Path) -> None:
    model = traced("lfm2", tmp_path / "checkpoint")
    lowered, changes = engine.lower(model, TARGET)
    assert any("CausalConv expanded" in rewritten.what for rewritten in changes.rewritten)
    path = tmp_path / "model.onnx"
    ir.save(lowered, path, external_data="model.onnx.data")
    session = Session(path, SessionConfig(threads=1))
    logits = session.step(StepInputs(np.array([[5, 6, 7]]), np.zeros(1, np.int32)), session.allocate(1, 8))
    assert np.isfinite(logits).all()


# What is recognized, and what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("RwkvConfig", {"attention_hidden_size": 64}, "no layer caches keys and values or a state"),
    ],
)
def test_other_recurrences_are_refused_by_name(kind: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = getattr(transformers, kind)(**{**zoo.BASE, **changes})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    name = kind.removesuffix("Config")
    with pytest.raises(UnsupportedError, match=rf"architecture '{name}\w*' cannot be compiled: {reason}"):
        trace(Checkpoint.open(tmp_path))


class Gated(nn.Module):
    """x̂·w·activation(gate) with variations."""

    def __init__(self, activation: Any, *, before: bool = False, groups: int = 1, shared: float = 0.0) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(16)), 1e-5
        self.activation, self.before, self.size, self.shared = activation, before, 16 // groups, shared

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        factor = 1.0 if gate is None else self.activation(gate)
        x = x * factor if self.before else x
        parts = x.reshape(*x.shape[:-1], -1, self.size)
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.epsilon)
        x = (parts.reshape(x.shape) + self.shared) * self.weight
        return x if self.before else x * factor


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (Gated(functional.silu), (functional.silu, False, 1)),
        (Gated(torch.sigmoid), (torch.sigmoid, False, 1)),
        (Gated(functional.silu, before=True), (functional.silu, True, 1)),
        (Gated(functional.silu, before=True, groups=4), (functional.silu, True, 4)),
        (Gated(torch.sigmoid, groups=2), (torch.sigmoid, False, 2)),
        (Gated(torch.tanh), None),
        (Gated(torch.tanh, before=True), None),
        (Gated(functional.silu, before=True, shared=0.1), None),
    ],
)
def test_a_gated_norm_is_recognized_by_what_it_computes(norm: Gated, expected: Any) -> None:
    found = norms.probe_gated(norm, (16,), [1e-5])
    assert found == (None if expected is None else norms.GatedNorm(0.0, 1e-5, *expected))


def test_a_norm_whose_gate_may_be_left_out_keeps_its_gate() -> None:
    norm = Gated(torch.tanh)  # without a gate it is a norm, with one it is nothing known
    x, gate = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    expected = norm(x, gate)
    norms.substitute(norm)
    norms.substitute_gated(norm)
    assert torch.equal(norm(x, gate), expected)


def test_a_norm_that_needs_the_gate_that_it_declares_optional_is_not_run_alone() -> None:
    """As those of Kimi Linear and Bailing; that of Mamba-2 does without."""
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated

    norms_of = {"plain": nn.RMSNorm(16), "optional": Gated(torch.tanh), "needed": KimiLinearRMSNormGated(16)}
    model: Any = SimpleNamespace(model=nn.ModuleDict(norms_of))
    found = list(reference.ReferenceModel.norms(model))
    assert [norm.name for norm in found] == ["plain", "optional"]
    assert [norm.compute(np.ones((2, 16), np.float32)).shape for norm in found] == [(2, 16)] * 2


def original_rule() -> Any:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return torch_chunk_gated_delta_rule


def test_a_delta_rule_of_other_arithmetic_is_refused() -> None:
    rule = original_rule()
    recurrent.probe_delta_rule(rule, 2, 4, 8, 12, normalized=True)
    recurrent.probe_delta_rule(rule, 2, 4, 8, 12, normalized=False)

    def other(*args: Any, **kwargs: Any) -> Any:
        y, state = rule(*args, **kwargs)
        return y, state * 1.01

    with pytest.raises(UnsupportedError, match="other does not compute the gated delta rule"):
        recurrent.probe_delta_rule(other, 2, 4, 8, 12, normalized=True)


def original_scan() -> Any:
    from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan

    return mamba2_chunk_scan


def original_selective_scan() -> Any:
    from transformers.models.jamba.modeling_jamba import mamba_selective_scan

    return mamba_selective_scan


def twin(function: Any, before: Any = None, after: Any = None) -> Any:
    """Make a function that differs from `function` in its arguments, by name, or in its results."""

    @functools.wraps(function)
    def other(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        bound.arguments.update(before(bound.arguments) if before else {})
        result = function(*bound.args, **bound.kwargs)
        return after(*result) if after else result

    return other


SCANS: dict[str, Any] = {
    "keys and queries swapped": {"before": lambda a: {"B": a["C"], "C": a["B"]}},
    "a decay without the step": {"before": lambda a: {"A": a["A"] * 0.5}},
    "no skip": {"before": lambda a: {"D": None}},
    "another bias": {"before": lambda a: {"dt_bias": a["dt_bias"] * 2}},
    "no softplus": {"before": lambda a: {"dt_softplus": False, "dt": a["dt"].abs()}},
    "no limit": {"before": lambda a: {"dt_limit": (0.0, float("inf"))}},
    "a state from zeros": {"before": lambda a: {"initial_states": None}},
    "tokens in turn": {"before": lambda a: {"hidden_states": a["hidden_states"].roll(1, 1)}},
    "a state that is scaled": {"after": lambda y, state: (y, state * 1.01)},
    "an output that is shifted": {"after": lambda y, state: (y + 0.01, state)},
}


def probe_scan(scan: Any) -> None:
    state_spaces.probe_chunk_scan(scan, 4, 64, skip=True, bias=True, softplus=True, limit=(0.0, math.inf))


@pytest.mark.parametrize("difference", SCANS)
def test_a_scan_of_other_arithmetic_is_refused(difference: str) -> None:
    probe_scan(original_scan())
    with pytest.raises(UnsupportedError, match="mamba2_chunk_scan does not compute the scan of Mamba-2"):
        probe_scan(twin(original_scan(), **SCANS[difference]))


@pytest.mark.parametrize(
    "difference",
    [
        {"before": lambda a: {"B": a["C"], "C": a["B"]}},
        {"before": lambda a: {"z": None}},
        {"before": lambda a: {"A": a["A"].mean(1, keepdim=True).expand_as(a["A"])}},
        {"after": lambda y, state: (y, state + 0.01)},
    ],
)
def test_a_selective_scan_of_other_arithmetic_is_refused(difference: Any) -> None:
    flags = {"skip": True, "bias": True, "gate": True, "softplus": True}
    state_spaces.probe_selective_scan(original_selective_scan(), 4, **flags)
    with pytest.raises(UnsupportedError, match="mamba_selective_scan does not compute the scan of Mamba"):
        state_spaces.probe_selective_scan(twin(original_selective_scan(), **difference), 4, **flags)


def test_a_model_whose_scan_differs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bamba import modeling_bamba

    zoo.write("bamba", tmp_path)
    other = twin(original_scan(), **SCANS["a decay without the step"])
    monkeypatch.setattr(modeling_bamba, "mamba2_chunk_scan", other)
    with pytest.raises(UnsupportedError, match="mamba2_chunk_scan does not compute the scan of Mamba-2"):
        trace(Checkpoint.open(tmp_path))


@pytest.mark.parametrize("by_channel", [False, True])
def test_a_delta_rule_that_decays_otherwise_is_refused(by_channel: bool) -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    rules = {False: original_rule(), True: chunk_kimi_delta_attention}
    recurrent.probe_delta_rule(rules[by_channel], 2, 2, 8, 12, normalized=True, by_channel=by_channel)
    other = twin(rules[by_channel], lambda a: {"g": a["g"] * 1.1})
    with pytest.raises(UnsupportedError, match="does not compute the gated delta rule"):
        recurrent.probe_delta_rule(other, 2, 2, 8, 12, normalized=True, by_channel=by_channel)


def test_arguments_without_a_name_must_stay_unread() -> None:
    def conv(hidden_states: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **kwargs: Any) -> Tensor:
        factor = kwargs["gain"] * 1.0 if "gain" in kwargs else 1.0
        padded = functional.pad(hidden_states, (weight.shape[1] - 1, 0))
        return factor * functional.conv1d(padded, weight[:, None], bias, groups=hidden_states.shape[1])

    x, weight = torch.randn(1, 3, 5), torch.randn(3, 4)
    unread = linear_attention.bind(conv, (x, weight), {"position_embeddings": (x, x)})
    assert recurrent.probe_convolution(unread.probed, 4, biased=False, activation=None) == "none"
    read = linear_attention.bind(conv, (x, weight), {"gain": x})
    with pytest.raises(UnsupportedError, match="conv is called with gain and cannot be probed"):
        recurrent.probe_convolution(read.probed, 4, biased=False, activation=None)


def test_a_state_space_is_gated_linear_attention(tmp_path: Path) -> None:
    model = traced("bamba", tmp_path)
    [layer] = canonical.LinearAttention.all(model)
    assert (layer.update_rule, layer.num_heads, layer.scale, layer.beta) == ("gated", 2, 1.0, None)
    assert graph.dims(layer.past) == ("batch", 8, 8, 16)
    assert graph.dims(layer.decay) == ("batch", "sequence", 8)


@pytest.mark.thorough
def test_layers_without_a_cache_are_not_counted(tmp_path: Path) -> None:
    model = traced("nemotron-h", tmp_path)
    caches = {str(value.name): graph.dims(value) for value in model.graph.inputs if "past_key" in str(value.name)}
    assert caches == {
        "past_key_values.0.conv": ("batch", 3, 160),
        "past_key_values.0.recurrent": ("batch", 8, 8, 16),
        "past_key_values.1.key": ("batch", 2, "capacity", 16),
        "past_key_values.1.value": ("batch", 2, "capacity", 16),
        "past_key_values.2.conv": ("batch", 3, 160),
        "past_key_values.2.recurrent": ("batch", 8, 8, 16),
    }


def test_a_layer_that_reads_keys_of_another_is_the_one_behind_it() -> None:
    run = AttentionHook(64)
    run.layers = [CacheLayer(None, run) for _ in range(3)]
    key, value = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
    run.layers[0].update(key, value)
    for index in range(3):
        assert run._layer_of(key, value) == index
        run.layers[index].read = (key, value)
    with pytest.raises(UnsupportedError, match="of another layer, and which layer it is of is open"):
        run._layer_of(key, value)
    run.layers = [CacheLayer(None, run) for _ in range(2)]
    for layer in run.layers:
        layer.update(key, value)
    run.layers[0].read = (key, value)
    with pytest.raises(UnsupportedError, match="which layer it is of is open"):  # the next has keys of its own
        run._layer_of(key, value)


def test_an_indexer_is_refused_with_what_it_chooses(tmp_path: Path) -> None:
    class Indexer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.index_topk = 2048

        def forward(self, x: Tensor, past_key_values: Any) -> Any:
            return past_key_values.update_indexer(x, 0)

    indexers.refuse(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(UnsupportedError, match=r"Indexer chooses which .*\(index_topk is 2048\)") as caught:
        indexers.refuse(nn.Sequential(nn.Linear(2, 2), Indexer()))
    assert str(caught.value.hint).startswith("needed: ")


def test_a_quantile_of_a_constant_is_a_constant() -> None:
    class Cut(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            quantile = torch.distributions.Normal(0, 1).icdf(torch.tensor(0.95))
            return functional.relu(x - quantile) + torch.erfinv(y)

    inputs = (torch.randn(3, 4), torch.rand(3, 4) / 2)
    module = Cut()
    program = torch.export.export(module, inputs)
    count = sum(node.target in capture.LACKING for node in program.graph.nodes)
    capture.fold(program)
    left = sum(node.target in capture.LACKING for node in program.graph.nodes)
    assert (count, left) == (2, 1)  # that of an input stays
    torch.testing.assert_close(program.module()(*inputs), module(*inputs))


def test_a_convolution_that_looks_ahead_is_refused() -> None:
    def ahead(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        return functional.conv1d(functional.pad(x, (2, 1)), weight[:, None], bias, groups=x.shape[1])

    with pytest.raises(UnsupportedError, match="ahead is no causal convolution"):
        recurrent.probe_convolution(ahead, 4, biased=True, activation=None)


def test_positions_of_several_axes_that_are_not_one_are_refused() -> None:
    given = torch.arange(6).view(2, 3)
    assert rotary._one_axis(nn.Identity(), given[None].expand(3, -1, -1), given) is given
    for other in (torch.stack([given] * 3), (given + 1)[None].expand(3, -1, -1)):
        with pytest.raises(UnsupportedError, match="positions of more than one axis"):
            rotary._one_axis(nn.Identity(), other, given)


# Rewrites ----------------------------------------------------------------------------------------------------------


class Writes(nn.Module):
    def __init__(self, cuts: tuple[slice, slice], *, early: bool = False) -> None:
        super().__init__()
        self.cuts, self.early = cuts, early

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        x = a.new_empty(a.shape[0], 8)
        x[..., self.cuts[0]].copy_(a)
        early = x.sum() if self.early else 0
        x[..., self.cuts[1]].copy_(b)
        return x * 2 + early


@pytest.mark.parametrize(
    ("module", "replaced"),
    [
        (Writes((slice(0, 5), slice(5, None))), True),
        (Writes((slice(3, 8), slice(0, 3))), True),
        (Writes((slice(0, 5), slice(4, 7))), False),  # an overlap, and a gap
        (Writes((slice(0, 5), slice(5, None)), early=True), False),  # read before it is complete
    ],
)
def test_an_empty_tensor_that_is_filled_piece_by_piece_is_a_concatenation(module: Writes, replaced: bool) -> None:
    inputs = (torch.randn(2, 5), torch.randn(2, 3))
    program = torch.export.export(
        module, inputs, dynamic_shapes=({0: torch.export.Dim("n")}, {0: torch.export.Dim("n")})
    )
    capture.concatenate(program)
    targets_of_nodes = [node.target for node in program.graph.nodes]
    assert (torch.ops.aten.copy_.default not in targets_of_nodes) == replaced
    assert (torch.ops.aten.cat.default in targets_of_nodes) == replaced
    if replaced:
        assert torch.equal(program.module()(*inputs), module(*inputs))


@pytest.mark.parametrize(
    ("text", "mixes"),
    [
        ("y = Slice (x, start, end, last)", False),
        ("y = Slice (x, start, end, tokens)", True),
        ("y = Concat <axis = 2> (x, x)", False),
        ("y = Concat <axis = 1> (x, x)", True),
        ("y = Gather <axis = 1> (x, logits_rows)", False),
        ("y = Gather <axis = 1> (x, start)", True),
        ("y = MatMul (x, w)", False),
        ("t = Transpose <perm = [0, 2, 1]> (x) y = MatMul (t, x)", True),
        ("t = Transpose <perm = [0, 2, 1]> (x) y = MatMul (x, t)", True),
        ("t = Reshape (x, heads) u = Transpose <perm = [0, 2, 1, 3]> (t) y = Reshape (u, rows)", True),
    ],
)
def test_a_graph_that_mixes_tokens_outside_attention_is_refused(text: str, mixes: bool) -> None:
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["" : 24]>
        g (float[batch, sequence, 4] x, int64[rows] logits_rows, float[4, 4] w) => (float[batch, rows, 4] y)
        <int64[1] start = {{0}}, int64[1] end = {{1}}, int64[1] last = {{2}}, int64[1] tokens = {{1}},
         int64[4] heads = {{0, 0, 2, 2}}, int64[3] rows = {{0, -1, 4}},
         float[batch, 4, sequence] "t3">
        {{ {text} }}
    """)
    for node in model.graph:
        dims = {
            "t": ("batch", "sequence", 2, 2) if "heads" in text else ("batch", 4, "sequence"),
            "u": ("batch", 2, "sequence", 2),
        }.get(str(node.outputs[0].name))
        if dims is not None:
            node.outputs[0].shape = ir.Shape(dims)
        elif node.op_type == "Reshape":
            node.outputs[0].shape = ir.Shape(["batch", "sequence", 4])
        elif node.op_type == "MatMul" and "t" in {value.name for value in node.inputs if value is not None}:
            first = node.inputs[0]
            assert first is not None
            node.outputs[0].shape = ir.Shape(
                ["batch", "sequence", "sequence"] if first.name == "x" else ["batch", 4, 4]
            )
    if mixes:
        with pytest.raises(UnsupportedError, match="computes with several tokens outside attention"):
            tokenwise.check(model)
    else:
        tokenwise.check(model)


def test_names_of_states_are_told_from_those_of_caches() -> None:
    names = [interface.past_part(3, part) for part in ("key", "value", "conv", "recurrent")]
    assert [interface.is_state(name) for name in names] == [False, False, True, True]
    assert [interface.is_state(interface.present_of(name)) for name in names] == [False, False, True, True]
    assert not interface.is_state("past_lengths")
