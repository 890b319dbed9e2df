"""Training the scales of quantized linears: what it lowers, when it ends, what stays, and that it is found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmforge.base.errors import UnsupportedError
from llmforge.base.progress import Silent
from llmforge.cache import Cache
from llmforge.calibration import Store, calibrate, layer, recovery
from llmforge.calibration.recovery import ScaleFactors, batches, multiplied, of_factors
from llmforge.calibration.skeleton import Skeleton
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow, held_out
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import Float32, QuantizedMatrix, dequantize, round_to_nearest, split
from llmforge.quantization.methods import gptq
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import (
    PruningDemand,
    RecoveryDemand,
    Statistics,
    WeightDemand,
)

WEIGHTS = WeightDemand(Gptq(), Grid(3, 32, False, "int8"), exclude=("*.0.self_attn.k_proj*",))
DEMAND = RecoveryDemand(2000, 0.02, ("*.1.mlp.down_proj*",))


@pytest.fixture
def windows() -> list[TokenWindow]:
    random = np.random.default_rng(0)
    return [TokenWindow(f"d{i}", random.integers(3, 259, length)) for i, length in enumerate((48, 33, 48) * 3)]


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "BATCH_TOKENS", 64)
    monkeypatch.setattr(recovery, "RATE", 3e-3)


class Steps(Silent):
    """Counts the steps of training, and ends the process before one of them."""

    def __init__(self, last: int | None = None) -> None:
        self.taken, self.training, self.last = 0, False, last

    def stage(self, title: str) -> None:
        self.training = title == "Recover"

    def advance(self, done: int, total: int) -> None:
        if self.training and done < total:
            if done == self.last:
                raise KeyboardInterrupt
            self.taken += 1


def test_trained_scales_lower_the_loss_of_text_held_out(
    tiny_checkpoint: Path, windows: list[TokenWindow], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = gptq.gptq

    def off(weight: Float32, *args: Any, **options: Any) -> QuantizedMatrix:
        """Choose codes, and scales that are 40 % too large: those of so few tokens leave next to nothing to train."""
        matrix = chosen(weight, *args, **options)
        return multiplied(matrix, np.full_like(matrix.scales, 0.4))

    monkeypatch.setattr(gptq, "gptq", off)
    found = calibrate(Checkpoint.open(tiny_checkpoint), windows, [WEIGHTS, DEMAND])
    assert set(found.linears) - set(found.recovered) == {"model.layers.1.mlp.down_proj.weight"}
    for name, matrix in found.recovered.items():
        np.testing.assert_array_equal(matrix.codes, found.linears[name].codes)
        assert (matrix.scales != found.linears[name].scales).mean() > 0.5
        split(matrix.scales, matrix.grid)  # refuses scales that int8 does not store
    [note] = found.notes
    before, after = (float(part.split()[0]) for part in note.split("held out ")[1].split(" before, "))
    assert after < 0.98 * before


def test_scales_stay_where_training_does_not_pay(tiny_checkpoint: Path, windows: list[TokenWindow]) -> None:
    found = calibrate(Checkpoint.open(tiny_checkpoint), windows, [WEIGHTS, RecoveryDemand(500, 0.9)])
    assert not found.recovered
    assert "scales stay as they are: training takes the KLD on 33 tokens held out from" in found.notes[-1]
    assert found.notes[-1].endswith("less than 90%")


def test_training_ends_where_the_loss_of_text_held_out_rises(
    tiny_checkpoint: Path, windows: list[TokenWindow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "RATE", 1.0)
    steps = Steps()
    found = calibrate(Checkpoint.open(tiny_checkpoint), windows, [WEIGHTS, DEMAND], progress=steps)
    whole = len(batches([len(window.ids) for window in windows[:7] + windows[8:]], DEMAND.tokens))
    assert steps.taken == recovery.PATIENCE * -(-whole // recovery.CHECKS)
    assert not found.recovered


def test_what_was_trained_is_found_again_and_a_killed_training_goes_on(
    tiny_checkpoint: Path, windows: list[TokenWindow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "PATIENCE", recovery.CHECKS)
    checkpoint, demands = Checkpoint.open(tiny_checkpoint), [WEIGHTS, DEMAND]
    whole_steps = Steps()
    whole = calibrate(checkpoint, windows, demands, progress=whole_steps)
    store = Store(Cache(tmp_path / "kept", 1 << 30))
    killed, further, again = Steps(last=8), Steps(), Steps()
    with pytest.raises(KeyboardInterrupt):
        calibrate(checkpoint, windows, demands, store=store, progress=killed)
    for steps in (further, again):
        found = calibrate(checkpoint, windows, demands, store=store, progress=steps)
        assert found.notes == whole.notes
        assert set(found.recovered) == set(whole.recovered)
        for name, matrix in found.recovered.items():
            np.testing.assert_array_equal(matrix.scales, whole.recovered[name].scales)
    assert 0 < further.taken < whole_steps.taken
    assert again.taken == 0


def test_gradients_are_those_of_the_loss(
    tiny_checkpoint: Path, windows: list[TokenWindow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held against differences of the KLD itself."""
    monkeypatch.setattr(layer, "has_bf16", lambda: False)
    checkpoint, ids = Checkpoint.open(tiny_checkpoint), [window.ids for window in windows[:2]]
    skeleton = Skeleton.build(checkpoint)
    names = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.v_proj.weight"]
    linears = {name: round_to_nearest(checkpoint.tensor(name).numpy(), Grid(3, 32, False)) for name in names}
    with torch.no_grad():
        student = recovery._Student(skeleton, Statistics(1, 1, linears, {}), ids, RecoveryDemand(1, 0.0))
        seen: list[Float32] = []
        monkeypatch.setattr(ScaleFactors, "step", lambda self, gradient, *_: seen.append(gradient))
        student.step([0, 1], 0.0, 1)
        for name, gradient in zip(reversed(names), seen, strict=True):
            moved = student.factors[name].shift
            step = np.float32(0.05) * np.sign(gradient)
            moved += step
            above = student.kld([0, 1])
            moved -= 2 * step
            below = student.kld([0, 1])
            moved += step
            assert (above - below) / 0.1 == pytest.approx(float(np.abs(gradient).sum()), rel=0.03)


