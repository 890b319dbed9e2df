"""Quantize the embedding and the head: how often a token is read and written counts for its row, and how both do.

An error e of a row changes the loss by ½ eᵀHe: as a row of the head through its logit, H = Σ s·h hᵀ, s = Σ p(1 - p); as
a row of the embedding through all layers, H = Σ g gᵀ with g the gradient in the embedded token. How often a token is
right, and how often it is read, are alike, so that all rows of a tied table share the sum of both.
"""

from __future__ import annotations

import numpy as np

from llmforge.calibration.gradients import Gradients
from llmforge.calibration.losses import Losses
from llmforge.calibration.skeleton import Skeleton
from llmforge.quantization.exclusion import exclusion
from llmforge.quantization.grids import Float32, QuantizedMatrix
from llmforge.quantization.methods import PLAIN
from llmforge.quantization.methods.base import InputStatistic, LayerInputs
from llmforge.quantization.statistics import WeightDemand


def quantize_tables(
    skeleton: Skeleton,
    gradients: Gradients | None,
    demand: WeightDemand,
    threads: int,
    notes: list[str],
    losses: Losses | None = None,
) -> dict[str, QuantizedMatrix]:
    """Quantize embedding and head, by parameter.

    A table of which no gradients are known is rounded to nearest, and `notes` say so; one whose width no block divides
    is left alone. What each format of `losses` would lose is put there.
    """
    embedding, head = skeleton.tables()
    if demand.tables is None:
        return {}
    moments: dict[str, list[Float32 | None]] = {}
    for name, moment in ((embedding, gradients and gradients.embedding), (head, gradients and gradients.head)):
        if name and not exclusion([name], demand.exclude):
            moments.setdefault(name, []).append(moment if isinstance(moment, np.ndarray) else None)
    matrices = {}
    for name, parts in moments.items():
        table = skeleton.table(name)
        grid = demand.tables.dividing(table.shape[1])
        if grid is None:
            continue
        known = [part for part in parts if part is not None]
        if gradients is None or len(known) < len(parts):
            matrices[name] = PLAIN().quantize(table, grid)
            notes.append(f"{name}: rounded to nearest: it has no gradients for method {demand.method.name}")
            continue
        hessian: Float32 = np.stack(known).sum(0)
        seen = LayerInputs(gradients.tokens, False, {InputStatistic.MOMENTS: hessian}, threads=threads)
        whole = table.astype(np.float32)
        matrices[name] = demand.method.quantize(whole, grid, seen)
        if losses is not None:
            losses.measure_table(name, whole, demand.method, seen)
    return matrices
