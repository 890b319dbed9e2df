"""Sums over the calibration tokens of what a linear layer, or an expert, reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmforge.quantization.methods.base import InputStatistic, LayerInputs

# Σ aᵀ b over inputs x [tokens, K] and what was lost of them, x̃ - x: each statistic's a and b.
_FACTORS: Mapping[InputStatistic, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    InputStatistic.MOMENTS: lambda x, lost: (x, x),
    InputStatistic.DRIFT: lambda x, lost: (lost, x),
}


@dataclass(eq=False)
class InputSums:
    """Those statistics of a layer's inputs that a method demands, fp32 [K, K] each."""

    totals: dict[InputStatistic, Tensor]
    tokens: int = 0

    @classmethod
    def start(cls, demands: Collection[InputStatistic], width: int) -> InputSums:
        """Begin with no token; inputs have `width` features."""
        return cls({statistic: torch.zeros(width, width) for statistic in demands})

    def add(self, x: Tensor, lost: Tensor) -> None:
        """Count inputs x and x̃ - x, each [tokens, K]."""
        for statistic, total in self.totals.items():
            a, b = _FACTORS[statistic](x, lost)
            total.addmm_(a.T, b)
        self.tokens += len(x)

    def seen(self, *, routed: bool) -> LayerInputs:
        """Hand over what was counted."""
        return LayerInputs(self.tokens, routed, {key: total.numpy() for key, total in self.totals.items()})
