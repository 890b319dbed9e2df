"""Calibration computes on the same threads everywhere, and gives the process its own back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from llmforge.calibration import calibrate, driver, openblas, sums
from llmforge.calibration.threads import fixed
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization.grid import Grid
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.rounding import products
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
    windows = [TokenWindow("d", np.arange(3, 43))]
    before = blas.threads
    blas.use(own)
    try:
        with torch_threads(own):
            calibrate(Checkpoint.open(tiny_checkpoint), windows, demands, threads=2)
            assert (torch.get_num_threads(), blas.threads) == (own, own)
    finally:
        blas.use(before)
    assert seen == [(2, 2)] * 2


def test_settings_come_back_after_an_error() -> None:
    blas, products = openblas(), torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # untyped in torch
    assert blas is not None
    before = torch.get_num_threads(), blas.threads, products.fp32_precision
    with fixed(3):
        assert (torch.get_num_threads(), blas.threads, products.fp32_precision) == (3, 3, "bf16")
    with pytest.raises(KeyError), fixed(3):
        raise KeyError
    assert (torch.get_num_threads(), blas.threads, products.fp32_precision) == before


@pytest.mark.parametrize("in_pairs", [False, True])
def test_moments_are_computed_below_the_diagonal_and_mirrored(in_pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In panels, the last of which is narrower; of pairs of bf16 where the processor has them."""
    if in_pairs and not products.has_bf16():
        pytest.skip("this processor has no AVX512-BF16")
    monkeypatch.setattr(sums, "_in_pairs", lambda: in_pairs)
    x = torch.randn(40, 1300, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(1300, 1300)
    for part in x.split(16):
        sums.add_moments(total, part)
    assert not total[:160, 200:].any()
    sums.mirror(total)
    assert torch.equal(total, total.T)
    read = x.bfloat16().float() if in_pairs else x
    torch.testing.assert_close(total, read.T @ read, rtol=1e-5, atol=1e-4)


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
