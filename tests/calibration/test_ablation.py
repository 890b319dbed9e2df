"""benchmarks.ablation: what it takes out is out, and its intervals are those of documents."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from benchmarks.ablation import GRID, INGREDIENTS, Measured
from llmforge.calibration import calibrate, mixed
from llmforge.calibration.skeleton import Skeleton
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization.grid import Grid
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import Statistics, WeightDemand

from ..models.checkpoints import write_checkpoint

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to compile changed loops with")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("ablation") / "model"
    write_checkpoint(folder, hidden_size=64, intermediate_size=128)
    return Checkpoint.open(folder)


WINDOWS = [TokenWindow(f"d{i // 2}", np.random.default_rng(i).integers(3, 259, 40 + i)) for i in range(16)]


def quantized(checkpoint: Checkpoint) -> Statistics:
    return calibrate(checkpoint, WINDOWS, [WeightDemand(Gptq(), GRID, tables=Grid(6, 64, True, "int8"))])


@pytest.fixture(scope="module")
def plain(checkpoint: Checkpoint) -> Statistics:
    return quantized(checkpoint)


def same(one: Statistics, other: Statistics) -> bool:
    return all(
        np.array_equal(one.linears[name].codes, other.linears[name].codes)
        and np.array_equal(one.linears[name].scales, other.linears[name].scales)
        for name in one.linears
    )


LARGE = {"sweeps without refit of zero points"}  # changes codes of the sample, and none of a checkpoint this small


@pytest.mark.slow
@needs_cc
@pytest.mark.parametrize("name", sorted(INGREDIENTS.keys() - LARGE))
def test_what_is_taken_out_changes_codes(name: str, checkpoint: Checkpoint, plain: Statistics) -> None:
    with INGREDIENTS[name]():
        without = quantized(checkpoint)
    assert not same(without, plain)


def test_what_was_taken_out_is_back_again(checkpoint: Checkpoint, plain: Statistics) -> None:
    with INGREDIENTS["no sweeps of refinement"]():
        assert not same(quantized(checkpoint), plain)
    assert same(quantized(checkpoint), plain)


def test_windows_sum_to_the_divergence(checkpoint: Checkpoint, plain: Statistics) -> None:
    skeleton = Skeleton.build(checkpoint)
    with torch.no_grad():
        each = mixed.divergences(skeleton, WINDOWS, plain.linears)
        whole = mixed.divergence(skeleton, WINDOWS, plain.linears)
    assert len(each) == len(WINDOWS)
    assert sum(each) / sum(len(window.ids) for window in WINDOWS) == pytest.approx(whole)


def test_an_interval_of_a_difference_is_paired() -> None:
    random = np.random.default_rng(1)
    tokens = random.integers(100, 500, 40)
    losses = tokens * random.uniform(0.001, 0.1, 40)
    one, other = (Measured(own, tokens, 4.0, 0.0, 0.0) for own in (losses, losses + 0.001 * tokens))
    low, high = other.interval(one)
    assert low == pytest.approx(0.001)
    assert high == pytest.approx(0.001)
    low, high = one.interval()
    assert low < one.kld < high
    assert high - low > 0.005
