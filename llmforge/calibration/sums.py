"""Sums over the calibration tokens of what a linear layer, or an expert, reads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from llmforge.quantization.methods.base import InputStatistic, LayerInputs


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
        """Count inputs x and what was lost of them, x̃ - x, each [tokens, K]."""
        with_x = {InputStatistic.MOMENTS: x, InputStatistic.DRIFT: lost}
        for statistic, total in self.totals.items():
            total.addmm_(with_x[statistic].T, x)
        self.tokens += len(x)

    def seen(self, *, routed: bool) -> LayerInputs:
        """Hand over what was counted."""
        return LayerInputs(self.tokens, routed, {key: total.numpy() for key, total in self.totals.items()})
