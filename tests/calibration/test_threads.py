"""Calibration computes on the same threads everywhere, and gives the process its own back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from llmforge.calibration import calibrate, driver, openblas
from llmforge.calibration.threads import fixed
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import Window
from llmforge.quantization.grids import Grid
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import WeightDemand
from llmforge.trace.hooks.internals import torch_threads


@pytest.mark.parametrize("own", [1, 3])
def test_codes_are_decided_on_the_threads_of_the_recipe(
    own: int, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blas = openblas()
    assert blas is not None, "numpy's wheel brings OpenBLAS"
    seen: list[tuple[int, int]] = []
    quantize = driver.quantize_layer

    def note(*args: object) -> object:
        seen.append((torch.get_num_threads(), blas.threads))
        return quantize(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(driver, "quantize_layer", note)
    demands = [WeightDemand(Gptq(), Grid(4, 32, False))]
    windows = [Window("d", np.arange(3, 43))]
    before = blas.threads
    blas.use(own)
    try:
        with torch_threads(own):
            calibrate(Checkpoint.open(tiny_checkpoint), windows, demands, threads=2)
            assert (torch.get_num_threads(), blas.threads) == (own, own)
    finally:
        blas.use(before)
    assert seen == [(2, 2)] * 2


def test_threads_come_back_after_an_error() -> None:
    blas = openblas()
    assert blas is not None
    before = torch.get_num_threads(), blas.threads
    with pytest.raises(KeyError), fixed(3):
        raise KeyError
    assert (torch.get_num_threads(), blas.threads) == before


def test_products_do_not_depend_on_the_threads_around() -> None:
    """Large enough for BLAS to split; that other threads may round otherwise is why they are fixed."""
    blas = openblas()
    assert blas is not None
    rng = np.random.default_rng(0)
    x = rng.standard_normal((700, 513)).astype(np.float32)
    results = []
    before = blas.threads
    for own in (1, 2, 5):
        blas.use(own)
        try:
            with torch_threads(own), fixed(2):
                gram = torch.from_numpy(x).T @ torch.from_numpy(x)
                hessian = gram.numpy().astype(np.float64) + np.eye(513)
                results.append((gram.numpy().tobytes(), np.linalg.cholesky(hessian).tobytes(), (x.T @ x).tobytes()))
        finally:
            blas.use(before)
    assert results[0] == results[1] == results[2]
