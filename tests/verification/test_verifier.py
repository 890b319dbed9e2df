"""Verification: passes that lie are caught, by name, with the first tensor that diverges."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from llmforge.base.errors import RunFailed, UnsupportedError, UsageError, VerificationError
from llmforge.ir import graph
from llmforge.ir.operators.contrib import SkipSimplifiedLayerNormalization
from llmforge.passes.flash_attention import FlashAttention
from llmforge.passes.fuse_norms import FuseNorms
from llmforge.passes.quantize_weights import QuantizeWeights
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass, Rewritten
from llmforge.verification import probe
from llmforge.verification.reports import GraphSnapshot, check_changes
from llmforge.verification.verifier import TOLERANCE, PassVerification, Verifier

from ..models import graphs

EXACT, ROUNDING, LOSSY = Numerics.EXACT, Numerics.ROUNDING, Numerics.LOSSY
WEIGHT = "model.layers.1.mlp.down_proj.weight"
TEXTS = [np.random.default_rng(7).integers(0, 96, length) for length in (48, 40, 33)]
REPORTED = Changes(rewritten=[Rewritten("l1_down_node", "something")])


@dataclass(frozen=True)
class Planted(Pass):
    """A pass that does `act` and declares and reports whatever the test wants."""

    name: ClassVar[str] = "planted"
    act: Callable[[ir.Model], None] = lambda model: None
    numerics: Numerics = EXACT  # type: ignore[misc]  # an instance's own, in a test only
    budget: Budget = field(default_factory=lambda: Budget(kld_mean=1e-4))

    def run(self, model: ir.Model, context: Context) -> Changes:
        self.act(model)
        return REPORTED


def verifier(model: ir.Model, folder: Path, texts: list[np.ndarray] | None = None) -> Verifier:
    return Verifier(model, promises=graphs.PROMISES, folder=folder, texts=TEXTS if texts is None else texts)


def fail(planted: Planted, folder: Path, spec: graphs.Llama | None = None) -> VerificationError:
    """Run a pass that must be caught."""
    model = graphs.llama(spec)
    check = verifier(model, folder)
    with pytest.raises(VerificationError) as caught:
        check.check(planted, model, planted.run(model, graphs.CPU))
    assert caught.value.exit_code == 7
    assert "pass planted" in caught.value.message
    return caught.value


def measured(planted: Planted, folder: Path) -> PassVerification:
    """Run a pass that loses something, and say what."""
    model = graphs.llama()
    return verifier(model, folder).check(planted, model, planted.run(model, graphs.CPU))


def scale(factor: float, name: str = WEIGHT, *, lazy: bool = True) -> Callable[[ir.Model], None]:
    """Multiply one weight."""

    def act(model: ir.Model) -> None:
        value = model.graph.initializers[name]
        tensor = value.const_value
        assert tensor is not None
        assert value.shape is not None

        def read() -> ir.TensorProtocol:
            return ir.Tensor(tensor.numpy() * np.float32(factor), name=name)

        value.const_value = ir.LazyTensor(read, tensor.dtype, value.shape, name=name) if lazy else read()

    return act


def positions(change: Callable[[ir.Node, ir.Value, ir.Model], ir.Value]) -> Callable[[ir.Model], None]:
    """Let rotary embedding of the first query read other positions."""

    def act(model: ir.Model) -> None:
        rotary = graphs.find(model, "RotaryEmbedding")[0]
        given = rotary.inputs[3]
        assert given is not None
        rotary.replace_input_with(3, change(rotary, given, model))

    return act


def from_zero(node: ir.Node, given: ir.Value, model: ir.Model) -> ir.Value:
    """Count positions from 0 in every step: right in a prefill only."""
    first = graph.initializer(model, "first_column", np.array([0], np.int64))
    start = graph.insert(node, "Gather", [given, first], {"axis": 1}, name="start")[0]
    return graph.insert(node, "Sub", [given, start], name="from_zero")[0]


def of_last_row(node: ir.Node, given: ir.Value, model: ir.Model) -> ir.Value:
    """Give every row the positions of the last: wrong where rows have unequal lengths only."""
    last = graph.initializer(model, "last_row", np.array([-1], np.int64))
    row = graph.insert(node, "Gather", [given, last], name="row")[0]
    zeros = graph.insert(node, "Sub", [given, given], name="zeros")[0]
    return graph.insert(node, "Add", [zeros, row], name="of_last_row")[0]


def computed_norm() -> ir.Model:
    """Make a graph with a fused norm whose weight is 1 + what the checkpoint has, and whose sum is read besides."""
    model = graphs.llama()
    [norm] = [node for node in model.graph if node.outputs[0].name == "l1_normed2"]
    one = graph.initializer(model, "one", np.array([1], np.float32))
    weight = graph.insert(norm, "Add", [norm.inputs[1], one], name="computed_node")[0]
    weight.name, weight.type, weight.shape = "computed", ir.TensorType(ir.DataType.FLOAT), ir.Shape([48])
    norm.replace_input_with(1, weight)
    FuseNorms().run(model, graphs.CPU)
    return model


def separate(*, epsilon: float = 1e-6, weight: str | None = None) -> Callable[[ir.Model], None]:
    """Make what that norm makes, under the same names, in two nodes: with another epsilon or weight, where given."""

    def act(model: ir.Model) -> None:
        [fused] = [each for each in SkipSimplifiedLayerNormalization.all(model) if each.gamma.name == "computed"]
        total = graph.insert(fused.node, "Add", [fused.input, fused.skip], name="sum_node")[0]
        graph.replace_value(fused.sum, total)
        scale = fused.gamma if weight is None else model.graph.initializers[weight]
        attributes = {"axis": -1, "epsilon": epsilon}
        normed = graph.insert(fused.node, "RMSNormalization", [total, scale], attributes, name="norm_node")[0]
        graph.replace_value(fused.output, normed)
        model.graph.remove(fused.node, safe=True)

    return act


# Declarations that hold


def test_rounding_is_measured_against_its_allowance(tmp_path: Path) -> None:
    model = graphs.llama()
    check = verifier(model, tmp_path)
    result = check.check(FuseNorms(), model, FuseNorms().run(model, graphs.CPU))
    assert result.numerics is ROUNDING
    assert result.allowed is not None
    assert 0 < result.largest_difference < 0.1 * result.allowed
    assert result.probes[0] == "4 changed subgraphs of 4 kinds, each with its own weights"
    assert result.kld_mean is None
    assert result.budget is None
    assert list(tmp_path.iterdir()) == []


def logits(model: ir.Model, runs: tuple[probe.Run, ...]) -> np.ndarray:
    """Run `model` and return all logits, [tokens, V]."""
    session = probe.open_session(model, probe.InitializerArrays(), 1)
    return np.concatenate([outcome.logits for run in runs for outcome in probe.drive(session, run, caches=False)])


@pytest.mark.parametrize(("numerics", "factor"), [(ROUNDING, 1 + 1e-5), (LOSSY, 1.01)])
@pytest.mark.parametrize("scaled", [1, 100])
def test_differences_and_allowances_are_in_standard_deviations(
    numerics: Numerics, factor: float, scaled: float, tmp_path: Path
) -> None:
    """However large logits are: those of the second model are a hundred times as large."""
    model = graphs.llama()
    scale(scaled, "model.norm.weight")(model)
    check = verifier(model, tmp_path)
    before = logits(model, probe.text_runs(TEXTS, 96))
    planted = Planted(scale(factor, "model.norm.weight"), numerics, Budget(kld_mean=100))
    result = check.check(planted, model, planted.run(model, graphs.CPU))
    moved = np.abs(logits(model, probe.text_runs(TEXTS, 96)) - before).max() / before.std()
    if numerics is LOSSY:
        assert result.largest_difference == pytest.approx(moved, rel=1e-3)
    else:  # in sizes of a token of the norm: its largest number is some of them
        assert 1e-5 < result.largest_difference < 1e-4
    assert result.allowed == (None if numerics is LOSSY else TOLERANCE[ir.DataType.FLOAT])


def test_differences_of_a_streamed_loss_are_in_standard_deviations(tmp_path: Path) -> None:
    found = []
    for scaled in (1, 100):
        model = graphs.llama()
        scale(scaled, "model.norm.weight")(model)
        check = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=TEXTS, whole_bytes=0)
        planted = Planted(scale(1.01, "model.norm.weight"), LOSSY, Budget(kld_mean=100))
        found.append(check.check(planted, model, planted.run(model, graphs.CPU)).largest_difference)
    assert found == pytest.approx([found[0], found[0]], rel=1e-3)
    assert 0.01 < found[0] < 0.1  # 1 % of the largest logits


@pytest.mark.parametrize("whole_bytes", [2**40, 0], ids=["whole", "streamed"])
def test_a_difference_is_held_against_its_own_allowance_where_kernels_round_activations(
    whole_bytes: int, tmp_path: Path
) -> None:
    """Logits move by far more than a rounding error there: what is recorded is what was held against the tolerance."""
    model = graphs.llama()
    QuantizeWeights(Budget(kld_mean=1), method="rtn", accuracy_level=4).run(model, graphs.CPU)
    check = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=TEXTS, whole_bytes=whole_bytes)
    before = logits(model, probe.random_runs(96))
    planted = Planted(scale(1 + 1e-5, "model.layers.0.input_layernorm.weight"), ROUNDING)
    result = check.check(planted, model, planted.run(model, graphs.CPU))
    assert result.allowed == TOLERANCE[ir.DataType.FLOAT]
    assert 0 < result.largest_difference <= result.allowed
    assert result.probes[0].startswith("1 changed subgraphs of one kind")
    assert np.abs(logits(model, probe.random_runs(96)) - before).max() > 10 * result.allowed * before.std()


def test_exact_allows_no_bit(tmp_path: Path) -> None:
    model = graphs.llama()

    def same(model: ir.Model) -> None:
        node = graphs.find(model, "Sigmoid")[0]
        assert node.inputs[0] is not None
        flipped = graph.insert(node, "Neg", [node.inputs[0]], name="flip")[0]
        node.replace_input_with(0, graph.insert(node, "Neg", [flipped], name="flip_back")[0])

    result = verifier(model, tmp_path).check(Planted(same), model, Planted(same).run(model, graphs.CPU))
    assert (result.largest_difference, result.allowed) == (0.0, 0.0)


def test_lossy_within_its_budget_reports_the_cost(tmp_path: Path) -> None:
    model = graphs.llama()
    check = verifier(model, tmp_path)
    planted = Planted(scale(1.01), LOSSY, Budget(kld_mean=0.5))
    result = check.check(planted, model, planted.run(model, graphs.CPU))
    assert result.kld_mean is not None
    assert 1e-6 < result.kld_mean < 0.5
    assert result.allowed is None
    assert result.budget == 0.5
    assert result.probes == ("windows 0 to 2, ragged", "window 2")


def test_passes_in_sequence_are_each_held_against_the_graph_before(tmp_path: Path) -> None:
    model = graphs.llama()
    check = verifier(model, tmp_path)
    planted = Planted(scale(1.5), LOSSY, Budget(kld_mean=10))
    check.check(planted, model, planted.run(model, graphs.CPU))
    result = check.check(FlashAttention(), model, FlashAttention().run(model, graphs.CPU))
    assert result.allowed is not None
    assert result.largest_difference <= result.allowed


def test_a_sum_and_its_norm_that_two_nodes_make_instead_of_one(tmp_path: Path) -> None:
    model = computed_norm()
    check = verifier(model, tmp_path)
    planted = Planted(separate(), ROUNDING)
    result = check.check(planted, model, planted.run(model, graphs.CPU))
    assert graphs.lines(model, ["RMSNormalization"])[-1] == "l1_normed2 = RMSNormalization(l1_sum, computed)"
    assert result.allowed is not None
    assert 0 < result.largest_difference < 0.1 * result.allowed


def test_a_pass_with_nothing_to_do_needs_no_proof(tmp_path: Path) -> None:
    model = graphs.llama()
    result = verifier(model, tmp_path).check(FuseNorms(), model, Changes())
    assert (result.largest_difference, result.probes) == (0.0, ())


def test_the_graph_stays_as_it_is_and_lazy_tensors_are_read_once_a_pass(tmp_path: Path) -> None:
    model = graphs.llama()
    reads = []
    value = model.graph.initializers[WEIGHT]
    array = np.ones((56, 48), np.float32)

    def read() -> ir.TensorProtocol:
        reads.append(WEIGHT)
        return ir.Tensor(array, name=WEIGHT)

    value.const_value = ir.LazyTensor(read, ir.DataType.FLOAT, ir.Shape(array.shape), name=WEIGHT)
    check = verifier(model, tmp_path)
    changes = FuseNorms().run(model, graphs.CPU)
    fingerprint = graph.fingerprint(model)
    check.check(FuseNorms(), model, changes)
    check.check(FlashAttention(), model, FlashAttention().run(model, graphs.CPU))
    assert len(reads) <= 2  # once a pass, for numbers at edges behind it
    assert model.graph.initializers[WEIGHT].const_value is value.const_value
    assert fingerprint != graph.fingerprint(model)  # FlashAttention's own change
    snapshot = GraphSnapshot.of(model)
    check.check(FlashAttention(), model, Changes())
    assert snapshot.differs(model) is None


# Declarations that do not hold


@pytest.mark.parametrize("lazy", [True, False])
def test_exact_pass_that_scales_one_weight(lazy: bool, tmp_path: Path) -> None:
    error = fail(Planted(scale(1.01, lazy=lazy)), tmp_path)
    assert re.search(r"declares exact: l1_down differ by [\d.]+, allowed is 0,", error.message)
    assert error.message.endswith("in text (24 tokens after [0])")


def test_rounding_pass_that_scales_one_weight(tmp_path: Path) -> None:
    error = fail(Planted(scale(1.001), ROUNDING), tmp_path)
    assert re.search(
        r"rounding: l1_down differ by [\d.]+, 0.00[\d]+ of a token's size, allowed is 0.0001", error.message
    )


@pytest.mark.parametrize("numerics", [ROUNDING, LOSSY])
@pytest.mark.parametrize("fault", [{"epsilon": 1e-3}, {"weight": "model.layers.1.post_attention_layernorm.weight"}])
def test_a_norm_that_is_another_one_apart_from_its_sum(
    fault: dict[str, Any], numerics: Numerics, tmp_path: Path
) -> None:
    model = computed_norm()
    check = verifier(model, tmp_path)
    planted = Planted(separate(**fault), numerics, Budget(kld_mean=10))
    with pytest.raises(VerificationError, match=f"pass planted declares {numerics.value}: l1_normed2 differ by"):
        check.check(planted, model, planted.run(model, graphs.CPU))


def test_lossy_pass_over_its_budget(tmp_path: Path) -> None:
    """It is told what it costs; what becomes of it, the build decides."""
    found = measured(Planted(scale(1.5), LOSSY, Budget(kld_mean=1e-5)), tmp_path)
    assert found.budget == 1e-5
    assert found.kld_mean is not None
    assert found.kld_mean > 1e-5
    within = measured(Planted(scale(1.5), LOSSY, Budget(kld_mean=found.kld_mean)), tmp_path)
    assert within.kld_mean == found.kld_mean


def test_the_pass_behind_one_over_its_budget_is_measured_against_it(tmp_path: Path) -> None:
    model = graphs.llama()
    check = verifier(model, tmp_path)
    first = Planted(scale(1.5), LOSSY, Budget(kld_mean=1e-5))
    check.check(first, model, first.run(model, graphs.CPU))
    second = Planted(scale(1.0), LOSSY, Budget(kld_mean=1e-5))
    found = check.check(second, model, second.run(model, graphs.CPU))
    assert found.kld_mean == pytest.approx(0, abs=1e-9)


def test_a_number_that_is_not_finite_behind_a_cast_of_scales_is_placed_too(tmp_path: Path) -> None:
    """What runs reads fp16 scales that were widened; the Cast of them, which both graphs name, is not in it."""
    model = graphs.llama()
    quantize = QuantizeWeights(bits=8, block_size=32, method="rtn", scales="fp16", budget=Budget(kld_mean=1))
    quantize.run(model, graphs.CPU)
    assert any(node.op_type == "Cast" for node in model.graph)
    check = verifier(model, tmp_path)
    planted = Planted(scale(np.nan, "model.norm.weight"), LOSSY, Budget(kld_mean=1e-5))
    with pytest.raises(VerificationError, match="first diverging tensor: "):
        check.check(planted, model, planted.run(model, graphs.CPU))


def test_both_graphs_are_saved_without_weights(tmp_path: Path) -> None:
    error = fail(Planted(scale(1.01)), tmp_path / "failed")
    before, after = (tmp_path / "failed" / f"planted.{moment}.onnx" for moment in ("before", "after"))
    assert error.hint == f"both graphs were saved, without weights: {before}, {after}"
    for path in (before, after):
        saved = onnx.load(path, load_external_data=False)
        assert len(saved.graph.node) == 39
        weight = next(tensor for tensor in saved.graph.initializer if tensor.name == WEIGHT)
        assert weight.data_location == onnx.TensorProto.EXTERNAL
        assert path.stat().st_size < 56 * 48 * 4 * 2


@pytest.mark.parametrize("numerics", list(Numerics))
def test_nan_always_fails(numerics: Numerics, tmp_path: Path) -> None:
    error = fail(Planted(scale(np.nan), numerics, Budget(kld_mean=100)), tmp_path)
    assert "l1_down" in error.message
    if numerics is LOSSY:
        assert "logits are NaN or infinite in windows 0 to 2, ragged, step 0" in error.message
    else:
        assert "differ by inf" in error.message or "differ by nan" in error.message


@pytest.mark.parametrize("numerics", list(Numerics))
def test_a_broken_cache_shows_in_decode(numerics: Numerics, tmp_path: Path) -> None:
    error = fail(Planted(positions(from_zero), numerics), tmp_path)
    assert re.search(r"l0_q_rotary differ .* in (one token|two tokens) \(. tokens after \[[1-9]", error.message)


@pytest.mark.parametrize("numerics", list(Numerics))
def test_a_broken_ragged_batch_is_caught(numerics: Numerics, tmp_path: Path) -> None:
    error = fail(Planted(positions(of_last_row), numerics, Budget(kld_mean=1e-6)), tmp_path)
    assert "in largest batch (3 rows of 1 tokens after [" in error.message


def test_a_cache_that_no_probe_reads_back_is_compared_too(tmp_path: Path) -> None:
    """Values of layer 1 are stored scaled and attended to unscaled: the prefill's logits are right."""

    def act(model: ir.Model) -> None:
        attention = graphs.find(model, "Attention")[1]
        value = attention.inputs[2]
        assert value is not None
        twice = graph.insert(attention, "Add", [value, value], name="twice")[0]
        twice.type, twice.shape = value.type, value.shape
        attention.replace_input_with(2, twice)
        [reader] = [node for node in model.graph if attention.outputs[0] in node.inputs]
        half = graph.initializer(model, "half", np.array(0.5, np.float32))
        reader.replace_input_with(0, graph.insert(reader, "Mul", [attention.outputs[0], half], name="halved")[0])

    error = fail(Planted(act, ROUNDING), tmp_path)
    assert "l1_attended differ by" in error.message


