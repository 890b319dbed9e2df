"""Sums over the calibration tokens of what a linear layer, or an expert, reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from llmforge.base.errors import DataError
from llmforge.quantization.grids import Float32
from llmforge.quantization.methods.base import BY_CHANNEL, InputStatistic, LayerInputs
from llmforge.quantization.rounding import products

PANELS = 8  # of Σ x xᵀ, of which those above the diagonal are not computed: 9/16 of it are
MORE_DAMPING = "or more `damping`"  # what helps where moments cannot be factored
SMALLEST_PANEL = 128  # columns: narrower products are slow


@dataclass(eq=False)
class InputSums:
    """Those statistics of a layer's inputs that a method demands, fp32."""

    totals: dict[InputStatistic, Tensor]
    tokens: int = 0

    @classmethod
    def start(
        cls,
        demands: Collection[InputStatistic],
        width: int,
        outputs: int | None = None,
        device: torch.device | None = None,
    ) -> InputSums:
        """Begin with no token, on `device`, by default the CPU; inputs have `width` features.

        What is added to has `outputs`; None: nothing is.
        """
        rows = dict.fromkeys(demands, width)
        if InputStatistic.RESIDUAL in rows:
            del rows[InputStatistic.RESIDUAL]
            if outputs is not None:
                rows[InputStatistic.RESIDUAL] = outputs
        shapes = {each: (width,) if each in BY_CHANNEL else (count, width) for each, count in rows.items()}
        return cls({statistic: torch.zeros(shape, device=device) for statistic, shape in shapes.items()})

    def add(self, x: Tensor, lost: Tensor, residual: Tensor | None = None) -> None:
        """Count inputs x and what was lost of them, x̃ - x, each [tokens, K], and of the residual, r̃ - r [tokens, N]."""
        with_x = {InputStatistic.MOMENTS: x, InputStatistic.DRIFT: lost, InputStatistic.RESIDUAL: residual}
        for statistic, total in self.totals.items():
            if statistic in BY_CHANNEL:
                original = x + lost
                total += (original if statistic is InputStatistic.SUMS else original.square()).sum(0)
                continue
            other = with_x[statistic]
            assert other is not None
            if other is x:
                add_moments(total, x)
            else:
                _add(total, other, x)
        self.tokens += len(x)

    def merge(self, other: InputSums) -> None:
        """Count what `other` has counted, too."""
        for statistic, total in self.totals.items():
            total.add_(other.totals[statistic])
        self.tokens += other.tokens

    def seen(
        self, *, routed: bool, held: InputSums | None = None, outputs: tuple[Float32, ...] = (), threads: int = 1
    ) -> LayerInputs:
        """Hand over what was counted, that of `held` among it, to the host; nothing is counted any more."""
        for each in filter(None, (self, held)):
            each.totals = {statistic: total.cpu() for statistic, total in each.totals.items()}
            if InputStatistic.MOMENTS in each.totals:
                mirror(each.totals[InputStatistic.MOMENTS])
        totals = {key: total.numpy() for key, total in self.totals.items()}
        if held is None or not held.tokens or not self.tokens:
            tokens = self.tokens + (held.tokens if held else 0)
            if held is not None and held.tokens:
                totals = {key: total.numpy() for key, total in held.totals.items()}
            return LayerInputs(tokens, routed, totals, None, outputs, threads)
        apart = {key: total.numpy() for key, total in held.totals.items()}
        for key, total in self.totals.items():
            total.add_(held.totals[key])
        return LayerInputs(self.tokens + held.tokens, routed, totals, apart, outputs, threads)


@contextmanager
def refusals(name: str, what: str, *remedies: str) -> Iterator[None]:
    """Say of which linear `name`, and what to do, where its inputs do not allow `what`, which then raises."""
    try:
        yield
    except (ValueError, np.linalg.LinAlgError) as error:
        raise DataError(
            f"{name}: its inputs over the calibration text do not allow {what}: {error}",
            hint=", ".join(("give more, or other, calibration text", *remedies)),
        ) from error


def add_moments(total: Tensor, x: Tensor) -> None:
    """Add Σ x xᵀ of x [tokens, K] to what is on and below the diagonal of `total` [K, K]; above is some of it."""
    if total.is_cpu and _in_pairs():
        _add(total, x, x)
        return
    width = total.shape[1]
    panel = max(SMALLEST_PANEL, -(-width // PANELS))
    for first in range(0, width, panel):
        last = min(first + panel, width)
        total[first:last, :last].addmm_(x[:, first:last].T, x[:, :last])


def _add(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add Σ a bᵀ of a [tokens, M] and b [tokens, N] to `total` [M, N]; where a is b, to its lower triangle."""
    if not (total.is_cpu and _in_pairs()):
        total.addmm_(a.T, b)
        return
    x = b.contiguous().numpy()
    products.add_tokens(total.numpy(), x if a is b else a.contiguous().numpy(), x, threads=torch.get_num_threads())


@cache
def _in_pairs() -> bool:
    """Say whether the CPU rounds factors to bf16, and multiplies by the compiled loops, twice as fast as in fp32.

    With AMX, torch's own products do both.
    """
    return products.has_bf16() and not torch.cpu.get_capabilities().get("amx_bf16")


def mirror(total: Tensor) -> None:
    """Copy what is below the diagonal of `total` [K, K] to where it belongs above it."""
    for first in range(0, len(total), SMALLEST_PANEL):
        last = min(first + SMALLEST_PANEL, len(total))
        total[:first, first:last] = total[first:last, :first].T
        own = total[first:last, first:last]
        own.copy_(own.tril() + own.tril(-1).T)
