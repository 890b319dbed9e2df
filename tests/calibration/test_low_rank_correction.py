"""Calibration of low-rank corrections: behind corrected layers, kept and found again, refused without codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmforge.base.errors import UnsupportedError
from llmforge.cache import Cache
from llmforge.calibration import Store, calibrate, plan
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization.grid import Grid
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import LowRankDemand, WeightDemand

WEIGHTS = WeightDemand(Gptq(), Grid(3, 32, False))
CORRECTION = LowRankDemand(4.0, "fp32", 0.01, ("*.1.mlp.down_proj*",))


@pytest.fixture
def windows() -> list[TokenWindow]:
    random = np.random.default_rng(0)
    return [TokenWindow(f"d{i}", random.integers(3, 259, length)) for i, length in enumerate((48, 33, 48))]


def test_layers_are_quantized_behind_corrected_ones(
    tiny_checkpoint: Path, windows: list[TokenWindow], tmp_path: Path
) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    found = [
        calibrate(checkpoint, windows, [WEIGHTS, CORRECTION], store=Store(Cache(tmp_path / "kept"))) for _ in range(2)
    ]
    plain = calibrate(checkpoint, windows, [WEIGHTS])
    first = found[0]
    assert set(first.linears) - set(first.low_rank) == {"model.layers.1.mlp.down_proj.weight"}
    for name, each in first.low_rank.items():
        n, k = first.linears[name].shape
        assert each.product().shape == (n, k)
        assert each.after < each.before
        again = found[1].low_rank[name]
        np.testing.assert_array_equal(each.a, again.a)
        np.testing.assert_array_equal(each.b, again.b)
        assert (each.group, each.before, each.after, each.codes) == (
            again.group,
            again.before,
            again.after,
            again.codes,
        )
    query, value = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qv")
    assert first.low_rank[value].group == query
    np.testing.assert_array_equal(first.linears[query].codes, plain.linears[query].codes)  # the first to run
    last = "model.layers.1.self_attn.q_proj.weight"
    assert (first.linears[last].codes != plain.linears[last].codes).any()


def test_corrections_without_calibrated_codes_are_refused(tiny_checkpoint: Path, windows: list[TokenWindow]) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    with pytest.raises(UnsupportedError, match="corrects what quantize-weights chose") as caught:
        calibrate(checkpoint, windows, [CORRECTION])
    assert "method: gptq" in str(caught.value.hint)
    auto = WeightDemand(Gptq(), Grid(4, 32, False), weight_bits=5.0)
    with pytest.raises(UnsupportedError, match="method: auto is to keep to"):
        plan(checkpoint, [auto, CORRECTION], {})
