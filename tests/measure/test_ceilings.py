"""Ceilings of a CPU: that each kernel runs, and computes what is timed."""

import numpy as np
import pytest

from llmforge import native, targets
from llmforge.measure import ceilings
from llmforge.passes.cpu_kernels import CpuKernels
from llmforge.rewrite.pass_base import Budget, Context


def test_ceilings_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small and few, so that it takes a fraction of a second; that the kernels run is what counts."""
    monkeypatch.setattr(ceilings, "ROWS", 64)
    monkeypatch.setattr(ceilings, "INNER", 256)
    monkeypatch.setattr(ceilings, "COLUMNS", 128)
    monkeypatch.setattr(ceilings, "WORKING_SET_BYTES", 1 << 20)
    monkeypatch.setattr(ceilings, "LAYER_BYTES", 1 << 18)
    told: list[str] = []
    found = ceilings.measure(2, told.append)
    assert list(found.bandwidth) == [1, 2]
    assert all(rate > 1e8 for rate in found.bandwidth.values())
    assert set(found.rates) == {"fp32", "int8"}
    assert all(1e8 < rate < 1e14 for rate in found.rates.values())
    assert told[0] == "Memory bandwidth, 1 thread"
    assert ("llmforge" in told[-1]) is (native.library() is not None)
    assert set(found.quantized) == {"onnxruntime", *(["llmforge"] if native.library() is not None else [])}
    assert found.rates["int8"] == max(each["int8"].rate for each in found.quantized.values())
    assert all(set(each) == {"int8", "int4"} for each in found.quantized.values())
    assert all(1e8 < layers.read < 1e13 for each in found.quantized.values() for layers in each.values())


def test_products_of_a_cpu_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "ROWS", 64)
    monkeypatch.setattr(ceilings, "INNER", 256)
    monkeypatch.setattr(ceilings, "COLUMNS", 128)
    rates, whose = ceilings.products(2)
    assert set(rates) == {"fp32", "int8"}
    assert all(1e8 < rate < 1e14 for rate in rates.values())
    assert whose.startswith("fp32: ONNX Runtime's MatMul; int8: ")


@pytest.mark.skipif(native.library() is None, reason="the kernels are not compiled here")
@pytest.mark.parametrize("bits", [4, 8])
def test_our_kernels_compute_the_product_that_is_timed(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "ROWS", 3)
    monkeypatch.setattr(ceilings, "INNER", 256)
    monkeypatch.setattr(ceilings, "COLUMNS", 64)
    x = np.random.default_rng(2).standard_normal((1, 3, 256), np.float32)
    results = []
    model = ceilings._quantized(3, 64, bits)
    for operator in ("MatMulNBits", "Linear"):
        assert [node.op_type for node in model.graph] == [operator]
        session = ceilings._session(model, 1, ["CPUExecutionProvider"])
        results.append(session.run(None, {"x": x})[0])
        if operator == "MatMulNBits":
            CpuKernels(budget=Budget(kld_mean=1.0)).run(model, Context(targets.local(), None))
    assert results[0].std() > 0.5
    np.testing.assert_allclose(results[1], results[0], atol=0.02 * results[0].std())
