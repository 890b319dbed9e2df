"""Made-up logits, and what one token after another says of them, in Python floats."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

V = 50


def naive(reference: NDArray[np.float32], logits: NDArray[np.float32], targets: NDArray[np.int64]):
    """Score token by token with Python floats: (reference NLL, NLL, KLD, same top, Δp) of each row."""
    rows = []
    for p_row, q_row, target in zip(reference.tolist(), logits.tolist(), targets.tolist(), strict=True):
        p_norm = math.log(math.fsum(math.exp(x) for x in p_row))
        q_norm = math.log(math.fsum(math.exp(x) for x in q_row))
        kld = math.fsum(math.exp(p - p_norm) * ((p - p_norm) - (q - q_norm)) for p, q in zip(p_row, q_row, strict=True))
        same = p_row.index(max(p_row)) == q_row.index(max(q_row))
        p_true, q_true = p_row[target] - p_norm, q_row[target] - q_norm
        rows.append((-p_true, -q_true, kld, same, math.exp(q_true) - math.exp(p_true)))
    return [np.array(column) for column in zip(*rows, strict=True)]


def random_logits(seed: int, rows: int, scale: float = 3.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, scale, (rows, V)).astype(np.float32)