def test_a_pass_that_only_claims_to_have_changed_something(tmp_path: Path) -> None:
    error = fail(Planted(lambda model: None), tmp_path)
    assert error.message.endswith("(something), but did not change the graph")


def test_changes_that_were_not_made() -> None:
    model = graphs.llama()
    with pytest.raises(
        VerificationError,
        match=r"pass idle reports 1 changes, the first at l1_down_node \(something\), but did not change the graph",
    ):
        check_changes("idle", GraphSnapshot.of(model), model, REPORTED)


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (lambda model: bool(FuseNorms().run(model, graphs.CPU)), "the structure of the graph"),
        (scale(1.01, lazy=False), "the structure of the graph"),
        (scale(1.01, lazy=True), "the structure of the graph"),
    ],
)
def test_changes_that_were_not_reported(act: Callable[[ir.Model], None], what: str) -> None:
    model = graphs.llama()
    before = GraphSnapshot.of(model)
    act(model)
    with pytest.raises(VerificationError, match=f"pass silent reports no changes, but changed {what}"):
        check_changes("silent", before, model, Changes())


def test_a_lazy_tensor_that_was_exchanged_in_silence() -> None:
    model = graphs.llama()
    scale(1.0)(model)
    before = GraphSnapshot.of(model)
    check_changes("honest", before, model, Changes())
    scale(1.01)(model)
    assert graph.fingerprint(model) == before.fingerprint  # which reads no lazy tensor
    with pytest.raises(VerificationError, match=f"pass silent reports no changes, but changed initializer {WEIGHT}"):
        check_changes("silent", before, model, Changes())


