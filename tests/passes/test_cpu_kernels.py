"""cpu-kernels: what becomes an operator of llmforge.cpu, what it takes over, and what stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import native, targets
from llmforge.base.errors import EnvironmentLacks, UnsupportedError
from llmforge.ir import dialect, graph
from llmforge.ir.operators.contrib import MatMulNBits
from llmforge.ir.operators.cpu import CpuLinear
from llmforge.passes.cpu_kernels import CpuKernels
from llmforge.passes.flash_attention import FlashAttention
from llmforge.passes.fuse_norms import FuseNorms
from llmforge.passes.pack_gate_up import PackGateUp
from llmforge.passes.pack_qkv import PackQkv
from llmforge.passes.quantize_weights import QuantizeWeights
from llmforge.quantization.grid import Scale
from llmforge.rewrite import cpu_linear
from llmforge.rewrite.pass_base import Budget, Changes, Context, Pass
from llmforge.verification import lossy_places, probe
from llmforge.verification.drawn_places import Drawn

from ..models import graphs

BUDGET = Budget(kld_mean=1.0)
RUNS = probe.random_runs(96)
STEP = CpuKernels(BUDGET)
SPEC = graphs.Llama(hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=64)
QUANTIZE = QuantizeWeights(BUDGET, method="rtn")
ALL = (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention(), QUANTIZE)


def built(spec: graphs.Llama = SPEC, steps: tuple[Pass, ...] = ALL) -> ir.Model:
    model = graphs.llama(spec)
    for step in steps:
        step.run(model, graphs.CPU)
    return model


def outcomes(model: ir.Model) -> list[probe.StepOutcome]:
    session = probe.open_session(model, probe.InitializerArrays(), threads=1)
    return [outcome for run in RUNS for outcome in probe.drive(session, run, caches=True)]


def check(model: ir.Model) -> Changes:
    """Run the pass: the graph stays in the dialect, logits move by rounding alone, a second run does nothing."""
    before = outcomes(model)
    changes = STEP.run(model, graphs.CPU)
    dialect.check(model)
    for was, now in zip(before, outcomes(model), strict=True):
        for left, right in zip(was.logits, now.logits, strict=True):
            assert np.abs(left - right).max() < 0.1 * left.std()
            assert np.sqrt(np.mean((left - right) ** 2)) < 0.02 * left.std()
    fingerprint = graph.fingerprint(model)
    assert not STEP.run(model, graphs.CPU)
    assert graph.fingerprint(model) == fingerprint
    return changes


def test_some_layers_or_all_read_two_terms() -> None:
    """Logits come nearer to those of fp32 activations, and the report names the layers."""
    exact = outcomes(built(steps=(*ALL[:-1], replace(QUANTIZE, accuracy_level=1, embedding_bits=16))))
    errors = {}
    for name, step in {
        "int8": STEP,
        "last": replace(STEP, last_layer="int8x2"),
        "some": replace(STEP, int8x2=("*.down_proj.weight",)),
        "int8x2": replace(STEP, activations="int8x2"),
    }.items():
        model = built(steps=(*ALL[:-1], replace(QUANTIZE, embedding_bits=16)))
        changes = step.run(model, graphs.CPU)
        dialect.check(model)
        of_layers = [change.what for change in changes.rewritten if change.what.startswith("Linear")]
        two = [what for what in of_layers if "activations int8x2" in what]
        assert len(two) == {"int8": 0, "last": 3, "some": SPEC.layers, "int8x2": len(of_layers)}[name]
        assert not step.run(model, graphs.CPU)
        found = outcomes(model)
        errors[name] = max(
            float(np.abs(a - b).max())
            for was, now in zip(exact, found, strict=True)
            for a, b in zip(was.logits, now.logits, strict=True)
        )
    assert errors["int8x2"] < errors["int8"] / 20
    assert errors["some"] < 1.5 * errors["int8"]


def test_outliers_have_two_terms_unless_the_recipe_says_otherwise() -> None:
    """Logits come nearer to those of fp32 activations where what layers read has large channels."""

    def with_outliers() -> ir.Model:
        model = built(steps=ALL[:-1])
        for layer in range(SPEC.layers):
            norm = model.graph.initializers[f"model.layers.{layer}.input_layernorm.weight"]
            scale = graph.tensor(norm).numpy().copy()
            scale[5] *= 40
            norm.const_value = ir.Tensor(scale, name=norm.name)
        return model

    exact = with_outliers()
    replace(QUANTIZE, accuracy_level=1, embedding_bits=16).run(exact, graphs.CPU)
    wanted, errors = outcomes(exact), {}
    for outliers in (0.0, 1.25):
        model = with_outliers()
        replace(QUANTIZE, embedding_bits=16).run(model, graphs.CPU)
        replace(STEP, outliers=outliers).run(model, graphs.CPU)
        assert {layer.outliers for layer in CpuLinear.all(model) if layer.terms == 1} == {outliers}
        errors[outliers] = np.mean(
            [
                np.square(a - b).mean()
                for was, now in zip(wanted, outcomes(model), strict=True)
                for a, b in zip(was.logits, now.logits, strict=True)
            ]
        )
    assert errors[1.25] < 0.5 * errors[0.0]


@pytest.mark.parametrize("scales", ["fp32", "fp16"])
def test_a_layer_becomes_five_operators(scales: Scale) -> None:
    model = built(replace(SPEC, layers=1), (*ALL[:-1], replace(QUANTIZE, scales=scales)))
    changes = check(model)
    assert graphs.operators(model) == {"Linear": 5, "GroupQueryAttention": 1, "Embedding": 1, "Gather": 1}
    assert {node.domain for node in model.graph} == {native.DOMAIN, ""}
    assert not changes.skipped
    assert len(changes.rewritten) == 7
    assert [str(value.name) for value in model.graph.inputs if "past" not in str(value.name)] == [
        "input_ids",
        "logits_rows",
        "seqlens_k",
    ]
    taken = [change.what for change in changes.rewritten if change.what.startswith("Linear")]
    assert [what.split("], ")[-1] for what in taken] == [
        "RMSNormalization",
        "residual Add",
        "RMSNormalization, gated activation",
        "residual Add",
        "RMSNormalization",
    ]


def test_scales_in_bf16_are_left_to_servers_of_others() -> None:
    model = graphs.llama(replace(SPEC, layers=1))
    replace(QUANTIZE, scales="bf16").run(model, graphs.CPU)
    reasons = {cpu_linear.reason_against(layer) for layer in MatMulNBits.all(model)}
    assert reasons == {"its scales are bf16, which are for servers of others"}


def test_norms_of_queries_and_keys_go_into_attention() -> None:
    model = built(replace(SPEC, query_norm=True))
    changes = check(model)
    assert graphs.operators(model) == {"Linear": 9, "GroupQueryAttention": 2, "Embedding": 1, "Gather": 1}
    assert sum("norms of queries and keys" in change.what for change in changes.rewritten) == 2


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, bias=True),
        replace(SPEC, sinks=True, window=5),
        replace(SPEC, softcap=30.0, interleaved=1),
        replace(SPEC, rotary_dim=0),
        replace(SPEC, activation="Gelu"),
    ],
    ids=["bias", "sinks and window", "softcap, interleaved", "no rotary embedding", "gelu"],
)
def test_variants(spec: graphs.Llama) -> None:
    changes = check(built(spec))
    assert not changes.skipped


@pytest.mark.parametrize("omitted", [FuseNorms, PackQkv, PackGateUp])
def test_without_other_passes(omitted: type[Pass]) -> None:
    model = built(steps=tuple(step for step in ALL if not isinstance(step, omitted)))
    changes = check(model)
    assert not changes.skipped
    assert "MatMulNBits" not in graphs.operators(model)
    assert "RMSNormalization" not in graphs.operators(model)


def test_eight_bits_and_symmetric_weights() -> None:
    for step in (replace(QUANTIZE, bits=8), replace(QUANTIZE, symmetric=True, embedding_bits=4)):
        assert not check(built(steps=(*ALL[:-1], step))).skipped


def test_what_the_kernels_cannot_do_stays_and_says_why() -> None:
    changes = check(built(steps=(*ALL[:-1], replace(QUANTIZE, accuracy_level=0, embedding_bits=16))))
    reasons = {skipped.reason for skipped in changes.skipped}
    assert reasons == {"its activations stay fp32 (accuracy_level), but the kernel quantizes them to int8"}
    changes = STEP.run(built(replace(SPEC, head_dim=24)), graphs.CPU)
    assert "heads have 24 channels; the kernel needs a multiple of 16, at most 1024" in {
        skipped.reason for skipped in changes.skipped
    }


def test_blocks_that_do_not_divide_the_columns_stay() -> None:
    changes = STEP.run(built(replace(SPEC, mlp=80)), graphs.CPU)
    assert {skipped.reason for skipped in changes.skipped} == {"blocks of 32 do not divide 80 columns"}
    assert len(changes.rewritten) > 5


def test_other_targets_and_installations_without_the_library_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Context(targets.load("l4"))
    with pytest.raises(UnsupportedError, match="runs no ONNX Runtime on a CPU"):
        STEP.run(built(), gpu)
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(EnvironmentLacks, match="not compiled in this installation"):
        STEP.run(built(), graphs.CPU)


def test_rows_that_are_selected_in_front_of_the_norm_have_a_name_of_their_own() -> None:
    """Behind experts no layer takes the sum over, so that a proof begins at values that both graphs name."""
    model = built(replace(SPEC, experts=4))
    before = model.clone()
    check(model)
    held = lossy_places.hold(before, model, graphs.PROMISES, tolerance=1e-4, threads=1, seed=1)
    assert isinstance(held, Drawn), held
