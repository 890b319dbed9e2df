"""A trace is held against transformers on real weights: right ones pass, wrong ones name the first diverging layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file, save_file

from llmforge.base.errors import VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph
from llmforge.trace import trace
from llmforge.trace.export.reference import ReferenceModel
from llmforge.verification import magnified, probe, trace_comparison, trace_verifier
from llmforge.verification.trace_verifier import precompute_reference, verify_trace

from ..models import zoo

pytestmark = pytest.mark.xdist_group("verify_trace")  # its fixtures take seconds: they are made once


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Qwen2 with biases: one layer without a window, two with a window of 7."""
    folder = tmp_path_factory.mktemp("qwen2")
    zoo.write("qwen2-mixed-windows", folder, num_hidden_layers=5)
    return Checkpoint.open(folder)


@pytest.fixture(scope="module")
def canonical(checkpoint: Checkpoint) -> ir.Model:
    """Its graph; nobody may change it."""
    return trace(checkpoint)


def test_a_right_graph_passes_on_every_kind_of_step(checkpoint: Checkpoint, canonical: ir.Model) -> None:
    before = graph.fingerprint(canonical)
    proof = verify_trace(checkpoint, canonical)
    assert 0 < proof.max_abs_difference < 1e-5
    assert (proof.layers, proof.depth) == (5, 5)
    names = (
        "one row",
        "a ragged batch",
        "a prompt longer than the windows",
        "larger numbers",
        trace_comparison.TO_THE_END,
    )
    assert proof.probes == names
    assert proof.unexceeded_windows == ()
    assert "trace: logits match transformers within" in proof.note()
    assert graph.fingerprint(canonical) == before


def test_a_large_model_is_held_to_it_by_layers_from_everywhere(checkpoint: Checkpoint, canonical: ir.Model) -> None:
    proof = verify_trace(checkpoint, canonical, whole_bytes=1)
    assert proof.layers == 3  # the first, the one halfway, the last: each kind among them
    assert 0 < proof.max_abs_difference < 1e-5
    assert "3 of 5 layers, the others like them" in proof.note()


def _node(model: ir.Model, name: str) -> ir.Node:
    return next(node for node in model.graph if node.name == name)


def _other_window(model: ir.Model) -> None:
    """Only a prompt longer than the window tells."""
    _node(model, "model.layers.3.self_attn/Attention").attributes["window"] = ir.AttrInt64("window", 0)


def _other_epsilon(model: ir.Model) -> None:
    node = _node(model, "model.layers.2.post_attention_layernorm/RMSNormalization")
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-2)


def _other_weight(model: ir.Model) -> None:
    value = model.graph.initializers["model.layers.1.mlp.up_proj.weight"]
    assert value.const_value is not None
    array = np.array(value.const_value.numpy())
    array[0] *= 1.5
    value.const_value = ir.tensor(array, name=value.name)


def _other_head(model: ir.Model) -> None:
    value = model.graph.initializers["model.norm.weight"]
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy() + np.float32(1), name=value.name)


def _no_residual(model: ir.Model) -> None:
    node = _node(model, "model.layers.2/Add")
    graph.replace_value(node.outputs[0], graph.operand(node, 1))
    model.graph.remove(node, safe=True)


def _other_rows(model: ir.Model) -> None:
    node = _node(model, "lm_head/MatMul")
    [doubled] = graph.insert(node, "Add", [node.inputs[0], node.inputs[0]], {}, name="doubled")
    node.replace_input_with(0, doubled)


@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (_other_window, r"model\.layers\.3\.self_attn/Attention shows the token at position 7 8 tokens"),
        (_other_epsilon, r"model\.layers\.2\.post_attention_layernorm/RMS.* gives other numbers"),
        (_other_weight, r"other numbers for parameter model\.layers\.1\.mlp\.up_proj\.weight"),
        (_other_head, r"other numbers for parameter model\.norm\.weight"),
        (_no_residual, r"does not match the model in one row, .*first diverging layer: model\.layers\.2, whose"),
        (_other_rows, "the hidden states of all 5 layers agree: it is what follows them"),
    ],
)
def test_a_wrong_graph_fails_and_names_the_layer(
    spoil: object, where: str, checkpoint: Checkpoint, canonical: ir.Model
) -> None:
    wrong = canonical.clone()
    assert callable(spoil)
    spoil(wrong)
    with pytest.raises(VerificationError, match=rf"(?s){where}") as caught:
        verify_trace(checkpoint, wrong)
    assert caught.value.exit_code == 7


