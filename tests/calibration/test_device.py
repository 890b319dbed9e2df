"""Devices of calibration: by name, their memory as it is said, and the cases of `device_cases.py`."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from llmforge.base.errors import EnvironmentLacks, UnsupportedError, UsageError
from llmforge.calibration.carriers import Carriers
from llmforge.calibration.device import ExecutionDevice
from llmforge.calibration.residency import LOGITS, LayerWidths, ModelWidths

CASES = Path(__file__).with_name("device_cases.py")


@pytest.mark.thorough
@pytest.mark.parametrize("which", ["not thorough", "thorough"])
def test_layers_run_on_a_device_that_counts_and_refuses(which: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-m",
        which,
        str(CASES),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=CASES.parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


# Parameters as their configurations have them (8B: Llama 3.1, 70B: Llama 3.3), 16 windows of 512 tokens.
@pytest.mark.parametrize(
    ("hidden", "inner", "heads", "kv", "least_gb", "most_gb"),
    [(4096, 14336, 32, 1024, 10, 13), (8192, 28672, 64, 1024, 32, 42)],
    ids=["8B", "70B"],
)
def test_large_models_fit_one_gpu(hidden: int, inner: int, heads: int, kv: int, least_gb: int, most_gb: int) -> None:
    linears = ((hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden))
    linears += ((inner, hidden), (inner, hidden), (hidden, inner))
    layer = LayerWidths(hidden, sum(n * k for n, k in linears) + 2 * hidden, linears, heads)
    widths, lengths = ModelWidths((layer,), 128256, max(1, LOGITS // 128256)), [512] * 16
    assert least_gb < widths.resident_bytes(lengths, 16) / 1e9 < most_gb
    assert widths.windows_within(80 * 10**9, lengths) == 16


def test_devices_are_found_by_name_or_refused() -> None:
    assert ExecutionDevice.of("cpu").is_host
    assert str(ExecutionDevice.of("auto").device) == ("cuda:0" if torch.cuda.is_available() else "cpu")
    with pytest.raises(EnvironmentLacks, match="cuda:99 is not there"):
        ExecutionDevice.of("cuda:99")
    with pytest.raises(UsageError, match="no device is called 'gpu'"):
        ExecutionDevice.of("gpu")
    with pytest.raises(UnsupportedError, match="compute on CPUs"):
        Carriers("cuda:0", workers=lambda: nullcontext([]))
