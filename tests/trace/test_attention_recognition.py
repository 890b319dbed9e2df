"""What is read off the probabilities of an attention in primitives: here of one in numpy, with a bias that is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmforge.trace.canonicalize import attention_recognition

HEADS = 2


def attention(slope: float, *, width: int = 16, noise: float = 0.0) -> Any:
    """Make what `_slopes` probes: causal attention of one query, whose scores fall by `slope` a position.

    `noise`: the probability of the query's own position is too large by this share, that of others too small.
    """

    def run(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        distances = np.arange(keys.shape[2])[::-1]
        likely = np.exp(-np.float64(slope) * distances)
        likely *= 1 + np.where(distances == 0, noise, -noise)
        shown = (likely / likely.sum()).astype(np.float32) @ values[0, 0]
        return np.broadcast_to(shown, (1, HEADS, 1, width))

    sizes = {"heads": HEADS, "kv_heads": HEADS, "width": width, "value_width": width}
    return SimpleNamespace(subgraph=SimpleNamespace(**sizes), run=run)


@pytest.mark.parametrize("total", [64, 4096])
@pytest.mark.parametrize("bias", [1e-3, 1.0])
def test_a_small_slope_adds_up_over_many_positions(total: int, bias: float) -> None:
    found = attention_recognition._slopes(attention(bias / total), total, "layer 0")
    assert found is not None
    np.testing.assert_allclose(found, np.full(HEADS, bias / total), rtol=1e-3)


@pytest.mark.parametrize("total", [5, 64, 4096])
@pytest.mark.parametrize("noise", [0.0, 1e-7])
@pytest.mark.parametrize("width", [8, 16])  # the channels bound how far away a key is read
def test_roundings_of_probabilities_are_no_slope(total: int, noise: float, width: int) -> None:
    assert attention_recognition._slopes(attention(0.0, width=width, noise=noise), total, "layer 0") is None


@pytest.mark.parametrize("slope", [2.0**-0.5, 2.0**-3.5, 2.0**-7.5])
@pytest.mark.parametrize("total", [128, 8192])
def test_a_slope_that_is_added_by_absolute_positions_is_read_where_it_is_rounded_least(
    slope: float, total: int
) -> None:
    """Bloom of 112 heads: in fp32 a score of some thousands is off by more than the slope."""
    probed = attention(slope)

    def run(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        scores = np.float32(slope) * np.arange(keys.shape[2], dtype=np.float32)
        likely = np.exp(scores - scores.max())
        return np.broadcast_to(likely / likely.sum() @ values[0, 0], (1, HEADS, 1, 16))

    probed.run = run
    found = attention_recognition._slopes(probed, total, "layer 0")
    np.testing.assert_allclose(found, np.full(HEADS, slope), rtol=3e-6)