def test_a_graph_that_does_not_run_and_a_bug_of_ours_are_told_apart(
    checkpoint: Checkpoint, canonical: ir.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = canonical.clone()
    node = _node(wrong, "model.layers.1.post_attention_layernorm/RMSNormalization")
    beyond = graph.initializer(wrong, "beyond", np.array([1_000_000], np.int64))
    given = graph.operand(node, 0)
    [row] = graph.insert(node, "Gather", [given, beyond], {"axis": 1}, name="look_beyond")
    node.replace_input_with(0, row)
    with pytest.raises(VerificationError, match=r"the traced graph does not run: ONNX Runtime .* failed to run"):
        verify_trace(checkpoint, wrong)

    def buggy(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(probe.ProbeCall, "rows", property(buggy))
    with pytest.raises(RuntimeError, match="a bug"):
        verify_trace(checkpoint, canonical)


@pytest.fixture(scope="module")
def steep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, ir.Model]:
    """The same with queries and keys ten times as large: attention chooses between tokens that are almost equal."""
    folder = tmp_path_factory.mktemp("steep")
    zoo.write("qwen2-mixed-windows", folder, num_hidden_layers=5)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensors[name] = tensors[name] * np.float32(10)
    save_file(tensors, file, metadata={"format": "pt"})
    checkpoint = Checkpoint.open(folder)
    return checkpoint, trace(checkpoint)


def test_huge_scores_are_held_to_how_far_rounding_moves_transformers(steep: tuple[Checkpoint, ir.Model]) -> None:
    proof = verify_trace(*steep)
    assert trace_verifier.TOLERANCE * 0.6 < proof.max_abs_difference <= proof.allowed
    assert proof.undecided == 0


def _other_scale(model: ir.Model) -> None:
    node = _node(model, "model.layers.3.self_attn/Attention")
    node.attributes["scale"] = ir.AttrFloat32("scale", node.attributes["scale"].as_float() * 1.05)


@pytest.mark.parametrize("spoil", [_other_scale, _no_residual, _other_rows])
def test_a_wrong_graph_of_huge_scores_still_fails(spoil: object, steep: tuple[Checkpoint, ir.Model]) -> None:
    checkpoint, right = steep
    wrong = right.clone()
    assert callable(spoil)
    spoil(wrong)
    with pytest.raises(VerificationError, match="does not match the model in"):
        verify_trace(checkpoint, wrong)


def test_what_rounding_decides_is_said_to_be_undecided() -> None:
    """On made-up numbers it stands in the report; on the checkpoint's own it refuses the trace."""
    run = probe.schedule("made up", [np.zeros(3, np.int64)], [(3,)])
    expected = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    got = expected.copy()
    got[1] += 0.05
    nothing = trace_comparison.NOTHING
    compared = trace_comparison.StepComparison(run, 0, 0, nothing, nothing, [(got, expected)])
    assert compared.diverges(1.0, 1e-3)
    steady = trace_comparison.RoundingNoise(hidden=(np.array([0, 1e-3, 0], np.float32),))
    with pytest.raises(
        VerificationError, match=r"hidden states of token 1 differ by 0\.05.* \(allowed: 0\.00\d+ of it\)"
    ):
        compared.require(1.0, 1e-3, ["layer 0"], steady, may_be_chaotic=True)
    enough = trace_comparison.RoundingNoise(hidden=(np.array([0, 8e-3, 0], np.float32),))
    assert compared.require(1.0, 1e-3, ["layer 0"], enough, may_be_chaotic=False) == 0
    chaotic = trace_comparison.RoundingNoise(hidden=(np.array([0, 0.1, 0], np.float32),))
    assert compared.require(1.0, 1e-3, ["layer 0"], chaotic, may_be_chaotic=True) == 1
    with pytest.raises(
        VerificationError, match="cannot be held against the model: hidden states of layer 0 move by more"
    ):
        compared.require(1.0, 1e-3, ["layer 0"], chaotic, may_be_chaotic=False)


def test_logits_of_a_graph_without_named_layers_are_held_to_what_rounding_moves() -> None:
    run = probe.schedule("made up", [np.zeros(3, np.int64)], [(3,)])
    expected = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    compared = trace_comparison.StepComparison(run, 0, 0, expected + 0.05, expected, [])
    assert compared.require(0.1, 1e-3, [], trace_comparison.RoundingNoise(), may_be_chaotic=False) == 0
    with pytest.raises(VerificationError, match=r"differ from transformers' by 0\.05 .*; no layer can be named"):
        compared.require(1e-3, 1e-3, [], trace_comparison.RoundingNoise(), may_be_chaotic=False)
    with pytest.raises(VerificationError, match="cannot be held against the model: logits move by more"):
        compared.require(1e-3, 1e-3, [], trace_comparison.RoundingNoise(logits=1.0), may_be_chaotic=False)


def test_of_several_streams_each_is_held_to_its_own_deviation() -> None:
    """As of mHC's residual streams: what one of them differs by is not lost in another that is larger."""
    run = probe.schedule("made up", [np.zeros(3, np.int64)], [(3,)])
    expected = np.random.default_rng(0).normal(size=(3, 2, 64)).astype(np.float32)
    expected[:, 0] *= 1e4
    got = expected.copy()
    got[1, 1] += 0.05
    nothing = trace_comparison.NOTHING
    compared = trace_comparison.StepComparison(run, 0, 0, nothing, nothing, [(got, expected)])
    assert compared.diverges(1.0, 1e-3)
    steady = trace_comparison.RoundingNoise(hidden=(np.full((3, 2), 1e-5, np.float32),))
    with pytest.raises(VerificationError, match=r"hidden states of token 1 differ by 0\.05"):
        compared.require(1.0, 1e-3, ["layer 0"], steady, may_be_chaotic=True)
    chaotic = trace_comparison.RoundingNoise(hidden=(np.array([[0, 0], [0, 0.1], [0, 0]], np.float32),))
    assert compared.require(1.0, 1e-3, ["layer 0"], chaotic, may_be_chaotic=True) == 1


def test_runs_stay_within_a_context_however_short() -> None:
    for context in range(1, 24):
        runs = trace_comparison.make_runs(96, [7], context)
        assert max(run.capacity for run in runs) >= min(context, 20)
        runs.append(magnified.run(96, context))
        assert all(run.capacity <= context for run in runs)
        assert all(len(row) > 0 for run in runs for row in trace_comparison.rows_of(run))
    one, ragged = trace_comparison.make_runs(96, [], None)
    assert [step.lengths.tolist() for step in one.steps] == [[12], [1], [1], [1], [5]]
    assert [step.lengths.tolist() for step in ragged.steps] == [[9, 12], [1, 1], [1, 1]]


@pytest.mark.parametrize("whole_bytes", [1, 1 << 30])
def test_what_was_computed_before_is_not_computed_again_and_proves_the_same(
    whole_bytes: int, checkpoint: Checkpoint, canonical: ir.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = verify_trace(checkpoint, canonical, whole_bytes=whole_bytes)
    wrong = canonical.clone()
    _no_residual(wrong)
    with pytest.raises(VerificationError, match=r"first diverging layer: model\.layers\.2"):
        verify_trace(checkpoint, wrong, computed=precompute_reference(checkpoint, 1 << 30))
    computed = precompute_reference(checkpoint, whole_bytes)
    ran: list[int] = []
    run = ReferenceModel.run_batch

    def counted(self: ReferenceModel, ids: Any, *given: Any, **named: Any) -> Any:
        ran.append(len(ids[0]))
        return run(self, ids, *given, **named)

    monkeypatch.setattr(ReferenceModel, "run_batch", counted)
    proof = verify_trace(checkpoint, canonical, whole_bytes=whole_bytes, computed=computed)
    assert replace(proof, seconds=0.0) == replace(plain, seconds=0.0)
    assert len(ran) <= 1, "but for the prompt beyond the windows, whose length the graph tells"
    other = precompute_reference(checkpoint, 1 << 30 if whole_bytes == 1 else 1)
    again = verify_trace(checkpoint, canonical, whole_bytes=whole_bytes, computed=other)
    assert replace(again, seconds=0.0) == replace(plain, seconds=0.0)
    assert not hasattr(other, "reference")  # its weights are released
