"""How fast one core computes now, by a probe of a fifth of a second: predictions of CPU time are scaled by it.

Machines of one model name differ twofold: by clock, by what other guests of a host take of its caches, by the year. The
probe needs numpy alone and runs on the calling thread, in whose CPU time it counts: other processes wait, but hardly
slow it down. The best of many short rounds counts, which is what repeats from one call to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

ROUNDS_S = 0.08  # of each rate, in CPU time
# OpenBLAS takes further threads from 64³ multiplications on: a product of so few rows is computed by its caller.
_ROWS, _PRODUCTS = 48, 64
_STEPS = 10_000


@dataclass(frozen=True)
class MachineRates:
    """What one core does in a second of its time.

    `products`: operations in fp32 products of matrices, which keep its vector units busy. `python`: steps of a loop of
    the interpreter, as reading and rewriting a graph takes.
    """

    products: float
    python: float


@cache
def measure() -> MachineRates:
    """Measure this machine, once in a process."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((_PRODUCTS, _ROWS, _ROWS), np.float32) for _ in range(2))
    made = np.empty_like(a)
    multiplied = _best_s(lambda: np.matmul(a, b, out=made))
    return MachineRates(2 * _PRODUCTS * _ROWS**3 / multiplied, _STEPS / _best_s(_count))


def _count() -> dict[int, int]:
    """Count steps in a small dictionary."""
    counts: dict[int, int] = {}
    for step in range(_STEPS):
        counts[step % 64] = counts.get(step % 64, 0) + 1
    return counts


def _best_s(call: Callable[[], object]) -> float:
    """Return the least CPU time of a call, s, over rounds that take `ROUNDS_S` together."""
    best, end = float("inf"), time.thread_time() + ROUNDS_S
    while (began := time.thread_time()) < end:
        call()
        best = min(best, time.thread_time() - began)
    return best
