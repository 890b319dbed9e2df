"""Layers of calibration on a device: what crosses, what stays there, and that the results are the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from llmforge.base.errors import EnvironmentLacks, UnsupportedError, UsageError
from llmforge.calibration import calibrate
from llmforge.calibration.carriers import Carriers
from llmforge.calibration.device import ExecutionDevice
from llmforge.calibration.skeleton import Skeleton
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import dequantize
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import (
    Demand,
    InputRangeDemand,
    KvRangeDemand,
    Smoothing,
    Statistics,
    WeightDemand,
)

from ..fakes.counted_device import Traffic, counted
from ..models import zoo

DEVICE = Carriers("counted:0")
WEIGHTS = WeightDemand(Gptq(), Grid(4, 32, False))
DEMANDS = (WEIGHTS, KvRangeDemand(), InputRangeDemand(Smoothing("int8", per_token=False, alpha=0.5)))
WINDOWS = [
    TokenWindow(f"d{i}", np.random.default_rng(i).integers(3, 259, length))
    for i, length in enumerate((48, 33, 48, 2, 40, 48, 20, 48, 31, 48))
]


def nearly(one: Statistics, other: Statistics) -> None:
    """Codes may differ where a sum in another order makes a tie: values of weights hardly do."""
    assert one.linears.keys() == other.linears.keys()
    for name, matrix in one.linears.items():
        a, b = dequantize(matrix), dequantize(other.linears[name])
        assert np.mean(np.abs(a - b) > 1e-3 * np.abs(a).max()) < 0.02, name
    for layer, of in one.kv.items():
        np.testing.assert_allclose(of.key, other.kv[layer].key, rtol=0.05)
    for name, seen in one.inputs.items():
        np.testing.assert_allclose(seen.peaks, other.inputs[name].peaks, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_a_device_makes_what_the_cpu_makes(kind: str, tmp_path: Path) -> None:
    zoo.write(kind, tmp_path / kind)
    checkpoint = Checkpoint.open(tmp_path / kind)
    with counted():
        nearly(calibrate(checkpoint, WINDOWS, DEMANDS), calibrate(checkpoint, WINDOWS, DEMANDS, carriers=DEVICE))
