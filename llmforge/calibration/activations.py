"""Measure what the linears of a layer read: the largest magnitude of each feature, and factors that smooth it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from llmforge.calibration.layer import DecoderLayer
from llmforge.quantization import smoothing
from llmforge.quantization.grids import Float32
from llmforge.quantization.statistics import InputRange, InputRangeDemand, Smoothed, Smoothing


def measure(layer: DecoderLayer, states: Sequence[torch.Tensor], demand: InputRangeDemand) -> dict[str, InputRange]:
    """Return the ranges of what each linear of `layer` reads, by parameter; `states` stay in front of it.

    Linears that read one tensor have one range, and one choice of factors.
    """
    experts = layer.experts()
    groups = [[name for name in group if name not in experts] for group in layer.groups(states[0])]
    groups = [group for group in groups if group]
    first = [group[0] for group in groups]
    peaks: dict[str, torch.Tensor] = {}
    some: dict[str, list[torch.Tensor]] = {name: [] for name in first}
    stride = -(-sum(state.shape[1] for state in states) // smoothing.TOKENS)
    seen = 0
    for window, state in enumerate(states):
        for name, x in layer.run_with_inputs(first, window, state)[1].items():
            highest = x.abs().amax(0)
            peaks[name] = torch.maximum(peaks[name], highest) if name in peaks else highest
            if demand.smoothing is not None:
                some[name].append(x[-seen % stride :: stride].clone())  # every stride-th token of all windows
        seen += state.shape[1]
    found: dict[str, InputRange] = {}
    for group in groups:
        largest: Float32 = peaks[group[0]].numpy()
        smoothed = None
        if demand.smoothing is not None:
            weights, tokens = [layer.weight(name) for name in group], torch.cat(some[group[0]]).numpy()
            smoothed = _chosen(tokens, largest, weights, demand.smoothing)
        found |= dict.fromkeys(group, InputRange(largest, smoothed))
    return found


def _chosen(x: Float32, peaks: Float32, weights: Sequence[Float32], wanted: Smoothing) -> Smoothed | None:
    """Choose factors; None where numbers are not finite, which the pass that rounds them says."""
    return smoothing.choose(x, peaks, weights, wanted) if np.isfinite(peaks).all() else None