def test_an_external_tensor_of_another_folder_that_was_exchanged_in_silence() -> None:
    model = graphs.llama()
    value = model.graph.initializers[WEIGHT]
    tensor, shape = graph.tensor(value), value.shape
    assert shape is not None

    def stored_in(folder: str) -> ir.ExternalTensor:
        return ir.ExternalTensor("w.bin", 0, tensor.nbytes, tensor.dtype, shape=shape, name=WEIGHT, base_dir=folder)

    value.const_value = stored_in("one")
    before = GraphSnapshot.of(model)
    value.const_value = stored_in("one")
    check_changes("honest", before, model, Changes())
    value.const_value = stored_in("two")
    with pytest.raises(VerificationError, match=f"pass silent reports no changes, but changed initializer {WEIGHT}"):
        check_changes("silent", before, model, Changes())


def test_a_graph_outside_the_dialect(tmp_path: Path) -> None:
    def act(model: ir.Model) -> None:
        graphs.find(model, "Sigmoid")[0].op_type = "Sinusoid"

    error = fail(Planted(act), tmp_path)
    assert "wrote a graph outside the dialect: node 'l0_sigmoid_node'" in error.message


def test_a_graph_that_does_not_run(tmp_path: Path) -> None:
    def act(model: ir.Model) -> None:
        FlashAttention().run(model, graphs.CPU)
        for node in graphs.find(model, "GroupQueryAttention"):
            node.attributes["kv_num_heads"] = ir.AttrInt64("kv_num_heads", 3)

    error = fail(Planted(act), tmp_path)
    assert "pass planted wrote a graph that does not run" in error.message
    assert "num_heads" in error.message