def test_a_short_last_block_counts_what_it_has() -> None:
    random = np.random.default_rng(0)
    weight, gradient = (random.standard_normal((4, 40)).astype(np.float32) for _ in range(2))
    matrix = round_to_nearest(weight, Grid(4, 32, False))

    products = gradient * dequantize(matrix)
    wanted = np.stack([products[:, :32].sum(1), products[:, 32:].sum(1)], 1)
    np.testing.assert_allclose(of_factors(matrix, gradient), wanted, rtol=1e-5, atol=1e-6)


def test_every_window_is_read_as_often_as_others() -> None:
    made = batches([50, 30, 20], 300)
    read = [window for batch in made for window in batch]
    assert sorted(read[:3]) == [0, 1, 2]
    assert sorted(read[:9]) == sorted([0, 1, 2] * 3)
    assert all(sum([50, 30, 20][window] for window in batch) >= 64 for batch in made[:-1])
    assert made == batches([50, 30, 20], 300)


def test_whole_documents_are_held_out_where_there_are_several() -> None:
    assert held_out([name for name in "abcdefghij" for _ in range(2)], recovery.HELD_OUT) == [14, 15]  # the eighth
    assert held_out(["a", "b", "b"], recovery.HELD_OUT) == [1, 2]
    assert held_out(["a"] * 9, recovery.HELD_OUT) == [7]
    assert held_out(["a"], recovery.HELD_OUT) == [0]


def test_contradictions_are_refused(tiny_checkpoint: Path, windows: list[TokenWindow]) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    with pytest.raises(UnsupportedError, match="trains those of weights that quantize-weights chose"):
        calibrate(checkpoint, windows, [DEMAND])
    with pytest.raises(UnsupportedError, match="two passes train the same scales"):
        calibrate(checkpoint, windows, [WEIGHTS, DEMAND, RecoveryDemand(1, 0.0)])
    pruning = PruningDemand(("heads",), 0.1, None, 32, 0.01)
    with pytest.raises(UnsupportedError, match="trains against the whole checkpoint"):
        calibrate(checkpoint, windows, [WEIGHTS, DEMAND, pruning])
