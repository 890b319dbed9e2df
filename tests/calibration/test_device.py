"""Layers of calibration on a device: what crosses, what stays there, and that the results are the CPU's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmforge.calibration import calibrate
from llmforge.calibration.carriers import Carriers
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import dequantize
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import (
    InputRangeDemand,
    KvRangeDemand,
    Smoothing,
    Statistics,
    WeightDemand,
)

from ..fakes.counted_device import counted
from ..models import zoo

DEVICE = Carriers("counted:0")
WEIGHTS = WeightDemand(Gptq(), Grid(4, 32, False))
DEMANDS = (WEIGHTS, KvRangeDemand(), InputRangeDemand(Smoothing("int8", per_token=False, alpha=0.5)))
WINDOWS = [
    TokenWindow(f"d{i}", np.random.default_rng(i).integers(3, 259, length))
    for i, length in enumerate((48, 33, 48, 2, 40, 48, 20, 48, 31, 48))
]


@pytest.fixture(autouse=True)
def _same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU sum in fp32, as devices do, and take gradients in bf16, whatever the processor has."""
    monkeypatch.setattr("llmforge.calibration.sums._in_pairs", lambda: False)
    monkeypatch.setattr("llmforge.calibration.gradients.has_bf16", lambda: True)


def require_near(one: Statistics, other: Statistics) -> None:
    """Hold weights and ranges against each other: the last bits of sums differ, which moves few codes."""
    assert one.linears.keys() == other.linears.keys()
    for name, matrix in one.linears.items():
        a, b = dequantize(matrix), dequantize(other.linears[name])
        assert np.mean(np.abs(a - b) > 1e-3 * np.abs(a).max()) < 0.02, name
    assert one.kv.keys() == other.kv.keys()
    for layer, of in one.kv.items():
        np.testing.assert_allclose(of.key, other.kv[layer].key, rtol=0.02, atol=1e-3)
        np.testing.assert_allclose(of.value, other.kv[layer].value, rtol=0.02, atol=1e-3)
    for name, seen in one.inputs.items():
        np.testing.assert_allclose(seen.peaks, other.inputs[name].peaks, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_a_device_makes_what_the_cpu_makes(kind: str, tmp_path: Path) -> None:
    zoo.write(kind, tmp_path / kind)
    checkpoint = Checkpoint.open(tmp_path / kind)
    with counted(), sdpa_kernel(SDPBackend.MATH):
        expected = calibrate(checkpoint, WINDOWS, DEMANDS)
        require_near(expected, calibrate(checkpoint, WINDOWS, DEMANDS, carriers=DEVICE))
