"""Structured pruning in numbers: costs are those of the loss, what is left makes up best, the least goes first."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from llmforge.quantization import structure
from llmforge.quantization.structure import Float32, Float64, PrunedStructure, PruningStep

N, K = 12, 24


def drawn(seed: int = 0) -> tuple[Float32, Float64, Float32, Float32]:
    """A weight [N, K], moments [K, K], moments of gradients [N, N], and the inputs [tokens, K]."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((300, K)) @ random.standard_normal((K, K)) * np.geomspace(0.2, 3, K)
    g = random.standard_normal((200, N)) * np.geomspace(0.3, 2, N)
    weight = random.standard_normal((N, K)).astype(np.float32)
    return weight, x.T @ x / len(x), (g.T @ g / len(g)).astype(np.float32), x.astype(np.float32)


def test_what_is_left_is_the_least_squares_fit() -> None:
    weight, hessian, _, x = drawn()
    kept = np.array([0, 3, 4, 9, 17, 20, 23])
    made = structure.compensate(weight, hessian, kept)
    fitted = np.linalg.lstsq(x[:, kept], x @ weight.T, rcond=None)[0].T
    np.testing.assert_allclose(made, fitted, atol=1e-3)
    random, best = np.random.default_rng(1), np.square(x @ weight.T - x[:, kept] @ made.T).sum()
    for _ in range(20):
        other = made + 0.01 * random.standard_normal(made.shape)
        assert np.square(x @ weight.T - x[:, kept] @ other.T).sum() > best
    assert np.square(x @ weight.T - x[:, kept] @ weight[:, kept].T).sum() > 1.3 * best


@pytest.mark.parametrize(("width", "together"), [(1, 1), (1, 4), (4, 1)])
def test_steps_cost_what_the_best_update_leaves(width: int, together: int) -> None:
    """Added up, the losses are ½ tr(O E H Eᵀ) of the fit to what is left, to the last step."""
    weight, hessian, outputs, _ = drawn()
    steps = structure.eliminate(weight, hessian, outputs, width=width, together=together, least=1)
    units, gone, loss = K // width, set[int](), 0.0
    assert units - sum(len(step.units) for step in steps) <= together
    for step in steps:
        assert len(step.units) == together
        gone |= set(step.units)
        loss += step.loss
        left = structure.columns([unit for unit in range(units) if unit not in gone], width)
        error = weight.astype(np.float64)
        error[:, left] -= structure.compensate(weight, hessian, left)
        assert loss == pytest.approx(0.5 * np.trace(outputs @ error @ hessian @ error.T), rel=1e-4)


def test_the_first_unit_is_the_cheapest_of_all() -> None:
    weight, hessian, outputs, _ = drawn()
    for width in (1, 4):
        first = structure.eliminate(weight, hessian, outputs, width=width, together=1, least=K // width - 1)
        costs = []
        for unit in range(K // width):
            left = structure.columns([other for other in range(K // width) if other != unit], width)
            error = weight.astype(np.float64)
            error[:, left] -= structure.compensate(weight, hessian, left)
            costs.append(0.5 * np.trace(outputs @ error @ hessian @ error.T))
        assert first[0].units == (int(np.argmin(costs)),)
        assert first[0].loss == pytest.approx(min(costs), rel=1e-4)


def test_the_budget_goes_to_whom_it_costs_least() -> None:
    curves = {
        (0, "heads"): [PruningStep((0,), 0.1), PruningStep((1,), 0.5)],
        (0, "channels"): [PruningStep((0, 1), 0.02), PruningStep((2, 3), 0.04), PruningStep((4, 5), 0.9)],
        (1, "channels"): [PruningStep((0, 1), 0.03), PruningStep((2, 3), 0.2)],
    }
    sizes = {(0, "heads"): 10, (0, "channels"): 5, (1, "channels"): 5}
    for target in range(1, 70, 7):
        taken, loss, gone = structure.allocate(curves, sizes, target)
        assert gone >= min(target, 70)
        ways = itertools.product(*(range(len(steps) + 1) for steps in curves.values()))
        best = min(
            sum(step.loss for count, steps in zip(way, curves.values(), strict=True) for step in steps[:count])
            for way in ways
            if sum(
                len(step.units) * size
                for count, steps, size in zip(way, curves.values(), sizes.values(), strict=True)
                for step in steps[:count]
            )
            >= gone
        )
        assert loss == pytest.approx(best)
        assert sum(taken.values()) > 0
    assert structure.allocate(curves, sizes, 1000)[2] == 70  # all there is


def test_moments_are_damped_until_they_can_be_factored() -> None:
    flat = np.ones((4, 4), np.float32)
    made = structure.damped(flat, 0.01)
    np.testing.assert_allclose(made, flat + 0.01 * np.eye(4))
    for wrong in (np.zeros((4, 4), np.float32), np.full((4, 4), np.nan, np.float32)):
        with pytest.raises(ValueError, match="finite and positive"):
            structure.damped(wrong, 0.01)


def test_what_is_left_is_found_by_layer() -> None:
    kept = PrunedStructure((3,), ((1, (0, 2)),), ((0, (5,)),))
    assert (kept.of_heads(1), kept.of_heads(0), kept.of_channels(0)) == ((0, 2), None, (5,))
