"""prune-structure: the graph without heads, channels and layers is the model with those features at zero."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from llmforge import passes, targets
from llmforge.backends import exported_parameters as parameters
from llmforge.backends.onnxruntime import interop
from llmforge.backends.onnxruntime.cuda import builder as cuda
from llmforge.backends.tensorrt import lower
from llmforge.base.errors import UnsupportedError, VerificationError
from llmforge.calibration import calibrate, plan
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.ir import dialect, graph, interface
from llmforge.ir.operators.canonical import Attention
from llmforge.passes import (
    CorrectLowRank,
    FlashAttention,
    FuseNorms,
    GenaiInterface,
    LowerPrecision,
    PackGateUp,
    PackQkv,
    PruneStructure,
    Sparsify,
)
from llmforge.quantization import structure
from llmforge.quantization.statistics import PruningDemand, Statistics
from llmforge.quantization.structure import PrunedStructure
from llmforge.recipe import EngineSpec
from llmforge.rewrite import pruning
from llmforge.rewrite.pass_base import Budget, Context, Pass
from llmforge.runtime.interface import StepInputs
from llmforge.trace import trace
from llmforge.verification import probe
from llmforge.verification.verifier import Verifier

from ..models import graphs, zoo

LOOSE = Budget(kld_mean=20.0)
RTX = targets.load("rtx-4090")
FORM = graphs.Llama(layers=3, hidden=64, heads=6, kv_heads=3, mlp=96)


def windows(count: int = 6) -> list[TokenWindow]:
    random = np.random.default_rng(0)
    return [TokenWindow(f"d{i}", random.integers(3, 259, 40)) for i in range(count)]


def masked(folder: Path, found: Statistics, shape: structure.Structure) -> Any:
    """Load the checkpoint with transformers, with the matrices that make up, and zeros where features are gone."""
    model = zoo.reference(folder)
    parameters = dict(model.named_parameters())
    assert found.kept is not None
    for block in shape.blocks:
        if block.index in found.kept.dropped:
            model.model.layers[block.index].forward = lambda hidden_states, *args, **kwargs: hidden_states
            continue
        places: list[tuple[str, Sequence[int] | None, int]] = []
        if block.heads is not None:
            width = block.heads.shared * block.heads.value_dim
            places.append((block.heads.output, found.kept.of_heads(block.index), width))
        if block.channels is not None:
            places.append((block.channels.output, found.kept.of_channels(block.index), 1))
        for name, units, width in places:
            if units is None:
                continue
            own = parameters[name]
            with torch.no_grad():
                own.zero_()
                for number, unit in enumerate(units):
                    of_unit = torch.from_numpy(found.pruned[name][:, number * width : (number + 1) * width].copy())
                    own[:, unit * width : (unit + 1) * width] = of_unit
    return model


@pytest.mark.parametrize(
    ("name", "changes", "kinds", "fraction"),
    [
        ("llama", {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4}, "all", 0.45),
        pytest.param("qwen3", {"num_key_value_heads": 2, "attention_bias": True}, "units", 0.3, marks=pytest.mark.slow),
        pytest.param("gemma2", {}, "units", 0.3, marks=pytest.mark.slow),
        pytest.param("llama-mha-biases", {}, "units", 0.3, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", {"num_key_value_heads": 4}, "units", 0.12, marks=pytest.mark.slow),
    ],
)
def test_the_pruned_graph_is_the_model_with_zeros(
    name: str, changes: dict[str, Any], kinds: str, fraction: float, tmp_path: Path
) -> None:
    zoo.write(name, tmp_path, **changes)
    checkpoint = Checkpoint.open(tmp_path)
    model = trace(checkpoint)
    units = ("heads", "channels", "layers") if kinds == "all" else ("heads", "channels")
    step = PruneStructure(budget=LOOSE, fraction=fraction, units=units)
    demands = [pruning.bound(demand, model) for demand in step.demands()]
    plan(checkpoint, demands, dialect.caches(model))
    found = calibrate(checkpoint, windows(), demands, caches=dialect.caches(model))
    assert found.kept is not None
    assert found.kept.heads or found.kept.channels
    [demand] = demands
    assert isinstance(demand, PruningDemand)
    assert demand.structure is not None
    expected = masked(tmp_path, found, demand.structure)
    before = sum(np.prod(graph.static(value)) for value in model.graph.initializers.values() if graph.sources(value))
    changes_made = step.run(model, Context(graphs.TARGET, found))
    assert changes_made
    dialect.check(model)
    after = sum(np.prod(graph.static(value)) for value in model.graph.initializers.values() if graph.sources(value))
    assert before - after >= 0.95 * demand.target
    assert zoo.largest_difference(dialect.expand(model), expected, zoo.Schedule((9, 14))) < 1e-5
    plain = zoo.reference(tmp_path)
    assert zoo.largest_difference(dialect.expand(model), plain, zoo.Schedule((9, 14))) > 1e-2


def chosen(kept: PrunedStructure) -> Statistics:
    """What calibration might find for a decoder of FORM."""
    return graphs.pruned(FORM, kept)


KEPT = PrunedStructure((1,), ((0, (0, 2)), (2, (1,))), ((0, tuple(range(32, 96))),))
STEP = PruneStructure(budget=LOOSE, fraction=0.4)
TEXT = np.random.default_rng(0).integers(0, 96, 24)


@pytest.mark.parametrize("whole_bytes", [1 << 30, 0])
def test_heads_channels_and_a_layer_go_and_are_verified(tmp_path: Path, whole_bytes: int) -> None:
    """Run whole, and streamed piece by piece."""
    model = graphs.llama(FORM)
    verifier = Verifier(
        model, promises=graphs.PROMISES, folder=tmp_path, texts=[TEXT], threads=1, whole_bytes=whole_bytes
    )
    context = Context(graphs.TARGET, chosen(KEPT))
    changes = STEP.run(model, context)
    assert {each.node: each.what for each in changes.rewritten} == {
        "l0_attention": "2 of 3 KV heads, 4 of 6 query heads",
        "l0_down_node": "64 of 96 channels",
        "l1_attention": "layer 1 dropped",
        "l2_attention": "1 of 3 KV heads, 2 of 6 query heads",
    }
    assert [attention.layer for attention in Attention.all(model)] == [0, 2]
    assert dialect.caches(model) == {0: {"key", "value"}, 2: {"key", "value"}}
    shapes = {value.name: graph.static(value) for value in model.graph.inputs}
    assert shapes[interface.past_part(0, "key")][1] == 2
    assert shapes[interface.past_part(2, "value")][1] == 1
    assert pruning.kept_heads(model)[interface.past_part(2, "key")] == (1,)
    proof = verifier.check(STEP, model, changes)
    assert proof.kld_mean is not None
    assert proof.kld_mean > 0
    before = graph.fingerprint(model)
    again = STEP.run(model, context)
    assert not again
    assert [each.reason for each in again.skipped] == ["it is pruned already"]
    assert graph.fingerprint(model) == before


def test_a_pass_that_loses_caches_unasked_is_not_believed(tmp_path: Path) -> None:
    """What the pass says is gone may go, and no other cache; nor for a pass that is not to take layers out."""
    model = graphs.llama(FORM)
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[TEXT], threads=1)
    changes = STEP.run(model, Context(graphs.TARGET, chosen(KEPT)))
    model.metadata_props[graph.PRUNED] = '{"heads": {"0": [0, 2], "2": [1]}, "dropped": []}'
    with pytest.raises(VerificationError, match=r"cache of layer 2: there is none of layer 1"):
        verifier.check(STEP, model, changes)
    model.metadata_props[graph.PRUNED] = '{"heads": {"0": [0, 2], "2": [1]}, "dropped": [1]}'
    with pytest.raises(VerificationError, match=r"the graph has other caches .*past_key_values\.1\.key"):
        verifier.check(Sparsify(budget=LOOSE), model, changes)


def test_what_exceeds_a_budget_is_measured(tmp_path: Path) -> None:
    model = graphs.llama(FORM)
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[TEXT], threads=1)
    step = PruneStructure(budget=Budget(kld_mean=1e-6), fraction=0.4)
    proof = verifier.check(step, model, step.run(model, Context(graphs.TARGET, chosen(KEPT))))
    assert proof.kld_mean is not None
    assert proof.kld_mean > 1e-6


def test_too_little_is_refused_with_the_figure() -> None:
    step = PruneStructure(budget=LOOSE, fraction=0.03)
    figure = r"does not pay on target cpu-avx2: a decode step would read [\d,]+ parameters, not [\d,]+, 1\.0\d times"
    with pytest.raises(UnsupportedError, match=figure) as caught:
        step.run(graphs.llama(FORM), Context(graphs.TARGET, chosen(KEPT)))
    assert "quantize-weights" in str(caught.value.hint)


def test_speedup_is_of_what_a_decode_step_reads() -> None:
    model = graphs.llama(FORM)
    [demand] = PruneStructure(budget=LOOSE, speedup=1.25).demands()
    bound = pruning.bound(demand, model)
    assert isinstance(bound, PruningDemand)
    assert bound.structure is not None
    assert bound.read == bound.structure.parameters + FORM.hidden * FORM.vocabulary  # the head; no embedding
    assert bound.read / (bound.read - bound.target) == pytest.approx(1.25, rel=1e-3)


def test_what_cannot_go_is_said() -> None:
    packed = graphs.llama(FORM)
    assert PackQkv().run(packed, graphs.CPU)
    found = pruning.find(packed)
    assert all(block.heads is None and block.channels is not None for block in found.blocks)
    assert all(
        "put prune-structure in front" in block.reasons[0] or "Split" in block.reasons[0] for block in found.blocks
    )
    experts = pruning.find(graphs.llama(graphs.Llama(experts=4)))
    assert all(block.channels is None for block in experts.blocks)
    assert all("channels: it has experts" in " ".join(block.reasons) for block in experts.blocks)
    single = pruning.find(graphs.llama(graphs.Llama(kv_heads=1)))
    assert {block.reasons for block in single.blocks} == {("heads: it has one KV head",)}


def test_two_limits_or_none_are_refused() -> None:
    for limits in ({}, {"fraction": 0.2, "speedup": 1.2}):
        with pytest.raises(ValueError, match="fraction or speedup"):
            PruneStructure(budget=LOOSE, **limits)  # type: ignore[arg-type]


def test_engines_behind_read_the_pruned_shapes(tmp_path: Path) -> None:
    """TensorRT's lowering equals the pruned graph; ONNX Runtime's passes are proven on it, GPU's caches are its own."""
    model = graphs.llama(FORM)
    STEP.run(model, Context(RTX, chosen(KEPT)))
    lowered, _ = lower.rewrite(model.clone(), 40)
    caches = {value.name: graph.static(value)[1] for value in lowered.graph.inputs if "past_key" in str(value.name)}
    assert caches == {
        interface.past_part(0, "key"): 2,
        interface.past_part(0, "value"): 2,
        interface.past_part(2, "key"): 1,
        interface.past_part(2, "value"): 1,
    }
    runs = probe.random_runs(96)
    before, made = (probe.open_session(each, probe.InitializerArrays(), 1) for each in (model, lowered))
    for run in runs:
        caches_of = [session.allocate(run.batch, 40) for session in (before, made)]
        for step in run.steps:
            a, b = (
                session.step(StepInputs(step.ids, step.past, step.rows, lengths=step.lengths), cache)
                for session, cache in zip((before, made), caches_of, strict=True)
            )
            np.testing.assert_allclose(a[step.valid], b[step.valid], atol=1e-5)
    for step in (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention()):
        graphs.prove(step, model, tmp_path, Context(RTX))
    LowerPrecision(budget=LOOSE, dtype="fp16").run(model, Context(RTX))
    on_gpu, _ = cuda.lower(model, RTX, EngineSpec(max_context=64, max_batch=4, kv_cache="slots"))
    assert {
        value.name: graph.static(value)[1] for value in on_gpu.graph.inputs if "past_key" in str(value.name)
    } == caches


@pytest.mark.parametrize("backend", ["compressed-tensors", "gguf"])
@pytest.mark.parametrize("step", [PruneStructure, CorrectLowRank])
def test_files_of_others_cannot_say_it(backend: Literal["compressed-tensors", "gguf"], step: type[Pass]) -> None:
    with pytest.raises(UnsupportedError, match=f"{step.name}: a .* holds the parameters of the checkpoint by"):
        parameters.check_passes(backend, [step], passes.ALL)


def test_other_runtimes_cannot_say_it(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = graphs.llama(FORM)
    STEP.run(model, Context(graphs.TARGET, chosen(KEPT)))
    graphs.prove(FlashAttention(), model, tmp_path)
    assert GenaiInterface().run(model, graphs.CPU)
    with pytest.raises(UnsupportedError, match="after prune-structure layers differ"):
        interop.check(model, Checkpoint.open(tiny_checkpoint))
