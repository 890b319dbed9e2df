"""What is computed from constants alone becomes a constant, lazily and to the bit."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from llmforge.ir import moved_weights

from ..models import graphs

WEIGHT = np.random.default_rng(0).standard_normal(8).astype(np.float32)


def model(*lines: str, **tensors: object) -> ir.Model:
    used = re.findall(r"\w+", " ".join(lines))
    arrays = {name: np.asarray(value) for name, value in {"w": WEIGHT, **tensors}.items() if name in used}
    text = "\n".join(lines)
    return graphs.parse(
        f'<ir_version: 11, opset_import: ["" : 24]>\nfold (float[n, 8] x) => (float[n, 8] y)\n{{\n{text}\n}}', arrays
    )


def run(graph: ir.Model, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(graph).SerializeToString(), options, ["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize("operator", ["Add", "Mul", "Sub"])
def test_a_weight_that_is_computed_becomes_an_initializer(operator: str) -> None:
    built = model(f'["made"] s = {operator} (w, one)', '["use"] y = Mul (x, s)', one=np.float32(1.1))
    x = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    before = run(built, x)
    assert moved_weights.fold_constants(built) == ["made"]
    assert graphs.lines(built, ["Add", "Sub", "Mul"]) == ["y = Mul(x, s)"]
    assert set(built.graph.initializers) == {"s"}
    assert isinstance(built.graph.initializers["s"].const_value, ir.LazyTensor)
    assert run(built, x).tobytes() == before.tobytes()
    assert moved_weights.fold_constants(built) == []


def test_a_chain_is_folded_whole() -> None:
    built = model(
        '["first"] a = Mul (w, two)',
        '["second"] b = Add (one, a)',
        '["use"] y = Mul (x, b)',
        one=np.float32(1),
        two=np.float32(2),
    )
    assert moved_weights.fold_constants(built) == ["first", "second"]
    tensor = built.graph.initializers["b"].const_value
    assert tensor is not None
    np.testing.assert_array_equal(tensor.numpy(), np.float32(1) + WEIGHT * np.float32(2))


def test_what_is_fed_or_is_no_float_or_is_large_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert moved_weights.fold_constants(model('["fed"] s = Add (x, w)', '["use"] y = Mul (x, s)')) == []
    shapes = model('["ints"] s = Add (n, n)', '["use"] y = Reshape (x, s)', n=np.array([0, 4], np.int64))
    assert moved_weights.fold_constants(shapes) == []
    monkeypatch.setattr(moved_weights, "LARGEST", 7)
    assert moved_weights.fold_constants(model('["made"] s = Add (w, w)', '["use"] y = Mul (x, s)')) == []