def look_beyond(model: ir.Model) -> None:
    """Let the first gate read a row that is not there: ONNX Runtime takes the graph and fails at the first step."""
    node = graphs.find(model, "Sigmoid")[0]
    given = graph.operand(node, 0)
    assert given is not None
    beyond = graph.initializer(model, "beyond", np.array([1_000_000], np.int64))
    node.replace_input_with(0, graph.insert(node, "Gather", [given, beyond], {"axis": 1}, name="look_beyond")[0])
    graph.producer(graph.operand(node, 0)).outputs[0].name = "looked_up"  # type: ignore[arg-type]


@pytest.mark.parametrize("whole_bytes", [2**40, 0], ids=["whole", "streamed"])
@pytest.mark.parametrize("numerics", list(Numerics))
def test_a_graph_that_loads_and_does_not_run(numerics: Numerics, whole_bytes: int, tmp_path: Path) -> None:
    model = graphs.llama()
    check = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=TEXTS, whole_bytes=whole_bytes)
    planted = Planted(look_beyond, numerics)
    with pytest.raises(VerificationError, match="pass planted wrote a graph that does not run") as caught:
        check.check(planted, model, planted.run(model, graphs.CPU))
    assert "failed to run the graph: " in caught.value.message
    assert isinstance(caught.value.__cause__, RunFailed)


