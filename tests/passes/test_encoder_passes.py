"""Passes over encoders: what each makes of a graph, how it is proven, and what is caught."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from llmforge import native, targets, trace
from llmforge.backends.onnxruntime import builder
from llmforge.base.errors import UnsupportedError, VerificationError
from llmforge.base.progress import Silent
from llmforge.compile import encoder_calibration
from llmforge.ir import graph
from llmforge.ir.operators import cpu
from llmforge.ir.operators.standard import Gelu
from llmforge.passes.cpu_kernels import CpuKernels
from llmforge.passes.fuse_norms import FuseNorms
from llmforge.passes.pack_gate_up import PackGateUp
from llmforge.passes.pack_qkv import PackQkv
from llmforge.passes.quantize_channels import QuantizeChannels
from llmforge.passes.quantize_weights import QuantizeWeights
from llmforge.quantization.statistics import SparsityDemand
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass, Rewritten
from llmforge.verification.encoder_passes import EncoderTexts, EncoderVerifier, divergence
from llmforge.verification.promises import Promises
from llmforge.verification.reports import GraphSnapshot

from ..models import graphs
from ..trace.test_encoders import SIZES, checkpoint, encoding_of, engine_of

BUDGET = Budget(kld_mean=0.05)
RANDOM = np.random.default_rng(5)
IDS = [RANDOM.integers(2, SIZES["vocab_size"], length) for length in RANDOM.integers(5, 30, 24)]
TEXTS = EncoderTexts(IDS, [np.zeros_like(ids) for ids in IDS])
CHANNELS = QuantizeChannels(budget=BUDGET, dtype="int8", activations="per_token", smooth=False)
KERNELS = CpuKernels(BUDGET)
VNNI = Context(targets.load("cpu-avx512-vnni"))
needs_kernels = pytest.mark.skipif(native.library() is None, reason="llmforge was installed without a C compiler")


def verifier(model: ir.Model, encoding: object, folder: Path) -> EncoderVerifier:
    promises = Promises(64, 16, SIZES["vocab_size"])
    snapshot = GraphSnapshot.of(model)
    return EncoderVerifier(snapshot, encoding, promises=promises, folder=folder, read=TEXTS)  # type: ignore[arg-type]


@pytest.mark.thorough
@needs_kernels
@pytest.mark.parametrize(("kind", "head"), [("bert", "embedder"), ("bert", "reranker"), ("qwen3", "embedder")])
def test_int8_with_the_kernels_is_proven_and_near(tmp_path: Path, kind: str, head: str) -> None:
    opened = checkpoint(tmp_path / "c", kind, head=head, pooling="mean" if kind == "bert" else "last")
    model = trace.trace(opened)
    before = engine_of(opened, model.clone())
    proofs = verifier(model, encoding_of(opened), tmp_path)
    for step in (PackQkv(), PackGateUp(), CHANNELS, KERNELS):
        changes = step.run(model, VNNI)
        found = proofs.check(step, model, changes)
        assert bool(changes) is (bool(found.probes))
        assert found.kld_mean is None or found.kld_mean < 0.05
    layers = cpu.CpuLinear.all(model)
    assert {layer.block_size == layer.K for layer in layers} == {True}
    assert not Gelu.all(model), "they went into the layers"
    assert any(layer.residual is not None for layer in layers)
    after = engine_of(opened, model)
    b, a = (each.encode(IDS, TEXTS.types if each.config.token_types else None) for each in (before, after))
    if head == "embedder":
        assert float((a * b).sum(1).mean()) > 0.995
    else:
        assert float(np.corrcoef(a[:, 0], b[:, 0])[0, 1]) > 0.98


@pytest.mark.thorough
def test_weights_by_gptq_and_norms(tmp_path: Path) -> None:
    """Calibrated codes lose less than rounded ones on what calibration has not seen."""
    opened = checkpoint(tmp_path / "c", "bert")
    traced, lost = trace.trace(opened), {}
    text = [RANDOM.integers(2, SIZES["vocab_size"], 40) for _ in range(60)]
    for method in ("gptq", "rtn"):
        step = QuantizeWeights(BUDGET, bits=4, block_size=32, method=method, embedding_bits=16)
        model = traced.clone()
        read = EncoderTexts(text, [np.zeros_like(ids) for ids in text])
        made, asked = None, step.demands()
        if asked:
            given = (traced, encoding_of(opened), read, asked)
            made = encoder_calibration.calibrate(*given, threads=1, progress=Silent())
        if made is not None:
            assert set(made.linears) == set(encoder_calibration.plan(traced, step.demands()))
        proofs = verifier(model, encoding_of(opened), tmp_path)
        fused = FuseNorms().run(model, graphs.CPU)
        assert proofs.check(FuseNorms(), model, fused).largest_difference < 1e-4
        changes = step.run(model, Context(targets.load("cpu-avx2"), made))
        lost[method] = proofs.check(step, model, changes).kld_mean or 0.0
    assert 0 < lost["gptq"] < lost["rtn"]
    with pytest.raises(UnsupportedError, match="does not serve sparse weights"):
        encoder_calibration.plan(traced, [SparsityDemand(0.01)])


@dataclass(frozen=True)
class Planted(Pass):
    """A pass that does `act`."""

    name: ClassVar[str] = "planted"
    act: Callable[[ir.Model], None] = lambda model: None
    numerics: Numerics = Numerics.ROUNDING  # type: ignore[misc]

    def run(self, model: ir.Model, context: Context) -> Changes:
        self.act(model)
        return Changes(rewritten=[Rewritten("PoolSequences", "something")])


@pytest.mark.thorough
def test_a_pass_that_lies_is_caught(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path / "c", "bert")
    model = trace.trace(opened)

    def shrink(model: ir.Model) -> None:
        value = model.graph.initializers["encoder.layer.0.output.dense.bias"]
        value.const_value = ir.tensor(graph.tensor(value).numpy() * 1.01, name=value.name)

    proofs = verifier(model, encoding_of(opened), tmp_path)
    planted = Planted(shrink)
    with pytest.raises(VerificationError, match="pass planted declares rounding: what texts give differs by"):
        proofs.check(planted, model, planted.run(model, graphs.CPU))
    assert (tmp_path / "planted.after.onnx").exists()


def test_the_divergence_of_texts() -> None:
    rows = RANDOM.standard_normal((20, 8)).astype(np.float32)
    moved = rows + 0.1 * RANDOM.standard_normal(rows.shape).astype(np.float32)
    assert divergence(rows, 3 * rows, embeds=True) == pytest.approx(0, abs=1e-9)  # the same cosines
    assert divergence(rows, moved, embeds=True) > 0.01
    one = np.array([[0.0], [2.0]], np.float32)
    p = 1 / (1 + np.exp(-one.astype(np.float64)))
    q = 1 / (1 + np.exp(-(one + 1).astype(np.float64)))
    expected = (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean()
    assert divergence(one, one + 1, embeds=False) == pytest.approx(expected)
    assert divergence(rows, rows + 5, embeds=False) == pytest.approx(0, abs=1e-6)  # a softmax does not see it
    with pytest.raises(VerificationError, match="before the pass is NaN"):
        divergence(rows * np.nan, rows, embeds=True)


LAYER = """
<ir_version: 10, opset_import: ["" : 24]>
layer (float[1, tokens, 64] x) => (float[1, tokens, 48] y)
{
    product = MatMul(x, w)
    sum = Add(product, b)
    y = Gelu <approximate: string = "APPROXIMATE"> (sum)
}
"""


@needs_kernels
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_layer_of_channels_with_its_bias_and_gelu(approximate: str) -> None:
    text = LAYER.replace("APPROXIMATE", approximate)
    w, b = RANDOM.standard_normal((64, 48)).astype(np.float32), RANDOM.standard_normal(48).astype(np.float32)
    model = graphs.parse(text, {"w": w, "b": b})
    for at, node in enumerate(model.graph):
        node.name = f"node_{at}"
    for step in (CHANNELS, KERNELS):
        assert step.run(model, VNNI)
    [linear] = cpu.CpuLinear.all(model)
    assert (linear.activation, linear.block_size) == ({"none": 11, "tanh": 10}[approximate], 64)
    assert len(list(model.graph)) == 1
    x = RANDOM.standard_normal((1, 9, 64)).astype(np.float32)
    x[0, 3] = 0
    t, s = np.abs(x).max(2, keepdims=True) / 127, np.abs(w).max(0) / 127
    codes = np.rint(x / np.maximum(t, 1e-30))
    exact = (codes @ np.rint(w / s)) * t * s + b
    erf = np.vectorize(math.erf)(exact / 2**0.5)
    tanh = np.tanh((2 / np.pi) ** 0.5 * (exact + 0.044715 * exact**3))
    gelu = 0.5 * exact * (1 + {"none": erf, "tanh": tanh}[approximate])
    np.testing.assert_allclose(run(model, x), gelu, atol=2e-4)


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    """Run a graph as it is written."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    native.register(options)
    serialized = ir.serde.serialize_model(builder.lower(model, graphs.TARGET)[0]).SerializeToString()
    session = onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
    made: np.ndarray = session.run(None, {"x": x})[0]
    return made
