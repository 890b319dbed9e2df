"""Formats that calibration chooses: what they lose, what they take, and that they must beat a uniform one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmforge.base.errors import UsageError
from llmforge.cache import Cache
from llmforge.calibration import Store, calibrate, driver, mixed, pricing, probe
from llmforge.calibration.pricing import LinearMoments, Losses
from llmforge.calibration.skeleton import Skeleton
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization import allocation
from llmforge.quantization.allocation import FormatOption
from llmforge.quantization.grid import Grid, Scale
from llmforge.quantization.grids import dequantize, round_to_nearest
from llmforge.quantization.methods.gptq import Curvature, Gptq, gptq
from llmforge.quantization.statistics import Statistics, WeightDemand

from ..models.checkpoints import write_checkpoint

LIMITED = WeightDemand(Gptq(), Grid(4, 32, False, "int8"), tables=Grid(8, 32, True, "int8"), weight_bits=6.0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Made of matrices whose widths every format divides."""
    write_checkpoint(tmp_path / "model", hidden_size=64, intermediate_size=128)
    return Checkpoint.open(tmp_path / "model")


@pytest.fixture
def windows() -> list[TokenWindow]:
    random = np.random.default_rng(0)
    return [TokenWindow(f"d{i // 2}", random.integers(3, 259, 40)) for i in range(8)]


def taken(checkpoint: Checkpoint, found: Statistics) -> int:
    """Count the bytes of all weights."""
    matrices = found.linears.values()
    quantized = sum(allocation.size_bytes(*matrix.shape, matrix.grid) for matrix in matrices)
    return quantized + 4 * (checkpoint.parameters - sum(matrix.codes.size for matrix in matrices))


@pytest.mark.thorough
@pytest.mark.parametrize(("bits", "scale"), [(5.5, "int8"), (8.0, "int8"), (7.0, "fp16")])
def test_formats_fit_the_bytes_and_what_is_read_together_shares_one(
    bits: float, scale: Scale, checkpoint: Checkpoint, windows: list[TokenWindow]
) -> None:
    grid, tables = Grid(4, 32, False, scale), Grid(8, 32, True, scale)
    found = calibrate(checkpoint, windows, [WeightDemand(Gptq(), grid, tables=tables, weight_bits=bits)])
    assert {grid.portable for grid in found.grids.values()} == {scale == "fp16"}
    assert bits * 0.85 < 8 * taken(checkpoint, found) / checkpoint.parameters <= bits
    assert {name: found.linears[name].grid for name in found.linears} == found.grids
    for layer in range(checkpoint.geometry.layers):
        of = {name: found.grid(f"model.layers.{layer}.{name}_proj.weight") for name in READ_TOGETHER}
        assert of["self_attn.q"] == of["self_attn.k"] == of["self_attn.v"]
        assert of["mlp.gate"] == of["mlp.up"]
    assert len([note for note in found.notes if note.startswith("auto: ")]) == 1


READ_TOGETHER = ["self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up"]


@pytest.mark.thorough
def test_bytes_say_the_same_as_bits(checkpoint: Checkpoint, windows: list[TokenWindow]) -> None:
    size = int(6.0 * checkpoint.parameters / 8)
    one, other = (
        calibrate(checkpoint, windows, [demand])
        for demand in (LIMITED, replace(LIMITED, weight_bits=None, weight_bytes=size))
    )
    assert one.grids == other.grids


@pytest.mark.thorough
def test_a_budget_gets_the_fewest_bytes_that_keep_it(checkpoint: Checkpoint, windows: list[TokenWindow]) -> None:
    sizes, klds = [], []
    for budget in (3e-3, 6e-4):
        chosen = calibrate(checkpoint, windows, [replace(LIMITED, weight_bits=None, weight_loss=budget)])
        [note] = [each for each in chosen.notes if each.startswith("auto: ")]
        sizes.append(taken(checkpoint, chosen))
        klds.append(float(note.partition("a KLD of ")[2].partition(" ")[0]))
        assert "the fewest that keep the budget" in note
        assert klds[-1] <= mixed.AIM * budget, note
    assert sizes[0] < sizes[1]
    assert klds[0] > klds[1]


