"""Training the scales of quantized linears: what it lowers, when it ends, what stays, and that it is found again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmforge.calibration import calibrate
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import split
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import RecoveryDemand, WeightDemand

WEIGHTS = WeightDemand(Gptq(), Grid(3, 32, False, "int8"))


@pytest.fixture
def windows() -> list[TokenWindow]:
    random = np.random.default_rng(0)
    return [TokenWindow(f"d{i}", random.integers(3, 259, length)) for i, length in enumerate((48, 33, 48) * 3)]


def test_scales_are_trained(tiny_checkpoint: Path, windows: list[TokenWindow]) -> None:
    found = calibrate(Checkpoint.open(tiny_checkpoint), windows, [WEIGHTS, RecoveryDemand(4096, 0.0)])
    print(found.notes)
    assert set(found.recovered) == set(found.linears)
    for name, matrix in found.recovered.items():
        np.testing.assert_array_equal(matrix.codes, found.linears[name].codes)
        split(matrix.scales, matrix.grid)
