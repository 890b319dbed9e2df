"""Proofs in parts: what a pass did to a model too large to run whole is proven region by region, liars included."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmforge.base.errors import VerificationError
from llmforge.ir import graph, interface
from llmforge.ir.derived import Stored
from llmforge.ir.subgraph import Index
from llmforge.passes.flash_attention import FlashAttention
from llmforge.passes.fuse_norms import FuseNorms
from llmforge.passes.genai_interface import GenaiInterface
from llmforge.passes.optimum_interface import OptimumInterface
from llmforge.passes.pack_gate_up import PackGateUp
from llmforge.passes.pack_qkv import PackQkv
from llmforge.passes.quantize_weights import QuantizeWeights
from llmforge.rewrite.pass_base import Budget, Changes, Numerics, Pass, Rewritten
from llmforge.verification import changed_subgraphs, probe, streamed_execution
from llmforge.verification.verifier import PassVerification, Verifier

from ..models import graphs
from ..samples.sample_passes import LieDeep

LAYERS = 8
DEEP = 5  # the layer that is lied about
TEXTS = [np.random.default_rng(7).integers(0, 96, length) for length in (48, 40, 33)]


@dataclass
class Reads:
    """Which lazy weights were read, in order."""

    names: list[str] = field(default_factory=list)


def model_with_lazy_weights(reads: Reads | None = None, **changes: object) -> ir.Model:
    """Make a canonical graph whose weights are read from somewhere else, as those of a checkpoint are."""
    model = graphs.llama(graphs.Llama(layers=LAYERS, **changes))  # type: ignore[arg-type]
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if not name.startswith("model.") or tensor is None or value.shape is None:
            continue

        def read(tensor: ir.TensorProtocol = tensor, name: str = name) -> ir.TensorProtocol:
            if reads is not None:
                reads.names.append(name)
            return tensor

        value.const_value = ir.LazyTensor(read, tensor.dtype, value.shape, name=name)
    return model


def check(
    step: Pass, model: ir.Model, folder: Path, *, whole: bool = False, texts: list[np.ndarray] | None = None
) -> PassVerification:
    """Run `step` and have it proven, in parts by default."""
    limit = 2**40 if whole else 0
    verifier = Verifier(
        model, promises=graphs.PROMISES, folder=folder, texts=TEXTS if texts is None else texts, whole_bytes=limit
    )
    return verifier.check(step, model, step.run(model, graphs.CPU))


@pytest.mark.parametrize(
    ("step", "places", "kinds"),
    [
        (FuseNorms(), 2 * LAYERS, 2),  # the last norm gives no sum
        (PackQkv(), LAYERS, 1),
        (PackGateUp(), LAYERS, 1),
        (FlashAttention(), LAYERS, 1),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_layers_that_a_pass_changes_alike_are_proven_together_each_with_its_own_weights(
    step: Pass, places: int, kinds: int, tmp_path: Path
) -> None:
    reads = Reads()
    result = check(step, model_with_lazy_weights(reads), tmp_path)
    of = f"{kinds} kinds" if kinds > 1 else "one kind"
    assert result.probes[0] == f"{places} changed subgraphs of {of}, each with its own weights"
    assert result.allowed is not None
    assert 0 <= result.largest_difference < 0.1 * result.allowed
    if step != FlashAttention():  # which leaves all weights alone
        assert all(any(f"layers.{layer}." in name for name in reads.names) for layer in range(LAYERS))


def test_passes_follow_one_another(tmp_path: Path) -> None:
    model = model_with_lazy_weights(query_norm=True, bias=True, sinks=True, window=7, softcap=5.0)
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=TEXTS, whole_bytes=0)
    steps: list[Pass] = [FuseNorms(), PackQkv(), PackGateUp(), FlashAttention()]
    steps += [QuantizeWeights(budget=Budget(kld_mean=1.0), bits=4, block_size=32, method="rtn")]
    steps += [GenaiInterface(logits="all")]
    for step in steps:
        result = verifier.check(step, model, step.run(model, graphs.CPU))
        assert result.probes
    whole = model_with_lazy_weights(query_norm=True, bias=True, sinks=True, window=7, softcap=5.0)
    for step in steps[:4]:
        step.run(whole, graphs.CPU)
    cost = check(steps[4], whole, tmp_path, whole=True).kld_mean
    assert cost is not None
    assert cost > 1e-4


@pytest.mark.parametrize("logits", ["all", "last"])
def test_caches_that_grow_are_proven_too(logits: str, tmp_path: Path) -> None:
    result = check(OptimumInterface(logits=logits), model_with_lazy_weights(), tmp_path)  # type: ignore[arg-type]
    assert result.allowed == 1e-4
    assert f"of {'2 kinds' if logits == 'all' else 'one kind'}" in result.probes[0]


def test_the_loss_on_text_is_that_of_the_whole_graph(tmp_path: Path) -> None:
    step = QuantizeWeights(budget=Budget(kld_mean=1.0), bits=4, block_size=32, method="rtn")
    run = probe.schedule("text", TEXTS, [[40, 35, 30], [1, 1, 1], [1, 1, 1]])
    model = model_with_lazy_weights()
    weights = probe.InitializerArrays()
    whole = [list(probe.drive(probe.open_session(model, weights, 1), run, caches=False))]
    parts = streamed_execution.drive(model, [run], threads=1, block_bytes=1 << 12)
    assert len(list(streamed_execution.blocks(Index.of(model), 1 << 12))) > LAYERS
    for expected, got, each in zip(whole[0], parts[0], run.steps, strict=True):
        np.testing.assert_allclose(got[each.valid], expected.logits, atol=1e-5)
    result = check(step, model, tmp_path)
    assert result.probes[0] == "121 tokens of text, piece by piece"
    assert result.kld_mean is not None
    assert 1e-4 < result.kld_mean < 1.0


@pytest.mark.parametrize("tied", [True, False])
def test_tables_are_read_in_blocks_and_weights_as_they_are_stored(tied: bool) -> None:
    """A checkpoint stores [N, K] in bf16: what a block computes with is what the graph says it is."""
    model = graphs.llama()
    if not tied:
        head = graphs.find(model, "Transpose")[0]
        table = graph.initializer(
            model, "lm_head.weight", np.random.default_rng(3).standard_normal((48, 96), np.float32)
        )
        graph.replace_uses(head.outputs[0], table)
        graph.drop_unused(model)
    whole_reads = Reads()
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or len(tensor.shape) != 2 or not name.endswith(".weight"):
            continue
        transposed = "embed" not in name
        array = tensor.numpy().astype(ml_dtypes.bfloat16)
        stored = np.ascontiguousarray(array.T) if transposed else array

        class Watched(Stored):
            def _read(self) -> ir.TensorProtocol:
                whole_reads.names.append(self.name)
                return super()._read()

        value.const_value = Watched(
            lambda stored=stored: [stored],
            tensor.dtype,
            ir.Shape(tensor.shape.numpy()),
            name,
            transposed=transposed,
        )
    PackQkv().run(model, graphs.CPU)
    run = probe.schedule("text", TEXTS, [[40, 35, 30], [1, 1, 1]])
    [got] = streamed_execution.drive(model, [run], threads=1, block_bytes=1 << 13)
    assert whole_reads.names == []  # neither transposed nor, where it is a table, whole
    expected = list(probe.drive(probe.open_session(model, probe.InitializerArrays(), 1), run, caches=False))
    for step, logits, wanted in zip(run.steps, got, expected, strict=True):
        np.testing.assert_allclose(logits[step.valid], wanted.logits, atol=2e-5)


def test_a_lossy_pass_over_its_budget_is_measured_where_graphs_are_streamed(tmp_path: Path) -> None:
    step = QuantizeWeights(budget=Budget(kld_mean=1e-6), bits=4, block_size=32, method="rtn")
    found = check(step, model_with_lazy_weights(), tmp_path)
    assert found.probes[0] == "121 tokens of text, piece by piece"
    assert found.kld_mean is not None
    assert found.kld_mean > found.budget == 1e-6


# Passes that lie


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "streamed"])
@pytest.mark.parametrize("numerics", [Numerics.EXACT, Numerics.ROUNDING])
@pytest.mark.parametrize("how", LieDeep.WAYS)
def test_a_pass_that_lies_about_one_deep_layer(how: str, numerics: Numerics, whole: bool, tmp_path: Path) -> None:
    if how == "nothing":
        assert check(LieDeep(how, DEEP, numerics), model_with_lazy_weights(), tmp_path, whole=whole).probes
        return
    with pytest.raises(VerificationError) as caught:
        check(LieDeep(how, DEEP, numerics), model_with_lazy_weights(), tmp_path, whole=whole)
    assert caught.value.exit_code == 7
    assert "pass lie-deep" in caught.value.message
    if not whole and how not in ("cache", "output", "swap"):
        assert f"l{DEEP}_" in caught.value.message


def test_a_lie_in_every_layer_that_the_first_layer_does_not_show(tmp_path: Path) -> None:
    """The biases of layer 0 are 0, and the pass drops all of them."""

    @dataclass(frozen=True)
    class DropBiases(Pass):
        name: ClassVar[str] = "drop-biases"
        numerics: ClassVar[Numerics] = Numerics.ROUNDING

        def run(self, model: ir.Model, context: object) -> Changes:
            changes = Changes()
            for node in graphs.find(model, "Add"):
                bias = node.inputs[1]
                if bias is not None and bias.is_initializer():
                    assert node.inputs[0] is not None
                    graph.replace_uses(node.outputs[0], node.inputs[0])
                    changes.rewritten.append(Rewritten(str(node.name), "dropped"))
            graph.drop_unused(model)
            return changes

    model = model_with_lazy_weights(bias=True)
    for name, value in model.graph.initializers.items():
        if name.startswith("model.layers.0.") and name.endswith(".bias"):
            assert value.const_value is not None
            value.const_value = ir.Tensor(np.zeros_like(value.const_value.numpy()), name=name)
    with pytest.raises(VerificationError, match="pass drop-biases declares rounding"):
        check(DropBiases(), model, tmp_path)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "streamed"])
def test_numbers_that_are_changed_in_place(whole: bool, tmp_path: Path) -> None:
    """Both graphs share the tensor: no comparison of them shows it."""

    @dataclass(frozen=True)
    class Overwrite(Pass):
        name: ClassVar[str] = "over-write"
        numerics: ClassVar[Numerics] = Numerics.EXACT

        def run(self, model: ir.Model, context: object) -> Changes:
            table = model.graph.initializers["cos"].const_value
            assert table is not None
            array = table.numpy()
            array[3] = 0.5
            return Changes([Rewritten("cos", "nothing that anybody would notice")])

    with pytest.raises(VerificationError, match="pass over-write changed the numbers of initializer cos in place"):
        check(Overwrite(), model_with_lazy_weights(), tmp_path, whole=whole)


def test_equal_graphs_have_no_changed_subgraphs() -> None:
    model = model_with_lazy_weights()
    assert changed_subgraphs.differences(Index.of(model), Index.of(model.clone())) == []


def test_a_changed_subgraph_ends_where_both_graphs_name_a_value() -> None:
    model = model_with_lazy_weights()
    before = Index.of(model.clone())
    PackQkv().run(model, graphs.CPU)
    first, *others = changed_subgraphs.differences(before, Index.of(model))
    assert first.outputs == ("l0_q", "l0_k", "l0_v")
    assert list(first.inputs) == ["l0_normed"]
    assert {changed.kind for changed in others} == {first.kind}
    assert first.size_bytes == 2 * sum(48 * n * 4 for n in (64, 32, 32)) + 3 * 8  # and the sizes of a Split


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 1 << 16))
def test_blocks_make_every_value_that_later_ones_read(block_bytes: int) -> None:
    index = Index.of(model_with_lazy_weights())
    made: set[str] = set()
    for block in streamed_execution.blocks(index, block_bytes):
        assert block.inputs <= made
        made |= set(block.outputs)
    assert interface.LOGITS in made
    assert {interface.present_part(layer, "key") for layer in range(LAYERS)} <= made