def test_less_is_allowed_where_a_trial_loses_more_than_predicted(
    checkpoint: Checkpoint, windows: list[TokenWindow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial that loses twice what was predicted of it halves what is allowed of the sum."""
    tried: list[mixed._Formats] = []
    own = mixed._within
    allowed: list[float] = []

    def within(losses: Losses, demand: WeightDemand, others: int, most: float) -> mixed._Formats:
        allowed.append(most)
        tried.append(own(losses, demand, others, most))
        return tried[-1]

    monkeypatch.setattr(mixed, "_within", within)
    monkeypatch.setattr(probe, "divergences", lambda *_: [2 * tried[-1].nearest])
    [note] = calibrate(checkpoint, windows, [replace(LIMITED, weight_bits=None, weight_loss=1e-3)]).notes
    assert allowed[0] == mixed.AIM * 1e-3
    assert len(tried) == 2
    assert allowed[1] == pytest.approx(mixed.AGAIN * allowed[0] / 2)
    assert "the fewest that keep the budget" in note


@pytest.mark.parametrize("better", ["mixed formats", "a uniform format"])
def test_mixed_formats_are_kept_only_where_they_beat_a_uniform_one(
    better: str, checkpoint: Checkpoint, windows: list[TokenWindow], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = [1e-9, 1.0] if better == "mixed formats" else [1.0, 1e-9]
    monkeypatch.setattr(probe, "divergences", lambda *_: measured)
    found = calibrate(checkpoint, windows, [LIMITED])
    linears = {grid for name, grid in found.grids.items() if "_proj" in name}
    assert (len(linears) == 1) == (better == "a uniform format")
    [note] = found.notes
    assert note.startswith(f"auto: {better}, ")
    assert taken(checkpoint, found) <= 6.0 * checkpoint.parameters / 8


def test_a_choice_is_made_once(
    checkpoint: Checkpoint, windows: list[TokenWindow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = calibrate(checkpoint, windows, [LIMITED], store=Store(Cache(tmp_path / "kept")))
    monkeypatch.setattr(mixed, "choose", None)
    again = calibrate(checkpoint, windows, [LIMITED], store=Store(Cache(tmp_path / "kept")))
    assert (again.grids, again.notes) == (one.grids, one.notes)


@pytest.mark.thorough
def test_formats_are_measured_once_for_all_budgets(
    checkpoint: Checkpoint, windows: list[TokenWindow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(LIMITED, weight_bits=7.0)
    plain = calibrate(checkpoint, windows, [other])
    calibrate(checkpoint, windows, [LIMITED], store=Store(Cache(tmp_path / "kept")))
    monkeypatch.setattr(Losses, "measure", None)
    again = calibrate(checkpoint, windows, [other], store=Store(Cache(tmp_path / "kept")))
    assert (again.grids, again.notes) == (plain.grids, plain.notes)


def test_what_cannot_be_chosen_is_refused(checkpoint: Checkpoint, windows: list[TokenWindow]) -> None:
    with pytest.raises(UsageError, match=r"smallest formats|not quantized take"):
        calibrate(checkpoint, windows, [replace(LIMITED, weight_bits=3.0)])


def test_gradients_are_taken_once(
    checkpoint: Checkpoint, windows: list[TokenWindow], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = []
    own = driver.take
    monkeypatch.setattr(driver, "take", lambda *given, **more: (count.append(given), own(*given, **more)))
    calibrate(checkpoint, windows, [LIMITED])
    assert len(count) == 1


def test_a_trellis_is_mixed_in_where_it_is_clearly_cheaper_and_predicted_as_priced() -> None:
    trellis, plain = Grid(5, 32, True, "int8", trellis=True), Grid(6, 64, True, "int8")
    losses = Losses((trellis, plain), ())
    for name, priced in (("near", 0.9), ("far", 0.7)):
        losses.choices[(name,)] = {trellis: FormatOption(8, priced), plain: FormatOption(8, 1.0)}
    best, uniform = mixed._candidates(losses, LIMITED, 16, 0)
    assert dict(best.mixed) == {"near": plain, "far": trellis}
    assert best.loss == pytest.approx(1.7)
    assert uniform is not None
    assert uniform.loss == pytest.approx(1.6)


def test_a_document_is_measured_or_held_out() -> None:
    windows = [TokenWindow(f"d{i % 9}", np.arange(3 + i)) for i in range(40)]
    fitted, held = mixed.divide(windows)
    assert {window.document for window in held} == {"d3", "d7"}
    assert len(fitted) + len(held) == 40
    assert not {window.document for window in fitted} & {"d3", "d7"}
    fitted, held = mixed.divide([TokenWindow("one", np.arange(5)) for _ in range(3)])
    assert (len(fitted), len(held)) == (2, 1)


def moments_of(x: np.ndarray, g: np.ndarray) -> LinearMoments:
    squares = np.square(g).sum(1, keepdims=True)
    weighted = (x * squares).T @ x / squares.sum()
    return LinearMoments(x.T @ x / np.float32(len(x)), weighted, g.T @ g / np.float32(len(g)))


def left_given_those_before(outputs: np.ndarray) -> np.ndarray:
    """Return the variance that each output's gradient has given those before it, pairs counted half."""
    damped = outputs.astype(np.float64) / 2
    damped[np.diag_indices(len(outputs))] = outputs.diagonal() + 1e-3 * outputs.diagonal().mean()
    left = [damped[i, i] - damped[i, :i] @ np.linalg.solve(damped[:i, :i], damped[:i, i]) for i in range(len(outputs))]
    return np.array(left)


@pytest.mark.parametrize("rows", [80, 24])
def test_losses_are_those_of_the_errors_that_rounding_leaves(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pricing, "ROWS", rows)
    random = np.random.default_rng(0)
    weights = [random.standard_normal((n, 64)).astype(np.float32) for n in (32, 48)]
    x = random.standard_normal((200, 64)).astype(np.float32) * np.linspace(0.1, 2, 64, dtype=np.float32)
    moments = []
    for n in (32, 48):
        sizes = random.lognormal(0, 1, (200, 1)) * random.lognormal(0, 1, n)
        moments.append(moments_of(x, (random.standard_normal((200, n)) * sizes).astype(np.float32)))
    grids = [Grid(3, 32, False, "int8"), Grid(5, 32, False, "int8"), Grid(4, 128, False, "int8")]
    losses = Losses(grids, ())
    losses.measure(["a", "b"], weights, moments, damping=0.01)
    choices = losses.choices["a", "b"]
    assert list(choices) == grids[:2]  # 128 does not divide 64
    inputs = moments[0].inputs
    assert inputs is not None
    for grid, choice in choices.items():
        whole = np.concatenate(weights)
        by_method = gptq(whole, Curvature.of(inputs, 0.01), grid)
        nearest = round_to_nearest(whole, grid)
        for matrix, found, weigh in (
            (by_method, choice.loss, left_given_those_before),
            (nearest, choice.nearest, np.diagonal),
        ):
            errors = np.split(whole - dequantize(matrix), [32])
            expected = sum(
                0.5 * np.trace(np.diag(weigh(each.outputs)) @ e @ each.weighted @ e.T)
                for e, each in zip(errors, moments, strict=True)
            )
            assert found == pytest.approx(float(expected), rel=1e-3 if rows == 80 else 0.25)
        assert choice.loss < choice.nearest
    assert choices[grids[1]].loss < 0.3 * choices[grids[0]].loss


def test_outputs_that_hang_together_cost_less() -> None:
    random = np.random.default_rng(0)
    weight, x = (
        random.standard_normal((32, 64)).astype(np.float32),
        random.standard_normal((200, 64)).astype(np.float32),
    )
    alone = random.standard_normal((200, 32)).astype(np.float32)
    together = (alone + 3 * random.standard_normal((200, 1))).astype(np.float32)
    together *= np.sqrt(np.square(alone).mean(0) / np.square(together).mean(0))
    prices = []
    for g in (alone, together):
        moments = replace(moments_of(x, g), weighted=x.T @ x / np.float32(200))
        losses = Losses([Grid(4, 32, False, "int8")], ())
        losses.measure(["w"], [weight], [moments], damping=0.01)
        prices.append(next(iter(losses.choices["w",].values())))
    assert prices[1].nearest == pytest.approx(prices[0].nearest, rel=1e-3)
    assert 0.5 < prices[1].loss / prices[0].loss < 0.75


def test_a_token_that_gradients_do_not_need_prices_nothing() -> None:
    random = np.random.default_rng(0)
    weight = random.standard_normal((32, 64)).astype(np.float32)
    x, g = random.standard_normal((200, 64)).astype(np.float32), random.standard_normal((200, 32)).astype(np.float32)
    losses = []
    for size in (1.0, 100.0):
        x[0], g[0] = x[0] * size, 0
        priced = Losses([Grid(4, 32, False, "int8")], ())
        priced.measure(["w"], [weight], [moments_of(x, g)], damping=0.01)
        losses.append(next(iter(priced.choices["w",].values())).nearest)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_the_divergence_is_that_of_the_whole_model(checkpoint: Checkpoint, windows: list[TokenWindow]) -> None:
    grid = Grid(4, 32, True)
    model, rounded = (AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32) for _ in range(2))
    matrices = {
        name: round_to_nearest(checkpoint.tensor(name).numpy().astype(np.float32), grid)
        for name in checkpoint.tensors
        if "_proj" in name or "embed" in name or "lm_head" in name
    }
    with torch.no_grad():
        for name, matrix in matrices.items():
            rounded.get_parameter(name).copy_(torch.from_numpy(dequantize(matrix)))
        logs = [
            [each(torch.from_numpy(w.ids)[None]).logits[0].log_softmax(-1) for w in windows]
            for each in (model, rounded)
        ]
        expected = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(*logs, strict=True)]).mean()
        assert mixed.divergence(Skeleton.build(checkpoint), windows, matrices) == pytest.approx(
            float(expected), rel=1e-3
        )
