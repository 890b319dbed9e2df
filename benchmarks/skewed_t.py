"""Simulate the t statistic of lognormal samples, for bounds over documents: `python -m benchmarks.skewed_t`.

Writes llmforge/metrics/skewed_t.json (four minutes on one core). For each number of documents and each shape σ of the
population (exp(σ·normal); 0 is the normal one): quantiles of (mean - true mean) / standard error, and the quantile
`POSSIBLE` of the samples' L-skewness. The normal statistic is Student's t, exactly.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from scipy import stats

from llmforge.metrics import skewed_t
from llmforge.metrics.skewed_t import POSSIBLE, Floats

DOCUMENTS = (4, 5, 6, 7, 8, 9, 10, 12, 14, 17, 20, 25, 32, 40, 50, 64, 80, 100, 150, 200, 300, 500, 1000)
SHAPES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.7, 2.0)
LEVELS = (1e-4, 3e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5)
DRAWS, MOST, CHUNK = 40_000_000, 500_000, 2_000_000  # values of a cell, samples of it, values at once


def main() -> None:
    """Simulate, and write the table."""
    rng = np.random.default_rng(20261123)
    possible, quantiles = [], []
    for documents in DOCUMENTS:
        cells = [_cell(rng, documents, shape) for shape in SHAPES]
        possible.append([float(f"{low:.4g}") for low, _ in cells])
        student = stats.t.ppf(LEVELS, documents - 1)
        quantiles.append([[float(f"{q:.4g}") for q in each] for each in [student, *(row for _, row in cells[1:])]])
        print(documents, quantiles[-1][-1], flush=True)
    table = {"documents": DOCUMENTS, "shapes": SHAPES, "levels": LEVELS, "possible": possible, "quantiles": quantiles}
    text = json.dumps(table, separators=(",", ":")).replace("]],[[", "]],\n[[").replace('],"', '],\n"')
    Path(skewed_t.__file__).with_suffix(".json").write_text(text + "\n", encoding="ascii")


def _cell(rng: np.random.Generator, documents: int, shape: float) -> tuple[float, Floats]:
    count, statistics, skewness = min(MOST, DRAWS // documents), [], []
    step = CHUNK // documents
    for low in range(0, count, step):
        drawn = rng.standard_normal((min(step, count - low), documents))
        drawn, mean = (np.exp(shape * drawn), np.exp(shape**2 / 2)) if shape else (drawn, 0.0)
        error = drawn.std(1, ddof=1) / np.sqrt(documents)
        statistics.append((drawn.mean(1) - mean) / error)
        skewness.append(skewed_t.l_skewness(drawn))
    return float(np.quantile(np.concatenate(skewness), POSSIBLE)), np.quantile(np.concatenate(statistics), LEVELS)


if __name__ == "__main__":
    main()