@pytest.mark.parametrize("whole_bytes", [2**40, 0], ids=["whole", "streamed"])
@pytest.mark.parametrize("numerics", list(Numerics))
def test_a_bug_of_ours_is_not_a_graph_that_does_not_run(numerics: Numerics, whole_bytes: int, tmp_path: Path) -> None:
    def act(model: ir.Model) -> None:
        def read() -> ir.TensorProtocol:
            raise RuntimeError("a bug")

        value = model.graph.initializers[WEIGHT]
        value.const_value = ir.LazyTensor(read, ir.DataType.FLOAT, ir.Shape(graph.static(value)), name=WEIGHT)

    model = graphs.llama()
    check = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=TEXTS, whole_bytes=whole_bytes)
    planted = Planted(act, numerics)
    with pytest.raises(RuntimeError, match="a bug"):
        check.check(planted, model, planted.run(model, graphs.CPU))


def test_lossy_without_text_is_a_usage_error(tmp_path: Path) -> None:
    model = graphs.llama()
    check = verifier(model, tmp_path, texts=[])
    planted = Planted(scale(1.01), LOSSY)
    with pytest.raises(UsageError, match="pass planted is lossy, but there is no text") as error:
        check.check(planted, model, planted.run(model, graphs.CPU))
    assert error.value.hint == "add calibration or evaluation data to the recipe"


