"""Smooth activations: divide features with outliers by a factor, and multiply by it the weights that read them.

    y = x·W = (x / s)·(diag(s)·W),   s_j = max|x_j|^α / max|W_j|^(1 - α)

(Xiao et al. 2022, "SmoothQuant", arXiv 2211.10438, equation 4.) Factors are the nearest powers of two in ratio, so that
no mantissa changes and products keep their bits; each is off from the formula by √2 at most. Exponents have a mean near
0: only ratios of factors matter.

x is [tokens, K], weights are [N, K], peaks max|x_j| and max|W_j| are [K], exponents int8 [K].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmforge.quantization import channels
from llmforge.quantization.grids import Float32
from llmforge.quantization.statistics import Smoothed, Smoothing, factors

ALPHAS = tuple(step / 20 for step in range(4, 21))  # that are tried: .2, .25, … 1
LARGEST_EXPONENT = 24  # factors beyond 2**24 would spoil numbers in half precision
TOKENS, OUTPUTS = 128, 256  # on so many a choice is made, spread evenly


def exponents(inputs: Float32, weights: Float32, alpha: float) -> NDArray[np.int8]:
    """Choose factors for peaks of inputs and weights, [K]; a feature that is 0 in either stays as it is."""
    used = (inputs > 0) & (weights > 0)
    logs = np.zeros(len(inputs))
    logs[used] = alpha * np.log2(inputs[used]) - (1 - alpha) * np.log2(weights[used])
    if used.any():
        logs[used] -= np.rint(logs[used].mean())
    return np.clip(np.rint(logs), -LARGEST_EXPONENT, LARGEST_EXPONENT).astype(np.int8)


def choose(x: Float32, peaks: Float32, weights: Sequence[Float32], wanted: Smoothing) -> Smoothed:
    """Choose factors for linears `weights`, each [N, K], that all read `x`, some tokens of text on which `peaks` hold.

    With `wanted.alpha`, by that; else those of the least loss on up to `OUTPUTS` evenly spaced outputs, or none.
    """
    largest = np.max([np.abs(weight).max(0, initial=0) for weight in weights], axis=0).astype(np.float32)
    stacked = np.concatenate(weights)
    rows = np.unique(np.linspace(0, len(stacked) - 1, OUTPUTS).astype(np.int64))
    some, exact = stacked[rows], x @ stacked[rows].T
    plain = np.zeros(len(peaks), np.int8)
    before = _loss(x, some, exact, peaks, plain, wanted)
    alphas = ALPHAS if wanted.alpha is None else (wanted.alpha,)
    tried = [Smoothed(plain, None, before, before)] if wanted.alpha is None else []
    for alpha in alphas:
        own = exponents(peaks, largest, alpha)
        tried.append(Smoothed(own, alpha, before, _loss(x, some, exact, peaks, own, wanted)))
    return min(tried, key=lambda each: each.loss)


def _loss(
    x: Float32, weight: Float32, exact: Float32, peaks: Float32, own: NDArray[np.int8], wanted: Smoothing
) -> float:
    """Return what rounding of smoothed inputs and weights costs, Σ |ŷ - y|² / |y|² of a token, on average."""
    by = factors(own)
    smooth, heavy = x / by, weight * by
    tops = np.abs(smooth).max(1, keepdims=True, initial=0) if wanted.per_token else (peaks / by).max(initial=0)
    read = _rounded(smooth, np.asarray(tops), wanted)
    made = read @ _rounded(heavy, np.abs(heavy).max(1, keepdims=True, initial=0), wanted).T
    sizes = np.square(exact).sum(1)
    told = sizes > 0
    return float((np.square(made - exact).sum(1)[told] / sizes[told]).mean()) if told.any() else 0.0


def _rounded(numbers: Float32, tops: Float32, wanted: Smoothing) -> Float32:
    """Round `numbers` to codes of which the largest stands for `tops`, and back."""
    dtype = channels.DTYPES[wanted.dtype]
    steps = (np.where(tops > 0, tops, 1) / channels.LARGEST[dtype]).astype(np.float32)
    values: Float32 = channels.codes(numbers, steps, dtype).astype(np.float32) * steps
    return values
