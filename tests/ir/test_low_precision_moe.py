"""`llmforge::LowPrecisionMoE`: its expansion in ONNX Runtime's CPU kernels, against loops over tokens."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray

from llmforge.base.errors import VerificationError
from llmforge.ir import expansion, graph
from llmforge.ir.operators.canonical import LowPrecisionMoE
from llmforge.quantization.low_precision_experts import FORMATS, FP4, FormatOfExperts, scales_of_experts

from ..samples import references
from .test_moe import FORM, TEXT

EXPERTS, HIDDEN, INNER, TOP = 3, 256, 128, 2
STEP = np.float32(3.0 / (6 * 448))  # of what NVFP4 reads
Array = NDArray[Any]


def rounded_e2m1(x: Array, step: Array) -> Array:
    return np.clip(x / step, -6, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * step


def read(x: NDArray[np.float32], name: FormatOfExperts) -> Array:
    """Round what one token reads [K], as servers do."""
    form = FORMATS[name]
    groups = x.reshape(-1, form.group or len(x))
    peaks = np.abs(groups).max(1, keepdims=True)
    if form.dtype == FP4:
        steps = np.minimum(peaks / np.float32(6) / STEP, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * STEP
        return rounded_e2m1(groups, np.maximum(steps, np.float32(2.0**-100)).astype(np.float64)).reshape(-1)
    largest = {"int8": 127, "fp8": 448, "fp8-block": 448}[name]
    steps = np.maximum(peaks / np.float32(largest), np.float32(2.0**-24))
    numbers = groups / steps
    codes = np.rint(numbers) if name == "int8" else numbers.astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float64) * steps).reshape(-1)


def widened(codes: Array, scales: Array, whole: Array | None, group: int) -> Array:
    """Read the matrices of all experts from codes [E, K, N]: the definition, apart from the code under test."""
    steps = scales.astype(np.float64) * (1.0 if whole is None else whole[:, None, None].astype(np.float64))
    return codes.astype(np.float64) * np.repeat(steps, group or codes.shape[1], axis=1)


def reference(name: FormatOfExperts, feeds: dict[str, Array], up: Array, down: Array, form: dict[str, Any]) -> Array:
    """Compute token by token, rounding what either product reads."""
    y = np.zeros(feeds["x"].shape)
    for token in np.ndindex(y.shape[:-1]):
        for expert, weight in zip(feeds["ids"][token], feeds["mixing"][token], strict=True):
            h = (read(feeds["x"][token], name) @ up[expert]).astype(np.float32)
            gate, *linear = np.split(h.astype(np.float64), 2) if form["gated"] else [h.astype(np.float64)]
            inner = math.prod(linear, start=references.activate(gate, form["activation"], form["alpha"]))
            y[token] += weight * (read(inner.astype(np.float32), name) @ down[expert])
    return y


def model(name: FormatOfExperts, weights: dict[str, Array], form: dict[str, Any]) -> tuple[ir.Model, dict[str, Array]]:
    """Make one layer in a format; with the matrices that its codes stand for."""
    made = ir.from_onnx_text(TEXT.replace("[batch, sequence, 32]", f"[batch, sequence, {HIDDEN}]"))
    member, of, wide, operands = made.graph[0], FORMATS[name], {}, {}
    for part, matrix in weights.items():
        whole = scales_of_experts([matrix]) if of.dtype == FP4 else None
        parts = [matrix] if whole is None else [matrix, whole]
        codes, scales = of.codes(parts), of.scales(parts)
        wide[part] = widened(codes, scales, whole, of.group)
        arrays = {"": codes, "_scales": scales, "_scale": whole, "_input_scale": None if whole is None else STEP}
        operands |= {f"{part}{suffix}": array for suffix, array in arrays.items() if array is not None}
    values = {
        part: graph.initializer(made, part, ir.Tensor(np.asarray(array), name=part)) for part, array in operands.items()
    }
    values |= dict(zip(("x", "expert_ids", "expert_weights"), member.inputs, strict=True))  # type: ignore[arg-type]
    layer = LowPrecisionMoE.insert(member, values, {**form, "group": of.group}, name="made")
    graph.replace_value(member.outputs[0], layer.output)
    graph.drop_unused(made)
    return made, wide


def inputs(scale: float = 1.0) -> dict[str, Array]:
    random = np.random.default_rng(1)
    x = (scale * random.standard_normal((2, 5, HIDDEN))).astype(np.float32)
    x[0, 0] = 0
    ids = np.stack([random.permutation(EXPERTS)[:TOP] for _ in range(10)]).reshape(2, 5, TOP)
    return {"x": x, "ids": ids, "mixing": random.random((2, 5, TOP)).astype(np.float32)}


def matrices(form: dict[str, Any]) -> dict[str, Array]:
    random = np.random.default_rng(0)
    shapes = {"up": (EXPERTS, HIDDEN, INNER * (1 + form["gated"])), "down": (EXPERTS, INNER, HIDDEN)}
    return {part: (random.standard_normal(shape) / 16).astype(np.float32) for part, shape in shapes.items()}


@pytest.mark.parametrize("form", [FORM, {**FORM, "gated": 0, "activation": "relu2"}], ids=["gated", "plain"])
@pytest.mark.parametrize("name", FORMATS)
def test_both_products_read_what_is_rounded(name: FormatOfExperts, form: dict[str, Any]) -> None:
    made, wide = model(name, matrices(form), form)
    expanded = expansion.expand(made)
    assert {member.domain for member in expanded.graph.all_nodes()} == {""}
    session = onnxruntime.InferenceSession(ir.to_proto(expanded).SerializeToString())
    feeds = inputs()
    [found] = session.run(None, feeds)
    wanted = reference(name, feeds, wide["up"], wide["down"], form)
    unrounded = references.moe(*feeds.values(), wide["up"], wide["down"], **form)
    size = np.sqrt(np.square(wanted).mean())
    error = np.sqrt(np.square(found - wanted).mean()) / size
    rounding = np.sqrt(np.square(unrounded - wanted).mean()) / size
    # A sum in another order puts a number of the second product on the other side of a code's border now and then.
    assert error < 0.1 * rounding
    assert rounding > {"int8": 1e-3, "nvfp4": 5e-2}.get(name, 5e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_those_of_each_expert_alone(name: FormatOfExperts) -> None:
    weight = matrices(FORM)["up"] * np.array([1, 100, 0.01], np.float32)[:, None, None]
    of = FORMATS[name]
    for expert in range(EXPERTS):
        one = weight[expert : expert + 1]
        beside = [] if of.dtype != FP4 else [scales_of_experts([weight])]
        alone = [] if of.dtype != FP4 else [scales_of_experts([one])]
        for function in (of.codes, of.scales):
            assert function([weight, *beside])[expert].tobytes() == function([one, *alone])[0].tobytes()


@pytest.mark.parametrize(
    ("part", "shape", "message"),
    [("up_scales", (EXPERTS, 3, 2 * INNER), "do not fit"), ("down_scales", (EXPERTS, 1, 7), "do not fit")],
)
def test_scales_that_do_not_fit_are_refused(part: str, shape: tuple[int, ...], message: str) -> None:
    made, _ = model("fp8-block", matrices(FORM), FORM)
    value = made.graph.initializers[part]
    value.const_value = ir.Tensor(np.ones(shape, np.float32), name=part)
    value.shape = ir.Shape(shape)
    with pytest.raises(VerificationError, match=message):
        LowPrecisionMoE.all(made)[0].check()


def test_nvfp4_needs_scales_of_experts_and_of_what_is_read() -> None:
    made, _ = model("nvfp4", matrices(FORM), FORM)
    layer = LowPrecisionMoE.all(made)[0]
    layer.check()
    layer.up_input_scale = None
    with pytest.raises(VerificationError, match="scales of experts are of NVFP4 alone"):
        layer.check()