def test_unmeasured_dtype_is_refused(tmp_path: Path) -> None:
    model = graphs.llama()
    next(value for value in model.graph.outputs if value.name == "logits").dtype = ir.DataType.BFLOAT16
    assert ir.DataType.BFLOAT16 not in TOLERANCE
    with pytest.raises(UnsupportedError, match="rounding tolerances are known for FLOAT"):
        verifier(model, tmp_path)


# Probes


def test_probes_are_prefill_decode_continuation_and_a_ragged_batch() -> None:
    one, ragged = probe.random_runs(96)
    assert [step.lengths.tolist() for step in one.steps] == [[12], *[[1]] * 5, [3]]
    assert [step.past.tolist() for step in one.steps] == [[0], [12], [13], [14], [15], [16], [17]]
    assert [step.lengths.tolist() for step in ragged.steps] == [[9, 12], [1, 1], [1, 1]]
    assert [step.past.tolist() for step in ragged.steps] == [[0, 0], [9, 12], [10, 13]]
    assert (ragged.steps[0].ids[0, 9:] == 0).all()
    again = probe.random_runs(96)
    for run, same in zip((one, ragged), again, strict=True):
        assert all((a.ids == b.ids).all() for a, b in zip(run.steps, same.steps, strict=True))
    assert max(int(step.ids.max()) for run in again for step in run.steps) < 96


