"""GPTQ beside that of llm-compressor, on the same weights and Hessians: `pip install llmcompressor`, apart from this.

    pytest -m slow -s tests/quantization/test_llm_compressor.py

prints the ratios that stand in docs/quantization-results.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.documents import read_documents
from llmforge.compile import texts
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import dequantize
from llmforge.quantization.methods.base import InputStatistic, LayerInputs
from llmforge.quantization.methods.gptq import Gptq

DATA = Path(__file__).parents[1] / "data"
LAYER = 2
GRIDS = (
    Grid(4, 32, False),
    Grid(4, 128, False),
    Grid(4, 32, True),
    Grid(4, 128, True),
    Grid(3, 32, False),
    Grid(8, 128, True),
)
DAMPING = 0.01  # the default of both
Array = NDArray[np.float32]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def linears() -> dict[str, tuple[Array, Array]]:
    """Weights [N, K] of one layer of the sample, and the mean x xᵀ [K, K] of what they read in 8 windows of text."""
    folder = DATA / "docs-llama-7m"
    checkpoint = Checkpoint.open(folder)
    text = texts.windows_of(checkpoint, read_documents(DATA / "calibration.jsonl"), 512)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    modules = {
        name: module
        for name, module in model.model.layers[LAYER].named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    sums = {name: torch.zeros(module.in_features, module.in_features) for name, module in modules.items()}
    tokens = 0

    def watch(name: str) -> Any:
        def add(_: torch.nn.Module, given: tuple[torch.Tensor]) -> None:
            sums[name].addmm_(given[0][0].T, given[0][0])

        return add

    for name, module in modules.items():
        module.register_forward_pre_hook(watch(name))
    with torch.no_grad():
        for window in text[:32:4]:
            model(torch.from_numpy(window.ids)[None])
            tokens += len(window.ids)
    return {
        name: (module.weight.detach().numpy().copy(), (sums[name] / tokens).numpy()) for name, module in modules.items()
    }


def theirs(weight: Array, hessian: Array, grid: Grid) -> Iterator[tuple[str, Array]]:
    """Yield what llm-compressor makes of a weight, with each of its ways to find ranges."""
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
    from llmcompressor.observers import Observer

    for observer in ("memoryless_minmax", "memoryless_mse"):
        args = QuantizationArgs(
            num_bits=grid.bits,
            symmetric=grid.symmetric,
            strategy="group",
            group_size=grid.block_size,
            actorder="static",  # its default: columns by falling diagonal, groups as they lie
            observer=observer,
        )
        ranges = Observer.load_from_registry(observer, base_name="weight", args=args)(torch.from_numpy(weight.copy()))
        found = ranges.get_qparams()
        made, *_ = quantize_weight(
            torch.from_numpy(weight.copy())[None],
            torch.from_numpy(hessian.copy())[None],
            found["scale"][None],
            found["zero_point"][None],
            None,
            args,
            percdamp=DAMPING,
        )
        yield observer.removeprefix("memoryless_"), made[0].numpy()


def lost(weight: Array, made: Array, hessian: Array) -> float:
    """tr(E H Eᵀ) of what was made."""
    error = (weight - made).astype(np.float64)
    return float(np.vdot(error, error @ hessian.astype(np.float64)))


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.format.name)
def test_the_error_is_no_larger_than_that_of_llm_compressor(
    grid: Grid, linears: dict[str, tuple[Array, Array]]
) -> None:
    pytest.importorskip("llmcompressor", reason="llm-compressor is not installed: it is what gptq is held against here")
    of_all: dict[str, list[float]] = {}
    for name, (weight, hessian) in linears.items():
        seen = LayerInputs(4096, False, {InputStatistic.MOMENTS: hessian})
        ours = lost(weight, dequantize(Gptq(damping=DAMPING).quantize(weight, grid, seen)), hessian)
        for way, made in theirs(weight, hessian, grid):
            of_all.setdefault(way, []).append(ours / lost(weight, made, hessian))
            assert of_all[way][-1] <= 1, f"{name}: {of_all[way][-1]:.3f} of the error of llm-compressor, {way}"
    said = "; ".join(f"{way}: {min(own):.3f} … {max(own):.3f}" for way, own in of_all.items())
    print(f"\n{grid.format.name}: error as a share of llm-compressor's: {said}")