def test_text_is_read_through_prefill_continuation_and_decode() -> None:
    ragged, alone = probe.text_runs(TEXTS, 96)
    assert [step.lengths.tolist() for step in alone.steps] == [[17], [8], *[[1]] * 8]
    np.testing.assert_array_equal(np.concatenate([step.ids[0] for step in alone.steps]), TEXTS[2])
    assert [step.lengths.tolist() for step in ragged.steps] == [[21, 16, 12], *[[1, 1, 1]] * 3]
    for row, window in enumerate(TEXTS):
        read = np.concatenate([step.ids[row, : step.lengths[row]] for step in ragged.steps])
        np.testing.assert_array_equal(read, window[: len(read)])


def test_few_tokens_of_a_long_step_are_asked_for_logits() -> None:
    """They cost the vocabulary; a decode step is asked for all of its own."""
    texts = [np.arange(512, dtype=np.int64)] * 6
    ragged, *alone = probe.text_runs(texts, 96)
    assert [run.name for run in alone] == ["window 4", "window 5"]
    assert [len(step.asked) for step in alone[0].steps] == [92, 32, *[1] * 16]
    assert ragged.steps[0].answered.sum(1).tolist() == [62, 58, 54, 50]
    assert all(step.answered[:, 0].all() for step in ragged.steps)
    huge = probe.text_runs(texts, 262_144)[0].steps[0]
    assert 1 <= len(huge.asked) * 4 * 262_144 * 4 / 2**20 <= 128 + 4


@pytest.mark.parametrize("lengths", [[1], [2, 1], [3, 3], [4, 5]])
def test_short_texts_make_runs_too(lengths: list[int]) -> None:
    runs = probe.text_runs([np.arange(length) for length in lengths], 96)
    for run in runs:
        assert all(step.lengths.min() > 0 for step in run.steps)
